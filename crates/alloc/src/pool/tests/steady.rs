//! Loops: physical memory stays at what is live, and after a few rounds nothing is mapped any more.

use super::super::*;
use super::{GRANULE, World};

const S: Stream = Stream(0);

/// Forward and backward passes of layers with sizes that are no whole granules, gradients that stay for a while, updates.
fn iteration(world: &mut World, layers: u64, gradients: &mut Vec<u64>) -> u64 {
    let mut peak = 0;
    let mut kept = Vec::new();
    for at in gradients.drain(..) {
        world.free_at(at);
    }
    let mut live = |world: &World| {
        let stats = world.pool.stats();
        peak = peak.max(stats.allocated);
    };
    for layer in 0..layers {
        let scratch = world.allocate(3 * GRANULE + layer % 5, S).unwrap();
        for n in 0..4 {
            kept.push(world.allocate(GRANULE * (n + 1) + 3 * (n % 2), S).unwrap());
        }
        live(world);
        world.free_at(scratch);
        kept.push(world.allocate(1 + layer % 7, S).unwrap());
    }
    for layer in 0..layers {
        let scratch = world.allocate(7 * GRANULE + 1, S).unwrap();
        gradients.push(world.allocate(2 * GRANULE + layer % 3, S).unwrap());
        live(world);
        for _ in 0..5 {
            let at = kept.pop().unwrap();
            world.free_at(at);
        }
        world.free_at(scratch);
    }
    let update = world.allocate(layers * GRANULE + 5, S).unwrap();
    live(world);
    world.free_at(update);
    peak
}

#[test]
#[cfg_attr(miri, ignore = "thousands of blocks")]
fn a_training_loop_maps_nothing_in_its_steady_state() {
    let mut world = World::new(u64::MAX);
    let weights: Vec<u64> = (0..20)
        .map(|n| world.allocate(4 * GRANULE + n % 4, S).unwrap())
        .collect();
    let mut gradients = Vec::new();
    let mut peak = 0;
    let mut maps = Vec::new();
    for _ in 0..8 {
        let before = world.pool.physical().1;
        peak = peak.max(iteration(&mut world, 20, &mut gradients));
        maps.push(world.pool.physical().1 - before);
        world.check();
    }
    assert!(maps[0] > 0);
    assert_eq!(maps[3..], [0; 5], "{maps:?}");
    let physical = world.pool.physical().0;
    assert!(physical <= peak * 106 / 100, "{physical} bytes for {peak}");
    assert_eq!(weights.len(), 20);
    world.end();
}

/// Lifetimes of whole granules: what is live at the peak is what there is, whatever came before.
#[test]
#[cfg_attr(miri, ignore = "thousands of blocks")]
fn whole_granules_never_need_more_than_is_live() {
    for seed in 1..8u64 {
        let mut world = World::new(u64::MAX);
        let mut rng = seed;
        let (mut live, mut peak) = (0, 0);
        for _ in 0..300 {
            rng = rng
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let dice = rng >> 33;
            if dice % 5 < 3 && live < 2000 * GRANULE || world.live.is_empty() {
                let size = (1 + dice % 97) * GRANULE;
                if world.allocate(size, S).is_some() {
                    live += size;
                }
            } else {
                let which = usize::try_from(dice).unwrap() % world.live.len();
                live -= world.live[which].2;
                world.free(which, &[]);
            }
            peak = peak.max(live);
            assert_eq!(world.pool.stats().reserved, peak, "seed {seed}");
        }
        world.end();
    }
}

#[test]
#[cfg_attr(miri, ignore = "thousands of blocks")]
fn records_are_small_beside_what_they_manage() {
    let mut config = Config::for_granule(2 << 20);
    config.limit = u64::MAX;
    let mut pool = Pool::new(config);
    assert!(pool.add_range(1 << 40, 1 << 40));
    #[derive(Debug)]
    struct Able;
    impl Backing for Able {
        type Error = std::convert::Infallible;
        fn call(&mut self, _call: &Call) -> Result<(), Self::Error> {
            Ok(())
        }
    }
    let mut rng = 3u64;
    for _ in 0..5000 {
        rng = rng
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let size = 1 << (9 + (rng >> 33) % 15);
        let request = Request {
            size,
            align: 1,
            stream: S,
            asked: true,
        };
        match pool.allocate(request) {
            Step::Ready(_) => {}
            Step::Run(plan) => {
                let (done, _) = plan.run(&mut Able);
                assert!(matches!(pool.finish(*plan, done), Finished::Block(_)));
            }
            other => panic!("{other:?}"),
        }
    }
    let stats = pool.stats();
    assert!(
        stats.records * 1000 <= stats.reserved,
        "{} for {}",
        stats.records,
        stats.reserved
    );
}
