//! The real gate with real threads.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use super::{DeviceSet, FENCED, Gate, GateOwner};
use crate::error::TouchError;

const LONG: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Ears {
    wanted: AtomicU32,
    active: AtomicU32,
}

impl GateOwner for Ears {
    fn wanted(&self) {
        self.wanted.fetch_add(1, Ordering::SeqCst);
    }
    fn active(&self) {
        self.active.fetch_add(1, Ordering::SeqCst);
    }
}

fn gate() -> (&'static Gate, Arc<Ears>) {
    let gate: &'static Gate = Box::leak(Box::new(Gate::new()));
    let ears = Arc::new(Ears::default());
    gate.arm(ears.clone());
    (gate, ears)
}

fn until(what: &str, ready: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !ready() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::yield_now();
    }
}

/// Nobody is inside while it is closed and drained: bounded rounds, several threads, both kinds of barrier.
fn nobody_inside(gate: &'static Gate) {
    const ROUNDS: u32 = 300;
    let usable = Arc::new(AtomicBool::new(true));
    let stop = Arc::new(AtomicBool::new(false));
    let bad = Arc::new(AtomicU64::new(0));
    let callers: Vec<_> = (0..3)
        .map(|_| {
            let (usable, stop, bad) = (usable.clone(), stop.clone(), bad.clone());
            std::thread::spawn(move || {
                let mut calls = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    gate.enter_for(|| DeviceSet::one(0)).unwrap();
                    if !usable.load(Ordering::Relaxed) {
                        bad.fetch_add(1, Ordering::Relaxed);
                    }
                    gate.leave();
                    calls += 1;
                }
                calls
            })
        })
        .collect();
    for _ in 0..ROUNDS {
        gate.close(0);
        assert!(gate.drain(0, Instant::now() + LONG));
        usable.store(false, Ordering::SeqCst);
        std::hint::spin_loop();
        usable.store(true, Ordering::SeqCst);
        gate.open(0);
        std::thread::yield_now();
    }
    stop.store(true, Ordering::Relaxed);
    let calls: u64 = callers.into_iter().map(|caller| caller.join().unwrap()).sum();
    assert_eq!(bad.load(Ordering::Relaxed), 0, "of {calls} calls");
    assert_eq!(
        gate.passages(),
        calls,
        "every passage is counted once, waiting or not"
    );
}

#[test]
fn nobody_is_inside_a_closed_gate() {
    nobody_inside(gate().0);
}

#[test]
fn nobody_is_inside_a_closed_gate_without_membarrier() {
    let (gate, _) = gate();
    gate.use_fences();
    nobody_inside(gate);
    assert_eq!(gate.flags.load(Ordering::SeqCst), FENCED);
}

#[test]
fn a_thread_inside_goes_deeper_while_the_gate_closes() {
    let (gate, ears) = gate();
    gate.enter_for(|| DeviceSet::one(0)).unwrap();
    gate.close(0);
    assert!(!gate.drain(0, Instant::now()), "somebody is inside");
    gate.enter_for(|| DeviceSet::one(0)).unwrap();
    gate.enter_for(|| DeviceSet::one(0)).unwrap();
    gate.leave();
    gate.leave();
    assert!(gate.is_inside() && !gate.drain(0, Instant::now()));
    gate.leave();
    assert!(!gate.is_inside() && gate.drain(0, Instant::now()));
    gate.leave();
    assert!(gate.drain(0, Instant::now()), "one leave too many does no harm");
    let waiter = std::thread::spawn(move || {
        gate.enter_for(|| DeviceSet::one(0)).unwrap();
        gate.leave();
    });
    until("a waiter", || gate.waiters() == 1);
    until("the owner to be told", || ears.wanted.load(Ordering::SeqCst) == 1);
    gate.open(0);
    waiter.join().unwrap();
    assert_eq!(gate.waiters(), 0);
}

#[test]
fn two_closers_are_two() {
    let (gate, _) = gate();
    gate.close(0);
    gate.close(0);
    gate.open(0);
    let waiter = std::thread::spawn(move || gate.enter_for(|| DeviceSet::one(0)).map(|()| gate.leave()));
    until("a waiter", || gate.waiters() == 1);
    gate.open(0);
    waiter.join().unwrap().unwrap();
}

