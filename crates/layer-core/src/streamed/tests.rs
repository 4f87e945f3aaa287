//! Pools over a fake card, with streams whose progress the test decides.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ebb_device::DeviceError;
use ebb_device::fake::Call;
use proptest::prelude::*;

use super::*;
use crate::testing::{Daemon, Rig, Script, done};

/// The granule: slabs are then spans of their own, as on a real card.
const G: u64 = 1 << 20;

/// Streams as counters: what they were given, and how far they are.
#[derive(Debug, Default)]
struct Card {
    given: BTreeMap<StreamKey, u64>,
    reached: BTreeMap<StreamKey, u64>,
    /// Marks: stream and place.
    marks: BTreeMap<u64, (StreamKey, u64)>,
    next: u64,
    /// Which streams wait for which places of others.
    holds: Vec<(StreamKey, StreamKey, u64)>,
    /// The thread that calls now.
    thread: u64,
    forbidden: bool,
    refuse_marks: bool,
    refuse_holds: bool,
}

#[derive(Debug, Default)]
pub(super) struct FakeFences(Mutex<Card>);

impl FakeFences {
    fn with<T>(&self, change: impl FnOnce(&mut Card) -> T) -> T {
        change(&mut self.0.lock().unwrap())
    }

    /// A stream is given a piece of work.
    fn work(&self, stream: StreamKey) -> u64 {
        self.with(|card| {
            let given = card.given.entry(stream).or_default();
            *given += 1;
            *given
        })
    }

    /// A stream does everything that it was given.
    fn run(&self, stream: StreamKey) {
        self.with(|card| {
            let given = card.given.get(&stream).copied().unwrap_or(0);
            card.reached.insert(stream, given);
        });
    }

    fn marks(&self) -> usize {
        self.with(|card| card.marks.len())
    }
}

impl Fences for FakeFences {
    fn allowed(&self) -> bool {
        self.with(|card| !card.forbidden)
    }

    fn record(&self, stream: &StreamKey) -> Option<Fence> {
        self.with(|card| {
            assert!(
                stream.thread == 0 || stream.thread == card.thread,
                "only its thread reaches it"
            );
            if card.refuse_marks {
                return None;
            }
            card.next += 1;
            let place = card.given.get(stream).copied().unwrap_or(0);
            card.marks.insert(card.next, (*stream, place));
            Some(Fence(card.next))
        })
    }

    fn state(&self, fence: Fence) -> FenceState {
        self.with(|card| match card.marks.get(&fence.0) {
            Some((stream, place)) if card.reached.get(stream).copied().unwrap_or(0) >= *place => {
                FenceState::Passed
            }
            Some(_) => FenceState::Pending,
            None => panic!("a mark that was given back is asked about"),
        })
    }

    fn hold(&self, stream: &StreamKey, fence: Fence) -> bool {
        self.with(|card| {
            let (other, place) = card.marks[&fence.0];
            if !card.refuse_holds {
                card.holds.push((*stream, other, place));
            }
            !card.refuse_holds
        })
    }

    fn recycle(&self, fence: Fence) {
        self.with(|card| assert!(card.marks.remove(&fence.0).is_some(), "given back twice"));
    }
}

const POOL: u64 = 0x1000;

fn key(handle: u64) -> StreamKey {
    StreamKey {
        handle,
        context: 7,
        thread: 0,
        device: 0,
    }
}

struct Bench {
    rig: Rig,
    card: Arc<FakeFences>,
}

impl Bench {
    fn with(daemon: Option<&Daemon>, capacity: u64, facts: PoolFacts) -> Self {
        let rig = Rig::with(daemon, ebb_device::fake::Card::new(capacity), capacity, G, |_| {});
        let card = Arc::new(FakeFences::default());
        rig.engine.set_fences(Arc::clone(&card) as Arc<dyn Fences>);
        rig.engine.pool_register(POOL, rig.device, facts);
        rig.engine.pool_set_current(rig.device, Some(POOL));
        Self { rig, card }
    }

    fn new(capacity: u64) -> Self {
        Self::with(None, capacity, PoolFacts::default())
    }

