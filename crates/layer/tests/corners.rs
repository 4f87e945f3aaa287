//! The corners of a program's life: signals, constructors, what the loader holds meanwhile.

mod common;

use common::program::under;
use common::{Bench, run, sim};
use ebb_units::Bytes;

fn driver() -> String {
    let path = sim().join("libcuda.so.1");
    path.to_str().expect("a plain path").to_owned()
}

#[test]
fn a_signal_that_the_program_blocks_and_reads_is_not_taken_by_a_thread_of_ours() {
    let bench = Bench::new();
    let program = bench.compile("signals.c", "signals", &[&driver()]);
    assert_eq!(run(&mut bench.plain(&program, sim())), "free 0\n");
    let mut command = bench.command(&program, sim());
    let _daemon = under(&bench, &mut command, Bytes(u64::MAX));
    assert_eq!(run(&mut command), "free 0\n");
}

/// The loader's lock is held while constructors run: a thread of ours that needed it to begin would never begin.
#[test]
fn a_constructor_that_uses_the_driver_is_served_like_anybody() {
    let bench = Bench::new();
    let library = bench.compile(
        "constructor.c",
        "constructor.so",
        &["-shared", "-fPIC", &driver()],
    );
    let program = bench.compile("loads.c", "loads", &["-ldl"]);
    let wanted = "constructor fine\ndestructor fine\nclosed 0\n";
    assert_eq!(
        run(bench.plain(&program, sim()).arg(&library)),
        wanted,
        "without the library"
    );
    let mut command = bench.command(&program, sim());
    let daemon = under(&bench, &mut command, Bytes(u64::MAX));
    assert_eq!(run(command.arg(&library)), wanted);
    drop(daemon);
}
