//! Memory that processes share: legacy handles through the daemon, and everything else that keeps memory where it is.

use ebb_protocol::control::{Answer, Request};
use ebb_tests::{Attribute, Options, Program, Reply, Stage, eventually, ledger_of};
use ebb_units::Bytes;

const SIZE: Bytes = Bytes(40 << 20);

/// A program that holds `m`, filled with a seed.
fn holder(stage: &Stage, name: &str, seed: u64) -> Program {
    let mut program = stage.run(&["--name", name]);
    program.hold("m", SIZE, seed);
    program
}

fn words(handle: &[u64]) -> String {
    handle.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
}

fn handle(program: &mut Program) -> Vec<u64> {
    program.ok("handle m")
}

fn open(program: &mut Program, as_name: &str, handle: &[u64]) -> Reply {
    program.say(&format!("ipcopen {as_name} {} {}", SIZE.get(), words(handle)))
}

fn opened(stage: &Stage, name: &str, handle: &[u64]) -> Program {
    let mut program = stage.run(&["--name", name]);
    let reply = open(&mut program, "m", handle);
    assert!(matches!(reply, Reply::Ok(_)), "{reply:?}");
    program
}

/// Bytes that a pause leaves on the card.
fn left_after_pause(stage: &Stage, task: &str) -> Bytes {
    let answer = stage.ask(&Request::Pause {
        task: task.into(),
        wait_ms: Some(20_000),
    });
    let leased = lease(stage, task);
    println!("pause of {task}: {answer:?}, {leased} left");
    leased
}

/// Waits until nothing of a task is pinned any more: a pause leaves nothing.
fn wait_until_it_moves(stage: &Stage, task: &str) {
    left_after_pause(stage, task);
    wait_for_lease(stage, task, Bytes::ZERO);
    resume(stage, task);
}

fn resume(stage: &Stage, task: &str) {
    let answer = stage.ask(&Request::Resume { task: task.into() });
    assert!(matches!(answer, Answer::Ok(_)), "{answer:?}");
}

fn lease(stage: &Stage, task: &str) -> Bytes {
    stage
        .snapshot()
        .tasks
        .iter()
        .filter(|row| row.name == task)
        .flat_map(|row| &row.processes)
        .map(|process| process.lease)
        .sum()
}

fn wait_for_lease(stage: &Stage, task: &str, bytes: Bytes) {
    eventually(&format!("{task} has {bytes}"), || match lease(stage, task) {
        now if now == bytes => Ok(()),
        now => Err(format!("{now}; {:#?}", stage.snapshot())),
    });
}

/// ucx#7110, PyTorch#165685: memory is opened in another process by its handle, though it is no memory of the driver's own kind,
/// and no process needs the right to look into another one.
#[test]
fn bug_088_089_memory_opens_in_another_process_and_is_counted_once() {
    let stage = Stage::new(Options::default());
    let mut exporter = holder(&stage, "exporter", 7);
    assert_eq!(
        exporter.ok(&format!("attribute m {}", Attribute::LEGACY_IPC.0)),
        [1]
    );
    let handle = handle(&mut exporter);
    let mut importer = opened(&stage, "importer", &handle);
    assert_eq!(importer.wrong("m", 7), 0);
    let (base, size) = (importer.ok("range m")[0], importer.ok("range m")[1]);
    assert!(base > 0 && size == SIZE.get());
    importer.ok("fill m 8");
    assert_eq!(exporter.wrong("m", 8), 0, "it is the same memory");
    exporter.ok("write m 9");
    assert_eq!(importer.ok("read m 9"), [0]);
    // What is open is neither moved nor counted twice, and its holder is named.
    let all = ledger_of(&stage.snapshot());
    assert!(all < SIZE + Bytes::mib(16), "{all}");
    assert!(left_after_pause(&stage, "exporter") >= SIZE);
    assert_eq!(importer.ok("read m 9"), [0]);
    resume(&stage, "exporter");
    // The last holder goes: it moves, and comes back with its bytes.
    importer.ok("ipcclose m");
    wait_until_it_moves(&stage, "exporter");
    assert_eq!(exporter.ok("read m 9"), [0]);
    // And again, from memory that is not on the card at first.
    let again = handle_of_evicted(&stage, &mut exporter);
    assert_eq!(again, handle);
    assert_eq!(
        open(&mut importer, "m", &again),
        importer_base(&mut importer, &again)
    );
    assert_eq!(importer.ok("read m 9"), [0]);
    drop((exporter, importer));
    stage.wait_until_empty();
}

