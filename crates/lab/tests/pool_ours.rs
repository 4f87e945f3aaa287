//! Our pool on real traces: what it promises. The data is found as in `pool_data.rs`; without it these tests say so and check nothing.

use std::collections::BTreeSet;
use std::path::PathBuf;

use ebb_lab::pool::event::{Event, Op, Trace};
use ebb_lab::pool::mix::Mix;
use ebb_lab::pool::ours::Ours;
use ebb_lab::pool::run::{Options, Outcome, replay};
use ebb_lab::read::pool as read;

const GRANULE: u64 = 2 << 20;

fn data() -> Option<PathBuf> {
    let beside = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data"));
    let folder = std::env::var_os("EBB_DATA").map_or_else(beside, PathBuf::from);
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!(
        "SKIPPED: no data in {}; name its folder by EBB_DATA",
        folder.display()
    );
    None
}

/// All traces of a folder of the data, each file a trace.
fn traces(folder: &str) -> Vec<Trace> {
    let Some(data) = data() else {
        return Vec::new();
    };
    let mut files: Vec<PathBuf> = std::fs::read_dir(data.join(folder))
        .unwrap_or_else(|error| panic!("{folder}: {error}"))
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.to_string_lossy().contains(".csv"))
        .collect();
    files.sort();
    files
        .iter()
        .flat_map(|path| {
            read::read(path, &read::Options::default()).unwrap_or_else(|error| panic!("{error}"))
        })
        .collect()
}

fn play(events: impl IntoIterator<Item = Event>, policy: &mut Ours, capacity: u64) -> Outcome {
    let options = Options {
        capacity,
        ..Options::default()
    };
    replay(events, policy, &options).unwrap_or_else(|broken| panic!("{broken}"))
}

#[test]
fn pytorch_needs_one_percent_and_three_granules_more_than_is_live() {
    for trace in traces("pytorch-snapshots/traces") {
        let outcome = play(trace.events.iter().cloned(), &mut Ours::new(1 << 62), 1 << 62);
        let most = outcome.peak_live + outcome.peak_live / 100 + 3 * GRANULE;
        assert!(
            outcome.peak_physical <= most,
            "{}: {} of {}",
            trace.name,
            outcome.peak_physical,
            outcome.peak_live
        );
    }
}

#[test]
fn static_problems_in_granules_need_what_is_live() {
    for folder in ["static-planning/minimalloc", "static-planning/idealloc"] {
        for trace in traces(folder) {
            // Enough for a debug build: the others differ in size only.
            if trace.events.len() > 3000 {
                continue;
            }
            let outcome = play(trace.events.iter().cloned(), &mut Ours::new(1 << 62), 1 << 62);
            assert_eq!(outcome.peak_physical, outcome.peak_live, "{}", trace.name);
        }
    }
}

/// The trace again and again: what lives from before its beginning stays, what is left at its end is freed.
fn round(trace: &Trace, first: bool) -> Vec<Event> {
    let mut live = BTreeSet::new();
    let lasting: BTreeSet<u32> = {
        let mut slots = BTreeSet::new();
        for event in &trace.events[..trace.preamble] {
            if let Op::Allocate { slot, .. } = event.op {
                slots.insert(slot);
            }
        }
        for event in &trace.events[trace.preamble..] {
            if let Op::Free { slot, .. } = event.op {
                slots.remove(&slot);
            }
        }
        slots
    };
    let mut events = Vec::new();
    for (number, event) in trace.events.iter().enumerate() {
        match event.op {
            Op::Allocate { slot, .. } => {
                if !first && number < trace.preamble && lasting.contains(&slot) {
                    continue;
                }
                live.insert(slot);
            }
            Op::Free { slot, .. } => {
                live.remove(&slot);
            }
            Op::Synchronize | Op::End { .. } => {}
        }
        events.push(event.clone());
    }
    let at_ns = trace.span_ns();
    events.extend(live.difference(&lasting).map(|&slot| Event {
        at_ns,
        op: Op::Free { slot, stream: 0 },
    }));
    events
}

#[test]
fn training_loops_map_nothing_from_the_third_round_on() {
    const ROUNDS: usize = 5;
    for trace in traces("pytorch-snapshots/traces") {
        if trace.streams > 1 {
            continue;
        }
        let rounds = |count: usize| {
            let events = (0..count).flat_map(|n| {
                let span = trace.span_ns() + 1;
                round(&trace, n == 0).into_iter().map(move |event| Event {
                    at_ns: event.at_ns + span * n as u64,
                    op: event.op,
                })
            });
            play(events, &mut Ours::new(1 << 62), 1 << 62)
        };
        let (warm, long) = (rounds(2), rounds(ROUNDS));
        assert!(warm.map_calls > 0);
        assert_eq!(long.map_calls, warm.map_calls, "{}", trace.name);
        assert_eq!(long.peak_physical, warm.peak_physical, "{}", trace.name);
    }
}

#[test]
fn a_day_of_jobs_needs_two_percent_more_and_nobody_is_refused_without_cause() {
    let traces: Vec<Trace> = traces("pytorch-snapshots/traces")
        .into_iter()
        .filter(|trace| trace.events.len() < 4000)
        .collect();
    if traces.is_empty() {
        return;
    }
    // By hand: EBB_CASES says how many days.
    let days: u64 = std::env::var("EBB_CASES").map_or(2, |text| text.parse().expect("a number"));
    for seed in 1..=days {
        let free = play(Mix::new(&traces, seed), &mut Ours::new(1 << 62), 1 << 62);
        assert!(
            free.peak_physical <= free.peak_live + free.peak_live / 50,
            "seed {seed}"
        );
        let capacity = (free.peak_live + free.peak_live / 50) / GRANULE * GRANULE;
        let tight = play(Mix::new(&traces, seed), &mut Ours::new(capacity), capacity);
        assert_eq!((tight.refused, tight.unjustified), (0, 0), "seed {seed}");
    }
}

/// Recorded programs leave little to bring together: whoever does it in their pauses needs no more than before, and every table is right.
#[test]
fn meshing_in_every_pause_needs_no_more() {
    for trace in traces("pytorch-snapshots/traces") {
        if trace.events.len() > 4000 {
            continue;
        }
        let mut ours = Ours::meshing(1 << 62);
        let outcome = play(trace.events.iter().cloned(), &mut ours, 1 << 62);
        ours.pool()
            .check()
            .unwrap_or_else(|what| panic!("{}: {what}", trace.name));
        let most = outcome.peak_live + outcome.peak_live / 100 + 3 * GRANULE;
        assert!(
            outcome.peak_physical <= most,
            "{}: {}",
            trace.name,
            outcome.peak_physical
        );
        let ratio = outcome.peak_physical as f64 / outcome.peak_live as f64;
        eprintln!("{}: {ratio:.4}, {} bytes copied", trace.name, outcome.copied);
    }
}
