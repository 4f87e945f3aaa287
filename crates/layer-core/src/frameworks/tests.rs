//! The pool of frameworks over the fake device: under evictions, faults, limits and many threads.

mod mesh;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use ebb_device::fake::Call;
use ebb_device::{DeviceError, Props};
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::Bytes;
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};

use super::*;
use crate::streamed::{Fence, FenceState, Fences};
use crate::testing::{Daemon, G, Rig, Script, done};

const ERROR: DeviceError = DeviceError::Driver {
    code: 999,
    call: "ordered by the test",
};

/// Streams that are as far as the test says.
#[derive(Debug, Default)]
struct Card {
    given: HashMap<StreamKey, u64>,
    reached: HashMap<StreamKey, u64>,
    marks: HashMap<u64, (StreamKey, u64)>,
    next: u64,
    captured: bool,
}

#[derive(Debug, Default)]
struct Events(Mutex<Card>);

impl Events {
    fn work(&self, key: StreamKey) {
        *self.0.lock().unwrap().given.entry(key).or_default() += 1;
    }

    fn run(&self, key: StreamKey) {
        let mut card = self.0.lock().unwrap();
        let given = card.given.get(&key).copied().unwrap_or(0);
        card.reached.insert(key, given);
    }
}

impl Fences for Events {
    fn allowed(&self) -> bool {
        !self.0.lock().unwrap().captured
    }

    fn record(&self, key: &StreamKey) -> Option<Fence> {
        let mut card = self.0.lock().unwrap();
        assert!(!card.captured, "recorded during a capture");
        card.next += 1;
        let (next, given) = (card.next, card.given.get(key).copied().unwrap_or(0));
        card.marks.insert(next, (*key, given));
        Some(Fence(next))
    }

    fn state(&self, fence: Fence) -> FenceState {
        let card = self.0.lock().unwrap();
        let (key, place) = card.marks[&fence.0];
        if card.reached.get(&key).copied().unwrap_or(0) >= place {
            FenceState::Passed
        } else {
            FenceState::Pending
        }
    }

    fn hold(&self, _: &StreamKey, _: Fence) -> bool {
        false
    }

    fn recycle(&self, fence: Fence) {
        assert!(self.0.lock().unwrap().marks.remove(&fence.0).is_some());
    }
}

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
    events: Arc<Events>,
}

impl Bench {
    fn new(daemon: Option<&Daemon>, capacity: u64) -> Self {
        Self::with(daemon, capacity, "")
    }

    fn with(daemon: Option<&Daemon>, capacity: u64, settings: &str) -> Self {
        let rig = Rig::with(
            daemon,
            ebb_device::fake::Card::new(capacity),
            capacity,
            G,
            |config| config.pool = settings.into(),
        );
        let events = Arc::new(Events::default());
        rig.engine.set_fences(Arc::clone(&events) as Arc<dyn Fences>);
        Self { rig, events }
    }

    fn alloc(&self, size: u64, order: Order) -> Result<u64, AllocError> {
        let engine = &self.rig.engine;
        engine.framework_alloc(self.rig.device, size, &order, true, || Props([1, 2, 3, 4]))
    }

    fn on(&self, size: u64, handle: u64) -> u64 {
        self.alloc(size, Order::Stream(key(handle))).unwrap()
    }

    fn free(&self, at: u64, handle: u64) {
        self.free_as(at, Order::Stream(key(handle)));
    }

    fn free_as(&self, at: u64, order: Order) {
        let freed = self.rig.engine.framework_free(self.rig.device, at, &order);
        assert_eq!(freed, Some(Ok(())));
    }

    fn pool(&self) -> ebb_alloc::pool::Stats {
        self.rig
            .engine
            .framework_stats(self.rig.device)
            .unwrap()
            .front
            .pool
    }

    fn check(&self) {
        let one = self.rig.engine.core.frameworks.get(self.rig.device).unwrap();
        one.front.check().unwrap();
    }
}

/// Waits until the arena holds what may have to go there.
fn with_arena(bench: &Bench) {
    bench.rig.until("arena", |rig| {
        let sums = rig.engine.core.arena.sums();
        sums.total >= rig.books().allocated && sums.arriving == 0
    });
}

