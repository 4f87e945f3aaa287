//! Faults that others had, as far as a pool can have them. The numbers are those of the collected reports.

use super::super::*;
use super::{GRANULE, World};

const MIB: u64 = 1 << 20;
const S: Stream = Stream(0);

/// Counts calls.
#[derive(Debug, Default)]
struct Count {
    created: u64,
    released: u64,
    creates: u64,
    maps: u64,
}

impl Backing for Count {
    type Error = std::convert::Infallible;

    fn call(&mut self, call: &Call) -> Result<(), Self::Error> {
        match *call {
            Call::Create { len, .. } => {
                self.created += len;
                self.creates += 1;
            }
            Call::Release { len, .. } => self.released += len,
            Call::Map { .. } => self.maps += 1,
            Call::Unmap { .. } | Call::Wait { .. } | Call::Copy { .. } => {}
        }
        Ok(())
    }
}

fn pool(granule: u64) -> Pool {
    let mut pool = Pool::new(Config::for_granule(granule));
    assert!(pool.add_range(1 << 40, 1 << 45));
    pool
}

fn allocate(pool: &mut Pool, count: &mut Count, size: u64) -> Option<u64> {
    let request = Request {
        size,
        align: 1,
        stream: S,
        asked: true,
    };
    match pool.allocate(request) {
        Step::Ready(at) => Some(at),
        Step::Run(plan) => {
            let (done, _) = plan.run(count);
            match pool.finish(*plan, done) {
                Finished::Block(at) => Some(at),
                Finished::Less | Finished::Failed => None,
            }
        }
        Step::NoRoom(_) => None,
        other => panic!("{other:?}"),
    }
}

fn trim(pool: &mut Pool, count: &mut Count) {
    pool.all_done();
    if let Some(plan) = pool.trim() {
        let (done, _) = plan.run(count);
        assert_eq!(pool.finish(plan, done), Finished::Less);
    }
}

/// Project-HAMi/HAMi#1181: the usage is the sum of what lives, at every moment; nothing is ever subtracted twice.
#[test]
fn bug_014_usage_is_what_lives() {
    let mut world = World::new(10_000);
    let mut rng: u64 = 14;
    for _ in 0..if cfg!(miri) { 100 } else { 4000 } {
        rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let dice = rng >> 33;
        if dice.is_multiple_of(2) || world.live.is_empty() {
            world.allocate(1 + dice % 40, Stream(dice % 3));
        } else {
            let which = usize::try_from(dice).unwrap() % world.live.len();
            world.free(which, &[]);
        }
        let stats = world.pool.stats();
        let live: u64 = world.live.iter().map(|block| block.2).sum();
        assert_eq!((stats.allocated, stats.requested), (live, live));
        assert!(
            stats.allocated <= stats.active
                && stats.active <= stats.touched
                && stats.touched <= stats.reserved
        );
        let classes: u64 = world.pool.classes().map(|class| class.allocated).sum();
        assert_eq!(classes, live);
    }
    world.end();
}

/// cupy/cupy#3008: what goes back all at once makes room under the limit like what goes back one by one.
#[test]
fn bug_022_a_trim_gives_the_limit_back() {
    let mut pool = pool(2 * MIB);
    let mut count = Count::default();
    pool.set_limit(64 * MIB);
    for _ in 0..10 {
        let blocks: Vec<u64> = (0..32)
            .filter_map(|_| allocate(&mut pool, &mut count, 2 * MIB))
            .collect();
        assert_eq!(blocks.len(), 32);
        assert_eq!(allocate(&mut pool, &mut count, 2 * MIB), None, "beyond the limit");
        for at in blocks {
            pool.free(at, S, Mark(1), &[]).unwrap();
        }
        trim(&mut pool, &mut count);
        assert_eq!(pool.physical().0, 0);
    }
    assert_eq!(count.created, count.released);
}

