//! Nanoseconds of the pool: `cargo run --release -p ebb-alloc --example pool_ns`.
//!
//! *hot*: allocate and free the same size again and again, as a loop does; *shared*: the same on many threads that use one front, each
//! with a size of its own, or all with the same; *pool*: without a front. The least of several batches, so that what else runs on
//! the machine shows little. With more threads than cores, time is what the cores spent: elapsed time times cores.

use std::convert::Infallible;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ebb_alloc::front::{Driver, Front, Keep};
use ebb_alloc::pool::{Backing, Call, Config, Mark, Pool, Request, Step, Stream};

const MIB: u64 = 1 << 20;

#[derive(Debug, Default)]
struct Able {
    marks: AtomicU64,
    reserved: AtomicU64,
}

impl Driver for Able {
    type Error = Infallible;

    fn call(&self, _call: &Call) -> Result<(), Infallible> {
        Ok(())
    }

    fn mark(&self, _stream: Stream) -> Mark {
        Mark(self.marks.fetch_add(1, Ordering::Relaxed))
    }

    fn done(&self, _stream: Stream) -> Mark {
        Mark(self.marks.load(Ordering::Relaxed))
    }

    fn reserve(&self, bytes: u64) -> Result<(u64, u64), Infallible> {
        // No address is given out twice: several threads may ask at once.
        let len = bytes.max(1 << 44);
        Ok(((1 << 40) + self.reserved.fetch_add(len, Ordering::Relaxed), len))
    }
}

impl Backing for Able {
    type Error = Infallible;

    fn call(&mut self, _call: &Call) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Nanoseconds of one pair, the least of `batches`.
fn least(batches: u64, pairs: u64, cores: u64, mut batch: impl FnMut()) -> f64 {
    (0..batches)
        .map(|_| {
            let start = Instant::now();
            batch();
            start.elapsed().as_nanos() as f64 * cores as f64 / pairs as f64
        })
        .fold(f64::INFINITY, f64::min)
}

fn hot(size: u64) -> f64 {
    const PAIRS: u64 = 100_000;
    let front = Front::new(Config::for_granule(2 * MIB), Keep::default(), Able::default());
    least(30, PAIRS, 1, || {
        for _ in 0..PAIRS {
            let at = front.allocate(size, Stream(0)).expect("room");
            front.free(at, Stream(0), &[]).expect("it is held");
        }
    })
}

fn shared(threads: u64, same: bool) -> f64 {
    const PAIRS: u64 = 40_000;
    let cores = std::thread::available_parallelism()
        .map_or(1, |n| n.get() as u64)
        .min(threads);
    let front = Front::new(Config::for_granule(2 * MIB), Keep::default(), Able::default());
    let barrier = Barrier::new(threads as usize);
    let mut all = Vec::new();
    for _ in 0..8 {
        let elapsed = std::thread::scope(|scope| {
            let handles: Vec<_> = (0..threads)
                .map(|thread| {
                    let (front, barrier) = (&front, &barrier);
                    scope.spawn(move || {
                        let size = if same { MIB } else { MIB + 512 * thread };
                        barrier.wait();
                        let start = Instant::now();
                        for _ in 0..PAIRS {
                            let at = front.allocate(size, Stream(thread)).expect("room");
                            front.free(at, Stream(thread), &[]).expect("it is held");
                        }
                        (start, Instant::now())
                    })
                })
                .collect();
            let times: Vec<_> = handles.into_iter().filter_map(|one| one.join().ok()).collect();
            let first = times.iter().map(|time| time.0).min();
            let last = times.iter().map(|time| time.1).max();
            first.zip(last).map(|(first, last)| last - first)
        });
        if let Some(elapsed) = elapsed {
            all.push(elapsed.as_nanos() as f64 * cores as f64 / (PAIRS * threads) as f64);
        }
    }
    all.into_iter().fold(f64::INFINITY, f64::min)
}

fn pool(live: u64) -> f64 {
    const PAIRS: u64 = 20_000;
    let mut pool = Pool::new(Config::for_granule(2 * MIB));
    assert!(pool.add_range(1 << 40, 1 << 44), "room for addresses");
    let mut able = Able::default();
    let mut allocate = |pool: &mut Pool, size| {
        let request = Request {
            size,
            align: 1,
            stream: Stream(0),
            asked: true,
        };
        match pool.allocate(request) {
            Step::Ready(at) => at,
            Step::Run(plan) => {
                let (done, _) = plan.run(&mut able);
                let at = pool.finish(*plan, done);
                assert!(
                    matches!(at, ebb_alloc::pool::Finished::Block(_)),
                    "the driver is able"
                );
                0
            }
            other => unreachable!("{other:?}"),
        }
    };
    // Blocks of many sizes, every third of them freed again.
    for n in 0..live {
        allocate(&mut pool, 512 + n % 97 * 40_000);
    }
    let blocks: Vec<u64> = pool.blocks().map(|block| block.at).step_by(3).collect();
    for at in blocks {
        pool.free(at, Stream(0), Mark(1), &[]).expect("it lives");
    }
    least(20, PAIRS, 1, || {
        for n in 0..PAIRS {
            let at = allocate(&mut pool, 512 + n % 37 * 20_000);
            if at != 0 {
                pool.free(at, Stream(0), Mark(1), &[]).expect("it lives");
            }
        }
    })
}

fn main() {
    println!("allocate and free, ns");
    for (name, size) in [("512 B", 512), ("1 MiB", MIB), ("64 MiB", 64 * MIB)] {
        println!("hot, one thread, {name:7} {:8.1}", hot(size));
    }
    for threads in [2, 16] {
        println!(
            "shared, {threads:2} threads, own sizes {:8.1}",
            shared(threads, false)
        );
        println!(
            "shared, {threads:2} threads, one size  {:8.1}",
            shared(threads, true)
        );
    }
    for live in [100, 10_000] {
        println!("pool alone, {live:6} blocks   {:8.1}", pool(live));
    }
}
