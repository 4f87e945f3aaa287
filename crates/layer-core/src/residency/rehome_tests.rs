//! Bytes that went to another card come back, or move on, whatever fails on the way.

use ebb_device::DeviceError;
use ebb_device::fake::{Call, Card};
use ebb_protocol::ToDaemon;
use ebb_units::Bytes;
use proptest::prelude::*;

use crate::testing::{Daemon, G, Rig, Script, done};

const ERROR: DeviceError = DeviceError::Driver {
    code: 1,
    call: "ordered by the test",
};
/// An allocation of four chunks.
const LEN: u64 = 32 * G;

fn script(lends: u64) -> Script {
    Script {
        lends: Some(lends),
        ..Script::default()
    }
}

fn rig(daemon: &Daemon) -> Rig {
    Rig::with(Some(daemon), Card::new(1 << 30), 1 << 30, G, |config| {
        // Kept copies have their own tests.
        config.keep_max = Bytes::ZERO;
    })
}

/// What is in host memory, and what ever moved on from the other card.
fn sums(rig: &Rig) -> (u64, u64) {
    let arena = &rig.engine.core.arena;
    (arena.sums().used, arena.rooms.sums().moved_on)
}

#[test]
fn what_leaves_goes_to_the_other_card_first_and_comes_straight_back() {
    let daemon = Daemon::start(script(20 * G));
    let rig = rig(&daemon);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 1);
    let end = daemon.reclaim(u64::MAX);
    assert!(done(end) && end.copied == LEN, "{end:?}");
    // Two chunks fit what was lent; the rest of that was given back.
    daemon.wait_lodged(16 * G);
    assert_eq!(rig.other.used(), 16 * G);
    assert_eq!(sums(&rig), (16 * G, 0));
    assert!(rig.holds(at, LEN, 1));
    daemon.wait_restored(1);
    daemon.wait_lodged(0);
    assert_eq!((rig.other.used(), sums(&rig)), (0, (0, 0)));
    // Again, and freed while it is there.
    daemon.reclaim(u64::MAX);
    daemon.wait_lodged(16 * G);
    rig.engine.free(at).unwrap();
    daemon.wait_lodged(0);
    assert_eq!(rig.other.used(), 0);
    rig.assert_gone_after_detach();
}

#[test]
fn what_the_other_card_needs_moves_on_to_host_memory() {
    let daemon = Daemon::start(script(LEN));
    let rig = rig(&daemon);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 2);
    daemon.reclaim(u64::MAX);
    daemon.wait_lodged(LEN);
    assert_eq!(sums(&rig), (0, 0));
    // A chunk is the least that moves.
    daemon.want_lodging(G);
    daemon.wait_lodged(LEN - 8 * G);
    assert_eq!((rig.other.used(), sums(&rig)), (LEN - 8 * G, (8 * G, 8 * G)));
    daemon.want_lodging(LEN - 8 * G);
    daemon.wait_lodged(0);
    assert_eq!((rig.other.used(), sums(&rig)), (0, (LEN, LEN)));
    assert!(rig.holds(at, LEN, 2));
    rig.assert_gone_after_detach();
}

/// Whoever lends waits for it, and the borrower has nothing else to do: nothing but time comes in between.
#[test]
fn room_that_the_driver_would_not_take_back_goes_back_a_while_later() {
    for call in [Call::UnmapAs, Call::Release, Call::FreeReservation] {
        let daemon = Daemon::start(script(LEN));
        let rig = rig(&daemon);
        let at = rig.alloc(8 * G);
        rig.fill(at, 8 * G, 3);
        assert_eq!(daemon.reclaim(8 * G).copied, 8 * G);
        daemon.wait_lodged(8 * G);
        let before = rig.fake.calls(call);
        rig.fake.fail_nth(call, 1, ERROR);
        daemon.want_lodging(8 * G);
        daemon.wait_lodged(0);
        assert_eq!(rig.other.used(), 0, "{call:?}");
        assert_eq!(
            rig.fake.calls(call),
            before + 2,
            "{call:?}: once in vain, {}",
            rig.engine.report_json()
        );
        assert!(rig.holds(at, 8 * G, 3));
        rig.assert_gone_after_detach();
    }
}

