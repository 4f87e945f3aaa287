//! Memory that is imported from another process by a descriptor, a pool or a handle of the driver's: charged once, named where it is held, and
//! promised to nobody while somebody keeps it alive.

use ebb_protocol::control::{Answer, Payload, Request};
use ebb_tests::{Options, Program, Stage, eventually};
use ebb_units::Bytes;

const SIZE: Bytes = Bytes(40 << 20);

/// Bytes that the report counts under a reason.
fn named(program: &mut Program, reason: &str) -> Bytes {
    Bytes(program.ok(&format!(
        "sum(e['bytes'] for d in report()['engine']['devices'] for e in d['pinned'] if e['reason'] == '{reason}')"
    ))[0])
}

const IMPORTED: &str = "imported from another process or interface";

fn program(stage: &Stage, name: &str) -> Program {
    let mut program = stage.python(&["--name", name], &[]);
    program.ok("import socket, vmm, os");
    program.ok("init()");
    program.ok("retain()");
    program.ok(&format!("SIZE = {}", SIZE.get()));
    // A kernel's module is the driver's own: it is there before anything is measured.
    program.ok("[function(f) and 0 for f in ('ebb_fill', 'ebb_check')]");
    program
}

/// Passes an open descriptor from one program to the other, as programs do it.
fn pass(stage: &Stage, from: &mut Program, fd: &str, to: &mut Program) {
    let path = stage.folder().join("passing");
    from.ok("door = socket.socket(socket.AF_UNIX)");
    from.ok(&format!("door.bind('{}')", path.display()));
    from.ok("door.listen()");
    to.ok("line = socket.socket(socket.AF_UNIX)");
    to.ok(&format!("line.connect('{}')", path.display()));
    from.ok("other, _ = door.accept()");
    from.ok(&format!("socket.send_fds(other, [b'.'], [{fd}]) and None"));
    from.ok("[thing.close() for thing in (door, other)] and None");
    to.ok("fd = socket.recv_fds(line, 1, 1)[1][0]");
    to.ok("line.close()");
    std::fs::remove_file(path).expect("it is there");
}

/// Memory by a handle, written, with its descriptor in `out`.
fn export(program: &mut Program) {
    program.ok("h, at = vmm.create(SIZE), vmm.reserve(SIZE)");
    program.ok("ok(vmm.map_at(at, SIZE, h)); ok(vmm.allow(at, SIZE))");
    program.ok("fill(at, SIZE // 4, 11)");
    program.ok("out = vmm.export(h)");
    program.ok("mark = alloc(2 * MIB)");
}

fn import(program: &mut Program) {
    program.ok("h, at = vmm.take(fd), vmm.reserve(SIZE)");
    program.ok("os.close(fd)");
    program.ok("ok(vmm.map_at(at, SIZE, h)); ok(vmm.allow(at, SIZE))");
    assert_eq!(program.ok("wrong(at, SIZE // 4, 11)"), [0]);
    assert_eq!(named(program, IMPORTED), SIZE);
    // What the daemon hears of next is not older than the import.
    program.ok("mark = alloc(2 * MIB)");
}

fn lease(stage: &Stage, task: &str) -> Bytes {
    let snapshot = stage.snapshot();
    let rows = snapshot.tasks.iter().filter(|row| row.name == task);
    rows.flat_map(|row| &row.processes)
        .map(|process| process.lease)
        .sum()
}

/// Waits until the daemon knows of what the program allocated last, which makes so much of it.
fn heard(stage: &Stage, task: &str, least: Bytes) {
    eventually("the daemon knows", || {
        let snapshot = stage.snapshot();
        let row = snapshot
            .tasks
            .iter()
            .find(|row| row.name == task)
            .expect("a task");
        let allocated: Bytes = row.processes.iter().map(|process| process.allocated).sum();
        if allocated >= least {
            Ok(())
        } else {
            Err(allocated.to_string())
        }
    });
}

