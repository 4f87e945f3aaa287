//! [`Torch`]: a model of PyTorch's caching allocator, with segments from `cudaMalloc` or with expandable ones.
//!
//! What is modelled: rounding to 512 bytes; a pool for blocks up to 1 MiB and one for larger; segments of 2 MiB, of 20 MiB for
//! requests under 10 MiB, of the size in steps of 2 MiB above; best fit among the free blocks of the *same stream*; when the rest
//! of a block is split off; merging of neighbours; at out of memory, all cached segments that are not split go back, and it is
//! tried once more. With expandable segments: one range of addresses for each stream and pool, mapped page by page (2 MiB, or 20
//! MiB in the pool of the large) from its start, holes first; at out of memory, the pages under free blocks are unmapped.
//!
//! What is not: options that are off by default (roundings to powers of two, `max_split_size`, garbage collection), private pools of
//! graphs, memory that other libraries hold. The recorded figures of real runs are the check: `tests/pool_data.rs`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use super::event::Stream;
use super::policy::{Figures, Free, Policy, Refused, Request};

const MIB: u64 = 1 << 20;
/// Sizes are rounded up to multiples of this.
const ROUND: u64 = 512;
/// Blocks up to this size are of the small pool.
const SMALL: u64 = MIB;
/// Segments of the small pool, and pages of its expandable segment.
const SMALL_SEGMENT: u64 = 2 * MIB;
/// Segments of the large pool for requests under [`OWN_SEGMENT`], and pages of its expandable segment.
const LARGE_SEGMENT: u64 = 20 * MIB;
/// From here on a request gets a segment of its own size.
const OWN_SEGMENT: u64 = 10 * MIB;
/// To which such a segment is rounded.
const ROUND_SEGMENT: u64 = 2 * MIB;
/// A larger range of addresses is not reserved for an expandable segment.
const MOST_ADDRESSES: u64 = 1 << 60;

type Id = usize;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Size as asked for.
    Allocated(u64),
    Free,
    /// Addresses of an expandable segment without memory.
    Unmapped,
}

/// A part of a segment.
#[derive(Debug, Clone, Copy)]
struct Block {
    /// Where its segment begins.
    base: u64,
    address: u64,
    size: u64,
    stream: Stream,
    pool: usize,
    state: State,
    /// Neighbours in the same segment.
    before: Option<Id>,
    after: Option<Id>,
}

#[derive(Debug, Default)]
struct Pool {
    /// Free blocks by stream, size, address.
    free: BTreeSet<(Stream, u64, u64, Id)>,
    /// Unmapped ones by stream and address.
    unmapped: BTreeSet<(Stream, u64, Id)>,
}

/// The model.
#[derive(Debug)]
pub struct Torch {
    capacity: u64,
    expandable: bool,
    blocks: Vec<Block>,
    spare_ids: Vec<Id>,
    /// Small and large.
    pools: [Pool; 2],
    /// By address.
    allocated: HashMap<u64, Id>,
    /// Where the next segment will lie.
    next_address: u64,
    /// Addresses of segments that were given back, by size.
    spare_addresses: BTreeMap<u64, Vec<u64>>,
    figures: Figures,
}

impl Torch {
    /// An empty one on a card of `capacity` bytes.
    #[must_use]
    pub fn new(capacity: u64, expandable: bool) -> Self {
        Self {
            capacity,
            expandable,
            blocks: Vec::new(),
            spare_ids: Vec::new(),
            pools: Default::default(),
            allocated: HashMap::new(),
            next_address: LARGE_SEGMENT,
            spare_addresses: BTreeMap::new(),
            figures: Figures::default(),
        }
    }

    /// Another part of the card may be used from now on. What is held above it stays.
    pub(super) fn set_capacity(&mut self, capacity: u64) {
        self.capacity = capacity;
    }

    /// Gives back all that is cached.
    pub(super) fn release_cached(&mut self) {
        self.release(0..Stream::MAX);
    }

    fn add(&mut self, block: Block) -> Id {
        let id = self.spare_ids.pop().unwrap_or_else(|| {
            self.blocks.push(block);
            self.blocks.len() - 1
        });
        self.blocks[id] = block;
        id
    }

    /// Makes the block findable, if it is free or unmapped.
    fn insert(&mut self, id: Id) {
        let Block {
            address,
            size,
            stream,
            pool,
            state,
            ..
        } = self.blocks[id];
        let pool = &mut self.pools[pool];
        match state {
            State::Free => _ = pool.free.insert((stream, size, address, id)),
            State::Unmapped => _ = pool.unmapped.insert((stream, address, id)),
            State::Allocated(_) => {}
        }
    }