/// A debugger holds the program that has the memory: who opens it is told so within seconds, and not after the ten minutes for
/// which memory is waited for that has to come back.
#[test]
fn a_program_that_is_stopped_is_not_waited_for() {
    let stage = Stage::new(Options::default());
    let mut exporter = holder(&stage, "exporter", 7);
    let handle = handle(&mut exporter);
    let mut importer = stage.run(&["--name", "importer"]);
    let pid = rustix::process::Pid::from_raw(exporter.pid().cast_signed()).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("it lives");
    let reply = open(&mut importer, "m", &handle);
    assert!(matches!(reply, Reply::Err(_)), "{reply:?}");
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("it lives");
    let reply = open(&mut importer, "m", &handle);
    assert!(matches!(reply, Reply::Ok(_)), "{reply:?}");
    assert_eq!(importer.wrong("m", 7), 0);
    drop((exporter, importer));
    stage.wait_until_empty();
}

fn handle_of_evicted(stage: &Stage, exporter: &mut Program) -> Vec<u64> {
    assert_eq!(left_after_pause(stage, "exporter"), Bytes::ZERO);
    let handle = handle(exporter);
    resume(stage, "exporter");
    handle
}

/// Opening once more counts, and gives the same address.
fn importer_base(importer: &mut Program, handle: &[u64]) -> Reply {
    let again = open(importer, "m", handle);
    importer.ok("ipcclose m");
    again
}

/// PyTorch#198305: a handle is the same bytes for the same allocation, whatever address in it is asked about, all of them defined.
#[test]
fn bug_091_handles_are_equal_for_equal_memory_and_cannot_be_guessed() {
    let stage = Stage::new(Options::default());
    let mut program = holder(&stage, "a", 1);
    let first = program.ok("handle m 0");
    assert_eq!(first, program.ok("handle m 5242880"));
    assert_eq!(first[5..], [0, 0, 0], "what means nothing is zero");
    program.ok("alloc n 1000");
    let small = program.ok("handle n");
    assert_ne!(first, small);
    assert_eq!(small, program.ok("handle n 999"));
    // Another bit, another program's name: nothing is there.
    let mut other = stage.run(&["--name", "b"]);
    other.ok("info");
    for at in [2, 3, 4] {
        let mut guess = first.clone();
        guess[at] ^= 1;
        assert_eq!(open(&mut other, "g", &guess), Reply::Err(400));
    }
    // Memory that was freed is not what lies there now.
    program.ok("free n");
    program.ok("alloc n 1000");
    assert_ne!(small, program.ok("handle n"));
    assert_eq!(open(&mut other, "g", &small), Reply::Err(400));
}