fn of_nobody(stage: &Stage, wanted: Bytes) {
    eventually(&format!("{wanted} are nobody's"), || {
        let snapshot = stage.snapshot();
        match snapshot.devices[0].unmanaged {
            now if now == wanted => Ok(()),
            now => Err(format!("{now}; {snapshot:#?}")),
        }
    });
}

/// The importer outlives the exporter: the bytes are in neither's account and on the card, so that nobody may be promised them.
#[test]
fn what_an_importer_keeps_of_a_dead_exporter_is_promised_to_nobody() {
    let stage = Stage::new(Options::default());
    let (mut exporter, mut importer) = (program(&stage, "exporter"), program(&stage, "importer"));
    export(&mut exporter);
    pass(&stage, &mut exporter, "out", &mut importer);
    exporter.ok("os.close(out)");
    import(&mut importer);
    heard(&stage, "exporter", SIZE + Bytes::mib(2));
    heard(&stage, "importer", Bytes::mib(2));
    // One pays, whoever has it, and both say why it stays.
    assert!(lease(&stage, "exporter") >= SIZE);
    assert!(lease(&stage, "importer") < SIZE);
    assert_eq!(named(&mut exporter, "exported handle"), SIZE);
    let answer = stage.ask(&Request::Doctor { pid: importer.pid() });
    let Answer::Ok(Payload::Doctor {
        report: Some(report), ..
    }) = answer
    else {
        panic!("no report: {answer:?}");
    };
    assert!(report.to_string().contains(IMPORTED), "{report}");
    let wait_ms = Some(20_000);
    let _ = stage.ask(&Request::Pause {
        task: "exporter".into(),
        wait_ms,
    });
    assert!(lease(&stage, "exporter") >= SIZE, "it is not moved");
    assert_eq!(importer.ok("wrong(at, SIZE // 4, 11)"), [0]);
    let _ = stage.ask(&Request::Resume {
        task: "exporter".into(),
    });
    exporter.kill();
    of_nobody(&stage, SIZE);
    assert_eq!(importer.ok("wrong(at, SIZE // 4, 11)"), [0], "it is still there");
    // What is promised is there: somebody takes all that is free at once.
    let free = stage.snapshot().devices[0].free;
    assert!(free + SIZE < Bytes::mib(256), "{free}");
    let mut third = stage.run(&["--name", "third", "--strict"]);
    third.hold("m", Bytes::mib(160), 3);
    assert_eq!(third.wrong("m", 3), 0);
    third.kill();
    // The importer lets it go.
    importer.ok("ok(vmm.unmap(at, SIZE)); ok(vmm.release(h))");
    assert_eq!(named(&mut importer, IMPORTED), Bytes::ZERO);
    of_nobody(&stage, Bytes::ZERO);
    drop(importer);
    stage.wait_until_empty();
}

/// The same when the exporter lives on and has only freed it.
#[test]
fn what_an_importer_keeps_of_freed_memory_is_promised_to_nobody() {
    let stage = Stage::new(Options::default());
    let (mut exporter, mut importer) = (program(&stage, "exporter"), program(&stage, "importer"));
    export(&mut exporter);
    pass(&stage, &mut exporter, "out", &mut importer);
    exporter.ok("os.close(out)");
    import(&mut importer);
    heard(&stage, "exporter", SIZE + Bytes::mib(2));
    heard(&stage, "importer", Bytes::mib(2));
    exporter.ok("ok(vmm.unmap(at, SIZE)); ok(vmm.release(h))");
    of_nobody(&stage, SIZE);
    importer.kill();
    of_nobody(&stage, Bytes::ZERO);
}

