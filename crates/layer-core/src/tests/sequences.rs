//! Any sequence of operations, with failures in between, against a model that only knows what a program knows: which
//! allocations live and what their bytes are.

use std::collections::BTreeMap;

use ebb_device::DeviceError;
use ebb_device::fake::Card;
use ebb_protocol::wire::outcome;
use proptest::prelude::*;

use crate::AllocError;
use crate::testing::{Daemon, G, Rig, Script};

#[derive(Clone, Debug)]
enum Op {
    Alloc(u64),
    Free(prop::sample::Index),
    Touch(prop::sample::Index),
    Evict(u64),
    /// The k-th driver call from here fails, out of memory or otherwise.
    Fail(u64, bool),
    External(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => prop_oneof![1..4000u64, (16..40u64).prop_map(|n| n * G - 3)].prop_map(Op::Alloc),
        3 => any::<prop::sample::Index>().prop_map(Op::Free),
        3 => any::<prop::sample::Index>().prop_map(Op::Touch),
        3 => prop_oneof![(1..64u64).prop_map(|n| n * G), Just(u64::MAX)].prop_map(Op::Evict),
        1 => (1..30u64, any::<bool>()).prop_map(|(k, memory)| Op::Fail(k, memory)),
        1 => (1..20u64).prop_map(|n| Op::External(n * G)),
    ]
}

/// What the books must be, whatever happened.
fn check_books(rig: &Rig, daemon: &Daemon, live: &BTreeMap<u64, (u64, u8)>, limit: u64) {
    let books = rig.books();
    // HAMi#1181: use is the sum of the live allocations at every moment, and no number near 2^64.
    let large: u64 = live
        .values()
        .filter(|(size, _)| *size >= 1 << 20)
        .map(|(size, _)| size.next_multiple_of(G))
        .sum();
    let small = books.allocated - large;
    assert_eq!(small % (2 << 20), 0, "the rest is segments");
    let smalls = live.values().filter(|(size, _)| *size < 1 << 20).count() as u64;
    assert!(small / (2 << 20) <= smalls && (small > 0) == (smalls > 0));
    assert_eq!(
        books.used,
        books.allocated - books.evicted + books.cached + books.stuck + books.external,
        "{books:?}"
    );
    assert_eq!(rig.card.used(), books.used - books.external, "{books:?}");
    assert!(books.used <= books.lease, "{books:?}");
    rig.until("the daemon's ledger to say the same", |_| {
        daemon.lease() == books.lease
    });
    assert!(books.charged() <= limit);
    assert_eq!(rig.state(|state| state.pool.live_count()), live.len() as u64);
    assert_eq!(rig.engine.core.arena.sums().used, books.evicted);
}

fn run(ops: Vec<Op>) {
    const LIMIT: u64 = 200 * G;
    let daemon = Daemon::start(Script {
        limit: LIMIT,
        ..Script::default()
    });
    let rig = Rig::with(Some(&daemon), Card::new(4 * LIMIT), LIMIT, G, |config| {
        config.cache_max = ebb_units::Bytes(48 * G);
    });
    let mut live: BTreeMap<u64, (u64, u8)> = BTreeMap::new();
    let mut external = 0;
    let mut seed = 0u8;
    for op in ops {
        match op {
            Op::Alloc(size) => match rig.engine.alloc(rig.device, size, 1) {
                Ok(ptr) => {
                    let before = live.range(..ptr + size).next_back();
                    assert!(before.is_none_or(|(at, (n, _))| at + n <= ptr), "overlap");
                    seed = seed.wrapping_add(1);
                    rig.fill(ptr, size, seed);
                    live.insert(ptr, (size, seed));
                }
                Err(AllocError::OverLimit { .. } | AllocError::Device(_) | AllocError::TimedOut(_)) => {}
                Err(other) => panic!("{other}"),
            },
            Op::Free(which) if !live.is_empty() => {
                let ptr = *live.keys().nth(which.index(live.len())).unwrap();
                live.remove(&ptr);
                rig.engine.free(ptr).unwrap();
                assert!(rig.engine.free(ptr).is_err(), "freed twice");
            }
            Op::Touch(which) if !live.is_empty() => {
                let (ptr, (size, seed)) = live.iter().nth(which.index(live.len())).unwrap();
                assert!(rig.holds(*ptr, *size, *seed), "{size} bytes are lost");
            }
            Op::Free(_) | Op::Touch(_) => {}
            Op::Evict(bytes) => {
                let end = daemon.reclaim(bytes);
                let expected = [outcome::DONE, outcome::FAILED, outcome::NOTHING_LEFT];
                assert!(expected.contains(&end.outcome), "{end:?}");
                if end.outcome == outcome::DONE && bytes != u64::MAX {
                    assert!(end.freed == bytes || rig.books().used == 0, "{end:?} of {bytes}");
                }
            }
            Op::Fail(k, memory) => {
                let error = if memory {
                    DeviceError::OutOfMemory
                } else {
                    DeviceError::Driver {
                        code: 1,
                        call: "ordered by the test",
                    }
                };
                rig.fake.fail_kth(k, error);
            }
            Op::External(bytes) => {
                let kind = crate::ExternalKind::Other;
                if external == 0 {
                    if rig
                        .engine
                        .external_reserve(rig.device, kind, ebb_units::Bytes(bytes))
                        .is_ok()
                    {
                        external = bytes;
                    }
                } else {
                    rig.engine
                        .external_release(rig.device, kind, ebb_units::Bytes(external));
                    external = 0;
                }
            }
        }
        // What the owner thread has begun must come to rest before the books are compared.
        rig.until("rest", |rig| {
            rig.state(|state| state.current.is_none() && state.orders.is_empty())
        });
        check_books(&rig, &daemon, &live, LIMIT);
    }
    rig.fake.heal();
    for (ptr, (size, seed)) in live {
        assert!(rig.holds(ptr, size, seed), "{size} bytes are lost");
        rig.engine.free(ptr).unwrap();
    }
    rig.engine
        .external_release(rig.device, crate::ExternalKind::Other, ebb_units::Bytes(external));
    rig.assert_gone_after_detach();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// HAMi#1181 and the rest: any sequence keeps every byte and exact books.
    #[test]
    fn bug_014_any_sequence_keeps_every_byte_and_exact_books(ops in prop::collection::vec(op(), 1..40)) {
        run(ops);
    }
}
