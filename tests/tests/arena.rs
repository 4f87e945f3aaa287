//! A host arena that is smaller than what changes hands: segments that one program has emptied are lent to the other.

use ebb_tests::{Options, Reply, Stage};
use ebb_units::Bytes;

/// What does not fit is 112 MiB, in blocks of 30 that are one chunk each: 120. To hand over, another chunk must find room, and a
/// segment of 8 MiB in each program may be in part used. Without reuse a change of hands would need 240.
const ARENA: Bytes = Bytes::mib(160);

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
