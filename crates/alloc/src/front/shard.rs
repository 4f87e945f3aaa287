//! [`Shard`]: blocks of the pool that a few threads keep between a free and the next allocation of the same size.

use rustc_hash::FxHashMap;

use super::FrontClass;
use crate::pool::{FreeError, Stream};

/// A block that this shard got from the pool.
#[derive(Clone, Copy, Debug)]
struct Slot {
    at: u64,
    /// What was asked for by who holds it.
    size: u64,
    class: u32,
    /// Somebody holds it; else it is in its class.
    held: bool,
}

/// Blocks that are interchangeable: of one rounded size, used last by one stream.
#[derive(Debug)]
struct Class {
    stream: Stream,
    len: u64,
    /// Slots of free blocks, the one that was freed last at the end.
    free: Vec<u32>,
}

/// The blocks of one shard. Every block is in exactly one shard, from when it comes from the pool until it goes back.
#[derive(Debug, Default)]
pub(super) struct Shard {
    slots: Vec<Slot>,
    spare: Vec<u32>,
    by_address: FxHashMap<u64, u32>,
    classes: Vec<Class>,
    by_size: FxHashMap<(Stream, u64), u32>,
    /// Bytes of blocks that nobody holds.
    pub(super) cached: u64,
    /// Bytes that were asked for, and that they take, of blocks that somebody holds.
    pub(super) requested: u64,
    pub(super) allocated: u64,
}

/// What became of a block that was freed here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freed {
    /// It waits for the next one.
    Kept,
    /// Other streams used it, or it is large: the pool has to know.
    Pass,
}

impl Shard {
    /// A free block of this class.
    pub(super) fn pop(&mut self, stream: Stream, len: u64, size: u64) -> Option<u64> {
        let class = *self.by_size.get(&(stream, len))?;
        let index = self.classes.get_mut(class as usize)?.free.pop()?;
        let slot = self.slots.get_mut(index as usize)?;
        slot.held = true;
        slot.size = size;
        self.cached -= len;
        self.requested += size;
        self.allocated += len;
        Some(slot.at)
    }

    /// A block that came from the pool for somebody.
    pub(super) fn adopt(&mut self, at: u64, stream: Stream, len: u64, size: u64) {
        let class = match self.by_size.get(&(stream, len)) {
            Some(class) => *class,
            None => {
                let class = u32::try_from(self.classes.len()).unwrap_or(u32::MAX);
                self.classes.push(Class {
                    stream,
                    len,
                    free: Vec::new(),
                });
                self.by_size.insert((stream, len), class);
                class
            }
        };
        let slot = Slot {
            at,
            size,
            class,
            held: true,
        };
        let index = match self.spare.pop() {
            Some(index) => {
                if let Some(old) = self.slots.get_mut(index as usize) {
                    *old = slot;
                }
                index
            }
            None => {
                self.slots.push(slot);
                u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
            }
        };
        self.by_address.insert(at, index);
        self.requested += size;
        self.allocated += len;
    }

    /// Frees a block; `None` if it is not of this shard.
    pub(super) fn free(
        &mut self,
        at: u64,
        stream: Stream,
        keep: bool,
        room: u64,
    ) -> Option<Result<Freed, FreeError>> {
        let index = *self.by_address.get(&at)?;
        let slot = self.slots.get_mut(index as usize)?;
        if !slot.held {
            return Some(Err(FreeError::NotLive(at)));
        }
        let class = self.classes.get_mut(slot.class as usize)?;
        let (len, size) = (class.len, slot.size);
        self.requested -= size;
        self.allocated -= len;
        if keep && class.stream == stream && len <= room {
            slot.held = false;
            class.free.push(index);
            self.cached += len;
            return Some(Ok(Freed::Kept));
        }
        self.by_address.remove(&at);
        self.spare.push(index);
        Some(Ok(Freed::Pass))
    }

    /// Takes blocks that nobody holds out until no more than `left` bytes of them remain: address and stream of each. Those
    /// that were freed first go first.
    pub(super) fn drain(&mut self, left: u64) -> Vec<(u64, Stream)> {
        let mut out = Vec::new();
        // All of a class before the next: its blocks are neighbours more often than not.
        for class in &mut self.classes {
            if self.cached <= left {
                break;
            }
            let excess = (self.cached - left).div_ceil(class.len.max(1));
            let count = usize::try_from(excess)
                .unwrap_or(usize::MAX)
                .min(class.free.len());
            for index in class.free.drain(..count) {
                self.cached -= class.len;
                if let Some(slot) = self.slots.get(index as usize) {
                    self.by_address.remove(&slot.at);
                    self.spare.push(index);
                    out.push((slot.at, class.stream));
                }
            }
        }
        if self.by_address.is_empty() {
            // Sizes that a program has left behind leave no records.
            *self = Self::default();
        }
        out
    }

    /// Adds what it has to figures by size. Walks all of it.
    pub(super) fn add_to(&self, classes: &mut [FrontClass]) {
        for slot in self
            .by_address
            .values()
            .filter_map(|&index| self.slots.get(index as usize))
        {
            let Some(len) = self.classes.get(slot.class as usize).map(|class| class.len) else {
                continue;
            };
            let Some(class) = classes.get_mut(len.max(1).ilog2() as usize) else {
                continue;
            };
            if slot.held {
                class.blocks += 1;
                class.requested += slot.size;
                class.allocated += len;
            } else {
                class.cached += len;
            }
        }
    }

    /// Whether somebody holds a block here, and what was asked for.
    pub(super) fn held(&self, at: u64) -> Option<u64> {
        let slot = self.slots.get(*self.by_address.get(&at)? as usize)?;
        slot.held.then_some(slot.size)
    }
}