#[test]
fn slots_grow_and_come_back_when_threads_end_even_inside() {
    let (gate, _) = gate();
    for _ in 0..3 {
        let (count, all_in, go) = (100, Arc::new(Barrier::new(101)), Arc::new(Barrier::new(101)));
        let threads: Vec<_> = (0..count)
            .map(|i| {
                let (all_in, go) = (all_in.clone(), go.clone());
                std::thread::spawn(move || {
                    gate.enter_for(|| DeviceSet::one(0)).unwrap();
                    all_in.wait();
                    go.wait();
                    if i % 2 == 0 {
                        gate.leave();
                    }
                })
            })
            .collect();
        all_in.wait();
        gate.close(0);
        assert!(!gate.drain(0, Instant::now()));
        go.wait();
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(
            gate.drain(0, Instant::now() + LONG),
            "threads that ended inside are out"
        );
        gate.open(0);
        assert!(gate.slots.iter().count() <= 128, "slots are used again");
    }
    assert_eq!(gate.passages(), 300);
}

#[test]
fn waiters_hear_of_a_failure_and_new_ones_wait_anew() {
    let (gate, _) = gate();
    gate.close(0);
    for _ in 0..2 {
        let (tell, told) = mpsc::channel();
        let waiter = std::thread::spawn(move || tell.send(gate.enter_for(|| DeviceSet::one(0))).unwrap());
        until("a waiter", || gate.waiters() == 1);
        assert!(told.try_recv().is_err());
        gate.fail_waiters(0, TouchError::OutOfMemory);
        assert_eq!(told.recv().unwrap(), Err(TouchError::OutOfMemory));
        waiter.join().unwrap();
    }
    assert!(gate.drain(0, Instant::now()), "who was sent away is not inside");
    gate.open(0);
    gate.enter_for(|| DeviceSet::one(0)).unwrap();
    gate.leave();
}

#[test]
fn the_first_passage_after_watch_is_told_once() {
    let (gate, ears) = gate();
    for round in 1..3 {
        gate.watch();
        for _ in 0..3 {
            gate.enter_for(|| DeviceSet::one(0)).unwrap();
            gate.leave();
        }
        assert_eq!(ears.active.load(Ordering::SeqCst), round);
    }
    assert_eq!(ears.wanted.load(Ordering::SeqCst), 0);
}

#[test]
fn one_thread_may_pass_several_gates() {
    let ((a, _), (b, _)) = (gate(), gate());
    for _ in 0..3 {
        a.enter().unwrap();
        b.enter().unwrap();
        assert!(a.is_inside() && b.is_inside());
        a.leave();
        assert!(!a.is_inside() && b.is_inside());
        b.leave();
    }
    assert_eq!((a.passages(), b.passages()), (3, 3));
}

#[test]
fn a_child_finds_it_open() {
    let (gate, _) = gate();
    gate.close(0);
    gate.reset_in_child();
    gate.enter_for(|| DeviceSet::one(0)).unwrap();
    gate.leave();
}

#[test]
fn a_closed_device_keeps_out_who_needs_it_and_nobody_else() {
    let (gate, _) = gate();
    let (a, b) = (DeviceSet::one(0), DeviceSet::one(1));
    gate.close(0);
    assert!(gate.drain(0, Instant::now()));
    for _ in 0..3 {
        gate.enter_for(|| b).unwrap();
        assert!(
            gate.is_inside() && gate.drain(0, Instant::now()),
            "not for the closed one"
        );
        assert!(!gate.drain(1, Instant::now()), "but for the other");
        gate.leave();
    }
    gate.enter_for(|| DeviceSet::NONE).unwrap();
    assert!(gate.drain(1, Instant::now()));
    gate.leave();
    let waiter = std::thread::spawn(move || gate.enter_for(|| a.with(b)).map(|()| gate.leave()));
    until("a waiter", || {
        gate.waiters_for(0) == 1 && gate.waiters_for(1) == 1
    });
    gate.close(1);
    gate.open(0);
    until("a waiter for the other", || gate.waiters() == 1);
    gate.enter_for(|| a).unwrap();
    gate.leave();
    gate.open(1);
    waiter.join().unwrap().unwrap();
    // The short way again, after narrow passages: for everything.
    gate.enter_for(|| b).unwrap();
    gate.close(0);
    assert!(!gate.drain(0, Instant::now()), "nobody asked what it needs");
    gate.leave();
    assert!(gate.drain(0, Instant::now()));
    gate.open(0);
}

