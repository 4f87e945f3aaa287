//! Programs that come, ask, hang up, die and misbehave.

use std::time::Duration;

use ebb_node::test_util::{CARD, Client, PATIENCE, TestDaemon};
use ebb_protocol::control::{Answer, Request, Snapshot};
use ebb_protocol::wire::{MAX_PACKET, SegmentInfo, ask_kind, deny};
use ebb_protocol::{ToDaemon, ToLayer, socket};
use ebb_units::{Bytes, DeviceUuid};
use proptest::prelude::*;
use proptest::test_runner::{Config as ProptestConfig, TestRunner};

const NO_TOKEN: [u8; 32] = [0; 32];
const TOTAL: Bytes = Bytes::mib(1024);

#[test]
fn child() {
    ebb_node::test_util::child_main();
}

fn folder() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("ebb-n").tempdir().unwrap()
}

fn leased(snapshot: &Snapshot) -> Bytes {
    snapshot.devices.iter().map(|device| device.leased).sum()
}

#[test]
fn a_session_gets_lease_shows_and_leaves_nothing() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let token = daemon.task("train", Bytes::ZERO, Some(Bytes::mib(512)));
    let mut client = daemon.process(token);
    let (slot, limit, elsewhere) = client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert_eq!((slot, limit, elsewhere), (0, Bytes::mib(512), Bytes::ZERO));
    assert!(client.alloc(Bytes::mib(500)));
    assert!(!client.alloc(Bytes::mib(14)), "one granule over the limit");
    assert!(client.alloc(Bytes::mib(12)), "the last one under it");
    let snapshot = daemon.snapshot();
    assert_eq!(leased(&snapshot), Bytes::mib(512));
    assert_eq!(snapshot.totals.denials, 1);
    let row = &snapshot.tasks[0].processes[0];
    assert_eq!(
        (row.pid, row.lease, row.device),
        (client.pid(), Bytes::mib(512), Some(CARD))
    );
    client.kill();
    let snapshot = daemon.until("nothing is held", |s| leased(s).is_zero());
    assert_eq!(snapshot.devices[0].peak, Bytes::mib(512));
    assert_eq!(snapshot.devices[0].free, snapshot.devices[0].capacity);
}

#[test]
fn bug_010_two_clients_that_ask_at_once_do_not_both_get_the_last_bytes() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "[event_log]\nenabled = false");
    let token = daemon.task("both", Bytes::ZERO, Some(TOTAL));
    let mut pair = [daemon.client(token), daemon.client(token)];
    for client in &mut pair {
        client.attach(Bytes::gib(8), Bytes::ZERO, Bytes::ZERO);
    }
    for round in 0..3000 {
        let asks = [0, 1].map(|i| pair[i].ask(ask_kind::ALLOC, Bytes::mib(600), true));
        let granted = [0, 1].map(|i| match pair[i].answer() {
            ToLayer::Grant { ask, bytes, .. } => {
                assert_eq!((ask, bytes), (asks[i], Bytes::mib(600)));
                true
            }
            ToLayer::Deny {
                ask, reason, last, ..
            } => {
                assert_eq!((ask, reason, last), (asks[i], deny::OVER_LIMIT, true));
                false
            }
            other => panic!("{other:?}"),
        });
        assert!(granted[0] != granted[1], "round {round}: {granted:?}");
        let winner = usize::from(granted[1]);
        pair[winner].give_back(Bytes::mib(600));
        // The next round begins once this is taken in.
        daemon_has(&daemon, Bytes::ZERO, round);
    }
}

fn daemon_has(daemon: &TestDaemon, bytes: Bytes, round: u32) {
    daemon.until(&format!("{bytes} leased in round {round}"), |s| {
        leased(s) == bytes
    });
}

#[test]
fn bug_010_a_client_killed_between_ask_and_use_leaves_no_bytes_behind() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let token = daemon.task("killed", Bytes::ZERO, Some(TOTAL));
    for round in 0..20 {
        let mut client = daemon.process(token);
        client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
        client.ask(ask_kind::ALLOC, Bytes::mib(600), true);
        if round % 2 == 0 {
            client.answer();
        }
        client.kill();
        daemon_has(&daemon, Bytes::ZERO, round);
    }
}

