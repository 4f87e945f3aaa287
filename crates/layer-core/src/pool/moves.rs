//! Chunks that leave the card and come back.

use ebb_alloc::Piece;
use ebb_device::Handle;

use super::{Kind, Place, Pool, Stuck};
use crate::kept::{HostCopy, Ticket};
use crate::pins::Held;

/// A chunk, by its span and its place in it. Chunks of a live span neither move nor change their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ChunkId {
    pub(crate) span: u64,
    pub(crate) index: usize,
}

/// Of these, with their lengths, what an eviction of `bytes` takes, in the order in which it takes them: large ones first,
/// because they cost fewer calls, then one that just covers the rest.
pub(crate) fn choose<T: Copy>(mut all: Vec<(T, u64)>, bytes: u64) -> Vec<(T, u64)> {
    all.sort_by_key(|(_, len)| std::cmp::Reverse(*len));
    let mut chosen = Vec::new();
    let mut rest = bytes;
    let mut at = 0;
    while rest > 0 && at < all.len() {
        if all[at].1 < rest {
            rest -= all[at].1;
            chosen.push(all[at]);
            at += 1;
            continue;
        }
        // From here on one chunk is enough: the smallest that is.
        let upto = all.partition_point(|(_, len)| *len >= rest);
        chosen.push(all.remove(upto - 1));
        rest = 0;
    }
    // The others stand ready in case one of the chosen is freed or fails.
    chosen.extend(all.drain(at..));
    chosen
}

impl Pool {
    /// The chunks on the card that an eviction may take, with their lengths. Pinned ones are passed over.
    pub(crate) fn resident(&self) -> Vec<(ChunkId, u64)> {
        self.movable()
            .filter(|(span, ..)| !self.pins.is_held(Held::Span(*span)))
            .filter_map(|(span, index, chunk_len, place)| {
                matches!(place, Place::Device(_)).then_some((ChunkId { span, index }, chunk_len))
            })
            .collect()
    }

    /// What an eviction of `bytes` takes if there is nothing but the pool.
    #[cfg(test)]
    pub(crate) fn candidates(&self, bytes: u64) -> Vec<(ChunkId, u64)> {
        choose(self.resident(), bytes)
    }

    /// Chunks of live spans.
    fn movable(&self) -> impl Iterator<Item = (u64, usize, u64, &Place)> {
        self.spans
            .iter()
            .filter(|(_, span)| matches!(span.kind, Kind::Large { .. } | Kind::Segment) && !span.freeing)
            .flat_map(|(base, span)| {
                span.chunks
                    .iter()
                    .enumerate()
                    .map(move |(i, chunk)| (*base, i, chunk.len, &chunk.place))
            })
    }

    /// Bytes that could be evicted.
    pub(crate) fn movable_bytes(&self) -> u64 {
        self.movable()
            .filter(|(span, _, _, place)| {
                matches!(place, Place::Device(_)) && !self.pins.is_held(Held::Span(*span))
            })
            .map(|(_, _, len, _)| len)
            .sum()
    }

    /// The chunks in host memory, each with its pieces there.
    pub(crate) fn evicted_chunks(&self) -> impl Iterator<Item = (&[Piece], ChunkId)> {
        self.movable().filter_map(|(span, index, _, place)| match place {
            Place::Host(copy) => Some((copy.pieces.as_slice(), ChunkId { span, index })),
            _ => None,
        })
    }

    /// Bytes in common segments of copies whose chunks came back and left again unchanged.
    pub(crate) fn steady_common(&self) -> u64 {
        let places = self.movable().map(|(.., place)| place);
        let copies = places.filter_map(|place| match place {
            Place::Host(copy) => Some(copy.steady_common()),
            _ => None,
        });
        copies.sum()
    }

    /// A chunk on the card: its address, handle and kept copy.
    pub(crate) fn on_card(&self, id: ChunkId) -> Option<(u64, Handle, Option<Ticket>)> {
        let chunk = self.spans.get(&id.span)?.chunks.get(id.index)?;
        match chunk.place {
            Place::Device(handle) => Some((chunk.at, handle, chunk.kept)),
            _ => None,
        }
    }

