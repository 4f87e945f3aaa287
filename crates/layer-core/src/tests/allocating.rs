//! Allocating, freeing, limits, waiting.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_device::fake::{Call, Card};
use ebb_device::{DeviceError, DeviceMemory};
use ebb_protocol::wire::{ask_kind, deny};
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::Bytes;

use crate::device::Mode;
use crate::testing::{Daemon, G, LONG, Rig, Script, done};
use crate::{AllocError, ExternalKind, FreeError, MemInfo};

/// HAMi-core#257: a pointer that is not ours goes to the driver, and the books stay as they are.
#[test]
fn bug_019_a_foreign_pointer_is_passed_on_and_changes_nothing() {
    let rig = Rig::new(None, 256 * G);
    let ptr = rig.alloc(20 * G);
    let small = rig.alloc(100);
    let before = rig.books();
    for foreign in [1, 0x1000, u64::MAX, ptr.wrapping_sub(1 << 40)] {
        assert_eq!(rig.engine.free(foreign), Err(FreeError::Bypass));
        assert_eq!(rig.engine.lookup(foreign), None);
        assert!(!rig.engine.contains(foreign));
    }
    for inner in [ptr + 1, ptr + G, ptr + 20 * G - 1, small + 1, small + 512] {
        assert_eq!(rig.engine.free(inner), Err(FreeError::Invalid), "{inner:#x}");
    }
    let after = rig.books();
    assert_eq!((after.used, after.allocated), (before.used, before.allocated));
    rig.engine.free(ptr).unwrap();
    assert_eq!(rig.engine.free(ptr), Err(FreeError::Invalid), "freed twice");
    rig.engine.free(small).unwrap();
    assert_eq!(rig.engine.free(small), Err(FreeError::Invalid));
    rig.assert_gone_after_detach();
}

#[test]
fn what_an_allocation_is_known_by() {
    let rig = Rig::new(None, 256 * G);
    let large = rig.engine.alloc(rig.device, 20 * G + 7, 11).unwrap();
    let small = rig.engine.alloc(rig.device, 700, 12).unwrap();
    let found = rig.engine.lookup(large + 20 * G + 6).unwrap();
    assert_eq!(
        (found.base, found.size, found.owner, found.device),
        (large, 20 * G + 7, 11, rig.device)
    );
    assert_eq!(
        rig.engine.lookup(large + 20 * G + 7),
        None,
        "the rest of the granule is nobody's"
    );
    let other = rig.engine.lookup(small + 699).unwrap();
    assert_eq!((other.base, other.size, other.owner), (small, 700, 12));
    assert_ne!(found.id, other.id);
    assert_eq!(rig.engine.lookup(small + 700), None);
    assert!(rig.engine.contains(small + 700));
    let second = rig.engine.alloc(rig.device, 1, 12).unwrap();
    assert_eq!(second - small, 1024, "small ones lie 512 bytes apart");
    assert_eq!(rig.engine.free_owner(rig.device, 12), 2);
    assert!(rig.engine.lookup(small).is_none() && rig.engine.lookup(large).is_some());
    assert_eq!(rig.engine.free_owner(rig.device, 11), 1);
    rig.assert_gone_after_detach();
}

#[test]
fn no_size_is_no_allocation() {
    let rig = Rig::new(None, 64 * G);
    for (size, wanted) in [
        (0, AllocError::Size(Bytes(0))),
        (u64::MAX, AllocError::NeverFits(Bytes(u64::MAX))),
    ] {
        assert_eq!(rig.engine.alloc(rig.device, size, 0), Err(wanted));
    }
    assert_eq!(
        rig.engine.alloc(7, G, 1),
        Err(AllocError::Bypass),
        "no such device"
    );
    assert!(rig.engine.alloc(rig.device, 1 << 62, 1).is_err());
    rig.assert_gone_after_detach();
}

