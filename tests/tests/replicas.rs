//! Replicas of one model: what their host copies have alike lies in host memory once, and nobody notices, whoever writes or dies.

use ebb_protocol::control::{Answer, ArenaRow, Request};
use ebb_tests::{Options, Program, Stage, eventually};
use ebb_units::Bytes;

const SIZE: Bytes = Bytes::mib(48);
/// All of it is in common but for what is smaller than a block or lies in other chunks.
const MOST: Bytes = Bytes::mib(46);

fn pause(stage: &Stage, task: &str) {
    let paused = stage.ask(&Request::Pause {
        task: task.into(),
        wait_ms: Some(60_000),
    });
    assert!(matches!(paused, Answer::Ok(_)), "{task}: {paused:?}");
}

fn resume(stage: &Stage, task: &str) {
    let resumed = stage.ask(&Request::Resume { task: task.into() });
    assert!(matches!(resumed, Answer::Ok(_)), "{task}: {resumed:?}");
}

fn name(n: usize) -> String {
    format!("replica{n}")
}

fn replica(stage: &Stage, n: usize, seed: u64) -> Program {
    let mut program = stage.run(&["--name", &name(n)]);
    program.hold("m", SIZE, seed);
    program
}

/// So many programs with the same bytes, off the card.
fn replicas(stage: &Stage, count: usize) -> Vec<Program> {
    (0..count)
        .map(|n| {
            let program = replica(stage, n, 1);
            pause(stage, &name(n));
            program
        })
        .collect()
}

fn until(stage: &Stage, what: &str, ready: impl Fn(&ArenaRow) -> bool) {
    eventually(what, || {
        let arena = stage.snapshot().arena;
        assert!(arena.held <= arena.budget, "{arena:?}");
        ready(&arena).then_some(()).ok_or(format!("{arena:?}"))
    });
}

fn all_in_common(stage: &Stage, count: u64) {
    until(stage, "one copy for all", |arena| {
        arena.common >= MOST
            && arena.spared >= Bytes(MOST.0 * (count - 1))
            && arena.common <= SIZE + Bytes::mib(4)
    });
}

#[test]
fn three_replicas_take_the_host_memory_of_one() {
    let stage = Stage::new(Options::default());
    let mut programs = replicas(&stage, 3);
    all_in_common(&stage, 3);
    let out = stage.snapshot().totals.out_bytes;
    for round in 1..3 {
        for (n, program) in programs.iter_mut().enumerate() {
            resume(&stage, &name(n));
            assert_eq!(program.wrong("m", 1), 0, "replica {n}, round {round}");
        }
        for n in 0..3 {
            pause(&stage, &name(n));
        }
        let more = stage.snapshot().totals.out_bytes - out;
        // The programs' counters of wrong words, in blocks of their own.
        assert!(more <= Bytes::mib(3 * 2 * round), "nothing was written: {more}");
    }
    // It was not written: each has a segment that it uses in part, and one more that it may.
    until(&stage, "the room of their own to go back", |arena| {
        arena.held <= SIZE + Bytes::mib(3 * 16)
    });
    // One of them writes: its own bytes change, and nobody else's.
    resume(&stage, &name(1));
    programs[1].ok("fill m 9");
    pause(&stage, &name(1));
    for (n, program) in programs.iter_mut().enumerate() {
        resume(&stage, &name(n));
        let seed = if n == 1 { 9 } else { 1 };
        assert_eq!(program.wrong("m", seed), 0, "replica {n}");
    }
    for program in programs {
        assert!(program.finish().success());
    }
    stage.wait_until_empty();
    until(&stage, "all of it to be gone", |arena| {
        arena.held.is_zero() && arena.common.is_zero()
    });
}

#[test]
fn more_replicas_are_off_the_card_than_host_memory_has_room_for() {
    // Of their own they would need 240 MiB.
    let stage = Stage::new(Options {
        arena: Bytes::mib(128),
        ..Options::default()
    });
    let mut programs = Vec::new();
    for n in 0..5 {
        let mut program = replica(&stage, n, 1);
        assert_eq!(program.wrong("m", 1), 0);
        programs.push(program);
        pause(&stage, &name(n));
        if n > 0 {
            all_in_common(&stage, n as u64 + 1);
        }
    }
    for (n, program) in programs.iter_mut().enumerate() {
        resume(&stage, &name(n));
        assert_eq!(program.wrong("m", 1), 0, "replica {n}");
        pause(&stage, &name(n));
    }
}