#[test]
fn unused_room_goes_back_at_once_and_memory_of_the_program_moves_as_the_pools_does() {
    let daemon = Daemon::start(script(1 << 30));
    let rig = rig(&daemon);
    let at = rig.alloc(8 * G);
    rig.fill(at, 8 * G, 3);
    assert_eq!(daemon.reclaim(8 * G).copied, 8 * G);
    daemon.wait_lodged(8 * G);
    daemon.want_lodging(1 << 29);
    daemon.wait_lodged(0);
    assert!(rig.holds(at, 8 * G, 3));
    rig.assert_gone_after_detach();
}

#[test]
fn without_host_memory_it_stays_where_it_is_and_comes_home() {
    let daemon = Daemon::start(Script {
        arena: 0,
        ..script(LEN)
    });
    let rig = Rig::with(Some(&daemon), Card::new(1 << 30), 1 << 30, G, |config| {
        config.arena_wait = std::time::Duration::from_millis(5);
    });
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 4);
    let end = daemon.reclaim(u64::MAX);
    assert_eq!(end.copied, LEN, "it needs no host memory: {end:?}");
    daemon.want_lodging(LEN);
    assert!(rig.holds(at, LEN, 4));
    daemon.wait_lodged(0);
    rig.assert_gone_after_detach();
}

#[test]
fn a_copy_that_fails_between_cards_goes_through_the_host() {
    let daemon = Daemon::start(script(LEN));
    let rig = rig(&daemon);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 5);
    daemon.reclaim(u64::MAX);
    daemon.wait_lodged(LEN);
    rig.fake.fail_always(Call::CopyBetween, ERROR);
    assert!(rig.holds(at, LEN, 5), "the link between the cards is gone");
    assert_eq!(sums(&rig).1, LEN);
    daemon.wait_lodged(0);
    // And out: nothing more goes that way, all goes by the host.
    let end = daemon.reclaim(u64::MAX);
    assert!(done(end) && end.copied == LEN, "{end:?}");
    assert_eq!((rig.other.used(), sums(&rig).0), (0, LEN));
    assert!(rig.holds(at, LEN, 5));
    rig.fake.heal();
    rig.assert_gone_after_detach();
}

/// A link that is lost while chunks are on their way out: the same order sends them by the host, and the next one asks nobody for room there.
#[test]
fn a_copy_out_that_fails_between_cards_goes_by_the_host_in_the_same_order() {
    for good in 0..3 {
        let daemon = Daemon::start(script(LEN));
        let rig = rig(&daemon);
        let at = rig.alloc(LEN);
        rig.fill(at, LEN, 8);
        for n in good + 1..20 {
            rig.fake.fail_nth(Call::CopyBetween, n, ERROR);
        }
        let end = daemon.reclaim(u64::MAX);
        assert!(done(end) && end.copied == LEN, "{good}: {end:?}");
        daemon.wait_lodged(8 * G * good);
        assert_eq!(sums(&rig).0, LEN - 8 * G * good, "{good}");
        assert!(rig.holds(at, LEN, 8), "{good}");
        daemon.wait_lodged(0);
        let end = daemon.reclaim(u64::MAX);
        assert!(done(end) && end.copied == LEN, "{good}: {end:?}");
        assert_eq!((rig.other.used(), sums(&rig).0), (0, LEN), "{good}");
        assert!(rig.holds(at, LEN, 8), "{good}");
        rig.assert_gone_after_detach();
    }
}

#[test]
fn the_other_card_may_refuse_what_was_lent() {
    let daemon = Daemon::start(script(LEN));
    let rig = rig(&daemon);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 6);
    assert!(rig.other.take(1 << 40));
    let end = daemon.reclaim(u64::MAX);
    assert!(done(end) && end.copied == LEN, "{end:?}");
    daemon.wait_lodged(0);
    assert_eq!(sums(&rig), (LEN, 0));
    rig.other.give(1 << 40);
    assert!(rig.holds(at, LEN, 6));
    rig.assert_gone_after_detach();
}

