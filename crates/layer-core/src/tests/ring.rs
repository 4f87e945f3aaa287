//! Memory that is not pinned, and the ring that it is copied through; segments that are unpinned and pinned again around a hibernation.

use std::sync::Arc;

use ebb_device::DeviceError;
use ebb_device::fake::Call;
use ebb_protocol::wire::{outcome, sleep};
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::Bytes;

use crate::gate::CallGate;
use crate::sleep::WakesItself;
use crate::testing::{Daemon, G, LONG, Rig, Script, done};

const SEGMENT: u64 = 16 * G;
const ERROR: DeviceError = DeviceError::Driver {
    code: 1,
    call: "ordered by the test",
};

fn ring() -> Script {
    Script {
        ring: true,
        ..Script::default()
    }
}

/// A rig whose arena has room for so much besides the ring.
fn rig_with(daemon: &Daemon, bytes: u64) -> Rig {
    let rig = Rig::new(Some(daemon), 256 * G);
    rig.until("arena", |rig| {
        let usage = rig.engine.core.arena.sums();
        usage.total >= bytes || bytes == 0
    });
    rig
}

#[test]
fn nothing_is_pinned_but_the_ring_and_nothing_on_the_way() {
    let daemon = Daemon::start(ring());
    let rig = rig_with(&daemon, 0);
    let at = rig.alloc(64 * G);
    rig.fill(at, 64 * G, 1);
    rig.until("room for it, and for the ring", |rig| {
        rig.engine.core.arena.sums().total >= 64 * G + SEGMENT
    });
    assert_eq!(rig.engine.core.arena.sums().registered, SEGMENT);
    assert_eq!(rig.fake.registered(), 1);
    let calls = [Call::RegisterHost, Call::UnregisterHost].map(|call| rig.fake.calls(call));
    for round in 1..=3u8 {
        let end = daemon.reclaim(u64::MAX);
        assert!(done(end) && end.copied == 64 * G, "{end:?}");
        assert_eq!((rig.card.used(), daemon.lease()), (0, 0));
        assert_eq!(rig.engine.core.arena.sums().used, 64 * G);
        assert!(rig.holds(at, 64 * G, round));
        daemon.wait_restored(round.into());
        rig.fill(at, 64 * G, round + 1);
    }
    assert_eq!(
        [Call::RegisterHost, Call::UnregisterHost].map(|call| rig.fake.calls(call)),
        calls
    );
    // The ring goes last, when nothing else is left.
    daemon.send(ToLayer::ArenaRecall {
        bytes: Bytes(u64::MAX),
    });
    rig.engine.free(at).unwrap();
    daemon.wait_arena(0);
    assert_eq!(rig.fake.registered(), 0);
    rig.assert_gone_after_detach();
}

/// The k-th call fails, of an eviction or a restore through the ring.
#[test]
fn any_failing_call_through_the_ring_loses_nothing() {
    for (restore, error) in [(false, ERROR), (true, ERROR), (true, DeviceError::OutOfMemory)] {
        for k in 1..60 {
            let what = format!("call {k}, restore {restore}, {error}");
            let daemon = Daemon::start(ring());
            let rig = rig_with(&daemon, 0);
            let at = [rig.alloc(20 * G), rig.alloc(12 * G)];
            rig.until("arena", |rig| {
                rig.engine.core.arena.sums().total >= 32 * G + SEGMENT
            });
            rig.fill(at[0], 20 * G, 1);
            rig.fill(at[1], 12 * G, 2);
            if restore {
                assert!(done(daemon.reclaim(u64::MAX)), "{what}");
            }
            rig.fake.fail_kth(k, error);
            if restore {
                rig.touch(|_| ()).unwrap();
            } else {
                daemon.reclaim(u64::MAX);
            }
            let reached = !rig.fake.fault_pending();
            rig.fake.heal();
            assert!(
                rig.holds(at[0], 20 * G, 1) && rig.holds(at[1], 12 * G, 2),
                "{what}"
            );
            let end = daemon.reclaim(u64::MAX);
            assert!(done(end), "{what}: a later eviction: {end:?}");
            assert_eq!((rig.card.used(), daemon.lease()), (0, 0), "{what}");
            assert!(
                rig.holds(at[0], 20 * G, 1) && rig.holds(at[1], 12 * G, 2),
                "{what}"
            );
            for at in at {
                rig.engine.free(at).unwrap();
            }
            rig.assert_gone_after_detach();
            if !reached {
                assert!(k > 12, "{what}: there are more calls than that");
                break;
            }
        }
    }
}