#[test]
fn the_drivers_rules_hold() {
    let stage = Stage::new(Options::default());
    let mut exporter = holder(&stage, "a", 1);
    assert_eq!(exporter.say("ipcself m"), Reply::Err(201), "one's own memory");
    let handle = handle(&mut exporter);
    let mut importer = opened(&stage, "b", &handle);
    let base = importer.ok("range m")[0];
    // Twice is one mapping with a count.
    assert_eq!(open(&mut importer, "n", &handle), Reply::Ok(base.to_string()));
    importer.ok("ipcclose n");
    assert_eq!(importer.wrong("m", 1), 0);
    assert!(
        matches!(importer.say("free m"), Reply::Err(1)),
        "it is not the importer's to free"
    );
    importer.ok("ipcclose m");
    assert_eq!(importer.say("ipcclose m"), Reply::Err(1));
    // A retained handle would let it be exported past us: as on memory of `cuMemAlloc`.
    assert_eq!(exporter.say("retain m"), Reply::Err(1));
    // Without ebb nobody can open it, and nobody is hurt.
    let mut plain = stage.run_plain(&[]);
    assert!(matches!(open(&mut plain, "m", &handle), Reply::Err(_)));
    // Handles of the driver's own memory pass, both ways.
    plain.hold("m", SIZE, 3);
    let drivers = plain.ok("handle m");
    let reply = open(&mut importer, "d", &drivers);
    assert!(matches!(reply, Reply::Ok(_)), "{reply:?}");
    assert_eq!(importer.wrong("d", 3), 0);
    importer.ok("ipcclose d");
}

/// LMCache#4980: nothing is lost when the one who shared is killed: it stays valid, is counted to who has it open, and is free when that one
/// closes it or dies.
#[test]
fn bug_092_nothing_is_lost_when_the_one_who_shares_is_killed() {
    let stage = Stage::new(Options::default());
    let mut importer = stage.run(&["--name", "importer"]);
    importer.hold("own", Bytes::mib(4), 1);
    assert_eq!(importer.wrong("own", 1), 0); // which also makes the small block that a check needs
    let own = lease(&stage, "importer");
    for round in 0..5 {
        let mut exporter = holder(&stage, "exporter", round);
        let handle = handle(&mut exporter);
        let reply = open(&mut importer, "m", &handle);
        assert!(matches!(reply, Reply::Ok(_)), "{reply:?}");
        exporter.kill();
        wait_for_lease(&stage, "importer", own + SIZE);
        assert_eq!(importer.wrong("m", round), 0);
        importer.ok("ipcclose m");
        wait_for_lease(&stage, "importer", own);
        assert_eq!(ledger_of(&stage.snapshot()), own);
    }
    // Two have it open: it is counted to one, then to the other.
    let mut exporter = holder(&stage, "exporter", 9);
    let handle = handle(&mut exporter);
    let mut second = opened(&stage, "second", &handle);
    let before = lease(&stage, "importer");
    let reply = open(&mut importer, "m", &handle);
    assert!(matches!(reply, Reply::Ok(_)), "{reply:?}");
    exporter.kill();
    eventually("it is counted once", || {
        let sum = lease(&stage, "importer") + lease(&stage, "second");
        if sum == before + SIZE {
            Ok(())
        } else {
            Err(format!("{sum}"))
        }
    });
    assert_eq!((importer.wrong("m", 9), second.wrong("m", 9)), (0, 0));
    importer.kill();
    eventually("it is counted to the other", || {
        let now = lease(&stage, "second");
        if now >= SIZE {
            Ok(())
        } else {
            Err(format!("{now}"))
        }
    });
    assert_eq!(second.wrong("m", 9), 0);
    second.kill();
    stage.wait_until_empty();
}

#[test]
fn freed_memory_stays_with_who_has_it_open_and_is_counted_to_who_freed_it() {
    let stage = Stage::new(Options::default());
    let mut exporter = holder(&stage, "exporter", 5);
    let handle = handle(&mut exporter);
    let mut importer = opened(&stage, "importer", &handle);
    exporter.ok("free m");
    assert_eq!(importer.wrong("m", 5), 0);
    // New memory of the exporter is not the old.
    exporter.hold("m", SIZE, 6);
    assert_eq!((importer.wrong("m", 5), exporter.wrong("m", 6)), (0, 0));
    assert!(lease(&stage, "exporter") >= SIZE + SIZE);
    importer.ok("ipcclose m");
    // What came free serves again, or goes to who asks.
    let mut other = stage.run(&["--name", "other"]);
    other.hold("m", Bytes::mib(180), 1);
    assert_eq!(exporter.wrong("m", 6), 0);
    drop((exporter, importer, other));
    stage.wait_until_empty();
}

