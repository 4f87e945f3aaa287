//! One device's memory as books: which addresses are whose, which chunk is where, how much lease is used.
//!
//! Nothing here calls the driver or waits; everything runs under the device's lock and is a few map operations. What has
//! to be done on the device is handed out as values ([`Plan`], [`Dismantle`]) and entered when it is done.
//!
//! # Words
//! * *span*: a run of device addresses with one purpose; made of *chunks*, each one physical handle.
//! * *charged*: spans of live allocations and segments in use, rounded to granules, and memory that passes us by.
//! * *used*: physical bytes that exist on the card because of us. `charged + cached + stuck` when nothing is evicted.
//!
//! # Invariants
//! * `used <= lease` unless the engine is alone, where lease follows use.
//! * A span is in exactly one of: live, a segment, cached, building. Its chunks cover it without a gap.
//! * A freed span leaves no entry behind.

mod books;
mod moves;
mod program;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use ebb_alloc::{AddressSpace, Blocks, Piece};
use ebb_device::Handle;

use crate::error::FreeError;
use crate::kept::{HostCopy, Ticket};
use crate::pins::{Held, PinError, Pins};
pub(crate) use books::Books;
pub(crate) use moves::{ChunkId, choose};

/// Smaller allocations share segments.
const SMALL: u64 = 1 << 20;
/// A segment for small allocations (or the granularity, if that is more).
const SEGMENT: u64 = 2 << 20;

/// How an allocation of `len` bytes (whole granules) is cut into physical chunks.
///
/// Measured on an H200: a handle costs about 16 µs to create and map and 45 to 115 µs to unmap and release, whatever its
/// size; one set-access covers the whole span. Copying 64 MiB takes 1.2 ms, so that either size hides the calls for one
/// chunk behind the copy of another, and 8 GiB are 64 handles, about 11 ms of calls in all (4,096 handles: 480 ms).
/// Not larger: a reclaim takes whole chunks, and a pipeline is as long as its first and last piece.
pub(crate) fn chunk_size(len: u64, granule: u64, largest: u64) -> u64 {
    let target = if len < largest.saturating_mul(4) {
        largest / 2
    } else {
        largest
    };
    target.max(1).next_multiple_of(granule).min(len)
}

/// Where a chunk's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// On the card, mapped.
    Device(Handle),
    /// In the arena.
    Host(HostCopy),
    /// The owner thread is moving it and knows the rest.
    Moving,
}

/// A chunk of a span.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) place: Place,
    /// While it is on the card: the copy of what it was when it came back.
    pub(crate) kept: Option<Ticket>,
}

/// What a span is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// One live allocation.
    Large { size: u64, tag: Tag },
    /// Small allocations.
    Segment,
    /// Nobody's, mapped, for the next allocation. The number orders them by age.
    Cached { age: u64 },
    /// The driver is being asked.
    Building,
}

/// What an allocation is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    pub(crate) owner: u64,
    pub(crate) id: u64,
}

#[derive(Debug)]
struct Span {
    len: u64,
    kind: Kind,
    chunks: Vec<Chunk>,
    /// Chunks that the owner thread is moving.
    moving: u32,
    /// A free waits for the moving ones; nobody starts to move another one.
    freeing: bool,
}

/// A handle (and perhaps its mapping) that the driver would not take back. It is tried again later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stuck {
    pub(crate) handle: Handle,
    pub(crate) len: u64,
    /// Where it is still mapped.
    pub(crate) at: Option<u64>,
    /// The addresses belong to nobody else: they are free as soon as it is unmapped.
    pub(crate) gives: bool,
}

/// Chunks to be unmapped and released. Their span is in no table any more.
#[derive(Clone, Debug, Default)]
pub(crate) struct Dismantle {
    pub(crate) chunks: Vec<(u64, u64, Handle)>,
}

/// What an allocation needs next.
#[derive(Debug)]
pub(crate) enum Plan {
    /// Done.
    Ready(u64),
    /// Build this span, then enter it with [`Pool::built`] or [`Pool::not_built`].
    Build { base: u64, len: u64, chunk: u64 },
    /// Take these apart, then ask again: their room is needed.
    Drop(Dismantle),
    /// There is not lease enough for so many bytes.
    Short(u64),
    /// More addresses are needed, at least so many.
    Addresses(u64),
    /// The limit forbids it.
    OverLimit { charged: u64, limit: u64 },
}

