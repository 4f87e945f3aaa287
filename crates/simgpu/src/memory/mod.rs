//! Device addresses and what is behind them.
//!
//! One large span of the process's address space is taken once and never given back: an address is a device address if and only
//! if it lies in there. Inside, *reservations* are what the program or an allocation owns, *mappings* put physical memory
//! at part of a reservation with an access per device, and *allocations* say what `cuMemAlloc` and its like gave out. The page
//! tables of the process follow the mappings, so a stray access by the program itself faults as it should; kernels and copies of
//! streams look into these tables first, piece by piece, and set the context's error instead of crashing.

pub(crate) mod alloc;
pub(crate) mod array;
pub(crate) mod heap;
pub(crate) mod host;
pub(crate) mod managed;
pub(crate) mod phys;
pub(crate) mod pointer;
pub(crate) mod spans;
pub(crate) mod vmm;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ebb_abi::CUresult;

use phys::Phys;
use spans::Spans;

/// How much address space devices get.
const SPACE_BYTES: u64 = 16 << 40;
/// What device addresses are aligned to at least.
pub(crate) const BLOCK: u64 = 2 << 20;

/// Stands for the processor where access is listed by device.
pub(crate) const HOST: u32 = u32::MAX;

/// Access that a device has: the values of the driver's flags.
pub(crate) const READ: u32 = 1;
pub(crate) const READ_WRITE: u32 = 3;

/// Physical memory at an address.
#[derive(Debug, Clone)]
pub(crate) struct Mapping {
    pub(crate) size: u64,
    pub(crate) phys: Arc<Phys>,
    pub(crate) offset: u64,
    /// Access by physical device index; a device that is not here has none.
    pub(crate) access: Vec<(u32, u32)>,
}

impl Mapping {
    pub(crate) fn access_of(&self, device: u32) -> u32 {
        self.access
            .iter()
            .find(|(index, _)| *index == device)
            .map_or(0, |(_, flags)| *flags)
    }

    fn protection(&self) -> i32 {
        match self.access.iter().map(|(_, flags)| *flags).max() {
            Some(READ_WRITE) => libc::PROT_READ | libc::PROT_WRITE,
            Some(READ) => libc::PROT_READ,
            _ => libc::PROT_NONE,
        }
    }
}

/// What kind of memory an allocation is, and whose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `cuMemAlloc`; small ones share a block.
    Legacy { small: bool },
    /// `cuMemAllocManaged`.
    Managed,
    /// A stream-ordered pool, by handle.
    Pool(usize),
    /// A buffer of another interface's memory.
    External,
    /// Opened from another process.
    Imported,
    /// A variable of a module.
    Global,
    /// A memory node of a graph.
    Graph,
    /// An array: no address that a program may use.
    Array,
}

/// Memory that was given out by an allocating call.
#[derive(Debug, Clone)]
pub(crate) struct Allocation {
    /// What the program asked for.
    pub(crate) size: u64,
    pub(crate) kind: Kind,
    /// The context's handle (pools: zero).
    pub(crate) context: usize,
    pub(crate) buffer_id: u64,
    /// Another process was given its name.
    pub(crate) shared: bool,
}

/// A span of addresses that somebody owns.
#[derive(Debug, Clone)]
pub(crate) struct Reservation {
    pub(crate) size: u64,
    /// Made by `cuMemAddressReserve`, and not by an allocation.
    pub(crate) by_program: bool,
}

/// Page-locked host memory.
#[derive(Debug, Clone)]
pub(crate) struct HostRange {
    pub(crate) size: u64,
    pub(crate) flags: u32,
    /// Allocated by the driver, and not registered by the program.
    pub(crate) allocated: bool,
    pub(crate) context: usize,
    pub(crate) buffer_id: u64,
}

/// What an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Device memory that may be accessed as asked.
    Device(u32),
    /// Page-locked host memory.
    Pinned,
    /// Host memory that the driver knows nothing about.
    Pageable,
    /// A device address that may not be accessed as asked.
    Fault,
}

/// The tables. See the module's description.
#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) base: u64,
    pub(crate) space: Spans,
    pub(crate) reservations: BTreeMap<u64, Reservation>,
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    pub(crate) host: BTreeMap<u64, HostRange>,
    /// Buffers with SYNC_MEMOPS, by their numbers, which are never used again. What is remembered is all: nothing waits for it.
    pub(crate) synchronous: BTreeSet<u64>,
}

