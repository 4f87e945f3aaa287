//! Real traces: what their publishers say of them, and what the baselines need on them.
//!
//! The data is not part of the repository: `EBB_DATA` names its folder, or it lies in `../shared/data` beside the repository. Without it
//! these tests say so and check nothing.

use std::path::PathBuf;

use ebb_lab::pool::event::Trace;
use ebb_lab::pool::kind::Kind;
use ebb_lab::pool::mix::Mix;
use ebb_lab::pool::run::{Options, Outcome, replay};
use ebb_lab::read::pool as read;

/// The folder of the data.
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

fn trace(file: &str, unit: u64) -> Option<Trace> {
    let path = data()?.join(file);
    let mut traces = read::read(&path, &read::Options { unit }).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(traces.len(), 1, "{file}");
    traces.pop()
}

fn outcome(trace: &Trace, kind: Kind) -> Outcome {
    let options = Options {
        capacity: 1 << 62,
        ..Options::default()
    };
    replay(
        trace.events.iter().cloned(),
        &mut *kind.make(options.capacity),
        &options,
    )
    .unwrap_or_else(|broken| panic!("{}: {broken}", kind.name()))
}

const MIB: f64 = (1 << 20) as f64;

/// Percent more, to one digit.
fn over(bytes: u64, of: u64) -> f64 {
    ((bytes as f64 / of as f64 - 1.0) * 1000.0).round() / 10.0
}

/// A trace of PyTorch as its publisher describes it: MiB live at the start, at the peak in blocks of 512 B, and in segments; and
/// what a buddy allocator needs above the peak, in percent.
const PYTORCH: [(&str, f64, f64, f64, f64); 8] = [
    ("medium_128_inference", 1622.5, 1656.5, 1682.0, 4.3),
    ("medium_512_inference", 1622.7, 1859.0, 1890.0, 6.7),
    ("medium_1024_inference", 1622.9, 2744.1, 3056.0, 11.9),
    ("medium_128_training", 4859.3, 6688.4, 6900.0, 8.1),
    ("medium_256_training", 4859.4, 8681.8, 8836.0, 3.2),
    ("medium_1024_training", 4859.8, 23085.8, 24012.0, 3.1),
    ("small_memory_forward_fp32_128", 499.5, 531.0, 582.0, 70.2),
    ("small_mem_snapshot", 0.0, 3098.6, 3606.0, 15.7),
];

#[test]
fn pytorchs_traces_are_what_their_publisher_says() {
    for (name, at_start, peak, reserved, buddy) in PYTORCH {
        let Some(trace) = trace(&format!("pytorch-snapshots/traces/{name}.csv.gz"), 1) else {
            return;
        };
        let close = |bytes: u64, mib: f64| (bytes as f64 / MIB - mib).abs() <= 0.06;
        assert!(close(trace.peak_live_rounded(512), peak), "{name}");
        assert!(close(trace.recorded.unwrap().peak_reserved, reserved), "{name}");
        let start_only = Trace {
            events: trace.events[..trace.preamble].to_vec(),
            ..trace.clone()
        };
        assert!(close(start_only.peak_live_rounded(512), at_start), "{name}");
        assert_eq!(
            (trace.notes.unknown_frees, trace.notes.missed_frees),
            (0, 0),
            "{name}"
        );
        let needs = outcome(&trace, Kind::Buddy);
        assert_eq!(over(needs.peak_physical, needs.peak_rounded), buddy, "{name}");
    }
}

/// The model takes its own segments for what was there at the start, so that it cannot agree to the byte where recording began late.
/// Where it began with the program, it does.
#[test]
fn the_model_of_pytorch_reserves_what_pytorch_reserved() {
    for (name, at_start, _, reserved, _) in PYTORCH {
        let Some(trace) = trace(&format!("pytorch-snapshots/traces/{name}.csv.gz"), 1) else {
            return;
        };
        let modelled = outcome(&trace, Kind::Torch).peak_physical as f64 / MIB;
        let most = if at_start == 0.0 { 0.0 } else { 0.005 };
        assert!(
            (modelled / reserved - 1.0).abs() <= most,
            "{name}: {modelled} MiB modelled, {reserved} MiB recorded"
        );
    }
}