/// What a free leaves to do.
#[derive(Debug)]
pub(crate) enum Freed {
    /// Nothing on the device.
    Done,
    /// Take these apart and give these pieces back.
    Apart(Dismantle, Vec<Piece>),
    /// Chunks of this span are being moved: wait for a change and call [`Pool::free_span`].
    Wait(u64),
}

/// A span as other processes see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) number: u64,
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) chunks: Vec<(u64, Handle)>,
}

/// A live allocation as the pool knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) base: u64,
    pub(crate) size: u64,
    pub(crate) tag: Tag,
}

/// The books of one device.
#[derive(Debug)]
pub(crate) struct Pool {
    granule: u64,
    space: AddressSpace,
    spans: BTreeMap<u64, Span>,
    /// Length and start of cached spans; age and start of the same.
    cache: BTreeSet<(u64, u64)>,
    cache_by_age: BTreeSet<(u64, u64)>,
    cache_max: u64,
    chunk_max: u64,
    ages: u64,
    blocks: Blocks<Tag>,
    stuck: Vec<Stuck>,
    /// Kept copies of what was freed, to be given up.
    outdated: Vec<Ticket>,
    remains: Vec<crate::vmm::Remains>,
    live_large: u64,
    next_id: u64,
    /// What must not be moved.
    pub(crate) pins: Pins,
    pub(crate) books: Books,
}

impl Pool {
    pub(crate) fn new(granule: u64, cache_max: u64, chunk_max: u64) -> Self {
        Self {
            granule,
            space: AddressSpace::new(),
            spans: BTreeMap::new(),
            cache: BTreeSet::new(),
            cache_by_age: BTreeSet::new(),
            cache_max,
            chunk_max,
            ages: 0,
            blocks: Blocks::default(),
            stuck: Vec::new(),
            outdated: Vec::new(),
            remains: Vec::new(),
            live_large: 0,
            next_id: 1,
            pins: Pins::default(),
            books: Books::default(),
        }
    }

    pub(crate) fn granule(&self) -> u64 {
        self.granule
    }

    pub(crate) fn add_range(&mut self, base: u64, len: u64) -> bool {
        self.space.add_range(base, len)
    }

    /// All address ranges.
    pub(crate) fn ranges(&self) -> Vec<(u64, u64)> {
        self.space.ranges().collect()
    }

    pub(crate) fn contains(&self, ptr: u64) -> bool {
        self.space.range_of(ptr).is_some()
    }

    /// Whether `[ptr, ptr + size)` has an address of ours. Of no bytes, the one at `ptr` counts.
    pub(crate) fn overlaps(&self, ptr: u64, size: u64) -> bool {
        let end = ptr.saturating_add(size.max(1));
        self.space
            .ranges()
            .any(|(start, len)| start < end && ptr - start.min(ptr) < len)
    }

    fn segment_len(&self) -> u64 {
        SEGMENT.next_multiple_of(self.granule)
    }

    /// Whether an allocation of that size shares a segment.
    fn is_small(&self, size: u64) -> bool {
        size < SMALL && size.saturating_mul(2) <= self.segment_len()
    }

    /// The size rounded to what it is charged; `None` if that is no number.
    pub(crate) fn rounded(&self, size: u64) -> Option<u64> {
        size.checked_next_multiple_of(self.granule)
    }

    /// The next step of an allocation. `size` isn't 0.
    pub(crate) fn plan(&mut self, size: u64, owner: u64) -> Plan {
        let tag = Tag {
            owner,
            id: self.next_id,
        };
        if self.is_small(size) {
            if let Some(ptr) = self.blocks.take(size, tag) {
                self.next_id += 1;
                return Plan::Ready(ptr);
            }
            let len = self.segment_len();
            return match self.plan_span(len, Kind::Segment) {
                Plan::Ready(base) => self.open_segment(base, len, size, owner),
                other => other,
            };
        }
        let Some(len) = self.rounded(size) else {
            return Plan::OverLimit {
                charged: self.books.charged(),
                limit: self.books.limit,
            };
        };
        let plan = self.plan_span(len, Kind::Large { size, tag });
        if matches!(plan, Plan::Ready(_)) {
            self.next_id += 1;
            self.live_large += 1;
        }
        plan
    }

