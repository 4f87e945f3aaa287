//! Threads at one front; the interleavings that matter under the model checker (`--cfg loom`), many others by chance.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

const MIB: u64 = 1 << 20;
const S: Stream = Stream(0);

/// A driver that counts. Work is done as soon as it is handed over, unless `lags`.
#[derive(Debug, Default)]
struct Count {
    marks: AtomicU64,
    created: AtomicU64,
    released: AtomicU64,
    maps: AtomicU64,
    lags: bool,
    /// Nothing can be waited for, as while a graph is captured.
    hurries: bool,
    /// The number of the call that fails.
    fails_at: AtomicU64,
    calls: AtomicU64,
    /// Ranges of addresses.
    reserved: AtomicU64,
}

impl Driver for Count {
    type Error = u64;

    fn call(&self, call: &Call) -> Result<(), u64> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        if self.fails_at.load(Ordering::Relaxed) == number {
            return Err(number);
        }
        match *call {
            Call::Wait { .. } if self.hurries => return Err(0),
            Call::Create { len, .. } => self.created.fetch_add(len, Ordering::Relaxed),
            Call::Release { len, .. } => self.released.fetch_add(len, Ordering::Relaxed),
            Call::Map { .. } => self.maps.fetch_add(1, Ordering::Relaxed),
            Call::Unmap { .. } | Call::Wait { .. } | Call::Copy { .. } => 0,
        };
        Ok(())
    }

    fn mark(&self, _stream: Stream) -> Mark {
        Mark(self.marks.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn done(&self, _stream: Stream) -> Mark {
        Mark(if self.lags {
            0
        } else {
            self.marks.load(Ordering::Relaxed)
        })
    }

    fn reserve(&self, bytes: u64) -> Result<(u64, u64), u64> {
        let number = self.reserved.fetch_add(1, Ordering::Relaxed);
        Ok(((1 << 40) + (number << 37), bytes.max(1 << 36)))
    }
}

#[cfg(not(loom))]
fn front(shards: usize) -> Front<Count> {
    let keep = Keep {
        shards,
        ..Keep::default()
    };
    Front::new(Config::for_granule(2 * MIB), keep, Count::default())
}

/// Free memory that is to be cut needs a wait for the work that may use it. Where that fails, there is a block all the same, in new memory.
#[cfg(not(loom))]
#[test]
fn a_wait_that_fails_is_no_reason_to_refuse() {
    let driver = Count {
        lags: true,
        hurries: true,
        ..Count::default()
    };
    let front = Front::new(Config::for_granule(2 * MIB), Keep::default(), driver);
    let wide = front.allocate(32 * MIB, S).unwrap();
    front.free(wide, S, &[]).unwrap();
    let part = front.allocate(6 * MIB, S).unwrap();
    assert!(
        part + 6 * MIB <= wide || part >= wide + 32 * MIB,
        "taken from what work may use"
    );
    front.check().unwrap();
    assert_eq!(front.stats().pool.reserved, 38 * MIB);
    front.set_limit(38 * MIB);
    let refused = front.allocate(8 * MIB, S);
    assert!(
        matches!(refused, Err(AllocateError::Driver(0))),
        "with time there would be room"
    );
    front.free(part, S, &[]).unwrap();
    front.check().unwrap();
}

#[cfg(not(loom))]
mod threads {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use super::*;

    /// Blocks by address, as their holders know them.
    #[derive(Default)]
    struct Held(Mutex<BTreeMap<u64, u64>>);

    impl Held {
        fn enter(&self, at: u64, size: u64) {
            let mut held = self.0.lock().unwrap();
            let before = held.range(..at + size).next_back();
            assert!(
                before.is_none_or(|(other, n)| other + n <= at),
                "two hold {at:#x}"
            );
            held.insert(at, size);
        }

        fn take(&self, dice: u64) -> Option<u64> {
            let mut held = self.0.lock().unwrap();
            let at = *held.range(dice..).next().or_else(|| held.iter().next())?.0;
            held.remove(&at);
            Some(at)
        }
    }

    #[test]
    fn no_two_threads_hold_a_byte() {
        let front = front(3);
        let held = Held::default();
        std::thread::scope(|scope| {
            for seed in 1..=4u64 {
                let (front, held) = (&front, &held);
                scope.spawn(move || {
                    let mut rng = seed;
                    for _ in 0..if cfg!(miri) { 30 } else { 3000 } {
                        rng = rng
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1_442_695_040_888_963_407);
                        let dice = rng >> 20;
                        let stream = Stream(dice >> 30 & 1);
                        match dice % 16 {
                            0..=7 => {
                                let size = [512, 3000, MIB, 3 * MIB, 7 * MIB + 5][(dice >> 8) as usize % 5];
                                held.enter(front.allocate(size, stream).unwrap(), size);
                            }
                            // Another thread's, as likely as not.
                            8..=14 => {
                                if let Some(at) = held.take((1 << 40) + (dice >> 8) % (1 << 33)) {
                                    assert!(front.size(at).is_some());
                                    let others: &[Stream] = if dice & 256 == 0 { &[] } else { &[Stream(1)] };
                                    front.free(at, stream, others).unwrap();
                                }
                            }
                            _ => front.flush(MIB),
                        }
                    }
                });
            }
        });
        front.check().unwrap();
        while let Some(at) = held.take(0) {
            front.free(at, S, &[]).unwrap();
        }
        for _ in 0..2 {
            front.trim().unwrap();
        }
        front.check().unwrap();
        let stats = front.stats();
        assert_eq!((stats.requested, stats.allocated, stats.cached), (0, 0, 0));
        assert_eq!((stats.pool.blocks, stats.pool.reserved), (0, 0));
        let driver = front.driver();
        assert_eq!(
            driver.created.load(Ordering::Relaxed),
            driver.released.load(Ordering::Relaxed)
        );
    }

    #[test]
    fn what_threads_keep_goes_back_before_anything_is_mapped() {
        let front = front(4);
        let blocks: Vec<u64> = (0..10).map(|_| front.allocate(2 * MIB, S).unwrap()).collect();
        for at in blocks {
            front.free(at, S, &[]).unwrap();
        }
        assert_eq!(front.stats().cached, 20 * MIB);
        let created = front.driver().created.load(Ordering::Relaxed);
        front.allocate(20 * MIB, S).unwrap();
        assert_eq!(front.driver().created.load(Ordering::Relaxed), created);
        assert_eq!(front.stats().cached, 0);
    }

    #[test]
    fn the_same_block_comes_again_without_a_call() {
        let front = front(1);
        let first = front.allocate(3 * MIB, S).unwrap();
        let calls = front.driver().calls.load(Ordering::Relaxed);
        for size in [3 * MIB, 3 * MIB - 511, 3 * MIB] {
            front.free(first, S, &[]).unwrap();
            assert_eq!(front.allocate(size, S).unwrap(), first);
            assert_eq!(front.size(first), Some(size));
        }
        assert_eq!(front.driver().calls.load(Ordering::Relaxed), calls);
    }

    #[test]
    fn a_block_goes_to_another_stream_only_when_its_work_is_done() {
        let mut front = front(1);
        front.driver.lags = true;
        let first = front.allocate(2 * MIB, S).unwrap();
        front.free(first, S, &[]).unwrap();
        assert_ne!(front.allocate(2 * MIB, Stream(1)).unwrap(), first);
        front.driver.lags = false;
        assert_eq!(front.allocate(2 * MIB, Stream(1)).unwrap(), first);
    }

    #[test]
    fn what_nobody_holds_cannot_be_freed() {
        let front = front(2);
        let at = front.allocate(4 * MIB, S).unwrap();
        assert!(matches!(front.free(at + 512, S, &[]), Err(FreeError::Inner(_))));
        assert!(matches!(front.free(77 << 40, S, &[]), Err(FreeError::NotLive(_))));
        front.free(at, S, &[]).unwrap();
        assert!(matches!(front.free(at, S, &[]), Err(FreeError::NotLive(_))));
        front.flush(0);
        assert!(matches!(front.free(at, S, &[]), Err(FreeError::NotLive(_))));
    }

    #[test]
    fn a_call_that_fails_is_said_and_the_next_one_works() {
        let front = front(1);
        for call in 1..4 {
            let now = front.driver().calls.load(Ordering::Relaxed);
            front.driver().fails_at.store(now + call, Ordering::Relaxed);
            let got = front.allocate(call * 10 * MIB + 1, S);
            if let Ok(at) = got {
                front.free(at, S, &[]).unwrap();
            } else {
                assert!(matches!(got, Err(AllocateError::Driver(n)) if n == now + call));
            }
            front.check().unwrap();
        }
        front.driver().fails_at.store(0, Ordering::Relaxed);
        front.allocate(10 * MIB + 1, S).unwrap();
    }

    #[test]
    fn a_shard_keeps_no_more_than_it_may() {
        let keep = Keep {
            shards: 1,
            bytes: 8 * MIB,
            block: 4 * MIB,
        };
        let front = Front::new(Config::for_granule(2 * MIB), keep, Count::default());
        let blocks: Vec<u64> = (0..8).map(|_| front.allocate(2 * MIB, S).unwrap()).collect();
        let large = front.allocate(6 * MIB, S).unwrap();
        front.free(large, S, &[]).unwrap();
        assert_eq!(front.stats().cached, 0, "too large");
        for at in blocks {
            front.free(at, S, &[]).unwrap();
            assert!(front.stats().cached <= 8 * MIB);
        }
        let marks = Watermarks {
            low: MIB,
            high: 100 * MIB,
            batch: MIB,
        };
        assert_eq!(front.relieve(MIB, &marks).unwrap(), 0);
        assert!(front.relieve(0, &marks).unwrap() >= 16 * MIB);
        assert_eq!(front.stats().cached, 0);
    }
}