#[test]
fn bug_014_returning_more_than_is_held_never_wraps() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut client = daemon.client(NO_TOKEN);
    client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    let mut model = Bytes::ZERO;
    let mut state = 0x2545_f491_4f6c_dd1d_u64; // a fixed seed
    for _ in 0..500 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let bytes = Bytes::mib(2 * (1 + state % 40));
        if state & (1 << 40) == 0 && model + bytes <= Bytes::mib(1000) {
            assert!(client.alloc(bytes));
            model += bytes;
        } else {
            client.give_back(bytes);
            model = model.saturating_sub(bytes);
        }
    }
    client.send(&ToDaemon::Return {
        device: 0,
        bytes: Bytes::MAX,
    });
    daemon_has(&daemon, Bytes::ZERO, 0);
    assert!(client.alloc(Bytes::mib(1000)), "the account is still right");
    assert_eq!(leased(&daemon.snapshot()), Bytes::mib(1000));
}

#[test]
fn bug_016_an_account_follows_its_process_and_no_slot() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut first = daemon.process(NO_TOKEN);
    first.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(first.alloc(Bytes::mib(10)));
    let mut second = daemon.process(NO_TOKEN);
    second.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(second.alloc(Bytes::mib(20)));
    let mut third = daemon.process(NO_TOKEN);
    third.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(third.alloc(Bytes::mib(40)));
    // A neighbour in the middle goes; the others' accounts are theirs as before.
    second.kill();
    daemon_has(&daemon, Bytes::mib(50), 0);
    assert!(first.alloc(Bytes::mib(100)));
    assert!(third.alloc(Bytes::mib(200)));
    let snapshot = daemon.snapshot();
    let of = |pid| {
        let mut rows = snapshot.tasks.iter().flat_map(|task| &task.processes);
        rows.find(|row| row.pid == pid).map(|row| row.lease)
    };
    assert_eq!(of(first.pid()), Some(Bytes::mib(110)));
    assert_eq!(of(third.pid()), Some(Bytes::mib(240)));
    assert_eq!(of(second.pid()), None);
}

#[test]
fn bug_040_an_ask_waits_for_an_idle_neighbour_instead_of_failing() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "[policy]\nidle_after = \"1ms\"");
    let (a_task, b_task) = (
        daemon.task("a", Bytes::ZERO, None),
        daemon.task("b", Bytes::ZERO, None),
    );
    let (mut a, mut b) = (daemon.process(a_task), daemon.process(b_task));
    a.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    b.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(a.alloc(Bytes::mib(920)));
    // 50 % for b, although a holds 90 %: a is asked to give way. The task may be lent out, so say so.
    let ask = b.ask(ask_kind::ALLOC, Bytes::mib(512), true);
    let ToLayer::Reclaim {
        order, bytes, reason, ..
    } = a.answer()
    else {
        panic!("a is asked")
    };
    assert!(bytes >= Bytes::mib(408) && !reason.is_empty(), "{bytes}");
    a.obey(order, bytes);
    match b.answer() {
        ToLayer::Grant { ask: of, bytes, .. } => assert_eq!((of, bytes), (ask, Bytes::mib(512))),
        other => panic!("{other:?}"),
    }
    let totals = daemon.snapshot().totals;
    assert_eq!((totals.releases, totals.out_bytes, totals.denials), (1, bytes, 0));
}

#[test]
fn bug_053_a_release_shows_at_once_and_in_full() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut client = daemon.client(NO_TOKEN);
    client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    for _ in 0..50 {
        assert!(client.alloc(Bytes::mib(300)));
        assert_eq!(leased(&daemon.snapshot()), Bytes::mib(300));
        client.give_back(Bytes::mib(300));
        // Behind the return in the same socket: once this is granted, the very next listing has it all.
        assert!(client.alloc(Bytes::mib(2)));
        assert_eq!(leased(&daemon.snapshot()), Bytes::mib(2));
        client.give_back(Bytes::mib(2));
    }
    let mut process = daemon.process(NO_TOKEN);
    process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(700)));
    process.kill();
    let snapshot = daemon.until("all is free", |s| leased(s).is_zero());
    assert_eq!(
        snapshot.devices[0].free, snapshot.devices[0].capacity,
        "at once means all of it"
    );
}

