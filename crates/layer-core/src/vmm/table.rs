//! The table: memories by handle, mappings by address. Pure books; nothing here calls the driver or waits.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use ebb_device::{DeviceMemory, Grant, Handle, Location, Props};

use crate::kept::{HostCopy, Ticket};
use crate::pins::Held;
use crate::pool::Pool;

use super::{TAG, TAG_SHIFT};

/// Where a memory's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// On the card.
    Card(Handle),
    /// In the arena; blank if nobody has ever been able to write them.
    Host(HostCopy),
    /// The owner thread of its device is moving it and knows the rest.
    Moving,
}

/// Physical memory that the program made.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    /// Who made it: it is given back there also after its device was detached, which does not touch it.
    pub(super) maker: Arc<dyn DeviceMemory>,
    /// The engine's number of its device.
    pub(super) device: usize,
    pub(super) len: u64,
    pub(super) props: Props,
    /// The program's references.
    pub(super) references: u32,
    /// Calls that are under way with it.
    pub(super) uses: u32,
    /// Where it is mapped.
    pub(super) at: BTreeSet<u64>,
    pub(super) place: Place,
    /// While it is on the card: the copy of what it was when it came back.
    pub(super) kept: Option<Ticket>,
    /// Somebody could write it, at some time.
    pub(super) written: bool,
}

/// One mapping of a memory, from its begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapped {
    pub(crate) at: u64,
    pub(crate) size: u64,
    /// What was granted, in the order in which it was first named.
    pub(crate) grants: Vec<Grant>,
    /// The memory's handle.
    pub(crate) handle: u64,
    /// Tells it from every other mapping there ever was.
    pub(crate) serial: u64,
}

/// A memory that is in the table no more: its real handle is to be released, or its pieces given back.
#[derive(Clone, Debug)]
pub(crate) struct Gone {
    pub(crate) maker: Arc<dyn DeviceMemory>,
    pub(crate) handle: u64,
    pub(crate) device: usize,
    pub(crate) len: u64,
    pub(crate) place: Place,
    pub(crate) kept: Option<Ticket>,
}

/// What came of giving a reference or a use back.
#[derive(Clone, Debug)]
pub(crate) enum Less {
    /// The program has no such reference.
    Dead,
    /// Something still holds the memory.
    Kept,
    /// That was the last.
    Gone(Gone),
    /// It is being moved at this moment: wait for this device, and ask again. Nothing has changed.
    Wait(usize),
}

/// What came of [`Table::take_away`].
#[derive(Debug)]
pub(crate) enum AwayTaken {
    /// The driver knows something of the range.
    No,
    /// Something of it is being moved: look again later.
    Wait,
    Yes(Vec<Mapped>),
}

#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(super) memories: HashMap<u64, Memory>,
    mappings: BTreeMap<u64, Mapped>,
    handles: u64,
    serials: u64,
}

impl Table {
    /// A memory that the driver has just made, with one reference. Returns our handle.
    pub(crate) fn add(
        &mut self,
        maker: Arc<dyn DeviceMemory>,
        device: usize,
        len: u64,
        props: Props,
        real: Handle,
    ) -> u64 {
        self.handles += 1;
        let handle = TAG << TAG_SHIFT | self.handles;
        self.memories.insert(
            handle,
            Memory {
                maker,
                device,
                len,
                props,
                references: 1,
                uses: 0,
                at: BTreeSet::new(),
                place: Place::Card(real),
                kept: None,
                written: false,
            },
        );
        handle
    }

    /// How many mappings there are.
    pub(crate) fn mapped(&self) -> usize {
        self.mappings.len()
    }

    /// A call with this handle begins: the real one, and its device. `None` if the program holds no such handle, or if the memory is
    /// away, which it is not inside the gate.
    pub(crate) fn begin_use(&mut self, handle: u64) -> Option<(Handle, usize)> {
        let memory = self.memories.get_mut(&handle).filter(|m| m.references > 0)?;
        let Place::Card(real) = memory.place else {
            return None;
        };
        memory.uses += 1;
        Some((real, memory.device))
    }

