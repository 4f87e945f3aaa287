//! [`Builder`]: what was recorded by address becomes a [`Trace`] with slots.

use std::collections::HashMap;

use crate::pool::event::{Event, Notes, Op, Recorded, Slot, Stream, Trace};

/// A trace in the making.
#[derive(Debug, Default)]
pub(super) struct Builder {
    trace: Trace,
    /// Live blocks by what the recording calls them.
    live: HashMap<u64, (Slot, Stream)>,
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
    pub(super) fn at_start(&mut self, key: u64, size: u64, stream: u64) {
        let before = self.trace.events.len();
        self.allocate(key, size, stream);
        if self.trace.events.len() > before {
            self.trace.preamble = self.trace.events.len();
            self.trace.notes.at_start += 1;
            self.trace.notes.at_start_bytes += size;
        }
    }

    /// A block that the recording calls `key`.
    pub(super) fn allocate(&mut self, key: u64, size: u64, stream: u64) {
        if size == 0 {
            self.trace.notes.ignored += 1;
            return;
        }
        let stream = self.stream(stream);
        if let Some((slot, owner)) = self.live.remove(&key) {
            self.trace.notes.missed_frees += 1;
            self.vacate(slot, owner);
        }
        let slot = self.empty.pop().unwrap_or_else(|| {
            self.trace.slots += 1;
            self.trace.slots - 1
        });
        self.live.insert(key, (slot, stream));
        self.push(Op::Allocate { slot, size, stream });
    }

    /// The block is needed no more; without a stream, the last to use it is the one that it was allocated on.
    pub(super) fn free(&mut self, key: u64, stream: Option<u64>) {
        let stream = stream.map(|stream| self.stream(stream));
        match self.live.remove(&key) {
            Some((slot, owner)) => self.vacate(slot, stream.unwrap_or(owner)),
            None => self.trace.notes.unknown_frees += 1,
        }
    }

    /// All work is done.
    pub(super) fn synchronize(&mut self) {
        self.push(Op::Synchronize);
    }

    /// The process has ended: its blocks are freed, in the order of their slots.
    pub(super) fn end(&mut self) {
        let mut left: Vec<(Slot, Stream)> = self.live.drain().map(|(_, block)| block).collect();
        left.sort_unstable();
        for (slot, stream) in left {
            self.vacate(slot, stream);
        }
        let streams = 0..self.trace.streams;
        self.push(Op::End { streams });
    }

    /// The recorded allocator took a segment.
    pub(super) fn reserve(&mut self, bytes: u64) {
        self.reserved += bytes;
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

    fn vacate(&mut self, slot: Slot, stream: Stream) {
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
