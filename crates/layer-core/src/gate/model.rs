//! Every interleaving of the gate's protocol, on a machine with store buffers.
//!
//! Two threads pass the gate; an owner closes it, waits for them, uses the memory alone, and opens it. A thread's stores
//! go into its own buffer and reach memory at any later time, in their order (each thread writes one place only, so that
//! an order between places does not matter). The model counts states in which the owner is alone with the memory while
//! a thread is inside. With the barrier there is none; without it there are some, which shows that the model sees them.

use std::collections::HashSet;

const THREADS: usize = 2;

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

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    Outside,
    /// Has stored its depth and not looked yet.
    Looking,
    Inside,
    /// Saw the gate closed, and has stored that it is out.
    Waiting,
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Owner {
    Open,
    Closing,
    Draining,
    Alone,
    Opened,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    closed: bool,
    depth: [u8; THREADS],
    /// Stores to a thread's own depth that have not reached memory, oldest first.
    buffer: [Vec<u8>; THREADS],
    at: [At; THREADS],
    owner: Owner,
}

fn next(world: &World, barrier: Barrier) -> Vec<World> {
    let mut all = Vec::new();
    let mut push = |change: &dyn Fn(&mut World)| {
        let mut new = world.clone();
        change(&mut new);
        all.push(new);
    };
    for i in 0..THREADS {
        if !world.buffer[i].is_empty() {
            push(&|w| w.depth[i] = w.buffer[i].remove(0));
        }
        match world.at[i] {
            At::Outside => push(&|w| {
                w.buffer[i].push(1);
                w.at[i] = At::Looking;
            }),
            At::Looking if barrier == Barrier::Both && !world.buffer[i].is_empty() => {}
            At::Looking if world.closed => push(&|w| {
                w.buffer[i].push(0);
                w.at[i] = At::Waiting;
            }),
            At::Looking => push(&|w| w.at[i] = At::Inside),
            At::Inside => push(&|w| {
                w.buffer[i].push(0);
                w.at[i] = At::Done;
            }),
            // The lock around the wait makes the opening visible.
            At::Waiting if !world.closed => push(&|w| {
                w.buffer[i].push(1);
                w.at[i] = At::Looking;
            }),
            At::Waiting | At::Done => {}
        }
    }
    match world.owner {
        Owner::Open => push(&|w| {
            w.closed = true;
            w.owner = Owner::Closing;
        }),
        Owner::Closing => push(&|w| {
            if barrier == Barrier::Owner {
                for i in 0..THREADS {
                    if let Some(last) = w.buffer[i].last().copied() {
                        w.depth[i] = last;
                        w.buffer[i].clear();
                    }
                }
            }
            w.owner = Owner::Draining;
        }),
        Owner::Draining if world.depth == [0; THREADS] => push(&|w| w.owner = Owner::Alone),
        Owner::Draining | Owner::Opened => {}
        Owner::Alone => push(&|w| {
            w.closed = false;
            w.owner = Owner::Opened;
        }),
    }
    all
}

/// States, and how many of them are wrong; also checks that everything can come to an end.
fn explore(barrier: Barrier) -> (usize, usize) {
    let start = World {
        closed: false,
        depth: [0; THREADS],
        buffer: Default::default(),
        at: [At::Outside; THREADS],
        owner: Owner::Open,
    };
    let mut seen = HashSet::from([start.clone()]);
    let mut todo = vec![start];
    let mut wrong = 0;
    while let Some(world) = todo.pop() {
        if world.owner == Owner::Alone && world.at.contains(&At::Inside) {
            wrong += 1;
        }
        let steps = next(&world, barrier);
        if steps.is_empty() {
            assert_eq!(
                (world.at, world.owner),
                ([At::Done; THREADS], Owner::Opened),
                "stuck: {world:?}"
            );
        }
        for step in steps {
            if seen.insert(step.clone()) {
                todo.push(step);
            }
        }
    }
    (seen.len(), wrong)
}

#[test]
fn the_owners_barrier_is_enough() {
    let (states, wrong) = explore(Barrier::Owner);
    assert!(states > 100, "{states}");
    assert_eq!(wrong, 0, "of {states} states");
}

#[test]
fn fences_on_both_sides_are_enough() {
    assert_eq!(explore(Barrier::Both).1, 0);
}

#[test]
fn without_a_barrier_it_is_wrong() {
    assert!(explore(Barrier::None).1 > 0, "the model cannot see the fault");
}
