//! The daemon comes, goes, hangs, talks nonsense; the arena and what is told.

use std::sync::Arc;
use std::time::Duration;

use ebb_device::fake::Card;
use ebb_protocol::wire::{ask_kind, outcome};
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::Bytes;

use crate::testing::{Daemon, G, Rig, Script, done};

fn attached(rig: &Rig) {
    rig.until("the attach to be answered", |rig| {
        rig.state(|state| state.slot.is_some())
    });
}

/// The daemon dies and comes back while everything is on the card: the layer goes on, and declares what it holds.
#[test]
fn a_new_daemon_hears_what_the_process_holds() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let ptr = rig.alloc(40 * G);
    rig.fill(ptr, 40 * G, 1);
    rig.until("arena", |rig| rig.engine.core.arena.sums().total >= 40 * G);
    let arena = rig.engine.core.arena.sums().total;
    daemon.expect("hello", |m| {
        matches!(m, ToDaemon::Hello { resumes: 0, .. }).then_some(())
    });
    daemon.disconnect();
    let second = rig.alloc(20 * G);
    rig.fill(second, 20 * G, 2);
    daemon.wait_connections(2);
    let resumes = daemon.expect("hello again", |m| match m {
        ToDaemon::Hello { resumes, .. } => Some(*resumes),
        _ => None,
    });
    assert_eq!(resumes, 1, "the session of the first connection");
    let declared = daemon.expect("the arena", |m| match m {
        ToDaemon::ArenaDeclare { segments } => Some(segments.iter().map(|s| s.bytes.get()).sum::<u64>()),
        _ => None,
    });
    assert_eq!(declared, arena);
    attached(&rig);
    assert_eq!(daemon.lease(), rig.books().used, "its ledger is right at once");
    let end = daemon.reclaim(u64::MAX);
    assert!(done(end) && end.freed == 60 * G, "{end:?}");
    assert!(rig.holds(ptr, 40 * G, 1) && rig.holds(second, 20 * G, 2));
    rig.engine.free(ptr).unwrap();
    rig.engine.free(second).unwrap();
    rig.assert_gone_after_detach();
}

