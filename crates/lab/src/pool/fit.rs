//! [`Fit`]: best fit and first fit in one arena that grows at its end, the baselines of every textbook.
//!
//! Free neighbours merge. The arena's physical size is what lay under its highest block so far, in granules: it never shrinks.
//! Growing by any number of granules is one map call. Streams mean nothing here: every block that is freed
//! may be used at once, which no allocator without knowledge of the work could do; so these baselines look better than they are.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ebb_units::{Bytes, GRANULE};

use super::policy::{Figures, Free, Policy, Refused, Request};

/// Which of the holes that are large enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// The smallest; of equals the one with the lowest address.
    Best,
    /// The one with the lowest address.
    First,
}

/// An arena with holes.
#[derive(Debug)]
pub struct Fit {
    choice: Choice,
    capacity: u64,
    unit: u64,
    /// Holes by address. None touches another, or the end.
    holes: BTreeMap<u64, u64>,
    /// The same by size.
    by_size: BTreeSet<(u64, u64)>,
    /// Size as asked for, of each block.
    blocks: HashMap<u64, u64>,
    /// Where the last block ends.
    end: u64,
    figures: Figures,
}

impl Fit {
    /// An empty arena that rounds every block up to a multiple of `unit` and grows up to `capacity` bytes.
    #[must_use]
    pub fn new(choice: Choice, capacity: u64, unit: u64) -> Self {
        Self {
            choice,
            capacity,
            unit,
            holes: BTreeMap::new(),
            by_size: BTreeSet::new(),
            blocks: HashMap::new(),
            end: 0,
            figures: Figures::default(),
        }
    }

    fn hole(&self, size: u64) -> Option<(u64, u64)> {
        match self.choice {
            Choice::Best => self
                .by_size
                .range((size, 0)..)
                .next()
                .map(|&(size, address)| (address, size)),
            Choice::First => self
                .holes
                .iter()
                .find(|&(_, &hole)| hole >= size)
                .map(|(&address, &size)| (address, size)),
        }
    }

    fn fill(&mut self, address: u64) -> u64 {
        let size = self.holes.remove(&address).unwrap_or(0);
        self.by_size.remove(&(size, address));
        size
    }

    fn open(&mut self, address: u64, size: u64) {
        self.holes.insert(address, size);
        self.by_size.insert((size, address));
    }

    fn set_end(&mut self, end: u64) {
        self.end = end;
        let physical = Bytes(end).round_up(GRANULE).0;
        if physical > self.figures.physical {
            self.figures.map_calls += 1;
            self.figures.physical = physical;
        }
    }
}

impl Policy for Fit {
    fn allocate(&mut self, request: Request) -> Result<u64, Refused> {
        let size = request.size.next_multiple_of(self.unit);
        let address = if let Some((address, hole)) = self.hole(size) {
            self.fill(address);
            if hole > size {
                self.open(address + size, hole - size);
            }
            address
        } else {
            let end = self.end.checked_add(size).ok_or(Refused(request.size))?;
            if Bytes(end).round_up(GRANULE).0 > self.capacity {
                return Err(Refused(request.size));
            }
            let address = self.end;
            self.set_end(end);
            address
        };
        self.blocks.insert(address, request.size);
        self.figures.live += request.size;
        Ok(address)
    }

    fn free(&mut self, address: u64, _free: Free) {
        let Some(asked) = self.blocks.remove(&address) else {
            return;
        };
        self.figures.live -= asked;
        let (mut start, mut end) = (address, address + asked.next_multiple_of(self.unit));
        if let Some((&before, &size)) = self.holes.range(..address).next_back()
            && before + size == start
        {
            self.fill(before);
            start = before;
        }
        if self.holes.contains_key(&end) {
            end += self.fill(end);
        }
        if end == self.end {
            self.set_end(start);
        } else {
            self.open(start, end - start);
        }
    }

    fn figures(&self) -> Figures {
        self.figures
    }
}
