//! What has not changed since it came back leaves without a copy.

use ebb_tests::{Options, Stage};
use ebb_units::Bytes;

const SIZE: Bytes = Bytes::mib(128);

fn moved(stage: &Stage) -> Bytes {
    stage.snapshot().totals.out_bytes
}

#[test]
fn unchanged_memory_is_released_without_a_copy() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "job"]);
    program.hold("a", SIZE, 1);
    stage.release("job");
    let first = moved(&stage);
    assert!(first >= SIZE, "what was never out is copied: {first}");
    for round in 1..4 {
        assert_eq!(program.wrong("a", 1), 0, "round {round}");
        stage.release("job");
        let snapshot = stage.snapshot();
        // The program's counter for wrong words lies in a block of its own.
        assert!(moved(&stage) - first <= Bytes::mib(2 * round), "round {round}");
        assert!(snapshot.devices.iter().all(|device| device.free >= SIZE));
    }
    program.ok("fill a 2");
    stage.release("job");
    assert!(moved(&stage) >= first + SIZE, "what has changed is copied");
    assert_eq!(program.wrong("a", 2), 0);
    assert!(program.finish().success());
    stage.wait_until_empty();
}