/// It dies in the middle of an eviction, of a wait for room, and while everything is out.
#[test]
fn the_daemon_dies_at_any_step_and_nothing_is_lost() {
    let daemon = Daemon::start(Script::default());
    let rig = Arc::new(Rig::new(Some(&daemon), 256 * G));
    let ptr = rig.alloc(64 * G);
    rig.fill(ptr, 64 * G, 1);
    // Everything is out.
    assert!(done(daemon.reclaim(u64::MAX)));
    daemon.disconnect();
    assert!(rig.holds(ptr, 64 * G, 1), "alone, the driver decides about room");
    daemon.wait_connections(2);
    attached(&rig);
    assert_eq!(daemon.lease(), 64 * G);
    // A wait for room.
    daemon.script(|script| script.grant_restores = false);
    assert!(done(daemon.reclaim(u64::MAX)));
    let toucher = std::thread::spawn({
        let rig = rig.clone();
        move || rig.holds(ptr, 64 * G, 1)
    });
    let (ask, bytes, _) = daemon.expect_ask(ask_kind::RESTORE);
    daemon.grant(ask, bytes / 4);
    daemon.disconnect();
    assert!(toucher.join().unwrap());
    daemon.wait_connections(3);
    attached(&rig);
    // In the middle of an eviction: it stops, or ends; either way the new ledger is right.
    rig.fake
        .delay(ebb_device::fake::Call::Wait, Duration::from_millis(2));
    daemon.order(u64::MAX);
    rig.until("some of it to go", |rig| rig.books().evicted > 0);
    daemon.disconnect();
    rig.fake.heal();
    assert!(rig.holds(ptr, 64 * G, 1));
    daemon.wait_connections(4);
    attached(&rig);
    rig.until("the ledger to be right", |rig| {
        daemon.lease() == rig.books().lease
    });
    assert!(rig.books().used <= daemon.lease());
    rig.engine.free(ptr).unwrap();
    let rig = Arc::into_inner(rig).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn an_allocation_that_waits_goes_on_when_the_daemon_dies() {
    let daemon = Daemon::start(Script {
        grant_allocs: false,
        ..Script::default()
    });
    let rig = Arc::new(Rig::new(Some(&daemon), 256 * G));
    let waits = std::thread::spawn({
        let rig = rig.clone();
        move || rig.alloc(20 * G)
    });
    daemon.expect_ask(ask_kind::ALLOC);
    daemon.disconnect();
    let ptr = waits.join().unwrap();
    rig.engine.free(ptr).unwrap();
}

#[test]
fn a_daemon_that_does_not_answer_is_left() {
    let daemon = Daemon::start(Script {
        answer_attach: false,
        ..Script::default()
    });
    let rig = Rig::with(Some(&daemon), Card::new(64 * G), 64 * G, G, |config| {
        config.connect_wait = Duration::from_millis(30);
    });
    let ptr = rig.alloc(20 * G);
    rig.fill(ptr, 20 * G, 1);
    daemon.expect("what is not answered", |m| {
        matches!(m, ToDaemon::Attach { .. }).then_some(())
    });
    daemon.script(|script| script.answer_attach = true);
    attached(&rig);
    assert!(daemon.connections() >= 2);
    assert_eq!(daemon.lease(), 20 * G);
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn nonsense_ends_the_connection_and_nothing_else() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 64 * G);
    let ptr = rig.alloc(20 * G);
    rig.fill(ptr, 20 * G, 1);
    // Unknown slots, asks, orders, segments: ignored.
    for message in [
        ToLayer::Grant {
            device: 9,
            ask: 1,
            bytes: Bytes(G),
        },
        ToLayer::Deny {
            device: 0,
            ask: 77,
            reason: 1,
            last: true,
        },
        ToLayer::CancelReclaim { device: 0, order: 5 },
        ToLayer::ArenaRecall { bytes: Bytes::ZERO },
        ToLayer::Limit {
            device: 3,
            limit: Bytes::ZERO,
            charged_elsewhere: Bytes::ZERO,
        },
    ] {
        daemon.send(message);
    }
    daemon.send(ToLayer::Query { query: 4 });
    let text = daemon.expect("a report", |m| match m {
        ToDaemon::Report { query: 4, text } => Some(String::from_utf8(text.clone()).unwrap()),
        _ => None,
    });
    assert!(text.starts_with('{') && text.ends_with('}'), "{text}");
    assert_eq!(daemon.connections(), 1);
    daemon.send_raw(b"GET / HTTP/1.1\r\n\r\n");
    daemon.wait_connections(2);
    attached(&rig);
    assert!(rig.holds(ptr, 20 * G, 1));
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn a_refusal_is_final_and_harmless() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 64 * G);
    daemon.send(ToLayer::Refused {
        text: b"not in this house".to_vec(),
    });
    rig.until("the refusal", |rig| {
        rig.engine.report_json().contains("not in this house")
    });
    let ptr = rig.alloc(20 * G);
    rig.fill(ptr, 20 * G, 1);
    assert!(rig.holds(ptr, 20 * G, 1));
    assert_eq!(daemon.connections(), 1);
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}

/// An order takes whole chunks, as many as it needs and not more.
#[test]
fn an_order_takes_what_it_needs() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let a = rig.alloc(64 * G);
    let b = rig.alloc(16 * G);
    rig.fill(a, 64 * G, 1);
    rig.fill(b, 16 * G, 2);
    // Chunks of a: 8 granules; of b: 4.
    let end = daemon.reclaim(11 * G);
    assert_eq!(
        (end.outcome, end.freed, end.copied),
        (outcome::DONE, 11 * G, 12 * G)
    );
    let end = daemon.reclaim(G);
    assert_eq!(
        (end.freed, end.copied),
        (G, 0),
        "one granule of that was left over"
    );
    assert_eq!(rig.books().evicted, 12 * G);
    assert!(rig.holds(a, 64 * G, 1) && rig.holds(b, 16 * G, 2));
    daemon.wait_restored(1);
    assert_eq!(daemon.lease(), 80 * G);
    rig.engine.free(a).unwrap();
    rig.engine.free(b).unwrap();
    rig.assert_gone_after_detach();
}

