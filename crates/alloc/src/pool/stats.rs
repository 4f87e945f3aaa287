//! [`Stats`]: counters that mean what the field means by them.

use super::{Block, Pool};

/// Powers of two from 1 byte up.
const CLASSES: usize = 64;

/// Where a pool stands. All in bytes unless the name says otherwise. Peaks are since the start or the last
/// [`Pool::reset_peaks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Stats {
    /// What the live blocks were asked for.
    pub requested: u64,
    /// The most of that.
    pub requested_peak: u64,
    /// What the live blocks take, rounded.
    pub allocated: u64,
    /// The most of that.
    pub allocated_peak: u64,
    /// `allocated`, and freed blocks that work still uses on more than their own stream.
    pub active: u64,
    /// Chunks that something lives in.
    pub touched: u64,
    /// The most of that.
    pub touched_peak: u64,
    /// Physical memory.
    pub reserved: u64,
    /// The most of that.
    pub reserved_peak: u64,
    /// Addresses with memory behind them. More than `reserved` by the views.
    pub mapped: u64,
    /// Physical memory that nothing lives in: what [`Pool::trim`] gives back.
    pub idle: u64,
    /// Physical memory that could not be given back so far.
    pub stuck: u64,
    /// All that was ever created.
    pub created_total: u64,
    /// All that was ever given back.
    pub released_total: u64,
    /// Inside blocks: taken beyond what was asked for.
    pub internal_fragmentation: u64,
    /// Between blocks: in chunks that something lives in, but part of no block.
    pub external_fragmentation: u64,
    /// The largest block that takes no call of the driver.
    pub largest_free: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Blocks ever.
    pub blocks_total: u64,
    /// Chunks, handles of the driver.
    pub chunks: u64,
    /// Stitched views that are kept.
    pub views: u64,
    /// How often a chunk was mapped.
    pub map_calls: u64,
    /// How often a mapping was taken away.
    pub unmap_calls: u64,
    /// Views that were made.
    pub stitched_total: u64,
    /// Chunks that were made anew in parts.
    pub cuts_total: u64,
    /// Granules that others' memory is shown at, since they were meshed.
    pub shadows: u64,
    /// Granules that were meshed into others.
    pub meshed_total: u64,
    /// Bytes that were copied for it.
    pub copied_total: u64,
    /// Plans that a failed call ended.
    pub failed_total: u64,
    /// About what the pool's own records take.
    pub records: u64,
}

/// Blocks of sizes from one power of two (included) to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ClassStats {
    /// The power of two.
    pub from: u64,
    /// Live blocks.
    pub blocks: u64,
    /// What they were asked for.
    pub requested: u64,
    /// What they take.
    pub allocated: u64,
    /// Blocks ever.
    pub blocks_total: u64,
}

#[derive(Debug)]
pub(super) struct Counters {
    pub(super) requested: u64,
    pub(super) requested_peak: u64,
    pub(super) allocated: u64,
    pub(super) allocated_peak: u64,
    pub(super) late: u64,
    pub(super) active_peak: u64,
    pub(super) physical_peak: u64,
    pub(super) created: u64,
    pub(super) released: u64,
    pub(super) maps: u64,
    pub(super) unmaps: u64,
    pub(super) stitched: u64,
    pub(super) cuts: u64,
    pub(super) failed: u64,
    pub(super) meshed: u64,
    pub(super) copied: u64,
    /// Plans ever.
    pub(super) plans: u64,
    /// Plans that were handed out and are not back.
    pub(super) in_plans: u64,
    total: u64,
    classes: [ClassStats; CLASSES],
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            requested: 0,
            requested_peak: 0,
            allocated: 0,
            allocated_peak: 0,
            late: 0,
            active_peak: 0,
            physical_peak: 0,
            created: 0,
            released: 0,
            maps: 0,
            unmaps: 0,
            stitched: 0,
            cuts: 0,
            failed: 0,
            meshed: 0,
            copied: 0,
            plans: 0,
            in_plans: 0,
            total: 0,
            classes: [ClassStats::default(); CLASSES],
        }
    }
}

fn class(len: u64) -> usize {
    len.max(1).ilog2() as usize
}

impl Counters {
    pub(super) fn allocated(&mut self, block: &Block) {
        self.requested += block.size;
        self.requested_peak = self.requested_peak.max(self.requested);
        self.allocated += block.len;
        self.allocated_peak = self.allocated_peak.max(self.allocated);
        self.total += 1;
        let class = &mut self.classes[class(block.len)];
        class.blocks += 1;
        class.blocks_total += 1;
        class.requested += block.size;
        class.allocated += block.len;
    }