/// Killed while it opens, has it open, and closes: the exporter's memory moves again each time.
#[test]
fn an_importer_that_is_killed_at_any_moment_leaves_no_pin() {
    let stage = Stage::new(Options::default());
    let mut exporter = holder(&stage, "exporter", 3);
    let handle = handle(&mut exporter);
    for fault in [
        "",
        "cuMemImportFromShareableHandle:1:kill",
        "cuMemMap:1:kill",
        "cuMemSetAccess:1:kill",
        "cuMemUnmap:1:kill",
        "cuMemAddressReserve:1:kill",
    ] {
        let env: &[(&str, &str)] = if fault.is_empty() {
            &[]
        } else {
            &[("EBB_SIM_FAULT", fault)]
        };
        let mut importer = stage.run_with_env(&["--name", "importer"], env);
        importer.send(&format!("ipcopen m {} {}", SIZE.get(), words(&handle)));
        let _ = importer.poll(ebb_tests::PATIENCE);
        if fault.starts_with("cuMemUnmap") {
            importer.send("ipcclose m");
            let _ = importer.poll(ebb_tests::PATIENCE);
        }
        importer.kill();
        wait_until_it_moves(&stage, "exporter");
        assert_eq!(exporter.wrong("m", 3), 0, "after `{fault}`");
    }
    drop(exporter);
    stage.wait_until_empty();
}

/// Killed while it hands memory out: the importer gets an error, and nothing is left.
#[test]
fn an_exporter_that_is_killed_while_it_hands_out_costs_an_error_and_no_more() {
    let stage = Stage::new(Options::default());
    let mut importer = stage.run(&["--name", "importer"]);
    importer.ok("info");
    let fault = "cuMemExportToShareableHandle:1:kill";
    let mut exporter = stage.run_with_env(&["--name", "exporter"], &[("EBB_SIM_FAULT", fault)]);
    exporter.hold("m", SIZE, 1);
    let one = handle(&mut exporter);
    assert_eq!(open(&mut importer, "m", &one), Reply::Err(400));
    // One that cannot is an error, too, and the next try works.
    let fault = "cuMemExportToShareableHandle:1:999";
    let mut exporter = stage.run_with_env(&["--name", "exporter"], &[("EBB_SIM_FAULT", fault)]);
    exporter.hold("m", SIZE, 2);
    let handle = handle(&mut exporter);
    assert_eq!(open(&mut importer, "m", &handle), Reply::Err(205));
    assert!(matches!(open(&mut importer, "m", &handle), Reply::Ok(_)));
    assert_eq!(importer.wrong("m", 2), 0);
    drop((exporter, importer));
    stage.wait_until_empty();
}

/// A daemon that is new learns who has what open, from both sides.
#[test]
fn shares_outlive_the_daemon() {
    let mut stage = Stage::new(Options::default());
    let mut exporter = holder(&stage, "exporter", 4);
    let handle = handle(&mut exporter);
    let mut importer = opened(&stage, "importer", &handle);
    let mut dies = opened(&stage, "dies", &handle);
    stage.kill_daemon();
    assert_eq!(importer.wrong("m", 4), 0);
    dies.kill();
    stage.start_daemon();
    eventually("all are back", || {
        let known = stage
            .snapshot()
            .tasks
            .iter()
            .map(|task| task.processes.len())
            .sum::<usize>();
        if known == 2 {
            Ok(())
        } else {
            Err(format!("{known}"))
        }
    });
    assert_eq!(importer.wrong("m", 4), 0);
    importer.ok("ipcclose m");
    wait_until_it_moves(&stage, "exporter");
    // The one who shares dies while there is no daemon.
    assert!(matches!(open(&mut importer, "m", &handle), Reply::Ok(_)));
    stage.kill_daemon();
    exporter.kill();
    stage.start_daemon();
    eventually("it is counted to who has it open", || {
        let now = lease(&stage, "importer");
        if now >= SIZE {
            Ok(())
        } else {
            Err(format!("{now}"))
        }
    });
    assert_eq!(importer.wrong("m", 4), 0);
    drop(importer);
    stage.wait_until_empty();
}

