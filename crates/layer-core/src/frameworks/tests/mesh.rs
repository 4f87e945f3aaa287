//! Small blocks are brought together in fewer granules, under programs that go on, evictions, pins and failing calls; with contents.

use std::time::Duration;

use super::*;
use crate::device::Phase;
use crate::pins::PinReason;

/// Blocks in each granule.
const IN_ONE: u64 = 8;
const SMALL: u64 = G / IN_ONE;

/// What lives: address and seed, all of [`SMALL`] bytes.
type Blocks = Vec<(u64, u8)>;

impl Bench {
    /// So many granules, in each of which one block is left, each at another place than in the one before.
    fn scattered(&self, granules: u64) -> Blocks {
        let all: Vec<u64> = (0..granules * IN_ONE).map(|_| self.on(SMALL, 1)).collect();
        let mut left = Vec::new();
        for (n, at) in (0u64..).zip(all) {
            if n % IN_ONE == n / IN_ONE % IN_ONE {
                let seed = u8::try_from(n % 251).unwrap() + 1;
                self.rig.fill(at, SMALL, seed);
                left.push((at, seed));
            } else {
                self.free(at, 1);
            }
        }
        left
    }

    fn assert_holds(&self, blocks: &Blocks, what: &str) {
        for (at, seed) in blocks {
            assert!(self.rig.holds(*at, SMALL, *seed), "{what}: block at {at:#x}");
        }
    }

    fn free_all(&self, blocks: &Blocks) {
        for (at, _) in blocks {
            self.free(*at, 1);
        }
    }
}

fn trim(daemon: &Daemon, query: u64) -> Bytes {
    daemon.send(ToLayer::Trim { device: 0, query });
    daemon.expect("the answer", |message| match message {
        ToDaemon::Trimmed { query: of, bytes, .. } if *of == query => Some(*bytes),
        _ => None,
    })
}

#[test]
fn a_trim_brings_small_blocks_together_at_their_addresses() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::new(Some(&daemon), 512 * G);
    let rig = &bench.rig;
    let blocks = bench.scattered(16);
    let serials: Vec<_> = blocks.iter().map(|(at, _)| rig.engine.vmm_serial(*at)).collect();
    assert_eq!(trim(&daemon, 1), Bytes(14 * G), "eight into one, twice");
    assert_eq!((rig.card.used(), bench.pool().reserved), (2 * G, 2 * G));
    assert_eq!(
        (bench.pool().meshed_total, bench.pool().copied_total),
        (14, 14 * SMALL)
    );
    assert_eq!(daemon.lease(), 2 * G);
    bench.assert_holds(&blocks, "brought together");
    let now: Vec<_> = blocks.iter().map(|(at, _)| rig.engine.vmm_serial(*at)).collect();
    assert_eq!(
        now, serials,
        "whoever knows the mapping by its number finds the same"
    );
    assert_eq!(trim(&daemon, 2), Bytes::ZERO);
    // They leave the card and come back, each byte once.
    with_arena(&bench);
    for round in 1..3 {
        let end = daemon.reclaim(u64::MAX);
        assert!(done(end), "{end:?}");
        assert_eq!((end.freed, rig.card.used()), (2 * G, 0));
        bench.assert_holds(&blocks, "back");
        daemon.wait_restored(round);
    }
    // What is written is seen at one address only.
    rig.fill(blocks[0].0, SMALL, 255);
    bench.assert_holds(&blocks[1..].to_vec(), "beside it");
    bench.free_all(&blocks);
    bench.check();
    trim(&daemon, 3);
    assert_eq!((rig.card.used(), bench.pool().shadows), (0, 0));
    rig.assert_gone_after_detach();
}

/// Whoever knows the physical memory, and not the addresses, keeps it as long as he does.
#[test]
fn what_others_may_hold_is_not_moved() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::new(Some(&daemon), 512 * G);
    let rig = &bench.rig;
    let blocks = bench.scattered(8);
    assert!(rig.engine.gate().enter().is_ok());
    let pins = rig.engine.vmm_pin_range(blocks[0].0, SMALL, PinReason::Exported);
    rig.engine.gate().leave();
    assert_eq!(pins.len(), 1);
    let retained = rig.engine.vmm_retain(blocks[1].0).unwrap();
    assert_eq!(
        trim(&daemon, 1),
        Bytes(5 * G),
        "six into one, two stay as they are"
    );
    assert_eq!(
        rig.engine.vmm_retain(blocks[1].0),
        Some(retained),
        "the same memory"
    );
    bench.assert_holds(&blocks, "pinned");
    assert!(rig.engine.vmm_release(retained) && rig.engine.vmm_release(retained));
    assert_eq!(trim(&daemon, 2), Bytes(G), "nobody holds it any more");
    bench.assert_holds(&blocks, "released");
    bench.free_all(&blocks);
    bench.check();
    rig.assert_gone_after_detach();
}

