//! Driver calls that fail, one after another, at every step.

use std::time::Duration;

use ebb_device::fake::{Call, Card};
use ebb_device::{DeviceError, DeviceMemory};
use ebb_protocol::wire::outcome;

use crate::testing::{Daemon, G, LONG, Rig, Script, done};
use crate::{AllocError, TouchError};

const ERROR: DeviceError = DeviceError::Driver {
    code: 999,
    call: "ordered by the test",
};

/// Four allocations, of several chunks, of one, and small ones, with their own patterns.
struct Held {
    all: Vec<(u64, u64, u8)>,
}

impl Held {
    fn new(rig: &Rig) -> Self {
        let all: Vec<_> = [20 * G, 16 * G + 5, 600, 300]
            .iter()
            .zip(1u8..)
            .map(|(size, seed)| (rig.alloc(*size), *size, seed))
            .collect();
        for (ptr, size, seed) in &all {
            rig.fill(*ptr, *size, *seed);
        }
        Self { all }
    }

    fn assert_whole(&self, rig: &Rig, what: &str) {
        for (ptr, size, seed) in &self.all {
            assert!(rig.holds(*ptr, *size, *seed), "{what}: bytes of {size} are lost");
        }
    }

    fn free(self, rig: &Rig) {
        for (ptr, _, _) in self.all {
            rig.engine.free(ptr).unwrap();
        }
    }
}

/// A rig with memory, and arena that has arrived, so that the next calls are those of the test.
fn ready(daemon: &Daemon) -> (Rig, Held) {
    let rig = Rig::new(Some(daemon), 512 * G);
    let held = Held::new(&rig);
    rig.until("arena", |rig| {
        let sums = rig.engine.core.arena.sums();
        let want = rig
            .engine
            .core
            .device(rig.device)
            .unwrap()
            .lock()
            .pool
            .books
            .allocated;
        sums.total >= want && sums.arriving == 0
    });
    (rig, held)
}

/// After whatever failed: the program goes on with its bytes, a later eviction and restore work, nothing is left over.
fn goes_on(daemon: &Daemon, rig: &Rig, held: Held, what: &str) {
    held.assert_whole(rig, what);
    rig.fake.heal();
    let end = daemon.reclaim(u64::MAX);
    assert!(done(end), "{what}: a later eviction: {end:?}");
    assert_eq!(
        (rig.card.used(), daemon.lease()),
        (0, 0),
        "{what}: handles before = after"
    );
    held.assert_whole(rig, what);
    held.free(rig);
    rig.assert_gone_after_detach();
}

/// The k-th call of an eviction fails, for every k.
#[test]
fn an_eviction_survives_any_failing_call() {
    // What is unchanged cannot be told: then all is copied, and nothing fails.
    let mut harmless = 0;
    for k in 1.. {
        let daemon = Daemon::start(Script::default());
        let (rig, held) = ready(&daemon);
        rig.fake.fail_kth(k, ERROR);
        let end = daemon.reclaim(u64::MAX);
        let reached = !rig.fake.fault_pending();
        rig.fake.heal();
        if reached && rig.state(|state| state.unprinted) {
            harmless += 1;
            assert_eq!(end.outcome, outcome::DONE, "call {k}");
        } else {
            let expected = if reached { outcome::FAILED } else { outcome::DONE };
            assert_eq!(end.outcome, expected, "call {k}");
        }
        goes_on(&daemon, &rig, held, &format!("call {k} of an eviction"));
        if !reached {
            assert!(k > 20, "an eviction makes more calls than {k}");
            assert_eq!(harmless, 1, "fingerprints are asked for once");
            return;
        }
    }
}

/// NVIDIA/cuda-checkpoint#44, vllm PR#34600, torch_memory_saver PR#82: the k-th call of a restore fails, for every k, with
/// a full card or with another error. What is back stays, the gate stays closed until all is, nothing leaks.
#[test]
fn bug_083_restore_fails_midway_keeps_what_is_back_and_goes_on_later() {
    for error in [ERROR, DeviceError::OutOfMemory] {
        for k in 1.. {
            let daemon = Daemon::start(Script::default());
            let (rig, held) = ready(&daemon);
            assert!(done(daemon.reclaim(u64::MAX)));
            rig.fake.fail_kth(k, error);
            held.assert_whole(&rig, &format!("call {k} of a restore"));
            let reached = !rig.fake.fault_pending();
            goes_on(&daemon, &rig, held, &format!("call {k} of a restore, {error}"));
            if !reached {
                assert!(k > 20, "a restore makes more calls than {k}");
                break;
            }
        }
    }
}

