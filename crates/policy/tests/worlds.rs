//! Whole machines: programs that come, work, idle, die and misbehave, until all are done.

mod common;

use std::time::Duration;

use common::world::{Faults, Job, World};
use common::{config, gib, spec};
use ebb_policy::{Action, Arbiter, Event, PolicyConfig, ReclaimReason, TaskSpec, Time};
use ebb_units::{Bytes, Priority};
use proptest::prelude::*;

const CARD: u64 = 100;

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn job(footprint: u64, work: u64) -> Job {
    Job {
        spec: spec(),
        start: Duration::ZERO,
        footprint: gib(footprint),
        pieces: 3,
        work: seconds(work),
        busy: seconds(1),
        idle: Duration::ZERO,
        scratch: Bytes::ZERO,
        overhead: Bytes::ZERO,
        processes: 1,
        long: true,
    }
}

fn world(jobs: Vec<Job>) -> World {
    World::new(1, gib(CARD), Faults::default(), jobs, config())
}

#[test]
fn two_jobs_that_do_not_fit_finish_together_and_copying_stays_under_a_tenth() {
    let mut w = world(vec![job(75, 200), job(75, 200)]);
    let took = w.run(seconds(600));
    assert!(w.stalled * 10 < took, "{:?} of {took:?} stalled", w.stalled);
    assert!(w.copying * 10 < took, "{:?} of {took:?} copied", w.copying);
    let ends: Vec<_> = w.programs.iter().map(|p| p.ended.unwrap()).collect();
    assert!(ends[1].since(ends[0]) < seconds(30), "{ends:?}");
    assert!(took < seconds(445), "{took:?}");
    let longest = w.programs.iter().map(|p| p.longest_wait).max().unwrap();
    assert!(longest < seconds(25), "{longest:?}");
}

/// Each has the card to itself in its turn but for what its steps allocate besides: that comes from the one that waits.
#[test]
fn two_jobs_that_fill_the_card_get_what_their_steps_allocate() {
    let filling = Job {
        scratch: gib(2),
        ..job(98, 60)
    };
    let half = Job {
        scratch: gib(2),
        ..job(60, 60)
    };
    for jobs in [vec![filling.clone(), filling], vec![half.clone(), half]] {
        let mut w = world(jobs);
        let took = w.run(seconds(300));
        assert!(w.stalled * 10 < took, "{:?} of {took:?} stalled", w.stalled);
    }
}

#[test]
fn jobs_that_fit_never_move_a_byte() {
    let mut w = world(vec![job(30, 100), job(30, 100), job(40, 100)]);
    w.run(seconds(110));
    assert_eq!(w.copied_out, Bytes::ZERO);
}

#[test]
fn time_goes_by_priority_four_two_one() {
    let with = |priority| Job {
        spec: TaskSpec { priority, ..spec() },
        ..job(75, 100_000)
    };
    let mut w = world(vec![
        with(Priority::High),
        with(Priority::Normal),
        with(Priority::Low),
    ]);
    while w.now.since(Time(0)) < seconds(3000) {
        w.step();
    }
    let worked: Vec<f64> = w.programs.iter().map(|p| p.worked.as_secs_f64()).collect();
    let sum: f64 = worked.iter().sum();
    assert!(sum > 2700.0, "under a tenth is copying: {worked:?}");
    for (got, share) in worked.iter().zip([4.0, 2.0, 1.0]) {
        let part = got / sum * 7.0;
        assert!((part - share).abs() < 0.15 * share, "{worked:?}");
    }
}

#[test]
fn an_idle_neighbour_costs_nothing_and_gets_its_memory_back() {
    let notebook = Job {
        busy: seconds(2),
        idle: seconds(100),
        ..job(60, 8)
    };
    let mut w = world(vec![notebook, job(90, 300)]);
    w.run(seconds(600));
    let [notebook, trainer] = &w.programs[..] else {
        panic!()
    };
    assert!(notebook.longest_wait < seconds(30), "{:?}", notebook.longest_wait);
    let alone = seconds(300);
    assert!(trainer.ended.unwrap().since(Time(0)) < alone + alone / 5);
}

#[test]
fn a_large_job_is_not_starved_by_small_ones() {
    let mut jobs: Vec<Job> = (0..9)
        .map(|n| Job {
            start: seconds(n * 3),
            ..job(11, 10_000)
        })
        .collect();
    jobs.push(Job {
        start: seconds(30),
        pieces: 1,
        ..job(100, 20)
    });
    // New small ones keep coming.
    for n in 0..45 {
        jobs.push(Job {
            start: seconds(31 + 2 * n),
            ..job(5, 20)
        });
    }
    let mut w = world(jobs);
    while w.programs[9].ended.is_none() {
        w.step();
        assert!(w.now.since(Time(0)) < seconds(300), "{:#?}", w.arbiter.snapshot());
    }
    assert!(
        // Its twenty seconds with all of the card are paid for when the small ones have had theirs with a ninth each.
        w.programs[9].longest_wait < seconds(240),
        "{:?}",
        w.programs[9].longest_wait
    );
}