    /// Starts to move a chunk out: its address, length and handle, and its kept copy, which is the caller's now.
    /// `None` if it isn't there any more.
    pub(crate) fn begin_out(&mut self, id: ChunkId) -> Option<(u64, u64, Handle, Option<Ticket>)> {
        if self.pins.is_held(Held::Span(id.span)) {
            return None;
        }
        let span = self.spans.get_mut(&id.span)?;
        if span.freeing || !matches!(span.kind, Kind::Large { .. } | Kind::Segment) {
            return None;
        }
        let chunk = span.chunks.get_mut(id.index)?;
        let Place::Device(handle) = chunk.place else {
            return None;
        };
        chunk.place = Place::Moving;
        span.moving += 1;
        Some((chunk.at, chunk.len, handle, chunk.kept.take()))
    }

    fn end_move(&mut self, id: ChunkId, place: Place, kept: Option<Ticket>) -> u64 {
        let Some(span) = self.spans.get_mut(&id.span) else {
            debug_assert!(false, "a span with a moving chunk stays");
            return 0;
        };
        span.moving = span.moving.saturating_sub(1);
        let Some(chunk) = span.chunks.get_mut(id.index) else {
            return 0;
        };
        chunk.place = place;
        chunk.kept = kept;
        chunk.len
    }

    /// The chunk is in host memory and gone from the card.
    pub(crate) fn moved_out(&mut self, id: ChunkId, copy: HostCopy) {
        let len = self.end_move(id, Place::Host(copy), None);
        self.books.evicted += len;
        self.books.give(len);
    }

    /// The chunk is in host memory, its addresses are unmapped, and the driver would not take the handle back.
    pub(crate) fn moved_out_but_stuck(&mut self, id: ChunkId, copy: HostCopy, handle: Handle) {
        let len = self.end_move(id, Place::Host(copy), None);
        self.books.evicted += len;
        self.books.stuck += len;
        self.stuck.push(Stuck {
            handle,
            len,
            at: None,
            gives: false,
        });
    }

    /// The chunk stays on the card.
    pub(crate) fn stays(&mut self, id: ChunkId, handle: Handle) {
        self.end_move(id, Place::Device(handle), None);
    }

    /// Starts to move a chunk in, if there is lease for it: its address, length and copy. `Err` says how much lease is
    /// missing; `Ok(None)` that it isn't there any more.
    pub(crate) fn begin_in(&mut self, id: ChunkId) -> Result<Option<(u64, u64, HostCopy)>, u64> {
        let Some(span) = self.spans.get_mut(&id.span) else {
            return Ok(None);
        };
        if span.freeing {
            return Ok(None);
        }
        let Some(chunk) = span.chunks.get_mut(id.index) else {
            return Ok(None);
        };
        let Place::Host(copy) = &chunk.place else {
            return Ok(None);
        };
        if !self.books.alone && self.books.unused() < chunk.len {
            return Err(chunk.len - self.books.unused());
        }
        let copy = copy.clone();
        chunk.place = Place::Moving;
        span.moving += 1;
        let (at, len) = (chunk.at, chunk.len);
        self.books.take(len);
        Ok(Some((at, len, copy)))
    }

    /// Starts to move the copy of a chunk that is away: its length and copy. `None` if it is not away any more.
    pub(crate) fn begin_rehome(&mut self, id: ChunkId) -> Option<(u64, HostCopy)> {
        let span = self.spans.get_mut(&id.span).filter(|span| !span.freeing)?;
        let chunk = span.chunks.get_mut(id.index)?;
        let Place::Host(copy) = &chunk.place else {
            return None;
        };
        let found = (chunk.len, copy.clone());
        chunk.place = Place::Moving;
        span.moving += 1;
        Some(found)
    }

    /// The bytes of a chunk that is away are there from now on.
    pub(crate) fn rehomed(&mut self, id: ChunkId, copy: HostCopy) {
        self.end_move(id, Place::Host(copy), None);
    }

    /// The chunk is on the card; its copy is the caller's, or kept.
    pub(crate) fn moved_in(&mut self, id: ChunkId, handle: Handle, kept: Option<Ticket>) -> u64 {
        let len = self.end_move(id, Place::Device(handle), kept);
        self.books.evicted -= len;
        len
    }

    /// The chunk stays in host memory. What the driver would not take back of the attempt is in `stuck`.
    pub(crate) fn not_moved_in(&mut self, id: ChunkId, copy: HostCopy, stuck: Option<Stuck>) {
        let len = self.end_move(id, Place::Host(copy), None);
        match stuck {
            Some(one) => {
                self.books.stuck += len;
                self.stuck.push(one);
            }
            None => self.books.give(len),
        }
    }
}