/// pytorch/pytorch#145168: a pool over an allocator of one's own never freed anything. A release needs no free: blocks that live leave the card and
/// come back with what they hold, also those that lie in several mappings of one memory, whichever mapping it is seen through.
#[test]
fn bug_079_stitched_blocks_leave_and_come_back() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::new(Some(&daemon), 512 * G);
    let rig = &bench.rig;
    let blocks: Vec<u64> = (0..5).map(|_| bench.on(3 * G, 1)).collect();
    for (seed, at) in (1..).zip(&blocks) {
        rig.fill(*at, 3 * G, seed);
    }
    bench.free(blocks[1], 1);
    bench.free(blocks[3], 1);
    let wide = bench.on(6 * G, 1);
    assert_eq!(bench.pool().reserved, 15 * G, "both holes, not more");
    rig.fill(wide, 6 * G, 9);
    with_arena(&bench);
    for round in 1..4 {
        let end = daemon.reclaim(u64::MAX);
        assert!(done(end), "{end:?}");
        assert_eq!((end.freed, rig.card.used()), (15 * G, 0));
        for at in [0, 2, 4] {
            assert!(
                rig.holds(blocks[at], 3 * G, u8::try_from(at + 1).unwrap()),
                "{round}"
            );
        }
        assert!(rig.holds(wide, 6 * G, 9), "round {round}");
        daemon.wait_restored(round);
    }
    bench.check();
    // Through its home now: what was written through the view is there.
    bench.free(wide, 1);
    let again = bench.on(3 * G, 1);
    assert!(again == blocks[1] || again == blocks[3]);
    rig.assert_gone_after_detach();
}

/// triton-inference-server/server#2659: memory that nobody used was held for ever. What nothing lives in goes without a copy, and before anything
/// that lives.
#[test]
fn bug_058_idle_memory_goes_first_and_without_a_copy() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::new(Some(&daemon), 512 * G);
    let rig = &bench.rig;
    let kept = bench.on(4 * G, 1);
    let gone = bench.on(8 * G, 1);
    rig.fill(kept, 4 * G, 1);
    bench.events.work(key(1));
    bench.events.run(key(1));
    bench.free(gone, 1);
    with_arena(&bench);
    let end = daemon.reclaim(8 * G);
    assert!(done(end), "{end:?}");
    assert_eq!((end.freed, end.copied, rig.card.used()), (8 * G, 0, 4 * G));
    assert!(!rig.state(|state| state.closed), "the program goes on");
    // Work that still runs keeps it there until the gate is closed.
    let gone = bench.on(8 * G, 1);
    bench.events.work(key(1));
    bench.free(gone, 1);
    let end = daemon.reclaim(8 * G);
    assert!(done(end), "{end:?}");
    assert_eq!((end.freed, end.copied), (8 * G, 0));
    assert!(rig.holds(kept, 4 * G, 1));
    rig.assert_gone_after_detach();
}

/// huggingface/candle#3197 and others: memory that is free again is offered before out of memory is said, whoever has it.
#[test]
fn an_allocation_gets_what_the_pool_keeps_and_the_limit_holds() {
    let daemon = Daemon::start(Script {
        limit: 32 * G,
        ..Script::default()
    });
    let bench = Bench::new(Some(&daemon), 512 * G);
    let rig = &bench.rig;
    let first = bench.on(20 * G, 1);
    let too_much = bench.alloc(13 * G, Order::Stream(key(1)));
    assert!(
        matches!(too_much, Err(AllocError::OverLimit { .. })),
        "{too_much:?}"
    );
    assert_eq!(rig.engine.framework_stats(rig.device).unwrap().refused, 1);
    bench.free(first, 1);
    // The program's own allocation takes what the pool keeps.
    let plain = rig.alloc(30 * G);
    assert_eq!(rig.books().used, 30 * G);
    rig.engine.free(plain).unwrap();
    // And the pool what the program's cache keeps.
    let again = bench.on(32 * G, 1);
    assert_eq!(rig.card.used(), 32 * G);
    bench.free(again, 1);
    assert_eq!(rig.engine.framework_trim(rig.device), 32 * G);
    assert_eq!((rig.card.used(), rig.books().allocated), (0, 0));
    rig.assert_gone_after_detach();
}