#[cfg(loom)]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    fn small() -> Arc<Front<Count>> {
        let mut config = Config::for_granule(2 * MIB);
        config.limit = 8 * MIB;
        let keep = Keep {
            shards: 2,
            bytes: 64 * MIB,
            block: 64 * MIB,
        };
        Arc::new(Front::new(config, keep, Count::default()))
    }

    /// Two threads take and free; whatever the order, they hold different blocks.
    #[test]
    fn two_threads_hold_different_blocks() {
        loom::model(|| {
            let front = small();
            let other = {
                let front = front.clone();
                thread::spawn(move || front.allocate_on(1, 2 * MIB, S).unwrap())
            };
            let mine = front.allocate_on(0, 2 * MIB, S).unwrap();
            let theirs = other.join().unwrap();
            assert_ne!(mine, theirs);
            front.free_on(0, mine, S, &[]).unwrap();
            front.free_on(0, theirs, S, &[]).unwrap();
            assert_eq!(front.stats().allocated, 0);
            front.check().unwrap();
        });
    }

    /// A block is freed by another thread while a third party flushes: it goes back once, and is never lost.
    #[test]
    fn a_remote_free_and_a_flush() {
        loom::model(|| {
            let front = small();
            let at = front.allocate_on(0, 2 * MIB, S).unwrap();
            let other = {
                let front = front.clone();
                thread::spawn(move || front.free_on(1, at, S, &[]).unwrap())
            };
            front.flush(0);
            other.join().unwrap();
            front.flush(0);
            let stats = front.stats();
            assert_eq!((stats.cached, stats.allocated, stats.pool.blocks), (0, 0, 0));
            front.check().unwrap();
        });
    }

    /// The same block freed twice at once: one of the two is told.
    #[test]
    fn of_two_frees_one_is_refused() {
        loom::model(|| {
            let front = small();
            let at = front.allocate_on(0, 2 * MIB, S).unwrap();
            let other = {
                let front = front.clone();
                thread::spawn(move || front.free_on(1, at, S, &[]).is_ok())
            };
            let mine = front.free_on(0, at, S, &[]).is_ok();
            assert!(mine ^ other.join().unwrap());
            front.check().unwrap();
        });
    }
}