    fn alloc(&self, stream: StreamKey, size: u64) -> Result<u64, PoolError> {
        let result = self
            .rig
            .engine
            .pool_alloc(WhichPool::Current(self.rig.device), &stream, size);
        self.check();
        result
    }

    fn free(&self, ptr: u64, stream: StreamKey) {
        self.card.with(|card| card.thread = stream.thread);
        self.rig.engine.pool_free(ptr, Some(&stream)).unwrap().unwrap();
        self.check();
    }

    fn figures(&self) -> PoolFigures {
        self.rig.engine.pool_figures(POOL).unwrap()
    }

    fn check(&self) {
        self.rig.engine.core.streamed.lock().check();
    }

    /// The program waits for a stream.
    fn wait(&self, stream: StreamKey) {
        let mark = self.rig.engine.pool_mark();
        self.card.run(stream);
        if let Some(mark) = mark {
            self.rig.engine.pool_waited(mark, &Waited::Stream(stream));
        }
        self.check();
    }
}

#[test]
fn bug_035_order_is_kept_and_nothing_is_waited_for() {
    let bench = Bench::new(256 * G);
    let first = bench.alloc(key(5), 8 * G).unwrap();
    bench.card.work(key(5));
    bench.free(first, key(5));
    let calls = bench.rig.fake.total_calls();
    for _ in 0..1000 {
        let again = bench.alloc(key(5), 8 * G).unwrap();
        assert_eq!(again, first, "the same stream has it at once");
        bench.card.work(key(5));
        bench.free(again, key(5));
    }
    assert_eq!(bench.rig.fake.total_calls(), calls, "no call of the driver");
    assert_eq!(bench.card.marks(), 0, "no mark in any stream");
    let other = bench.alloc(key(6), 8 * G).unwrap();
    assert_ne!(other, first, "the first stream has not come so far");
    bench.card.run(key(5));
    assert_eq!(bench.alloc(key(6), 8 * G).unwrap(), first, "now it has");
}

#[test]
fn bug_004_a_pool_of_the_program_is_counted_and_refused_at_the_limit_without_drift() {
    let daemon = Daemon::start(Script {
        limit: 64 * G,
        ..Script::default()
    });
    let bench = Bench::with(Some(&daemon), 256 * G, PoolFacts::default());
    let engine = &bench.rig.engine;
    let mine = 0x2000;
    engine.pool_register(mine, bench.rig.device, PoolFacts::default());
    for round in 0..200 {
        let stream = key(5 + round % 3);
        let ptr = engine
            .pool_alloc(WhichPool::Handle(mine), &stream, 32 * G)
            .unwrap();
        assert!(matches!(
            engine.pool_alloc(WhichPool::Handle(mine), &stream, 48 * G),
            Err(PoolError::Alloc(AllocError::OverLimit { .. }))
        ));
        bench.card.work(stream);
        bench.card.run(stream);
        engine.pool_free(ptr, Some(&stream)).unwrap().unwrap();
        bench.check();
    }
    assert_eq!(engine.pool_figures(mine).unwrap().used, 0);
    assert!(engine.pool_trim(mine, 0));
    let books = bench.rig.books();
    assert_eq!((books.allocated, books.charged() - books.overhead), (0, 0));
    assert_eq!(
        engine.pool_alloc(WhichPool::Handle(0x3000), &key(5), G),
        Err(PoolError::Unknown)
    );
}

#[test]
fn bug_017_what_is_charged_is_what_pools_reserve_and_it_is_credited() {
    let bench = Bench::new(256 * G);
    for threshold in [0, u64::MAX] {
        bench
            .rig
            .engine
            .pool_change(POOL, |facts| facts.release_threshold = threshold);
        for _ in 0..500 {
            let ptr = bench.alloc(key(5), 20 * G).unwrap();
            bench.free(ptr, key(5));
        }
        let figures = bench.figures();
        assert_eq!((figures.used, figures.reserved), (0, 20 * G));
        assert_eq!(
            bench.rig.books().allocated,
            20 * G,
            "the pool's reserve is charged"
        );
        bench.wait(key(5));
        let kept = threshold.min(20 * G);
        assert_eq!(
            (bench.figures().reserved, bench.rig.books().allocated),
            (kept, kept)
        );
        bench.rig.engine.pool_trim(POOL, 0);
        assert_eq!((bench.figures().reserved, bench.rig.books().allocated), (0, 0));
    }
    assert_eq!(
        (bench.figures().used_high, bench.figures().reserved_high),
        (20 * G, 20 * G)
    );
    bench.rig.engine.pool_reset_high(POOL, true);
    bench.rig.engine.pool_reset_high(POOL, false);
    assert_eq!((bench.figures().used_high, bench.figures().reserved_high), (0, 0));
}

