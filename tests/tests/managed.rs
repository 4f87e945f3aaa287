//! Managed memory under releases, and that no other memory turns into it.

use ebb_protocol::control::{Answer, Request};
use ebb_tests::{Options, Program, Stage};
use ebb_units::Bytes;

const MANAGED: u32 = 8;
const MEMORY_TYPE: u32 = 2;
/// `CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION`.
const LAST_PREFETCH: u32 = 4;

fn program(stage: &Stage, name: &str) -> Program {
    let mut program = stage.python(&["--name", name], &[]);
    program.ok("init()");
    program.ok("retain()");
    program.ok("p = c_uint64()");
    program.ok("def managed(size): ok(cuda.cuMemAllocManaged(byref(p), c_size_t(size), 1)); return p.value");
    program.ok(
        "def where(p, size): v = c_int(); ok(cuda.cuMemRangeGetAttribute(byref(v), c_size_t(4), 4, c_uint64(p), c_size_t(size))); return [v.value + 2]",
    );
    program.ok("def told(): return report()['engine']['devices'][0]['managed']");
    program
}

/// What the listing says of the only process: managed bytes, and those known to be in host memory.
fn listed(stage: &Stage) -> (Bytes, Bytes) {
    let snapshot = stage.snapshot();
    let row = snapshot
        .tasks
        .iter()
        .flat_map(|task| &task.processes)
        .next()
        .expect("a process");
    (row.managed, row.managed_out)
}