    /// A span that is mapped becomes a segment and gives its first block.
    fn open_segment(&mut self, base: u64, len: u64, size: u64, owner: u64) -> Plan {
        let added = self.blocks.add_segment(base, len);
        debug_assert!(added, "a span is in one table");
        let tag = Tag {
            owner,
            id: self.next_id,
        };
        self.next_id += 1;
        let taken = self.blocks.take(size, tag);
        if taken.is_none_or(|ptr| !(base..base + len).contains(&ptr)) {
            // Another thread opened a segment while this one was built, and that had room: this one stays empty, and nobody
            // would ever free its last block.
            let removed = self.blocks.remove_segment(base);
            debug_assert!(removed, "an empty segment can go");
            self.books.allocated -= len;
            self.enter_cache(base);
        }
        taken.map_or(Plan::Short(0), Plan::Ready)
    }

    /// The next step for memory that passes the pool by: `Ready` means that it is counted.
    pub(crate) fn plan_external(&mut self, len: u64) -> Plan {
        let charged = self.books.charged();
        if charged.saturating_add(len) > self.books.limit {
            return Plan::OverLimit {
                charged,
                limit: self.books.limit,
            };
        }
        let short = self.books.short_of(len);
        if short > 0 {
            let dropped = self.drop_cached(short);
            if !dropped.chunks.is_empty() {
                return Plan::Drop(dropped);
            }
            return Plan::Short(len);
        }
        self.books.take(len);
        self.books.external += len;
        Plan::Ready(0)
    }

    /// Memory that passed the pool by is gone.
    pub(crate) fn external_gone(&mut self, len: u64) {
        let len = len.min(self.books.external);
        self.books.external -= len;
        self.books.give(len);
    }

    fn plan_span(&mut self, len: u64, kind: Kind) -> Plan {
        let charged = self.books.charged();
        if charged.saturating_add(len) > self.books.limit {
            return Plan::OverLimit {
                charged,
                limit: self.books.limit,
            };
        }
        if let Some(base) = self.take_cached(len) {
            if let Some(span) = self.spans.get_mut(&base) {
                span.kind = kind;
            }
            self.books.allocated += len;
            return Plan::Ready(base);
        }
        let short = self.books.short_of(len);
        if short > 0 {
            let dropped = self.drop_cached(short);
            if !dropped.chunks.is_empty() {
                return Plan::Drop(dropped);
            }
            return Plan::Short(len);
        }
        let Some(base) = self.space.take(len) else {
            return Plan::Addresses(len);
        };
        self.books.take(len);
        self.books.allocated += len;
        self.spans.insert(
            base,
            Span {
                len,
                kind: Kind::Building,
                chunks: Vec::new(),
                moving: 0,
                freeing: false,
            },
        );
        Plan::Build {
            base,
            len,
            chunk: chunk_size(len, self.granule, self.chunk_max),
        }
    }

    /// A cached span of exactly that length, if need be the head of a longer one that has a chunk border there.
    fn take_cached(&mut self, len: u64) -> Option<u64> {
        // A few longer ones are looked at, not all: the cache may hold thousands.
        const LOOKS: usize = 16;
        let (found, base) = self
            .cache
            .range((len, 0)..)
            .take(LOOKS)
            .copied()
            .find(|(found, base)| {
                *found == len
                    || self
                        .spans
                        .get(base)
                        .is_some_and(|span| span.chunks.iter().any(|chunk| chunk.at == base + len))
            })?;
        self.uncache(base);
        if found > len {
            let span = self.spans.get_mut(&base)?;
            let cut = span
                .chunks
                .iter()
                .position(|chunk| chunk.at == base + len)
                .unwrap_or(span.chunks.len());
            let tail = span.chunks.split_off(cut);
            span.len = len;
            self.spans.insert(
                base + len,
                Span {
                    len: found - len,
                    kind: Kind::Building,
                    chunks: tail,
                    moving: 0,
                    freeing: false,
                },
            );
            self.enter_cache(base + len);
        }
        Some(base)
    }