/// The arena has room for half: that half goes, the answer says why not more; when segments come the rest goes.
#[test]
fn a_full_arena_is_an_answer() {
    let daemon = Daemon::start(Script {
        arena: 32 * G,
        ..Script::default()
    });
    let rig = Rig::with(Some(&daemon), Card::new(256 * G), 256 * G, G, |config| {
        config.arena_wait = Duration::from_millis(50);
    });
    let ptr = rig.alloc(64 * G);
    rig.fill(ptr, 64 * G, 1);
    let end = daemon.reclaim(u64::MAX);
    assert_eq!((end.outcome, end.freed), (outcome::NO_ROOM, 32 * G));
    daemon.expect("an urgent wish", |m| {
        matches!(m, ToDaemon::ArenaWant { urgent: true, .. }).then_some(())
    });
    daemon.script(|script| script.arena = 1 << 30);
    let end = daemon.reclaim(u64::MAX);
    assert!(done(end), "{end:?}");
    assert_eq!(rig.card.used(), 0);
    assert!(rig.holds(ptr, 64 * G, 1));
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}

/// Segments that are empty, or run empty, go back when asked for; what is in use stays.
#[test]
fn segments_go_back_when_they_are_empty() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let ptr = rig.alloc(64 * G);
    rig.fill(ptr, 64 * G, 1);
    rig.until("arena", |rig| rig.engine.core.arena.sums().total >= 64 * G);
    let given = daemon.arena_given();
    assert_eq!(given, 64 * G);
    assert!(done(daemon.reclaim(u64::MAX)));
    // All of it is in use: nothing can go yet. As the memory comes back, it does.
    daemon.send(ToLayer::ArenaRecall { bytes: Bytes(48 * G) });
    daemon.script(|script| script.arena = 0);
    assert!(rig.holds(ptr, 64 * G, 1));
    daemon.wait_arena(16 * G);
    rig.until("segments to be unmapped", |rig| rig.host.segments() == 1);
    assert_eq!(rig.fake.registered(), 1);
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}

/// A segment never leaves while somebody captures: the driver's unregistering waits for the GPU.
#[test]
fn segments_do_not_leave_during_a_capture() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let ptr = rig.alloc(32 * G);
    rig.until("arena", |rig| rig.fake.registered() == 2);
    rig.engine.capture_begin();
    daemon.send(ToLayer::ArenaRecall { bytes: Bytes::MAX });
    daemon.send(ToLayer::Query { query: 1 });
    daemon.expect("the recall to be read", |m| {
        matches!(m, ToDaemon::Report { .. }).then_some(())
    });
    assert_eq!(rig.fake.registered(), 2);
    rig.engine.capture_end();
    daemon.wait_arena(0);
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}

/// Use is told when it changes; touches wake the thread that sleeps.
#[test]
fn use_is_told() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let ptr = rig.alloc(20 * G);
    let small = rig.alloc(1);
    daemon.wait_usage(|m| {
        matches!(m, ToDaemon::Usage { allocated, resident, allocations: 2, .. }
            if allocated.get() == 52 * G && resident.get() == 52 * G)
    });
    // Long enough for the thread to have gone to sleep: then one touch.
    rig.until("the thread to sleep", |rig| rig.engine.core.gate.is_watched());
    let before = rig.engine.gate().passages();
    rig.touch(|_| ()).unwrap();
    daemon.wait_usage(|m| matches!(m, ToDaemon::Usage { touches, .. } if *touches > before));
    rig.engine.free(ptr).unwrap();
    rig.engine.free(small).unwrap();
    daemon.wait_usage(|m| {
        matches!(m, ToDaemon::Usage { allocated, cached, allocations: 0, .. }
            if allocated.get() == 0 && cached.get() == 52 * G)
    });
    rig.assert_gone_after_detach();
}

