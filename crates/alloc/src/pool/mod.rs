//! A pool of device memory that neither fragments nor waits.
//!
//! Two sides are kept apart. *Addresses*: blocks have stable ones, given out by best fit among mapped bytes that are free.
//! *Physical memory*: chunks of whole granules, each mapped at its home. A chunk in which nothing lives is *idle*; when a
//! block fits nowhere, idle chunks from many places, and free ends of granules, are mapped a second time, next to each other, as a
//! *view*. So no hole of a granule or more is ever too small, the pool grows only when everything else is in use, and physical
//! memory at its peak is what the live blocks touch at their peak. Why and how: `docs/design/0005-pool.md`.
//!
//! ```text
//!                allocate                         finish, all calls done
//!  free bytes ─────────────► Ready: the block  ◄───────────────────────── Run(plan): reserved, calls to be made
//!      ▲    └──────────────► Run(plan) ──────── finish, a call failed ──► everything as the calls left it, bytes free again
//!      │ all bytes of the chunk free            Ask, Wait: events first; NoRoom; Addresses: more are needed
//!      └──────────────────── free
//! ```
//!
//! A chunk of more than one granule lies wholly under one block or under none: where a block would cover part of one, the chunk
//! is made anew in parts first (nothing lives in it, so nothing is copied). At granules that blocks share, their chunk is a
//! single granule.
//!
//! Small blocks that keep granules apart from each other can be brought together without changing an address: [`Pool::meshable`].
//!
//! The pool calls nobody, reads no clock and takes no lock; see [`Plan`].
//!
//! # Invariants
//! [`Pool::check`] names and tests them all. The main ones: no two blocks, and no block and free bytes, share a byte of physical memory;
//! every byte of a block is mapped where the block is; what chunks hold is live, free, or out for a plan.

mod check;
mod chunks;
mod config;
mod ends;
mod mesh;
mod place;
mod plan;
mod private;
mod release;
mod runs;
mod snapshot;
mod stats;
mod thrift;
mod views;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use crate::{AddressSpace, GiveBackError};
pub use chunks::ChunkId;
use chunks::{Chunks, State};
pub use config::{Config, SettingError};
use mesh::Meshes;
pub use mesh::{Pair, PinError};
use plan::Aim;
pub use plan::{Backing, Call, Plan};
pub use release::Watermarks;
use runs::{Owner, Runs};
pub use snapshot::{Segment, Use, pickle};
use stats::Counters;
pub use stats::{ClassStats, Stats};
use thrift::Thrift;
use views::{ViewId, Views};

/// A queue of device work, by a number of the caller's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream(pub u64);

/// A point in a stream's work, counted by the caller; later work has larger ones. Work that is at a mark has done all before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mark(pub u64);

/// What is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bytes. Nothing gets a block of its own, too.
    pub size: u64,
    /// Its address is a multiple of this (and of the quantum). A power of two, at most a granule.
    pub align: u64,
    /// Whose work will use it.
    pub stream: Stream,
    /// The caller has just told, with [`Pool::done`], how far the streams that were asked for are.
    pub asked: bool,
}

/// What an allocation needs next.
#[derive(Debug)]
pub enum Step {
    /// Nothing: this is the block.
    Ready(u64),
    /// Calls of the driver; then [`Pool::finish`] gives the block.
    Run(Box<Plan>),
    /// Memory is free on other streams. Tell how far these are, then ask again with `asked`.
    Ask(Vec<Stream>),
    /// There is no room but what work still uses that nobody waits for otherwise. When a stream is past its mark, tell, and ask again.
    Wait(Vec<(Stream, Mark)>),
    /// It would take so many physical bytes more than the limit leaves.
    NoRoom(u64),
    /// So many bytes of addresses, in one range, are needed: [`Pool::add_range`].
    Addresses(u64),
}

