//! Programs and daemons that die, at every point that a test can name.

use ebb_protocol::control::{Answer, Request};
use ebb_tests::{Options, Program, Stage, eventually, ledger_of};
use ebb_units::Bytes;

/// Four programs that keep working; `check` says that none of them noticed anything.
struct Others(Vec<Program>);

impl Others {
    fn start(stage: &Stage) -> Self {
        Self(
            (0..4)
                .map(|i| {
                    let mut program = stage.run(&["--name", &format!("other{i}")]);
                    program.hold("m", Bytes::mib(16), i);
                    program
                })
                .collect(),
        )
    }

    fn check(&mut self, when: &str) {
        for (i, program) in self.0.iter_mut().enumerate() {
            assert_eq!(program.wrong("m", i as u64), 0, "program {i} {when}");
        }
    }
}

fn wait_for_ledger(stage: &Stage, what: &str, at_most: Bytes) {
    eventually(what, || {
        let snapshot = stage.snapshot();
        let held = ledger_of(&snapshot);
        if held <= at_most {
            Ok(())
        } else {
            Err(format!("{held} leased: {snapshot:#?}"))
        }
    });
}

#[test]
fn a_killed_program_leaves_nothing_in_the_ledger_and_the_others_work_on() {
    let stage = Stage::new(Options::default());
    let mut others = Others::start(&stage);
    others.check("at first"); // which also makes the small block that a check needs
    let before = ledger_of(&stage.snapshot());
    // Killed while resident, while released, while waiting at the gate, and right after its first call.
    for how in ["resident", "released", "waiting", "new"] {
        let mut victim = stage.run(&["--name", "victim"]);
        if how == "new" {
            victim.send("open");
        } else {
            victim.hold("v", Bytes::mib(64), 7);
        }
        if matches!(how, "released" | "waiting") {
            let paused = stage.ask(&Request::Pause {
                task: "victim".into(),
                wait_ms: Some(20_000),
            });
            assert!(matches!(paused, Answer::Ok(_)), "{paused:?}");
        }
        if how == "waiting" {
            victim.send("check v 7");
            eventually("the victim waits", || {
                let snapshot = stage.snapshot();
                let text = format!("{snapshot:?}");
                let row = snapshot.tasks.iter().find(|t| t.name == "victim");
                let state = row.and_then(|t| t.processes.first()).map(|p| p.state.clone());
                if state.is_some() { Ok(()) } else { Err(text) }
            });
        }
        victim.kill();
        wait_for_ledger(&stage, &format!("a victim killed while {how} is gone"), before);
        eventually("its task is gone", || {
            let left = stage
                .snapshot()
                .tasks
                .iter()
                .filter(|t| t.name == "victim")
                .count();
            if left == 0 {
                Ok(())
            } else {
                Err(format!("{left} tasks"))
            }
        });
        others.check(how);
    }
}

#[test]
fn a_program_killed_in_any_call_of_a_release_or_restore_harms_nobody() {
    let stage = Stage::new(Options::default());
    let mut others = Others::start(&stage);
    others.check("at first"); // which also makes the small block that a check needs
    let before = ledger_of(&stage.snapshot());
    for call in [
        "cuMemcpyDtoHAsync_v2",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemcpyHtoDAsync_v2",
        "cuCtxSynchronize",
    ] {
        for n in [1, 3] {
            let fault = format!("{call}:{n}:kill");
            let mut victim = stage.run_with_env(&["--name", "victim"], &[("EBB_SIM_FAULT", &fault)]);
            victim.send(&format!("alloc a {}", 24 << 20));
            victim.send(&format!("alloc b {}", 24 << 20));
            victim.send("fill a 1");
            let _ = (
                victim.poll(ebb_tests::PATIENCE),
                victim.poll(ebb_tests::PATIENCE),
                victim.poll(ebb_tests::PATIENCE),
            );
            // Whatever the program's fate, these must answer.
            let _ = stage.ask(&Request::Pause {
                task: "victim".into(),
                wait_ms: Some(5_000),
            });
            let _ = stage.ask(&Request::Resume {
                task: "victim".into(),
            });
            victim.send("check a 1");
            let _ = victim.poll(ebb_tests::PATIENCE);
            victim.kill();
            wait_for_ledger(&stage, &fault, before);
            others.check(&fault);
        }
    }
}

