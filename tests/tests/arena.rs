//! A host arena that is smaller than what changes hands: segments that one program has emptied are lent to the other.

use ebb_tests::{Options, Reply, Stage};
use ebb_units::Bytes;

#[test]
fn two_programs_alternate_on_an_arena_that_holds_little_more_than_what_does_not_fit() {
    // 180 + 180 MiB on a card of 256: 104 and two contexts do not fit. Without reuse a change of hands needs 208 and more.
    let stage = Stage::new(Options {
        arena: Bytes::mib(152),
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
            assert!(matches!(program.answer(), Reply::Ok(_)), "program {i}, block {}", part / 2);
        }
        for check in 0..60 {
            assert_eq!(program.answer(), Reply::Ok("0".into()), "program {i}, check {check}");
        }
    }
    assert!(stage.snapshot().arena.held <= Bytes::mib(152));
}
