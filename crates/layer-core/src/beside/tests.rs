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