#[test]
fn a_thread_inside_for_one_device_waits_when_it_needs_the_closed_one_too() {
    let (gate, ears) = gate();
    let (a, b) = (DeviceSet::one(0), DeviceSet::one(1));
    gate.close(0);
    let thread = std::thread::spawn(move || {
        gate.enter_for(|| b).unwrap();
        gate.enter_for(|| b).unwrap();
        gate.leave();
        gate.enter_for(|| a).unwrap();
        let both = [0, 1].map(|device| !gate.drain(device, Instant::now()));
        gate.leave();
        gate.leave();
        both
    });
    until("it waits", || gate.waiters_for(0) == 1);
    assert_eq!(gate.waiters_for(1), 0, "that one it has");
    assert!(gate.drain(0, Instant::now()));
    assert!(!gate.drain(1, Instant::now()));
    until("the owner to be told", || ears.wanted.load(Ordering::SeqCst) == 1);
    gate.open(0);
    assert_eq!(thread.join().unwrap(), [true, true]);
    assert!(gate.drain(0, Instant::now()) && gate.drain(1, Instant::now()));
}

#[test]
fn a_failure_of_one_device_is_none_of_the_others() {
    let (gate, _) = gate();
    gate.close(0);
    gate.close(1);
    let waiters = [0, 1].map(|device| {
        let waiter =
            std::thread::spawn(move || gate.enter_for(|| DeviceSet::one(device)).map(|()| gate.leave()));
        until("a waiter", || gate.waiters_for(device) == 1);
        waiter
    });
    gate.fail_waiters(0, TouchError::OutOfMemory);
    let [first, second] = waiters;
    assert_eq!(first.join().unwrap(), Err(TouchError::OutOfMemory));
    assert_eq!(gate.waiters(), 1);
    gate.open(1);
    assert_eq!(second.join().unwrap(), Ok(()));
    gate.open(0);
}

/// Owners of two devices close and open them while threads use one, the other, or both.
#[test]
fn nobody_is_inside_for_a_closed_device() {
    const ROUNDS: u32 = 200;
    let (gate, _) = gate();
    let usable = Arc::new([AtomicBool::new(true), AtomicBool::new(true)]);
    let stop = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = [1u64, 2, 3]
        .map(|needs| {
            let (usable, stop) = (usable.clone(), stop.clone());
            std::thread::spawn(move || {
                let mut bad = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    gate.enter_for(|| DeviceSet(needs)).unwrap();
                    for device in DeviceSet(needs).iter() {
                        bad += u64::from(!usable[device].load(Ordering::Relaxed));
                    }
                    gate.leave();
                }
                bad
            })
        })
        .into();
    let owners = [0, 1].map(|device| {
        let usable = usable.clone();
        std::thread::spawn(move || {
            for _ in 0..ROUNDS {
                gate.close(device);
                assert!(gate.drain(device, Instant::now() + LONG));
                usable[device].store(false, Ordering::SeqCst);
                std::thread::yield_now();
                usable[device].store(true, Ordering::SeqCst);
                gate.open(device);
                std::thread::yield_now();
            }
        })
    });
    for owner in owners {
        owner.join().unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    let bad: u64 = callers.into_iter().map(|caller| caller.join().unwrap()).sum();
    assert_eq!(bad, 0);
}

#[test]
fn passages_count_for_the_device_that_a_thread_works_on() {
    let (gate, _) = gate();
    let pass = |device: Option<usize>, times: u32| {
        gate.works_on(device);
        for _ in 0..times {
            gate.enter().unwrap();
            gate.leave();
        }
    };
    pass(Some(0), 3);
    pass(Some(1), 5);
    pass(None, 7);
    let of = |device| gate.passages_of(DeviceSet::one(device));
    assert_eq!([of(0), of(1), of(2), gate.passages()], [10, 12, 7, 15]);
}