#[test]
fn bug_022_every_way_in_bulk_credits_the_books() {
    let bench = Bench::new(256 * G);
    let engine = &bench.rig.engine;
    // A pool that is destroyed while it has allocations: they live on, and the last free gives everything back.
    let mine = 0x2000;
    engine.pool_register(mine, bench.rig.device, PoolFacts::default());
    let ptr = engine
        .pool_alloc(WhichPool::Handle(mine), &key(5), 30 * G)
        .unwrap();
    assert!(engine.pool_destroy(mine) && !engine.pool_destroy(mine));
    assert_eq!(engine.lookup(ptr + G).map(|found| found.pool), Some(mine));
    assert_eq!(
        engine.pool_alloc(WhichPool::Handle(mine), &key(5), G),
        Err(PoolError::Unknown)
    );
    engine.pool_register(mine, bench.rig.device, PoolFacts::default());
    let newer = engine
        .pool_alloc(WhichPool::Handle(mine), &key(5), 2 * G)
        .unwrap();
    engine.pool_free(ptr, Some(&key(5))).unwrap().unwrap();
    bench.wait(key(5));
    assert_eq!(
        bench.rig.books().allocated,
        2 * G,
        "only the newer pool of that handle has something"
    );
    engine.pool_free(newer, Some(&key(5))).unwrap().unwrap();
    engine.pool_trim(mine, 0);
    assert_eq!(bench.rig.books().allocated, 0);
    // A pool's own largest size.
    let small = 0x4000;
    engine.pool_register(
        small,
        bench.rig.device,
        PoolFacts {
            max_size: 8 * G,
            ..PoolFacts::default()
        },
    );
    let all = engine
        .pool_alloc(WhichPool::Handle(small), &key(5), 8 * G)
        .unwrap();
    assert_eq!(
        engine.pool_alloc(WhichPool::Handle(small), &key(5), 1),
        Err(PoolError::Full)
    );
    engine.pool_free(all, Some(&key(5))).unwrap().unwrap();
    assert_eq!(
        engine.pool_alloc(WhichPool::Handle(small), &key(6), 4 * G),
        Ok(all)
    );
    // The device goes.
    bench.rig.assert_gone_after_detach();
    assert_eq!(engine.pool_figures(small), None);
    assert_eq!(engine.pool_free(all, None), None);
}

#[test]
fn a_pool_that_cannot_grow_makes_the_stream_wait_and_not_the_program() {
    let facts = PoolFacts {
        max_size: 8 * G,
        ..PoolFacts::default()
    };
    let bench = Bench::with(None, 256 * G, facts);
    let ptr = bench.alloc(key(5), 8 * G).unwrap();
    let place = bench.card.work(key(5));
    bench.free(ptr, key(5));
    bench.card.with(|card| card.refuse_holds = true);
    bench
        .rig
        .engine
        .pool_change(POOL, |facts| facts.dependencies = false);
    bench.card.with(|card| card.refuse_holds = false);
    bench
        .rig
        .engine
        .pool_change(POOL, |facts| facts.dependencies = true);
    assert_eq!(bench.alloc(key(6), 8 * G), Ok(ptr));
    assert_eq!(
        bench.card.with(|card| card.holds.clone()),
        [(key(6), key(5), place)]
    );
    // A refused wait leaves the piece with the stream that freed it.
    bench.free(ptr, key(6));
    bench.card.work(key(6));
    bench.card.with(|card| {
        card.refuse_holds = true;
        card.forbidden = false;
    });
    let streamed = &bench.rig.engine.core.streamed;
    assert_eq!(bench.alloc(key(6), G), Ok(ptr));
    bench.free(ptr, key(6));
    assert!(streamed.lock().waits(|_| true));
    bench.card.run(key(6));
    assert_eq!(bench.alloc(key(7), 8 * G), Ok(ptr));
}