/// pytorch#192464 and rmm: what is freed on a stream is its own at once, and another's only when the work is done.
#[test]
fn blocks_change_streams_behind_their_work() {
    let bench = Bench::new(None, 256 * G);
    let (a, b) = (key(1), key(2));
    let at = bench.on(40 * G, 1);
    bench.events.work(a);
    bench.free(at, 1);
    assert_eq!(bench.on(40 * G, 1), at, "its own stream has it at once");
    bench.events.work(a);
    bench.free(at, 1);
    let other = bench.on(20 * G, 2);
    assert!(
        other >= at + 40 * G || other + 20 * G <= at,
        "another one has it not"
    );
    bench.events.run(a);
    bench.free(other, 2);
    bench.events.run(b);
    let other = bench.on(40 * G, 2);
    assert_eq!(bench.pool().reserved, 60 * G);
    // Used on a second stream: nobody's before that is past it.
    assert!(bench.rig.engine.framework_record(other, &a));
    assert!(
        !bench.rig.engine.framework_record(other + 512, &a),
        "no block begins there"
    );
    bench.events.work(a);
    bench.free(other, 2);
    let third = bench.on(24 * G, 2);
    assert!(third.abs_diff(other) >= 24 * G, "{third:#x} {other:#x}");
    bench.events.run(a);
    bench.free(third, 2);
    // The stream goes with work in it: a block of its follows that work.
    let last = bench.on(60 * G, 1);
    bench.events.work(a);
    bench.free(last, 1);
    bench.rig.engine.stream_goes(1);
    let before = bench.pool().reserved;
    let next = bench.on(8 * G, 1);
    assert!(
        next.abs_diff(last) >= 8 * G && bench.pool().reserved > before,
        "another stream with the same handle"
    );
    bench.events.run(a);
    let before = bench.pool().reserved;
    let all = bench.on(60 * G, 1);
    assert_eq!(bench.pool().reserved, before);
    bench.free(all, 1);
    bench.free(next, 1);
    bench.check();
    bench.rig.assert_gone_after_detach();
}

/// Nothing is waited for, recorded or asked while a stream is captured, and what a capture used is nobody else's before its graph is gone.
#[test]
fn a_capture_has_its_own_and_is_not_disturbed() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::new(Some(&daemon), 512 * G);
    let rig = &bench.rig;
    let props = || Props([1, 2, 3, 4]);
    let before = bench.on(4 * G, 1);
    bench.events.work(key(1));
    bench.free(before, 1);
    bench.events.0.lock().unwrap().captured = true;
    rig.engine.capture_begin();
    let private = rig.engine.framework_private(rig.device, props).unwrap();
    let order = Order::Private(private);
    let first = bench.alloc(4 * G, order).unwrap();
    let keeps = bench.alloc(2 * G, order).unwrap();
    bench.free_as(first, order);
    // In other pieces, which cuts the chunk: nothing of it runs yet.
    let part = bench.alloc(3 * G / 2, order).unwrap();
    bench.free_as(part, order);
    rig.engine.capture_end();
    bench.events.0.lock().unwrap().captured = false;
    rig.fill(keeps, 2 * G, 3);
    rig.fill(first, 4 * G, 4);
    bench.events.run(key(1));
    with_arena(&bench);
    for round in 1..3 {
        assert!(done(daemon.reclaim(u64::MAX)));
        assert!(
            rig.holds(keeps, 2 * G, 3) && rig.holds(first, 4 * G, 4),
            "a replay uses it all"
        );
        daemon.wait_restored(round);
    }
    assert_eq!(
        rig.engine.framework_trim(rig.device),
        0,
        "idle went with the eviction"
    );
    let reserved = bench.pool().reserved;
    let other = bench.on(4 * G, 1);
    assert_eq!(bench.pool().reserved, reserved + 4 * G);
    bench.free(other, 1);
    // Whoever frees what the graph left need not know of it.
    bench.free(keeps, 1);
    rig.engine.framework_private_over(rig.device, private);
    rig.engine.framework_private_over(rig.device, private);
    assert_eq!(rig.engine.framework_trim(rig.device), reserved + 4 * G);
    rig.assert_gone_after_detach();
}

#[test]
fn who_has_waited_need_not_say_for_what() {
    let bench = Bench::new(None, 64 * G);
    let at = bench.alloc(8 * G, Order::Waited).unwrap();
    bench.free_as(at, Order::Waited);
    assert_eq!(bench.on(8 * G, 5), at);
    bench.free_as(at, Order::Unknown);
    let unknown = bench.alloc(8 * G, Order::Unknown).unwrap();
    assert_ne!(unknown, at, "nobody knows what uses the first one");
    bench.free_as(unknown, Order::Unknown);
    assert_eq!(bench.rig.engine.framework_trim(bench.rig.device), 16 * G);
    assert_eq!(bench.rig.card.used(), 0);
    let freed = |at| {
        bench
            .rig
            .engine
            .framework_free(bench.rig.device, at, &Order::Waited)
    };
    assert_eq!(freed(at), Some(Err(FreeError::Invalid)), "once");
    assert_eq!(freed(64), None, "nobody's");
    bench.rig.assert_gone_after_detach();
}