/// ovg-project/kvcached#364: whichever step of an allocation fails, what it took is given back, and the next one works.
#[test]
fn bug_043_an_allocation_that_fails_half_way_keeps_nothing() {
    let prepare = || {
        let mut world = World::new(1000);
        // Idle chunks apart from each other, larger ones too; the next block needs a view, a cut and new memory.
        let blocks: Vec<u64> = (0..8)
            .map(|n| world.allocate((n % 3 + 1) * GRANULE, S).unwrap())
            .collect();
        for at in blocks.iter().step_by(2) {
            world.free_at(*at);
        }
        world
    };
    for wanted in [5 * GRANULE + 3, 9 * GRANULE, 40 * GRANULE, 2 * GRANULE + 1] {
        let mut calls = 1;
        loop {
            let mut world = prepare();
            let (before, live) = (world.card.calls, world.live.len());
            let physical = world.card.physical();
            world.card.fails.extend([before + calls]);
            let got = world.allocate(wanted, S);
            world.check();
            if got.is_some() {
                assert!(calls > 1, "{wanted} takes calls");
                world.end();
                break;
            }
            assert_eq!(world.live.len(), live);
            assert!(world.card.physical() <= physical + wanted + GRANULE);
            assert!(
                world.allocate(wanted, S).is_some(),
                "after a failure of call {calls}"
            );
            world.check();
            world.end();
            calls += 1;
        }
    }
}

/// triton-inference-server/server#2659: what is not used does not stay for ever: it goes when others are short of memory.
#[test]
fn bug_058_idle_memory_goes_back_when_the_device_is_short() {
    let mut pool = pool(2 * MIB);
    let mut count = Count::default();
    let marks = Watermarks {
        low: 100 * MIB,
        high: 200 * MIB,
        batch: 16 * MIB,
    };
    let at = allocate(&mut pool, &mut count, 300 * MIB).unwrap();
    pool.free(at, S, Mark(1), &[]).unwrap();
    assert_eq!(pool.surplus(100 * MIB, &marks), 0, "nobody is short");
    // A loop that will use it again keeps it, unless others have nothing at all.
    assert_eq!(pool.surplus(90 * MIB, &marks), 0);
    assert_eq!(pool.surplus(10 * MIB, &marks), 190 * MIB);
    // It has not been used in two periods.
    pool.tick();
    assert_eq!(pool.surplus(90 * MIB, &marks), 0);
    pool.tick();
    assert_eq!(pool.surplus(90 * MIB, &marks), 110 * MIB);
    let bytes = pool.surplus(90 * MIB, &marks);
    pool.all_done();
    let plan = pool.release(bytes).unwrap();
    let (done, _) = plan.run(&mut count);
    assert_eq!(pool.finish(plan, done), Finished::Less);
    assert!(
        count.released >= bytes,
        "many small ones become one that suffices"
    );
    assert!(pool.stats().released_total >= bytes);
}

/// ovg-project/kvcached#359: small blocks that stay do not pin a granule each, and what is pinned is said.
#[test]
fn bug_065_small_blocks_pin_few_granules() {
    let mut pool = pool(2 * MIB);
    let mut count = Count::default();
    let page = 256 << 10;
    let mut kept = Vec::new();
    // Requests come and go; one page of each stays, as a prefix in a cache.
    for _ in 0..64 {
        let pages: Vec<u64> = (0..64)
            .filter_map(|_| allocate(&mut pool, &mut count, page))
            .collect();
        for (n, at) in pages.into_iter().enumerate() {
            if n == 5 {
                kept.push(at);
            } else {
                pool.free(at, S, Mark(1), &[]).unwrap();
            }
        }
    }
    let stats = pool.stats();
    assert_eq!(stats.allocated, 64 * page);
    // 64 pages fill 8 granules; with 8 pages each, no more than half as many again may be touched.
    assert!(
        stats.touched <= 12 * 2 * MIB,
        "{} granules",
        stats.touched / (2 * MIB)
    );
    assert_eq!(stats.external_fragmentation, stats.touched - stats.allocated);
    trim(&mut pool, &mut count);
    assert_eq!(pool.stats().reserved, stats.touched);
}

