//! Hibernated programs: nothing of them is on the card, and they go on as if nothing had been.

use std::path::PathBuf;

use ebb_protocol::control::{Answer, Failure, Payload, ProcessRow, Request};
use ebb_tests::{Options, Program, Reply, Stage, eventually};
use ebb_units::Bytes;

fn hibernate(stage: &Stage, task: &str) -> Result<String, Failure> {
    stage.hibernate(task)
}

fn resume(stage: &Stage, task: &str) {
    let answer = stage.ask(&Request::Resume { task: task.into() });
    assert!(matches!(answer, Answer::Ok(_)), "{answer:?}");
}

fn row(stage: &Stage, task: &str) -> ProcessRow {
    let snapshot = stage.snapshot();
    let task = snapshot.tasks.iter().find(|row| row.name == task);
    let task = task.unwrap_or_else(|| panic!("no such task: {snapshot:?}"));
    task.processes
        .first()
        .cloned()
        .unwrap_or_else(|| panic!("no process: {snapshot:?}"))
}

fn await_state(stage: &Stage, task: &str, state: &str) {
    eventually(&format!("{task} is {state}"), || {
        let snapshot = stage.snapshot();
        let row = snapshot.tasks.iter().find(|row| row.name == task);
        match row.and_then(|row| row.processes.first()) {
            Some(process) if process.state == state => Ok(()),
            _ => Err(format!("{snapshot:?}")),
        }
    });
}

fn used(stage: &Stage) -> u64 {
    stage.used()
}

#[test]
fn nothing_is_left_on_the_card_and_the_next_touch_has_every_byte() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "a"]);
    program.hold("m", Bytes::mib(96), 7);
    assert_eq!(program.wrong("m", 7), 0);
    assert!(used(&stage) >= (96 << 20));
    for round in 0..3 {
        let said = hibernate(&stage, "a").unwrap();
        assert!(said.contains("nothing of it is on a card"), "{said}");
        assert_eq!(used(&stage), 0, "round {round}");
        let snapshot = stage.snapshot();
        let held: Bytes = snapshot.devices.iter().map(|d| d.leased + d.overhead).sum();
        assert_eq!(held, Bytes::ZERO, "{snapshot:?}");
        let row = row(&stage, "a");
        assert_eq!((row.state.as_str(), row.overhead), ("hibernated", Bytes::ZERO));
        assert_eq!(program.wrong("m", 7), 0, "round {round}");
        await_state(&stage, "a", "active");
    }
    assert!(hibernate(&stage, "a").is_ok());
    resume(&stage, "a");
    assert_eq!(program.wrong("m", 7), 0);
    // A call that touches nothing wakes it, too: the driver would not answer it.
    for call in ["sync", "query", "info", "range m"] {
        hibernate(&stage, "a").unwrap();
        assert!(matches!(program.say(call), Reply::Ok(_)), "{call}");
    }
    assert_eq!(program.wrong("m", 7), 0);
    assert!(program.finish().success());
    stage.wait_until_empty();
}

#[test]
fn what_cannot_be_checkpointed_is_said_beforehand_and_goes_on() {
    let stage = Stage::new(Options::default());
    let nobody = hibernate(&stage, "a").unwrap_err();
    assert!(nobody.message.contains("no task"), "{nobody}");
    let mut program = stage.run(&["--name", "a"]);
    program.hold("m", Bytes::mib(16), 3);
    program.ok("dmabuf m 2097152");
    let pinned = hibernate(&stage, "a").unwrap_err();
    assert!(pinned.message.contains("dma-buf"), "{pinned}");
    let pid = program.pid();
    let Answer::Ok(Payload::Doctor { report, .. }) = stage.ask(&Request::Doctor { pid }) else {
        panic!("no report");
    };
    let report = report.expect("a report");
    assert_eq!(report["hibernate"]["possible"], false, "{report}");
    assert_eq!(row(&stage, "a").evicted, Bytes::ZERO, "nothing was begun");
    assert_eq!(program.wrong("m", 3), 0);
}

#[test]
fn bug_082_a_restore_waits_for_room_and_does_not_wedge() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "a", "--idle-release", "off"]);
    program.hold("m", Bytes::mib(128), 7);
    hibernate(&stage, "a").unwrap();
    // Nobody gives way: it is busy.
    let mut other = stage.run(&["--name", "b", "--priority", "high"]);
    other.hold("m", Bytes::mib(200), 8);
    let paused = stage.ask(&Request::Limit {
        task: "a".into(),
        limit: Some(Bytes::mib(64)),
        request: None,
        priority: None,
    });
    assert!(
        matches!(paused, Answer::Error(_)),
        "below what is live: {paused:?}"
    );
    for round in 0..3 {
        program.send("check m 7");
        assert_eq!(other.wrong("m", 8), 0, "round {round}");
        assert_eq!(program.answer(), Reply::Ok("0".into()), "round {round}");
        hibernate(&stage, "a").unwrap();
    }
    assert_eq!(other.wrong("m", 8), 0);
}