/// A live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its first address.
    pub at: u64,
    /// The bytes that were asked for.
    pub size: u64,
    /// The bytes that it takes.
    pub len: u64,
    /// Whose work it was made for.
    pub stream: Stream,
}

/// What became of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finished {
    /// All calls were made; this is the block that they were for.
    Block(u64),
    /// All calls were made.
    Less,
    /// Not all were made. The books are as the calls left them; what was reserved is free again.
    Failed,
}

/// The last work of each of several streams.
type Works = Vec<(Stream, Mark)>;

/// A free that is none.
pub type FreeError = GiveBackError;

/// A freed block that other streams still use.
#[derive(Clone, Debug)]
struct Late {
    block: Block,
    mark: Mark,
    stream: Stream,
    others: Vec<(Stream, Mark)>,
}

/// A pool; see the module's documentation.
#[derive(Debug)]
pub struct Pool {
    config: Config,
    /// Addresses with nothing mapped that nobody has reserved.
    space: AddressSpace,
    runs: Runs,
    live: BTreeMap<u64, Block>,
    late: Vec<Late>,
    chunks: Chunks,
    views: Views,
    /// Mappings that nobody needs, and the work that may still use them.
    stale: BTreeMap<u64, Works>,
    /// Granules that share one, and blocks that must not.
    meshes: Meshes,
    /// Chunks that have lost their home in a failure: to be released.
    orphans: BTreeSet<ChunkId>,
    /// How far each stream was when it was last told.
    done: BTreeMap<Stream, Mark>,
    /// Streams that ended while plans were under way, and how many plans there had been by then: what these hold of theirs is anyone's.
    ended: BTreeMap<Stream, u64>,
    /// Streams that keep what is freed on them; see `private`.
    private: BTreeSet<Stream>,
    counters: Counters,
    /// Most active bytes since the last [`Pool::tick`], and in the time before it.
    demand: [u64; 2],
    /// How much of what is idle the pool grows for.
    thrift: Thrift,
    /// Room to write in, empty in between.
    changed: Vec<ChunkId>,
}

impl Pool {
    /// An empty pool without addresses.
    ///
    /// # Panics
    /// If the granule is not a multiple of the quantum, or either is 0.
    #[must_use]
    pub fn new(config: Config) -> Self {
        assert!(
            config.quantum > 0 && config.granule > 0 && config.granule.is_multiple_of(config.quantum),
            "a granule of {} bytes cannot be cut into {}",
            config.granule,
            config.quantum
        );
        Self {
            config,
            space: AddressSpace::new(),
            runs: Runs::new(config.granule),
            live: BTreeMap::new(),
            late: Vec::new(),
            chunks: Chunks::default(),
            views: Views::default(),
            stale: BTreeMap::new(),
            meshes: Meshes::default(),
            orphans: BTreeSet::new(),
            done: BTreeMap::new(),
            ended: BTreeMap::new(),
            private: BTreeSet::new(),
            counters: Counters::default(),
            demand: [0; 2],
            thrift: Thrift::default(),
            changed: Vec::new(),
        }
    }

    /// What it was made with.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Changes the physical bytes that it may have. It keeps what it has.
    pub const fn set_limit(&mut self, limit: u64) {
        self.config.limit = limit;
    }

    /// Adds reserved addresses. `false` (and no change) if they overlap others or are not whole granules.
    #[must_use]
    pub fn add_range(&mut self, start: u64, len: u64) -> bool {
        start.is_multiple_of(self.config.granule)
            && len.is_multiple_of(self.config.granule)
            && self.space.add_range(start, len)
    }

    /// The live block that contains an address. Padding behind what was asked for belongs to nobody.
    #[must_use]
    pub fn find(&self, at: u64) -> Option<Block> {
        let (_, block) = self.live.range(..=at).next_back()?;
        (at - block.at < block.size.max(1)).then_some(*block)
    }

