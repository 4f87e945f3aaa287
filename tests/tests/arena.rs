//! A host arena that is smaller than what changes hands: segments that one program has emptied are lent to the other.

use std::os::unix::fs::MetadataExt;

use ebb_protocol::control::{Answer, Request};
use ebb_tests::{Options, Reply, Stage};
use ebb_units::Bytes;

/// What does not fit is 124 MiB, in blocks of 30 that are one chunk each. Chunks come back whole, so each program may have lease
/// for nearly one more than is there: 150 at the most. To hand over, another chunk must find room, and a segment of 8 MiB in each program
/// may be in part used. Without reuse a change of hands would need 240.
const ARENA: Bytes = Bytes::mib(200);

#[test]
fn two_programs_alternate_on_an_arena_that_holds_little_more_than_what_does_not_fit() {
    let stage = Stage::new(Options {
        arena: ARENA,
        config: "[policy]\nmin_turn = \"100ms\"\n".into(),
        ..Options::default()
    });
    let mut programs = [stage.run(&["--name", "even"]), stage.run(&["--name", "odd"])];
    for (i, program) in programs.iter_mut().enumerate() {
        for part in 0..6 {
            program.send(&format!("alloc m{part} {}", 30 << 20));
            program.send(&format!("fill m{part} {i}"));
        }
        for _ in 0..10 {
            (0..6).for_each(|part| program.send(&format!("check m{part} {i}")));
        }
    }
    for (i, program) in programs.iter_mut().enumerate() {
        for part in 0..12 {
            assert!(
                matches!(program.answer(), Reply::Ok(_)),
                "program {i}, block {}",
                part / 2
            );
        }
        for check in 0..60 {
            assert_eq!(
                program.answer(),
                Reply::Ok("0".into()),
                "program {i}, check {check}"
            );
        }
    }
    assert!(stage.snapshot().arena.held <= ARENA);
}

/// Bytes of memory that the daemon's segments have, as the kernel counts them.
fn kernel_counts(daemon: u32) -> Bytes {
    let folder = format!("/proc/{daemon}/fd");
    let files = std::fs::read_dir(folder).unwrap().flatten();
    let segments = files.filter(|fd| {
        let name = std::fs::read_link(fd.path()).unwrap_or_default();
        name.to_string_lossy().contains("memfd:ebb-arena")
    });
    let blocks = segments.filter_map(|fd| std::fs::metadata(fd.path()).ok());
    blocks.map(|found| Bytes(found.blocks() * 512)).sum()
}

#[test]
fn bug_107_host_memory_is_what_is_released_and_not_the_next_power_of_two() {
    let stage = Stage::new(Options {
        arena: Bytes::mib(96),
        ..Options::default()
    });
    let mut program = stage.run(&["--name", "odd"]);
    // Each a little above a power of two, where rounding up takes nearly twice as much.
    let parts = [Bytes::mib(34), Bytes::mib(18), Bytes::mib(10)];
    for (i, part) in parts.iter().enumerate() {
        program.hold(&format!("m{i}"), *part, i as u64);
    }
    let paused = stage.ask(&Request::Pause {
        task: "odd".into(),
        wait_ms: Some(30_000),
    });
    assert!(matches!(paused, Answer::Ok(_)), "{paused:?}");
    let released: Bytes = parts.into_iter().sum();
    let arena = stage.snapshot().arena;
    // Whole segments of 8 MiB, of which the last is in part used.
    assert!(
        arena.lent >= released && arena.lent < released + Bytes::mib(8),
        "{arena:?}"
    );
    assert!(kernel_counts(stage.daemon_pid()) <= arena.budget);
    let resumed = stage.ask(&Request::Resume { task: "odd".into() });
    assert!(matches!(resumed, Answer::Ok(_)), "{resumed:?}");
    for i in 0..parts.len() {
        assert_eq!(program.wrong(&format!("m{i}"), i as u64), 0);
    }
}

#[test]
fn host_memory_is_bounded_as_configured_to_the_byte_whatever_is_asked() {
    // No multiple of the segments.
    let budget = Bytes::mib(44);
    let stage = Stage::new(Options {
        arena: budget,
        ..Options::default()
    });
    let mut programs: Vec<_> = (0..4)
        .map(|i| {
            let mut program = stage.run(&["--name", &format!("p{i}")]);
            program.hold("m", Bytes::mib(20), i);
            program
        })
        .collect();
    for i in 0..4 {
        // Two of them find room.
        let _ = stage.ask(&Request::Pause {
            task: format!("p{i}"),
            wait_ms: Some(1_500),
        });
        let arena = stage.snapshot().arena;
        let counted = kernel_counts(stage.daemon_pid());
        assert!(
            arena.held <= budget && counted <= budget,
            "{arena:?}, {counted} by the kernel"
        );
    }
    for (i, program) in programs.iter_mut().enumerate() {
        let _ = stage.ask(&Request::Resume {
            task: format!("p{i}"),
        });
        assert_eq!(program.wrong("m", i as u64), 0, "program {i}");
    }
}
