//! One program on several cards: each is released on its own, and is the one that the program means.

use std::time::Duration;

use ebb_protocol::control::{ProcessRow, Snapshot};
use ebb_tests::{Options, Program, Stage, eventually};
use ebb_units::{Bytes, DeviceUuid};

const MIB: u64 = 1 << 20;

fn cards(devices: u32) -> Options {
    Options {
        devices,
        ..Options::default()
    }
}

/// The identity of the `n`-th card, as the daemon lists them.
fn uuid(snapshot: &Snapshot, n: usize) -> DeviceUuid {
    snapshot.devices[n].uuid
}

/// What a process has on the `n`-th card.
fn on(snapshot: &Snapshot, program: &Program, n: usize) -> ProcessRow {
    let mut rows = snapshot.tasks.iter().flat_map(|task| &task.processes);
    rows.find(|row| row.pid == program.pid() && row.device == Some(uuid(snapshot, n)))
        .cloned()
        .unwrap_or_else(|| panic!("{} is not on card {n}: {snapshot:#?}", program.pid()))
}

fn until_evicted(stage: &Stage, program: &Program, n: usize) {
    eventually("its memory on that card is out", || {
        let row = on(&stage.snapshot(), program, n);
        if row.resident.is_zero() && !row.evicted.is_zero() {
            Ok(())
        } else {
            Err(format!("{row:?}"))
        }
    });
}

/// Contexts on both cards, `a` on the first and `b` on the second, filled.
fn both(program: &mut Program, mib: u64) {
    program.ok("init()");
    program.ok("c = [retain(0), retain(1)]");
    program.ok("def use(n): ok(cuda.cuCtxSetCurrent(c[n])); _functions.clear(); _functions.update(fs[n])");
    program.ok("from gpu import _functions");
    program.ok("fs = [{}, {}]");
    for n in [0, 1] {
        program.ok(&format!("ok(cuda.cuCtxSetCurrent(c[{n}]))"));
        program.ok("_functions.clear()");
        program.ok("[function(f) and 0 for f in ('ebb_fill', 'ebb_check', 'ebb_spin')]");
        program.ok(&format!("fs[{n}] = dict(_functions)"));
        let name = ["a", "b"][n];
        program.ok(&format!("{name} = alloc({mib} * MIB)"));
        program.ok(&format!("fill({name}, {mib} * MIB // 4, {n})"));
    }
}

fn check(program: &mut Program, n: usize, mib: u64) {
    program.ok(&format!("use({n})"));
    let name = ["a", "b"][n];
    assert_eq!(
        program.ok(&format!("wrong({name}, {mib} * MIB // 4, {n})")),
        [0],
        "card {n}"
    );
}

#[test]
fn each_device_is_released_on_its_own() {
    let stage = Stage::new(cards(2));
    let mut program = stage.python(&[], &[]);
    both(&mut program, 150);
    let mut neighbour = stage.run(&[]);
    neighbour.ok("open 0");
    neighbour.hold("x", Bytes::mib(180), 7);
    let snapshot = stage.snapshot();
    assert!(!on(&snapshot, &program, 0).evicted.is_zero(), "{snapshot:#?}");
    assert!(
        on(&snapshot, &program, 1).evicted.is_zero(),
        "the other card is its own"
    );
    // It works on the second card while its memory on the first is out, and that stays out.
    for _ in 0..5 {
        check(&mut program, 1, 150);
        program.ok("fill(b, 150 * MIB // 4, 1)");
    }
    let snapshot = stage.snapshot();
    assert!(
        !on(&snapshot, &program, 0).evicted.is_zero(),
        "nothing there was touched"
    );
    assert_eq!(neighbour.wrong("x", 7), 0);
    check(&mut program, 0, 150);
    check(&mut program, 1, 150);
    assert_eq!(neighbour.wrong("x", 7), 0);
}

#[test]
fn a_device_that_idles_is_released_while_the_program_works_on_the_other() {
    let stage = Stage::new(cards(2));
    let mut program = stage.python(&["--idle-release", "200ms"], &[]);
    both(&mut program, 40);
    // Work on the second card from here on, from a thread that never rests; the first one idles.
    program.ok("use(1)");
    program.ok("import threading");
    program.ok("stop, rounds = threading.Event(), []");
    program.ok(
        "def work():\\n ok(cuda.cuCtxSetCurrent(c[1]))\\n while not stop.is_set():\\n  put(b, bytes(64)); rounds.append(1)",
    );
    program.ok("t = threading.Thread(target=work)");
    program.ok("t.start()");
    until_evicted(&stage, &program, 0);
    assert!(on(&stage.snapshot(), &program, 1).evicted.is_zero());
    program.ok("stop.set() or t.join()");
    assert!(program.ok("len(rounds)")[0] > 0);
    until_evicted(&stage, &program, 1);
    check(&mut program, 0, 40);
}

