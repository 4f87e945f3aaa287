//! [`Gmlake`]: a model of GMLake (ASPLOS 2024), which stitches pieces of cached physical memory under new addresses.
//!
//! Requests under a granule go to a model of PyTorch's allocator, as GMLake leaves them to it. The others are served in granules
//! from *pieces* (physical memory with addresses of its own) and *stitched* blocks (other addresses for several pieces), of the same
//! stream, as the paper's best fit does it:
//!
//! 1. an idle piece or stitched block of exactly the size;
//! 2. else the smallest larger idle piece, split in two; the whole stays available as a stitched block;
//! 3. else idle pieces, the largest first and the last one split, stitched;
//! 4. else all idle pieces, and a new one for what is missing, stitched.
//!
//! A stitched block is idle while all its pieces are. Mapping is one call a granule, since GMLake's physical handles are that small; a split
//! costs none. At out of memory idle pieces go back to the driver, other streams' too, and it is tried once more. Beyond
//! [`MOST_STITCHED`] idle stitched blocks the oldest is forgotten. The paper's limit under which nothing is stitched is off: it
//! trades memory for speed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use ebb_units::GRANULE;

use super::event::Stream;
use super::policy::{Figures, Free, Policy, Refused, Request};
use super::torch::Torch;

/// Idle stitched blocks that are kept.
const MOST_STITCHED: usize = 1024;
/// Where our addresses begin; those of the small requests lie below.
const BASE: u64 = 1 << 61;

type Id = u64;

/// Physical memory with its own addresses.
#[derive(Debug)]
struct Piece {
    stream: Stream,
    address: u64,
    granules: u64,
    used: bool,
    /// Stitched blocks that it is part of.
    stitched: BTreeSet<Id>,
}

/// Addresses for several pieces.
#[derive(Debug)]
struct Stitched {
    stream: Stream,
    address: u64,
    granules: u64,
    pieces: Vec<Id>,
    /// How many of them are used.
    used: usize,
}

/// What is at an address.
#[derive(Debug, Clone, Copy)]
enum Block {
    Small,
    Piece(Id),
    Stitched(Id),
}

/// The model.
#[derive(Debug)]
pub struct Gmlake {
    capacity: u64,
    small: Torch,
    pieces: BTreeMap<Id, Piece>,
    stitched: BTreeMap<Id, Stitched>,
    /// By stream, granules, number.
    idle_pieces: BTreeSet<(Stream, u64, Id)>,
    idle_stitched: BTreeSet<(Stream, u64, Id)>,
    /// Sizes as asked for.
    blocks: HashMap<u64, (Block, u64)>,
    next_id: Id,
    next_address: u64,
    granules: u64,
    map_calls: u64,
    live: u64,
}

