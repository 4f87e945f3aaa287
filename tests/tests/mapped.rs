//! Programs that make and map their memory by themselves, with a real daemon.

use ebb_protocol::control::{Answer, Request};
use ebb_tests::{Options, Reply, Stage, ledger_of};
use ebb_units::Bytes;

fn pause(stage: &Stage, task: &str) -> Answer {
    stage.ask(&Request::Pause {
        task: task.into(),
        wait_ms: Some(20_000),
    })
}

fn resume(stage: &Stage, task: &str) {
    let resumed = stage.ask(&Request::Resume { task: task.into() });
    assert!(matches!(resumed, Answer::Ok(_)), "{resumed:?}");
}

/// fzyzcjy/torch_memory_saver#24: a release freed nothing of what the program had mapped by itself.
#[test]
fn bug_077_programs_that_map_their_memory_share_a_card_that_holds_one_of_them() {
    let stage = Stage::new(Options::default());
    let mut programs = [stage.run(&["--name", "mapper"]), stage.run(&["--name", "other"])];
    for (program, seed) in programs.iter_mut().zip(1..) {
        program.ok(&format!("mapalloc m {}", 150 << 20));
        program.ok(&format!("fill m {seed}"));
        program.hold("a", Bytes::mib(30), seed + 10);
        assert!(ledger_of(&stage.snapshot()) <= Bytes::mib(256));
    }
    for _ in 0..3 {
        for (program, seed) in programs.iter_mut().zip(1..) {
            assert_eq!(program.wrong("m", seed), 0);
            assert_eq!(program.wrong("a", seed + 10), 0);
        }
    }
    assert!(stage.snapshot().totals.releases >= 2);
    for program in &mut programs {
        program.ok("mapfree m");
        program.ok("free a");
    }
    for program in programs {
        assert!(program.finish().success());
    }
    stage.wait_until_empty();
}

/// Growing past what there is hears the driver's own code, and what is there already goes on.
#[test]
fn a_limit_counts_what_a_program_maps_itself() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--limit", "64Mi"]);
    program.ok(&format!("mapalloc a {}", 40 << 20));
    program.ok("fill a 1");
    assert_eq!(
        program.say(&format!("mapalloc b {}", 40 << 20)),
        Reply::Err(2),
        "out of memory, as the driver says it"
    );
    assert_eq!(program.wrong("a", 1), 0);
    let before = program.ok("info")[0];
    program.ok(&format!("mapalloc b {}", before & !((2 << 20) - 1)));
    assert_eq!(program.say("mapalloc c 2097152"), Reply::Err(2), "to the granule");
    program.ok("mapfree b");
    assert_eq!(program.wrong("a", 1), 0);
    program.ok("mapfree a");
    assert!(program.finish().success());
    stage.wait_until_empty();
}

/// Each driver call that a release and a restore of such memory make fails at its n-th use.
#[test]
fn faults_in_any_call_lose_nothing() {
    for call in [
        "cuMemcpyDtoHAsync_v2",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemcpyHtoDAsync_v2",
    ] {
        // The first uses are the program's own, which is told of them; these come after.
        for n in [9, 10, 12, 15, 19] {
            let stage = Stage::new(Options::default());
            let fault = format!("{call}:{n}:999");
            let mut program = stage.run_with_env(&["--name", "victim"], &[("EBB_SIM_FAULT", &fault)]);
            program.ok(&format!("mapalloc m {}", 16 << 20));
            program.ok("fill m 3");
            for _ in 0..2 {
                let _ = pause(&stage, "victim");
                resume(&stage, "victim");
                assert_eq!(program.wrong("m", 3), 0, "{fault}");
            }
            let freed = program.say("mapfree m");
            assert!(
                matches!(freed, Reply::Ok(_) | Reply::Err(999)),
                "{fault}: {freed:?}, the driver's own answer at worst"
            );
            let _ = program.finish();
            stage.wait_until_empty();
        }
    }
}

#[test]
fn a_program_killed_while_its_mapped_memory_moves_harms_nobody() {
    let stage = Stage::new(Options::default());
    let mut other = stage.run(&["--name", "other"]);
    other.hold("o", Bytes::mib(64), 5);
    let before = {
        assert_eq!(other.wrong("o", 5), 0);
        ledger_of(&stage.snapshot())
    };
    for call in ["cuMemUnmap", "cuMemRelease", "cuMemCreate", "cuMemSetAccess"] {
        let fault = format!("{call}:10:kill");
        let mut victim = stage.run_with_env(&["--name", "victim"], &[("EBB_SIM_FAULT", &fault)]);
        victim.send(&format!("mapalloc m {}", 16 << 20));
        victim.send("fill m 1");
        let _ = (victim.poll(ebb_tests::PATIENCE), victim.poll(ebb_tests::PATIENCE));
        let _ = pause(&stage, "victim");
        let _ = stage.ask(&Request::Resume {
            task: "victim".into(),
        });
        victim.send("check m 1");
        let _ = victim.poll(ebb_tests::PATIENCE);
        victim.kill();
        ebb_tests::eventually(&fault, || match ledger_of(&stage.snapshot()) {
            now if now == before => Ok(()),
            now => Err(format!("{now} instead of {before}")),
        });
        assert_eq!(other.wrong("o", 5), 0, "{fault}");
    }
}