/// torch_memory_saver PR#82: sizes that are no multiple of the granularity, for several granularities, through the whole
/// life of an allocation.
#[test]
fn bug_113_any_size_through_release_restore_and_free() {
    for granule in [4 << 10, 64 << 10, 2 << 20, 8 << 20] {
        let daemon = Daemon::start(Script {
            segment: 4 * granule.max(2 << 20),
            ..Script::default()
        });
        let card = Card::new(24 * granule.max(2 << 20));
        let rig = Rig::with(Some(&daemon), card, 24 * granule.max(2 << 20), granule, |_| {});
        let sizes = [1, 128, 6912, (2 << 20) - 1, 2 << 20, (2 << 20) + 1];
        let all: Vec<_> = sizes
            .iter()
            .zip(1u8..)
            .map(|(size, seed)| (rig.alloc(*size), *size, seed))
            .collect();
        for (ptr, size, seed) in &all {
            rig.fill(*ptr, *size, *seed);
            assert_eq!(rig.engine.lookup(*ptr).unwrap().size, *size);
        }
        assert_eq!(rig.card.used() % granule, 0);
        let end = daemon.reclaim(u64::MAX);
        assert!(done(end) && rig.card.used() == 0, "granule {granule}: {end:?}");
        for (ptr, size, seed) in &all {
            assert!(rig.holds(*ptr, *size, *seed), "{size} bytes, granule {granule}");
            rig.engine.free(*ptr).unwrap();
        }
        rig.assert_gone_after_detach();
    }
}

/// snapshot PR#78: the cost of a call does not grow with history. What could grow is counted.
#[test]
fn bug_118_nothing_is_kept_of_what_was_freed() {
    let rig = Rig::with(None, Card::new(256 * G), 256 * G, G, |config| {
        config.cache_max = Bytes::ZERO;
    });
    let ranges = rig.state(|state| state.pool.ranges().len());
    for n in 0..20_000u64 {
        let size = if n % 10 == 0 {
            (16 + n % 32) * G
        } else {
            1 + n % 5000
        };
        let ptr = rig.alloc(size);
        rig.engine.free(ptr).unwrap();
    }
    let books = rig.books();
    assert_eq!((books.used, books.allocated, books.cached), (0, 0, 0));
    rig.state(|state| {
        assert_eq!(state.pool.spans(), 0);
        assert_eq!(state.pool.live_count(), 0);
        assert_eq!(state.pool.ranges().len(), ranges);
    });
    rig.assert_gone_after_detach();
}

