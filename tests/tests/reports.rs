//! Reported faults of other ways to share a GPU, and of programs that share one, of which ebb owns a part.

use ebb_tests::{Options, Program, Stage};
use ebb_units::Bytes;

/// onnxruntime#9509: one large request grows a program's arena, and nothing shrinks it. What the arena has beyond small requests is not kept from
/// others, and the next large request finds it again.
#[test]
fn bug_059_an_arena_that_one_large_request_has_grown_makes_room() {
    let stage = Stage::new(Options::default());
    let mut server = stage.run(&["--name", "server"]);
    server.hold("small", Bytes::mib(8), 1);
    server.hold("peak", Bytes::mib(160), 2);
    for _ in 0..3 {
        assert_eq!(server.wrong("small", 1), 0, "small requests");
    }
    let mut job = stage.run(&["--name", "job"]);
    job.hold("model", Bytes::mib(200), 3);
    let moved = stage.snapshot().totals.out_bytes;
    assert!(
        !moved.is_zero() && moved <= Bytes::mib(168),
        "the arena's, and it has no more: {moved}"
    );
    assert_eq!(server.wrong("small", 1), 0, "the next small request");
    assert_eq!(server.wrong("peak", 2), 0, "and the next large one");
    assert_eq!(job.wrong("model", 3), 0);
    assert!(server.finish().success() && job.finish().success());
    stage.wait_until_empty();
}

/// The same, where the program gives its arena's blocks back and only the allocator keeps them: they leave without a copy.
#[test]
fn bug_059_what_an_allocator_keeps_of_a_large_request_leaves_without_a_copy() {
    for (alloc, free) in [("alloc", "free"), ("asyncalloc", "asyncfree")] {
        let stage = Stage::new(Options::default());
        let mut server = stage.run(&["--name", "server"]);
        server.hold("small", Bytes::mib(8), 1);
        server.ok(&format!("{alloc} peak {}", Bytes::mib(160).get()));
        server.ok("fill peak 2");
        server.ok(&format!("{free} peak"));
        assert_eq!(server.wrong("small", 1), 0, "a small request");
        let mut job = stage.run(&["--name", "job"]);
        job.hold("model", Bytes::mib(230), 3);
        assert_eq!(stage.snapshot().totals.out_bytes, Bytes::ZERO, "{alloc}");
        assert_eq!(server.wrong("small", 1), 0);
        server.ok(&format!("{alloc} peak {}", Bytes::mib(160).get()));
        server.ok("fill peak 4");
        assert_eq!(server.wrong("peak", 4), 0, "room for the next large one");
        assert_eq!(job.wrong("model", 3), 0);
    }
}

/// A Python program to which the kernel refuses what an ordinary container's profile refuses.
fn contained(stage: &Stage, name: &str) -> Program {
    let mut program = stage.python(&["--name", name], &[]);
    program.ok("from contained import *");
    program.ok("contain()");
    program.ok("init()");
    program.ok("retain()");
    program
}

/// pytorch#165685: descriptors that are fetched out of another process need a right that containers do not give. Memory opens in
/// another process without any such right, for the daemon hands its descriptor over.
#[test]
fn bug_089_memory_is_shared_where_no_process_may_look_into_another() {
    let stage = Stage::new(Options::default());
    let mut exporter = contained(&stage, "exporter");
    let mut importer = contained(&stage, "importer");
    let refused = importer.ok(&format!("take_descriptor_of({})", exporter.pid()));
    assert_eq!(refused, [1], "the other way is closed");
    exporter.ok("m = alloc(40 * MIB)");
    exporter.ok("fill(m, 10 * MIB, 7)");
    let handle = exporter.ok("handle_of(cuda, m)");
    assert_eq!(handle.len(), 64);
    importer.ok(&format!("m = open_handle(cuda, {handle:?})"));
    assert_eq!(importer.ok("wrong(m, 10 * MIB, 7)"), [0]);
    importer.ok("fill(m, 10 * MIB, 8)");
    assert_eq!(exporter.ok("wrong(m, 10 * MIB, 8)"), [0], "it is the same memory");
    importer.ok("ok(cuda.cuIpcCloseMemHandle(c_uint64(m)))");
    drop((exporter, importer));
    stage.wait_until_empty();
}

/// nixl#1754: memory that is made without exportable handles or without access by network cards works, and transports fall back to a
/// hundredth of their speed without a word. Ours is made with both, and what a driver does not give is named.
#[test]
fn bug_098_what_transports_need_is_asked_for_and_what_is_lost_is_named() {
    const RDMA: u32 = 15;
    const LEGACY_IPC: u32 = 10;
    for (faults, lost, ipc) in [
        ("", "", 1),
        ("cuMemCreate:1:801", "access by network cards", 1),
        (
            "cuMemCreate:1:801,cuMemCreate:2:801,cuMemCreate:3:801",
            "sharing with other processes, access by network cards",
            0,
        ),
    ] {
        let stage = Stage::new(Options::default());
        let mut program = stage.python(&["--name", "transport"], &[("EBB_SIM_FAULT", faults)]);
        program.ok("init()");
        program.ok("retain()");
        program.ok("m = alloc(40 * MIB)");
        program.ok("fill(m, 10 * MIB, 7)");
        let may = |program: &mut Program, which: u32| program.ok(&format!("attribute({which}, m, c_uint)"));
        assert_eq!(
            may(&mut program, RDMA),
            [u64::from(faults.is_empty())],
            "{faults}"
        );
        assert_eq!(may(&mut program, LEGACY_IPC), [ipc], "{faults}");
        let named = program.ok(&format!(
            "[device.get('lacks', '') == {lost:?} for device in report()['engine']['devices']]"
        ));
        assert_eq!(named, [1], "{faults}: not named as {lost:?}");
        // It is as it was after it went and came back: no silent loss by a release.
        stage.release("transport");
        assert_eq!(program.ok("wrong(m, 10 * MIB, 7)"), [0], "{faults}");
        assert_eq!(
            may(&mut program, RDMA),
            [u64::from(faults.is_empty())],
            "{faults}"
        );
        assert_eq!(may(&mut program, LEGACY_IPC), [ipc], "{faults}");
    }
}

/// Memory that can be shared may cost the driver a descriptor. A program that has none left gets memory as without ebb, and only
/// sharing it fails.
#[test]
fn a_full_table_of_descriptors_is_no_reason_to_refuse_memory() {
    let stage = Stage::new(Options::default());
    let mut program = stage.python(&["--name", "crowded"], &[]);
    program.ok("import resource");
    program.ok("resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))");
    program.ok("init()");
    program.ok("retain()");
    program.ok("s = stream()");
    program.ok("m = alloc(4 * MIB)");
    // Used up once before, so that a launch finds its code loaded.
    program.ok("[fill(m, MIB, 1), None][1]");
    program.ok("taken = []\\ntry:\\n    while True: taken.append(os.dup(0))\\nexcept OSError: pass");
    program.ok("n = alloc(40 * MIB)");
    program.ok("q = c_uint64(); ok(cuda.cuMemAllocAsync(byref(q), c_size_t(8 * MIB), s))");
    program.ok("[fill(n, 10 * MIB, 2), fill(q.value, 2 * MIB, 3), None][2]");
    program.ok("[os.close(fd) for fd in taken] and None");
    // It leaves and returns as all other memory does.
    stage.release("crowded");
    for (name, mib, seed) in [("m", 1, 1), ("n", 10, 2), ("q.value", 2, 3)] {
        assert_eq!(program.ok(&format!("wrong({name}, {mib} * MIB, {seed})")), [0]);
    }
    drop(program);
    stage.wait_until_empty();
}