    fn enter_cache(&mut self, base: u64) {
        if let Some(span) = self.spans.get_mut(&base) {
            self.ages += 1;
            span.kind = Kind::Cached { age: self.ages };
            self.cache.insert((span.len, base));
            self.cache_by_age.insert((self.ages, base));
            self.books.cached += span.len;
        }
    }

    fn uncache(&mut self, base: u64) {
        if let Some(span) = self.spans.get_mut(&base)
            && let Kind::Cached { age } = span.kind
        {
            span.kind = Kind::Building;
            self.cache.remove(&(span.len, base));
            self.cache_by_age.remove(&(age, base));
            self.books.cached -= span.len;
        }
    }

    /// Takes cached spans of together at least `bytes` out of the books, oldest first; all of them if they are fewer.
    pub(crate) fn drop_cached(&mut self, bytes: u64) -> Dismantle {
        let mut dropped = Dismantle::default();
        let mut sum = 0;
        while sum < bytes {
            let Some((_, base)) = self.cache_by_age.first().copied() else {
                break;
            };
            self.uncache(base);
            if let Some(span) = self.spans.remove(&base) {
                sum += span.len;
                dropped.add(span.chunks);
            }
        }
        dropped
    }

    /// The span was built: these are its handles, in order. Returns the allocation.
    pub(crate) fn built(&mut self, base: u64, chunks: &[(u64, Handle)], size: u64, owner: u64) -> Plan {
        let mut at = base;
        let small = self.is_small(size);
        let Some(span) = self.spans.get_mut(&base) else {
            return Plan::Short(0);
        };
        span.chunks = chunks
            .iter()
            .map(|(len, handle)| {
                let chunk = Chunk {
                    at,
                    len: *len,
                    place: Place::Device(*handle),
                    kept: None,
                };
                at += len;
                chunk
            })
            .collect();
        let len = span.len;
        if small {
            span.kind = Kind::Segment;
            return self.open_segment(base, len, size, owner);
        }
        let tag = Tag {
            owner,
            id: self.next_id,
        };
        self.next_id += 1;
        self.live_large += 1;
        span.kind = Kind::Large { size, tag };
        Plan::Ready(base)
    }

    /// The span could not be built; what the driver would not take back is in `stuck`.
    pub(crate) fn not_built(&mut self, base: u64, stuck: &[Stuck]) {
        if let Some(span) = self.spans.remove(&base) {
            self.books.give(span.len);
            self.books.allocated -= span.len;
            self.keep_stuck(stuck);
            self.give_addresses(base, span.len, stuck);
        }
    }

    /// These chunks are gone from the device, except for what is stuck.
    pub(crate) fn dismantled(&mut self, apart: &Dismantle, stuck: &[Stuck]) {
        for (at, len, _) in &apart.chunks {
            self.books.give(*len);
            self.give_addresses(*at, *len, stuck);
        }
        self.keep_stuck(stuck);
    }

    fn keep_stuck(&mut self, stuck: &[Stuck]) {
        for one in stuck {
            self.books.take(one.len);
            self.books.stuck += one.len;
            self.stuck.push(*one);
        }
    }

    /// What is stuck, to be tried again; the result goes to [`Self::tried_stuck`].
    pub(crate) fn take_stuck(&mut self) -> Vec<Stuck> {
        std::mem::take(&mut self.stuck)
    }

    /// Of what [`Self::take_stuck`] gave: what is gone now, and what is as it was (perhaps unmapped).
    pub(crate) fn tried_stuck(&mut self, before: &[Stuck], after: Vec<Stuck>) {
        for one in before {
            let now = after.iter().find(|other| other.handle == one.handle);
            if now.is_none() {
                self.books.stuck -= one.len;
                self.books.give(one.len);
            }
            if let Some(at) = one.at
                && one.gives
                && now.is_none_or(|n| n.at.is_none())
            {
                self.give_addresses(at, one.len, &[]);
            }
        }
        self.stuck.extend(after);
    }

