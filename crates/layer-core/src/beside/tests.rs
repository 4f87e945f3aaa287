//! Over the fake device, with a scripted daemon.

use ebb_device::DeviceError;
use ebb_protocol::ToDaemon;
use ebb_units::Bytes;

use crate::ExternalKind;
use crate::testing::{Daemon, G, Rig, Script, done};

/// No address of the pool.
const AT: u64 = 1 << 60;

fn managed(rig: &Rig, at: u64, len: u64) {
    let kind = ExternalKind::Managed;
    rig.engine.external_reserve(rig.device, kind, Bytes(len)).unwrap();
    rig.engine.managed_made(rig.device, at, len);
}

/// What the report says is out.
fn out(rig: &Rig) -> u64 {
    let passages = rig.engine.core.gate.passages();
    rig.state(|state| state.beside.out(passages))
}

#[test]
fn managed_memory_goes_with_the_rest_and_is_told_of() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let own = rig.alloc(8 * G);
    rig.fill(own, 8 * G, 3);
    let own_bytes = rig.card.used();
    managed(&rig, AT, 40 * G);
    rig.touch(|fake| fake.touch_managed(AT, 40 * G, 30 * G)).unwrap();
    assert_eq!(rig.card.used(), own_bytes + 30 * G);
    let end = daemon.reclaim(u64::MAX);
    assert!(done(end), "{end:?}");
    assert_eq!(end.freed, own_bytes, "managed memory has no lease to give back");
    assert_eq!((rig.card.used(), out(&rig)), (0, 40 * G));
    assert_eq!(rig.fake.pushes(), [(AT, 40 * G)]);
    assert_eq!(rig.books().managed, 40 * G, "charged as before");
    daemon.wait_usage(|message| {
        matches!(message, ToDaemon::Usage { managed, managed_out, .. }
            if (managed.get(), managed_out.get()) == (40 * G, 40 * G))
    });
    // The program goes on: where its pages are is not known any more.
    assert!(rig.holds(own, 8 * G, 3));
    assert_eq!(out(&rig), 0);
    rig.assert_clean();
}

#[test]
fn what_never_was_on_the_card_is_not_moved() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let _own = rig.alloc(8 * G);
    managed(&rig, AT, 1 << 50);
    assert!(done(daemon.reclaim(u64::MAX)));
    assert_eq!(rig.fake.pushes(), []);
    rig.assert_clean();
}

#[test]
fn freed_managed_memory_is_not_named_again() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let _own = rig.alloc(8 * G);
    managed(&rig, AT, 10 * G);
    rig.engine.managed_gone(rig.device, AT);
    rig.fake.touch_managed(AT, 10 * G, 10 * G);
    assert!(done(daemon.reclaim(u64::MAX)));
    assert_eq!(rig.fake.pushes(), []);
}

#[test]
fn a_driver_that_cannot_push_is_asked_once() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let own = rig.alloc(8 * G);
    rig.fill(own, 8 * G, 1);
    managed(&rig, AT, 10 * G);
    rig.fake.touch_managed(AT, 10 * G, 10 * G);
    rig.fake.refuse_pushes(DeviceError::Driver {
        code: 801,
        call: "push_to_host",
    });
    for round in 1..3 {
        assert!(done(daemon.reclaim(u64::MAX)));
        assert!(rig.holds(own, 8 * G, 1));
        daemon.wait_restored(round);
    }
    assert_eq!((rig.fake.pushes().len(), out(&rig)), (1, 0));
    rig.assert_clean();
}

#[test]
fn bug_076_what_is_kept_for_graphs_is_let_go_and_the_rest_named() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let graph = ExternalKind::Graph;
    rig.engine
        .external_reserve(rig.device, graph, Bytes(12 * G))
        .unwrap();
    rig.engine.external_release(rig.device, graph, Bytes(12 * G));
    rig.fake.keep_for_graphs(12 * G, 5 * G);
    let own = rig.alloc(8 * G);
    rig.fill(own, 8 * G, 1);
    assert!(done(daemon.reclaim(u64::MAX)));
    assert_eq!(rig.card.used(), 5 * G, "what a graph uses stays");
    let report = rig.engine.report_json();
    let named = format!("\"reason\":\"kept by the driver for graphs\",\"bytes\":{}", 5 * G);
    assert!(report.contains(&named), "{report}");
    assert!(rig.holds(own, 8 * G, 1));
    // A program that has nothing else on the card: its graphs are trimmed all the same.
    rig.engine.free(own).unwrap();
    rig.engine
        .external_reserve(rig.device, graph, Bytes(2 * G))
        .unwrap();
    rig.fake.keep_for_graphs(3 * G, 0);
    let end = daemon.reclaim(u64::MAX);
    assert_eq!(rig.card.used(), 5 * G, "{end:?}");
    assert_eq!(
        rig.books().lease,
        2 * G,
        "what its nodes may need is kept for them"
    );
    rig.assert_clean();
}

/// What the daemon was told of last: how much could go, and how much went in all.
fn told(daemon: &Daemon) -> (u64, u64) {
    let (mut last, mut all) = (0, 0);
    daemon.each(|message| {
        if let ToDaemon::Beside { loose, gone, .. } = message {
            last = loose.get();
            all += gone.get();
        }
    });
    (last, all)
}

#[test]
fn a_program_without_a_lease_sends_as_much_as_is_wanted_and_says_so_before_the_order_ends() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    for n in 0..3 {
        managed(&rig, AT + n * 64 * G, 20 * G);
        rig.touch(|fake| fake.touch_managed(AT + n * 64 * G, 20 * G, 20 * G))
            .unwrap();
    }
    rig.until("the daemon knows what could go", |_| told(&daemon) == (60 * G, 0));
    for order in 1..=2 {
        let end = daemon.reclaim(20 * G);
        assert!(done(end), "{end:?}");
        assert_eq!((end.freed, rig.card.used()), (0, (60 - order * 20) * G));
        assert_eq!(told(&daemon), ((60 - order * 20) * G, order * 20 * G));
    }
    // Nothing of it waits for a lease.
    rig.touch(|fake| fake.touch_managed(AT, 20 * G, 20 * G)).unwrap();
    rig.until("the daemon knows that it may be back", |_| {
        told(&daemon) == (60 * G, 40 * G)
    });
    rig.assert_clean();
}

#[test]
fn an_order_for_what_is_beside_the_lease_leaves_the_lease_alone() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let own = rig.alloc(8 * G);
    rig.fill(own, 8 * G, 3);
    let lease = daemon.lease();
    managed(&rig, AT, 20 * G);
    rig.touch(|fake| fake.touch_managed(AT, 20 * G, 20 * G)).unwrap();
    let end = daemon.send_away(100 * G);
    assert_eq!((end.freed, end.copied), (0, 0), "{end:?}");
    assert_eq!((daemon.lease(), rig.card.used()), (lease, lease));
    assert_eq!(told(&daemon).1, 20 * G);
    assert!(rig.holds(own, 8 * G, 3));
    rig.assert_clean();
}

#[test]
fn what_graphs_left_can_be_ordered_away() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let graph = ExternalKind::Graph;
    rig.engine
        .external_reserve(rig.device, graph, Bytes(12 * G))
        .unwrap();
    rig.fake.keep_for_graphs(12 * G, 0);
    rig.engine.external_release(rig.device, graph, Bytes(12 * G));
    rig.until("the daemon knows what could go", |_| told(&daemon) == (12 * G, 0));
    assert!(done(daemon.send_away(12 * G)));
    assert_eq!((rig.card.used(), told(&daemon)), (0, (0, 12 * G)));
}
