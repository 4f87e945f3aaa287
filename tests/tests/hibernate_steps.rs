//! Deaths and failures at every step of a hibernation and of waking from it: of the program, of the daemon, of the driver's calls.

use ebb_protocol::control::Request;
use ebb_tests::{
    Effect, Options, Program, Reply, Stage, Step, Trace, children, eventually, go_on, is_stopped,
    steps_between,
};
use ebb_units::Bytes;

const SIZE: Bytes = Bytes::mib(24);

fn held(stage: &Stage, env: &[(&str, &str)], tries: usize, when: &str) -> Program {
    let mut program = stage.run_with_env(&["--name", "a"], env);
    program.in_the_end(&format!("alloc m {}", SIZE.0), tries, when);
    program.in_the_end("fill m 7", tries, when);
    program.in_the_end("check m 7", tries, when);
    program
}

/// The steps of the program itself: going, and coming back.
fn own_steps(most: u64) -> Vec<Step> {
    let stage = Stage::new(Options::default());
    let trace = Trace::default();
    let mut program = held(&stage, &[("EBB_SIM_TRACE", trace.path())], 0, "rehearsal");
    let before = trace.counts();
    stage.hibernate("a").expect("nothing is in the way");
    assert_eq!(program.wrong("m", 7), 0);
    let steps = steps_between(&before, &trace.counts(), most);
    println!("{} steps: {steps:?}", steps.len());
    assert!(!steps.is_empty());
    steps
}

/// The steps of the helper: all that it calls.
fn helpers_steps() -> Vec<Step> {
    let mut stage = Stage::without_daemon(Options::default());
    let trace = Trace::default();
    stage.start_daemon_with(&[("EBB_SIM_TRACE", trace.path())]);
    let mut program = held(&stage, &[], 0, "rehearsal");
    stage.hibernate("a").expect("nothing is in the way");
    assert_eq!(program.wrong("m", 7), 0);
    let mut steps = steps_between(&Default::default(), &trace.counts(), 3);
    steps.retain(|step| step.call.starts_with("cuCheckpoint") || step.call == "cuInit");
    println!("{} steps: {steps:?}", steps.len());
    assert!(steps.iter().any(|step| step.call == "cuCheckpointProcessUnlock"));
    steps
}

#[test]
fn any_call_of_the_program_failing_on_its_way_costs_nothing() {
    for step in own_steps(2) {
        let fault = step.fault(Effect::Fails(999));
        let stage = Stage::new(Options::default());
        let mut program = held(&stage, &[("EBB_SIM_FAULT", &fault)], 8, &fault);
        for _ in 0..2 {
            // It may be refused; who asked is told so.
            let _ = stage.hibernate("a");
            assert_eq!(program.in_the_end("check m 7", 8, &fault), "0", "{fault}");
        }
        assert!(program.finish().success(), "{fault}");
        stage.wait_until_empty();
    }
}

#[test]
fn a_program_killed_at_any_call_on_its_way_leaves_nothing() {
    let stage = Stage::new(Options::default());
    let (mut died, steps) = (0, own_steps(2));
    for step in &steps {
        let fault = step.fault(Effect::Dies);
        // It may die a step earlier than in the rehearsal.
        let mut program = stage.run_with_env(&["--name", "a"], &[("EBB_SIM_FAULT", &fault)]);
        let check = || "check m 7".to_owned();
        program.hear_out(&[format!("alloc m {}", SIZE.0), "fill m 7".into(), check()]);
        let _ = stage.hibernate("a");
        died += usize::from(!program.hear_out(&[check()]));
        program.kill();
        stage.wait_until_empty();
        assert_eq!(stage.used(), 0, "{fault}");
    }
    assert!(2 * died > steps.len(), "{died} of {}", steps.len());
}

