//! [`Chunks`]: physical memory, and which addresses it is mapped at.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

/// A piece of physical memory that the driver knows by one handle. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(pub u64);

/// What a chunk does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing lives in it; its home addresses are free bytes.
    Idle,
    /// Something lives in it, or free bytes of it are out for a plan.
    Active,
    /// A plan uses it, or it is to be released.
    Held,
}

#[derive(Clone, Debug)]
pub(super) struct Chunk {
    /// Bytes.
    pub(super) len: u64,
    /// Where its bytes are counted: every byte has exactly one home address.
    pub(super) home: u64,
    /// The driver has made it, and not got it back.
    pub(super) exists: bool,
    pub(super) state: State,
    /// Where it is mapped, home included.
    pub(super) maps: Vec<u64>,
    /// Its place among the idle ones, if it is one.
    place: usize,
}

impl Chunk {
    /// The mappings beside its home.
    pub(super) fn aliases(&self) -> impl Iterator<Item = u64> + '_ {
        let home = self.home;
        self.maps.iter().copied().filter(move |&at| at != home)
    }
}

/// All chunks.
///
/// # Invariants
/// `maps` holds the mappings of all chunks; none overlaps another. `idle` holds the idle chunks, and these are mapped at home.
#[derive(Clone, Debug, Default)]
pub(super) struct Chunks {
    /// Never walked where the order would matter.
    chunks: FxHashMap<ChunkId, Chunk>,
    /// Every mapping, by address: length and chunk.
    maps: BTreeMap<u64, (u64, ChunkId)>,
    /// In no order.
    idle: Vec<ChunkId>,
    idle_bytes: u64,
    /// Bytes of chunks that something lives in.
    active_bytes: u64,
    physical: u64,
    next: u64,
}

impl Chunks {
    /// A chunk that the driver is to make.
    pub(super) fn draft(&mut self, home: u64, len: u64) -> ChunkId {
        let id = ChunkId(self.next);
        self.next += 1;
        self.chunks.insert(
            id,
            Chunk {
                len,
                home,
                exists: false,
                state: State::Held,
                maps: Vec::new(),
                place: 0,
            },
        );
        id
    }

    pub(super) fn get(&self, id: ChunkId) -> Option<&Chunk> {
        self.chunks.get(&id)
    }

    pub(super) fn created(&mut self, id: ChunkId) {
        if let Some(chunk) = self.chunks.get_mut(&id) {
            chunk.exists = true;
            self.physical += chunk.len;
        }
    }

    pub(super) fn mapped(&mut self, id: ChunkId, at: u64) {
        if let Some(chunk) = self.chunks.get_mut(&id) {
            chunk.maps.push(at);
            self.maps.insert(at, (chunk.len, id));
        }
    }

    pub(super) fn unmapped(&mut self, id: ChunkId, at: u64) {
        if let Some(chunk) = self.chunks.get_mut(&id) {
            chunk.maps.retain(|&other| other != at);
            self.maps.remove(&at);
        }
    }

    pub(super) fn released(&mut self, id: ChunkId) {
        if let Some(chunk) = self.chunks.remove(&id)
            && chunk.exists
        {
            self.physical -= chunk.len;
        }
    }

    /// Forgets a chunk that was never made.
    pub(super) fn undraft(&mut self, id: ChunkId) {
        if self.chunks.get(&id).is_some_and(|chunk| !chunk.exists) {
            self.chunks.remove(&id);
        }
    }

    pub(super) fn set(&mut self, id: ChunkId, state: State) {
        let Some(chunk) = self.chunks.get_mut(&id) else {
            return;
        };
        let (len, place, before) = (chunk.len, chunk.place, chunk.state);
        chunk.state = state;
        if state == State::Idle {
            chunk.place = self.idle.len();
            self.idle.push(id);
            self.idle_bytes += len;
        }
        match before {
            State::Idle => {
                self.idle.swap_remove(place);
                if let Some(moved) = self.idle.get(place).and_then(|id| self.chunks.get_mut(id)) {
                    moved.place = place;
                }
                self.idle_bytes -= len;
            }
            State::Active => self.active_bytes -= len,
            State::Held => {}
        }
        if state == State::Active {
            self.active_bytes += len;
        }
    }

    /// The mappings that share an address with `[at, at + len)`, lowest first: start, length and chunk.
    pub(super) fn over(&self, at: u64, len: u64) -> impl Iterator<Item = (u64, u64, ChunkId)> + '_ {
        // Mostly one begins there.
        let first = if self.maps.contains_key(&at) {
            at
        } else {
            self.maps.range(..at).next_back().map_or(at, |(&start, _)| start)
        };
        self.maps
            .range(first..at + len)
            .map(|(&start, &(n, id))| (start, n, id))
            .filter(move |&(start, n, _)| start + n > at)
    }

    /// The parts of `[at, at + len)` with nothing mapped.
    pub(super) fn gaps(&self, at: u64, len: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut from = at;
        for (start, n, _) in self.over(at, len) {
            if start > from {
                gaps.push((from, start - from));
            }
            from = from.max(start + n);
        }
        if from < at + len {
            gaps.push((from, at + len - from));
        }
        gaps
    }

    /// The chunk that is mapped at exactly this address.
    pub(super) fn at(&self, at: u64) -> Option<ChunkId> {
        self.maps.get(&at).map(|(_, id)| *id)
    }

    /// Idle chunks, in no order.
    pub(super) fn idle(&self) -> impl Iterator<Item = (ChunkId, &Chunk)> + '_ {
        self.idle
            .iter()
            .filter_map(|id| Some((*id, self.chunks.get(id)?)))
    }

    /// Bytes and ids of idle chunks, the largest first.
    pub(super) fn idle_by_size(&self) -> Vec<(u64, ChunkId)> {
        let mut idle: Vec<(u64, ChunkId)> = self.idle().map(|(id, chunk)| (chunk.len, id)).collect();
        idle.sort_unstable_by(|a, b| b.cmp(a));
        idle
    }

    pub(super) const fn idle_bytes(&self) -> u64 {
        self.idle_bytes
    }

    pub(super) const fn active_bytes(&self) -> u64 {
        self.active_bytes
    }

    pub(super) const fn physical(&self) -> u64 {
        self.physical
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ChunkId, &Chunk)> {
        self.chunks.iter().map(|(&id, chunk)| (id, chunk))
    }

    pub(super) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(super) fn mappings(&self) -> usize {
        self.maps.len()
    }
}