/// A wait that fails for good: the engine may use a slot for ever. The ring ends, and what is in host memory comes back without it.
#[test]
fn a_ring_that_breaks_is_used_no_more() {
    let daemon = Daemon::start(ring());
    let rig = rig_with(&daemon, 0);
    let at = rig.alloc(32 * G);
    rig.fill(at, 32 * G, 1);
    rig.until("arena", |rig| {
        rig.engine.core.arena.sums().total >= 32 * G + SEGMENT
    });
    rig.fake.fail_always(Call::Wait, ERROR);
    rig.fake.fail_always(Call::Quiesce, ERROR);
    // Whatever it comes to: it ends.
    let end = daemon.reclaim(u64::MAX);
    assert_ne!(end.outcome, outcome::DONE, "{end:?}");
    rig.fake.heal();
    assert!(rig.holds(at, 32 * G, 1));
    let end = daemon.reclaim(u64::MAX);
    assert!(end.freed <= 32 * G, "{end:?}");
    assert!(rig.holds(at, 32 * G, 1));
    rig.assert_clean();
    rig.engine.free(at).unwrap();
    rig.engine.detach_device(rig.device);
    assert_eq!((rig.fake.handles(), rig.fake.mapped()), (0, 0));
}

/// The program ends, or the device, in the middle of copies through the ring.
#[test]
fn a_device_that_leaves_amid_copies_leaves_nothing_behind() {
    for restore in [false, true] {
        let daemon = Daemon::start(ring());
        let rig = rig_with(&daemon, 0);
        let at = rig.alloc(64 * G);
        rig.fill(at, 64 * G, 1);
        rig.until("arena", |rig| {
            rig.engine.core.arena.sums().total >= 64 * G + SEGMENT
        });
        rig.fake.delay(Call::Wait, std::time::Duration::from_millis(2));
        if restore {
            assert!(done(daemon.reclaim(u64::MAX)));
            daemon.send(ToLayer::BringBack { device: 0 });
        } else {
            daemon.order(u64::MAX);
        }
        rig.until("copies", |rig| rig.fake.calls(Call::Wait) > 2);
        let begun = std::time::Instant::now();
        rig.assert_gone_after_detach();
        assert!(begun.elapsed() < LONG);
    }
}

struct Nobody;

impl WakesItself for Nobody {
    fn wake_itself(&self) -> Result<(), String> {
        Err("nobody is asleep".into())
    }
}

fn sleeps(rig: &Rig) {
    let calls: &'static CallGate = Box::leak(Box::new(CallGate::new()));
    rig.engine.set_sleep(calls, Arc::new(Nobody));
}

fn answer(daemon: &Daemon, order: u64, ask: bool) -> u32 {
    daemon.send(ToLayer::Sleep {
        order,
        ask,
        patient: true,
        wait_ms: 60_000,
    });
    daemon.expect("an answer", |message| match message {
        ToDaemon::SleepAnswer {
            order: of, outcome, ..
        } if *of == order => Some(*outcome),
        _ => None,
    })
}

fn pinned(rig: &Rig) -> (u64, u64) {
    let sums = rig.engine.core.arena.sums();
    (sums.registered, sums.total)
}