#[test]
fn a_paused_task_stays_away_until_it_is_resumed() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "a"]);
    program.hold("m", Bytes::mib(32), 7);
    let wait_ms = Some(20_000);
    let paused = stage.ask(&Request::Pause {
        task: "a".into(),
        wait_ms,
    });
    assert!(matches!(paused, Answer::Ok(_)), "{paused:?}");
    program.send("launch m 8");
    hibernate(&stage, "a").unwrap();
    eventually("the program's thread is noticed", || {
        let row = row(&stage, "a");
        if row.why.contains("a thread of it waits") {
            Ok(())
        } else {
            Err(format!("{row:?}"))
        }
    });
    assert_eq!(used(&stage), 0);
    resume(&stage, "a");
    assert_eq!(program.answer(), Reply::Ok(String::new()));
    assert_eq!(program.wrong("m", 8), 0);
}

#[test]
fn an_idle_task_is_hibernated_unasked() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&[
        "--name",
        "a",
        "--idle-release",
        "1s",
        "--hibernate-after",
        "500ms",
    ]);
    program.hold("m", Bytes::mib(32), 7);
    await_state(&stage, "a", "hibernated");
    assert_eq!(used(&stage), 0);
    assert_eq!(program.wrong("m", 7), 0);
}

/// A daemon whose helper's calls fail.
fn stage_with(fault: &str) -> Stage {
    let mut stage = Stage::without_daemon(Options::default());
    stage.start_daemon_with(&[("EBB_SIM_FAULT", fault)]);
    stage
}

#[test]
fn bug_083_085_a_driver_that_refuses_at_any_step_costs_nothing() {
    for (fault, sleeps) in [
        ("cuInit:1:999", false),
        ("cuCheckpointProcessGetState:1:999", false),
        ("cuCheckpointProcessGetState:2:999", false),
        ("cuCheckpointProcessLock:1:801", false),
        ("cuCheckpointProcessCheckpoint:1:801", false),
        ("cuCheckpointProcessCheckpoint:1:999", false),
        ("cuCheckpointProcessRestore:1:2", true),
        ("cuCheckpointProcessUnlock:1:999", true),
    ] {
        let stage = stage_with(fault);
        let mut program = stage.run(&["--name", "a"]);
        program.hold("m", Bytes::mib(32), 7);
        let said = hibernate(&stage, "a");
        assert_eq!(said.is_ok(), sleeps, "{fault}: {said:?}");
        // Whatever became of it, the program goes on with every byte; a restore is tried again.
        assert_eq!(program.wrong("m", 7), 0, "{fault}");
        assert!(program.finish().success(), "{fault}");
        stage.wait_until_empty();
    }
}

#[test]
fn a_helper_that_dies_at_any_step_is_replaced() {
    for (fault, sleeps) in [
        ("cuCheckpointProcessLock:1:kill", false),
        ("cuCheckpointProcessCheckpoint:1:kill", false),
        ("cuCheckpointProcessRestore:1:kill", true),
        ("cuCheckpointProcessUnlock:1:kill", true),
    ] {
        let stage = stage_with(fault);
        let mut program = stage.run(&["--name", "a"]);
        program.hold("m", Bytes::mib(32), 7);
        let said = hibernate(&stage, "a");
        assert_eq!(said.is_ok(), sleeps, "{fault}: {said:?}");
        // The next helper has the same fault, at its first use of the call: only what needs no second use gets on.
        if !sleeps {
            assert_eq!(program.wrong("m", 7), 0, "{fault}");
            assert!(program.finish().success(), "{fault}");
            stage.wait_until_empty();
        }
    }
}

#[test]
fn a_program_killed_in_its_sleep_leaves_nothing() {
    let stage = Stage::new(Options::default());
    for wanted in [false, true] {
        let mut program = stage.run(&["--name", "a"]);
        program.hold("m", Bytes::mib(64), 7);
        hibernate(&stage, "a").unwrap();
        if wanted {
            program.send("check m 7");
        }
        program.kill();
        stage.wait_until_empty();
        assert_eq!(used(&stage), 0);
    }
}

#[test]
fn a_daemon_killed_meanwhile_is_not_missed() {
    let mut stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "a"]);
    program.hold("m", Bytes::mib(64), 7);
    // The next daemon knows that it sleeps.
    hibernate(&stage, "a").unwrap();
    stage.kill_daemon();
    stage.start_daemon();
    await_state(&stage, "a", "hibernated");
    assert_eq!(used(&stage), 0);
    assert_eq!(program.wrong("m", 7), 0);
    // Without a daemon it wakes by itself.
    hibernate(&stage, "a").unwrap();
    stage.kill_daemon();
    assert_eq!(program.wrong("m", 7), 0);
    stage.start_daemon();
    assert_eq!(program.wrong("m", 7), 0);
    assert!(program.finish().success());
    stage.wait_until_empty();
}

