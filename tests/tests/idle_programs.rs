//! What programs keep and do not use is lent to others and comes back whole: whatever their allocators keep, whatever
//! holds it. Each test is a report about some program that could not do this by itself.

use ebb_tests::{Options, Program, Reply, Stage, eventually, ledger_of};
use ebb_units::Bytes;

const MIB: u64 = 1 << 20;

fn until_off_the_card(stage: &Stage) {
    eventually("nothing of it is on the card", || {
        let snapshot = stage.snapshot();
        if ledger_of(&snapshot).is_zero() {
            Ok(())
        } else {
            Err(format!("{snapshot:#?}"))
        }
    });
}

/// A process whose allocator never gives anything back, a model server with models that nobody asks for, an arena that
/// grew for one large input, and a cache in which a tenth of the blocks is in use: all idle, and another program gets the whole card.
#[test]
fn bug_055_058_059_065_idle_memory_is_lent_whatever_its_allocator_keeps() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--idle-release", "200ms", "--name", "keeper"]);
    // Three models, and an arena with room for one large input of which little is used.
    for (i, model) in ["m0", "m1", "m2"].iter().enumerate() {
        program.hold(model, Bytes::mib(24), i as u64);
    }
    program.hold("arena", Bytes::mib(64), 3);
    // Small blocks that share chunks, of which every tenth stays: none of those chunks is free.
    for i in 0..60u64 {
        program.hold(&format!("b{i}"), Bytes(300_000), i);
    }
    for i in (0..60u64).filter(|i| i % 10 != 0) {
        program.ok(&format!("free b{i}"));
    }
    until_off_the_card(&stage);
    let mut other = stage.run(&[]);
    other.hold("x", Bytes::mib(236), 9);
    assert_eq!(other.wrong("x", 9), 0);
    assert!(other.finish().success());
    for (i, model) in ["m0", "m1", "m2"].iter().enumerate() {
        assert_eq!(program.wrong(model, i as u64), 0, "{model}");
    }
    assert_eq!(program.wrong("arena", 3), 0);
    for i in (0..60u64).step_by(10) {
        assert_eq!(program.wrong(&format!("b{i}"), i), 0, "block {i}");
    }
    assert!(program.finish().success());
    stage.wait_until_empty();
}

/// A share is a cap that holds, also for a program that takes all it can get.
#[test]
fn bug_013_a_greedy_program_gets_its_share_and_no_more() {
    let stage = Stage::new(Options::default());
    let mut greedy = stage.run(&["--limit", "64Mi"]);
    let mut got = 0;
    while matches!(greedy.say(&format!("alloc g{got} {}", 4 * MIB)), Reply::Ok(_)) {
        got += 1;
        assert!(got <= 16, "beyond its limit");
    }
    assert!(got >= 14, "{got} times 4 MiB of 64 MiB less a context");
    let mut other = stage.run(&["--limit", "64Mi"]);
    other.hold("x", Bytes::mib(56), 1);
    assert_eq!(other.wrong("x", 1), 0);
}

/// Going from one model to the next and back, each most of the card, in one program; the last one is whole each time.
#[test]
fn bug_061_models_are_switched_in_a_running_program() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&[]);
    let mut idle = stage.run(&[]);
    idle.hold("x", Bytes::mib(150), 4);
    for round in 0..4u64 {
        program.hold("model", Bytes::mib(200 + 8 * (round % 2)), round);
        assert_eq!(program.wrong("model", round), 0, "round {round}");
        program.ok("free model");
    }
    assert_eq!(idle.wrong("x", 4), 0);
}

/// Two engines with half the card each for the asking: the idle one's half is lent, and is back at its next request.
#[test]
fn bug_064_an_idle_engines_half_is_lent_and_comes_back() {
    let stage = Stage::new(Options::default());
    let mut idle = stage.run(&["--request", "120Mi"]);
    idle.hold("kv", Bytes::mib(110), 1);
    // While it uses the GPU its half is its own, and a request beside it could not be.
    eventually("the engine is idle", || {
        let snapshot = stage.snapshot();
        let rows = snapshot.tasks.iter().flat_map(|task| &task.processes);
        match rows.map(|row| row.state.as_str()).find(|state| *state != "idle") {
            None => Ok(()),
            Some(state) => Err(state.to_owned()),
        }
    });
    let mut busy = stage.run(&["--request", "120Mi"]);
    busy.hold("kv", Bytes::mib(210), 2);
    assert_eq!(busy.wrong("kv", 2), 0);
    assert_eq!(idle.wrong("kv", 1), 0, "back for the asking");
    assert_eq!(busy.wrong("kv", 2), 0);
}