#[test]
fn running_work_and_captures_are_not_waited_for_by_a_trim() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::new(Some(&daemon), 512 * G);
    let rig = &bench.rig;
    let blocks = bench.scattered(8);
    rig.engine.capture_begin();
    assert_eq!(trim(&daemon, 1), Bytes::ZERO);
    rig.engine.capture_end();
    rig.fake.begin_work();
    assert_eq!(trim(&daemon, 2), Bytes::ZERO);
    assert!(!rig.state(|state| state.closed), "the program goes on");
    bench.assert_holds(&blocks, "not moved");
    assert_eq!(bench.pool().copied_total, 0);
    rig.fake.end_work();
    rig.until("a trim of quiet memory", |_| trim(&daemon, 3) > Bytes::ZERO);
    assert_eq!(rig.card.used(), G);
    bench.assert_holds(&blocks, "moved");
    rig.assert_gone_after_detach();
}

/// A program that rests is compact after a while, and not looked at again before something has changed.
#[test]
fn a_device_that_rests_becomes_compact() {
    let rig = Rig::with(None, ebb_device::fake::Card::new(512 * G), 512 * G, G, |config| {
        config.pool_rest = Duration::from_millis(10);
    });
    let events = Arc::new(Events::default());
    rig.engine.set_fences(Arc::clone(&events) as Arc<dyn Fences>);
    let bench = Bench { rig, events };
    let blocks = bench.scattered(16);
    // What threads keep is the pool's only after a look at it.
    bench.rig.engine.core.frameworks.get(0).unwrap().front.flush(0);
    bench
        .rig
        .until("fewer granules", |_| bench.pool().meshed_total == 14);
    bench.assert_holds(&blocks, "compact");
    bench.check();
    bench.rig.assert_gone_after_detach();
}

/// An allocation that would fail for room that small blocks keep apart does not.
#[test]
fn an_allocation_without_room_gets_what_small_blocks_kept() {
    let daemon = Daemon::start(Script {
        limit: 20 * G,
        ..Script::default()
    });
    let bench = Bench::new(Some(&daemon), 512 * G);
    let rig = &bench.rig;
    let blocks = bench.scattered(16);
    let large = bench.on(18 * G, 1);
    assert_eq!(bench.pool().reserved, 20 * G);
    rig.fill(large, 18 * G, 7);
    bench.assert_holds(&blocks, "beside a large one");
    assert!(rig.holds(large, 18 * G, 7));
    // Nothing more can come of it: that is found out once, and the answer is the limit's.
    let copied = bench.pool().copied_total;
    for _ in 0..3 {
        let refused = bench.alloc(4 * G, Order::Stream(key(1)));
        assert!(
            matches!(refused, Err(AllocError::OverLimit { .. })),
            "{refused:?}"
        );
    }
    assert_eq!(bench.pool().copied_total, copied);
    // The program's plain allocations get it as well.
    bench.free(large, 1);
    let more = bench.scattered(4);
    let plain = rig.alloc(17 * G);
    bench.assert_holds(&blocks, "under a plain one");
    bench.assert_holds(&more, "under a plain one");
    rig.engine.free(plain).unwrap();
    rig.assert_gone_after_detach();
}

/// An eviction that has nowhere to copy to takes what it gets without.
#[test]
fn without_host_memory_blocks_make_room_on_the_card() {
    let daemon = Daemon::start(Script {
        arena: 0,
        ..Script::default()
    });
    let rig = Rig::with(
        Some(&daemon),
        ebb_device::fake::Card::new(512 * G),
        512 * G,
        G,
        |config| config.arena_wait = Duration::from_millis(20),
    );
    let events = Arc::new(Events::default());
    rig.engine.set_fences(Arc::clone(&events) as Arc<dyn Fences>);
    let bench = Bench { rig, events };
    let blocks = bench.scattered(16);
    bench.rig.engine.core.frameworks.get(0).unwrap().front.flush(0);
    let end = daemon.reclaim(10 * G);
    assert_eq!((end.freed, end.copied), (10 * G, 0), "{end:?}");
    bench.assert_holds(&blocks, "made room");
    bench.check();
    bench.rig.assert_gone_after_detach();
}

