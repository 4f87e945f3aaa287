//! Meshing: what it gains, what it leaves alone, and what becomes of it when blocks die and calls fail.

use super::super::*;
use super::{GRANULE, World};

const S: Stream = Stream(0);

/// Blocks of `size` bytes at offset `at(n)` of the `n`-th of so many granules, and nothing else in these.
fn sparse(granules: u64, size: u64, at: impl Fn(u64) -> u64) -> World {
    let mut world = World::new(u64::MAX);
    let mut fillers = Vec::new();
    for n in 0..granules {
        let before = at(n);
        let mut fill = |world: &mut World, size| {
            if size > 0 {
                fillers.push(world.allocate(size, S).unwrap());
            }
        };
        fill(&mut world, before);
        world.allocate(size, S).unwrap();
        fill(&mut world, GRANULE - before - size);
    }
    for at in fillers {
        world.free_at(at);
    }
    world.go_idle();
    world.pool.all_done();
    world.check();
    assert_eq!(world.pool.stats().touched, granules * GRANULE);
    world
}

#[test]
fn granules_that_use_different_bytes_become_one() {
    let mut world = sparse(16, 2, |n| 2 * (n % 4));
    world.mesh_all();
    world.check();
    let stats = world.pool.stats();
    assert_eq!((stats.reserved, stats.touched), (4 * GRANULE, 4 * GRANULE));
    assert_eq!((stats.meshed_total, stats.shadows), (12, 12));
    assert_eq!(stats.external_fragmentation, 0);
    assert_eq!(world.live.len(), 16);
    world.end();
}

#[test]
fn the_same_bytes_cannot_be_shared() {
    let mut world = sparse(8, 3, |_| 2);
    assert_eq!(world.pool.meshable(), []);
    assert!(!world.mesh(0));
    world.end();
}

#[test]
fn what_dies_in_a_shared_granule_serves_once_and_its_addresses_come_back() {
    let mut world = sparse(2, 4, |n| 4 * n);
    world.mesh_all();
    assert_eq!(world.pool.stats().reserved, GRANULE);
    // The one that lives under addresses that are not its bytes' home.
    let shadow = *world.pool.meshes.shadows.keys().next().unwrap();
    let at = world
        .live
        .iter()
        .map(|block| block.1)
        .find(|at| at / GRANULE == shadow / GRANULE);
    world.free_at(at.unwrap());
    world.check();
    assert_eq!(world.pool.stats().shadows, 0);
    // Its bytes are in the granule that is left: the next block needs none.
    world.allocate(4, S).unwrap();
    world.check();
    assert_eq!(
        (
            world.pool.stats().reserved,
            world.pool.stats().external_fragmentation
        ),
        (GRANULE, 0)
    );
    world.end();
}

#[test]
fn blocks_over_the_border_of_a_granule_keep_their_bytes() {
    let mut world = World::new(u64::MAX);
    // Each begins in one granule and ends in the next.
    let long = world.allocate(GRANULE + 3, S).unwrap();
    let filler = world.allocate(2 * GRANULE - 3 - 2, S).unwrap();
    let other = world.allocate(2, S).unwrap();
    world.free_at(filler);
    world.go_idle();
    world.pool.all_done();
    let before = world.pool.stats();
    world.mesh_all();
    world.check();
    assert_eq!(world.pool.stats().meshed_total, 1, "{before:?}");
    for at in [long, other] {
        world.free_at(at);
        world.check();
    }
    world.end();
}

#[test]
fn pinned_blocks_stay_where_they_are() {
    let mut world = sparse(4, 2, |n| 2 * n);
    for which in 0..3 {
        world.pin(which);
    }
    assert_eq!(world.pool.meshable(), []);
    let (_, at, ..) = world.live[0];
    assert!(world.pool.unpin(at) && !world.pool.unpin(at));
    world.pins.remove(&at);
    world.mesh_all();
    world.check();
    assert_eq!(world.pool.stats().meshed_total, 1);
    assert_eq!(world.pool.pin(7), Err(PinError::NotLive(7)));
    world.end();
}