/// The tables behind their lock. Kernels and copies hold it for reading while they touch one piece of memory (at most
/// [`PIECE`] bytes), so that unmapping waits for one piece and not for a kernel.
#[derive(Debug)]
pub(crate) struct Memory {
    tables: RwLock<Tables>,
}

/// Most bytes that are touched under one hold of the lock.
pub(crate) const PIECE: u64 = 1 << 20;

fn out_of_kernel_resources() -> CUresult {
    CUresult::ERROR_OPERATING_SYSTEM
}

impl Memory {
    /// Takes the address span.
    pub(crate) fn new() -> io::Result<Self> {
        let size = SPACE_BYTES + BLOCK;
        // SAFETY: a new mapping without access, at no address that anything uses.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size as usize,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range was just mapped. A forked child does not get it: it has no device.
        unsafe { libc::madvise(address, size as usize, libc::MADV_DONTFORK) };
        let base = (address as u64).next_multiple_of(BLOCK);
        Ok(Self {
            tables: RwLock::new(Tables {
                base,
                space: Spans::new(base, SPACE_BYTES),
                reservations: BTreeMap::new(),
                mappings: BTreeMap::new(),
                allocations: BTreeMap::new(),
                host: BTreeMap::new(),
                synchronous: BTreeSet::new(),
            }),
        })
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        self.tables.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tables {
    /// Whether an address belongs to devices.
    pub(crate) fn is_device(&self, address: u64) -> bool {
        address.wrapping_sub(self.base) < SPACE_BYTES
    }

    /// Takes a span of addresses.
    pub(crate) fn reserve(&mut self, size: u64, align: u64, hint: u64, by_program: bool) -> Option<u64> {
        let fixed = hint != 0 && hint.is_multiple_of(align) && self.space.take_at(hint, size);
        let address = if fixed {
            hint
        } else {
            self.space.take(size, align)?
        };
        self.reservations
            .insert(address, Reservation { size, by_program });
        Some(address)
    }

    /// Gives a span of addresses back. Nothing may be mapped in it.
    pub(crate) fn unreserve(&mut self, address: u64) {
        if let Some(reservation) = self.reservations.remove(&address) {
            self.space.give(address, reservation.size);
        }
    }

    /// The reservation around an address.
    pub(crate) fn reservation_at(&self, address: u64) -> Option<(u64, &Reservation)> {
        let (base, reservation) = self.reservations.range(..=address).next_back()?;
        (address < base + reservation.size).then_some((*base, reservation))
    }

    /// The mapping around an address.
    pub(crate) fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (base, mapping) = self.mappings.range(..=address).next_back()?;
        (address < base + mapping.size).then_some((*base, mapping))
    }

    /// The allocation around an address.
    pub(crate) fn allocation_at(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (base, allocation) = self.allocations.range(..=address).next_back()?;
        (address < base + allocation.size).then_some((*base, allocation))
    }

    /// The page-locked host memory around an address.
    pub(crate) fn host_at(&self, address: u64) -> Option<(u64, &HostRange)> {
        let (base, range) = self.host.range(..=address).next_back()?;
        (address < base + range.size).then_some((*base, range))
    }

    /// Whether anything is mapped in `[address, address + size)`.
    pub(crate) fn has_mapping_in(&self, address: u64, size: u64) -> bool {
        let inside = self.mappings.range(address..address + size).next().is_some();
        inside || self.mapping_at(address).is_some()
    }

    /// The mappings that make up `[address, address + size)` exactly, or `None` if it has holes or cuts one.
    pub(crate) fn whole_mappings(&self, address: u64, size: u64) -> Option<Vec<u64>> {
        let mut at = address;
        let mut starts = Vec::new();
        while at < address + size {
            starts.push(at);
            at += self.mappings.get(&at)?.size;
        }
        if at != address + size {
            return None;
        }
        Some(starts)
    }

    /// Puts physical memory at an address and makes the page tables follow.
    pub(crate) fn map(&mut self, address: u64, mapping: Mapping) -> Result<(), CUresult> {
        self.sync_pages(address, &mapping, mapping.protection())?;
        self.mappings.insert(address, mapping);
        Ok(())
    }

    /// Changes a device's access to a mapping.
    pub(crate) fn set_access(&mut self, address: u64, device: u32, flags: u32) -> Result<(), CUresult> {
        let Some(mapping) = self.mappings.get_mut(&address) else {
            return Err(CUresult::ERROR_INVALID_VALUE);
        };
        let before = mapping.protection();
        mapping.access.retain(|(index, _)| *index != device);
        if flags != 0 {
            mapping.access.push((device, flags));
        }
        let after = mapping.protection();
        if after != before {
            let size = mapping.size as usize;
            // SAFETY: the range is this mapping's own part of the device address span.
            if unsafe { libc::mprotect(address as *mut libc::c_void, size, after) } != 0 {
                return Err(out_of_kernel_resources());
            }
        }
        Ok(())
    }

    /// Takes what is mapped at an address away; the caller drops the physical memory.
    pub(crate) fn unmap(&mut self, address: u64) -> Option<Mapping> {
        let mapping = self.mappings.remove(&address)?;
        self.clear_pages(address, mapping.size);
        Some(mapping)
    }

    fn sync_pages(&self, address: u64, mapping: &Mapping, protection: i32) -> Result<(), CUresult> {
        let (fd, offset) = mapping.phys.pages();
        // SAFETY: the range lies in the device address span, where only these tables map; nothing is mapped there now.
        let at = unsafe {
            libc::mmap(
                address as *mut libc::c_void,
                mapping.size as usize,
                protection,
                libc::MAP_SHARED | libc::MAP_FIXED,
                fd,
                (offset + mapping.offset) as i64,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(out_of_kernel_resources());
        }
        // SAFETY: the range was just mapped. A forked child does not own it.
        unsafe { libc::madvise(at, mapping.size as usize, libc::MADV_DONTFORK) };
        Ok(())
    }

    fn clear_pages(&self, address: u64, size: u64) {
        // SAFETY: the range lies in the device address span, where only these tables map; nobody holds references into it,
        // since every access holds the tables' lock for reading.
        unsafe {
            let at = libc::mmap(
                address as *mut libc::c_void,
                size as usize,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
                -1,
                0,
            );
            if at != libc::MAP_FAILED {
                libc::madvise(at, size as usize, libc::MADV_DONTFORK);
            }
        }
    }

    /// Takes all pages of device memory away from the process, or gives them back: what a checkpoint does.
    pub(crate) fn hide_all(&self, hidden: bool) {
        for (address, mapping) in &self.mappings {
            let protection = if hidden {
                libc::PROT_NONE
            } else {
                mapping.protection()
            };
            // SAFETY: the range is this mapping's own part of the device address span.
            unsafe { libc::mprotect(*address as *mut libc::c_void, mapping.size as usize, protection) };
        }
    }

    /// The same for the engine that copies: it also reaches what other devices' `cuMemAlloc` gave out, by way of the host if need be. Memory
    /// that the program mapped itself needs the device's right.
    pub(crate) fn place_for_copy(&self, address: u64, size: u64, device: u32, write: bool) -> Place {
        let owner = self
            .allocation_at(address)
            .filter(|(_, allocation)| {
                matches!(allocation.kind, Kind::Legacy { .. } | Kind::Global | Kind::Array)
            })
            .and_then(|_| self.mapping_at(address))
            .and_then(|(_, mapping)| mapping.phys.device);
        self.place(address, size, owner.unwrap_or(device), write)
    }

    /// What `[address, address + size)` is for a device that wants to access it.
    pub(crate) fn place(&self, address: u64, size: u64, device: u32, write: bool) -> Place {
        if !self.is_device(address) {
            let pinned = self
                .host_at(address)
                .is_some_and(|(base, range)| address + size <= base + range.size);
            return if pinned { Place::Pinned } else { Place::Pageable };
        }
        let needed = if write { READ_WRITE } else { READ };
        let mut at = address;
        let end = address.saturating_add(size);
        let mut kind = Place::Fault;
        loop {
            let Some((base, mapping)) = self.mapping_at(at) else {
                return Place::Fault;
            };
            if mapping.access_of(device) & needed != needed {
                return Place::Fault;
            }
            if at == address {
                // Memory of the host behind a device address is page-locked host memory.
                kind = mapping.phys.device.map_or(Place::Pinned, Place::Device);
            }
            at = base + mapping.size;
            if at >= end {
                return kind;
            }
        }
    }
}