/// A thread that waited for its memory was counted when it came, and ends the watch when it goes on: what it does next is told all the same.
#[test]
fn use_is_told_after_a_wait_at_the_gate() {
    let daemon = Daemon::start(Script {
        grant_restores: false,
        ..Script::default()
    });
    let rig = Rig::new(Some(&daemon), 256 * G);
    let ptr = rig.alloc(20 * G);
    rig.fill(ptr, 20 * G, 1);
    assert!(done(daemon.reclaim(u64::MAX)));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| rig.holds(ptr, 20 * G, 1));
        let (ask, bytes, _) = daemon.expect_ask(ask_kind::RESTORE);
        rig.until("the thread to sleep", |rig| rig.engine.core.gate.is_watched());
        daemon.grant(ask, bytes);
        assert!(waiter.join().unwrap());
    });
    daemon.wait_restored(1);
    rig.until("the thread to sleep again", |rig| {
        rig.engine.core.gate.is_watched()
    });
    let before = rig.engine.gate().passages();
    rig.touch(|_| ()).unwrap();
    daemon.wait_usage(|m| matches!(m, ToDaemon::Usage { touches, .. } if *touches > before));
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn an_order_that_is_taken_back_stops() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let ptr = rig.alloc(64 * G);
    rig.fill(ptr, 64 * G, 1);
    rig.until("arena", |rig| rig.engine.core.arena.sums().total >= 64 * G);
    rig.fake
        .delay(ebb_device::fake::Call::Wait, Duration::from_millis(20));
    let order = daemon.order(u64::MAX);
    rig.until("some of it to go", |rig| rig.books().evicted > 0);
    daemon.send(ToLayer::CancelReclaim { device: 0, order });
    let end = daemon.end_of(order);
    assert!(end.freed < 64 * G, "{end:?}");
    rig.fake.heal();
    assert!(rig.holds(ptr, 64 * G, 1));
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}

/// After `exit` has begun nothing is evicted any more, and what is out still comes back when it is touched.
#[test]
fn no_eviction_after_exit_began() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let ptr = rig.alloc(20 * G);
    rig.fill(ptr, 20 * G, 1);
    assert!(done(daemon.reclaim(u64::MAX)));
    rig.engine.shutdown();
    assert!(rig.holds(ptr, 20 * G, 1));
    let end = daemon.reclaim(u64::MAX);
    assert_eq!((end.outcome, end.freed), (outcome::FAILED, 0));
    assert!(rig.holds(ptr, 20 * G, 1));
    rig.engine.free(ptr).unwrap();
}

/// A signal handler that calls `exit` runs on a thread that may hold any lock.
#[test]
fn exit_in_a_signal_handler_does_not_wait_for_its_own_thread() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 64 * G);
    let device = rig.engine.core.device(rig.device).unwrap();
    let held = device.lock();
    rig.engine.shutdown();
    drop(held);
    rig.engine.core.change_devices(|_| rig.engine.shutdown());
    assert!(rig.engine.core.is_exiting());
}

/// What the daemon judges an ask by must be what is true when it is made.
#[test]
fn what_was_freed_in_host_memory_is_told_before_more_is_asked_for() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let ptr = rig.alloc(100 * G);
    assert_eq!(daemon.reclaim(u64::MAX).outcome, outcome::DONE);
    let evicted = |message: &ToDaemon| match message {
        ToDaemon::Usage { evicted, .. } => Some(evicted.get()),
        ToDaemon::Ask { .. } => Some(u64::MAX),
        _ => None,
    };
    daemon.expect("what is away", |message| {
        (evicted(message) == Some(100 * G)).then_some(())
    });
    rig.engine.free(ptr).unwrap();
    rig.alloc(100 * G);
    let first = daemon.expect("use or an ask", |message| {
        evicted(message).filter(|it| *it != 100 * G)
    });
    assert_eq!(first, 0, "the ask came before the news");
}

/// A driver that is taken down while a thread of ours is in one of its calls takes the program with it: `exit` waits for the call.
#[test]
fn the_end_of_the_program_waits_for_what_the_arena_does_at_the_driver() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    rig.fake
        .delay(ebb_device::fake::Call::RegisterHost, Duration::from_millis(100));
    let ptr = rig.alloc(40 * G);
    rig.until("a segment to come", |_| daemon.arena_given() > 0);
    rig.engine.shutdown();
    let registered = rig.fake.registered();
    assert!(
        !rig.engine.core.is_at_driver(),
        "nobody of ours is there any more"
    );
    rig.engine.free(ptr).unwrap();
    assert_eq!(rig.fake.registered(), registered, "and nobody goes there");
}