#[test]
fn a_closed_socket_of_a_living_process_frees_nothing_and_it_may_come_back() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let token = daemon.task("closer", Bytes::ZERO, Some(Bytes::mib(512)));
    let mut process = daemon.process(token);
    process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(100)));
    // An ask is open when the socket closes.
    process.ask(ask_kind::RESTORE, Bytes::mib(900), true);
    let session = process.session;
    let fd = process.connect();
    process.client.fd = fd;
    let snapshot = daemon.until("the old socket's end is seen", |s| {
        s.tasks
            .iter()
            .flat_map(|t| &t.processes)
            .any(|p| p.state == "not_connected")
    });
    assert_eq!(leased(&snapshot), Bytes::mib(100));
    let fd = process.connect();
    process.client = Client::hello(fd, token, session);
    assert_eq!(process.session, session, "the same session goes on");
    let lease = Bytes::mib(98);
    let (_, limit, elsewhere) = process.attach(TOTAL, lease, Bytes::mib(2));
    assert_eq!((limit, elsewhere), (Bytes::mib(512), Bytes::ZERO));
    daemon.until("what it does not hold any more is free", |s| leased(s) == lease);
    assert_eq!(daemon.snapshot().tasks.len(), 1);
    // Grown while alone: the ledger takes its word.
    let fd = process.connect();
    process.client = Client::hello(fd, token, session);
    process.attach(TOTAL, Bytes::mib(200), Bytes::ZERO);
    daemon.until("it is counted", |s| leased(s) == Bytes::mib(200));
    process.kill();
    daemon_has(&daemon, Bytes::ZERO, 0);
}

#[test]
fn a_program_that_replaces_itself_by_exec_has_lost_its_memory() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut process = daemon.process(NO_TOKEN);
    process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(100)));
    // The old library's socket closes with exec; a new library connects from the same process, knowing of no session.
    process.client.fd = process.connect();
    process.client = Client::hello(process.connect(), NO_TOKEN, 0);
    process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(leased(&daemon.snapshot()).is_zero());
    assert!(process.alloc(Bytes::mib(1000)));
}

#[test]
fn a_reclaim_to_a_program_that_is_not_connected_fails_and_others_are_chosen() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "[policy]\nidle_after = \"1ms\"");
    let tasks = ["gone", "there", "asks"].map(|name| daemon.task(name, Bytes::ZERO, None));
    let mut gone = daemon.process(tasks[0]);
    let mut there = daemon.process(tasks[1]);
    let mut asks = daemon.process(tasks[2]);
    for client in [&mut gone, &mut there, &mut asks] {
        client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    }
    assert!(gone.alloc(Bytes::mib(500)));
    assert!(there.alloc(Bytes::mib(500)));
    gone.client.fd = gone.connect();
    daemon.until("it is not connected", |s| {
        s.tasks
            .iter()
            .flat_map(|t| &t.processes)
            .any(|p| p.state == "not_connected")
    });
    let ask = asks.ask(ask_kind::ALLOC, Bytes::mib(300), true);
    let ToLayer::Reclaim { order, bytes, .. } = there.answer() else {
        panic!("the connected one is asked")
    };
    there.obey(order, bytes);
    assert!(matches!(asks.answer(), ToLayer::Grant { ask: of, .. } if of == ask));
}

#[test]
fn processes_of_one_task_hear_of_each_others_charge() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let token = daemon.task("two", Bytes::ZERO, Some(Bytes::mib(512)));
    let (mut a, mut b) = (daemon.process(token), daemon.process(token));
    a.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(a.alloc(Bytes::mib(100)));
    let (_, limit, elsewhere) = b.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert_eq!((limit, elsewhere), (Bytes::mib(512), Bytes::mib(100)));
    assert!(b.alloc(Bytes::mib(200)));
    loop {
        // Every change is told; the last one is what counts.
        if let ToLayer::Limit {
            charged_elsewhere,
            limit,
            ..
        } = a.recv()
        {
            assert_eq!(limit, Bytes::mib(512));
            if charged_elsewhere == Bytes::mib(200) {
                break;
            }
        }
    }
    b.kill();
    loop {
        if matches!(
            a.recv(),
            ToLayer::Limit {
                charged_elsewhere: Bytes::ZERO,
                ..
            }
        ) {
            break;
        }
    }
}

#[test]
fn a_child_that_comes_after_its_tasks_end_keeps_the_limit() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    // The first process of the task ends before its child connects.
    let token = {
        let mut first = daemon.process(NO_TOKEN);
        first.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
        daemon.task("parent", Bytes::ZERO, Some(Bytes::mib(64)))
    };
    let mut late = daemon.process(token);
    let (_, limit, _) = late.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert_eq!(limit, Bytes::mib(64));
    assert!(!late.alloc(Bytes::mib(66)));
}