/// Figures against a tiny model: a list of what is held.
#[cfg(not(loom))]
mod figures {
    use proptest::prelude::*;

    use super::*;

    fn check(front: &Front<Count>, held: &[(u64, u64)]) {
        let take = |size: u64| front.config.round(size).unwrap();
        let requested: u64 = held.iter().map(|one| one.1).sum();
        let allocated: u64 = held.iter().map(|one| take(one.1)).sum();
        let stats = front.stats();
        let pool = stats.pool;
        assert_eq!((stats.requested, stats.allocated), (requested, allocated));
        assert_eq!(pool.allocated, allocated + stats.cached);
        assert_eq!(pool.internal_fragmentation, pool.allocated - pool.requested);
        assert_eq!(pool.external_fragmentation, pool.touched - pool.active);
        assert_eq!((pool.active, pool.stuck), (pool.allocated, 0), "nobody is late");
        assert_eq!(pool.reserved, pool.touched + pool.idle);
        assert_eq!(pool.reserved, pool.created_total - pool.released_total);
        let driver = front.driver();
        assert_eq!(pool.created_total, driver.created.load(Ordering::Relaxed));
        assert_eq!(pool.released_total, driver.released.load(Ordering::Relaxed));
        assert_eq!(pool.map_calls, driver.maps.load(Ordering::Relaxed));
        assert!(pool.mapped >= pool.reserved);
        let classes = front.classes();
        for power in 0..u64::BITS {
            let of: Vec<u64> = held
                .iter()
                .map(|one| one.1)
                .filter(|size| take(*size).ilog2() == power)
                .collect();
            let found = classes.iter().find(|class| class.from == 1 << power);
            let found = found.copied().unwrap_or_default();
            let model = (
                of.len() as u64,
                of.iter().sum(),
                of.iter().map(|size| take(*size)).sum(),
            );
            assert_eq!(
                (found.blocks, found.requested, found.allocated),
                model,
                "2^{power}"
            );
        }
        assert_eq!(
            classes.iter().map(|class| class.cached).sum::<u64>(),
            stats.cached
        );
        assert_eq!(
            classes.iter().map(|class| class.made_total).sum::<u64>(),
            pool.blocks_total
        );
        assert!(classes.is_sorted_by_key(|class| class.from));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 200 }))]

        #[test]
        fn figures_are_those_of_a_tiny_model(
            ops in prop::collection::vec((0u32..8, 0u32..25, any::<u64>(), 0u64..2), 1..80),
            divisions in 0u32..4,
        ) {
            let mut config = Config::for_granule(2 * MIB);
            config.divisions = if divisions == 0 { 0 } else { 1 << divisions };
            let front = Front::new(config, Keep { shards: 2, ..Keep::default() }, Count::default());
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (what, power, any, stream) in ops {
                match what {
                    0..=3 => {
                        let size = any % (2 << power);
                        held.push((front.allocate(size, Stream(stream)).unwrap(), size));
                    }
                    4..=6 if !held.is_empty() => {
                        let (at, _) = held.swap_remove((any % held.len() as u64) as usize);
                        front.free(at, Stream(stream), &[]).unwrap();
                    }
                    7 => front.trim().unwrap(),
                    _ => front.flush(any % (8 * MIB)),
                }
                check(&front, &held);
            }
        }
    }
}