/// A daemon whose helper hangs in a call for a while, and dies meanwhile. What the helper began it finishes by itself.
fn daemon_killed_in(call: &str, sleeps_first: bool) {
    let mut stage = Stage::without_daemon(Options::default());
    let fault = format!("{call}:1:hang=1500");
    stage.start_daemon_with(&[("EBB_SIM_FAULT", &fault)]);
    let mut program = stage.run(&["--name", "a"]);
    program.hold("m", Bytes::mib(32), 7);
    if sleeps_first {
        hibernate(&stage, "a").unwrap();
        program.send("check m 7");
        await_state(&stage, "a", "waking");
    } else {
        stage.send(&Request::Hibernate {
            task: "a".into(),
            wait_ms: Some(20_000),
        });
        // The helper is at it, or about to be: both are points that a daemon may die at.
        eventually("the daemon is at it", || match row(&stage, "a").state.as_str() {
            "hibernating" => Ok(()),
            other => Err(other.to_owned()),
        });
    }
    stage.kill_daemon();
    stage.start_daemon();
    if !sleeps_first {
        program.send("check m 7");
    }
    assert_eq!(program.answer(), Reply::Ok("0".into()), "{call}");
    // It can be done, and undone, with the new daemon.
    eventually("the new daemon knows it", || {
        let snapshot = stage.snapshot();
        let row = snapshot.tasks.iter().find(|row| row.name == "a");
        let process = row.and_then(|row| row.processes.first());
        match process.and_then(|process| process.device) {
            Some(_) => Ok(()),
            None => Err(format!("{snapshot:?}")),
        }
    });
    hibernate(&stage, "a").unwrap();
    assert_eq!(program.wrong("m", 7), 0, "{call}");
    assert!(program.finish().success(), "{call}");
    stage.wait_until_empty();
}

#[test]
fn a_daemon_killed_amid_a_hibernation_is_not_missed() {
    daemon_killed_in("cuCheckpointProcessLock", false);
    daemon_killed_in("cuCheckpointProcessCheckpoint", false);
}

#[test]
fn a_daemon_killed_while_it_wakes_a_program_is_not_missed() {
    daemon_killed_in("cuCheckpointProcessRestore", true);
    daemon_killed_in("cuCheckpointProcessUnlock", true);
}

/// A program with children that use the GPU, all in one task.
fn team(stage: &Stage) -> Vec<Program> {
    let first = stage.task("team", Bytes::ZERO, None, ebb_units::Priority::Normal);
    (0..3)
        .map(|seed| {
            let mut program = stage.run_in_task(&first);
            program.hold("m", Bytes::mib(24), seed);
            program
        })
        .collect()
}

#[test]
fn bug_086_a_task_is_away_when_its_slowest_process_is() {
    let stage = Stage::new(Options::default());
    let mut team = team(&stage);
    hibernate(&stage, "team").unwrap();
    assert_eq!(used(&stage), 0);
    for (seed, program) in team.iter_mut().enumerate() {
        assert_eq!(program.wrong("m", seed as u64), 0);
    }
    // One that cannot keeps all.
    team[2].ok("dmabuf m 2097152");
    let refused = hibernate(&stage, "team").unwrap_err();
    assert!(refused.message.contains("dma-buf"), "{refused}");
    for (seed, program) in team.iter_mut().enumerate() {
        assert_eq!(program.wrong("m", seed as u64), 0);
    }
}

#[test]
fn a_team_whose_last_member_is_refused_is_undone() {
    for fault in [
        "cuCheckpointProcessLock:3:801",
        "cuCheckpointProcessCheckpoint:3:801",
    ] {
        let stage = stage_with(fault);
        let mut team = team(&stage);
        let refused = hibernate(&stage, "team").unwrap_err();
        assert!(refused.message.contains("801"), "{fault}: {refused}");
        for (seed, program) in team.iter_mut().enumerate() {
            assert_eq!(program.wrong("m", seed as u64), 0, "{fault}");
        }
    }
}

#[test]
fn a_helper_that_is_not_there_is_said() {
    let mut stage = Stage::without_daemon(Options::default());
    let empty = stage.folder().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let none = PathBuf::from(&empty);
    stage.start_daemon_with(&[("LD_LIBRARY_PATH", none.to_str().unwrap())]);
    let mut program = stage.run(&["--name", "a"]);
    program.hold("m", Bytes::mib(16), 7);
    let refused = hibernate(&stage, "a").unwrap_err();
    assert!(refused.message.contains("libcuda.so.1"), "{refused}");
    assert_eq!(program.wrong("m", 7), 0);
}
