//! Any bytes as a trace of any format: read and replayed, or refused; in memory that is in proportion to the bytes.

#![no_main]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use ebb_lab::pool::kind::Kind;
use ebb_lab::pool::run::{Options, replay};
use ebb_lab::read::pool as read;
use libfuzzer_sys::fuzz_target;

/// Counts what is allocated. libFuzzer sees that only with a sanitizer.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
/// What the program may have now.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
/// For any input, and for each byte of it: compressed ones are a thousand times as long, and an event takes some hundred bytes.
const FREE: usize = 32 << 20;
const PER_BYTE: usize = 1 << 16;

// SAFETY: every call is passed on as it is; counting touches no memory of theirs.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        if live > LIMIT.load(Ordering::Relaxed) {
            // Not a panic: nothing may unwind from here, and saying it takes memory.
            std::process::abort();
        }
        // SAFETY: by this function's contract, which is that of the one called.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: by this function's contract, which is that of the one called.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fuzz_target!(|data: &[u8]| {
    let before = LIVE.load(Ordering::Relaxed);
    LIMIT.store(before + FREE + PER_BYTE * data.len(), Ordering::Relaxed);
    one(data);
    LIMIT.store(usize::MAX, Ordering::Relaxed);
});

fn one(data: &[u8]) {
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
}