#[test]
fn a_freed_span_is_used_again_without_a_driver_call() {
    let rig = Rig::new(None, 256 * G);
    let first = rig.alloc(32 * G);
    rig.engine.free(first).unwrap();
    let calls = rig.fake.total_calls();
    let second = rig.alloc(32 * G);
    assert_eq!(second, first);
    rig.engine.free(second).unwrap();
    // The head of a longer span, cut at a chunk border.
    let part = rig.alloc(16 * G);
    assert_eq!((part, rig.fake.total_calls()), (first, calls));
    assert_eq!(rig.books().cached, 16 * G);
    rig.fill(part, 16 * G, 1);
    let rest = rig.alloc(16 * G);
    assert_eq!((rest, rig.fake.total_calls()), (first + 16 * G, calls));
    rig.fill(rest, 16 * G, 2);
    assert!(rig.holds(part, 16 * G, 1));
    rig.engine.free(part).unwrap();
    rig.engine.free(rest).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn the_cache_is_bounded_and_gives_way() {
    let rig = Rig::with(None, Card::new(64 * G), 64 * G, G, |config| {
        config.cache_max = Bytes(40 * G);
    });
    let all = [20, 20, 24].map(|n| rig.alloc(n * G));
    for ptr in all {
        rig.engine.free(ptr).unwrap();
    }
    assert_eq!((rig.books().cached, rig.card.used()), (40 * G, 40 * G));
    let large = rig.alloc(60 * G);
    assert_eq!(
        rig.card.used(),
        60 * G,
        "what was kept gave way to what is wanted"
    );
    rig.engine.free(large).unwrap();
    rig.assert_gone_after_detach();
}

/// The limit is exact: the last granule under it succeeds, the next fails; cached and overhead bytes are not in the way.
#[test]
fn the_last_granule_under_the_limit_succeeds_and_the_next_fails() {
    let daemon = Daemon::start(Script {
        limit: 100 * G,
        ..Script::default()
    });
    let rig = Rig::new(Some(&daemon), 256 * G);
    rig.engine.set_overhead(rig.device, Bytes(10 * G));
    let cached = rig.alloc(50 * G);
    rig.engine.free(cached).unwrap();
    assert_eq!(
        rig.engine.mem_info(rig.device),
        MemInfo::Own {
            total: Bytes(100 * G),
            free: Bytes(90 * G)
        },
        "what is cached counts as free"
    );
    let most = rig.alloc(73 * G);
    let over = AllocError::OverLimit {
        asked: Bytes(18 * G),
        charged: Bytes(83 * G),
        limit: Bytes(100 * G),
    };
    assert_eq!(rig.engine.alloc(rig.device, 18 * G, 1), Err(over));
    let last = rig.alloc(17 * G);
    assert_eq!(
        rig.engine.mem_info(rig.device),
        MemInfo::Own {
            total: Bytes(100 * G),
            free: Bytes::ZERO
        }
    );
    assert!(matches!(
        rig.engine.alloc(rig.device, 1, 1),
        Err(AllocError::OverLimit { .. })
    ));
    assert!(rig.card.used() <= 90 * G);
    // The limit goes down below what is there: nothing more, and free memory is none, not a huge number.
    daemon.send(ToLayer::Limit {
        device: 0,
        limit: Bytes(60 * G),
        charged_elsewhere: Bytes(5 * G),
    });
    rig.until("the new limit", |rig| {
        rig.engine.limit(rig.device) == Some(Bytes(60 * G))
    });
    assert_eq!(
        rig.engine.mem_info(rig.device),
        MemInfo::Own {
            total: Bytes(60 * G),
            free: Bytes::ZERO
        }
    );
    rig.engine.free(most).unwrap();
    rig.engine.free(last).unwrap();
    rig.assert_gone_after_detach();
}

/// numba#1531: a program whose frees are deferred until an allocation fails gets its out-of-memory first, after a short
/// wait; the try after that waits.
#[test]
fn bug_038_who_retries_hears_early_once_and_then_waits() {
    let daemon = Daemon::start(Script {
        capacity: 40 * G,
        ..Script::default()
    });
    let rig = Rig::with(Some(&daemon), Card::new(256 * G), 256 * G, G, |config| {
        config.program_retries = || true;
        config.cache_max = Bytes::ZERO;
    });
    let deferred = rig.alloc(30 * G);
    daemon.expect_ask(ask_kind::ALLOC);
    let wanted = rig.engine.alloc(rig.device, 20 * G, 1);
    assert_eq!(wanted, Err(AllocError::TimedOut(Bytes(20 * G))));
    let (ask, bytes, long) = daemon.expect_ask(ask_kind::ALLOC);
    assert_eq!((bytes, long), (20 * G, false));
    daemon.expect("the ask to be taken back", |message| match message {
        ToDaemon::CancelAsk { ask: taken, .. } if *taken == ask => Some(()),
        _ => None,
    });
    // Its flush frees half of it; the lease of that is not enough, so the retry waits.
    let rig = Arc::new(rig);
    let retry = std::thread::spawn({
        let rig = rig.clone();
        move || rig.alloc(20 * G)
    });
    let (_, _, long) = daemon.expect_ask(ask_kind::ALLOC);
    assert!(long, "the retry waits as long as policy allows");
    rig.engine.free(deferred).unwrap();
    let ptr = retry.join().unwrap();
    rig.engine.free(ptr).unwrap();
    let rig = Arc::into_inner(rig).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn who_does_not_retry_waits_from_the_start() {
    let daemon = Daemon::start(Script {
        grant_allocs: false,
        ..Script::default()
    });
    let rig = Arc::new(Rig::new(Some(&daemon), 256 * G));
    let waits = std::thread::spawn({
        let rig = rig.clone();
        move || rig.engine.alloc(rig.device, 20 * G, 1)
    });
    let (ask, bytes, long) = daemon.expect_ask(ask_kind::ALLOC);
    assert_eq!((bytes, long), (20 * G, true));
    daemon.grant(ask, bytes);
    let ptr = waits.join().unwrap().unwrap();
    rig.engine.free(ptr).unwrap();
}

#[test]
fn denials_have_their_answers() {
    let daemon = Daemon::start(Script {
        grant_allocs: false,
        ..Script::default()
    });
    let rig = Arc::new(Rig::new(Some(&daemon), 256 * G));
    let size = Bytes(20 * G);
    for (reason, last, answer) in [
        (deny::NEVER_FITS, true, AllocError::NeverFits(size)),
        (deny::TIMED_OUT, false, AllocError::TimedOut(size)),
        (
            deny::OVER_LIMIT,
            true,
            AllocError::OverLimit {
                asked: size,
                charged: Bytes::ZERO,
                limit: Bytes::MAX,
            },
        ),
        (77, false, AllocError::TimedOut(size)),
    ] {
        let waits = std::thread::spawn({
            let rig = rig.clone();
            move || rig.engine.alloc(rig.device, size.get(), 1)
        });
        let (ask, ..) = daemon.expect_ask(ask_kind::ALLOC);
        daemon.send(ToLayer::Deny {
            device: 0,
            ask,
            reason,
            last,
        });
        assert_eq!(waits.join().unwrap(), Err(answer), "reason {reason}");
    }
    assert!(rig.state(|state| state.asks.is_empty()));
}

/// The card is full although there is lease (somebody is not dead yet): another try succeeds in time, or the driver's
/// answer is given after it.
#[test]
fn a_full_card_with_lease_is_tried_again_and_then_an_answer() {
    let daemon = Daemon::start(Script {
        alloc_wait: LONG,
        ..Script::default()
    });
    let rig = Arc::new(Rig::new(Some(&daemon), 64 * G));
    assert!(rig.card.take(60 * G));
    let waits = std::thread::spawn({
        let rig = rig.clone();
        move || rig.engine.alloc(rig.device, 20 * G, 1)
    });
    let before = rig.fake.calls(Call::Create);
    rig.until("a second try", |rig| rig.fake.calls(Call::Create) > before + 3);
    assert!(!waits.is_finished());
    rig.card.give(60 * G);
    let ptr = waits.join().unwrap().unwrap();
    rig.engine.free(ptr).unwrap();
    drop(rig);

    let daemon = Daemon::start(Script {
        alloc_wait: Duration::from_millis(20),
        ..Script::default()
    });
    let rig = Rig::with(Some(&daemon), Card::new(64 * G), 64 * G, G, |config| {
        config.full_wait = Duration::from_millis(50);
    });
    assert!(rig.card.take(60 * G));
    assert_eq!(
        rig.engine.alloc(rig.device, 20 * G, 1),
        Err(AllocError::Device(DeviceError::OutOfMemory))
    );
    rig.card.give(60 * G);
    rig.assert_gone_after_detach();
}

/// The ledger had promised more than the card has, and takes the lease back from who cannot use it: what waits then waits for lease, in turn.
/// When it has it again, a full card is as new as the first time.
#[test]
fn a_full_card_is_waited_for_anew_after_the_lease_was_taken_back() {
    let daemon = Daemon::start(Script {
        grant_allocs: false,
        alloc_wait: Duration::from_millis(1),
        alloc_wait_max: LONG,
        ..Script::default()
    });
    let rig = Rig::with(Some(&daemon), Card::new(64 * G), 64 * G, G, |config| {
        // That the time begins anew is tested where it is counted; here that there is a second time at all.
        config.full_wait = LONG;
    });
    let rig = Arc::new(rig);
    assert!(rig.card.take(60 * G));
    let waits = std::thread::spawn({
        let rig = rig.clone();
        move || rig.engine.alloc(rig.device, 20 * G, 1)
    });
    let tries = |n| {
        let before = rig.fake.calls(Call::Create);
        rig.until("more tries", |rig| rig.fake.calls(Call::Create) > before + n);
    };
    let (ask, bytes, _) = daemon.expect_ask(ask_kind::ALLOC);
    daemon.grant(ask, bytes);
    tries(0);
    assert!(done(daemon.reclaim(bytes)));
    let (ask, bytes, _) = daemon.expect_ask(ask_kind::ALLOC);
    daemon.grant(ask, bytes);
    tries(1);
    rig.card.give(60 * G);
    let ptr = waits.join().unwrap().unwrap();
    rig.engine.free(ptr).unwrap();
}

/// A daemon that was there a moment ago may be slow, or be started again: neighbours that it told to make room do so
/// meanwhile, and a full card is no final answer. Once it is gone for long, it is.
#[test]
fn a_full_card_is_tried_again_while_the_daemon_was_there_a_moment_ago() {
    let daemon = Daemon::start(Script::default());
    let rig = Arc::new(Rig::new(Some(&daemon), 64 * G));
    assert!(rig.card.take(60 * G));
    drop(daemon);
    rig.until("the loss", |rig| rig.state(|state| state.mode == Mode::Alone));
    let waits = std::thread::spawn({
        let rig = rig.clone();
        move || rig.engine.alloc(rig.device, 20 * G, 1)
    });
    let before = rig.fake.calls(Call::Create);
    rig.until("a second try", |rig| rig.fake.calls(Call::Create) > before + 3);
    rig.card.give(60 * G);
    let ptr = waits.join().unwrap().unwrap();
    rig.engine.free(ptr).unwrap();
    drop(rig);

    let daemon = Daemon::start(Script::default());
    let rig = Rig::with(Some(&daemon), Card::new(64 * G), 64 * G, G, |config| {
        config.full_wait = Duration::from_millis(50);
    });
    assert!(rig.card.take(60 * G));
    drop(daemon);
    rig.until("the loss", |rig| rig.state(|state| state.mode == Mode::Alone));
    assert_eq!(
        rig.engine.alloc(rig.device, 20 * G, 1),
        Err(AllocError::Device(DeviceError::OutOfMemory))
    );
    rig.card.give(60 * G);
    rig.assert_gone_after_detach();
}

/// Without a daemon it is as without ebb: the driver decides, at once.
#[test]
fn alone_the_driver_decides() {
    let rig = Rig::new(None, 64 * G);
    assert_eq!(
        rig.engine.mem_info(rig.device),
        MemInfo::Driver { cached: Bytes::ZERO }
    );
    assert_eq!(rig.engine.limit(rig.device), None);
    let a = rig.alloc(60 * G);
    assert_eq!(
        rig.engine.alloc(rig.device, 16 * G, 1),
        Err(AllocError::Device(DeviceError::OutOfMemory))
    );
    rig.engine.free(a).unwrap();
    assert_eq!(
        rig.engine.mem_info(rig.device),
        MemInfo::Driver {
            cached: Bytes(60 * G)
        }
    );
    rig.assert_gone_after_detach();
}

#[test]
fn memory_that_passes_us_by_is_counted_named_and_limited() {
    let daemon = Daemon::start(Script {
        limit: 100 * G,
        ..Script::default()
    });
    let rig = Rig::new(Some(&daemon), 256 * G);
    let reserve = |kind, n| rig.engine.external_reserve(rig.device, kind, Bytes(n * G));
    reserve(ExternalKind::Other, 40).unwrap();
    reserve(ExternalKind::Managed, 20).unwrap();
    reserve(ExternalKind::Ipc, 500).unwrap();
    reserve(ExternalKind::Module, 5).unwrap();
    assert_eq!(daemon.lease(), 40 * G, "what is on the card needs lease");
    assert!(matches!(
        reserve(ExternalKind::AsyncPool, 36),
        Err(AllocError::OverLimit { .. })
    ));
    assert!(reserve(ExternalKind::Managed, 36).is_err());
    assert!(rig.engine.alloc(rig.device, 36 * G, 1).is_err());
    let ptr = rig.alloc(35 * G);
    rig.fill(ptr, 35 * G, 1);
    // Evicting takes what can be taken, and says that the rest cannot.
    let end = daemon.reclaim(u64::MAX);
    assert_eq!(
        (end.outcome, end.freed),
        (ebb_protocol::wire::outcome::NOTHING_LEFT, 35 * G)
    );
    assert!(rig.holds(ptr, 35 * G, 1));
    let report = rig.engine.report_json();
    assert!(
        report.contains(&format!("{{\"reason\":\"other\",\"bytes\":{}}}", 40 * G)),
        "{report}"
    );
    daemon.wait_usage(|message| {
        matches!(message, ToDaemon::Usage { pinned, overhead, .. }
            if pinned.get() == 40 * G && overhead.get() == 5 * G)
    });
    rig.engine
        .external_release(rig.device, ExternalKind::Other, Bytes::MAX);
    rig.engine
        .external_release(rig.device, ExternalKind::Managed, Bytes(20 * G));
    rig.engine
        .external_release(rig.device, ExternalKind::Module, Bytes(6 * G));
    let books = rig.books();
    assert_eq!((books.external, books.managed, books.overhead), (0, 0, 0));
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}

/// A hit in the pool is a few map operations: no message, no driver call, and none of its cost comes from history.
/// (No bound on time: the figure is measured on the real card.)
#[test]
fn a_hit_sends_nothing() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let ptr = rig.alloc(32 * G);
    rig.engine.free(ptr).unwrap();
    let calls = rig.fake.total_calls();
    let start = Instant::now();
    for _ in 0..10_000 {
        let ptr = rig.alloc(32 * G);
        rig.engine.free(ptr).unwrap();
    }
    println!("{:?} for an allocation and a free", start.elapsed() / 10_000);
    let asks = |message: &ToDaemon| matches!(message, ToDaemon::Ask { .. });
    assert!(
        rig.fake.total_calls() <= calls + 2,
        "but for segments that arrive"
    );
    daemon.expect_ask(ask_kind::ALLOC);
    assert!(!daemon.saw(asks), "one ask at the start, none later");
}

#[test]
fn several_threads_allocate_and_free_while_memory_comes_and_goes() {
    let daemon = Daemon::start(Script::default());
    let rig = Arc::new(Rig::new(Some(&daemon), 1024 * G));
    let threads: Vec<_> = (0..4u8)
        .map(|t| {
            let rig = rig.clone();
            std::thread::spawn(move || {
                for round in 0..30u64 {
                    let size = if round % 3 == 0 {
                        17 * G + round
                    } else {
                        900 + round
                    };
                    let ptr = rig.alloc(size);
                    rig.fill(ptr, size, t);
                    assert!(rig.holds(ptr, size, t), "thread {t}, round {round}");
                    rig.engine.free(ptr).unwrap();
                }
            })
        })
        .collect();
    let mut evictions = 0;
    while !threads.iter().all(std::thread::JoinHandle::is_finished) {
        daemon.reclaim(u64::MAX);
        evictions += 1;
    }
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(evictions > 0);
    let rig = Arc::into_inner(rig).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn a_device_may_come_again() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 64 * G);
    let ptr = rig.alloc(20 * G);
    rig.engine.detach_device(rig.device);
    assert_eq!(rig.engine.free(ptr), Err(FreeError::Bypass));
    assert_eq!(rig.engine.alloc(rig.device, G, 1), Err(AllocError::Bypass));
    daemon.expect("the end of the device", |message| {
        matches!(message, ToDaemon::Detach { .. }).then_some(())
    });
    let memory: Arc<dyn DeviceMemory> = rig.fake.clone();
    let again = rig
        .engine
        .attach_device(crate::testing::uuid(), memory, Bytes(64 * G), Bytes::ZERO)
        .unwrap();
    assert_eq!(again, rig.device, "the same number");
    let ptr = rig.alloc(20 * G);
    rig.fill(ptr, 20 * G, 1);
    assert!(done(daemon.reclaim(u64::MAX)));
    assert!(rig.holds(ptr, 20 * G, 1));
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn a_child_answers_without_a_lock() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 64 * G);
    let ptr = rig.alloc(20 * G);
    let device = rig.engine.core.device(rig.device).unwrap();
    // Not a real fork: its descriptors would be closed for the parent, too. The lock is held, as it may be in a child.
    let held = device.lock();
    rig.engine.core.become_child();
    assert_eq!(rig.engine.alloc(rig.device, G, 1), Err(AllocError::Bypass));
    assert_eq!(rig.engine.free(ptr), Err(FreeError::Bypass));
    assert_eq!(rig.engine.lookup(ptr), None);
    rig.engine.capture_begin();
    rig.engine.capture_end();
    rig.engine.note("nothing");
    rig.engine.shutdown();
    assert_eq!(rig.engine.report_json(), "{}");
    drop(held);
}