    fn remove(&mut self, id: Id) {
        let Block {
            address,
            size,
            stream,
            pool,
            state,
            ..
        } = self.blocks[id];
        let pool = &mut self.pools[pool];
        match state {
            State::Free => _ = pool.free.remove(&(stream, size, address, id)),
            State::Unmapped => _ = pool.unmapped.remove(&(stream, address, id)),
            State::Allocated(_) => {}
        }
    }

    /// Cuts a block that is in no set; returns what is behind the first `size` bytes, in no set either.
    fn split(&mut self, id: Id, size: u64) -> Id {
        let whole = self.blocks[id];
        let rest = self.add(Block {
            address: whole.address + size,
            size: whole.size - size,
            before: Some(id),
            ..whole
        });
        if let Some(after) = whole.after {
            self.blocks[after].before = Some(rest);
        }
        let block = &mut self.blocks[id];
        block.size = size;
        block.after = Some(rest);
        rest
    }

    /// Merges with neighbours of the same state, and makes it findable.
    fn settle(&mut self, id: Id) -> Id {
        let mut id = id;
        let same = |blocks: &[Block], a: Id, b: Id| blocks[a].state == blocks[b].state;
        if let Some(after) = self.blocks[id]
            .after
            .filter(|&after| same(&self.blocks, id, after))
        {
            self.remove(after);
            self.join(id, after);
        }
        if let Some(before) = self.blocks[id]
            .before
            .filter(|&before| same(&self.blocks, id, before))
        {
            self.remove(before);
            self.join(before, id);
            id = before;
        }
        self.insert(id);
        id
    }

    fn join(&mut self, id: Id, next: Id) {
        let Block { size, after, .. } = self.blocks[next];
        if let Some(after) = after {
            self.blocks[after].before = Some(id);
        }
        self.blocks[id].size += size;
        self.blocks[id].after = after;
        self.spare_ids.push(next);
    }

    /// A free block that suffices, in no set any more.
    fn cached(&mut self, pool: usize, stream: Stream, size: u64) -> Option<Id> {
        let mut candidates = self.pools[pool]
            .free
            .range((stream, size, 0, 0)..)
            .take_while(|block| block.0 == stream)
            .map(|&(.., id)| id);
        let mut best = candidates.next()?;
        if self.expandable {
            // What can still grow counts as large as it can get: the end of the segment is taken last.
            let reach = |id: Id| {
                let block = &self.blocks[id];
                let more = block.after.map(|after| &self.blocks[after]);
                block.size
                    + more
                        .filter(|more| more.state == State::Unmapped)
                        .map_or(0, |more| more.size)
            };
            let split = |id: Id| self.blocks[id].before.is_some() || self.blocks[id].after.is_some();
            for next in candidates {
                if !split(best) || reach(next) >= reach(best) {
                    break;
                }
                best = next;
            }
        }
        self.remove(best);
        Some(best)
    }

    /// Addresses that no other segment has.
    fn addresses(&mut self, size: u64) -> Option<u64> {
        if let Some(address) = self.spare_addresses.get_mut(&size).and_then(Vec::pop) {
            return Some(address);
        }
        let address = self.next_address;
        self.next_address = address.checked_add(size)?;
        Some(address)
    }

    /// Takes memory from the card.
    fn take(&mut self, bytes: u64) -> Option<()> {
        let physical = self.figures.physical.checked_add(bytes)?;
        if physical > self.capacity {
            return None;
        }
        self.figures.physical = physical;
        Some(())
    }

    /// A segment of its own, as one block that is in no set.
    fn segment(&mut self, pool: usize, stream: Stream, size: u64) -> Option<Id> {
        let size = if size <= SMALL {
            SMALL_SEGMENT
        } else if size < OWN_SEGMENT {
            LARGE_SEGMENT
        } else {
            size.checked_next_multiple_of(ROUND_SEGMENT)?
        };
        self.take(size)?;
        self.figures.map_calls += 1;
        let Some(address) = self.addresses(size) else {
            self.figures.physical -= size;
            return None;
        };
        Some(self.add(Block {
            base: address,
            address,
            size,
            stream,
            pool,
            state: State::Free,
            before: None,
            after: None,
        }))
    }

    fn page(pool: usize) -> u64 {
        [SMALL_SEGMENT, LARGE_SEGMENT][pool]
    }

