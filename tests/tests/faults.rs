//! Driver calls that fail in the middle of a release or a restore. The program goes on with its data, or gets the
//! driver's own error; it never loses a byte.

use ebb_protocol::control::{Answer, Request};
use ebb_tests::{Options, Reply, Stage};
use ebb_units::Bytes;

const CALLS: [&str; 12] = [
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemHostRegister_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuCtxSynchronize",
];

/// One program through release and restore with one fault; what it says at the end.
fn run_with(stage: &Stage, fault: &str) {
    let mut program = stage.run_with_env(&["--name", "f"], &[("EBB_SIM_FAULT", fault)]);
    let mut held = Vec::new();
    for (i, name) in ["a", "b", "c"].iter().enumerate() {
        match program.say(&format!("alloc {name} {}", 6 << 20)) {
            Reply::Ok(_) => {
                if matches!(program.say(&format!("write {name} {i}")), Reply::Ok(_)) {
                    held.push((*name, i));
                }
            }
            Reply::Err(_) => {} // the driver's own error, told to the program
        }
    }
    for _ in 0..3 {
        let _ = stage.ask(&Request::Pause {
            task: "f".into(),
            wait_ms: Some(3_000),
        });
        let resumed = stage.ask(&Request::Resume { task: "f".into() });
        assert!(matches!(resumed, Answer::Ok(_)), "{fault}: {resumed:?}");
        for (name, i) in &held {
            let mut tries = 0;
            loop {
                match program.say(&format!("read {name} {i}")) {
                    Reply::Ok(wrong) => {
                        assert_eq!(wrong, "0", "{fault}: {name} changed");
                        break;
                    }
                    // A call of the program's own that was told to fail; the next one goes through.
                    Reply::Err(code) => assert!(tries < 3, "{fault}: {name} cannot be read: {code}"),
                }
                tries += 1;
            }
        }
    }
    for (name, _) in &held {
        let _ = program.say(&format!("free {name}"));
    }
    drop(program);
}

#[test]
fn every_call_of_release_and_restore_failing_at_every_use_loses_nothing() {
    // A fault is mostly waited out (by the daemon, before it asks again), so several daemons wait at once.
    std::thread::scope(|threads| {
        for calls in CALLS.chunks(3) {
            threads.spawn(move || {
                let stage = Stage::new(Options {
                    card: Bytes::mib(128),
                    ..Options::default()
                });
                for call in calls {
                    for n in 1..=6 {
                        run_with(&stage, &format!("{call}:{n}:999"));
                    }
                }
                stage.wait_until_empty();
            });
        }
    });
}

#[test]
fn bug_083_no_room_in_the_middle_of_a_restore_is_tried_again() {
    let stage = Stage::new(Options {
        card: Bytes::mib(128),
        ..Options::default()
    });
    for n in 1..=8 {
        run_with(&stage, &format!("cuMemCreate:{n}:2"));
    }
    stage.wait_until_empty();
}
