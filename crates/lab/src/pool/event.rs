//! [`Trace`]: what one process did with the memory of one card, in order.
//!
//! Blocks have *slots*, not addresses: where a block lies is for the replayed policy to say. A slot is free for another
//! block once its block is freed, so that slots stay few and tables over them small.

use std::ops::Range;

/// Number of a slot, below [`Trace::slots`].
pub type Slot = u32;
/// Number of a stream, below [`Trace::streams`]. Streams are numbered in the order in which they are seen.
pub type Stream = u32;

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// A block of `size` bytes (at least 1) that `stream` uses.
    Allocate {
        /// Where its address is kept until it is freed; empty until now.
        slot: Slot,
        /// Bytes, as the program asked for them.
        size: u64,
        /// Who uses it.
        stream: Stream,
    },
    /// The program needs the block no more. Work of `stream` that uses it may not be done yet.
    Free {
        /// Of the block; empty from now on.
        slot: Slot,
        /// Whose work used it last.
        stream: Stream,
    },
    /// All work on the card is done.
    Synchronize,
    /// A process has ended: it used these streams, its blocks are freed, and its work is done.
    End {
        /// Its streams, which are not seen again before another process uses the same numbers.
        streams: Range<Stream>,
    },
}

/// What happened and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Since the start of the trace. Logical in traces that have no clock. Never goes back.
    pub at_ns: u64,
    /// What.
    pub op: Op,
}

/// What the recorder said about the allocator that it watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recorded {
    /// The most that its segments took at once.
    pub peak_reserved: u64,
}

/// What a reader met in a file and had to decide upon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Notes {
    /// Blocks that were there when recording began: allocated first, in order of their addresses.
    pub at_start: u64,
    /// Their bytes.
    pub at_start_bytes: u64,
    /// Frees of an address at which no block was known: left out.
    pub unknown_frees: u64,
    /// Allocations at an address whose block was never freed: it is freed just before.
    pub missed_frees: u64,
    /// Allocations of nothing, and events of kinds that say nothing about memory: left out.
    pub ignored: u64,
    /// Out-of-memory errors that the recorder saw.
    pub out_of_memory: u64,
}

/// One process on one card.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trace {
    /// The file, and the card if the file has several.
    pub name: String,
    /// In order of time.
    pub events: Vec<Event>,
    /// How many slots they use.
    pub slots: u32,
    /// How many streams they use.
    pub streams: u32,
    /// How many of the first events set up what was there when recording began.
    pub preamble: usize,
    /// What the recorder said, if it did.
    pub recorded: Option<Recorded>,
    /// What was odd.
    pub notes: Notes,
}

impl Trace {
    /// Largest sum of live bytes, as the program asked for them.
    #[must_use]
    pub fn peak_live(&self) -> u64 {
        self.peak_live_rounded(1)
    }

    /// Largest sum of live bytes if each block is rounded up to a multiple of `unit` (at least 1).
    #[must_use]
    pub fn peak_live_rounded(&self, unit: u64) -> u64 {
        let mut sizes = vec![0u64; self.slots as usize];
        let (mut live, mut peak) = (0u64, 0u64);
        for event in &self.events {
            match event.op {
                Op::Allocate { slot, size, .. } => {
                    sizes[slot as usize] = size.div_ceil(unit) * unit;
                    live += sizes[slot as usize];
                    peak = peak.max(live);
                }
                Op::Free { slot, .. } => live -= std::mem::take(&mut sizes[slot as usize]),
                Op::Synchronize | Op::End { .. } => {}
            }
        }
        peak
    }

    /// Time from the first to the last event.
    #[must_use]
    pub fn span_ns(&self) -> u64 {
        self.events.last().map_or(0, |last| last.at_ns)
    }
}