/// Each call of a mesh fails in turn, and then each of what mends it: every byte is there, at its address, in the end.
#[test]
fn no_byte_is_lost_whichever_call_fails() {
    for first in 1..12 {
        for second in 0..4 {
            let mut world = sparse(3, 2, |n| 2 * n);
            // One of them is in two places already.
            world.mesh(0);
            world.finish_all();
            let calls = world.card.calls;
            assert!(world.mesh(0));
            world.card.fails.extend([calls + first, calls + first + second]);
            let finished = loop {
                if let Some(finished) = world.step(0) {
                    break finished;
                }
                world.check();
            };
            world.check();
            let failed = finished == Finished::Failed;
            assert_eq!(
                failed,
                world.card.calls < calls + first + 2 && world.card.calls >= calls + first
            );
            if world.pool.torn() {
                // A block dies while nothing is behind its addresses.
                let torn = world.pool.meshes.places().next().unwrap();
                let at = world
                    .live
                    .iter()
                    .map(|one| one.1)
                    .find(|at| at / GRANULE == torn / GRANULE);
                if second == 3 {
                    world.free_at(at.unwrap());
                }
                world.check();
            }
            while world.mend() {
                while !world.plans.is_empty() {
                    world.step(0);
                    world.check();
                }
            }
            assert!(!world.pool.torn());
            world.end();
        }
    }
}

/// A block that is freed while its granule is on the way is gone, wherever the granule ends.
#[test]
fn frees_on_the_way_are_entered_in_the_end() {
    for steps in 0..6 {
        for fails in [false, true] {
            let mut world = sparse(2, 4, |n| 4 * n);
            assert!(world.mesh(0));
            for _ in 0..steps {
                if !world.plans.is_empty() {
                    world.step(0);
                }
            }
            if fails {
                world.card.fails.insert(world.card.calls + 1);
            }
            world.free(0, &[]);
            world.check();
            world.free(0, &[]);
            world.check();
            world.finish_all();
            world.check();
            assert_eq!(world.pool.stats().active, 0);
            world.end();
        }
    }
}

/// A stream ends while a plan holds bytes that were freed on it; its number and its marks come again.
#[test]
fn what_a_plan_holds_of_a_stream_that_ends_is_anyones() {
    let mut world = World::new(u64::MAX);
    let one = world.allocate(3 * GRANULE, Stream(1)).unwrap();
    let keep = world.allocate(GRANULE, Stream(1)).unwrap();
    let two = world.allocate(3 * GRANULE, Stream(1)).unwrap();
    for _ in 0..10 {
        world.card.next_mark(Stream(1));
    }
    world.free_at(one);
    world.free_at(two);
    assert_eq!(world.begin(6 * GRANULE, 1, Stream(1)), None);
    assert_eq!(world.plans.len(), 1);
    world.card.end(Stream(1));
    world.pool.end(Stream(1));
    world.card.fails.insert(world.card.calls + 1);
    world.finish_all();
    world.check();
    world.free_at(keep);
    world.check();
    world.end();
}

/// A graph goes on using addresses whose blocks are freed: these stay what they are.
#[test]
fn what_a_private_stream_has_is_not_moved() {
    let private = Stream(1);
    let mut world = sparse(3, 2, |n| 2 * n);
    world.pool.keep(private);
    let mine = world.allocate(1, private).unwrap();
    let home = world.pool.config.down(mine);
    let chunk = world.pool.chunks.at(home).unwrap();
    world.mesh_all();
    let stats = world.pool.stats();
    assert_eq!(
        (stats.meshed_total, stats.reserved),
        (1, 2 * GRANULE),
        "the two others"
    );
    world.free_at(mine);
    world.mesh_all();
    assert_eq!(world.pool.chunks.at(home), Some(chunk));
    world.pool.keep_no_more(private);
    world.go_idle();
    world.pool.all_done();
    world.mesh_all();
    assert_eq!(world.pool.stats().reserved, GRANULE, "it is like others now");
    world.end();
}