    /// Gives addresses back, except where something is still mapped.
    fn give_addresses(&mut self, base: u64, len: u64, stuck: &[Stuck]) {
        let mut holes: Vec<(u64, u64)> = stuck
            .iter()
            .filter_map(|s| Some((s.at?, s.len)))
            .filter(|(at, _)| (base..base + len).contains(at))
            .collect();
        holes.sort_unstable();
        let mut at = base;
        for (hole, n) in holes {
            if hole > at {
                self.give_run(at, hole - at);
            }
            at = hole + n;
        }
        if base + len > at {
            self.give_run(at, base + len - at);
        }
    }

    fn give_run(&mut self, at: u64, len: u64) {
        let given = self.space.give_back(at, len);
        debug_assert!(given.is_ok(), "{at:#x}+{len:#x} was not taken");
    }

    /// Starts (or goes on with) a free.
    pub(crate) fn free(&mut self, ptr: u64) -> Result<Freed, FreeError> {
        if !self.contains(ptr) {
            return Err(FreeError::Bypass);
        }
        if let Ok(freed) = self.blocks.give_back(ptr) {
            if !freed.empty {
                return Ok(Freed::Done);
            }
            let removed = self.blocks.remove_segment(freed.segment);
            debug_assert!(removed, "an empty segment can go");
            return Ok(self.free_span(freed.segment));
        }
        match self.spans.get(&ptr) {
            Some(span) if matches!(span.kind, Kind::Large { .. }) && !span.freeing => {}
            _ => return Err(FreeError::Invalid),
        }
        self.live_large -= 1;
        Ok(self.free_span(ptr))
    }

    /// Frees a whole span (large, or a segment with nothing in it).
    pub(crate) fn free_span(&mut self, base: u64) -> Freed {
        let Some(span) = self.spans.get_mut(&base) else {
            return Freed::Done;
        };
        span.freeing = true;
        if span.moving > 0 {
            return Freed::Wait(base);
        }
        span.freeing = false;
        self.outdated
            .extend(span.chunks.iter_mut().filter_map(|chunk| chunk.kept.take()));
        self.books.allocated -= span.len;
        let resident = span
            .chunks
            .iter()
            .all(|chunk| matches!(chunk.place, Place::Device(_)));
        // Another party may still see what was pinned: it serves nobody else.
        if self.pins.lend(base, span.len) {
            // It exists, and is counted here, as long as somebody has it open.
            self.books.take(span.len);
            self.books.external += span.len;
        }
        let seen = self.pins.forget(Held::Span(base));
        if resident && !seen && self.books.cached + span.len <= self.cache_max {
            self.enter_cache(base);
            return Freed::Done;
        }
        let Some(span) = self.spans.remove(&base) else {
            return Freed::Done;
        };
        let mut apart = Dismantle::default();
        let mut pieces = Vec::new();
        let mut on_device = Vec::new();
        for chunk in span.chunks {
            match chunk.place {
                Place::Host(mut host) => {
                    self.books.evicted -= chunk.len;
                    pieces.append(&mut host.pieces);
                    self.give_run(chunk.at, chunk.len);
                }
                _ => on_device.push(chunk),
            }
        }
        apart.add(on_device);
        if apart.chunks.is_empty() && pieces.is_empty() {
            return Freed::Done;
        }
        Freed::Apart(apart, pieces)
    }

    /// The kept copies of what was freed since the last call.
    pub(crate) fn take_outdated(&mut self) -> Vec<Ticket> {
        std::mem::take(&mut self.outdated)
    }

    /// The live allocation that contains an address.
    pub(crate) fn lookup(&self, ptr: u64) -> Option<Live> {
        if let Some(block) = self.blocks.find(ptr) {
            return Some(Live {
                base: block.start,
                size: block.size,
                tag: block.tag,
            });
        }
        let (base, span) = self.spans.range(..=ptr).next_back()?;
        match span.kind {
            Kind::Large { size, tag } if ptr - base < size && !span.freeing => Some(Live {
                base: *base,
                size,
                tag,
            }),
            _ => None,
        }
    }

