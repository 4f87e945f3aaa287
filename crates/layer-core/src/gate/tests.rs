//! The real gate with real threads.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use super::{FENCED, Gate, GateOwner};
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
                    gate.enter().unwrap();
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
        gate.close();
        assert!(gate.drain(Instant::now() + LONG));
        usable.store(false, Ordering::SeqCst);
        std::hint::spin_loop();
        usable.store(true, Ordering::SeqCst);
        gate.open();
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
    gate.enter().unwrap();
    gate.close();
    assert!(!gate.drain(Instant::now()), "somebody is inside");
    gate.enter().unwrap();
    gate.enter().unwrap();
    gate.leave();
    gate.leave();
    assert!(gate.is_inside() && !gate.drain(Instant::now()));
    gate.leave();
    assert!(!gate.is_inside() && gate.drain(Instant::now()));
    gate.leave();
    assert!(gate.drain(Instant::now()), "one leave too many does no harm");
    let waiter = std::thread::spawn(move || {
        gate.enter().unwrap();
        gate.leave();
    });
    until("a waiter", || gate.waiters() == 1);
    until("the owner to be told", || ears.wanted.load(Ordering::SeqCst) == 1);
    gate.open();
    waiter.join().unwrap();
    assert_eq!(gate.waiters(), 0);
}

#[test]
fn two_closers_are_two() {
    let (gate, _) = gate();
    gate.close();
    gate.close();
    gate.open();
    let waiter = std::thread::spawn(move || gate.enter().map(|()| gate.leave()));
    until("a waiter", || gate.waiters() == 1);
    gate.open();
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
                    gate.enter().unwrap();
                    all_in.wait();
                    go.wait();
                    if i % 2 == 0 {
                        gate.leave();
                    }
                })
            })
            .collect();
        all_in.wait();
        gate.close();
        assert!(!gate.drain(Instant::now()));
        go.wait();
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(
            gate.drain(Instant::now() + LONG),
            "threads that ended inside are out"
        );
        gate.open();
        assert!(gate.slots.iter().count() <= 128, "slots are used again");
    }
    assert_eq!(gate.passages(), 300);
}

#[test]
fn waiters_hear_of_a_failure_and_new_ones_wait_anew() {
    let (gate, _) = gate();
    gate.close();
    for _ in 0..2 {
        let (tell, told) = mpsc::channel();
        let waiter = std::thread::spawn(move || tell.send(gate.enter()).unwrap());
        until("a waiter", || gate.waiters() == 1);
        assert!(told.try_recv().is_err());
        gate.fail_waiters(TouchError::OutOfMemory);
        assert_eq!(told.recv().unwrap(), Err(TouchError::OutOfMemory));
        waiter.join().unwrap();
    }
    assert!(gate.drain(Instant::now()), "who was sent away is not inside");
    gate.open();
    gate.enter().unwrap();
    gate.leave();
}

#[test]
fn the_first_passage_after_watch_is_told_once() {
    let (gate, ears) = gate();
    for round in 1..3 {
        gate.watch();
        for _ in 0..3 {
            gate.enter().unwrap();
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
    gate.close();
    gate.reset_in_child();
    gate.enter().unwrap();
    gate.leave();
}