    /// That call has ended.
    pub(crate) fn end_use(&mut self, handle: u64) -> Less {
        match self.memories.get_mut(&handle) {
            Some(memory) => {
                memory.uses = memory.uses.saturating_sub(1);
                self.sweep(handle)
            }
            None => Less::Dead,
        }
    }

    /// Takes a memory that nothing holds out of the table.
    fn sweep(&mut self, handle: u64) -> Less {
        let idle = |m: &&Memory| m.references == 0 && m.uses == 0 && m.at.is_empty();
        let Some(memory) = self.memories.get(&handle).filter(idle) else {
            return Less::Kept;
        };
        if memory.place == Place::Moving {
            return Less::Wait(memory.device);
        }
        let Some(memory) = self.memories.remove(&handle) else {
            return Less::Dead;
        };
        Less::Gone(Gone {
            maker: memory.maker,
            handle,
            device: memory.device,
            len: memory.len,
            place: memory.place,
            kept: memory.kept,
        })
    }

    /// The program gives a reference back.
    pub(crate) fn release(&mut self, handle: u64) -> Less {
        let Some(memory) = self.memories.get_mut(&handle).filter(|m| m.references > 0) else {
            return Less::Dead;
        };
        memory.references -= 1;
        let less = self.sweep(handle);
        if let Less::Wait(_) = less
            && let Some(memory) = self.memories.get_mut(&handle)
        {
            memory.references += 1;
        }
        less
    }

    /// The program takes another reference, by an address that is mapped. Also of a memory that it has released.
    pub(crate) fn retain(&mut self, ptr: u64) -> Option<u64> {
        let handle = self.at(ptr)?.handle;
        let memory = self.memories.get_mut(&handle)?;
        memory.references = memory.references.checked_add(1)?;
        Some(handle)
    }

    /// The mapping that holds an address.
    pub(crate) fn at(&self, ptr: u64) -> Option<&Mapped> {
        let (_, mapping) = self.mappings.range(..=ptr).next_back()?;
        (ptr - mapping.at < mapping.size).then_some(mapping)
    }

    /// The mappings that a range touches.
    pub(crate) fn within(&self, at: u64, size: u64) -> impl Iterator<Item = &Mapped> {
        let first = self.at(at).map_or(at, |mapping| mapping.at);
        self.mappings
            .range(first..at.saturating_add(size).max(first))
            .map(|(_, mapping)| mapping)
    }

    /// The driver has mapped it.
    pub(crate) fn map(&mut self, handle: u64, at: u64, size: u64) {
        let Some(memory) = self.memories.get_mut(&handle) else {
            return;
        };
        memory.at.insert(at);
        self.serials += 1;
        self.mappings.insert(
            at,
            Mapped {
                at,
                size,
                grants: Vec::new(),
                handle,
                serial: self.serials,
            },
        );
    }

    /// The driver has mapped this memory where another one was mapped before, with the same rights: to whoever knows that mapping it
    /// is the same.
    pub(crate) fn map_as(&mut self, handle: u64, before: &Mapped) {
        let Some(memory) = self.memories.get_mut(&handle) else {
            return;
        };
        memory.at.insert(before.at);
        let mapping = Mapped {
            handle,
            ..before.clone()
        };
        self.mappings.insert(before.at, mapping);
    }

    /// Memories of a device, on the card, that nobody has a hold on but who made them, and that are mapped at no other addresses than these.
    pub(crate) fn alone(&self, pool: &Pool, device: usize, maps: &HashSet<u64>) -> HashSet<u64> {
        let alone = |handle: u64, memory: &Memory| {
            memory.device == device
                && memory.references == 1
                && memory.uses == 0
                && matches!(memory.place, Place::Card(_))
                && memory.at.iter().all(|at| maps.contains(at))
                && !pool.pins.is_held(Held::Handle(handle))
        };
        let all = self.memories.iter();
        all.filter(|(handle, memory)| alone(**handle, memory))
            .map(|(handle, _)| *handle)
            .collect()
    }