#[test]
fn nothing_is_marked_during_a_capture() {
    let bench = Bench::new(256 * G);
    let ptr = bench.alloc(key(5), 8 * G).unwrap();
    bench.card.work(key(5));
    bench.free(ptr, key(5));
    bench.card.with(|card| card.forbidden = true);
    let other = bench.alloc(key(6), 8 * G).unwrap();
    assert_ne!(other, ptr);
    bench.rig.engine.pool_trim(POOL, 0);
    assert_eq!((bench.card.marks(), bench.figures().reserved), (0, 16 * G));
}

#[test]
fn a_stream_that_ends_leaves_its_memory_when_its_work_is_done() {
    let bench = Bench::new(256 * G);
    let ptr = bench.alloc(key(5), 8 * G).unwrap();
    bench.card.work(key(5));
    bench.free(ptr, key(5));
    bench.rig.engine.stream_goes(5);
    assert_eq!(bench.card.marks(), 1, "the last moment to mark it");
    // Another stream with the same handle is another stream.
    let other = bench.alloc(key(5), 8 * G).unwrap();
    assert_ne!(other, ptr);
    bench.card.run(key(5));
    assert_eq!(bench.alloc(key(9), 8 * G), Ok(ptr));
    // A stream that cannot be marked keeps its memory until the context is waited for.
    bench.free(ptr, key(9));
    bench.card.with(|card| card.refuse_marks = true);
    bench.rig.engine.stream_goes(9);
    bench.card.with(|card| card.refuse_marks = false);
    bench.card.run(key(9));
    assert_ne!(bench.alloc(key(9), 8 * G), Ok(ptr));
    let mark = bench.rig.engine.pool_mark().unwrap();
    bench.rig.engine.pool_waited(mark, &Waited::Context(7));
    bench.check();
    assert_eq!(
        bench.figures().reserved,
        16 * G,
        "the threshold is nothing: it went"
    );
}

#[test]
fn a_thread_that_ends_leaves_nothing_in_the_tables() {
    let bench = Bench::new(256 * G);
    for thread in 1..50 {
        let own = StreamKey { thread, ..key(2) };
        let ptr = bench.alloc(own, 8 * G).unwrap();
        bench.card.work(own);
        bench.free(ptr, own);
        bench.rig.engine.streams_of_thread_gone(thread);
        bench.card.run(own);
    }
    assert_eq!(
        bench.figures().reserved,
        8 * G,
        "each found what the one before had left"
    );
    assert_eq!(bench.alloc(key(5), 8 * G).map(|_| bench.card.marks()), Ok(0));
    let book = bench.rig.engine.core.streamed.lock();
    assert!(book.known_streams() <= 2, "{}", book.known_streams());
}

#[test]
fn memory_freed_by_the_plain_call_belongs_to_the_stream_that_it_was_allocated_on() {
    let bench = Bench::new(256 * G);
    let ptr = bench.alloc(key(5), 8 * G).unwrap();
    bench.card.work(key(5));
    bench.rig.engine.pool_free(ptr, None).unwrap().unwrap();
    bench.check();
    assert_ne!(bench.alloc(key(6), 8 * G), Ok(ptr));
    assert_eq!(bench.alloc(key(5), 8 * G), Ok(ptr));
    // Its stream has ended: only a wait for everything says that nobody uses it.
    bench.rig.engine.stream_goes(5);
    bench.rig.engine.pool_free(ptr, None).unwrap().unwrap();
    bench.check();
    assert_ne!(bench.alloc(key(5), 8 * G), Ok(ptr));
    assert!(!bench.rig.engine.core.streamed.lock().waits(|_| true));
}