/// It leaves the card with the rest, comes back by itself with every byte, any number of times, and the listing shows it.
#[test]
fn managed_memory_goes_to_the_host_with_a_release() {
    assert_eq!(LAST_PREFETCH, 4);
    let stage = Stage::new(Options::default());
    let mut program = program(&stage, "managed");
    program.ok("own = alloc(4 * MIB)");
    program.ok("m = managed(150 * MIB)");
    for round in 0..4 {
        program.ok(&format!("fill(own, MIB, {round})"));
        program.ok(&format!("fill(m, 37 * MIB, {round} + 10)"));
        let paused = stage.ask(&Request::Pause {
            task: "managed".into(),
            wait_ms: Some(30_000),
        });
        assert!(matches!(paused, Answer::Ok(_)), "{paused:?}");
        ebb_tests::eventually("the listing shows it in host memory", || match listed(&stage) {
            (all, out) if (all, out) == (Bytes::mib(150), Bytes::mib(150)) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        // Questions touch nothing: the processor is where the driver was told to bring it.
        assert_eq!(program.ok("where(m, 150 * MIB)"), [1], "the host is -1");
        assert_eq!(program.ok("told()['out'] // MIB"), [150]);
        let _ = stage.ask(&Request::Resume {
            task: "managed".into(),
        });
        assert_eq!(program.ok(&format!("wrong(m, 37 * MIB, {round} + 10)")), [0]);
        assert_eq!(program.ok(&format!("wrong(own, MIB, {round})")), [0]);
        assert_eq!(program.ok("told()['out']"), [0]);
    }
    assert_eq!(program.ok("free(m)"), [0]);
    stage.release("managed");
    assert_eq!(program.ok("told()['bytes']"), [0]);
    assert_eq!(program.ok("wrong(own, MIB, 3)"), [0]);
}

/// More than the card has, and nothing of it was ever on the card: a release leaves it alone, and does not fill the host with it.
#[test]
fn managed_memory_that_never_was_on_the_card_is_not_moved() {
    let stage = Stage::new(Options::default());
    let mut program = program(&stage, "large");
    program.ok("own = alloc(4 * MIB)");
    program.ok("fill(own, MIB, 1)");
    program.ok("m = managed(1000 * MIB)");
    stage.release("large");
    assert_eq!(program.ok("told()['pushed']"), [0]);
    assert_eq!(program.ok("wrong(own, MIB, 1)"), [0]);
}

/// A shim that made managed memory of all memory broke kernels that look at what they are given: ours is plain device memory
/// in everything that the driver says of it, before and after releases, and managed memory stays managed.
#[test]
fn bug_034_device_memory_never_looks_managed() {
    let stage = Stage::new(Options::default());
    let mut program = program(&stage, "looks");
    program.ok("own = alloc(4 * MIB)");
    program.ok("ok(cuda.cuMemAllocAsync(byref(p), c_size_t(4 * MIB), None)); own_async = p.value");
    program.ok("m = managed(4 * MIB)");
    // Memory type, pointer for the device, range start, range size, mapped, context.
    let look = "[attribute(w, q, k) for w, k in ((2, c_uint), (3, c_uint64), (11, c_uint64), (12, c_uint64), (13, c_uint), (9, c_int))]";
    program.ok(&format!("def look(q): return {look}"));
    let before = program.ok("[look(own), look(own_async), look(m)]");
    for round in 0..3 {
        for name in ["own", "own_async"] {
            assert_eq!(
                program.ok(&format!("attribute({MANAGED}, {name}, c_uint)")),
                [0],
                "round {round}: {name} is no managed memory"
            );
            assert_eq!(
                program.ok(&format!("attribute({MEMORY_TYPE}, {name}, c_uint)")),
                [2],
                "round {round}: {name} is device memory"
            );
            let buffer = program.ok(&format!("attribute(7, {name})"));
            stage.release("looks");
            assert_eq!(program.ok(&format!("attribute(7, {name})")), buffer, "its number");
        }
        assert_eq!(program.ok(&format!("attribute({MANAGED}, m, c_uint)")), [1]);
        assert_eq!(program.ok("[look(own), look(own_async), look(m)]"), before);
        assert_eq!(program.ok("address_range(own) == (own, 4 * MIB)"), [1]);
    }
}

/// A program that fills the card with managed memory and holds no lease at all: an allocation of its own is served, as it is without us.
#[test]
fn managed_memory_gives_way_to_an_allocation_of_its_own() {
    let stage = Stage::new(Options::default());
    let mut program = program(&stage, "alone");
    program.ok("m = managed(240 * MIB)");
    program.ok("fill(m, 60 * MIB, 3)");
    full(&stage);
    program.ok("own = alloc(20 * MIB)");
    program.ok("fill(own, 5 * MIB, 4)");
    assert_eq!(program.ok("wrong(m, 60 * MIB, 3)"), [0]);
    assert_eq!(program.ok("wrong(own, 5 * MIB, 4)"), [0]);
}

/// Two programs that fill the card with it together: each gets its allocation.
#[test]
fn managed_memory_of_two_programs_does_not_stop_both() {
    let stage = Stage::new(Options::default());
    let mut programs = ["one", "two"].map(|name| {
        let mut program = program(&stage, name);
        program.ok("m = managed(180 * MIB)");
        program.ok("fill(m, 45 * MIB, 3)");
        program
    });
    full(&stage);
    for program in &mut programs {
        program.ok("own = alloc(20 * MIB)");
        program.ok("fill(own, 5 * MIB, 4)");
    }
    for program in &mut programs {
        assert_eq!(program.ok("wrong(m, 45 * MIB, 3)"), [0]);
        assert_eq!(program.ok("wrong(own, 5 * MIB, 4)"), [0]);
    }
}

/// A neighbour that idles with managed memory and nothing else makes room; a pause takes all of it.
#[test]
fn idle_managed_memory_of_a_neighbour_makes_room() {
    let stage = Stage::new(Options::default());
    let mut idle = program(&stage, "idle");
    idle.ok("m = managed(150 * MIB)");
    idle.ok("fill(m, 37 * MIB, 3)");
    seen(&stage, "idle", |overhead| overhead >= Bytes::mib(150));
    let mut wants = program(&stage, "wants");
    wants.ok("own = alloc(150 * MIB)");
    wants.ok("fill(own, 37 * MIB, 4)");
    assert_eq!(idle.ok("wrong(m, 37 * MIB, 3)"), [0]);
    assert_eq!(wants.ok("wrong(own, 37 * MIB, 4)"), [0]);
    let paused = stage.ask(&Request::Pause {
        task: "idle".into(),
        wait_ms: Some(30_000),
    });
    assert!(matches!(paused, Answer::Ok(_)), "{paused:?}");
    seen(&stage, "idle", |overhead| overhead < Bytes::mib(16));
}

/// Waits until the daemon counts so much overhead to a task.
fn seen(stage: &Stage, task: &str, enough: impl Fn(Bytes) -> bool) {
    ebb_tests::eventually("its managed memory is counted", || {
        let snapshot = stage.snapshot();
        let rows = snapshot.tasks.iter().filter(|row| row.name == task);
        let overhead: Bytes = rows.flat_map(|row| &row.processes).map(|row| row.overhead).sum();
        if enough(overhead) {
            Ok(())
        } else {
            Err(format!("{overhead}"))
        }
    });
}

/// Waits until the card is full by the daemon's account, too.
fn full(stage: &Stage) {
    ebb_tests::eventually("the card is full", || {
        let free = stage.snapshot().devices[0].free;
        if free < Bytes::mib(20) {
            Ok(())
        } else {
            Err(format!("{free}"))
        }
    });
}