#[test]
fn textbook_allocators_need_what_is_known_of_static_problems() {
    // First fit and buddy in percent above the lower bound. Best fit depends on which of equal holes is taken.
    let known = [
        ("minimalloc/A.1048576.csv", 1_048_576, 53.4, 200.0),
        ("minimalloc/B.1048576.csv", 1_048_576, 69.3, 200.0),
        ("minimalloc/D.1048576.csv", 986_112, 56.9, 139.3),
        ("minimalloc/E.1048576.csv", 1_048_576, 89.0, 150.0),
        ("minimalloc/G.1048576.csv", 1_048_576, 28.1, 75.0),
        ("minimalloc/H.1048576.csv", 1_048_576, 23.9, 62.5),
        ("minimalloc/I.1048576.csv", 1_048_576, 55.4, 200.0),
        ("idealloc/resnet50.csv", 1_515_472_556, 0.9, 34.0),
        ("idealloc/G_1.csv", 3_030_937_746, 0.9, 77.1),
        ("idealloc/pangu_2.6B.csv.gz", 5_530_099_775, 12.2, 74.7),
    ];
    let unit = 2 << 20;
    for (file, bound, first_fit, buddy) in known {
        let Some(trace) = trace(&format!("static-planning/{file}"), unit) else {
            return;
        };
        assert_eq!(trace.peak_live(), bound * unit, "{file}");
        let needs = |kind| over(outcome(&trace, kind).peak_physical, bound * unit);
        assert_eq!(needs(Kind::FirstFit), first_fit, "{file}");
        assert_eq!(needs(Kind::Buddy), buddy, "{file}");
    }
}

#[test]
fn every_run_of_salus_is_read() {
    let Some(trace) = trace("salus/workloads.csv", 1) else {
        return;
    };
    assert_eq!(trace.events.len(), 99 * 3);
    assert_eq!(trace.notes, Default::default());
}

#[test]
fn a_snapshot_says_the_same_as_the_table_made_of_it() {
    let Some(mut raw) = trace("pytorch-snapshots/raw/small_mem_snapshot.pickle.gz", 1) else {
        return;
    };
    let Some(table) = trace("pytorch-snapshots/traces/small_mem_snapshot.csv.gz", 1) else {
        return;
    };
    raw.name.clone_from(&table.name);
    assert_eq!(raw, table);
    let modelled = outcome(&raw, Kind::Torch).peak_physical;
    assert_eq!(
        Some(modelled),
        raw.recorded.map(|recorded| recorded.peak_reserved)
    );
}

/// Our pool on the traces: what `SPECIFICATION.md` promises.
#[test]
fn our_pool_needs_hardly_more_than_what_is_live() {
    let granule = 2 << 20;
    for (name, ..) in PYTORCH {
        let Some(trace) = trace(&format!("pytorch-snapshots/traces/{name}.csv.gz"), 1) else {
            return;
        };
        let ours = outcome(&trace, Kind::Ebb);
        let most = ours.peak_live + ours.peak_live / 100 + 2 * granule;
        assert!(
            ours.peak_physical <= most,
            "{name}: {} of {most}",
            ours.peak_physical
        );
    }
    for file in [
        "minimalloc/A.1048576.csv",
        "minimalloc/I.1048576.csv",
        "idealloc/resnet50.csv",
    ] {
        let Some(trace) = trace(&format!("static-planning/{file}"), granule) else {
            return;
        };
        let ours = outcome(&trace, Kind::Ebb);
        assert_eq!(ours.peak_physical, ours.peak_live, "{file}");
    }
}

#[test]
fn our_pool_serves_a_day_of_jobs_on_a_card_of_what_is_live() {
    let mut traces = Vec::new();
    for name in [
        "medium_512_inference",
        "small_memory_forward_fp32_128",
        "small_mem_snapshot",
    ] {
        let Some(trace) = trace(&format!("pytorch-snapshots/traces/{name}.csv.gz"), 1) else {
            return;
        };
        traces.push(trace);
    }
    let seed = 11;
    let day = || Mix::new(&traces, seed).take(40_000);
    let on = |capacity| {
        let options = Options {
            capacity,
            ..Options::default()
        };
        replay(day(), &mut *Kind::Ebb.make(capacity), &options)
            .unwrap_or_else(|broken| panic!("seed {seed}: {broken}"))
    };
    let free = on(1 << 46);
    assert!(
        free.peak_physical <= free.peak_live + free.peak_live / 50,
        "seed {seed}"
    );
    let tight = on((free.peak_live + free.peak_live / 50).next_multiple_of(2 << 20));
    assert_eq!((tight.refused, tight.unjustified), (0, 0), "seed {seed}");
}