#[test]
fn what_is_no_live_allocation_is_refused_and_not_found() {
    let bench = Bench::new(256 * G);
    let engine = &bench.rig.engine;
    let plain = bench.rig.alloc(4 * G);
    assert_eq!(engine.pool_free(plain, Some(&key(5))), None, "not of a pool");
    let ptr = bench.alloc(key(5), 1000).unwrap();
    let found = engine.lookup(ptr + 999).unwrap();
    assert_eq!((found.base, found.size, found.pool), (ptr, 1000, POOL));
    assert_eq!(engine.lookup(ptr + 1000), None);
    assert_eq!(
        engine.pool_free(ptr + 512, Some(&key(5))),
        Some(Err(FreeError::Invalid))
    );
    assert_eq!(
        engine.free(ptr),
        Err(FreeError::Invalid),
        "a slab is nobody's to free"
    );
    bench.free(ptr, key(5));
    assert_eq!(engine.lookup(ptr), None);
    assert!(engine.contains(ptr));
    assert_eq!(
        engine.pool_free(ptr, Some(&key(5))),
        Some(Err(FreeError::Invalid))
    );
    assert_eq!(engine.pool_free(ptr, None), Some(Err(FreeError::Invalid)));
    assert_eq!(engine.lookup(plain + G).map(|found| found.pool), Some(0));
}

#[test]
fn what_pools_keep_goes_before_an_allocation_fails() {
    let daemon = Daemon::start(Script {
        limit: 64 * G,
        ..Script::default()
    });
    let facts = PoolFacts {
        release_threshold: u64::MAX,
        ..PoolFacts::default()
    };
    let bench = Bench::with(Some(&daemon), 256 * G, facts);
    let ptr = bench.alloc(key(5), 60 * G).unwrap();
    bench.card.work(key(5));
    bench.free(ptr, key(5));
    let card = Arc::clone(&bench.card);
    // The work ends while the allocation waits for it.
    let ending = std::thread::spawn(move || {
        while card.marks() == 0 {
            std::thread::yield_now();
        }
        card.run(key(5));
    });
    let plain = bench.rig.alloc(50 * G);
    ending.join().unwrap();
    assert_eq!(bench.figures().reserved, 0);
    bench.rig.engine.free(plain).unwrap();
}

#[test]
fn bug_079_cold_memory_is_released_though_it_is_allocated_and_what_is_free_goes_first() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::with(Some(&daemon), 256 * G, PoolFacts::default());
    let live = bench.alloc(key(5), 16 * G).unwrap();
    let free = bench.alloc(key(5), 16 * G).unwrap();
    bench.rig.fill(live, 16 * G, 3);
    bench.card.work(key(5));
    bench.free(free, key(5));
    bench.card.run(key(5));
    let end = daemon.reclaim(16 * G);
    assert!(done(end));
    assert_eq!(
        (end.freed, end.copied),
        (16 * G, 0),
        "what is free goes without a copy"
    );
    assert_eq!(bench.figures().reserved, 16 * G);
    let end = daemon.reclaim(16 * G);
    assert!(done(end));
    assert_eq!(end.copied, 16 * G, "nobody freed it");
    // While it is away the pool serves from it all the same.
    bench.free(live, key(5));
    let again = bench.alloc(key(5), 16 * G).unwrap();
    assert_eq!(again, live);
    assert!(
        bench.rig.holds(again, 16 * G, 3),
        "the same stream sees what it wrote"
    );
}

#[test]
fn what_a_running_stream_freed_goes_without_a_copy_when_the_gate_is_closed() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::with(Some(&daemon), 256 * G, PoolFacts::default());
    let live = bench.alloc(key(5), 16 * G).unwrap();
    let free = bench.alloc(key(5), 16 * G).unwrap();
    bench.rig.fill(live, 16 * G, 3);
    bench.card.work(key(5));
    bench.free(free, key(5));
    let end = daemon.reclaim(16 * G);
    assert!(done(end));
    assert_eq!(end.copied, 0);
    assert!(bench.rig.holds(live, 16 * G, 3));
}