/// As PyTorch's workers do: an event says when the bytes are there.
#[test]
fn interprocess_events_work_as_without_ebb() {
    let stage = Stage::new(Options::default());
    let mut exporter = holder(&stage, "a", 1);
    let memory = handle(&mut exporter);
    let event = exporter.ok("event e");
    let mut importer = opened(&stage, "b", &memory);
    importer.ok(&format!("eventopen e {}", words(&event)));
    exporter.ok("spin 50");
    exporter.ok("launch m 2");
    exporter.ok("record e");
    importer.ok("wait e");
    assert_eq!(importer.wrong("m", 2), 0);
}

/// ucx#9895: `SYNC_MEMOPS` can be set, reads as it was set, and keeps the memory where it is: what is registered after it is not seen.
#[test]
fn bug_097_sync_memops_is_set_and_read_and_pins() {
    let stage = Stage::new(Options::default());
    let mut program = holder(&stage, "a", 1);
    let get = format!("attribute m {}", Attribute::SYNC_MEMOPS.0);
    assert_eq!(program.ok(&get), [0]);
    program.ok("syncmemops m 1");
    assert_eq!(program.ok(&get), [1]);
    assert!(left_after_pause(&stage, "a") >= SIZE);
    resume(&stage, "a");
    program.ok("write m 3");
    program.ok("syncmemops m 0");
    assert_eq!(program.ok(&get), [0]);
    wait_until_it_moves(&stage, "a");
    assert_eq!(program.ok("read m 3"), [0]);
    // Freed memory is not remembered.
    program.ok("syncmemops m 1");
    program.ok("free m");
    program.hold("m", SIZE, 2);
    assert_eq!(program.ok(&get), [0]);
}

/// vLLM-Ascend#15350, gdrcopy#54, vLLM#29569: what a network card or another mapping refers to stays until it is freed, and its pages
/// serve nobody else before.
#[test]
fn bug_095_154_registered_memory_is_where_it_was_after_a_release() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "a"]);
    program.hold("m", Bytes::mib(2), 1);
    program.hold("n", SIZE, 2);
    program.ok(&format!("dmabuf m {}", 2 << 20));
    program.ok("write m 5");
    // The rest goes, this stays; the transfer after it sees what the program wrote.
    let left = left_after_pause(&stage, "a");
    assert!(left >= Bytes::mib(2) && left < SIZE, "{left}");
    resume(&stage, "a");
    program.ok("write m 6");
    assert_eq!(program.ok("read m 6"), [0]);
    assert_eq!(program.wrong("n", 2), 0);
    // It is freed: pinned no more.
    program.ok("free m");
    wait_until_it_moves(&stage, "a");
}

/// cuda-checkpoint#30: a process that is locked holds up neither the daemon nor others, and says so when asked.
#[test]
fn bug_100_a_locked_process_holds_up_nobody_and_lives_on() {
    let stage = Stage::new(Options::default());
    let mut locked = holder(&stage, "locked", 1);
    let mut other = holder(&stage, "other", 2);
    let mut tool = stage.run(&["--name", "tool"]);
    let pid = locked.pid();
    tool.ok(&format!("checkpoint lock {pid}"));
    // The control path: reports and listings of both.
    for task in ["locked", "other"] {
        let answer = stage.ask(&Request::Doctor {
            pid: if task == "locked" { pid } else { other.pid() },
        });
        assert!(matches!(answer, Answer::Ok(_)), "{answer:?}");
    }
    assert_eq!(other.wrong("m", 2), 0);
    tool.ok(&format!("checkpoint checkpoint {pid}"));
    assert_eq!(other.wrong("m", 2), 0);
    tool.ok(&format!("checkpoint restore {pid}"));
    tool.ok(&format!("checkpoint unlock {pid}"));
    assert_eq!(locked.wrong("m", 1), 0);
    assert_eq!(left_after_pause(&stage, "locked"), Bytes::ZERO);
    resume(&stage, "locked");
    assert_eq!(locked.wrong("m", 1), 0);
}