/// Every call by its name, always failing for a while.
#[test]
fn a_call_that_always_fails_loses_nothing_and_heals() {
    for call in [
        Call::Create,
        Call::Release,
        Call::Map,
        Call::Unmap,
        Call::SetAccess,
        Call::CopyOut,
        Call::CopyIn,
        Call::Mark,
        Call::Wait,
        Call::Quiesce,
    ] {
        let daemon = Daemon::start(Script::default());
        let (rig, held) = ready(&daemon);
        rig.fake.fail_always(call, ERROR);
        let out = daemon.reclaim(u64::MAX);
        assert!(
            [outcome::FAILED, outcome::DONE].contains(&out.outcome),
            "{call:?}: {out:?}"
        );
        let rig = std::sync::Arc::new(rig);
        let toucher = std::thread::spawn({
            let rig = rig.clone();
            move || rig.touch(|_| ())
        });
        // Some tries of the restore fail, if that is what fails.
        let before = rig.fake.calls(call);
        if !toucher.is_finished() && rig.engine.core.gate.waiters() > 0 {
            rig.until("another try", |rig| {
                rig.fake.calls(call) > before || rig.engine.core.gate.waiters() == 0
            });
        }
        rig.fake.heal();
        toucher.join().unwrap().unwrap();
        let rig = std::sync::Arc::into_inner(rig).unwrap();
        goes_on(&daemon, &rig, held, call.name());
    }
}

/// HAMi-core#306, kvcached#364: a multi-step allocation fails half way, at every step: nothing is kept, the books are as
/// before, and the next one works.
#[test]
fn bug_020_bug_043_an_allocation_that_fails_half_way_keeps_nothing() {
    for k in 1.. {
        // Without arena, which the link's thread would register at any moment: that call may be the one that fails, and it is
        // none of the allocation's.
        let daemon = Daemon::start(Script {
            arena: 0,
            ..Script::default()
        });
        let rig = Rig::new(Some(&daemon), 512 * G);
        let kept = rig.alloc(17 * G);
        let before = (rig.fake.handles(), rig.fake.mapped(), rig.card.used());
        let books = rig.books();
        rig.fake.fail_kth(k, ERROR);
        let result = rig.engine.alloc(rig.device, 20 * G, 1);
        if rig.fake.fault_pending() {
            result.unwrap();
            assert!(k > 10, "an allocation makes more calls than {k}");
            return;
        }
        assert_eq!(result, Err(AllocError::Device(ERROR)), "call {k}");
        assert_eq!(
            (rig.fake.handles(), rig.fake.mapped(), rig.card.used()),
            before,
            "call {k}"
        );
        let after = rig.books();
        assert_eq!(
            (after.used, after.allocated, after.cached),
            (books.used, books.allocated, 0)
        );
        let again = rig.alloc(20 * G);
        rig.fill(again, 20 * G, 3);
        rig.engine.free(kept).unwrap();
        rig.engine.free(again).unwrap();
        rig.assert_gone_after_detach();
    }
}

/// The undoing fails, too: what the driver keeps stays in the books, and goes when it lets go.
#[test]
fn what_the_driver_will_not_take_back_stays_in_the_books() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 512 * G);
    rig.fake.fail_always(Call::SetAccess, ERROR);
    rig.fake.fail_nth(Call::Unmap, 1, ERROR);
    rig.fake.fail_nth(Call::Release, 1, ERROR);
    let asked = rig.engine.alloc(rig.device, 18 * G, 1);
    assert_eq!(asked, Err(AllocError::Device(ERROR)));
    rig.fake.heal();
    let books = rig.books();
    // One chunk that stayed mapped, one whose handle stayed.
    assert_eq!((books.stuck, books.used, books.allocated), (8 * G, 8 * G, 0));
    assert_eq!(rig.card.used(), 8 * G);
    // The next allocation does not stumble over it, a reclaim takes it.
    let ptr = rig.alloc(18 * G);
    rig.fill(ptr, 18 * G, 1);
    assert!(done(daemon.reclaim(u64::MAX)));
    assert_eq!((rig.books().stuck, rig.card.used()), (0, 0));
    assert!(rig.holds(ptr, 18 * G, 1));
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}