#[test]
fn a_false_token_is_a_task_of_its_own_with_the_defaults() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "[task]\nlimit = \"32Mi\"");
    let token = daemon.task("rich", Bytes::ZERO, None);
    let mut guess = token;
    guess[0] ^= 1;
    let mut poor = daemon.process(guess);
    let (_, limit, _) = poor.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert_eq!(limit, Bytes::mib(32));
    assert_eq!(daemon.snapshot().tasks.len(), 2);
    poor.kill();
    daemon.until("its task ends with it", |s| s.tasks.len() == 1);
}

/// A good client that keeps working while others misbehave.
struct Witness(Client);

impl Witness {
    fn new(daemon: &TestDaemon) -> Self {
        let mut client = daemon.client(daemon.task("witness", Bytes::ZERO, None));
        client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
        Self(client)
    }

    /// Gets two MiB and gives them back. A neighbour that claims the card may have it asked for its lease: it obeys.
    fn works(&mut self) {
        let ask = self.0.ask(ask_kind::ALLOC, Bytes::mib(2), true);
        loop {
            match self.0.answer() {
                ToLayer::Grant { ask: of, bytes, .. } if of == ask => {
                    assert_eq!(bytes, Bytes::mib(2));
                    self.0.lease += bytes;
                    return self.0.give_back(Bytes::mib(2));
                }
                ToLayer::Reclaim { order, bytes, .. } => self.0.obey(order, bytes),
                ToLayer::CancelReclaim { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn bug_155_whatever_a_client_sends_costs_only_itself() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "[arena]\nbudget = \"64Mi\"\nsegment = \"2Mi\"");
    let witness = std::cell::RefCell::new(Witness::new(&daemon));
    let bytes = prop_oneof![
        prop::collection::vec(any::<u8>(), 1..200),
        message().prop_map(|message| message.encode().unwrap()),
        (message(), any::<prop::sample::Index>(), any::<u8>()).prop_map(|(message, at, byte)| {
            let mut packet = message.encode().unwrap();
            let at = at.index(packet.len());
            packet[at] = byte;
            packet
        }),
    ];
    let script = (any::<bool>(), any::<bool>(), prop::collection::vec(bytes, 0..30));
    let config = ProptestConfig {
        cases: 150,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let mut runner = TestRunner::new(config);
    runner
        .run(&script, |(hello, attach, packets)| {
            let mut process = daemon.process([9; 32]);
            if attach {
                process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
            }
            let stranger = process.connect();
            for packet in &packets {
                let _ = socket::send(if hello { &process.fd } else { &stranger }, packet, &[]);
            }
            // Answers while the other one lives, and serves in full once it is gone.
            assert!(daemon.snapshot().arena.held <= Bytes::mib(64));
            process.kill();
            witness.borrow_mut().works();
            Ok(())
        })
        .unwrap();
    let snapshot = daemon.snapshot();
    assert!(snapshot.tasks.iter().any(|task| task.name == "witness"));
    assert!(snapshot.arena.held <= snapshot.arena.budget);
}

fn message() -> impl Strategy<Value = ToDaemon> {
    let bytes = || {
        prop_oneof![
            Just(Bytes::MAX),
            (0..1_u64 << 32).prop_map(Bytes),
            Just(Bytes::ZERO)
        ]
    };
    let device = || prop_oneof![Just(0_u32), any::<u32>()];
    prop_oneof![
        (any::<[u8; 32]>(), any::<u64>(), any::<u32>()).prop_map(|(token, resumes, pid)| ToDaemon::Hello {
            pid,
            token,
            program: [255; 64],
            resumes
        }),
        (any::<[u8; 16]>(), bytes(), bytes(), bytes(), bytes()).prop_map(
            |(uuid, total, lease, evicted, overhead)| ToDaemon::Attach {
                device: if uuid[0] < 200 { CARD } else { DeviceUuid(uuid) },
                total,
                granularity: Bytes::ZERO,
                lease,
                evicted,
                overhead
            }
        ),
        (device(), 0..4_u64, any::<u32>(), bytes(), any::<bool>()).prop_map(
            |(device, ask, kind, bytes, long)| ToDaemon::Ask {
                device,
                ask,
                kind,
                bytes,
                long
            }
        ),
        (device(), 0..4_u64).prop_map(|(device, ask)| ToDaemon::CancelAsk { device, ask }),
        (device(), bytes()).prop_map(|(device, bytes)| ToDaemon::Return { device, bytes }),
        (device(), bytes(), bytes(), any::<u64>()).prop_map(|(device, a, b, n)| ToDaemon::Usage {
            device,
            allocated: a,
            resident: b,
            evicted: a,
            cached: b,
            pinned: a,
            overhead: b,
            touches: n,
            allocations: n,
            managed: a,
            managed_out: b,
            exported: a,
            imported: b
        }),
        (device(), bytes()).prop_map(|(device, bytes)| ToDaemon::Clean { device, bytes }),
        (device(), 0..9_u64, bytes()).prop_map(|(device, order, bytes)| ToDaemon::ReclaimProgress {
            device,
            order,
            bytes
        }),
        (device(), 0..9_u64, any::<u32>(), bytes(), any::<u64>()).prop_map(
            |(device, order, outcome, copied, nanos)| ToDaemon::ReclaimDone {
                device,
                order,
                outcome,
                copied,
                nanos
            }
        ),
        (device(), bytes(), any::<u64>()).prop_map(|(device, copied, nanos)| ToDaemon::Restored {
            device,
            copied,
            nanos
        }),
        (bytes(), any::<bool>()).prop_map(|(bytes, urgent)| ToDaemon::ArenaWant { bytes, urgent }),
        prop::collection::vec(any::<u64>(), 0..20).prop_map(|segments| ToDaemon::ArenaReturn { segments }),
        prop::collection::vec((any::<u64>(), bytes()), 0..9).prop_map(|list| ToDaemon::ArenaDeclare {
            segments: list
                .into_iter()
                .map(|(id, bytes)| SegmentInfo { id, bytes })
                .collect()
        }),
        (any::<u64>(), prop::collection::vec(any::<u8>(), 0..99))
            .prop_map(|(query, text)| ToDaemon::Report { query, text }),
        device().prop_map(|device| ToDaemon::Detach { device }),
    ]
}

#[test]
fn bug_155_nonsense_is_counted_and_then_the_client_is_dropped() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut witness = Witness::new(&daemon);
    let client = daemon.process(NO_TOKEN);
    for _ in 0..15 {
        socket::send(&client.fd, b"no message", &[]).unwrap();
    }
    assert!(
        !ebb_node::test_util::readable(&client.fd, Duration::ZERO),
        "a few are forgiven"
    );
    socket::send(&client.fd, &vec![0; MAX_PACKET + 1], &[]).unwrap();
    assert!(client.dropped());
    witness.works();
}

#[test]
fn a_client_that_does_not_read_is_dropped_and_keeps_its_bytes() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut witness = Witness::new(&daemon);
    let mut client = daemon.process(NO_TOKEN);
    client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(client.alloc(Bytes::mib(8)));
    // Each of these is answered; nobody reads the answers.
    let ask = |ask| {
        ToDaemon::Ask {
            device: 0,
            ask,
            kind: ask_kind::ALLOC,
            bytes: Bytes::gib(64),
            long: false,
        }
        .encode()
        .unwrap()
    };
    let mut sent = 1000_u64;
    while socket::send(&client.fd, &ask(sent), &[]).is_ok() {
        sent += 1;
        assert!(sent < 1_000_000, "never dropped");
    }
    witness.works();
    let snapshot = daemon.snapshot();
    let row = snapshot
        .tasks
        .iter()
        .flat_map(|t| &t.processes)
        .find(|p| p.pid == client.pid())
        .unwrap();
    assert_eq!((row.state.as_str(), row.lease), ("not_connected", Bytes::mib(8)));
}

#[test]
fn a_thousand_connections_come_and_go() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut witness = Witness::new(&daemon);
    let before = std::fs::read_dir("/proc/self/fd").unwrap().count();
    for i in 0..1000 {
        let raw = daemon.raw();
        if i % 3 == 0 {
            drop(Client::hello(raw, [7; 32], 0));
        }
    }
    witness.works();
    daemon.until("only the witness is left", |s| {
        s.tasks.iter().flat_map(|t| &t.processes).count() == 1
    });
    // Descriptors are this process's, the daemon's included; other tests of this program run beside.
    let start = std::time::Instant::now();
    while std::fs::read_dir("/proc/self/fd").unwrap().count() > before + 200 {
        assert!(start.elapsed() < PATIENCE, "descriptors leak");
    }
}

#[test]
fn a_daemon_that_stops_lets_programs_go_on() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut client = daemon.client(NO_TOKEN);
    client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(matches!(daemon.ask(&Request::Shutdown), Answer::Ok(_)));
    daemon.wait();
    assert!(client.dropped());
}