/// Handles of one granule each, hundreds of them one after the other, as communication libraries make them.
#[test]
fn many_small_allocations_in_a_row_ask_seldom() {
    const N: u64 = 64;
    let daemon = Daemon::start(Script::default());
    let rig = Rig::with(Some(&daemon), Card::new(256 * G), 256 * G, G, |config| {
        config.ahead_max = Bytes(16 * G);
        config.cache_max = Bytes::ZERO;
    });
    let asked = std::cell::Cell::new(0);
    let pointers: Vec<u64> = (0..N).map(|_| rig.alloc(G)).collect();
    daemon.saw(|message| {
        asked.set(asked.get() + u64::from(matches!(message, ToDaemon::Ask { .. })));
        false
    });
    // How many exactly depends on how quickly the answers come; each row brings at least twice what one asks for.
    assert!(
        asked.get() <= N * 3 / 4,
        "{} asks for {N} allocations",
        asked.get()
    );
    let books = rig.books();
    assert!(books.lease <= books.used + 16 * G, "{books:?}");
    // What was not needed goes first and without a copy.
    let end = daemon.reclaim(books.unused());
    assert!(done(end) && end.copied == 0, "{end:?}");
    for ptr in pointers {
        rig.engine.free(ptr).unwrap();
    }
    rig.assert_gone_after_detach();
}

/// What was asked for ahead took the rest of the limit while the next allocation asked for it, too: that one is served from it.
#[test]
fn lease_that_came_ahead_is_no_reason_to_refuse() {
    let daemon = Daemon::start(Script {
        grant_allocs: false,
        ..Script::default()
    });
    let rig = Arc::new(Rig::new(Some(&daemon), 256 * G));
    let allocates = std::thread::spawn({
        let rig = rig.clone();
        move || rig.alloc(4 * G)
    });
    let (ask, bytes, _) = daemon.expect_ask(ask_kind::ALLOC);
    // As an earlier ask of its own would be answered: before this one is refused.
    daemon.grant(u64::MAX, bytes);
    daemon.send(ToLayer::Deny {
        device: 0,
        ask,
        reason: deny::OVER_LIMIT,
        last: true,
    });
    let ptr = allocates.join().unwrap();
    rig.engine.free(ptr).unwrap();
    Arc::into_inner(rig).unwrap().assert_gone_after_detach();
}