    pub(super) fn freed(&mut self, block: &Block) {
        self.requested -= block.size;
        self.allocated -= block.len;
        let class = &mut self.classes[class(block.len)];
        class.blocks -= 1;
        class.requested -= block.size;
        class.allocated -= block.len;
    }
}

impl Pool {
    /// Where it stands. Walks the chunks.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let counters = &self.counters;
        let (mut mapped, mut stuck) = (0, 0);
        for (id, chunk) in self.chunks.iter() {
            mapped += chunk.len * chunk.maps.len() as u64;
            if self.orphans.contains(&id) {
                stuck += chunk.len;
            }
        }
        Stats {
            requested: counters.requested,
            requested_peak: counters.requested_peak,
            allocated: counters.allocated,
            allocated_peak: counters.allocated_peak,
            active: counters.allocated + counters.late,
            touched: self.chunks.active_bytes(),
            touched_peak: counters.active_peak,
            reserved: self.chunks.physical(),
            reserved_peak: counters.physical_peak,
            mapped,
            idle: self.chunks.idle_bytes(),
            stuck,
            created_total: counters.created,
            released_total: counters.released,
            internal_fragmentation: counters.allocated - counters.requested,
            external_fragmentation: self.scattered(),
            largest_free: self.runs.longest(),
            blocks: self.live.len() as u64,
            blocks_total: counters.total,
            chunks: self.chunks.len() as u64,
            views: self.views.len() as u64,
            map_calls: counters.maps,
            unmap_calls: counters.unmaps,
            stitched_total: counters.stitched,
            cuts_total: counters.cuts,
            shadows: self.meshes.shadows.len() as u64,
            meshed_total: counters.meshed,
            copied_total: counters.copied,
            failed_total: counters.failed,
            records: self.records(),
        }
    }

    /// Physical memory, and how often a chunk was mapped: of [`Stats`] what costs nothing to know.
    #[must_use]
    pub const fn physical(&self) -> (u64, u64) {
        (self.chunks.physical(), self.counters.maps)
    }

    /// Bytes that were copied to mesh granules.
    #[must_use]
    pub const fn copied(&self) -> u64 {
        self.counters.copied
    }

    /// [`Stats::external_fragmentation`].
    #[must_use]
    pub const fn scattered(&self) -> u64 {
        let active = self.counters.allocated + self.counters.late;
        self.chunks.active_bytes().saturating_sub(active)
    }

    /// A figure that changes with every block that comes or goes.
    #[must_use]
    pub fn changes(&self) -> u64 {
        // As many as came, and as many as went.
        2 * self.counters.total - self.live.len() as u64
    }

    /// What the live blocks were asked for.
    #[must_use]
    pub const fn requested(&self) -> u64 {
        self.counters.requested
    }

    /// By size: the classes that have ever had a block.
    pub fn classes(&self) -> impl Iterator<Item = ClassStats> + '_ {
        (0u32..)
            .zip(&self.counters.classes)
            .filter(|(_, class)| class.blocks_total > 0)
            .map(|(power, class)| ClassStats {
                from: 1 << power,
                ..*class
            })
    }

    /// Peaks begin anew.
    pub fn reset_peaks(&mut self) {
        let counters = &mut self.counters;
        counters.requested_peak = counters.requested;
        counters.allocated_peak = counters.allocated;
        counters.active_peak = self.chunks.active_bytes();
        counters.physical_peak = self.chunks.physical();
    }

    /// Entries of the tables at their size, with what a half-full tree adds.
    fn records(&self) -> u64 {
        const BLOCK: usize = size_of::<u64>() + size_of::<Block>();
        const RUN: usize = size_of::<u64>() + size_of::<super::runs::Run>() + 2 * size_of::<u64>();
        const CHUNK: usize =
            size_of::<super::ChunkId>() + size_of::<super::chunks::Chunk>() + 2 * size_of::<u64>();
        const MAPPING: usize = 3 * size_of::<u64>();
        const PART: usize = 4 * size_of::<u64>();
        let parts: usize = self.views.iter().map(|view| view.parts.len()).sum();
        let bytes = self.live.len() * BLOCK
            + self.runs.len() * RUN
            + self.chunks.len() * CHUNK
            + self.chunks.mappings() * MAPPING
            + self.views.len() * size_of::<super::views::View>()
            + parts * PART
            + self.meshes.shadows.len() * (MAPPING + size_of::<super::mesh::Shadow>());
        (bytes + bytes / 2 + size_of::<Self>()) as u64
    }
}
