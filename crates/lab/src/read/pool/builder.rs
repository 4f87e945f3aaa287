//! [`Builder`]: what was recorded by address becomes a [`Trace`] with slots.

use std::collections::HashMap;

use crate::pool::event::{Event, Notes, Op, Recorded, Slot, Stream, Trace};

/// More live bytes than any allocator could be asked to hold: sums over them must not overflow.
const MOST_LIVE: u64 = 1 << 62;

/// The live bytes have passed [`MOST_LIVE`].
#[derive(Debug)]
pub(super) struct TooMuch;

impl TooMuch {
    /// What the size should have been.
    pub(super) const EXPECTED: &str = "less: more than 2^62 bytes would be live at once";
}

/// A block that is live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Live {
    slot: Slot,
    stream: Stream,
    size: u64,
}

/// The traces of several cards: named by it if there are several.
pub(super) fn by_card(cards: impl IntoIterator<Item = (u64, Builder)>) -> Vec<Trace> {
    let cards: Vec<(u64, Builder)> = cards.into_iter().collect();
    let several = cards.len() > 1;
    let named = cards.into_iter().map(|(card, builder)| {
        builder.finish(&if several {
            format!(":gpu{card}")
        } else {
            String::new()
        })
    });
    named.collect()
}

/// A trace in the making.
#[derive(Debug, Default)]
pub(super) struct Builder {
    trace: Trace,
    /// Live blocks by what the recording calls them.
    live: HashMap<u64, Live>,
    live_bytes: u64,
    empty: Vec<Slot>,
    streams: HashMap<u64, Stream>,
    now_ns: u64,
    reserved: u64,
    recorded: Option<Recorded>,
}

impl Builder {
    /// What was odd, for the reader to count what it leaves out.
    pub(super) fn notes(&mut self) -> &mut Notes {
        &mut self.trace.notes
    }

    /// The time of what comes next. Clocks of several threads may step back a little: time stands still then.
    pub(super) fn at(&mut self, ns: u64) {
        self.now_ns = self.now_ns.max(ns);
    }

    /// A block that was there when recording began. All of them come before everything else.
    pub(super) fn at_start(&mut self, key: u64, size: u64, stream: u64) -> Result<(), TooMuch> {
        self.allocate(key, size, stream)?;
        if size > 0 {
            self.trace.preamble = self.trace.events.len();
            self.trace.notes.at_start += 1;
            self.trace.notes.at_start_bytes += size;
        }
        Ok(())
    }

    /// A block that the recording calls `key`.
    pub(super) fn allocate(&mut self, key: u64, size: u64, stream: u64) -> Result<(), TooMuch> {
        if size == 0 {
            self.trace.notes.ignored += 1;
            return Ok(());
        }
        if let Some(missed) = self.live.remove(&key) {
            self.trace.notes.missed_frees += 1;
            self.vacate(missed, missed.stream);
        }
        if size > MOST_LIVE - self.live_bytes {
            return Err(TooMuch);
        }
        self.live_bytes += size;
        let stream = self.stream(stream);
        let slot = self.empty.pop().unwrap_or_else(|| {
            self.trace.slots += 1;
            self.trace.slots - 1
        });
        self.live.insert(key, Live { slot, stream, size });
        self.push(Op::Allocate { slot, size, stream });
        Ok(())
    }

    /// The block is needed no more; without a stream, the last to use it is the one that it was allocated on.
    pub(super) fn free(&mut self, key: u64, stream: Option<u64>) {
        match self.live.remove(&key) {
            Some(block) => {
                let stream = stream.map_or(block.stream, |stream| self.stream(stream));
                self.vacate(block, stream);
            }
            None => self.trace.notes.unknown_frees += 1,
        }
    }

    /// All work is done.
    pub(super) fn synchronize(&mut self) {
        self.push(Op::Synchronize);
    }

    /// The process has ended: its blocks are freed, in the order of their slots.
    pub(super) fn end(&mut self) {
        let mut left: Vec<Live> = self.live.drain().map(|(_, block)| block).collect();
        left.sort_unstable();
        for block in left {
            self.vacate(block, block.stream);
        }
        let streams = 0..self.trace.streams;
        self.push(Op::End { streams });
    }

    /// The recorded allocator took a segment.
    pub(super) fn reserve(&mut self, bytes: u64) {
        self.reserved = self.reserved.saturating_add(bytes);
        let recorded = self.recorded.get_or_insert_default();
        recorded.peak_reserved = recorded.peak_reserved.max(self.reserved);
    }

    /// The recorded allocator gave a segment back.
    pub(super) fn unreserve(&mut self, bytes: u64) {
        self.reserved = self.reserved.saturating_sub(bytes);
    }

    /// Whether a block of this name is live.
    pub(super) fn knows(&self, key: u64) -> bool {
        self.live.contains_key(&key)
    }

    /// The trace, with a name that is added to the file's.
    pub(super) fn finish(mut self, suffix: &str) -> Trace {
        self.trace.name = suffix.to_owned();
        self.trace.recorded = self.recorded;
        self.trace.streams = self.trace.streams.max(1);
        self.trace
    }

    fn stream(&mut self, raw: u64) -> Stream {
        let next = self.trace.streams;
        let stream = *self.streams.entry(raw).or_insert(next);
        self.trace.streams = next.max(stream + 1);
        stream
    }

    fn vacate(&mut self, block: Live, stream: Stream) {
        let Live { slot, size, .. } = block;
        self.live_bytes -= size;
        self.empty.push(slot);
        self.push(Op::Free { slot, stream });
    }

    fn push(&mut self, op: Op) {
        self.trace.events.push(Event {
            at_ns: self.now_ns,
            op,
        });
    }
}