#[test]
fn a_stream_of_newcomers_starves_nobody() {
    // Twice as much work comes in as the card can do, for as long as we look.
    let mut jobs = vec![Job {
        pieces: 1,
        ..job(100, 60)
    }];
    for n in 0..45 {
        jobs.push(Job {
            start: seconds(1 + 2 * n),
            pieces: 1,
            ..job(40, 10)
        });
    }
    let mut w = World::new(
        1,
        gib(CARD),
        Faults::default(),
        jobs,
        PolicyConfig {
            starve_after: seconds(60),
            ..config()
        },
    );
    while w.programs[0].ended.is_none() {
        w.step();
        assert!(w.now.since(Time(0)) < seconds(600), "{:#?}", w.programs[0]);
    }
    // Once for `starve_after` and a turn; the second time those who came in between go first, once each.
    let longest = w.programs[0].longest_wait;
    assert!(longest < seconds(240), "{longest:?}");
}

#[test]
fn growing_clients_do_not_deadlock() {
    let growing = Job {
        pieces: 40,
        ..job(80, 20)
    };
    let mut w = world(vec![growing.clone(), growing.clone(), growing.clone(), growing]);
    let took = w.run(seconds(300));
    assert!(took < seconds(140), "{took:?}");
}

fn priorities() -> impl Strategy<Value = Priority> {
    prop_oneof![Just(Priority::Low), Just(Priority::Normal), Just(Priority::High)]
}

prop_compose! {
    /// A job that fits alone.
    fn jobs_of_any_kind()(
        footprint in 1u64..=90,
        request in prop_oneof![3 => Just(0u64), 1 => 0u64..=20],
        spare in prop_oneof![Just(None), (0u64..10).prop_map(Some)],
        priority in priorities(),
        release in prop_oneof![Just(None), (1u64..20).prop_map(|s| Some(seconds(s)))],
        start in 0u64..20_000,
        pieces in 1u64..6,
        work in 1u64..30,
        busy in 1u64..40,
        idle in prop_oneof![Just(0u64), 1u64..80],
        processes in prop_oneof![4 => Just(1u64), 1 => Just(2u64)],
        scratch in prop_oneof![2 => Just(0u64), 1 => 1u64..=4],
        long: bool,
    ) -> Job {
        let footprint = if processes > 1 { footprint / 2 + 1 } else { footprint };
        Job {
            spec: TaskSpec {
                request: gib(request),
                limit: spare.map(|s| gib(((footprint + scratch) * processes).max(request) + s)),
                priority,
                idle_release: release,
                ..spec()
            },
            start: Duration::from_millis(start / 50 * 50),
            footprint: gib(footprint),
            pieces,
            work: seconds(work),
            busy: Duration::from_millis(busy * 100),
            idle: Duration::from_millis(idle * 100),
            scratch: gib(scratch),
            overhead: Bytes::ZERO,
            processes,
            long,
        }
    }
}

prop_compose! {
    fn any_faults()(
        busy in 0u64..150, failed in 0u64..150, no_room in 0u64..150, late in 0u64..300, deaf in 0u64..20,
        death in prop_oneof![Just(0u64), Just(1u64)], silent in 0u64..800,
    ) -> Faults {
        Faults { busy, failed, no_room, late, deaf, death, silent }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    /// Every program that fits alone ends, whatever the others are and do. The accounts agree after each event.
    #[test]
    fn everyone_gets_done(seed: u64, faults in any_faults(), jobs in prop::collection::vec(jobs_of_any_kind(), 1..5)) {
        let mut w = World::new(seed, gib(CARD), faults, jobs, config());
        w.run(seconds(3600));
        let device = &w.arbiter.snapshot().devices[0];
        prop_assert_eq!(device.free, gib(CARD));
        prop_assert!(w.arbiter.snapshot().tasks.is_empty());
    }

    /// Where nothing is guaranteed and the limits fit, nobody sees an out-of-memory that waiting would have avoided.
    #[test]
    fn nobody_runs_out_of_memory(seed: u64, jobs in prop::collection::vec(jobs_of_any_kind(), 2..5)) {
        let jobs: Vec<Job> = jobs
            .into_iter()
            .map(|j| Job { spec: TaskSpec { request: Bytes::ZERO, ..j.spec.clone() }, long: true, ..j })
            .collect();
        let mut w = World::new(seed, gib(CARD), Faults::default(), jobs, config());
        w.run(seconds(3600));
        prop_assert!(w.programs.iter().all(|p| !p.out_of_memory));
    }

    /// An active task within its request gives nothing.
    #[test]
    fn a_request_holds(seed: u64, faults in any_faults(), jobs in prop::collection::vec(jobs_of_any_kind(), 1..5)) {
        let owner = Job {
            spec: TaskSpec { request: gib(20), ..spec() },
            footprint: gib(20),
            pieces: 4,
            work: seconds(60),
            ..job(20, 60)
        };
        let mut all = vec![owner];
        all.extend(jobs);
        let mut w = World::new(seed, gib(CARD), Faults { death: 0, ..faults }, all, config());
        w.run(seconds(3600));
        for (_, _, actions) in &w.log {
            for action in actions {
                if let Action::Reclaim { client, reason, .. } = action {
                    prop_assert!(client.0 != 1 || matches!(reason, ReclaimReason::IdleRelease), "{:?}", action);
                }
            }
        }
    }

    /// The same events at the same times bring the same actions.
    #[test]
    fn a_log_replays(seed: u64, faults in any_faults(), jobs in prop::collection::vec(jobs_of_any_kind(), 1..5)) {
        let mut w = World::new(seed, gib(CARD), faults, jobs, config());
        w.run(seconds(3600));
        let mut again = Arbiter::new(config());
        for (time, event, actions) in &w.log {
            prop_assert_eq!(&again.handle(*time, event), actions);
        }
        prop_assert_eq!(again.snapshot(), w.arbiter.snapshot());
        let _ = Event::Tick;
    }
}
