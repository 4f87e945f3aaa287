//! Our pool on random programs that are like real ones: what it promises on the recorded traces is no property of these traces.
//!
//! Each program comes from a seed, which a failure names. `EBB_CASES` says how many of each kind are tried.

use ebb_lab::pool::event::{Event, Op, Trace};
use ebb_lab::pool::mix::Mix;
use ebb_lab::pool::ours::Ours;
use ebb_lab::pool::run::{Options, Outcome, replay};

const GRANULE: u64 = 2 << 20;

fn cases(usual: u64) -> u64 {
    std::env::var("EBB_CASES").map_or(usual, |text| text.parse().expect("EBB_CASES is a number"))
}

fn play(events: Vec<Event>) -> Outcome {
    let options = Options {
        capacity: 1 << 62,
        ..Options::default()
    };
    replay(events, &mut Ours::new(1 << 62), &options).unwrap_or_else(|broken| panic!("{broken}"))
}

mod programs;

use programs::{experts, growing_caches, lifetimes, pictures, scattered, serving, sharded, training};

/// What programs of a kind needed.
#[derive(Debug, Default)]
struct Needs {
    /// Programs that needed more than one percent and three granules beyond what was live.
    beyond: u64,
    /// The largest ratio, and its seed.
    worst: (f64, u64),
    /// The most granules beyond one percent, and its seed.
    most: (u64, u64),
}

fn needs(kind: fn(u64) -> Vec<Event>, cases: u64) -> Needs {
    let mut needs = Needs::default();
    for seed in 0..cases {
        let outcome = play(kind(seed));
        let ratio = outcome.peak_physical as f64 / outcome.peak_live as f64;
        let one = outcome.peak_live + outcome.peak_live / 100;
        let over = outcome.peak_physical.saturating_sub(one).div_ceil(GRANULE);
        needs.beyond += u64::from(over > 3);
        if ratio > needs.worst.0 {
            needs.worst = (ratio, seed);
        }
        if over > needs.most.0 {
            needs.most = (over, seed);
        }
    }
    eprintln!("of {cases}: {needs:?}");
    needs
}

/// Small models of odd sizes among them: blocks of about a granule leave holes that no block of their size fits into.
#[test]
fn trainings_need_little_more_than_is_live() {
    let cases = cases(100);
    let needs = needs(training, cases);
    assert!(needs.beyond * 20 <= cases, "{needs:?}");
    assert!(needs.worst.0 <= 1.07 && needs.most.0 <= 12, "{needs:?}");
}

#[test]
fn serving_needs_little_more_than_is_live() {
    let cases = cases(100);
    let needs = needs(serving, cases);
    assert!(needs.beyond * 50 <= cases, "{needs:?}");
    assert!(needs.worst.0 <= 1.03 && needs.most.0 <= 6, "{needs:?}");
}

/// Patterns of other frameworks: caches that grow by concatenation, pictures of any size, experts with spikes.
#[test]
fn other_programs_need_little_more_than_is_live() {
    let cases = cases(60);
    for (kind, often) in [
        (growing_caches as fn(u64) -> Vec<Event>, 12),
        (pictures, 50),
        (experts, 50),
    ] {
        let needs = needs(kind, cases);
        assert!(needs.beyond * often <= cases && needs.most.0 <= 8, "{needs:?}");
    }
}

/// Several streams: as long as work is done when its memory is wanted elsewhere. What is still in use cannot be given to another stream.
#[test]
fn streams_that_are_not_behind_need_little_more_than_is_live() {
    let options = Options {
        capacity: 1 << 62,
        lag_ns: 0,
    };
    for seed in 0..cases(60) {
        let outcome = replay(sharded(seed), &mut Ours::new(1 << 62), &options)
            .unwrap_or_else(|broken| panic!("seed {seed}: {broken}"));
        let most = outcome.peak_live + outcome.peak_live / 100 + 3 * GRANULE;
        assert!(
            outcome.peak_physical <= most,
            "seed {seed}: {} of {most}",
            outcome.peak_physical
        );
    }
}

/// Days on which jobs of all these kinds come and go at random, some before their time.
#[test]
fn days_of_random_jobs_need_little_more_than_is_live() {
    for seed in 0..cases(3) {
        let kinds = [training, serving, growing_caches, pictures, experts, sharded];
        let traces: Vec<Trace> = kinds
            .iter()
            .flat_map(|kind| (0..3).map(|n| kind(n + 1000 * (seed + 1))))
            .map(|events| Trace {
                slots: events.iter().filter_map(slot).max().map_or(0, |slot| slot + 1),
                streams: 3,
                events,
                ..Trace::default()
            })
            .collect();
        let day = || Mix::new(&traces, seed).take(100_000);
        let outcome = play(day().collect());
        let ratio = outcome.peak_physical as f64 / outcome.peak_live as f64;
        eprintln!("seed {seed}: {ratio:.4}");
        let granules = outcome.peak_live / GRANULE;
        assert!(ratio <= 1.02, "seed {seed}: {ratio} of {granules} granules");
        // On a card of that size nothing is refused.
        let capacity = (outcome.peak_live + outcome.peak_live / 50).next_multiple_of(GRANULE);
        let options = Options {
            capacity,
            ..Options::default()
        };
        let tight = replay(day(), &mut Ours::new(capacity), &options)
            .unwrap_or_else(|broken| panic!("seed {seed}: {broken}"));
        assert_eq!((tight.refused, tight.unjustified), (0, 0), "seed {seed}");
    }
}

fn slot(event: &Event) -> Option<u32> {
    match event.op {
        Op::Allocate { slot, .. } => Some(slot),
        _ => None,
    }
}

#[test]
fn lifetimes_of_whole_granules_need_what_is_live() {
    for seed in 0..cases(100) {
        let outcome = play(lifetimes(seed));
        assert_eq!(outcome.peak_physical, outcome.peak_live, "seed {seed}");
    }
}

#[test]
fn a_pause_brings_scattered_blocks_together() {
    let options = Options {
        capacity: 1 << 62,
        ..Options::default()
    };
    let mut plain = 1f64;
    for seed in 0..cases(8) {
        let events = scattered(seed);
        let ratio = |mut ours: Ours| {
            let outcome = replay(events.iter().cloned(), &mut ours, &options)
                .unwrap_or_else(|broken| panic!("{broken}"));
            ours.pool()
                .check()
                .unwrap_or_else(|what| panic!("seed {seed}: {what}"));
            (
                outcome.peak_physical as f64 / outcome.peak_live as f64,
                outcome.copied,
            )
        };
        let ((apart, _), (together, copied)) = (ratio(Ours::new(1 << 62)), ratio(Ours::meshing(1 << 62)));
        eprintln!(
            "seed {seed}: {apart:.3} without, {together:.3} with meshing, {} MiB copied",
            copied >> 20
        );
        assert!(together <= apart, "seed {seed}");
        plain = plain.max(apart);
    }
    assert!(plain > 1.5, "{plain}: the test is none");
}