#[test]
fn a_kernel_brings_back_what_its_device_has_access_to() {
    let stage = Stage::new(cards(2));
    let mut program = stage.python(&["--name", "peers"], &[]);
    both(&mut program, 20);
    program.ok("use(1)");
    program.ok("ok(cuda.cuCtxEnablePeerAccess(c[0], 0))");
    for round in 0..3 {
        stage.release("peers");
        // The second card's kernel reads and writes the first card's memory.
        assert_eq!(program.ok("wrong(a, 20 * MIB // 4, 0)"), [0], "round {round}");
        program.ok("fill(a, 20 * MIB // 4, 0)");
    }
    check(&mut program, 0, 20);
    check(&mut program, 1, 20);
}

/// A copy waits in the second card's stream when the first card's memory, which it reads, is to go.
#[test]
fn a_copy_between_cards_is_waited_for() {
    let stage = Stage::new(cards(2));
    let mut program = stage.python(&["--name", "copies"], &[]);
    both(&mut program, 8);
    program.ok("use(1)");
    program.ok("s = stream()");
    for round in 0..3 {
        program.ok(&format!("(use(0), fill(a, 2 * MIB, {round}), use(1)) and None"));
        program.ok("launch_on(s, 'ebb_spin', c_uint64(300_000_000))");
        program.ok("ok(cuda.cuMemcpyPeerAsync(c_uint64(b), c[1], c_uint64(a), c[0], c_size_t(8 * MIB), s))");
        stage.release("copies");
        program.ok("ok(cuda.cuStreamSynchronize(s))");
        assert_eq!(
            program.ok(&format!("wrong(b, 2 * MIB, {round})")),
            [0],
            "round {round}"
        );
    }
}

/// What `CUDA_VISIBLE_DEVICES` lists, in which order and form ever: memory is charged to the card that the driver means.
#[test]
fn masks_in_every_order_and_form() {
    let stage = Stage::new(cards(4));
    let listed = stage.snapshot();
    let long = |n: usize| uuid(&listed, n).to_string();
    let short = |n: usize| long(n)[..long(n).len() - 8].to_owned();
    let masks = [
        ("0,1,2,3".to_owned(), vec![0, 1, 2, 3]),
        ("3,1".to_owned(), vec![3, 1]),
        ("2".to_owned(), vec![2]),
        (long(3), vec![3]),
        (format!("{},{}", long(2), long(0)), vec![2, 0]),
        (short(1), vec![1]),
        ("1,7,0".to_owned(), vec![1]),
    ];
    for (mask, expected) in masks {
        let mut program = stage.run_with_env(&[], &[("CUDA_VISIBLE_DEVICES", &mask)]);
        for (ordinal, physical) in expected.iter().enumerate() {
            program.ok(&format!("open {ordinal}"));
            program.hold(&format!("m{ordinal}"), Bytes::mib(8 + 8 * ordinal as u64), 3);
            eventually(
                &format!("mask {mask}: device {ordinal} is card {physical}"),
                || {
                    let row = on(&stage.snapshot(), &program, *physical);
                    let right = row.resident.0 >= (8 + 8 * ordinal as u64) * MIB && row.resident.0 < 64 * MIB;
                    if right { Ok(()) } else { Err(format!("{row:?}")) }
                },
            );
        }
        let snapshot = stage.snapshot();
        let seen = (0..4).filter(|n| {
            let rows = snapshot.tasks.iter().flat_map(|task| &task.processes);
            rows.clone()
                .any(|row| row.pid == program.pid() && row.device == Some(uuid(&snapshot, *n)))
        });
        assert_eq!(seen.count(), expected.len(), "mask {mask}");
        assert_eq!(program.poll(Duration::ZERO), None);
        assert!(program.finish().success());
        stage.wait_until_empty();
    }
}

/// Two processes of one task, each on a card of its own, exchange a word after every kernel, and somebody pauses the task
/// again as soon as each resume is done: it gets on all the same.
#[test]
fn ranks_get_on_in_a_storm_of_pauses() {
    let stage = Stage::new(Options {
        link: 400 << 20,
        ..cards(2)
    });
    let mut program = stage.python(&["--name", "ranks"], &[]);
    both(&mut program, 60);
    program.ok("import threading");
    program.ok("stop, meet, rounds = threading.Event(), threading.Barrier(2), [0, 0]");
    // A step of a rank ends when the other one has come as far: neither runs alone.
    program.ok(
        "def work(n, p):\\n ok(cuda.cuCtxSetCurrent(c[n]))\\n while not stop.is_set():\\n  put(p, bytes(64)); rounds[n] += 1\\n  try: meet.wait()\\n  except threading.BrokenBarrierError: return",
    );
    program.ok("ts = [threading.Thread(target=work, args=a) for a in ((0, a), (1, b))]");
    program.ok("[t.start() for t in ts] and None");
    let mut before = 0;
    for round in 0..12 {
        // Each of these waits until all is out, and none is told to wait for more than that.
        stage.release("ranks");
        let rounds = program.ok("rounds")[0];
        assert!(
            round == 0 || rounds > before,
            "round {round}: {rounds} after {before}"
        );
        before = rounds;
    }
    let snapshot = stage.snapshot();
    assert!(on(&snapshot, &program, 0).restores >= 10, "{snapshot:#?}");
    assert!(on(&snapshot, &program, 1).restores >= 10, "{snapshot:#?}");
    program.ok("stop.set() or meet.abort() or [t.join() for t in ts] and None");
}
