//! Memories of the program that leave the card and come back, as the owner thread of their device asks for it.
//!
//! Each call is made with the device locked, so that its sums and the table change together.

use ebb_alloc::Piece;
use ebb_device::{DeviceMemory, Handle, Props};

use super::table::Place;
use super::{Mapped, Remains, Seat, Vmm};
use crate::kept::{HostCopy, Ticket};
use crate::pins::{Held, PinReason};
use crate::pool::Pool;

/// A memory that begins to leave.
#[derive(Clone, Debug)]
pub(crate) struct Leaving {
    pub(crate) len: u64,
    pub(crate) real: Handle,
    pub(crate) maps: Vec<Mapped>,
    /// Its bytes are worth a copy.
    pub(crate) written: bool,
    /// The copy of what it was when it came back.
    pub(crate) kept: Option<Ticket>,
}

/// A memory that begins to come back.
#[derive(Clone, Debug)]
pub(crate) struct Away {
    pub(crate) len: u64,
    pub(crate) props: Props,
    pub(crate) maps: Vec<Mapped>,
    pub(crate) copy: HostCopy,
}

impl Vmm {
    fn resident(&self, pool: &Pool, device: usize, can_copy: bool) -> Vec<(u64, u64, bool)> {
        self.with(|table| {
            table
                .memories
                .iter()
                .filter(|(handle, memory)| {
                    memory.device == device
                        && memory.uses == 0
                        && matches!(memory.place, Place::Card(_))
                        && (can_copy || !memory.written)
                        && !pool.pins.is_held(Held::Handle(**handle))
                })
                .map(|(handle, memory)| (*handle, memory.len, memory.written))
                .collect()
        })
    }

    /// What an eviction may take: handle, size, and whether it is to be copied, which needs `can_copy`.
    pub(crate) fn candidates(&self, pool: &Pool, device: usize, can_copy: bool) -> Vec<(u64, u64, bool)> {
        let mut all = self.resident(pool, device, can_copy);
        all.sort_unstable();
        all
    }

    /// How many bytes that is.
    pub(crate) fn movable_bytes(&self, pool: &Pool, device: usize, can_copy: bool) -> u64 {
        self.resident(pool, device, can_copy)
            .iter()
            .map(|(_, len, _)| len)
            .sum()
    }

    /// Bytes of the program's own memory that a pin keeps on the card.
    pub(crate) fn pinned_bytes(&self, pool: &Pool) -> u64 {
        self.with(|table| {
            pool.pins
                .held()
                .map(|held| match held {
                    Held::Handle(handle) => table.len_of(handle),
                    Held::Span(_) | Held::Lent(_) => 0,
                })
                .sum()
        })
    }

    /// Bytes of handles that were given to other processes.
    pub(crate) fn exported_bytes(&self, pool: &Pool) -> u64 {
        let exported = pool.pins.held_for(PinReason::Exported);
        if exported.is_empty() {
            return 0;
        }
        self.with(|table| {
            exported
                .into_iter()
                .map(|held| match held {
                    Held::Handle(handle) => table.len_of(handle),
                    Held::Span(_) | Held::Lent(_) => 0,
                })
                .sum()
        })
    }

    /// Memories that are away, with their pieces of host memory.
    pub(crate) fn away(&self, device: usize) -> Vec<(Vec<Piece>, u64)> {
        self.with(|table| {
            let mut all: Vec<_> = table
                .memories
                .iter()
                .filter(|(_, memory)| memory.device == device)
                .filter_map(|(handle, memory)| match &memory.place {
                    Place::Host(copy) => Some((copy.pieces.clone(), *handle)),
                    _ => None,
                })
                .collect();
            all.sort_unstable_by_key(|(_, handle)| *handle);
            all
        })
    }

    /// Of what is away of a device: bytes in common segments of copies that came back and left again unchanged.
    pub(crate) fn steady_common(&self, device: usize) -> u64 {
        self.with(|table| {
            let here = table.memories.values().filter(|memory| memory.device == device);
            let copies = here.filter_map(|memory| match &memory.place {
                Place::Host(copy) => Some(copy.steady_common()),
                _ => None,
            });
            copies.sum()
        })
    }

    /// One on the card, where all of it can be read: where, its real handle, and its kept copy.
    pub(crate) fn readable(
        &self,
        device: &dyn DeviceMemory,
        handle: u64,
    ) -> Option<(u64, Handle, Option<Ticket>)> {
        self.with(|table| {
            let memory = table.memories.get(&handle)?;
            let Place::Card(real) = memory.place else {
                return None;
            };
            let at = Seat::find(device, memory.len, &table.mappings_of(memory))?;
            Some((at, real, memory.kept))
        })
    }

