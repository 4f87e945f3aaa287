//! Memory that somebody else may hold stays where it is, and nothing else does.

use ebb_protocol::ToDaemon;
use ebb_protocol::wire::outcome;
use ebb_units::Bytes;

use crate::testing::{Daemon, G, Rig, Script, done};
use crate::{PinError, PinReason};

fn pin(rig: &Rig, ptr: u64, len: u64, reason: PinReason) -> crate::PinId {
    rig.touch(|_| rig.engine.pin(ptr, Bytes(len), reason))
        .unwrap()
        .unwrap()
}

/// NCCL#2117, gdrcopy#54: memory that is bound or mapped elsewhere is not moved, everything else is, and the report
/// and the daemon know how much stays and why.
#[test]
fn bug_101_bound_memory_stays_and_is_named() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 1 << 30);
    let (a, b) = (rig.alloc(40 * G), rig.alloc(24 * G));
    rig.fill(a, 40 * G, 1);
    rig.fill(b, 24 * G, 2);
    // Of an inner range: all of that allocation.
    let bound = pin(&rig, b + 5 * G, G, PinReason::Multicast);
    rig.engine.describe_pin(bound, "handle 7");
    let report = rig.engine.report_json();
    assert!(
        report.contains(r#""reason":"multicast (handle 7)","bytes":1572864"#),
        "{report}"
    );
    assert!(report.contains(r#""releasable":2621440"#), "{report}");
    daemon.wait_usage(|usage| matches!(usage, ToDaemon::Usage { pinned, .. } if pinned.get() == 24 * G));
    let end = daemon.reclaim(u64::MAX);
    assert_eq!((end.outcome, end.copied), (outcome::NOTHING_LEFT, 40 * G));
    // The pinned one is still mapped, and read past the gate: as its other holder does.
    let mut bytes = vec![0; usize::try_from(24 * G).unwrap()];
    rig.fake.read(b, &mut bytes).unwrap();
    assert_eq!(bytes, crate::testing::pattern(24 * G, 2));
    assert!(rig.holds(a, 40 * G, 1));
    // Its last holder goes: it moves as any other.
    rig.engine.unpin(bound);
    daemon.wait_usage(|usage| matches!(usage, ToDaemon::Usage { pinned, .. } if pinned.is_zero()));
    let end = daemon.reclaim(u64::MAX);
    assert!(done(end), "{end:?}");
    assert_eq!(
        end.copied,
        24 * G,
        "the other one is unchanged since it came back"
    );
    assert!(rig.holds(a, 40 * G, 1) && rig.holds(b, 24 * G, 2));
    rig.assert_gone_after_detach();
}

/// 0003: a driver that refuses memory fit for sharing is named, and one that does not is not.
#[test]
fn what_the_driver_refused_is_in_the_report() {
    let rig = Rig::new(None, 64 * G);
    assert!(!rig.engine.report_json().contains("lacks"));
    rig.fake.set_lacks("access by network cards");
    let report = rig.engine.report_json();
    assert!(
        report.contains(r#""lacks":"access by network cards""#),
        "{report}"
    );
}

/// gdrcopy#54: what another party may still see serves nobody else after it was freed.
#[test]
fn bug_154_pinned_memory_that_is_freed_serves_nobody_else() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 1 << 30);
    let a = rig.alloc(16 * G);
    let mapped = pin(&rig, a, 16 * G, PinReason::Registered);
    rig.engine.free(a).unwrap();
    assert_eq!((rig.books().cached, rig.books().used), (0, 0));
    // A pin of memory that is gone is gone: taking it off hurts nobody who lies there now.
    let b = rig.alloc(16 * G);
    let other = pin(&rig, b, 16 * G, PinReason::DmaBuf);
    rig.engine.unpin(mapped);
    assert_eq!(rig.state(|state| state.pool.pinned_bytes()), 16 * G);
    rig.engine.unpin(other);
    rig.engine.free(b).unwrap();
    assert_eq!(
        rig.books().cached,
        16 * G,
        "what nobody else saw is kept for the next"
    );
    rig.assert_gone_after_detach();
}

#[test]
fn only_memory_of_ours_that_is_on_the_card_is_pinned() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 1 << 30);
    let a = rig.alloc(16 * G);
    let pin = |ptr, len| rig.engine.pin(ptr, Bytes(len), PinReason::DmaBuf);
    assert_eq!(pin(8, 1), Err(PinError::NotOurs));
    assert_eq!(pin(a + 16 * G, 1), Err(PinError::NotOurs), "nobody's");
    assert!(done(daemon.reclaim(u64::MAX)));
    assert_eq!(pin(a, 1), Err(PinError::Away), "not inside the gate");
    rig.touch(|_| ()).unwrap();
    let held = pin(a, 0).unwrap();
    assert_eq!(daemon.reclaim(u64::MAX).copied, 0);
    rig.engine.unpin(held);
    rig.engine.unpin(held);
    rig.assert_gone_after_detach();
}

/// Small allocations share a segment: it stays as a whole, the others go.
#[test]
fn a_small_one_keeps_its_segment_and_no_other() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 1 << 30);
    let small = rig.alloc(512);
    let large = rig.alloc(24 * G);
    let segment = rig.books().allocated - 24 * G;
    let held = pin(&rig, small, 512, PinReason::SyncMemops);
    let again = pin(&rig, small, 512, PinReason::Registered);
    assert_eq!(rig.state(|state| state.pool.pinned_bytes()), segment);
    assert_eq!(daemon.reclaim(u64::MAX).copied, 24 * G);
    rig.touch(|_| ()).unwrap();
    rig.engine.unpin(held);
    let end = daemon.reclaim(u64::MAX);
    let out = (end.freed, end.copied);
    assert_eq!(out, (24 * G, 0), "another reason is left; nothing was written");
    rig.touch(|_| ()).unwrap();
    rig.engine.unpin(again);
    let end = daemon.reclaim(u64::MAX);
    assert_eq!((end.freed, end.copied), (24 * G + segment, segment));
    rig.engine.free(small).unwrap();
    rig.engine.free(large).unwrap();
    rig.assert_gone_after_detach();
}