#[test]
fn bug_124_the_daemon_dies_and_returns_and_nobody_notices() {
    let mut stage = Stage::new(Options {
        card: Bytes::mib(512), // everything fits: nobody needs the daemon while it is dead
        ..Options::default()
    });
    let mut programs: Vec<Program> = (0..20)
        .map(|i| stage.run(&["--name", &format!("p{i}"), "--limit", "64Mi"]))
        .collect();
    for (i, program) in programs.iter_mut().enumerate() {
        program.hold("m", Bytes::mib(8), i as u64);
        assert_eq!(program.wrong("m", i as u64), 0); // makes the small block that a check needs
    }
    let before = stage.snapshot();
    for round in 0..3 {
        // Under load: each has a command in flight when the daemon dies.
        for (i, program) in programs.iter_mut().enumerate() {
            program.send(&format!("check m {i}"));
        }
        stage.kill_daemon();
        for (i, program) in programs.iter_mut().enumerate() {
            assert_eq!(
                program.answer(),
                ebb_tests::Reply::Ok("0".into()),
                "program {i}, round {round}, daemon dead"
            );
            assert_eq!(program.wrong("m", i as u64), 0);
        }
        stage.start_daemon();
        eventually("every program has declared itself again", || {
            let snapshot = stage.snapshot();
            let (then, now) = (ledger_of(&before), ledger_of(&snapshot));
            let tasks = snapshot.tasks.len();
            if now == then && tasks == 20 {
                Ok(())
            } else {
                Err(format!("{now} of {then}, {tasks} tasks: {}", stage.daemon_log()))
            }
        });
        // Limits survive.
        assert!(
            stage
                .snapshot()
                .tasks
                .iter()
                .all(|t| t.limit == Some(Bytes::mib(64))),
            "{:?}",
            stage.snapshot().tasks
        );
    }
    for (i, program) in programs.iter_mut().enumerate() {
        assert_eq!(program.wrong("m", i as u64), 0);
    }
}

#[test]
fn a_daemon_killed_during_releases_loses_no_byte() {
    let mut stage = Stage::new(Options {
        link: 400 << 20,
        ..Options::default()
    });
    let mut a = stage.run(&["--name", "a"]);
    let mut b = stage.run(&["--name", "b"]);
    a.hold("m", Bytes::mib(150), 1);
    b.hold("m", Bytes::mib(150), 2);
    for round in 0..6u64 {
        // A release and a restore are on their way; the daemon dies at a different moment each time.
        a.send("check m 1");
        std::thread::sleep(std::time::Duration::from_millis(20 + 70 * round));
        stage.kill_daemon();
        stage.start_daemon();
        assert_eq!(a.answer(), ebb_tests::Reply::Ok("0".into()), "round {round}");
        assert_eq!(b.wrong("m", 2), 0, "round {round}");
    }
}

#[test]
fn a_program_that_starts_without_a_daemon_runs_as_without_ebb() {
    let mut stage = Stage::without_daemon(Options::default());
    let artefacts = ebb_tests::Artefacts::get();
    let mut command = std::process::Command::new(artefacts.program("gpu-script"));
    stage.gpu_env(&mut command);
    command
        .env("LD_PRELOAD", &artefacts.layer)
        .env("EBB_SOCKET_DIR", stage.socket_dir());
    let mut program = Program::start(command);
    program.hold("a", Bytes::mib(64), 1);
    assert_eq!(program.wrong("a", 1), 0);
    // A daemon that comes later finds it.
    stage.start_daemon();
    eventually("the program has declared itself", || {
        let held = ledger_of(&stage.snapshot());
        if held >= Bytes::mib(64) {
            Ok(())
        } else {
            Err(held.to_string())
        }
    });
    assert_eq!(program.wrong("a", 1), 0);
}

#[test]
fn a_program_that_closes_all_descriptors_keeps_its_memory() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "closer"]);
    program.hold("a", Bytes::mib(32), 1);
    program.ok("closefds");
    assert_eq!(program.wrong("a", 1), 0);
    eventually("it is connected again, or at least accounted for", || {
        let held = ledger_of(&stage.snapshot());
        if held >= Bytes::mib(32) {
            Ok(())
        } else {
            Err(held.to_string())
        }
    });
    program.hold("b", Bytes::mib(32), 2);
    assert_eq!((program.wrong("a", 1), program.wrong("b", 2)), (0, 0));
}

#[test]
fn bug_032_a_forked_child_is_refused_by_the_driver_and_the_parent_works_on() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&[]);
    assert_eq!(
        program.ok("fork"),
        vec![0],
        "a child that initialises by itself works"
    );
    program.hold("a", Bytes::mib(16), 1);
    assert_eq!(
        program.ok("fork"),
        vec![3],
        "after cuInit a child is told NOT_INITIALIZED, as by the driver"
    );
    assert_eq!(program.wrong("a", 1), 0);
    assert!(program.finish().success());
    stage.wait_until_empty();
}