/// Random blocks on two streams, an order of the daemon now and then, everything compared with a plain map.
#[test]
fn random_blocks_hold_what_was_written() {
    for seed in 0..6 {
        let daemon = Daemon::start(Script::default());
        let bench = Bench::with(Some(&daemon), 1024 * G, "granularity:512,chunk:256Ki");
        let rig = &bench.rig;
        let mut random = Pcg64Mcg::seed_from_u64(seed);
        let mut live: BTreeMap<u64, (u64, u8, u64)> = BTreeMap::new();
        let mut orders = 0;
        for step in 0..120u32 {
            let what = format!("seed {seed}, step {step}");
            let pick = random.next_u32();
            if pick % 3 == 0 && !live.is_empty() {
                let index = random.next_u32() as usize % live.len();
                let (&at, &(size, fill, handle)) = live.iter().nth(index).unwrap();
                assert!(rig.holds(at, size, fill), "{what}");
                live.remove(&at);
                bench.free(at, handle);
                if pick % 2 == 0 {
                    bench.events.run(key(handle));
                }
            } else {
                let handle = u64::from(pick % 2) + 1;
                let size = match pick % 5 {
                    0 => u64::from(random.next_u32() % 4096) + 1,
                    1 => G,
                    _ => u64::from(random.next_u32()) % (6 * G) + 1,
                };
                let at = bench.on(size, handle);
                let fill = u8::try_from(step).unwrap();
                rig.fill(at, size, fill);
                live.insert(at, (size, fill, handle));
            }
            if step % 20 == 19 {
                with_arena(&bench);
                let end = daemon.reclaim(u64::from(random.next_u32()) % (64 * G) + G);
                assert!(done(end), "{what}: {end:?}");
                orders += 1;
            }
        }
        for (at, (size, fill, _)) in &live {
            assert!(rig.holds(*at, *size, *fill), "seed {seed}, order {orders}");
        }
        bench.check();
        rig.assert_gone_after_detach();
    }
}

/// ovg-project/kvcached#364: an allocation of several steps that failed half way kept what it had taken. Every call of a piece of work
/// fails once, each in turn; afterwards it all is as it should be.
#[test]
fn bug_043_no_failing_call_loses_a_block() {
    for k in 1..200 {
        let what = format!("call {k}");
        let daemon = Daemon::start(Script::default());
        let bench = Bench::with(Some(&daemon), 512 * G, "chunk:128Ki");
        let rig = &bench.rig;
        let kept = bench.on(3 * G, 1);
        rig.fill(kept, 3 * G, 1);
        rig.fake.fail_kth(k, ERROR);
        let mut live: Vec<u64> = Vec::new();
        for size in [4 * G, 2 * G, 6 * G, G / 2, 9 * G] {
            live.extend(bench.alloc(size, Order::Stream(key(1))).ok());
            if live.len() > 2 {
                bench.free(live.remove(0), 1);
            }
        }
        rig.engine.framework_trim(rig.device);
        let reached = !rig.fake.fault_pending();
        rig.fake.heal();
        bench.check();
        for at in live {
            bench.free(at, 1);
        }
        let after = bench.on(12 * G, 1);
        rig.fill(after, 12 * G, 2);
        with_arena(&bench);
        assert!(done(daemon.reclaim(u64::MAX)), "{what}");
        assert!(rig.holds(after, 12 * G, 2) && rig.holds(kept, 3 * G, 1), "{what}");
        bench.free(after, 1);
        bench.free(kept, 1);
        rig.engine.framework_trim(rig.device);
        assert_eq!(rig.books().allocated, 0, "{what}");
        rig.assert_gone_after_detach();
        if !reached {
            assert!(k > 20, "{what}: there are more calls than that");
            return;
        }
    }
    panic!("it never ends");
}