/// Every other way by which memory of others comes into a process: named as long as it is held, and never charged.
#[test]
fn memory_of_others_is_named_however_it_came() {
    let stage = Stage::new(Options::default());
    let (mut exporter, mut importer) = (program(&stage, "exporter"), program(&stage, "importer"));
    // A pool, and one allocation of it.
    for program in [&mut exporter, &mut importer] {
        program.ok("s = stream()");
        program.ok("pool, p, data = c_void_p(), c_uint64(), (ctypes.c_char * 64)()");
    }
    exporter.ok("import struct");
    exporter.ok("made = struct.pack('IIiiQQ56x', 1, 1, 1, 0, 0, 0)");
    exporter.ok("ok(cuda.cuMemPoolCreate(byref(pool), made))");
    exporter.ok("ok(cuda.cuMemAllocFromPoolAsync(byref(p), c_size_t(SIZE), pool, s))");
    exporter.ok("ok(cuda.cuStreamSynchronize(s))");
    exporter.ok("fill(p.value, SIZE // 4, 5)");
    exporter.ok("number = c_int(-1)");
    exporter.ok("ok(cuda.cuMemPoolExportToShareableHandle(byref(number), pool, 1, c_uint64(0)))");
    exporter.ok("ok(cuda.cuMemPoolExportPointer(data, p))");
    let words = exporter.ok("list(data.raw)");
    pass(&stage, &mut exporter, "number.value", &mut importer);
    importer
        .ok("ok(cuda.cuMemPoolImportFromShareableHandle(byref(pool), c_void_p(fd), 1, c_uint64(0)), 'pool')");
    importer.ok(&format!("data.raw = bytes({words:?})"));
    importer.ok("ok(cuda.cuMemPoolImportPointer(byref(p), pool, data), 'pointer')");
    assert_eq!(importer.ok("wrong(p.value, SIZE // 4, 5)"), [0]);
    assert_eq!(named(&mut importer, IMPORTED), SIZE);
    importer.ok("ok(cuda.cuMemFreeAsync(p, s))");
    assert_eq!(named(&mut importer, IMPORTED), Bytes::ZERO);
    // Another interface, for which the descriptor of a handle stands.
    export(&mut exporter);
    pass(&stage, &mut exporter, "out", &mut importer);
    importer.ok("outer = c_void_p()");
    importer.ok("import struct");
    importer.ok(
        "ok(cuda.cuImportExternalMemory(byref(outer), struct.pack('IxxxxQQQI64xxxxx', 1, fd, 0, SIZE, 0)))",
    );
    assert_eq!(named(&mut importer, IMPORTED), SIZE);
    importer.ok("ok(cuda.cuDestroyExternalMemory(outer))");
    assert_eq!(named(&mut importer, IMPORTED), Bytes::ZERO);
    assert!(lease(&stage, "importer") < SIZE);
}

/// A legacy handle of a program without ebb is the driver's own; what it opens is named, counted as often as it is opened.
#[test]
fn memory_of_a_program_without_ebb_is_named() {
    let stage = Stage::new(Options::default());
    let mut plain = stage.run_plain(&[]);
    plain.hold("m", SIZE, 4);
    let handle = plain.ok("handle m");
    let mut importer = program(&stage, "importer");
    let bytes: Vec<u8> = handle.iter().flat_map(|word| word.to_le_bytes()).collect();
    importer.ok("class Handle(ctypes.Structure): _fields_ = [('bytes', ctypes.c_ubyte * 64)]");
    importer.ok(&format!("handle = Handle.from_buffer_copy(bytes({bytes:?}))"));
    importer.ok("p = c_uint64()");
    for _ in 0..2 {
        importer.ok("ok(cuda.cuIpcOpenMemHandle_v2(byref(p), handle, 1))");
    }
    assert_eq!(importer.ok("wrong(p.value, SIZE // 4, 4)"), [0]);
    assert_eq!(named(&mut importer, IMPORTED), SIZE);
    importer.ok("ok(cuda.cuIpcCloseMemHandle(p))");
    assert_eq!(named(&mut importer, IMPORTED), SIZE, "it is open once more");
    importer.ok("ok(cuda.cuIpcCloseMemHandle(p))");
    assert_eq!(named(&mut importer, IMPORTED), Bytes::ZERO);
}