impl Gmlake {
    /// An empty one on a card of `capacity` bytes.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            small: Torch::new(capacity, false),
            pieces: BTreeMap::new(),
            stitched: BTreeMap::new(),
            idle_pieces: BTreeSet::new(),
            idle_stitched: BTreeSet::new(),
            blocks: HashMap::new(),
            next_id: 0,
            next_address: BASE,
            granules: 0,
            map_calls: 0,
            live: 0,
        }
    }

    fn id(&mut self) -> Id {
        self.next_id += 1;
        self.next_id
    }

    fn addresses(&mut self, granules: u64) -> Option<u64> {
        let address = self.next_address;
        self.next_address = address.checked_add(granules.checked_mul(GRANULE.0)?)?;
        Some(address)
    }

    /// New physical memory.
    fn create(&mut self, stream: Stream, granules: u64) -> Option<Id> {
        let held = self.granules.checked_add(granules)?.checked_mul(GRANULE.0)?;
        if held.checked_add(self.small.figures().physical)? > self.capacity {
            return None;
        }
        let address = self.addresses(granules)?;
        self.granules += granules;
        self.map_calls += granules;
        let id = self.id();
        let piece = Piece {
            stream,
            address,
            granules,
            used: false,
            stitched: BTreeSet::new(),
        };
        self.pieces.insert(id, piece);
        self.idle_pieces.insert((stream, granules, id));
        Some(id)
    }

    fn set_used(&mut self, id: Id, used: bool) {
        let Some(piece) = self.pieces.get_mut(&id) else {
            return;
        };
        debug_assert_ne!(piece.used, used);
        piece.used = used;
        let key = (piece.stream, piece.granules, id);
        if used {
            self.idle_pieces.remove(&key);
        } else {
            self.idle_pieces.insert(key);
        }
        for &number in &piece.stitched {
            if let Some(block) = self.stitched.get_mut(&number) {
                let key = (block.stream, block.granules, number);
                if used {
                    block.used += 1;
                    self.idle_stitched.remove(&key);
                } else {
                    block.used -= 1;
                    if block.used == 0 {
                        self.idle_stitched.insert(key);
                    }
                }
            }
        }
    }

    /// Cuts an idle piece; the rest, which is returned, is idle as well. Stitched blocks of it have both.
    fn split(&mut self, id: Id, granules: u64) -> Option<Id> {
        let rest_id = self.id();
        let piece = self.pieces.get_mut(&id)?;
        self.idle_pieces.remove(&(piece.stream, piece.granules, id));
        let rest = Piece {
            stream: piece.stream,
            address: piece.address + granules * GRANULE.0,
            granules: piece.granules - granules,
            used: false,
            stitched: piece.stitched.clone(),
        };
        piece.granules = granules;
        self.idle_pieces.insert((piece.stream, granules, id));
        self.idle_pieces.insert((rest.stream, rest.granules, rest_id));
        for number in &rest.stitched {
            if let Some(block) = self.stitched.get_mut(number)
                && let Some(place) = block.pieces.iter().position(|&piece| piece == id)
            {
                block.pieces.insert(place + 1, rest_id);
            }
        }
        self.pieces.insert(rest_id, rest);
        Some(rest_id)
    }

    /// Other addresses for these idle pieces, which are mapped there.
    fn stitch(&mut self, pieces: Vec<Id>) -> Option<Id> {
        let stream = self.pieces.get(pieces.first()?)?.stream;
        let granules = pieces
            .iter()
            .filter_map(|id| self.pieces.get(id))
            .map(|piece| piece.granules)
            .sum();
        let address = self.addresses(granules)?;
        self.map_calls += granules;
        let number = self.id();
        for id in &pieces {
            if let Some(piece) = self.pieces.get_mut(id) {
                piece.stitched.insert(number);
            }
        }
        let block = Stitched {
            stream,
            address,
            granules,
            pieces,
            used: 0,
        };
        self.stitched.insert(number, block);
        self.idle_stitched.insert((stream, granules, number));
        if self.idle_stitched.len() > MOST_STITCHED
            && let Some(oldest) = self.idle_stitched.iter().map(|&(.., number)| number).min()
        {
            self.unstitch(oldest);
        }
        Some(number)
    }

    /// Forgets an idle stitched block.
    fn unstitch(&mut self, number: Id) {
        let Some(block) = self.stitched.remove(&number) else {
            return;
        };
        self.idle_stitched.remove(&(block.stream, block.granules, number));
        for id in block.pieces {
            if let Some(piece) = self.pieces.get_mut(&id) {
                piece.stitched.remove(&number);
            }
        }
    }

    /// A block that is idle still.
    fn find(&mut self, stream: Stream, granules: u64) -> Option<Block> {
        let exact = (stream, granules, 0)..(stream, granules + 1, 0);
        if let Some(&(.., id)) = self.idle_pieces.range(exact.clone()).next() {
            return Some(Block::Piece(id));
        }
        if let Some(&(.., number)) = self.idle_stitched.range(exact).next() {
            return Some(Block::Stitched(number));
        }
        let larger = self
            .idle_pieces
            .range((stream, granules + 1, 0)..)
            .next()
            .copied();
        if let Some((owner, _, id)) = larger
            && owner == stream
        {
            let rest = self.split(id, granules)?;
            self.stitch(vec![id, rest])?;
            return Some(Block::Piece(id));
        }
        // All idle pieces are smaller.
        let (mut together, mut found) = (Vec::new(), 0);
        for &(_, size, id) in self
            .idle_pieces
            .range((stream, 0, 0)..(stream, granules, 0))
            .rev()
        {
            together.push((id, size));
            found += size;
            if found >= granules {
                break;
            }
        }
        if found > granules {
            let &(last, size) = together.last()?;
            self.split(last, size - (found - granules))?;
        }
        let mut pieces: Vec<Id> = together.into_iter().map(|(id, _)| id).collect();
        if found < granules {
            pieces.push(self.create(stream, granules - found)?);
        }
        match pieces[..] {
            [one] => Some(Block::Piece(one)),
            _ => self.stitch(pieces).map(Block::Stitched),
        }
    }

    /// Idle pieces of these streams go back to the driver.
    fn release(&mut self, streams: Range<Stream>) {
        let idle: Vec<_> = self
            .idle_pieces
            .range((streams.start, 0, 0)..(streams.end, 0, 0))
            .copied()
            .collect();
        for (stream, granules, id) in idle {
            let Some(piece) = self.pieces.remove(&id) else {
                continue;
            };
            self.idle_pieces.remove(&(stream, granules, id));
            self.granules -= granules;
            for number in piece.stitched {
                self.unstitch(number);
            }
        }
    }

    /// How much the small requests may hold beside ours.
    fn share(&mut self) {
        self.small
            .set_capacity(self.capacity.saturating_sub(self.granules * GRANULE.0));
    }
}

