//! Eviction and restore over the fake device, with a scripted daemon.

use ebb_protocol::wire::outcome;

use crate::testing::{Daemon, G, Rig, Script, done};

#[test]
fn out_and_back_at_the_same_addresses_with_the_same_bytes() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let sizes = [1, 700, 5 * G, 33 * G + 1, 3 << 20, 100];
    let all: Vec<(u64, u64, u8)> = sizes
        .iter()
        .zip(1u8..)
        .map(|(size, seed)| {
            let ptr = rig.alloc(*size);
            rig.fill(ptr, *size, seed);
            (ptr, *size, seed)
        })
        .collect();
    let before = rig.card.used();
    assert_eq!(daemon.lease(), before);
    for round in 1..4 {
        let end = daemon.reclaim(u64::MAX);
        assert!(done(end), "{end:?}");
        assert_eq!((end.freed, rig.card.used(), daemon.lease()), (before, 0, 0));
        // Unchanged memory is not copied again; that it cannot be told costs a copy and nothing else.
        assert_eq!(end.copied, if round == 2 { 0 } else { before });
        rig.fake.forget_fingerprints(round == 2);
        for (ptr, size, seed) in &all {
            assert!(rig.holds(*ptr, *size, *seed), "round {round}");
        }
        daemon.wait_restored(round);
        assert_eq!(rig.card.used(), before);
    }
    for (ptr, _, _) in all {
        rig.engine.free(ptr).unwrap();
    }
    rig.assert_gone_after_detach();
}

#[test]
fn unused_lease_and_cached_spans_go_first_and_cost_no_copy() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let kept = rig.alloc(20 * G);
    rig.fill(kept, 20 * G, 1);
    let freed = rig.alloc(16 * G);
    rig.engine.free(freed).unwrap();
    daemon.grant(999, 4 * G);
    let end = daemon.reclaim(20 * G);
    assert_eq!((end.outcome, end.freed, end.copied), (outcome::DONE, 20 * G, 0));
    assert!(rig.holds(kept, 20 * G, 1));
    assert_eq!(daemon.restored(), 0, "the gate was never closed");
    rig.assert_clean();
}
