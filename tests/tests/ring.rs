//! Host memory of which a ring is pinned and no more: what leaves and comes back through it is whole, whoever dies or fails at whatever step.

use ebb_tests::{Effect, Options, Program, Reply, Stage, Step, ledger_of};
use ebb_units::Bytes;

const SIZE: Bytes = Bytes::mib(48);

fn stage(link: u64) -> Stage {
    Stage::new(Options {
        ring: true,
        link,
        ..Options::default()
    })
}

/// Off the card and back, with every byte.
fn around(stage: &Stage, program: &mut Program, task: &str, seed: u64, what: &str) {
    stage.out_and_back(task);
    assert_eq!(program.wrong("m", seed), 0, "{what}");
}

#[test]
fn memory_leaves_and_comes_back_through_the_ring() {
    let stage = stage(0);
    let mut programs: Vec<Program> = (0..3).map(|i| stage.run(&["--name", &format!("p{i}")])).collect();
    // Together more than the card: each takes the others' place.
    for (i, program) in programs.iter_mut().enumerate() {
        program.hold("m", Bytes::mib(120), i as u64);
    }
    for round in 0..3 {
        for (i, program) in programs.iter_mut().enumerate() {
            assert_eq!(program.wrong("m", i as u64), 0, "program {i}, round {round}");
        }
    }
    for program in programs {
        assert!(program.finish().success());
    }
    stage.wait_until_empty();
}

#[test]
fn every_call_that_fails_at_the_ring_loses_nothing() {
    let stage = stage(0);
    for call in [
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuMemHostRegister_v2",
    ] {
        for n in [1, 2, 5, 9] {
            let fault = Step::new(call, n).fault(Effect::Fails(999));
            let mut program = stage.run_with_env(&["--name", "f"], &[("EBB_SIM_FAULT", &fault)]);
            if !matches!(program.say(&format!("alloc m {}", SIZE.0)), Reply::Ok(_))
                || !matches!(program.say("fill m 3"), Reply::Ok(_))
            {
                // The program's own call was the one.
                continue;
            }
            for _ in 0..3 {
                stage.out_and_back("f");
                assert_eq!(program.in_the_end("check m 3", 4, &fault), "0", "{fault}");
            }
            drop(program);
        }
    }
    stage.wait_until_empty();
}

#[test]
fn a_program_killed_at_any_step_of_the_ring_harms_nobody() {
    let stage = stage(0);
    let mut other = stage.run(&["--name", "other"]);
    other.hold("m", SIZE, 9);
    around(&stage, &mut other, "other", 9, "at first");
    let before = ledger_of(&stage.snapshot());
    for call in [
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuMemUnmap",
        "cuMemCreate",
    ] {
        for n in [1, 4, 9] {
            let fault = Step::new(call, n).fault(Effect::Dies);
            let mut victim = stage.run_with_env(&["--name", "victim"], &[("EBB_SIM_FAULT", &fault)]);
            victim.hear_out(&[format!("alloc m {}", SIZE.0), "fill m 1".into()]);
            stage.out_and_back("victim");
            victim.hear_out(&["check m 1".into()]);
            victim.kill();
            stage.wait_for_ledger(&format!("what it held is free: {fault}"), before);
            around(&stage, &mut other, "other", 9, &fault);
        }
    }
}

#[test]
fn a_daemon_killed_amid_copies_through_the_ring_loses_no_byte() {
    let mut stage = stage(400 << 20);
    let mut a = stage.run(&["--name", "a"]);
    let mut b = stage.run(&["--name", "b"]);
    a.hold("m", Bytes::mib(150), 1);
    b.hold("m", Bytes::mib(150), 2);
    for round in 0..4u64 {
        // A release and a restore are on their way; the daemon dies once some of it has moved.
        let before = stage.snapshot().totals.out_bytes;
        a.send("check m 1");
        ebb_tests::eventually("something moves", || {
            let snapshot = stage.snapshot();
            let moving = snapshot.tasks.iter().flat_map(|task| &task.processes);
            let busy = moving
                .clone()
                .any(|p| matches!(p.state.as_str(), "evicting" | "restoring"));
            if busy || snapshot.totals.out_bytes > before {
                Ok(())
            } else {
                Err(format!("{snapshot:?}"))
            }
        });
        stage.kill_daemon();
        stage.start_daemon();
        assert_eq!(a.answer(), Reply::Ok("0".into()), "round {round}");
        assert_eq!(b.wrong("m", 2), 0, "round {round}");
    }
}