/// pytorch/pytorch#145168: everything that was ever taken from below is given back below.
#[test]
fn bug_079_everything_taken_is_given_back() {
    let mut pool = pool(2 * MIB);
    let mut count = Count::default();
    let blocks: Vec<u64> = [5 * MIB, 1000, 300 * MIB, 2 * MIB, 7 * MIB]
        .into_iter()
        .filter_map(|size| allocate(&mut pool, &mut count, size))
        .collect();
    assert!(count.created > 0);
    for at in blocks {
        pool.free(at, S, Mark(1), &[]).unwrap();
    }
    trim(&mut pool, &mut count);
    assert_eq!((count.created, pool.physical().0), (count.released, 0));
}

/// pytorch/pytorch#35901: small blocks in what a large one left do not keep the next large one from fitting.
#[test]
fn bug_112_a_large_block_fits_again_after_small_ones_came() {
    let large = 11_878 * MIB;
    let mut pool = pool(2 * MIB);
    let mut count = Count::default();
    pool.set_limit(large + 16 * MIB);
    let at = allocate(&mut pool, &mut count, large).unwrap();
    pool.free(at, S, Mark(1), &[]).unwrap();
    let small: Vec<u64> = (0..8)
        .filter_map(|_| allocate(&mut pool, &mut count, MIB))
        .collect();
    assert_eq!(small.len(), 8);
    assert!(allocate(&mut pool, &mut count, large).is_some());
    assert!(pool.physical().0 <= large + 8 * MIB);
    pool.check().unwrap();
}

/// fzyzcjy/torch_memory_saver PR#82: sizes that are no multiple of the granule, for every granule.
#[test]
fn bug_113_any_size_with_any_granule() {
    for granule in [2 * MIB, 64 << 10, 512 * MIB] {
        let mut pool = pool(granule);
        let mut count = Count::default();
        let sizes = [0, 1, 128, 6912, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1];
        let blocks: Vec<u64> = sizes
            .into_iter()
            .filter_map(|size| allocate(&mut pool, &mut count, size))
            .collect();
        assert_eq!(blocks.len(), sizes.len());
        for (at, size) in blocks.iter().zip(sizes) {
            let block = pool.find(*at).unwrap();
            assert_eq!((block.size, block.len % 512), (size, 0));
            assert!(block.len >= size && block.len < size + 1024);
        }
        assert_eq!(count.created % granule, 0);
        pool.check().unwrap();
        for at in blocks {
            pool.free(at, S, Mark(1), &[]).unwrap();
        }
        trim(&mut pool, &mut count);
        assert_eq!(pool.physical().0, 0);
    }
}

/// NVIDIA/cuda-python#2345: addresses that were not granted are not touched; the pool goes on with others.
#[test]
fn bug_115_addresses_elsewhere_do_as_well() {
    let mut pool = Pool::new(Config::for_granule(2 * MIB));
    let mut count = Count::default();
    let request = Request {
        size: 9 * MIB,
        align: 1,
        stream: S,
        asked: false,
    };
    assert!(matches!(pool.allocate(request), Step::Addresses(n) if n == 10 * MIB));
    assert!(pool.add_range(1 << 30, 8 * MIB));
    // The neighbouring range was refused; another one came. What overlaps or is uneven is not taken.
    assert!(!pool.add_range((1 << 30) + 6 * MIB, 32 * MIB));
    assert!(!pool.add_range((1 << 31) + 1, 32 * MIB));
    assert!(matches!(pool.allocate(request), Step::Addresses(_)));
    assert!(pool.add_range(1 << 31, 32 * MIB));
    let at = allocate(&mut pool, &mut count, 9 * MIB).unwrap();
    assert_eq!(at, 1 << 31);
    pool.check().unwrap();
}