/// Every call of the driver that a growing pool makes, failing once: the books say what is there, and the next try succeeds.
#[test]
fn a_slab_that_cannot_be_made_leaves_nothing_behind() {
    for error in [
        DeviceError::OutOfMemory,
        DeviceError::Driver { code: 999, call: "x" },
    ] {
        for k in 1.. {
            let bench = Bench::new(64 * G);
            let keeps = bench.alloc(key(5), 4 * G).unwrap();
            bench.rig.fake.fail_kth(k, error);
            let result = bench.alloc(key(5), 20 * G);
            let pending = bench.rig.fake.fault_pending();
            bench.rig.fake.heal();
            let figures = bench.figures();
            let got = u64::from(result.is_ok()) * 20 * G;
            assert_eq!(
                (figures.used, figures.reserved),
                (4 * G + got, 4 * G + got),
                "{k}: {result:?}"
            );
            assert_eq!(bench.rig.books().allocated, 4 * G + got);
            if let Ok(ptr) = result {
                bench.free(ptr, key(5));
            }
            let again = bench.alloc(key(5), 20 * G).unwrap();
            bench.free(again, key(5));
            bench.free(keeps, key(5));
            bench.wait(key(5));
            assert_eq!(bench.rig.books().allocated, 0);
            bench.rig.assert_gone_after_detach();
            if pending {
                assert!(k > 4, "several calls were tried");
                break;
            }
        }
    }
}

#[test]
fn bug_119_large_allocations_have_few_chunks_and_one_call_for_access() {
    let bench = Bench::new(256 * G);
    let calls = |call| bench.rig.fake.calls(call);
    let (creates, accesses) = (calls(Call::Create), calls(Call::SetAccess));
    // Chunks of 8 MiB at most in these tests.
    bench.alloc(key(5), 4 * G).unwrap();
    assert_eq!(
        (calls(Call::Create), calls(Call::SetAccess)),
        (creates + 1, accesses + 1)
    );
    bench.alloc(key(5), 160 * G).unwrap();
    assert_eq!(
        (calls(Call::Create), calls(Call::SetAccess)),
        (creates + 21, accesses + 2)
    );
    // As configured: 100 GiB are 800 chunks and not 51,200.
    let (granule, largest) = (2 << 20, 128 << 20);
    assert_eq!(crate::pool::chunk_size(100 << 30, granule, largest), largest);
    assert_eq!(crate::pool::chunk_size(20 << 20, granule, largest), 20 << 20);
}

#[test]
fn bug_023_nothing_of_a_pool_is_held_after_its_device_was_reset() {
    let bench = Bench::new(64 * G);
    let engine = &bench.rig.engine;
    engine.pool_change(POOL, |facts| facts.release_threshold = u64::MAX);
    let live = bench.alloc(key(5), 16 * G).unwrap();
    let freed = bench.alloc(key(5), 16 * G).unwrap();
    bench.card.work(key(5));
    bench.free(freed, key(5));
    // A reset: the contexts go, and everything with them.
    engine.streams_of_context_gone(7);
    bench.rig.assert_gone_after_detach();
    assert_eq!((engine.lookup(live), engine.pool_free(live, None)), (None, None));
    assert_eq!(
        engine.pool_alloc(WhichPool::Handle(POOL), &key(5), G),
        Err(PoolError::Unknown)
    );
}

#[derive(Clone, Debug)]
enum Step {
    Alloc { stream: u64, size: u64 },
    Free { which: usize, stream: u64 },
    Plain { which: usize },
    Run { stream: u64 },
    Wait { stream: u64 },
    Trim,
    End { stream: u64 },
    Capture(bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let stream = || 3u64..7;
    let step = prop_oneof![
        6 => (stream(), prop_oneof![1u64..4000, 1u64..20 * G]).prop_map(|(stream, size)| Step::Alloc { stream, size }),
        5 => (any::<usize>(), stream()).prop_map(|(which, stream)| Step::Free { which, stream }),
        1 => any::<usize>().prop_map(|which| Step::Plain { which }),
        2 => stream().prop_map(|stream| Step::Run { stream }),
        1 => stream().prop_map(|stream| Step::Wait { stream }),
        1 => Just(Step::Trim),
        1 => stream().prop_map(|stream| Step::End { stream }),
        1 => any::<bool>().prop_map(Step::Capture),
    ];
    proptest::collection::vec(step, 1..120)
}

/// What the test knows: who lives where, and who used which addresses last.
#[derive(Default)]
struct Model {
    /// First address to end, allocated on.
    live: BTreeMap<u64, (u64, StreamKey)>,
    /// Ranges that were freed: start, end, stream, place in it.
    freed: Vec<(u64, u64, StreamKey, u64)>,
}

impl Model {
    fn stream(handle: u64) -> StreamKey {
        StreamKey {
            // One of them is a thread's own.
            thread: u64::from(handle == 6) * 9,
            ..key(handle)
        }
    }