    /// A free block of an expandable segment, grown until it suffices; in no set any more.
    fn expand(&mut self, pool: usize, stream: Stream, size: u64) -> Option<Id> {
        let mut id = match self.growable(pool, stream, size) {
            Some(id) => id,
            None => {
                let page = Self::page(pool);
                let most = self
                    .capacity
                    .saturating_add(self.capacity / 8)
                    .min(MOST_ADDRESSES);
                let all = most / page * page;
                if all < size {
                    return None;
                }
                let address = self.addresses(all)?;
                let id = self.add(Block {
                    base: address,
                    address,
                    size: all,
                    stream,
                    pool,
                    state: State::Unmapped,
                    before: None,
                    after: None,
                });
                self.insert(id);
                id
            }
        };
        if self.blocks[id].state == State::Unmapped {
            id = self.map(id, size)?;
        }
        while self.blocks[id].size < size {
            let more = size - self.blocks[id].size;
            let next = self.blocks[id].after?;
            id = self.map(next, more)?;
        }
        self.remove(id);
        Some(id)
    }

    /// The first unmapped block, or the free one before it, behind which enough addresses follow.
    fn growable(&self, pool: usize, stream: Stream, size: u64) -> Option<Id> {
        let usable = |id: &Id| !matches!(self.blocks[*id].state, State::Allocated(_));
        self.pools[pool]
            .unmapped
            .range((stream, 0, 0)..)
            .take_while(|block| block.0 == stream)
            .map(|&(.., id)| self.blocks[id].before.filter(usable).unwrap_or(id))
            .find(|&id| {
                let (mut bytes, mut next) = (0, Some(id));
                while let Some(id) = next.filter(usable).filter(|_| bytes < size) {
                    bytes += self.blocks[id].size;
                    next = self.blocks[id].after;
                }
                bytes >= size
            })
    }

    /// Maps the first `size` bytes of an unmapped block, or all of it, in whole pages. The block that it becomes part of.
    fn map(&mut self, id: Id, size: u64) -> Option<Id> {
        let Block { pool, size: all, .. } = self.blocks[id];
        let page = Self::page(pool);
        let bytes = size.min(all).next_multiple_of(page);
        self.take(bytes)?;
        self.figures.map_calls += bytes / page;
        self.remove(id);
        if bytes < all {
            let rest = self.split(id, bytes);
            self.insert(rest);
        }
        self.blocks[id].state = State::Free;
        Some(self.settle(id))
    }

    /// Unmaps the pages that lie wholly in a free block.
    fn unmap(&mut self, id: Id) {
        let Block {
            base,
            address,
            size,
            pool,
            ..
        } = self.blocks[id];
        let page = Self::page(pool);
        let from = base + (address - base).next_multiple_of(page);
        let to = base + (address + size - base) / page * page;
        if from >= to {
            return;
        }
        self.remove(id);
        let mut middle = id;
        if from > address {
            middle = self.split(id, from - address);
            self.insert(id);
        }
        if to < address + size {
            let rest = self.split(middle, to - from);
            self.insert(rest);
        }
        self.blocks[middle].state = State::Unmapped;
        self.figures.physical -= to - from;
        let whole = self.settle(middle);
        let block = self.blocks[whole];
        if block.before.is_none() && block.after.is_none() {
            self.drop_segment(whole);
        }
    }

    /// Forgets a segment that is one block; its memory is counted by the caller.
    fn drop_segment(&mut self, id: Id) {
        self.remove(id);
        let Block { address, size, .. } = self.blocks[id];
        self.spare_addresses.entry(size).or_default().push(address);
        self.spare_ids.push(id);
    }

    /// Gives back what is cached for these streams.
    fn release(&mut self, streams: Range<Stream>) {
        for pool in 0..self.pools.len() {
            let free = self.pools[pool].free.range((streams.start, 0, 0, 0)..);
            let ids: Vec<Id> = free
                .take_while(|block| block.0 < streams.end)
                .map(|&(.., id)| id)
                .collect();
            for id in ids {
                let block = self.blocks[id];
                if self.expandable {
                    self.unmap(id);
                } else if block.before.is_none() && block.after.is_none() {
                    self.figures.physical -= block.size;
                    self.drop_segment(id);
                }
            }
        }
    }

    fn find(&mut self, pool: usize, stream: Stream, size: u64) -> Option<Id> {
        if self.expandable {
            self.expand(pool, stream, size)
        } else {
            self.segment(pool, stream, size)
        }
    }
}

impl Policy for Torch {
    fn allocate(&mut self, request: Request) -> Result<u64, Refused> {
        let refused = Refused(request.size);
        let size = request.size.checked_next_multiple_of(ROUND).ok_or(refused)?;
        let pool = usize::from(size > SMALL);
        let stream = request.stream;
        let mut found = self.cached(pool, stream, size);
        if found.is_none() {
            found = self.find(pool, stream, size);
        }
        if found.is_none() {
            self.release(0..Stream::MAX);
            found = self.find(pool, stream, size);
        }
        let id = found.ok_or(refused)?;
        let rest = self.blocks[id].size - size;
        let split = if pool == 0 || self.expandable {
            rest >= ROUND
        } else {
            rest > SMALL
        };
        if split {
            let rest = self.split(id, size);
            self.insert(rest);
        }
        self.blocks[id].state = State::Allocated(request.size);
        let address = self.blocks[id].address;
        self.allocated.insert(address, id);
        self.figures.live += request.size;
        Ok(address)
    }