/// cuda-checkpoint#44: a restore that finds the card full leaves the memory released, and works when room comes.
#[test]
fn bug_082_a_restore_without_room_succeeds_when_there_is_some() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    let all = rig.card.used();
    assert!(done(daemon.reclaim(u64::MAX)));
    // A stranger takes the card, all but ten granules: two chunks.
    assert!(rig.card.take(512 * G - 10 * G));
    let rig = std::sync::Arc::new(rig);
    let toucher = std::thread::spawn({
        let rig = rig.clone();
        move || rig.touch(|_| ())
    });
    rig.until("some failed tries", |rig| {
        rig.state(|state| state.failing.is_some_and(|f| f.tries > 3))
    });
    assert!(!toucher.is_finished());
    assert!(rig.fake.mapped() <= 10 * G && rig.fake.mapped() > 0);
    rig.card.give(512 * G - 10 * G);
    toucher.join().unwrap().unwrap();
    assert_eq!(rig.card.used(), all);
    let rig = std::sync::Arc::into_inner(rig).unwrap();
    goes_on(&daemon, &rig, held, "a full card");
}

/// torch_memory_saver PR#87: out of memory in a restore ends neither the process nor the memory: the call that needs it
/// gets an error after the longest wait, and a later one works.
#[test]
fn bug_085_a_restore_that_finds_no_room_for_long_is_an_error_code() {
    let daemon = Daemon::start(Script {
        alloc_wait_max: Duration::from_millis(30),
        ..Script::default()
    });
    let (rig, held) = ready(&daemon);
    assert!(done(daemon.reclaim(u64::MAX)));
    assert!(rig.card.take(512 * G));
    for _ in 0..2 {
        assert_eq!(rig.touch(|_| ()), Err(TouchError::OutOfMemory));
        assert!(rig.state(|state| state.closed), "the gate stays closed");
    }
    assert!(
        matches!(rig.engine.alloc(rig.device, G, 1), Err(AllocError::TimedOut(_))),
        "so does an allocation"
    );
    rig.card.give(512 * G);
    goes_on(&daemon, &rig, held, "a full card");
}

/// vllm#45520: kernels in flight: memory goes only after they ended; if they do not end in time, nothing is taken.
#[test]
fn bug_067_running_work_is_waited_for_and_a_wait_has_a_bound() {
    let daemon = Daemon::start(Script {
        busy_wait: Duration::from_millis(30),
        ..Script::default()
    });
    let (rig, held) = ready(&daemon);
    rig.fake.begin_work();
    let end = daemon.reclaim(u64::MAX);
    assert_eq!((end.outcome, end.freed), (outcome::BUSY, 0));
    rig.touch(|_| ()).unwrap();
    assert_eq!(daemon.restored(), 0, "nothing had been taken");
    // And again, while the helper is still inside the driver.
    assert_eq!(daemon.reclaim(u64::MAX).outcome, outcome::BUSY);
    daemon.script(|script| script.busy_wait = LONG);
    daemon.disconnect();
    daemon.wait_connections(2);
    daemon.expect("the new attach", |m| {
        matches!(m, ebb_protocol::ToDaemon::Attach { .. }).then_some(())
    });
    rig.until("the attach to be answered", |rig| {
        rig.state(|state| state.slot.is_some())
    });
    let order = daemon.order(u64::MAX);
    rig.until("the wait for the work", |rig| {
        rig.state(|state| state.phase == crate::device::Phase::Closing)
    });
    assert!(rig.fake.mapped() > 0, "nothing is unmapped under running work");
    rig.fake.end_work();
    assert!(done(daemon.end_of(order)));
    assert_eq!(rig.fake.mapped(), 0);
    goes_on(&daemon, &rig, held, "running work");
}

