//! Small traces of every format in every writing that we know of, as they are and spoilt: read and replayed, or refused, never a panic. The
//! files are also what the fuzz target `readers` begins with.
//!
//! `EBB_CASES` says how often each is spoilt. What is spoilt comes from the file and a number, which a failure names.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use ebb_lab::pool::event::Trace;
use ebb_lab::pool::kind::Kind;
use ebb_lab::pool::run::{Options, replay};
use ebb_lab::read::pool as read;
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};

fn files() -> Vec<PathBuf> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/traces");
    let entries = std::fs::read_dir(folder).expect("the folder is part of the source");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    assert!(files.len() > 10);
    files
}

fn replayed(traces: Vec<Trace>) -> usize {
    let options = Options {
        capacity: 1 << 62,
        ..Options::default()
    };
    for trace in &traces {
        for kind in [Kind::BestFit, Kind::Ebb] {
            let outcome = replay(trace.events.iter().cloned(), &mut *kind.make(1 << 62), &options);
            // Sizes near the limit leave no room for rounding.
            let outcome = outcome.unwrap_or_else(|broken| panic!("{}: {broken}", kind.name()));
            assert!(trace.peak_live() > 1 << 50 || outcome.refused + outcome.unjustified == 0);
        }
    }
    traces.len()
}

#[test]
fn every_writing_is_read() {
    for path in files() {
        let traces = read::read(&path, &read::Options::default()).unwrap_or_else(|error| panic!("{error}"));
        assert!(replayed(traces) > 0, "{}", path.display());
    }
}

#[test]
fn snapshots_say_the_same_in_every_version_of_pickle() {
    let read = |version: u32| {
        let name = format!("/tests/traces/snapshot-{version}.pickle");
        let path = format!("{}{name}", env!("CARGO_MANIFEST_DIR"));
        let traces = read::read(Path::new(&path), &read::Options::default()).unwrap();
        traces
            .into_iter()
            .map(|trace| (trace.events, trace.notes, trace.recorded))
            .collect::<Vec<_>>()
    };
    let first = read(0);
    // Cards 0 and 2; what lives at the start of each, oom and all.
    assert_eq!(first.len(), 2);
    assert_eq!((first[0].1.out_of_memory, first[0].1.at_start), (1, 0));
    assert_eq!(first[0].2.unwrap().peak_reserved, 20 << 20);
    for version in 1..6 {
        assert_eq!(read(version), first, "version {version}");
    }
}

#[test]
fn what_is_spoilt_is_refused_or_replayed() {
    let cases: u64 = std::env::var("EBB_CASES").map_or(150, |text| text.parse().expect("a number"));
    let parts: [&[u8]; 12] = [
        b"\n",
        b",",
        b"\"",
        b"-1",
        b"18446744073709551615",
        b"\xff\xfe",
        b"\x00",
        b"NaN",
        b"1e400",
        b"(",
        b"}",
        b"\x80\x05",
    ];
    for path in files() {
        let whole = std::fs::read(&path).expect("it is there");
        for case in 0..cases {
            let mut random = Pcg64Mcg::seed_from_u64(case);
            let mut below = |n: usize| (random.next_u64() % n.max(1) as u64) as usize;
            let mut bytes = whole.clone();
            for _ in 0..1 + below(4) {
                let at = below(bytes.len());
                match below(6) {
                    0 => bytes.truncate(at),
                    1 if !bytes.is_empty() => bytes[at] = below(256) as u8,
                    2 if !bytes.is_empty() => _ = bytes.remove(at),
                    3 => _ = bytes.splice(at..at, parts[below(parts.len())].iter().copied()),
                    4 => {
                        let end = (at + below(40)).min(bytes.len());
                        let again = bytes[at..end].to_vec();
                        bytes.splice(at..at, again);
                    }
                    _ if !bytes.is_empty() => bytes[at] ^= 1 << below(8),
                    _ => {}
                }
            }
            let done = catch_unwind(AssertUnwindSafe(|| {
                match read::read_from(&mut &bytes[..], &path, &read::Options::default()) {
                    Ok(traces) => _ = replayed(traces),
                    Err(error) => assert!(error.to_string().len() < 600, "{error}"),
                }
            }));
            assert!(done.is_ok(), "{} spoilt by {case}", path.display());
        }
    }
}