#[test]
fn a_call_that_always_fails_is_an_error_of_the_allocation_alone() {
    for call in [Call::CreateAs, Call::MapAs, Call::GrantAs, Call::Reserve] {
        let bench = Bench::new(None, 64 * G);
        bench.rig.fake.fail_always(call, ERROR);
        let failed = bench.alloc(4 * G, Order::Stream(key(1)));
        assert!(
            matches!(failed, Err(AllocError::Device(_))),
            "{call:?}: {failed:?}"
        );
        bench.rig.fake.heal();
        let at = bench.on(4 * G, 1);
        bench.rig.fill(at, 4 * G, 1);
        assert!(bench.rig.holds(at, 4 * G, 1));
        bench.check();
        bench.rig.assert_gone_after_detach();
    }
}

/// What is wrong in the settings is said, and changes nothing.
#[test]
fn settings_that_are_no_settings_are_named_in_the_report() {
    let bench = Bench::with(None, 64 * G, "granularity:1024,colour:red");
    let at = bench.on(512, 1);
    assert_eq!(bench.pool().allocated, 512, "the default");
    let report = bench.rig.engine.report_json();
    assert!(
        report.contains("EBB_POOL is not used") && report.contains("colour"),
        "{report}"
    );
    bench.free(at, 1);
    let bench = Bench::with(None, 64 * G, "granularity:1024");
    bench.on(512, 1);
    assert_eq!(bench.pool().allocated, 1024);
    bench.rig.assert_gone_after_detach();
}

/// Threads that allocate, write, look and free while the daemon takes everything back, again and again.
#[test]
fn threads_and_evictions() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::new(Some(&daemon), 2048 * G);
    let first = bench.on(G, 1);
    std::thread::scope(|scope| {
        for thread in 1..4u64 {
            let bench = &bench;
            scope.spawn(move || {
                for round in 0..40u64 {
                    let size = (thread * round % 5 + 1) * G / 2;
                    let at = bench.on(size, thread);
                    let seed = u8::try_from(thread * 64 + round).unwrap();
                    bench.rig.fill(at, size, seed);
                    assert!(bench.rig.holds(at, size, seed), "thread {thread}, round {round}");
                    bench.free(at, thread);
                }
            });
        }
        for _ in 0..10 {
            daemon.reclaim(u64::MAX);
        }
    });
    bench.free(first, 1);
    bench.check();
    let stats = bench.rig.engine.framework_stats(bench.rig.device).unwrap();
    assert_eq!((stats.front.allocated, stats.front.requested), (0, 0));
    bench.rig.assert_gone_after_detach();
}

/// The books that `ebb ps` shows: what a pool has of the card is charged to the program.
#[test]
fn what_a_pool_has_is_charged() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::new(Some(&daemon), 512 * G);
    let at = bench.on(5 * G, 1);
    assert_eq!(bench.rig.engine.own_charge(bench.rig.device), Some(Bytes(5 * G)));
    assert_eq!(
        bench.rig.engine.framework_block(at),
        Some((bench.rig.device, 5 * G))
    );
    assert_eq!(bench.rig.engine.framework_block(at + 1), None);
    bench.free(at, 1);
    let one = bench.rig.engine.core.frameworks.get(bench.rig.device).unwrap();
    let segments = one.front.segments();
    assert_eq!(segments.iter().map(|segment| segment.len).sum::<u64>(), 5 * G);
    let snapshot = bench.rig.engine.framework_snapshot(bench.rig.device, 0).unwrap();
    assert!(snapshot.windows(8).any(|at| at == b"segments"));
    drop(one);
    bench.rig.engine.framework_trim(bench.rig.device);
    assert_eq!(bench.rig.engine.own_charge(bench.rig.device), Some(Bytes::ZERO));
    bench.rig.assert_gone_after_detach();
}

