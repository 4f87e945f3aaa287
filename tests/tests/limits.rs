//! Limits, requests and what a program is told.

use ebb_tests::{Options, Reply, Stage};
use ebb_units::Bytes;

const GRANULE: u64 = 2 << 20;

#[test]
fn the_last_granule_under_the_limit_succeeds_and_the_next_fails() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--limit", "100Mi"]);
    let info = program.ok("info");
    assert_eq!(info[1], 100 << 20, "the card that the program sees is its limit");
    let granules = info[0] / GRANULE;
    for i in 0..granules {
        program.ok(&format!("alloc g{i} {GRANULE}"));
    }
    assert_eq!(program.say(&format!("alloc over {GRANULE}")), Reply::Err(2));
    assert!(program.ok("info")[0] < GRANULE);
    program.ok("free g0");
    program.ok(&format!("alloc again {GRANULE}"));
    assert_eq!(program.say(&format!("alloc over {GRANULE}")), Reply::Err(2));
}

#[test]
fn bug_010_two_processes_of_a_task_cannot_both_take_the_last_bytes() {
    let stage = Stage::new(Options::default());
    let token = stage.task(
        "both",
        Bytes::ZERO,
        Some(Bytes::mib(128)),
        ebb_units::Priority::Normal,
    );
    for _ in 0..20 {
        let mut pair = [0, 1].map(|_| stage_program(&stage, &token));
        for program in &mut pair {
            program.ok("open");
        }
        pair.iter_mut()
            .for_each(|program| program.send(&format!("alloc m {}", 80 << 20)));
        let answers = pair.each_mut().map(|program| program.answer());
        let won = answers
            .iter()
            .filter(|answer| matches!(answer, Reply::Ok(_)))
            .count();
        assert_eq!(won, 1, "80 + 80 MiB under a limit of 128 MiB");
        for program in pair {
            assert!(program.finish().success());
        }
        ebb_tests::eventually("the dead are gone", || {
            let held = ebb_tests::ledger_of(&stage.snapshot());
            if held.is_zero() {
                Ok(())
            } else {
                Err(held.to_string())
            }
        });
    }
}

/// A program in an existing task, as a child of its first process would be.
fn stage_program(stage: &Stage, token: &str) -> ebb_tests::Program {
    let artefacts = ebb_tests::Artefacts::get();
    let mut command = std::process::Command::new(artefacts.program("gpu-script"));
    stage.gpu_env(&mut command);
    command.env("LD_PRELOAD", &artefacts.layer);
    command
        .env("EBB_SOCKET_DIR", stage.socket_dir())
        .env("EBB_TASK_TOKEN", token);
    ebb_tests::Program::start(command)
}

#[test]
fn bug_037_a_limit_below_the_context_answers_zero_free() {
    let stage = Stage::new(Options {
        context: Bytes::mib(32),
        ..Options::default()
    });
    for limit in ["2Mi", "16Mi", "30Mi", "34Mi"] {
        let mut program = stage.run(&["--limit", limit]);
        let info = program.ok("info");
        assert_eq!(info[1], limit.parse::<Bytes>().unwrap().0, "{limit}");
        if limit != "34Mi" {
            assert_eq!(info[0], 0, "{limit}");
        }
        assert_eq!(
            program.say(&format!("alloc m {}", 8 << 20)),
            Reply::Err(2),
            "{limit}"
        );
    }
}

#[test]
fn bug_047_every_surface_tells_the_same_total_and_free() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--limit", "128Mi"]);
    program.hold("a", Bytes::mib(40), 1);
    let info = program.ok("info");
    assert_eq!(program.ok("total")[0], info[1]);
    assert_eq!(info[1], 128 << 20);
    assert!(info[0] <= (128 - 40) << 20);
}

#[test]
fn neighbours_do_not_show() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--limit", "128Mi"]);
    program.hold("a", Bytes::mib(32), 1);
    let before = program.ok("info");
    let mut neighbour = stage.run(&[]);
    neighbour.hold("b", Bytes::mib(100), 2);
    assert_eq!(program.ok("info"), before, "a neighbour came");
    assert!(neighbour.finish().success());
    assert_eq!(program.ok("info"), before, "and went");
}

#[test]
fn bug_014_accounting_follows_many_allocations_and_never_wraps() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--limit", "200Mi"]);
    let start = program.ok("info")[0];
    for round in 0..30u64 {
        for i in 0..12u64 {
            program.ok(&format!(
                "alloc m{i} {}",
                1 + (round * 7919 + i * 104_729) % (9 << 20)
            ));
        }
        for i in 0..12u64 {
            program.ok(&format!("free m{}", (i * 5) % 12));
        }
    }
    assert_eq!(
        program.ok("info")[0],
        start,
        "everything was freed, everything is free"
    );
}

#[test]
fn bug_019_a_pointer_that_is_not_ours_goes_to_the_driver() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&[]);
    let mut plain = stage.run_plain(&[]);
    for program in [&mut program, &mut plain] {
        program.ok(&format!("alloc a {}", 4 << 20));
        let inner = program.ok("range a")[0] + 512;
        assert_eq!(
            program.say(&format!("rawfree {inner}")),
            Reply::Err(1),
            "an inner pointer"
        );
        assert_eq!(program.say("rawfree 4096"), Reply::Err(1), "no pointer at all");
        assert_eq!(program.say("rawfree 0"), Reply::Ok(String::new()), "null");
        program.ok(&format!("asyncalloc s {}", 4 << 20));
        program.ok("sync");
        let pointer = program.ok("range s")[0];
        assert_eq!(
            program.say(&format!("rawfree {pointer}")),
            Reply::Ok(String::new()),
            "a stream-ordered one"
        );
    }
}

#[test]
fn bug_113_sizes_off_the_granule_keep_their_size_and_data() {
    use ebb_protocol::control::{Answer, Request};
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "sizes"]);
    let sizes = [4, 128, 6912, (2 << 20) - 4, 2 << 20, (2 << 20) + 4, 5_000_000];
    for (i, size) in sizes.iter().enumerate() {
        program.hold(&format!("m{i}"), Bytes(*size), i as u64);
        assert_eq!(
            program.ok(&format!("range m{i}"))[1],
            *size,
            "the size is what was asked for"
        );
    }
    assert!(matches!(
        stage.ask(&Request::Pause {
            task: "sizes".into(),
            wait_ms: Some(20_000)
        }),
        Answer::Ok(_)
    ));
    assert!(matches!(
        stage.ask(&Request::Resume { task: "sizes".into() }),
        Answer::Ok(_)
    ));
    for (i, size) in sizes.iter().enumerate() {
        assert_eq!(program.wrong(&format!("m{i}"), i as u64), 0, "{size}");
    }
}