/// Every call of it fails, each in turn, once or for a while; no byte is lost, and nothing stays.
#[test]
fn any_call_may_fail_while_blocks_move() {
    for k in 1..400 {
        let what = format!("call {k}");
        let daemon = Daemon::start(Script::default());
        let bench = Bench::new(Some(&daemon), 512 * G);
        let rig = &bench.rig;
        let blocks = bench.scattered(8);
        // The second time blocks move with their shadows.
        trim(&daemon, 1);
        let more = bench.scattered(7);
        rig.fake.fail_kth(k, ERROR);
        trim(&daemon, 2);
        let reached = !rig.fake.fault_pending();
        rig.fake.heal();
        bench.assert_holds(&blocks, &what);
        bench.assert_holds(&more, &what);
        bench.check();
        trim(&daemon, 3);
        bench.assert_holds(&blocks, &what);
        bench.assert_holds(&more, &what);
        with_arena(&bench);
        assert!(done(daemon.reclaim(u64::MAX)), "{what}");
        bench.assert_holds(&blocks, &what);
        bench.assert_holds(&more, &what);
        bench.free_all(&blocks);
        bench.free_all(&more);
        rig.engine.framework_trim(rig.device);
        bench.check();
        assert_eq!((rig.books().allocated, rig.card.used()), (0, 0), "{what}");
        rig.assert_gone_after_detach();
        if !reached {
            assert!(k > 40, "{what}: there are more calls than that");
            return;
        }
    }
    panic!("it never ends");
}

/// Between two mappings of a block's addresses there is nothing. If the driver then makes no mapping at all any more, nobody gets to
/// the block before it does.
#[test]
fn what_is_torn_is_mended_before_anybody_touches_it() {
    for call in [Call::MapAs, Call::GrantAs] {
        let daemon = Daemon::start(Script::default());
        let bench = Bench::new(Some(&daemon), 512 * G);
        let rig = &bench.rig;
        let blocks = bench.scattered(8);
        rig.fake.fail_always(call, ERROR);
        daemon.send(ToLayer::Trim { device: 0, query: 1 });
        rig.until("a torn block", |rig| {
            rig.state(|state| state.torn && state.closed && state.failing.is_some())
        });
        assert!(
            rig.engine.report_json().contains("mapping blocks again"),
            "the report says why it stands still"
        );
        std::thread::scope(|scope| {
            let touch = scope.spawn(|| bench.assert_holds(&blocks, "mended"));
            rig.until("a program that waits", |rig| rig.engine.gate().waiters_for(0) > 0);
            assert!(!touch.is_finished());
            rig.fake.heal();
        });
        rig.until("an open gate", |rig| {
            rig.state(|state| state.phase == Phase::Resident && !state.torn && state.failing.is_none())
        });
        trim(&daemon, 2);
        assert_eq!(rig.card.used(), G);
        bench.assert_holds(&blocks, "and moved");
        bench.check();
        rig.assert_gone_after_detach();
    }
}

/// What is torn leaves the card as anything else does, and comes back whole.
#[test]
fn a_torn_block_may_be_evicted() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::new(Some(&daemon), 512 * G);
    let rig = &bench.rig;
    let blocks = bench.scattered(8);
    with_arena(&bench);
    rig.fake.fail_always(Call::MapAs, ERROR);
    daemon.send(ToLayer::Trim { device: 0, query: 1 });
    rig.until("a torn block", |rig| {
        rig.state(|state| state.torn && state.closed)
    });
    let end = daemon.reclaim(u64::MAX);
    assert!(done(end), "{end:?}");
    assert_eq!(rig.card.used(), 0);
    rig.fake.heal();
    bench.assert_holds(&blocks, "back");
    assert!(!rig.state(|state| state.torn));
    bench.check();
    bench.free_all(&blocks);
    rig.assert_gone_after_detach();
}

/// Threads that allocate, write, look and free while the blocks of all move, again and again, and are evicted in between.
#[test]
fn threads_go_on_while_blocks_move() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::new(Some(&daemon), 2048 * G);
    let kept = bench.scattered(8);
    with_arena(&bench);
    std::thread::scope(|scope| {
        for thread in 1..4u64 {
            let bench = &bench;
            scope.spawn(move || {
                let mut random = Pcg64Mcg::seed_from_u64(thread);
                let mut live: Vec<(u64, u64, u8)> = Vec::new();
                for step in 0..150u64 {
                    let size = u64::from(random.next_u32()) % (G / 2) + 1;
                    let seed = u8::try_from(step).unwrap();
                    let at = bench.on(size, thread);
                    bench.rig.fill(at, size, seed);
                    live.push((at, size, seed));
                    if live.len() > 12 {
                        let gone = random.next_u32() as usize % live.len();
                        let (at, size, seed) = live.swap_remove(gone);
                        assert!(bench.rig.holds(at, size, seed), "thread {thread}, step {step}");
                        bench.free(at, thread);
                    }
                }
                for (at, size, seed) in live {
                    assert!(bench.rig.holds(at, size, seed), "thread {thread}, at the end");
                    bench.free(at, thread);
                }
            });
        }
        for query in 1..30 {
            trim(&daemon, query);
            if query % 8 == 0 {
                daemon.reclaim(u64::MAX);
            }
        }
    });
    bench.assert_holds(&kept, "at the end");
    trim(&daemon, 100);
    assert_eq!(bench.rig.card.used(), G);
    bench.assert_holds(&kept, "alone");
    bench.check();
    bench.rig.assert_gone_after_detach();
}