    /// All live blocks, by address.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        self.live.values().copied()
    }

    /// Frees a block whose last use is work of `stream` up to `mark`. There it may be used again at once, elsewhere when the
    /// stream is past the mark; if `others` use it, by nobody before they are past theirs.
    ///
    /// # Errors
    /// [`FreeError`] if no live block begins there; nothing changes.
    pub fn free(
        &mut self,
        at: u64,
        stream: Stream,
        mark: Mark,
        others: &[(Stream, Mark)],
    ) -> Result<Block, FreeError> {
        let Some(block) = self.live.remove(&at) else {
            return Err(match self.find(at) {
                Some(_) => FreeError::Inner(at),
                None => FreeError::NotLive(at),
            });
        };
        self.counters.freed(&block);
        self.meshes.unpin_all(at);
        let late: Vec<(Stream, Mark)> = others
            .iter()
            .copied()
            .filter(|&(other, mark)| other != stream && !self.is_done(other, mark))
            .collect();
        if late.is_empty() {
            self.vacate(&block, Owner::Stream(stream), mark);
        } else {
            self.counters.late += block.len;
            self.late.push(Late {
                block,
                mark,
                stream,
                others: late,
            });
        }
        Ok(block)
    }

    /// A stream's work has come to this mark (or further): what it used before is free for all.
    pub fn done(&mut self, stream: Stream, mark: Mark) {
        if self.private.contains(&stream) {
            return;
        }
        let known = self.done.entry(stream).or_insert(mark);
        *known = (*known).max(mark);
        let mark = *known;
        for (at, len) in self.runs.take_done(stream, mark) {
            self.give(at, len, Owner::Anyone, Mark(0));
        }
        if !self.late.is_empty() {
            let mut late = std::mem::take(&mut self.late);
            late.retain_mut(|late| {
                late.others.retain(|&(other, mark)| !self.is_done(other, mark));
                if late.others.is_empty() {
                    self.counters.late -= late.block.len;
                    let owner =
                        if self.is_done(late.stream, late.mark) && !self.private.contains(&late.stream) {
                            Owner::Anyone
                        } else {
                            Owner::Stream(late.stream)
                        };
                    self.vacate(&late.block.clone(), owner, late.mark);
                }
                !late.others.is_empty()
            });
            self.late.append(&mut late);
        }
    }

    /// The streams whose work keeps free bytes from others: to be told about with [`Self::done`].
    #[must_use]
    pub fn streams(&self) -> Vec<Stream> {
        let mut streams = self.runs.streams();
        streams.extend(
            self.late
                .iter()
                .flat_map(|late| late.others.iter().map(|other| other.0)),
        );
        streams.extend(self.late.iter().map(|late| late.stream));
        streams.retain(|stream| !self.private.contains(stream));
        streams.sort_unstable();
        streams.dedup();
        streams
    }

    /// All work of all streams is done. Streams that are not used any more are forgotten.
    pub fn all_done(&mut self) {
        for stream in self.streams() {
            self.done(stream, Mark(u64::MAX));
        }
        for last in self.stale.values_mut() {
            last.clear();
        }
        self.views.settled();
        self.meshes.settled(None);
        self.done.clear();
    }

    /// A stream is gone, its work done. Its number may come again for another one.
    pub fn end(&mut self, stream: Stream) {
        self.private.remove(&stream);
        self.done(stream, Mark(u64::MAX));
        self.done.remove(&stream);
        // Done for good, though others still use the block: its mark would be taken for one of whoever gets the number next.
        for late in self.late.iter_mut().filter(|late| late.stream == stream) {
            late.mark = Mark(0);
        }
        self.views.ended(stream);
        self.meshes.settled(Some(stream));
        for last in self.stale.values_mut() {
            last.retain(|last| last.0 != stream);
        }
        if !self.plans_hold_nothing() {
            self.ended.insert(stream, self.counters.plans);
        }
    }

    /// Whether all bytes are in the tables: no plan is out, and none has torn anything.
    fn plans_hold_nothing(&self) -> bool {
        self.counters.in_plans == 0 && !self.meshes.is_moving()
    }

    /// Whether a stream has ended since the plan of this number was made.
    fn has_ended(&self, stream: Stream, plan: u64) -> bool {
        self.ended.get(&stream).is_some_and(|plans| *plans >= plan)
    }

    /// What a plan of this number says of the bytes that it held, as it is now.
    fn since(&self, plan: u64, owner: Owner, mark: Mark) -> (Owner, Mark) {
        match owner {
            Owner::Stream(stream) if self.has_ended(stream, plan) => (Owner::Anyone, Mark(0)),
            _ => (owner, mark),
        }
    }

    /// A plan goes out.
    fn hand_out(&mut self, plan: &mut Plan) {
        self.counters.in_plans += 1;
        self.counters.plans += 1;
        plan.number = self.counters.plans;
    }

    fn is_done(&self, stream: Stream, mark: Mark) -> bool {
        mark == Mark(0)
            || self.private.contains(&stream)
            || self.done.get(&stream).is_some_and(|done| *done >= mark)
    }

    /// Enters the result of a plan of which the first `done` calls were made.
    pub fn finish(&mut self, plan: Plan, done: usize) -> Finished {
        let finished = self.finish_one(plan, done);
        if self.plans_hold_nothing() {
            self.ended.clear();
        }
        finished
    }

    fn finish_one(&mut self, plan: Plan, done: usize) -> Finished {
        let Plan {
            number,
            calls,
            aim,
            held,
            chunks,
            ranges,
            unmaps,
            kept,
            swept: _,
        } = plan;
        self.counters.in_plans -= 1;
        let all = done >= calls.len();
        let made = &calls[..done.min(calls.len())];
        let unmaps = unmaps.into_iter().map(|(at, mut last)| {
            last.retain(|last| !self.has_ended(last.0, number));
            (at, last)
        });
        let unmaps: Vec<(u64, Works)> = unmaps.collect();
        if let Aim::Mesh(from) = aim {
            let finished = self.finish_mesh(from, made, all, number);
            self.still_stale(unmaps);
            return finished;
        }
        self.enter_all(made, &kept, number);
        for (at, run) in held {
            let (owner, mark) = self.since(number, run.owner, run.mark);
            self.give(at, run.len, owner, mark);
        }
        for (id, owner, mark) in chunks {
            let Some(chunk) = self.chunks.get(id) else {
                continue;
            };
            if chunk.state != State::Held {
                continue;
            }
            if !chunk.exists {
                self.chunks.undraft(id);
                continue;
            }
            let (home, len) = (chunk.home, chunk.len);
            if chunk.maps.contains(&home) {
                self.chunks.set(id, State::Idle);
                let (owner, mark) = self.since(number, owner, mark);
                self.give(home, len, owner, mark);
            } else {
                self.orphans.insert(id);
            }
        }
        self.still_stale(unmaps);
        for (at, len) in kept {
            self.settle(at, len);
        }
        for (at, len) in ranges {
            for (gap, n) in self.chunks.gaps(at, len) {
                self.give_addresses(gap, n);
            }
        }
        match aim {
            Aim::Block {
                at,
                size,
                len,
                stream,
                view,
            } if all => {
                match view {
                    Some(draft) => {
                        let parts = self.parts(draft.base, draft.len);
                        let id = self.views.add(at, parts, draft.extents, stream);
                        self.put_view(id, size, len, stream);
                    }
                    None => self.put(at, size, len, stream),
                }
                Finished::Block(at)
            }
            Aim::Block { view, .. } => {
                // A view that was not completed: its mappings serve nobody.
                if let Some(draft) = view {
                    let parts = self.parts(draft.base, draft.len);
                    self.strand(parts, None);
                }
                self.counters.failed += 1;
                Finished::Failed
            }
            Aim::Less if all => Finished::Less,
            Aim::Less | Aim::Mesh(_) => {
                self.counters.failed += 1;
                Finished::Failed
            }
        }
    }

    /// Mappings that a plan was to take away and did not.
    fn still_stale(&mut self, unmaps: Vec<(u64, Works)>) {
        for (at, last) in unmaps {
            if self.chunks.at(at).is_some() {
                self.stale.insert(at, last);
            }
        }
    }

    /// Enters calls that were made.
    fn enter_all(&mut self, calls: &[Call], kept: &[(u64, u64)], plan: u64) {
        for call in calls {
            match *call {
                // Its number may be another's by now.
                Call::Wait { stream, .. } if self.has_ended(stream, plan) => {}
                _ => self.enter(call, kept),
            }
        }
    }

    /// Enters one call that was made.
    fn enter(&mut self, call: &Call, kept: &[(u64, u64)]) {
        match *call {
            // What is free for all now is found when somebody asks for it: until then free bytes stay joined as they are, and a
            // program with one stream meets the same places again.
            Call::Wait { stream, mark } => {
                let known = self.done.entry(stream).or_insert(mark);
                *known = (*known).max(mark);
            }
            Call::Create { chunk, len } => {
                self.chunks.created(chunk);
                self.counters.created += len;
            }
            Call::Map { chunk, at, .. } => {
                self.chunks.mapped(chunk, at);
                self.counters.maps += 1;
            }
            Call::Unmap { chunk, at, len } => {
                let home = self.chunks.get(chunk).is_some_and(|chunk| chunk.home == at);
                self.chunks.unmapped(chunk, at);
                self.counters.unmaps += 1;
                // Where parts of the chunk are to come, addresses are settled when the plan ends.
                if !home && !kept.iter().any(|(start, _)| *start == at) {
                    self.views.unmapped(at);
                    self.stale.remove(&at);
                    self.give_addresses(at, len);
                }
            }
            Call::Copy { len, .. } => self.counters.copied += len,
            Call::Release { chunk, len } => {
                self.chunks.released(chunk);
                self.orphans.remove(&chunk);
                self.counters.released += len;
            }
        }
        self.counters.physical_peak = self.counters.physical_peak.max(self.chunks.physical());
    }

    /// A part of a view was to be mapped anew: the view goes on, or what is left of it there goes.
    fn settle(&mut self, at: u64, len: u64) {
        let mapped = self.parts(at, len);
        let gaps = self.chunks.gaps(at, len);
        // A plan that stopped between two unmappings leaves a chunk here whose home is gone: its bytes can be given out no more.
        let at_home = |id: ChunkId| {
            self.chunks
                .get(id)
                .is_some_and(|chunk| chunk.maps.contains(&chunk.home))
        };
        if gaps.is_empty() && mapped.iter().all(|(_, id)| at_home(*id)) && self.views.replace(at, &mapped) {
            return;
        }
        let last = self.views.last_at(at);
        let unneeded = self.views.kill_at(at);
        self.views.unmapped(at);
        self.strand(unneeded, last);
        if self.chunks.at(at).is_none() {
            self.stale.remove(&at);
        }
        self.strand(mapped, last);
        for (gap, n) in gaps {
            self.give_addresses(gap, n);
        }
    }

    fn give_addresses(&mut self, at: u64, len: u64) {
        let given = self.space.give_back(at, len);
        debug_assert!(given.is_ok(), "{at:#x}+{len:#x} was not taken");
    }

    fn is(&self, id: ChunkId, state: State) -> bool {
        self.chunks.get(id).is_some_and(|chunk| chunk.state == state)
    }

    /// The mappings in these addresses.
    fn parts(&self, at: u64, len: u64) -> Vec<(u64, ChunkId)> {
        self.chunks
            .over(at, len)
            .map(|(start, _, id)| (start, id))
            .collect()
    }

    /// Adds free bytes, by their home addresses, and finds the chunks that are idle with them.
    fn give(&mut self, at: u64, len: u64, owner: Owner, mark: Mark) {
        if len == 0 {
            return;
        }
        let (start, run, [new, new_end]) = self.runs.insert(at, len, owner, mark);
        let end = start + run.len;
        self.set_all(new, new_end - new, State::Idle, |chunk, from, n| {
            start <= from && from + n <= end && chunk == State::Active
        });
    }

    /// Changes the state of chunks in these addresses, if it is the one that is asked for.
    fn set_all(&mut self, at: u64, len: u64, state: State, change: impl Fn(State, u64, u64) -> bool) {
        let mut changed = std::mem::take(&mut self.changed);
        let over = self.chunks.over(at, len).filter(|&(start, n, id)| {
            self.chunks
                .get(id)
                .is_some_and(|chunk| change(chunk.state, start, n))
        });
        changed.extend(over.map(|(_, _, id)| id));
        for id in changed.drain(..) {
            self.chunks.set(id, state);
        }
        self.changed = changed;
    }

    /// Frees the bytes of a block.
    fn vacate(&mut self, block: &Block, owner: Owner, mark: Mark) {
        let Some(extents) = self.views.extents(block.at, block.len) else {
            if self.meshes.is_empty() {
                self.give(block.at, block.len, owner, mark);
            } else {
                self.vacate_at(block.at, block.len, owner, mark);
            }
            return;
        };
        for (home, len) in extents {
            self.give(home, len, owner, mark);
        }
        let last = match owner {
            Owner::Stream(stream) => (stream, mark),
            Owner::Anyone => (Stream(0), Mark(0)),
        };
        let unneeded = self.views.leave(block.at, last);
        self.strand(unneeded, Some(last));
    }

    /// These mappings serve nobody any more.
    fn strand(&mut self, mappings: Vec<(u64, ChunkId)>, last: Option<(Stream, Mark)>) {
        for (at, _) in mappings {
            let last = last.filter(|last| last.1 != Mark(0));
            self.stale.insert(at, last.into_iter().collect());
        }
    }

    /// The work that may use a mapping beside a home, which no block lives at.
    fn last_at(&self, at: u64) -> Works {
        match self.views.last_at(at) {
            Some(last) => vec![last],
            None => self.stale.get(&at).cloned().unwrap_or_default(),
        }
    }

    /// Takes free bytes, by their home addresses, for a block.
    fn take(&mut self, at: u64, len: u64) {
        // Mostly all in one run.
        if self.runs.take(at, len).is_none() {
            let taken = self.runs.take_all(at, len);
            debug_assert_eq!(
                taken.iter().map(|(_, run)| run.len).sum::<u64>(),
                len,
                "{at:#x}+{len:#x} is free"
            );
        }
        self.set_all(at, len, State::Active, |chunk, _, _| chunk == State::Idle);
        self.counters.active_peak = self.counters.active_peak.max(self.chunks.active_bytes());
        self.demand[0] = self.demand[0].max(self.chunks.active_bytes());
    }

    /// A block at its home.
    fn put(&mut self, at: u64, size: u64, len: u64, stream: Stream) {
        self.take(at, len);
        self.enter_block(Block {
            at,
            size,
            len,
            stream,
        });
    }

    /// A block in a view all of whose bytes are free; its address.
    fn put_view(&mut self, id: ViewId, size: u64, len: u64, stream: Stream) -> Option<u64> {
        let view = self.views.get(id)?;
        let at = view.at;
        for (home, n) in views::first(&view.extents, len).collect::<Vec<_>>() {
            self.take(home, n);
        }
        self.views.enter(id);
        self.enter_block(Block {
            at,
            size,
            len,
            stream,
        });
        Some(at)
    }

    fn enter_block(&mut self, block: Block) {
        self.live.insert(block.at, block);
        self.counters.allocated(&block);
    }
}