#[test]
fn replicas_that_are_killed_take_nothing_from_the_others() {
    let stage = Stage::new(Options::default());
    let mut programs = replicas(&stage, 2);
    for round in 0..4 {
        let mut victim = replica(&stage, 7, 1);
        if round > 0 {
            pause(&stage, &name(7));
        }
        if round > 1 {
            all_in_common(&stage, 3);
        }
        if round > 2 {
            // On the card again, with a copy in common that is kept.
            resume(&stage, &name(7));
            assert_eq!(victim.wrong("m", 1), 0);
        }
        victim.kill();
        drop(victim);
        for (n, program) in programs.iter_mut().enumerate() {
            resume(&stage, &name(n));
            assert_eq!(program.wrong("m", 1), 0, "replica {n}, round {round}");
            pause(&stage, &name(n));
        }
    }
    all_in_common(&stage, 2);
    // The one whose bytes were copied first is no better than the other.
    programs[0].kill();
    resume(&stage, &name(1));
    assert_eq!(programs[1].wrong("m", 1), 0);
    programs[1].kill();
    drop(programs);
    stage.wait_until_empty();
    until(&stage, "all of it to be gone", |arena| {
        arena.held.is_zero() && arena.common.is_zero()
    });
}

#[test]
fn a_daemon_that_is_killed_at_any_step_takes_no_byte_along() {
    let mut stage = Stage::new(Options::default());
    let mut programs = replicas(&stage, 3);
    for round in 0..6 {
        match round {
            // While it looks, while it compares, while offers are answered.
            0 | 1 => {}
            2 | 3 => until(&stage, "something in common", |arena| !arena.common.is_zero()),
            _ => all_in_common(&stage, 3),
        }
        let before = stage.snapshot().arena.common;
        stage.kill_daemon();
        if round % 2 == 1 {
            // Without a daemon.
            assert_eq!(programs[0].wrong("m", 1), 0, "round {round}");
        }
        stage.start_daemon();
        if round >= 4 {
            until(&stage, "the new daemon to hear of it", |arena| {
                arena.common >= before
            });
        }
        for (n, program) in programs.iter_mut().enumerate() {
            eventually("it to be known", || {
                let known = stage.snapshot().tasks.iter().any(|task| task.name == name(n));
                known.then_some(()).ok_or("not yet".to_string())
            });
            resume(&stage, &name(n));
            assert_eq!(program.wrong("m", 1), 0, "replica {n}, round {round}");
            // What is in common stays so only if nobody wrote it.
            if round % 3 == 2 && n == 0 {
                program.ok("fill m 1");
            }
        }
        for n in 0..3 {
            pause(&stage, &name(n));
        }
    }
    all_in_common(&stage, 3);
    for (n, program) in programs.iter_mut().enumerate() {
        resume(&stage, &name(n));
        assert_eq!(program.wrong("m", 1), 0, "replica {n}");
    }
    drop(programs);
    stage.wait_until_empty();
    until(&stage, "all of it to be gone", |arena| {
        arena.held.is_zero() && arena.common.is_zero()
    });
}

#[test]
fn kept_copies_in_common_give_way_to_who_needs_the_room() {
    let stage = Stage::new(Options {
        arena: Bytes::mib(128),
        ..Options::default()
    });
    let mut programs = replicas(&stage, 1);
    programs.push(replica(&stage, 1, 1));
    pause(&stage, &name(1));
    all_in_common(&stage, 2);
    for (n, program) in programs.iter_mut().enumerate() {
        resume(&stage, &name(n));
        assert_eq!(program.wrong("m", 1), 0);
    }
    // The copies are only kept now. Another program needs all there is.
    let mut large = stage.run(&["--name", "large"]);
    large.hold("m", Bytes::mib(104), 5);
    pause(&stage, "large");
    for program in &mut programs {
        assert_eq!(program.wrong("m", 1), 0);
    }
    resume(&stage, "large");
    assert_eq!(large.wrong("m", 5), 0);
}

#[test]
fn switched_off_every_replica_has_its_own() {
    let stage = Stage::new(Options {
        share: false,
        ..Options::default()
    });
    let mut programs = replicas(&stage, 2);
    let arena = stage.snapshot().arena;
    assert_eq!((arena.common, arena.spared), (Bytes::ZERO, Bytes::ZERO));
    assert!(arena.held >= Bytes(2 * SIZE.0), "{arena:?}");
    for (n, program) in programs.iter_mut().enumerate() {
        resume(&stage, &name(n));
        assert_eq!(program.wrong("m", 1), 0);
    }
}