    fn allocated(&mut self, card: &Card, at: u64, size: u64, stream: StreamKey) {
        let end = at + size.next_multiple_of(512);
        assert!(
            !self.live.iter().any(|(from, (to, _))| *from < end && at < *to),
            "two owners at {at:#x}"
        );
        for (from, to, other, place) in &self.freed {
            if *from < end && at < *to && *other != stream {
                let reached = card.reached.get(other).copied().unwrap_or(0);
                let held = card
                    .holds
                    .iter()
                    .any(|(waits, whom, upto)| *waits == stream && whom == other && upto >= place);
                assert!(
                    reached >= *place || held,
                    "{at:#x} is used again by {stream:?}, which does not wait for {other:?}"
                );
            }
        }
        // From here on whoever frees it comes after all that was before.
        self.freed = std::mem::take(&mut self.freed)
            .into_iter()
            .flat_map(|(from, to, other, place)| {
                [
                    (from, to.min(at), other, place),
                    (from.max(end), to, other, place),
                ]
            })
            .filter(|(from, to, ..)| from < to)
            .collect();
        self.live.insert(at, (end, stream));
    }

    fn free(&mut self, which: usize) -> Option<(u64, u64, StreamKey)> {
        let at = *self.live.keys().nth(which % self.live.len().max(1))?;
        let (end, stream) = self.live.remove(&at)?;
        Some((at, end, stream))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn never_two_owners_and_never_before_its_time(steps in steps(), max in prop_oneof![Just(0), Just(20 * G)]) {
        let facts = PoolFacts { max_size: max, ..PoolFacts::default() };
        let bench = Bench::with(None, 256 * G, facts);
        let engine = &bench.rig.engine;
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Alloc { stream, size } => {
                    let stream = Model::stream(stream);
                    bench.card.with(|card| card.thread = stream.thread);
                    // A pool with a largest size would wait for work that this test does not do meanwhile.
                    if max > 0 {
                        for other in 3..7 {
                            bench.card.run(Model::stream(other));
                        }
                    }
                    match bench.alloc(stream, size) {
                        Ok(at) => {
                            prop_assert!(at.is_multiple_of(512));
                            bench.card.with(|card| model.allocated(card, at, size, stream));
                        }
                        Err(error) => prop_assert!(matches!(error, PoolError::Full | PoolError::Alloc(_)), "{error}"),
                    }
                }
                Step::Free { which, stream } => {
                    if let Some((at, end, _)) = model.free(which) {
                        // A program lets a stream free only what it waits for: then that free is the last use.
                        let stream = Model::stream(stream);
                        let place = bench.card.work(stream);
                        bench.free(at, stream);
                        model.freed.push((at, end, stream, place));
                    }
                }
                Step::Plain { which } => {
                    if let Some((at, end, stream)) = model.free(which) {
                        // The stream's own thread calls, as the rules ask.
                        bench.card.with(|card| card.thread = stream.thread);
                        let place = bench.card.work(stream);
                        engine.pool_free(at, None).unwrap().unwrap();
                        bench.check();
                        model.freed.push((at, end, stream, place));
                    }
                }
                Step::Run { stream } => bench.card.run(Model::stream(stream)),
                Step::Wait { stream } => bench.wait(Model::stream(stream)),
                Step::Trim => { engine.pool_trim(POOL, 0); bench.check(); }
                Step::End { stream } if stream != 6 => {
                    engine.stream_goes(stream);
                    // Its work runs to the end. The next stream of that handle has the same counters here, which only makes
                    // the rules stricter for it.
                    bench.check();
                }
                Step::End { .. } => {}
                Step::Capture(on) => bench.card.with(|card| card.forbidden = on),
            }
            let figures = bench.figures();
            let live: u64 = model.live.iter().map(|(at, (end, _))| end - at).sum();
            prop_assert_eq!(figures.used, live);
            prop_assert!(figures.used <= figures.reserved);
            prop_assert!(max == 0 || figures.reserved <= max);
        }
        let books = bench.rig.books();
        prop_assert_eq!(books.allocated, bench.figures().reserved);
        bench.rig.assert_gone_after_detach();
    }
}
