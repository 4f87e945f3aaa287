//! Clients of MPS: the driver's server maps for all of them, so that giving access costs a millisecond whatever the size, and their
//! contexts cost a share.

use std::path::Path;

use ebb_protocol::control::{Answer, Payload, Request};
use ebb_tests::{Options, Stage};
use ebb_units::Bytes;

fn calls(trace: &Path, name: &str) -> usize {
    let text = std::fs::read_to_string(trace).unwrap_or_default();
    text.lines().filter(|line| *line == name).count()
}

#[test]
fn a_client_of_mps_is_known_and_its_access_is_given_in_few_calls() {
    let stage = Stage::new(Options {
        mps_client: Bytes::mib(24),
        ..Options::default()
    });
    let trace = stage.folder().join("trace");
    let path = trace.display().to_string();
    let mut program = stage.run_with_env(&["--name", "client"], &[("EBB_SIM_TRACE", &path)]);
    // Many chunks: one large allocation, and small ones that share.
    program.hold("m", Bytes::mib(96), 1);
    for number in 0..8 {
        program.hold(&format!("small{number}"), Bytes(100 << 10), number);
    }
    let made = calls(&trace, "cuMemCreate");
    let given = calls(&trace, "cuMemSetAccess");
    assert!(given <= made && given > 0, "{given} for {made} chunks");
    stage.release("client");
    assert_eq!(program.wrong("m", 1), 0);
    for number in 0..8 {
        assert_eq!(program.wrong(&format!("small{number}"), number), 0);
    }
    let again = calls(&trace, "cuMemSetAccess") - given;
    let chunks = calls(&trace, "cuMemCreate") - made;
    assert!(
        again <= 2 * given && again <= chunks,
        "coming back gave access {again} times, for {chunks} chunks and {given} at first"
    );
    let Answer::Ok(Payload::Doctor {
        report: Some(report),
        process,
    }) = stage.ask(&Request::Doctor { pid: program.pid() })
    else {
        panic!("no report");
    };
    assert!(report.to_string().contains("shared through MPS"), "{report}");
    // It was released once: a granule is the library's own, what it tells unchanged memory by.
    assert_eq!(process.overhead, Bytes::mib(26), "a client's context");
}