/// A release keeps contents: of every kind of block, at the same addresses, any number of times.
#[test]
fn bug_073_a_release_never_throws_contents_away() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "contents"]);
    let sizes = [512u64, 70_000, 3 * MIB + 4, 40 * MIB];
    let mut ranges = Vec::new();
    for (i, size) in sizes.iter().enumerate() {
        program.hold(&format!("m{i}"), Bytes(*size), i as u64);
        ranges.push(program.ok(&format!("range m{i}")));
    }
    for round in 0..5 {
        stage.release("contents");
        for (i, range) in ranges.iter().enumerate() {
            assert_eq!(&program.ok(&format!("range m{i}")), range);
            assert_eq!(
                program.wrong(&format!("m{i}"), i as u64),
                0,
                "round {round}, m{i}"
            );
        }
    }
}

/// While memory is away its addresses stay taken: nothing that the program maps lands there.
#[test]
fn bug_080_nothing_lands_in_the_hole_that_a_release_leaves() {
    let stage = Stage::new(Options::default());
    let mut program = stage.python(&["--name", "hole"], &[]);
    program.ok("init()");
    program.ok("retain()");
    program.ok("a = alloc(64 * MIB)");
    program.ok("fill(a, 16 * MIB, 5)");
    program.ok("import mmap");
    for round in 0..3 {
        stage.release("hole");
        program.ok("maps = [mmap.mmap(-1, 16 * MIB) for _ in range(40)]");
        program.ok("starts = [ctypes.addressof(c_char_p.from_buffer(m)) for m in maps]");
        let inside = program.ok("[a - 16 * MIB < s < a + 64 * MIB for s in starts]");
        assert!(inside.iter().all(|&inside| inside == 0), "round {round}");
        program.ok("[m.write(b'x' * MIB) and None for m in maps]");
        assert_eq!(program.ok("wrong(a, 16 * MIB, 5)"), [0], "round {round}");
    }
}

/// The newcomer's memory comes as the leaver's goes; nobody is told that there is none, however often they take turns.
#[test]
fn bug_086_a_restore_that_meets_an_unfinished_release_waits_for_it() {
    let stage = Stage::new(Options {
        config: "[policy]\nmin_turn = \"50ms\"\n".into(),
        ..Options::default()
    });
    let mut pair = [stage.run(&[]), stage.run(&[])];
    for (i, program) in pair.iter_mut().enumerate() {
        program.hold("w", Bytes::mib(170), i as u64);
    }
    for round in 0..4 {
        for (i, program) in pair.iter_mut().enumerate() {
            program.send(&format!("check w {i}"));
        }
        let answers = pair.each_mut().map(Program::answer);
        assert_eq!(
            answers,
            [Reply::Ok("0".into()), Reply::Ok("0".into())],
            "round {round}"
        );
    }
}

/// Pinned host memory of the program is nothing of the card: it is counted and named, and costs no limit.
#[test]
fn bug_110_the_programs_own_pinned_memory_is_counted() {
    let stage = Stage::new(Options::default());
    let mut program = stage.python(&["--limit", "64Mi"], &[]);
    program.ok("init()");
    program.ok("retain()");
    let free = program.ok("info()")[0];
    let pinned = "sum(e['bytes'] for d in report()['engine']['devices'] for e in d['pinned'] if e['reason'] == 'pinned host memory')";
    assert_eq!(program.ok(pinned), [0]);
    program.ok("p = c_void_p()");
    program.ok("ok(cuda.cuMemHostAlloc(byref(p), c_size_t(100 * MIB), 0))");
    assert_eq!(program.ok(pinned), [100 * MIB]);
    assert_eq!(program.ok("info()")[0], free, "not memory of the card");
    program.ok("ok(cuda.cuMemFreeHost(p))");
    assert_eq!(program.ok(pinned), [0]);
}
