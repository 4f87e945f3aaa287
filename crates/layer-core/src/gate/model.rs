//! Every interleaving of the gate's protocol, on a machine with store buffers.
//!
//! Two threads pass the gate, each twice or once within the other; owners of two devices close it, wait for the threads that are inside for
//! their device, use its memory alone, and open it. A thread's stores go into its own buffer and reach memory at any later time, in
//! their order; an owner reads a thread's word and mask at different times. The model counts states in which an owner is alone with
//! its device while a thread that uses it is inside. With the barrier there is none; without it there are some, which
//! shows that the model sees them; and so do two faults that are put in on purpose.

use std::collections::{HashSet, VecDeque};

const THREADS: usize = 2;
const A: u8 = 1;
const B: u8 = 2;
const ALL: u8 = 0xff;

/// What makes the pair of store and load in `enter` safe.
#[derive(Clone, Copy, PartialEq)]
enum Barrier {
    /// `membarrier` on the owner's side: empties every thread's buffer at one moment.
    Owner,
    /// A fence between store and load on the thread's side, one on the owner's.
    Both,
    /// The owner's fence only: wrong.
    None,
}

/// Faults put in on purpose.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// `leave` counts down and leaves the mark of a narrow passage.
    MarkStays,
    /// A thread that is inside narrowly goes in again without asking.
    NestedFree,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct Slot {
    depth: u8,
    narrow: bool,
    mask: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Store {
    Word(u8, bool),
    Mask(u8),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    /// Before step `n` of its plan.
    Plan,
    /// Has stored the short way's word, and not looked.
    Looking,
    /// About to try the long way.
    Slow,
    /// On the long way: has stored that it is inside for everything.
    SlowLooking,
    /// Has stored for what it is inside, and not looked.
    Narrow,
    Waiting,
}

/// One step of a plan: go in for these devices, or go out.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    In(u8),
    Out,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Thread {
    at: At,
    /// How many steps of the plan are done.
    step: usize,
    /// Its own view of its slot, and what has not reached memory of it.
    own: Slot,
    buffer: VecDeque<Store>,
    /// Where it stood before the step that it tries, and for what it was inside.
    before: (u8, bool),
    outer: u8,
    /// The devices that the calls use in which it is.
    uses: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Owner {
    Open,
    Closing,
    /// Which threads were seen outside; the thread whose mask is to be read next.
    Draining([bool; THREADS], Option<usize>),
    Alone,
    Opened,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    closed: u8,
    memory: [Slot; THREADS],
    threads: [Thread; THREADS],
    owners: [Owner; 2],
    rounds: [u8; 2],
}

struct Model {
    barrier: Barrier,
    fault: Fault,
    plans: [&'static [Step]; THREADS],
    owners: usize,
    /// How often each owner closes.
    rounds: u8,
}

impl Thread {
    fn put(&mut self, store: Store) {
        apply(&mut self.own, store);
        self.buffer.push_back(store);
    }

    fn step_back(&mut self) {
        self.put(Store::Word(self.before.0, self.before.1));
        self.put(Store::Mask(self.outer));
    }

    fn inside(&mut self, need: u8) {
        self.uses.push(need);
        self.step += 1;
        self.at = At::Plan;
    }
}

fn apply(slot: &mut Slot, store: Store) {
    match store {
        Store::Word(depth, narrow) => (slot.depth, slot.narrow) = (depth, narrow),
        Store::Mask(mask) => slot.mask = mask,
    }
}

impl Model {
    fn thread(&self, closed: u8, thread: &Thread, plan: &[Step]) -> Option<Thread> {
        let mut t = thread.clone();
        let fenced = t.buffer.is_empty();
        let step = *plan.get(t.step)?;
        match (t.at, step) {
            (At::Plan, Step::Out) => {
                let (depth, narrow) = (t.own.depth, t.own.narrow);
                let narrow = narrow && (depth > 1 || self.fault == Fault::MarkStays);
                t.put(Store::Word(depth - 1, narrow));
                t.uses.pop();
                t.step += 1;
            }
            (At::Plan, Step::In(_)) => {
                t.before = (t.own.depth, t.own.narrow);
                t.put(Store::Word(t.own.depth + 1, t.own.narrow));
                t.at = At::Looking;
            }
            (At::Looking, Step::In(need)) => {
                if self.barrier == Barrier::Both && !fenced {
                    return None;
                }
                let nested = t.before.0 > 0 && !(self.fault == Fault::NestedFree && t.before.1);
                if !nested && (closed == 0 || t.before.0 > 0) {
                    t.inside(need);
                } else {
                    t.put(Store::Word(t.before.0, t.before.1));
                    t.outer = match t.before {
                        (0, _) => 0,
                        (_, false) => ALL,
                        _ => t.own.mask,
                    };
                    t.at = At::Slow;
                }
            }
            (At::Slow, _) => {
                if t.before.1 {
                    t.put(Store::Mask(ALL));
                }
                t.put(Store::Word(t.before.0 + 1, t.before.1));
                t.at = At::SlowLooking;
            }
            (At::SlowLooking, Step::In(need)) => {
                if self.barrier != Barrier::None && !fenced {
                    return None;
                }
                if closed == 0 || t.outer == ALL {
                    t.inside(need);
                } else {
                    t.step_back();
                    t.put(Store::Mask(t.outer | need));
                    t.put(Store::Word(t.before.0 + 1, true));
                    t.at = At::Narrow;
                }
            }
            (At::Narrow, Step::In(need)) => {
                if self.barrier != Barrier::None && !fenced {
                    return None;
                }
                if closed & need & !t.outer == 0 {
                    t.inside(need);
                } else {
                    t.step_back();
                    t.at = At::Waiting;
                }
            }
            (At::Waiting, Step::In(need)) if closed & need & !t.outer == 0 => t.at = At::Slow,
            _ => return None,
        }
        Some(t)
    }

    fn next(&self, world: &World) -> Vec<World> {
        let mut all = Vec::new();
        for i in 0..THREADS {
            if !world.threads[i].buffer.is_empty() {
                let mut w = world.clone();
                flush(&mut w, i, 1);
                all.push(w);
            }
            if let Some(thread) = self.thread(world.closed, &world.threads[i], self.plans[i]) {
                let mut w = world.clone();
                w.threads[i] = thread;
                all.push(w);
            }
        }
        for d in 0..self.owners {
            if let Some(w) = self.owner(world, d) {
                all.push(w);
            }
        }
        all
    }

    fn owner(&self, world: &World, d: usize) -> Option<World> {
        let bit = [A, B][d];
        let mut w = world.clone();
        w.owners[d] = match world.owners[d] {
            Owner::Open => {
                w.closed |= bit;
                Owner::Closing
            }
            Owner::Closing => {
                if self.barrier == Barrier::Owner {
                    (0..THREADS).for_each(|i| flush(&mut w, i, usize::MAX));
                }
                Owner::Draining([false; THREADS], None)
            }
            Owner::Draining(out, None) if out == [true; THREADS] => Owner::Alone,
            Owner::Draining(mut out, None) => {
                let i = out.iter().position(|out| !out)?;
                let slot = world.memory[i];
                if slot.depth == 0 {
                    out[i] = true;
                    Owner::Draining(out, None)
                } else if slot.narrow {
                    Owner::Draining(out, Some(i))
                } else {
                    return None;
                }
            }
            Owner::Draining(mut out, Some(i)) => {
                out[i] = world.memory[i].mask & bit == 0;
                Owner::Draining(out, None)
            }
            Owner::Alone => {
                w.closed &= !bit;
                w.rounds[d] += 1;
                if w.rounds[d] < self.rounds {
                    Owner::Open
                } else {
                    Owner::Opened
                }
            }
            Owner::Opened => return None,
        };
        Some(w)
    }

    /// States, and how many of them are wrong; also checks that everything comes to an end, unless it is wrong anyway.
    fn explore(&self) -> (usize, usize) {
        let thread = Thread {
            at: At::Plan,
            step: 0,
            own: Slot::default(),
            buffer: VecDeque::new(),
            before: (0, false),
            outer: 0,
            uses: Vec::new(),
        };
        let start = World {
            closed: 0,
            memory: Default::default(),
            threads: [thread.clone(), thread],
            owners: [Owner::Open; 2],
            rounds: [0; 2],
        };
        let mut seen = HashSet::from([start.clone()]);
        let mut todo = vec![start];
        let mut wrong = 0;
        while let Some(world) = todo.pop() {
            let met = |d: usize| {
                world.owners[d] == Owner::Alone
                    && world
                        .threads
                        .iter()
                        .any(|t| t.uses.iter().any(|need| need & [A, B][d] != 0))
            };
            wrong += usize::from(met(0) || met(1));
            let steps = self.next(&world);
            if steps.is_empty() && wrong == 0 {
                let done = (0..THREADS).all(|i| world.threads[i].step == self.plans[i].len())
                    && world.owners[..self.owners]
                        .iter()
                        .all(|owner| *owner == Owner::Opened);
                assert!(done, "stuck: {world:?}");
            }
            for step in steps {
                if seen.insert(step.clone()) {
                    todo.push(step);
                }
            }
        }
        (seen.len(), wrong)
    }
}

/// So many of a thread's stores reach memory.
fn flush(world: &mut World, thread: usize, stores: usize) {
    for _ in 0..stores {
        let Some(store) = world.threads[thread].buffer.pop_front() else {
            break;
        };
        apply(&mut world.memory[thread], store);
    }
}

const ONCE_A: &[Step] = &[Step::In(A), Step::Out];
const ONCE_B: &[Step] = &[Step::In(B), Step::Out];
const B_THEN_A: &[Step] = &[Step::In(B), Step::Out, Step::In(A), Step::Out];
const BOTH: &[Step] = &[Step::In(A | B), Step::Out];
const A_IN_B: &[Step] = &[Step::In(B), Step::In(A), Step::Out, Step::Out];

fn model(barrier: Barrier, owners: usize, plans: [&'static [Step]; THREADS]) -> Model {
    Model {
        barrier,
        fault: Fault::None,
        plans,
        owners,
        rounds: 1,
    }
}

#[test]
fn the_owners_barrier_is_enough() {
    for plans in [
        [ONCE_A, ONCE_A],
        [ONCE_A, ONCE_B],
        [B_THEN_A, ONCE_A],
        [BOTH, ONCE_B],
        [A_IN_B, ONCE_B],
    ] {
        let (states, wrong) = model(Barrier::Owner, 1, plans).explore();
        assert!(states > 100, "{states}");
        assert_eq!(wrong, 0, "of {states} states");
    }
}

#[test]
fn two_devices_close_at_once() {
    for plans in [[ONCE_A, ONCE_B], [BOTH, ONCE_B], [B_THEN_A, ONCE_B]] {
        let (states, wrong) = model(Barrier::Owner, 2, plans).explore();
        assert!(states > 1000, "{states}");
        assert_eq!(wrong, 0, "of {states} states");
    }
}

#[test]
fn fences_on_both_sides_are_enough() {
    for plans in [[ONCE_A, ONCE_B], [B_THEN_A, ONCE_A], [A_IN_B, ONCE_A]] {
        assert_eq!(model(Barrier::Both, 1, plans).explore().1, 0);
    }
}

#[test]
fn without_a_barrier_it_is_wrong() {
    let wrong = model(Barrier::None, 1, [ONCE_A, ONCE_A]).explore().1;
    assert!(wrong > 0, "the model cannot see the fault");
}

#[test]
fn a_mark_that_stays_or_nesting_without_asking_is_wrong() {
    for (fault, plan, rounds) in [(Fault::MarkStays, TWICE, 2), (Fault::NestedFree, A_IN_B, 1)] {
        for put_in in [Fault::None, fault] {
            let mut model = model(Barrier::Owner, 1, [plan, &[]]);
            model.rounds = rounds;
            model.fault = put_in;
            let (states, wrong) = model.explore();
            assert_eq!(wrong > 0, put_in != Fault::None, "of {states} states");
        }
    }
}

/// Narrowly while the other device is closed, then the short way, inside which the other device closes again: needs two closes.
const TWICE: &[Step] = &[Step::In(B), Step::Out, Step::In(A | B), Step::Out];