impl Policy for Gmlake {
    fn allocate(&mut self, request: Request) -> Result<u64, Refused> {
        let refused = Refused(request.size);
        let Request { size, stream, .. } = request;
        let (block, address) = if size < GRANULE.0 {
            self.share();
            let mut got = self.small.allocate(request);
            if got.is_err() {
                self.release(0..Stream::MAX);
                self.share();
                got = self.small.allocate(request);
            }
            (Block::Small, got?)
        } else {
            let granules = size.div_ceil(GRANULE.0);
            let mut found = self.find(stream, granules);
            if found.is_none() {
                self.release(0..Stream::MAX);
                self.small.release_cached();
                found = self.find(stream, granules);
            }
            let block = found.ok_or(refused)?;
            let (pieces, address) = match block {
                Block::Piece(id) => (vec![id], self.pieces.get(&id).ok_or(refused)?.address),
                Block::Stitched(number) => {
                    let block = self.stitched.get(&number).ok_or(refused)?;
                    (block.pieces.clone(), block.address)
                }
                Block::Small => return Err(refused),
            };
            for id in pieces {
                self.set_used(id, true);
            }
            (block, address)
        };
        self.blocks.insert(address, (block, size));
        self.live += size;
        Ok(address)
    }

    fn free(&mut self, address: u64, free: Free) {
        let Some((block, size)) = self.blocks.remove(&address) else {
            return;
        };
        self.live -= size;
        match block {
            Block::Small => self.small.free(address, free),
            Block::Piece(id) => self.set_used(id, false),
            Block::Stitched(number) => {
                let pieces = self.stitched.get(&number).map(|block| block.pieces.clone());
                for id in pieces.into_iter().flatten() {
                    self.set_used(id, false);
                }
            }
        }
    }

    fn end(&mut self, streams: Range<Stream>, now_ns: u64) {
        self.small.end(streams.clone(), now_ns);
        self.release(streams);
    }

    fn figures(&self) -> Figures {
        let small = self.small.figures();
        Figures {
            live: self.live,
            physical: small.physical + self.granules * GRANULE.0,
            map_calls: small.map_calls + self.map_calls,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FREE: Free = Free {
        stream: 0,
        now_ns: 0,
        done_ns: 0,
    };

    fn allocate(lake: &mut Gmlake, granules: u64) -> Result<u64, Refused> {
        let size = granules * GRANULE.0;
        lake.allocate(Request {
            size,
            stream: 0,
            now_ns: 0,
        })
    }

    #[test]
    fn holes_are_stitched_and_found_again() {
        let mut lake = Gmlake::new(1 << 40);
        let blocks: Vec<u64> = (0..4).map(|_| allocate(&mut lake, 3).unwrap()).collect();
        lake.free(blocks[0], FREE);
        lake.free(blocks[2], FREE);
        // Six granules in two holes of three; a whole new range of addresses, six more calls.
        let six = allocate(&mut lake, 6).unwrap();
        assert_eq!(
            (lake.figures().physical, lake.figures().map_calls),
            (12 * GRANULE.0, 18)
        );
        lake.free(six, FREE);
        // The same again costs nothing.
        assert_eq!(allocate(&mut lake, 6), Ok(six));
        assert_eq!(lake.figures().map_calls, 18);
        lake.free(six, FREE);
        // One granule is split off a piece; the stitched block is not idle meanwhile.
        let one = allocate(&mut lake, 1).unwrap();
        assert_ne!(allocate(&mut lake, 6), Ok(six));
        assert_eq!(lake.figures().physical, 13 * GRANULE.0, "five idle and a new one");
        lake.free(one, FREE);
        lake.end(0..1, 0);
        assert_eq!(lake.figures().physical, 12 * GRANULE.0);
    }

    #[test]
    fn what_small_requests_hold_counts() {
        let mut lake = Gmlake::new(4 * GRANULE.0);
        let small = lake.allocate(Request {
            size: 1,
            stream: 0,
            now_ns: 0,
        });
        assert!(allocate(&mut lake, 4).is_err());
        assert!(allocate(&mut lake, 3).is_ok());
        lake.free(small.unwrap(), FREE);
        assert!(allocate(&mut lake, 1).is_ok(), "the cached segment goes back");
    }
}