    /// The spans of the live allocations in a range, all of them on the card.
    pub(crate) fn pinnable(&self, ptr: u64, len: u64) -> Result<Vec<Held>, PinError> {
        let first = self
            .spans
            .range(..=ptr)
            .next_back()
            .filter(|(base, span)| ptr - **base < span.len)
            .map_or(ptr, |(base, _)| *base);
        let mut on = Vec::new();
        for (base, span) in self.spans.range(first..ptr.saturating_add(len.max(1))) {
            if !matches!(span.kind, Kind::Large { .. } | Kind::Segment) || span.freeing {
                continue;
            }
            if span
                .chunks
                .iter()
                .any(|chunk| !matches!(chunk.place, Place::Device(_)))
            {
                return Err(PinError::Away);
            }
            on.push(Held::Span(*base));
        }
        if on.is_empty() {
            return Err(PinError::NotOurs);
        }
        Ok(on)
    }

    /// Bytes of the pool on the card that a pin keeps there. What is lent is none of the pool's any more.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pins
            .held()
            .filter(|held| matches!(held, Held::Span(_)))
            .map(|held| self.bytes_held(held))
            .sum()
    }

    /// Takes a pin off. `true` if something may move now, or is free now, that was not before.
    pub(crate) fn unpin(&mut self, number: u64) -> bool {
        let (freed, lent) = self.pins.remove(number);
        self.external_gone(lent);
        freed
    }

    /// The span of a live allocation, if all of it is on the card.
    pub(crate) fn block(&mut self, ptr: u64) -> Option<Block> {
        let (base, span) = self.spans.range(..=ptr).next_back()?;
        if ptr - base >= span.len || span.freeing || !matches!(span.kind, Kind::Large { .. } | Kind::Segment)
        {
            return None;
        }
        let chunks: Option<Vec<(u64, Handle)>> = span
            .chunks
            .iter()
            .map(|chunk| match chunk.place {
                Place::Device(handle) => Some((chunk.len, handle)),
                _ => None,
            })
            .collect();
        let (base, len, chunks) = (*base, span.len, chunks?);
        Some(Block {
            number: self.pins.number_of(base),
            base,
            len,
            chunks,
        })
    }

    /// Memory that exists already is counted here from now on, with the lease for it.
    pub(crate) fn inherit(&mut self, bytes: u64) {
        self.books.lease = self.books.lease.saturating_add(bytes);
        self.books.take(bytes);
        self.books.external += bytes;
    }

    /// It is not counted here any more, and its lease is gone with it.
    pub(crate) fn disinherit(&mut self, bytes: u64) {
        self.external_gone(bytes);
        if !self.books.alone {
            self.books.lease = self.books.lease.saturating_sub(bytes);
        }
    }

    /// What a pin keeps on the card, if it is of the pool.
    pub(crate) fn bytes_held(&self, held: Held) -> u64 {
        match held {
            Held::Span(base) => self.spans.get(&base).map_or(0, |span| span.len),
            Held::Lent(number) => self.pins.lent_bytes(number),
            Held::Handle(_) => 0,
        }
    }

    /// All live allocations.
    pub(crate) fn live(&self) -> impl Iterator<Item = Live> + '_ {
        let large = self.spans.iter().filter_map(|(base, span)| match span.kind {
            Kind::Large { size, tag } if !span.freeing => Some(Live {
                base: *base,
                size,
                tag,
            }),
            _ => None,
        });
        let small = self.blocks.iter().map(|block| Live {
            base: block.start,
            size: block.size,
            tag: block.tag,
        });
        large.chain(small)
    }

    /// How many spans there are.
    #[cfg(test)]
    pub(crate) fn spans(&self) -> usize {
        self.spans.len()
    }

    /// How many allocations live.
    pub(crate) fn live_count(&self) -> u64 {
        self.live_large + self.blocks.len() as u64
    }
}

impl Dismantle {
    fn add(&mut self, chunks: Vec<Chunk>) {
        for chunk in chunks {
            if let Place::Device(handle) = chunk.place {
                self.chunks.push((chunk.at, chunk.len, handle));
            }
        }
    }
}
