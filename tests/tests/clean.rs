//! What has not changed since it came back leaves without a copy.

use ebb_tests::{Effect, Options, Stage, Step, ledger_of};
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

/// The card's memory, a program that is killed at a step of a release without copies, and one that must not notice.
#[test]
fn a_program_killed_at_any_step_of_a_release_without_copies_harms_nobody() {
    let stage = Stage::new(Options::default());
    let mut other = stage.run(&["--name", "other"]);
    other.hold("m", Bytes::mib(32), 9);
    stage.release("other");
    assert_eq!(other.wrong("m", 9), 0);
    let before = ledger_of(&stage.snapshot());
    for call in [
        "cuLaunchKernel",
        "cuStreamSynchronize",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemcpyHtoDAsync_v2",
    ] {
        for n in [1, 2, 3, 4, 6] {
            let fault = Step::new(call, n).fault(Effect::Dies);
            let mut victim = stage.run_with_env(&["--name", "victim"], &[("EBB_SIM_FAULT", &fault)]);
            victim.hear_out(&[format!("alloc a {}", 24 << 20), "fill a 1".into()]);
            // Out with a copy, back, and out again without one.
            for _ in 0..2 {
                stage.out_and_back("victim");
                victim.hear_out(&["check a 1".into()]);
            }
            victim.kill();
            stage.wait_for_ledger(&format!("what it held is free: {fault}"), before);
            stage.release("other");
            assert_eq!(other.wrong("m", 9), 0, "{fault}");
        }
    }
}

/// Every call of such a release fails at some use: what was not dropped is copied or stays, and is whole.
#[test]
fn any_failing_call_of_a_release_without_copies_loses_nothing() {
    let stage = Stage::new(Options::default());
    for call in [
        "cuLaunchKernel",
        "cuStreamSynchronize",
        "cuModuleLoadData",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemcpyDtoHAsync_v2",
    ] {
        for n in 1..=5 {
            let fault = Step::new(call, n).fault(Effect::Fails(999));
            let mut program = stage.run_with_env(&["--name", "f"], &[("EBB_SIM_FAULT", &fault)]);
            let said = [format!("alloc a {}", 24 << 20), "fill a 1".into()].map(|line| program.say(&line));
            if said.iter().any(|reply| matches!(reply, ebb_tests::Reply::Err(_))) {
                // The program's own call was the one.
                continue;
            }
            for round in 0..3 {
                stage.out_and_back("f");
                let when = format!("{fault}, round {round}");
                assert_eq!(program.in_the_end("check a 1", 4, &when), "0", "{when}");
            }
            drop(program);
        }
    }
    stage.wait_until_empty();
}