/// Access of a peer is given to memory of ours, comes back with it, and is taken away.
#[test]
fn peers_have_access_after_a_release_and_not_after_it_is_disabled() {
    let stage = Stage::new(Options {
        devices: 2,
        ..Options::default()
    });
    let mut program = stage.run(&["--name", "a"]);
    program.ok("open 0");
    program.ok(&format!("allocon far {} 1", SIZE.get()));
    program.ok("peer 1 1");
    program.ok("fill far 3");
    left_after_pause(&stage, "a");
    resume(&stage, "a");
    assert_eq!(program.wrong("far", 3), 0);
    // Memory that comes later is seen, too.
    program.ok(&format!("allocon later {} 1", SIZE.get()));
    program.ok("fill later 4");
    assert_eq!(program.wrong("later", 4), 0);
    program.ok("peer 1 0");
    assert_eq!(program.say("peer 1 0"), Reply::Err(705));
    program.send("fill far 5");
    let reply = program.poll(ebb_tests::PATIENCE);
    assert!(
        !matches!(reply, Some(Reply::Ok(_))),
        "a kernel without access faults: {reply:?}"
    );
}

/// NCCL#1234: what a collective library makes costs what it says, and no more because of us.
#[test]
fn bug_103_nothing_is_rounded_twice() {
    let stage = Stage::new(Options::default());
    let mut program = stage.run(&["--name", "a"]);
    program.ok("info");
    let free = program.ok("info")[0];
    for i in 0..30 {
        program.ok(&format!("alloc b{i} {}", 2 << 20));
    }
    assert_eq!(free - program.ok("info")[0], 30 * (2 << 20));
    let one = program.ok("info")[0];
    program.ok(&format!("alloc odd {}", (4 << 20) + 1));
    assert_eq!(one - program.ok("info")[0], 6 << 20);
}

/// SGLang#14092: a release of a group is over when all its members have released, and what is granted is free, not promised.
#[test]
fn bug_086_a_group_has_released_when_its_slowest_member_has() {
    let stage = Stage::new(Options::default());
    let token = stage.task("group", Bytes::ZERO, None, ebb_units::Priority::Normal);
    let member = |seed| {
        let artefacts = ebb_tests::Artefacts::get();
        let mut command = std::process::Command::new(artefacts.program("gpu-script"));
        stage.gpu_env(&mut command);
        command
            .env("LD_PRELOAD", &artefacts.layer)
            .env("EBB_SOCKET_DIR", stage.socket_dir())
            .env("EBB_TASK_TOKEN", &token);
        let mut program = Program::start(command);
        program.hold("m", SIZE, seed);
        program
    };
    let (mut fast, mut slow) = (member(1), member(2));
    slow.ok("spin 300");
    let answer = stage.ask(&Request::Pause {
        task: "group".into(),
        wait_ms: Some(20_000),
    });
    assert!(matches!(answer, Answer::Ok(_)), "{answer:?}");
    assert_eq!(lease(&stage, "group"), Bytes::ZERO, "both, not the first");
    // The card is free, not only promised.
    let mut trainer = stage.run(&["--name", "trainer"]);
    trainer.hold("m", Bytes::mib(220), 3);
    assert_eq!(trainer.wrong("m", 3), 0);
    resume(&stage, "group");
    drop(trainer);
    assert_eq!((fast.wrong("m", 1), slow.wrong("m", 2)), (0, 0));
}