/// TensorRT-LLM PR 11641: a kernel is in flight when only a part is taken: nothing of it is unmapped under the work.
#[test]
fn bug_070_no_part_is_taken_under_running_work_either() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    // What is cached goes without waiting for anybody.
    let spare = rig.state(|state| state.pool.books.cached + state.pool.books.unused());
    let mapped = rig.fake.mapped();
    rig.fake.begin_work();
    let order = daemon.order(spare + G);
    rig.until("the wait for the work", |rig| {
        rig.state(|state| state.phase == crate::device::Phase::Closing)
    });
    let left = rig.fake.mapped();
    assert!(
        left > 0 && left + spare >= mapped,
        "nothing in use is unmapped under running work"
    );
    rig.fake.end_work();
    assert!(done(daemon.end_of(order)));
    assert!(
        (1..left).contains(&rig.fake.mapped()),
        "a part went, and a part stays"
    );
    goes_on(&daemon, &rig, held, "running work");
}

/// kvcached#463: a thread has its pointers ready and launches after the memory went: the launch brings it back first.
#[test]
fn bug_068_a_launch_after_the_release_restores_first() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    let prepared = held.all[0];
    // A call that is inside already holds the eviction up, and finds its memory.
    let gate = rig.engine.gate();
    gate.enter().unwrap();
    let order = daemon.order(u64::MAX);
    rig.until("the gate to close", |rig| rig.state(|state| state.closed));
    let mut byte = [0];
    rig.fake.read(prepared.0, &mut byte).unwrap();
    gate.leave();
    assert!(done(daemon.end_of(order)));
    assert!(rig.fake.read(prepared.0, &mut byte).is_err(), "it is gone");
    assert!(rig.holds(prepared.0, prepared.1, prepared.2));
    goes_on(&daemon, &rig, held, "a late launch");
}

/// vllm#44395: only part of the memory is back: nobody gets in. All orders of release, grant and touch.
#[test]
fn bug_071_nobody_runs_on_memory_that_is_half_back() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    daemon.script(|script| script.grant_restores = false);
    assert!(done(daemon.reclaim(u64::MAX)));
    let rig = std::sync::Arc::new(rig);
    let toucher = std::thread::spawn({
        let rig = rig.clone();
        let (ptr, size, seed) = held.all[0];
        move || rig.holds(ptr, size, seed)
    });
    let (ask, bytes, _) = daemon.expect_ask(ebb_protocol::wire::ask_kind::RESTORE);
    // Half of it, and then one more eviction takes it away again.
    daemon.grant(ask, bytes / 2);
    rig.until("half of it", |rig| rig.card.used() > bytes / 4);
    assert!(!toucher.is_finished());
    let end = daemon.reclaim(u64::MAX);
    assert!(done(end), "{end:?}");
    assert_eq!((rig.card.used(), daemon.lease()), (0, 0));
    // The rest of the first ask, and what it lost since, in small steps.
    daemon.grant(ask, bytes - bytes / 2);
    let (more, rest, _) = daemon.expect_ask(ebb_protocol::wire::ask_kind::RESTORE);
    let mut left = rest;
    while left > 0 {
        assert!(!toucher.is_finished(), "{left} bytes are missing");
        let step = left.min(3 * G);
        daemon.grant(more, step);
        left -= step;
    }
    assert!(toucher.join().unwrap());
    daemon.wait_restored(1);
    daemon.script(|script| script.grant_restores = true);
    let rig = std::sync::Arc::into_inner(rig).unwrap();
    goes_on(&daemon, &rig, held, "half back");
}

