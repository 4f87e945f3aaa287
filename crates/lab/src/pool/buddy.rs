//! [`Buddy`]: blocks of powers of two that split into halves and merge with their other half.
//!
//! One arena without end; its physical size is what lay under its highest block so far, in granules. Of the free blocks of the
//! smallest size that suffices it takes the lowest. As for [`super::fit`], streams mean nothing.

use std::collections::{BTreeSet, HashMap};

use ebb_units::{Bytes, GRANULE};

use super::policy::{Figures, Free, Policy, Refused, Request};

/// The smallest block is 512 bytes.
const SMALLEST: u32 = 9;
/// The arena.
const LARGEST: u32 = 62;

/// An arena of powers of two.
#[derive(Debug)]
pub struct Buddy {
    capacity: u64,
    /// Addresses of free blocks, by the power.
    free: Vec<BTreeSet<u64>>,
    /// Power, and size as asked for, of each block.
    blocks: HashMap<u64, (u32, u64)>,
    figures: Figures,
}

impl Buddy {
    /// An empty arena that grows up to `capacity` bytes.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        let mut free = vec![BTreeSet::new(); LARGEST as usize + 1];
        free[LARGEST as usize].insert(0);
        Self {
            capacity,
            free,
            blocks: HashMap::new(),
            figures: Figures::default(),
        }
    }
}

impl Policy for Buddy {
    fn allocate(&mut self, request: Request) -> Result<u64, Refused> {
        let refused = Refused(request.size);
        let size = request.size.checked_next_power_of_two().ok_or(refused)?;
        let power = size.trailing_zeros().max(SMALLEST);
        let found = (power..=LARGEST).find_map(|from| Some((from, *self.free[from as usize].first()?)));
        let (from, address) = found.ok_or(refused)?;
        let physical = Bytes(address + (1 << power)).round_up(GRANULE).0;
        if physical > self.capacity {
            return Err(refused);
        }
        self.free[from as usize].remove(&address);
        for half in power..from {
            self.free[half as usize].insert(address + (1 << half));
        }
        if physical > self.figures.physical {
            self.figures.physical = physical;
            self.figures.map_calls += 1;
        }
        self.blocks.insert(address, (power, request.size));
        self.figures.live += request.size;
        Ok(address)
    }

    fn free(&mut self, address: u64, _free: Free) {
        let Some((mut power, asked)) = self.blocks.remove(&address) else {
            return;
        };
        self.figures.live -= asked;
        let mut address = address;
        while power < LARGEST && self.free[power as usize].remove(&(address ^ (1 << power))) {
            address &= !(1 << power);
            power += 1;
        }
        self.free[power as usize].insert(address);
    }

    fn figures(&self) -> Figures {
        self.figures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_split_and_merge() {
        let mut buddy = Buddy::new(1 << 40);
        let allocate = |buddy: &mut Buddy, size| {
            let (stream, now_ns) = (0, 0);
            buddy.allocate(Request { size, stream, now_ns }).unwrap()
        };
        let free = Free {
            stream: 0,
            now_ns: 0,
            done_ns: 0,
        };
        let (a, b, c) = (
            allocate(&mut buddy, 513),
            allocate(&mut buddy, 1),
            allocate(&mut buddy, 512),
        );
        assert_eq!((a, b, c), (0, 1024, 1536));
        buddy.free(b, free);
        buddy.free(c, free);
        assert_eq!(allocate(&mut buddy, 1024), 1024);
        buddy.free(a, free);
        buddy.free(1024, free);
        assert!(buddy.free[LARGEST as usize].contains(&0), "all has merged");
    }
}