/// ai-dynamo/snapshot PR#78: what was there and is gone costs nothing. Counted in records, not in time.
#[test]
#[cfg_attr(miri, ignore = "hours of history")]
fn bug_118_history_leaves_no_records() {
    let mut pool = pool(2 * MIB);
    let mut count = Count::default();
    let mut records = Vec::new();
    for round in 0..20_000u64 {
        let sizes = [3 * MIB + round % 7 * MIB, 512 + round % 999, 8 * MIB];
        let blocks: Vec<u64> = sizes
            .into_iter()
            .filter_map(|size| allocate(&mut pool, &mut count, size))
            .collect();
        for at in blocks {
            pool.free(at, S, Mark(round + 1), &[]).unwrap();
        }
        if round % 10 == 9 {
            trim(&mut pool, &mut count);
        }
        if round % 1000 == 999 {
            records.push(pool.stats().records);
        }
    }
    assert!(count.creates > 10_000);
    assert!(records.iter().all(|n| *n == records[0]), "{records:?}");
    assert_eq!(pool.space.largest_free(), 1 << 45, "addresses");
}

/// pytorch/pytorch PR#96995: large allocations are made of large chunks, because each costs a call.
#[test]
fn bug_119_few_handles_for_large_allocations() {
    let mut pool = pool(2 * MIB);
    let mut count = Count::default();
    allocate(&mut pool, &mut count, 20 * MIB).unwrap();
    assert_eq!(count.creates, 1);
    allocate(&mut pool, &mut count, 100 << 30).unwrap();
    assert!(count.maps <= 66, "{} maps", count.maps);
}

/// pytorch/pytorch#133281: peaks are known, whatever allocator is above, and can begin anew.
#[test]
fn bug_145_peaks_can_be_read_and_reset() {
    let mut pool = pool(2 * MIB);
    let mut count = Count::default();
    let at = allocate(&mut pool, &mut count, 5000 * MIB).unwrap();
    pool.free(at, S, Mark(1), &[]).unwrap();
    let stats = pool.stats();
    assert_eq!((stats.requested, stats.requested_peak), (0, 5000 * MIB));
    assert_eq!(
        (stats.allocated_peak, stats.touched_peak, stats.reserved_peak),
        (5000 * MIB, 5000 * MIB, 5000 * MIB)
    );
    pool.reset_peaks();
    let stats = pool.stats();
    assert_eq!(
        (stats.requested_peak, stats.allocated_peak, stats.touched_peak),
        (0, 0, 0)
    );
    assert_eq!(stats.reserved_peak, stats.reserved);
    allocate(&mut pool, &mut count, 100 * MIB).unwrap();
    assert_eq!(pool.stats().requested_peak, 100 * MIB);
}

/// A snapshot as PyTorch's tools read it. Python's own reader is asked if there is one.
#[test]
fn a_snapshot_is_a_pickle_of_plain_data() {
    let mut pool = pool(2 * MIB);
    let mut count = Count::default();
    let blocks: Vec<u64> = [3 * MIB, 5000, 7 * MIB, 2 * MIB]
        .into_iter()
        .filter_map(|size| allocate(&mut pool, &mut count, size))
        .collect();
    pool.free(blocks[2], S, Mark(1), &[]).unwrap();
    let segments = pool.segments();
    let bytes = pickle(&segments, 3);
    assert_eq!((&bytes[..2], bytes.last()), (&[0x80, 2][..], Some(&b'.')));
    let script = "import pickle,sys\n\
        d=pickle.load(sys.stdin.buffer)\n\
        s=d['segments']\n\
        print(sum(x['total_size'] for x in s), sum(x['requested_size'] for x in s), s[0]['device'], s[0]['address'], \
        all(sum(b['size'] for b in x['blocks'])==x['total_size'] for x in s), s[0]['segment_pool_id'], d['device_traces'])";
    let python = std::process::Command::new("python3")
        .args(["-c", script])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn();
    let Ok(mut python) = python else {
        eprintln!("SKIPPED: no python3 to read the pickle");
        return;
    };
    std::io::Write::write_all(&mut python.stdin.take().unwrap(), &bytes).unwrap();
    let said = python.wait_with_output().unwrap();
    let stats = pool.stats();
    assert_eq!(
        String::from_utf8_lossy(&said.stdout).trim(),
        format!(
            "{} {} 3 {} True (0, 0) [[]]",
            stats.reserved, stats.requested, segments[0].at
        )
    );
}