/// The helper stands still at a step of its own; `meanwhile` happens, in which the program's answer may be heard; it goes on.
fn amid(mut meanwhile: impl FnMut(&mut Stage, &mut Program, &str) -> Option<Reply>) {
    let (mut stopped, steps) = (0, helpers_steps());
    for step in &steps {
        let fault = step.fault(Effect::Stops);
        let mut stage = Stage::without_daemon(Options::default());
        stage.start_daemon_with(&[("EBB_SIM_FAULT", &fault)]);
        let mut program = held(&stage, &[], 0, &fault);
        stage.send(&Request::Hibernate {
            task: "a".into(),
            wait_ms: Some(20_000),
        });
        let daemon = stage.daemon_pid();
        let stands = || children(daemon).into_iter().find(|pid| is_stopped(*pid));
        let mut helper = eventually(&format!("the helper stops, or is done: {fault}"), || {
            let snapshot = stage.snapshot();
            let rows = snapshot.tasks.iter().flat_map(|task| &task.processes);
            let asleep = rows.clone().any(|row| row.state == "hibernated");
            match stands() {
                None if !asleep => Err(format!("{snapshot:#?}")),
                found => Ok(found),
            }
        });
        if helper.is_none() {
            program.send("check m 7");
            helper = eventually(&format!("the helper stops, or is done: {fault}"), || {
                let snapshot = stage.snapshot();
                let mut rows = snapshot.tasks.iter().flat_map(|task| &task.processes);
                match stands() {
                    None if !rows.any(|row| row.state == "active") => Err(format!("{snapshot:#?}")),
                    found => Ok(found),
                }
            });
        } else {
            program.send("check m 7");
        }
        stopped += usize::from(helper.is_some());
        let heard = meanwhile(&mut stage, &mut program, &fault);
        helper.into_iter().for_each(go_on);
        if program.runs() {
            println!("{fault}: the helper stood still: {}", helper.is_some());
            let answer = heard.unwrap_or_else(|| program.answer());
            assert_eq!(answer, Reply::Ok("0".into()), "{fault}");
            assert_eq!(program.wrong("m", 7), 0, "{fault}");
        }
        drop(program);
        stage.wait_until_empty();
        assert_eq!(stage.used(), 0, "{fault}");
    }
    println!("stopped at {stopped} of {} steps", steps.len());
    assert!(2 * stopped > steps.len(), "{stopped} of {}", steps.len());
}

#[test]
fn a_program_killed_while_the_driver_is_at_any_step_with_it_leaves_nothing() {
    amid(|_, program, _| {
        program.kill();
        None
    });
}

#[test]
fn a_daemon_killed_while_the_driver_is_at_any_step_is_not_missed() {
    amid(|stage, _, _| {
        stage.kill_daemon();
        stage.start_daemon();
        None
    });
}

/// What a dead daemon's helper had before it is not done to a program that the next daemon has woken.
#[test]
fn a_helper_whose_daemon_died_does_not_go_on_behind_the_back_of_the_next() {
    amid(|stage, program, _| {
        stage.kill_daemon();
        stage.start_daemon();
        Some(program.answer())
    });
}

/// Who passes ebb by has taken the room meanwhile: the program waits, and does not fail.
#[test]
fn waking_waits_for_room_that_a_stranger_took() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "a"]);
    program.ok(&format!("alloc m {}", SIZE.0));
    program.ok("write m 7");
    for round in 0..2 {
        stage.hibernate("a").expect("nothing is in the way");
        let mut stranger = stage.run_plain(&[]);
        stranger.ok(&format!("alloc s {}", Bytes::mib(246).0));
        // Copies by the host: they need no memory beside, which NVML would show as taken a while longer.
        program.send("read m 7");
        eventually("it wants to wake and cannot", || {
            let snapshot = stage.snapshot();
            let mut rows = snapshot.tasks.iter().flat_map(|task| &task.processes);
            match rows.next().map(|row| row.state.as_str()) {
                Some("waking" | "waiting" | "hibernated") => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
        // Whatever is tried meanwhile, nothing is answered yet.
        assert_eq!(
            program.poll(std::time::Duration::from_millis(300)),
            None,
            "round {round}"
        );
        stranger.kill();
        assert_eq!(program.answer(), Reply::Ok("0".into()), "round {round}");
    }
    assert!(program.finish().success());
    stage.wait_until_empty();
}