#[test]
fn a_hibernation_unpins_by_the_way_and_comes_back_through_a_ring() {
    let daemon = Daemon::start(Script::default());
    let rig = rig_with(&daemon, 0);
    sleeps(&rig);
    let at = rig.alloc(128 * G);
    rig.until("arena", |rig| pinned(rig) == (128 * G, 128 * G));
    for round in 1..=3u8 {
        let order = u64::from(round);
        rig.fill(at, 128 * G, round);
        assert_eq!(answer(&daemon, order, true), sleep::READY);
        // Room for a ring is asked for.
        rig.until("room for a ring", |rig| pinned(rig).1 == 128 * G + SEGMENT);
        let end = daemon.reclaim(u64::MAX);
        assert!(done(end) && end.copied == 128 * G, "{end:?}");
        assert!(pinned(&rig).0 < 128 * G, "something was unpinned by the way");
        assert_eq!(answer(&daemon, order, false), sleep::READY);
        assert_eq!((pinned(&rig).0, rig.fake.registered()), (0, 0));
        // Pinning takes its time, and the copies do not wait for it.
        rig.fake
            .delay(Call::RegisterHost, std::time::Duration::from_millis(3));
        daemon.send(ToLayer::Awake { order });
        assert!(rig.holds(at, 128 * G, round));
        daemon.wait_restored(order);
        rig.until("all is pinned", |rig| {
            pinned(rig) == (128 * G + SEGMENT, 128 * G + SEGMENT)
        });
        rig.fake.heal();
        // The ring's segment takes bytes again.
        rig.until("no ring", |rig| rig.engine.core.arena.has_room(SEGMENT, G));
        rig.assert_clean();
    }
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

/// A segment is full as soon as the last chunk has got room in it, and that chunk's copy is queued a moment later.
#[test]
fn nothing_is_unpinned_before_the_copies_into_it_are_queued() {
    let daemon = Daemon::start(Script::default());
    let rig = rig_with(&daemon, 0);
    sleeps(&rig);
    let at = rig.alloc(128 * G);
    rig.until("arena", |rig| pinned(rig) == (128 * G, 128 * G));
    rig.fill(at, 128 * G, 9);
    assert_eq!(answer(&daemon, 1, true), sleep::READY);
    rig.until("room for a ring", |rig| pinned(rig).1 == 128 * G + SEGMENT);
    let before = pinned(&rig).0;
    let placing = rig.engine.core.arena.placing();
    assert!(done(daemon.reclaim(u64::MAX)));
    assert_eq!(pinned(&rig).0, before, "somebody is about to queue a copy");
    drop(placing);
    assert_eq!(answer(&daemon, 1, false), sleep::READY);
    assert_eq!((pinned(&rig).0, rig.fake.registered()), (0, 0));
    daemon.send(ToLayer::Awake { order: 1 });
    assert!(rig.holds(at, 128 * G, 9));
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

/// Why memory could not be released is told to whoever asked for the hibernation, and only on the way to one.
#[test]
fn a_release_that_fails_on_the_way_to_a_hibernation_says_by_what() {
    let daemon = Daemon::start(Script::default());
    let rig = rig_with(&daemon, 0);
    sleeps(&rig);
    let at = rig.alloc(64 * G);
    rig.fill(at, 64 * G, 7);
    rig.until("arena", |rig| pinned(rig) == (64 * G, 64 * G));
    assert_eq!(answer(&daemon, 5, true), sleep::READY);
    rig.fake.fail_always(Call::Unmap, ERROR);
    assert_eq!(daemon.reclaim(u64::MAX).outcome, outcome::FAILED);
    let text = daemon.expect("why", |message| match message {
        ToDaemon::SleepAnswer {
            order: 5,
            outcome: sleep::BUSY,
            text,
        } => Some(String::from_utf8_lossy(text).into_owned()),
        _ => None,
    });
    assert!(
        text.contains("unmapping: ") && text.contains("on device 0"),
        "{text}"
    );
    rig.fake.heal();
    assert!(done(daemon.reclaim(u64::MAX)));
    assert!(rig.holds(at, 64 * G, 7));
    daemon.send(ToLayer::Awake { order: 5 });
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn a_hibernation_that_does_not_come_leaves_all_pinned() {
    for lost in [false, true] {
        let daemon = Daemon::start(Script {
            resume: true,
            ..Script::default()
        });
        let rig = rig_with(&daemon, 0);
        sleeps(&rig);
        let at = rig.alloc(64 * G);
        rig.fill(at, 64 * G, 7);
        rig.until("arena", |rig| pinned(rig) == (64 * G, 64 * G));
        assert_eq!(answer(&daemon, 5, true), sleep::READY);
        assert!(done(daemon.reclaim(u64::MAX)));
        if lost {
            daemon.disconnect();
        } else {
            daemon.send(ToLayer::Awake { order: 5 });
        }
        rig.until("all is pinned again", |rig| {
            let (registered, total) = pinned(rig);
            registered == total
        });
        rig.until("a connection", |rig| rig.engine.core.link.epoch() != 0);
        assert!(rig.holds(at, 64 * G, 7));
        rig.until("room for a ring is wanted no more", |rig| {
            rig.engine.core.arena.want(&rig.engine.core, 64 * G).is_none_or(
                |want| matches!(want, ToDaemon::ArenaWant { bytes, .. } if bytes == Bytes(64 * G)),
            )
        });
        rig.assert_clean();
        rig.engine.free(at).unwrap();
        rig.assert_gone_after_detach();
    }
}

/// The k-th call fails while a hibernation comes, or after it.
#[test]
fn any_failing_call_around_a_hibernation_loses_nothing() {
    for (after, error) in [(false, ERROR), (true, ERROR)] {
        for k in 1..50 {
            let what = format!("call {k}, after {after}");
            let daemon = Daemon::start(Script::default());
            let rig = rig_with(&daemon, 0);
            sleeps(&rig);
            let at = rig.alloc(48 * G);
            rig.fill(at, 48 * G, 7);
            rig.until("arena", |rig| pinned(rig) == (48 * G, 48 * G));
            assert_eq!(answer(&daemon, 5, true), sleep::READY);
            rig.until("room for a ring", |rig| pinned(rig).1 == 48 * G + SEGMENT);
            if !after {
                rig.fake.fail_kth(k, error);
            }
            let out = daemon.reclaim(u64::MAX);
            let slept = done(out) && answer(&daemon, 5, false) == sleep::READY;
            if after {
                assert!(slept, "{what}");
                rig.fake.fail_kth(k, error);
            }
            daemon.send(ToLayer::Awake { order: 5 });
            assert!(rig.holds(at, 48 * G, 7), "{what}");
            let reached = !rig.fake.fault_pending();
            rig.fake.heal();
            assert!(done(daemon.reclaim(u64::MAX)), "{what}");
            assert!(rig.holds(at, 48 * G, 7), "{what}");
            rig.assert_clean();
            rig.engine.free(at).unwrap();
            rig.assert_gone_after_detach();
            if !reached {
                break;
            }
        }
    }
}