    fn free(&mut self, address: u64, _free: Free) {
        let Some(id) = self.allocated.remove(&address) else {
            return;
        };
        if let State::Allocated(asked) = self.blocks[id].state {
            self.figures.live -= asked;
        }
        self.blocks[id].state = State::Free;
        self.settle(id);
    }

    fn end(&mut self, streams: Range<Stream>, _now_ns: u64) {
        self.release(streams);
    }

    fn figures(&self) -> Figures {
        self.figures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocate(torch: &mut Torch, size: u64, stream: Stream) -> Result<u64, Refused> {
        let now_ns = 0;
        torch.allocate(Request { size, stream, now_ns })
    }

    fn free(torch: &mut Torch, address: u64) {
        let free = Free {
            stream: 0,
            now_ns: 0,
            done_ns: 0,
        };
        torch.free(address, free);
    }

    #[test]
    fn segments_are_as_large_as_pytorchs() {
        for (size, segment) in [
            (1, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 1, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (10 * MIB + 1, 12 * MIB),
        ] {
            let mut torch = Torch::new(1 << 40, false);
            allocate(&mut torch, size, 0).unwrap();
            assert_eq!(torch.figures().physical, segment, "{size}");
        }
    }

    #[test]
    fn a_large_block_keeps_a_rest_of_up_to_a_mebibyte() {
        let mut torch = Torch::new(1 << 40, false);
        let first = allocate(&mut torch, 12 * MIB, 0).unwrap();
        free(&mut torch, first);
        // 1 MiB would be left: it stays with the block, so the next request needs a segment.
        assert_eq!(allocate(&mut torch, 11 * MIB, 0), Ok(first));
        allocate(&mut torch, MIB + 1, 0).unwrap();
        assert_eq!(torch.figures().physical, 32 * MIB);
        let mut torch = Torch::new(1 << 40, false);
        let first = allocate(&mut torch, 12 * MIB, 0).unwrap();
        free(&mut torch, first);
        allocate(&mut torch, 10 * MIB, 0).unwrap();
        assert_eq!(allocate(&mut torch, 2 * MIB, 0), Ok(first + 10 * MIB));
    }

    #[test]
    fn what_one_stream_freed_is_no_other_streams() {
        for expandable in [false, true] {
            let mut torch = Torch::new(1 << 40, expandable);
            let first = allocate(&mut torch, 40 * MIB, 0).unwrap();
            free(&mut torch, first);
            allocate(&mut torch, 40 * MIB, 1).unwrap();
            assert_eq!(torch.figures().physical, 80 * MIB);
            assert_eq!(allocate(&mut torch, 40 * MIB, 0), Ok(first));
        }
    }

    #[test]
    fn out_of_memory_gives_back_what_is_not_split_and_tries_again() {
        let mut torch = Torch::new(100 * MIB, false);
        let whole = allocate(&mut torch, 40 * MIB, 0).unwrap();
        let split = allocate(&mut torch, 40 * MIB, 0).unwrap();
        free(&mut torch, whole);
        free(&mut torch, split);
        allocate(&mut torch, 10 * MIB, 0).unwrap();
        // 40 MiB are whole and go, 30 MiB are the rest of a split segment and stay.
        assert!(allocate(&mut torch, 60 * MIB, 0).is_ok());
        assert_eq!(torch.figures().physical, 100 * MIB);
        assert!(
            allocate(&mut torch, 40 * MIB, 0).is_err(),
            "30 MiB are cached, but not to be had"
        );
    }

    #[test]
    fn expandable_segments_give_back_the_pages_under_free_blocks() {
        let mut torch = Torch::new(100 * MIB, true);
        let blocks: Vec<u64> = (0..5)
            .map(|_| allocate(&mut torch, 20 * MIB, 0).unwrap())
            .collect();
        assert_eq!(
            (torch.figures().physical, torch.figures().map_calls),
            (100 * MIB, 5)
        );
        free(&mut torch, blocks[1]);
        free(&mut torch, blocks[3]);
        assert!(
            allocate(&mut torch, 40 * MIB, 0).is_ok(),
            "the pages of two holes move to the end"
        );
        assert_eq!(
            (torch.figures().physical, torch.figures().map_calls),
            (100 * MIB, 7)
        );
        assert!(allocate(&mut torch, MIB, 0).is_err());
        for stream in 0..2 {
            torch.end(stream..stream + 1, 0);
        }
        assert_eq!(
            torch.figures().physical,
            100 * MIB,
            "live blocks keep their memory"
        );
    }
}
