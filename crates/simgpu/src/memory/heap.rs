//! Small pieces of memory that share blocks: what `cuMemAlloc` and pools give out below a block's size.

use std::collections::BTreeMap;

use super::spans::Spans;

/// What small allocations are aligned to, and how far apart they lie.
pub(crate) const SMALL: u64 = 512;

/// Blocks of one owner and the free spans in them.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    blocks: BTreeMap<u64, Block>,
}

#[derive(Debug)]
struct Block {
    size: u64,
    used: u64,
    free: Spans,
}

impl Heap {
    /// A place for `bytes` in a block that exists.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let size = bytes.next_multiple_of(SMALL);
        self.blocks.values_mut().find_map(|block| {
            let at = block.free.take(size, SMALL)?;
            block.used += size;
            Some(at)
        })
    }

    /// A new block, all free.
    pub(crate) fn add(&mut self, base: u64, size: u64) {
        self.blocks.insert(
            base,
            Block {
                size,
                used: 0,
                free: Spans::new(base, size),
            },
        );
    }

    /// Gives a piece back. Returns its block's base if the block is all free now.
    pub(crate) fn give(&mut self, address: u64, bytes: u64) -> Option<u64> {
        let size = bytes.next_multiple_of(SMALL);
        let (base, block) = self.blocks.range_mut(..=address).next_back()?;
        block.free.give(address, size);
        block.used -= size;
        (block.used == 0).then_some(*base)
    }

    /// Forgets a block that is all free.
    pub(crate) fn remove(&mut self, base: u64) {
        self.blocks.remove(&base);
    }

    /// The blocks that are all free, as base and size.
    pub(crate) fn empty_blocks(&self) -> Vec<(u64, u64)> {
        self.blocks
            .iter()
            .filter(|(_, block)| block.used == 0)
            .map(|(base, block)| (*base, block.size))
            .collect()
    }

    /// All blocks, as base and size.
    pub(crate) fn blocks(&self) -> Vec<(u64, u64)> {
        self.blocks
            .iter()
            .map(|(base, block)| (*base, block.size))
            .collect()
    }

    /// Bytes in blocks, and bytes given out.
    pub(crate) fn totals(&self) -> (u64, u64) {
        self.blocks.values().fold((0, 0), |(size, used), block| {
            (size + block.size, used + block.used)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_lie_512_apart() {
        let mut heap = Heap::default();
        assert_eq!(heap.take(1), None);
        heap.add(1 << 20, 4096);
        assert_eq!(
            (heap.take(1), heap.take(513), heap.take(1)),
            (Some(1 << 20), Some((1 << 20) + 512), Some((1 << 20) + 1536))
        );
        assert_eq!(heap.give((1 << 20) + 512, 513), None);
        assert_eq!(heap.take(1024), Some((1 << 20) + 512));
        assert_eq!(heap.totals(), (4096, 2048));
        heap.give(1 << 20, 1);
        heap.give((1 << 20) + 512, 1024);
        assert_eq!(heap.give((1 << 20) + 1536, 1), Some(1 << 20));
    }
}