    /// Starts to move one out; its kept copy is the caller's. `None` if it is not there any more, or must stay.
    pub(crate) fn begin_out(&self, pool: &Pool, handle: u64) -> Option<Leaving> {
        if pool.pins.is_held(Held::Handle(handle)) {
            return None;
        }
        self.with(|table| {
            let memory = table.memories.get(&handle).filter(|memory| memory.uses == 0)?;
            let Place::Card(real) = memory.place else {
                return None;
            };
            let leaving = Leaving {
                len: memory.len,
                real,
                maps: table.mappings_of(memory),
                written: memory.written,
                kept: memory.kept,
            };
            table.place(handle, Place::Moving, None);
            Some(leaving)
        })
    }

    /// It stays on the card.
    pub(crate) fn stays(&self, handle: u64, real: Handle) {
        self.with(|table| table.place(handle, Place::Card(real), None));
    }

    /// It is gone from the card, except for what remains.
    pub(crate) fn moved_out(&self, pool: &mut Pool, handle: u64, copy: HostCopy, remains: Option<Remains>) {
        let len = self.with(|table| table.place(handle, Place::Host(copy), None));
        pool.books.evicted += len;
        pool.books.give(len);
        pool.keep_remains(remains);
    }

    /// Starts to move one in, if there is lease for it. `Err` says how much is missing; `Ok(None)` that it is not away.
    pub(crate) fn begin_in(&self, pool: &mut Pool, handle: u64) -> Result<Option<Away>, u64> {
        self.with(|table| {
            let Some(memory) = table.memories.get(&handle) else {
                return Ok(None);
            };
            let Place::Host(copy) = &memory.place else {
                return Ok(None);
            };
            let unused = pool.books.unused();
            if !pool.books.alone && unused < memory.len {
                return Err(memory.len - unused);
            }
            let away = Away {
                len: memory.len,
                props: memory.props,
                maps: table.mappings_of(memory),
                copy: copy.clone(),
            };
            table.place(handle, Place::Moving, None);
            pool.books.take(away.len);
            Ok(Some(away))
        })
    }

    /// Starts to move the copy of one that is away: its length and copy. `None` if it is not away any more.
    pub(crate) fn begin_rehome(&self, handle: u64) -> Option<(u64, HostCopy)> {
        self.with(|table| {
            let memory = table.memories.get(&handle)?;
            let Place::Host(copy) = &memory.place else {
                return None;
            };
            let found = (memory.len, copy.clone());
            table.place(handle, Place::Moving, None);
            Some(found)
        })
    }

    /// The bytes of one that is away are there from now on.
    pub(crate) fn rehomed(&self, handle: u64, copy: HostCopy) {
        self.with(|table| table.place(handle, Place::Host(copy), None));
    }

    /// It is on the card; its copy is the caller's, or kept.
    pub(crate) fn moved_in(&self, pool: &mut Pool, handle: u64, real: Handle, kept: Option<Ticket>) {
        let len = self.with(|table| table.place(handle, Place::Card(real), kept));
        pool.books.evicted -= len;
    }

    /// It stays in host memory.
    pub(crate) fn not_moved_in(
        &self,
        pool: &mut Pool,
        handle: u64,
        copy: HostCopy,
        remains: Option<Remains>,
    ) {
        let len = self.with(|table| table.place(handle, Place::Host(copy), None));
        pool.books.give(len);
        pool.keep_remains(remains);
    }

    /// What a device has when it is attached again: bytes on the card, and away.
    pub(crate) fn held_on(&self, device: usize) -> (u64, u64) {
        self.with(|table| {
            table
                .memories
                .values()
                .filter(|memory| memory.device == device)
                .fold((0, 0), |(card, away), memory| match memory.place {
                    Place::Host(_) => (card, away + memory.len),
                    _ => (card + memory.len, away),
                })
        })
    }
}

impl super::Table {
    /// A memory is somewhere else from now on; its size.
    fn place(&mut self, handle: u64, place: Place, kept: Option<Ticket>) -> u64 {
        let Some(memory) = self.memories.get_mut(&handle) else {
            debug_assert!(false, "what moves is not taken out of the table");
            return 0;
        };
        memory.place = place;
        memory.kept = kept;
        memory.len
    }
}
