//! The pool's C functions, as frameworks call them, in programs on the simulated GPU with the library preloaded.

mod common;

use common::program::{Told, script, under};
use common::{Bench, run};
use ebb_units::Bytes;

fn told(bench: &Bench, limit: Bytes, settings: &str) -> (common::daemon::Daemon, Told) {
    let mut command = script(bench, "frameworks", true);
    command.env("EBB_POOL", settings);
    let daemon = under(bench, &mut command, limit);
    let program = Told::start(&mut command);
    (daemon, program)
}

/// Every block, also one that is stitched of other blocks' memory, holds what was written, with everything away between every two calls.
#[test]
fn blocks_leave_and_come_back_between_every_two_calls() {
    let bench = Bench::new();
    let (daemon, mut program) = told(&bench, Bytes(u64::MAX), "");
    for round in 0..2 {
        for (word, answer) in [
            ("hold 3", "hold True"),
            ("wide", if round == 0 { "wide 18 True" } else { "" }),
            ("check", "check 0"),
            ("churn 1", "churn "),
            ("streamless", "streamless 0"),
            ("record", "record 0 -1"),
            ("private", "private True True"),
            ("check", "check 0"),
            ("drop 1", "drop "),
            ("hold 9", "hold True"),
        ] {
            let said = program.say(word);
            assert!(answer.is_empty() || said == answer, "round {round}: {said}");
            daemon.evict();
        }
    }
    assert_eq!(program.say("check"), "check 0");
    let path = bench.path().join("snapshot.pickle");
    let said = program.say(&format!("snapshot {}", path.display()));
    assert_eq!(said, "snapshot True True");
    program.finish();
}

/// PyTorch's own pools do the same: what a capture took is the graph's as long as it may be launched, whoever allocates and whatever leaves the
/// card meanwhile; and no call of ours breaks the capture.
#[test]
fn what_a_capture_took_is_the_graphs() {
    let bench = Bench::new();
    let (daemon, mut program) = told(&bench, Bytes(u64::MAX), "");
    assert_eq!(program.say("hold 2"), "hold True");
    assert_eq!(program.say("capture"), "capture 1");
    for _ in 0..2 {
        daemon.evict();
        assert_eq!(program.say("replay"), "replay 0");
    }
    assert_eq!(program.say("capture"), "capture 2");
    daemon.evict();
    assert_eq!(program.say("replay"), "replay 0");
    assert_eq!(program.say("end"), "end ");
    assert_eq!(program.say("drop 1"), "drop ");
    program.say("trim");
    assert_eq!(program.say("stats"), "stats 0 0 0", "nothing is left behind");
    program.finish();
}

/// The limit holds for what the pool maps; what is freed and kept counts, and is given back on request.
#[test]
fn the_limit_holds_and_a_trim_gives_back() {
    let bench = Bench::new();
    let (_daemon, mut program) = told(&bench, Bytes::mib(96), "");
    assert_eq!(program.say("hold 16"), "hold True");
    let full = program.say("fill");
    assert!(
        full == "fill 9 True" || full == "fill 10 True",
        "the context has 4 MiB: {full}"
    );
    assert_eq!(program.say("fill"), full);
    assert_eq!(program.say("check"), "check 0");
    let trimmed = program.say("trim");
    assert_ne!(trimmed, "trim 0");
    assert_eq!(program.say("stats"), "stats 16 16 16");
    program.finish();
}

/// A training loop maps nothing from its third round on.
#[test]
fn a_loop_maps_nothing() {
    let bench = Bench::new();
    let (_daemon, mut program) = told(&bench, Bytes(u64::MAX), "chunk:4Mi");
    assert_eq!(program.say("loop 8"), "loop 0");
    program.finish();
}

/// What is wrong in the settings is said, and changes nothing.
#[test]
fn wrong_settings_are_said() {
    let bench = Bench::new();
    let (_daemon, mut program) = told(&bench, Bytes(u64::MAX), "granularity:7");
    assert_eq!(program.say("hold 3"), "hold True");
    let said = program.say("report");
    assert!(
        said.contains("granularity") && said.contains("EBB_POOL is not used"),
        "{said}"
    );
    program.finish();
}

/// pytorch/pytorch#133281, rmm#1362: with an allocator of one's own nobody could say how much memory a program had needed at most.
#[test]
fn bug_145_peaks_can_be_read_and_begin_anew() {
    let bench = Bench::new();
    let (_daemon, mut program) = told(&bench, Bytes(u64::MAX), "");
    assert_eq!(program.say("hold 40"), "hold True");
    assert_eq!(program.say("drop 1"), "drop ");
    assert_eq!(program.say("hold 6"), "hold True");
    assert_eq!(program.say("peaks"), "peaks 40 40");
    assert_ne!(program.say("trim"), "trim 0");
    assert_eq!(program.say("anew"), "anew ");
    assert_eq!(program.say("peaks"), "peaks 6 6");
    program.finish();
}

/// Without a daemon, and with the layer switched off, the functions give memory all the same.
#[test]
fn without_a_daemon_and_without_the_layer_it_works() {
    let bench = Bench::new();
    for off in [false, true] {
        let mut command = script(&bench, "frameworks", true);
        if off {
            command.env("EBB", "off");
        }
        let mut program = Told::start(&mut command);
        assert_eq!(program.say("hold 3"), "hold True");
        assert_eq!(program.say("churn 5"), "churn ");
        assert_eq!(program.say("streamless"), "streamless 0");
        assert_eq!(program.say("check"), "check 0");
        assert_eq!(program.say("drop 1"), "drop ");
        program.finish();
    }
}

/// A program that is killed in the middle leaves nothing on the card.
#[test]
fn a_killed_program_leaves_nothing() {
    let bench = Bench::new();
    let (daemon, mut program) = told(&bench, Bytes(u64::MAX), "");
    assert_eq!(program.say("hold 64"), "hold True");
    assert_eq!(program.say("wide"), "wide 18 True");
    daemon.evict();
    assert_eq!(program.say("check"), "check 0");
    drop(program);
    let mut command = script(&bench, "frameworks", true);
    let mut next = Told::start(&mut command);
    assert_eq!(next.say("hold 232"), "hold True");
    next.finish();
}

/// The functions' header is one that a C compiler takes, and the library has all of it.
#[test]
fn the_header_says_what_is_exported() {
    let bench = Bench::new();
    let include = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/include");
    let program = bench.compile("header.c", "header", &["-std=c11", include, "-ldl"]);
    let output = run(&mut bench.command(&program, common::sim()));
    assert_eq!(output, "all there\n");
}
