//! Any bytes as a trace of any format: read and replayed, or refused.

#![no_main]

use std::path::Path;

use ebb_lab::pool::kind::Kind;
use ebb_lab::pool::run::{Options, replay};
use ebb_lab::read::pool as read;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    // The first byte says what its name says.
    let Some((&first, mut content)) = data.split_first() else {
        return;
    };
    let name = if first & 1 == 0 { "trace" } else { "trace.pickle" };
    let Ok(traces) = read::read_from(&mut content, Path::new(name), &read::Options { unit: 1 }) else {
        return;
    };
    let options = Options {
        capacity: 1 << 62,
        ..Options::default()
    };
    for trace in traces {
        assert!(trace.peak_live() <= 1 << 62);
        for kind in [Kind::BestFit, Kind::Ebb] {
            let outcome = replay(trace.events.iter().cloned(), &mut *kind.make(1 << 62), &options);
            outcome.unwrap_or_else(|broken| panic!("{}: {broken}", kind.name()));
        }
    }
});