#[test]
fn a_daemon_that_dies_is_told_what_is_held_by_its_successor_and_wants_it_back() {
    let daemon = Daemon::start(script(LEN));
    let rig = rig(&daemon);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 7);
    daemon.reclaim(u64::MAX);
    daemon.wait_lodged(LEN);
    daemon.disconnect();
    daemon.wait_connections(2);
    let held = daemon.expect("an account of all rooms", |message| match message {
        ToDaemon::LodgingHeld { held, .. } if !held.is_empty() => Some(held.clone()),
        _ => None,
    });
    assert_eq!(held.iter().map(|at| at.bytes.get()).sum::<u64>(), LEN);
    daemon.want_lodging(LEN);
    daemon.wait_lodged(0);
    assert!(rig.holds(at, LEN, 7));
    rig.assert_gone_after_detach();
}

#[test]
fn alone_it_comes_home_from_where_it_is() {
    let daemon = Daemon::start(script(LEN));
    let rig = rig(&daemon);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 8);
    daemon.reclaim(u64::MAX);
    daemon.wait_lodged(LEN);
    drop(daemon);
    assert!(rig.holds(at, LEN, 8));
    rig.assert_gone_after_detach();
}

/// Every call of a release, of moving on, and of a restore fails once, whichever it is.
#[test]
fn any_failing_call_costs_no_byte_and_no_room() {
    for k in 1..70 {
        for call_kind in [ERROR, DeviceError::OutOfMemory] {
            let daemon = Daemon::start(script(20 * G));
            let rig = rig(&daemon);
            let at = rig.alloc(LEN);
            rig.fill(at, LEN, 9);
            rig.fake.fail_kth(k, call_kind);
            daemon.reclaim(u64::MAX);
            daemon.want_lodging(8 * G);
            assert!(rig.holds(at, LEN, 9), "call {k}");
            rig.fake.heal();
            rig.engine.free(at).unwrap();
            // What was stuck goes with the next that goes.
            let at = rig.alloc(LEN);
            rig.fill(at, LEN, 10);
            daemon.reclaim(u64::MAX);
            assert!(rig.holds(at, LEN, 10), "after call {k}");
            rig.engine.free(at).unwrap();
            daemon.wait_lodged(0);
            rig.until("nothing is left on the other card", |rig| rig.other.used() == 0);
            rig.assert_gone_after_detach();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    /// Random releases, returns, demands of the other card, daemons that die and calls that fail: every byte is as written.
    #[test]
    fn whatever_happens_every_byte_is_as_it_was_written(
        steps in prop::collection::vec((0u8..8, 1u64..40), 1..24),
        lends in 0u64..60,
    ) {
        let daemon = Daemon::start(Script { resume: true, ..script(lends * G) });
        let rig = rig(&daemon);
        let mut live: Vec<(u64, u64, u8)> = Vec::new();
        let mut connections = 1;
        let met = |daemon: &Daemon| {
            daemon.expect("the rooms", |m| matches!(m, ToDaemon::LodgingHeld { .. }).then_some(()));
        };
        met(&daemon);
        for (step, n) in steps {
            match step {
                0 | 1 => {
                    let seed = u8::try_from(n).unwrap();
                    // A failing call may be one of its own.
                    let Ok(at) = rig.engine.alloc(rig.device, n * G, 1) else {
                        continue;
                    };
                    rig.fill(at, n * G, seed);
                    live.push((at, n * G, seed));
                }
                2 if !live.is_empty() => {
                    let (at, ..) = live.remove(usize::try_from(n).unwrap() % live.len());
                    rig.engine.free(at).unwrap();
                }
                3 | 4 => drop(daemon.reclaim(n * G)),
                5 => daemon.want_lodging(n * G),
                6 => {
                    for (at, len, seed) in &live {
                        prop_assert!(rig.holds(*at, *len, *seed));
                    }
                }
                7 if n < 10 => {
                    daemon.disconnect();
                    connections += 1;
                    daemon.wait_connections(connections);
                    met(&daemon);
                }
                _ => rig.fake.fail_kth(n, ERROR),
            }
        }
        rig.fake.heal();
        for (at, len, seed) in live {
            prop_assert!(rig.holds(at, len, seed));
            rig.engine.free(at).unwrap();
        }
        rig.assert_gone_after_detach();
    }
}
