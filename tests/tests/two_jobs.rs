//! The promise: programs that do not fit together run together, and nobody's bytes change.

use std::time::Duration;

use ebb_tests::{Options, Reply, Stage, eventually, ledger_of};
use ebb_units::Bytes;

#[test]
fn a_second_program_takes_the_memory_of_an_idle_one_and_both_keep_their_data() {
    let stage = Stage::new(Options::default());
    let mut first = stage.run(&["--name", "first"]);
    first.hold("a", Bytes::mib(180), 1);
    let mut second = stage.run(&["--name", "second"]);
    second.hold("b", Bytes::mib(180), 2);
    assert!(
        ledger_of(&stage.snapshot()) <= Bytes::mib(256),
        "the ledger stays within the card"
    );
    assert_eq!(first.wrong("a", 1), 0);
    assert_eq!(second.wrong("b", 2), 0);
    assert_eq!(first.wrong("a", 1), 0);
    let snapshot = stage.snapshot();
    assert!(
        snapshot.totals.releases >= 2,
        "memory changed hands: {:?}",
        snapshot.totals
    );
    assert!(first.finish().success());
    assert!(second.finish().success());
    stage.wait_until_empty();
}

#[test]
fn only_as_many_bytes_move_as_are_needed() {
    let stage = Stage::new(Options::default());
    let mut first = stage.run(&[]);
    for (i, name) in ["a", "b", "c", "d", "e", "f"].iter().enumerate() {
        first.hold(name, Bytes::mib(32), i as u64);
    }
    let mut second = stage.run(&[]);
    second.hold("x", Bytes::mib(64), 9);
    let moved = stage.snapshot().totals.out_bytes;
    assert!(
        moved <= Bytes::mib(64),
        "192 + 64 MiB on 256 MiB less two contexts: {moved} moved, 64 MiB would do"
    );
    assert_eq!(second.wrong("x", 9), 0);
    for (i, name) in ["a", "b", "c", "d", "e", "f"].iter().enumerate() {
        assert_eq!(first.wrong(name, i as u64), 0, "{name}");
    }
}

#[test]
fn two_active_programs_alternate_and_neither_starves() {
    let stage = Stage::new(Options {
        config: "[policy]\nmin_turn = \"100ms\"\n".into(),
        ..Options::default()
    });
    let mut programs = [stage.run(&["--name", "even"]), stage.run(&["--name", "odd"])];
    for (i, program) in programs.iter_mut().enumerate() {
        program.send(&format!("alloc m {}", 180 << 20));
        program.send(&format!("fill m {i}"));
        for _ in 0..40 {
            program.send(&format!("check m {i}"));
        }
    }
    for program in &mut programs {
        assert!(
            matches!(program.answer(), Reply::Ok(_)),
            "the allocation waits instead of failing"
        );
        assert!(matches!(program.answer(), Reply::Ok(_)));
        for _ in 0..40 {
            assert_eq!(
                program.answer(),
                Reply::Ok("0".into()),
                "every word is right after every change of hands"
            );
        }
    }
}

#[test]
fn an_idle_programs_memory_leaves_by_itself_and_returns_on_touch() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--idle-release", "200ms"]);
    program.hold("a", Bytes::mib(100), 5);
    eventually("the idle program's bytes are off the card", || {
        let snapshot = stage.snapshot();
        if ledger_of(&snapshot).is_zero() {
            Ok(())
        } else {
            Err(format!("{snapshot:?}"))
        }
    });
    // Calls that need no memory do not bring it back (bug 62).
    for _ in 0..20 {
        program.ok("info");
        program.ok("query");
        program.ok("sync");
        program.ok("total");
    }
    assert!(
        ledger_of(&stage.snapshot()).is_zero(),
        "a health check restores nothing"
    );
    assert_eq!(program.wrong("a", 5), 0);
}

#[test]
fn pause_takes_everything_and_resume_gives_it_back() {
    use ebb_protocol::control::{Answer, Request};
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "p"]);
    program.hold("a", Bytes::mib(64), 3);
    let paused = stage.ask(&Request::Pause {
        task: "p".into(),
        wait_ms: Some(20_000),
    });
    assert!(matches!(paused, Answer::Ok(_)), "{paused:?}");
    assert!(ledger_of(&stage.snapshot()).is_zero());
    program.send("check a 3");
    assert_eq!(
        program.poll(Duration::from_millis(300)),
        None,
        "a paused program waits at its next touch"
    );
    let resumed = stage.ask(&Request::Resume { task: "p".into() });
    assert!(matches!(resumed, Answer::Ok(_)), "{resumed:?}");
    assert_eq!(program.answer(), Reply::Ok("0".into()));
}

#[test]
fn graphs_and_copies_work_across_releases() {
    use ebb_protocol::control::{Answer, Request};
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "g"]);
    program.ok(&format!("alloc a {}", 8 << 20));
    for round in 0..5 {
        program.ok(&format!("graph a {round}"));
        assert!(matches!(
            stage.ask(&Request::Pause {
                task: "g".into(),
                wait_ms: Some(20_000)
            }),
            Answer::Ok(_)
        ));
        assert!(matches!(
            stage.ask(&Request::Resume { task: "g".into() }),
            Answer::Ok(_)
        ));
        assert_eq!(program.wrong("a", round), 0, "round {round}");
        program.ok(&format!("write a {round}"));
        assert!(matches!(
            stage.ask(&Request::Pause {
                task: "g".into(),
                wait_ms: Some(20_000)
            }),
            Answer::Ok(_)
        ));
        assert!(matches!(
            stage.ask(&Request::Resume { task: "g".into() }),
            Answer::Ok(_)
        ));
        assert_eq!(program.ok(&format!("read a {round}")), vec![0]);
    }
}

/// A notebook holds memory for days; another is started, needs more than is left, and gets it; the first one's next cell finds its variables.
#[test]
fn bug_056_an_idle_notebook_gives_its_memory_and_has_it_back_for_its_next_cell() {
    let stage = Stage::new(Options::default());
    let mut first = stage.run(&["--name", "first"]);
    first.hold("variables", Bytes::mib(40), 1);
    let mut second = stage.run(&["--name", "second"]);
    second.hold("model", Bytes::mib(220), 2);
    assert!(stage.snapshot().totals.releases > 0, "both do not fit");
    assert_eq!(first.wrong("variables", 1), 0, "the next cell");
    assert_eq!(second.wrong("model", 2), 0);
    assert!(first.finish().success() && second.finish().success());
}