    /// Takes the mappings that begin in a range out, for the driver to unmap. Each keeps its memory by a use, until
    /// [`Self::end_use`] or [`Self::still_mapped`].
    pub(crate) fn take(&mut self, at: u64, size: u64) -> Vec<Mapped> {
        let starts: Vec<u64> = self
            .mappings
            .range(at..at.saturating_add(size))
            .map(|(&start, _)| start)
            .collect();
        let mut taken = Vec::with_capacity(starts.len());
        for start in starts {
            let Some(mapping) = self.mappings.remove(&start) else {
                continue;
            };
            if let Some(memory) = self.memories.get_mut(&mapping.handle) {
                memory.at.remove(&start);
                memory.uses += 1;
            }
            taken.push(mapping);
        }
        taken
    }

    /// As [`Self::take`], if the range is made of whole mappings of memory of that device which is away.
    pub(crate) fn take_away(&mut self, device: usize, at: u64, size: u64) -> AwayTaken {
        let mut end = at;
        for mapping in self.within(at, size) {
            if mapping.at != end {
                return AwayTaken::No;
            }
            end += mapping.size;
            match self.memories.get(&mapping.handle) {
                Some(memory) if memory.device == device => match memory.place {
                    Place::Host(_) => {}
                    Place::Moving => return AwayTaken::Wait,
                    Place::Card(_) => return AwayTaken::No,
                },
                _ => return AwayTaken::No,
            }
        }
        if end != at.saturating_add(size) {
            return AwayTaken::No;
        }
        AwayTaken::Yes(self.take(at, size))
    }

    /// The driver refused: all as before.
    pub(crate) fn still_mapped(&mut self, taken: Vec<Mapped>) {
        for mapping in taken {
            if let Some(memory) = self.memories.get_mut(&mapping.handle) {
                memory.at.insert(mapping.at);
                memory.uses = memory.uses.saturating_sub(1);
            }
            self.mappings.insert(mapping.at, mapping);
        }
    }

    /// The driver has set access on a range. `false` if that names a part of a mapping, which cannot be put back as it
    /// was: the caller pins what it touches.
    pub(crate) fn granted(&mut self, at: u64, size: u64, grants: &[Grant]) -> bool {
        let first = self.at(at).map_or(at, |mapping| mapping.at);
        let end = at.saturating_add(size);
        let mut whole = true;
        for (_, mapping) in self.mappings.range_mut(first..end.max(first)) {
            whole &= mapping.at >= at && mapping.at.saturating_add(mapping.size) <= end;
            for grant in grants {
                match mapping
                    .grants
                    .iter_mut()
                    .find(|old| old.location == grant.location)
                {
                    Some(old) => old.flags = grant.flags,
                    None => mapping.grants.push(*grant),
                }
            }
            if grants.iter().any(|grant| grant.flags == Grant::READ_WRITE)
                && let Some(memory) = self.memories.get_mut(&mapping.handle)
            {
                memory.written = true;
            }
        }
        whole
    }

    /// What a location may do at an address of ours.
    pub(crate) fn access(&self, ptr: u64, location: Location) -> Option<u32> {
        let mapping = self.at(ptr)?;
        let grant = mapping.grants.iter().find(|grant| grant.location == location)?;
        Some(grant.flags)
    }

    /// The device of a memory, whether the program has a reference or not.
    pub(crate) fn device_of_memory(&self, handle: u64) -> Option<usize> {
        Some(self.memories.get(&handle)?.device)
    }

    /// All mappings of a memory, lowest first.
    pub(super) fn mappings_of(&self, memory: &Memory) -> Vec<Mapped> {
        memory
            .at
            .iter()
            .filter_map(|at| self.mappings.get(at).cloned())
            .collect()
    }

    /// Handles that the program holds, or that mappings keep alive: bytes and number, of one device.
    pub(crate) fn sums(&self, device: usize) -> (u64, u64) {
        self.memories
            .values()
            .filter(|memory| memory.device == device)
            .fold((0, 0), |(bytes, n), memory| (bytes + memory.len, n + 1))
    }

    /// A memory's size, for the report.
    pub(crate) fn len_of(&self, handle: u64) -> u64 {
        self.memories.get(&handle).map_or(0, |memory| memory.len)
    }
}