/// kvcached#371: a mapping call that blocks: others go on, and nothing waits without a bound.
#[test]
fn bug_125_a_driver_call_that_hangs_holds_up_nobody_else() {
    let daemon = Daemon::start(Script {
        busy_wait: Duration::from_millis(30),
        ..Script::default()
    });
    let (rig, held) = ready(&daemon);
    let cached = rig.alloc(16 * G);
    rig.engine.free(cached).unwrap();
    // Lease enough, so that what is cached stays.
    daemon.grant(999, 64 * G);
    rig.until("the lease", |rig| rig.books().unused() >= 64 * G);
    let maps = rig.fake.calls(Call::Map);
    rig.fake.block(Call::Map);
    let rig = std::sync::Arc::new(rig);
    let hangs = std::thread::spawn({
        let rig = rig.clone();
        move || rig.alloc(30 * G)
    });
    rig.until("the call that hangs", |rig| rig.fake.calls(Call::Map) > maps);
    // Another allocation from the pool, a free, a query, an eviction that is refused in time.
    let other = rig.alloc(16 * G);
    rig.engine.free(other).unwrap();
    assert!(rig.engine.lookup(held.all[0].0).is_some());
    let end = daemon.reclaim(u64::MAX);
    assert_eq!(end.outcome, outcome::BUSY);
    held.assert_whole(&rig, "a call that hangs");
    rig.fake.heal();
    let late = hangs.join().unwrap();
    rig.engine.free(late).unwrap();
    let rig = std::sync::Arc::into_inner(rig).unwrap();
    held.free(&rig);
    rig.assert_gone_after_detach();
}

/// cuda-python#2345: a reservation fails: the fall-back asks for less, frees only what it was given, and keeps the first
/// error if nothing helps.
#[test]
fn bug_115_a_failed_reservation_frees_nothing_foreign_and_keeps_its_error() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::with(Some(&daemon), Card::new(512 * G), 8 * G, G, |_| {});
    let reserved = rig.fake.reserved();
    let all: Vec<u64> = (0..2).map(|_| rig.alloc(16 * G)).collect();
    assert!(rig.fake.reserved() > reserved, "another range was needed");
    rig.fake.fail_nth(Call::Reserve, 1, ERROR);
    let other = DeviceError::Driver {
        code: 1,
        call: "later",
    };
    rig.fake.fail_nth(Call::Reserve, 2, other);
    let result = rig.engine.alloc(rig.device, 20 * G, 1);
    // Nothing smaller than what is needed is tried, and the first error is the answer.
    assert_eq!(result, Err(AllocError::Device(ERROR)));
    rig.fake.heal();
    let more = rig.alloc(20 * G);
    assert_eq!(rig.fake.calls(Call::FreeReservation), 0);
    for ptr in all.into_iter().chain([more]) {
        rig.engine.free(ptr).unwrap();
    }
    rig.assert_gone_after_detach();
}

/// The context goes while memory is out: the gate opens, and the program gets the driver's own errors.
#[test]
fn a_device_that_is_gone_is_left_alone() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    assert!(done(daemon.reclaim(u64::MAX)));
    rig.fake.kill();
    rig.touch(|fake| assert_eq!(fake.quiesce(), Err(DeviceError::Gone)))
        .unwrap();
    assert_eq!(rig.engine.alloc(rig.device, G, 1), Err(AllocError::Bypass));
    for (ptr, _, _) in held.all {
        rig.engine.free(ptr).unwrap();
    }
    let end = daemon.reclaim(u64::MAX);
    assert_eq!(
        (end.copied, daemon.lease()),
        (0, 0),
        "lease that nothing uses goes back: {end:?}"
    );
}

/// Frees while evicted drop the host copy; when nothing is evicted any more the gate opens.
#[test]
fn frees_of_evicted_memory_need_no_restore() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    daemon.script(|script| script.grant_restores = false);
    assert!(done(daemon.reclaim(u64::MAX)));
    assert!(rig.engine.core.arena.sums().used > 0);
    held.free(&rig);
    assert_eq!(rig.engine.core.arena.sums().used, 0);
    rig.touch(|_| ()).unwrap();
    assert_eq!((rig.books().evicted, rig.books().allocated), (0, 0));
    rig.assert_gone_after_detach();
}

/// While somebody captures nothing is evicted, and the answer comes at once.
#[test]
fn a_capture_is_never_broken() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    rig.engine.capture_begin();
    let before = rig.fake.calls(Call::Quiesce);
    let end = daemon.reclaim(u64::MAX);
    assert_eq!(end.outcome, outcome::CAPTURING);
    assert_eq!(rig.fake.calls(Call::Quiesce), before);
    rig.engine.capture_end();
    goes_on(&daemon, &rig, held, "a capture");
}