/// The daemon hears of what the pool has not needed for a while as of what is cached, and a trim brings it, and the lease, without a copy.
#[test]
fn a_trim_gives_back_what_nothing_lives_in() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::new(Some(&daemon), 512 * G);
    let rig = &bench.rig;
    let kept = bench.on(4 * G, 1);
    rig.fill(kept, 4 * G, 1);
    let gone = bench.on(9 * G, 1);
    // A plain allocation's cache as well. Each would have taken what the other keeps before it asks the daemon.
    let plain = rig.alloc(32 * G);
    rig.engine.free(plain).unwrap();
    bench.free(gone, 1);
    let one = rig.engine.core.frameworks.get(rig.device).unwrap();
    one.front.flush(0);
    assert_eq!(
        spare(&rig.engine.core, rig.device, 0).0,
        0,
        "it may be needed again in a moment"
    );
    one.front.tick();
    one.front.tick();
    assert_eq!(spare(&rig.engine.core, rig.device, 0).0, 9 * G);
    rig.engine.core.link.poke();
    daemon.wait_usage(|usage| {
        matches!(usage, ToDaemon::Usage { cached, allocated, .. } if *cached == Bytes(41 * G) && *allocated == Bytes(4 * G))
    });
    let trim = |query| {
        daemon.send(ToLayer::Trim { device: 0, query });
        daemon.expect("the answer", |message| match message {
            ToDaemon::Trimmed { query: of, bytes, .. } if *of == query => Some(*bytes),
            _ => None,
        })
    };
    assert_eq!(trim(7), Bytes(41 * G));
    assert_eq!((rig.card.used(), daemon.lease()), (4 * G, 4 * G));
    assert!(
        !rig.state(|state| state.closed) && rig.holds(kept, 4 * G, 1),
        "nothing that lives was touched"
    );
    assert_eq!(trim(8), Bytes::ZERO);
    // What is away stays away, and work that runs keeps its bytes.
    let busy = bench.on(5 * G, 1);
    bench.events.work(key(1));
    bench.free(busy, 1);
    assert_eq!(trim(9), Bytes::ZERO);
    bench.events.run(key(1));
    assert_eq!(trim(10), Bytes(5 * G));
    with_arena(&bench);
    assert!(done(daemon.reclaim(u64::MAX)));
    assert_eq!(trim(11), Bytes::ZERO);
    assert_eq!(daemon.restored(), 0);
    assert!(rig.holds(kept, 4 * G, 1));
    drop(one);
    rig.assert_gone_after_detach();
}

/// ai-dynamo/snapshot PR#78: records of what was freed were kept for ever. Streams that come and go, blocks that several use, private pools: none
/// leaves a record.
#[test]
fn bug_118_history_leaves_no_records() {
    let bench = Bench::new(None, 64 * G);
    let rig = &bench.rig;
    let one = || rig.engine.core.frameworks.get(rig.device).unwrap();
    for round in 0..400u64 {
        let handle = round + 10;
        let at = bench.on(G, handle);
        rig.engine.framework_record(at, &key(handle + 1000));
        bench.events.work(key(handle));
        bench.free(at, handle);
        if round % 50 == 0 {
            let private = rig.engine.framework_private(rig.device, Props::default).unwrap();
            let at = bench.alloc(G, Order::Private(private)).unwrap();
            bench.free_as(at, Order::Private(private));
            rig.engine.framework_private_over(rig.device, private);
        }
        bench.events.run(key(handle));
        rig.engine.stream_goes(handle);
        rig.engine.stream_goes(handle + 1000);
        assert!(
            one().streams().len() < 2 * MANY,
            "round {round}: {} streams",
            one().streams().len()
        );
    }
    rig.engine.framework_trim(rig.device);
    assert!(one().streams().len() <= 3, "{} streams", one().streams().len());
    assert_eq!(one().marked.load(Ordering::Relaxed), 0);
    assert_eq!(bench.events.0.lock().unwrap().marks.len(), 0, "no event is kept");
    assert_eq!((bench.pool().reserved, rig.card.used()), (0, 0));
    let records = bench.pool().records;
    assert!(records < 64 << 10, "{records} bytes of records for nothing");
    rig.assert_gone_after_detach();
}

/// The last context goes while everything is away: nothing is brought back for that, and nothing stays.
#[test]
fn a_device_goes_while_its_memory_is_away() {
    let daemon = Daemon::start(Script::default());
    let bench = Bench::new(Some(&daemon), 512 * G);
    let rig = &bench.rig;
    let blocks: Vec<u64> = (0..4).map(|_| bench.on(5 * G, 1)).collect();
    for at in &blocks {
        rig.fill(*at, 5 * G, 1);
    }
    bench.free(blocks[0], 1);
    bench.free(blocks[2], 1);
    let wide = bench.on(10 * G, 1);
    rig.fill(wide, 10 * G, 2);
    with_arena(&bench);
    assert!(done(daemon.reclaim(u64::MAX)));
    rig.assert_gone_after_detach();
    assert_eq!(daemon.restored(), 0);
    assert_eq!(rig.engine.framework_stats(rig.device), None);
}
