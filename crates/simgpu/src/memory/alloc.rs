//! `cuMemAlloc` and its like: whole blocks for large pieces, shared blocks for small ones.

use std::sync::Arc;

use ebb_abi::*;

use super::heap::SMALL;
use super::managed;
use super::phys::{Phys, fresh_buffer_id};
use super::{Allocation, BLOCK, Kind, Mapping, READ_WRITE};
use crate::R;
use crate::caller::Caller;
use crate::capture;
use crate::context::{self, Context, devices_with_access};
use crate::process::{lock, process};

/// From this size on, an allocation gets blocks of its own.
const OWN_BLOCKS_FROM: u64 = 1 << 20;

/// Makes memory on a device and maps it somewhere. Returns the address.
pub(crate) fn map_block(device: u32, bytes: u64, access: &[u32]) -> Result<u64, CUresult> {
    let process = process();
    let properties = CUmemAllocationProp::default();
    let phys = Phys::new(
        process.machine,
        process.arena,
        Some(device),
        bytes,
        properties,
        false,
    )?;
    map_phys(phys, access.iter().map(|index| (*index, READ_WRITE)).collect())
}

/// Maps memory somewhere. Returns the address.
pub(crate) fn map_phys(phys: Arc<Phys>, access: Vec<(u32, u32)>) -> Result<u64, CUresult> {
    let bytes = phys.bytes;
    let mut tables = process().memory.write();
    let address = tables
        .reserve(bytes, BLOCK, 0, false)
        .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
    let mapped = tables.map(
        address,
        Mapping {
            size: bytes,
            phys,
            offset: 0,
            access,
        },
    );
    if mapped.is_err() {
        tables.unreserve(address);
    }
    mapped.map(|()| address)
}

/// Undoes [`map_block`].
pub(crate) fn unmap_block(address: u64) {
    let mapping = {
        let mut tables = process().memory.write();
        let mapping = tables.unmap(address);
        tables.unreserve(address);
        mapping
    };
    // The memory goes back to the ledger when the last who refers to it is gone; not under the tables' lock.
    drop(mapping);
}

/// Allocates in a context. `bytes` is not zero.
pub(crate) fn allocate(context: &Context, bytes: u64, kind: Kind) -> Result<u64, CUresult> {
    let process = process();
    let small = bytes < OWN_BLOCKS_FROM && matches!(kind, Kind::Legacy { .. } | Kind::Global | Kind::Array);
    let device = context.shared.device;
    let address = if kind == Kind::Managed {
        managed::allocate(bytes)?
    } else if small {
        let mut heap = lock(&context.heap);
        match heap.take(bytes) {
            Some(address) => address,
            None => {
                let block = map_block(device, BLOCK, &devices_with_access(context))?;
                heap.add(block, BLOCK);
                heap.take(bytes).ok_or(CUresult::ERROR_OUT_OF_MEMORY)?
            }
        }
    } else {
        let size = bytes
            .checked_next_multiple_of(BLOCK)
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
        if size > process.machine.config().memory {
            return Err(CUresult::ERROR_OUT_OF_MEMORY);
        }
        map_block(device, size, &devices_with_access(context))?
    };
    let kind = match kind {
        Kind::Legacy { .. } => Kind::Legacy { small },
        other => other,
    };
    let allocation = Allocation {
        size: bytes,
        kind,
        context: context.shared.handle,
        buffer_id: fresh_buffer_id(),
        shared: false,
    };
    process.memory.write().allocations.insert(address, allocation);
    Ok(address)
}

/// Frees what [`allocate`] gave out in this context; the table entry is gone already.
fn give_back(context: &Context, address: u64, allocation: &Allocation) {
    let in_heap = match allocation.kind {
        Kind::Legacy { small } => small,
        Kind::Global | Kind::Array => allocation.size < OWN_BLOCKS_FROM,
        _ => false,
    };
    if allocation.kind == Kind::Managed {
        managed::free(address);
        return;
    }
    if !in_heap {
        // A buffer of external memory may begin inside its block.
        let base = process().memory.read().mapping_at(address).map(|(base, _)| base);
        unmap_block(base.unwrap_or(address));
        return;
    }
    let mut heap = lock(&context.heap);
    if let Some(block) = heap.give(address, allocation.size) {
        heap.remove(block);
        unmap_block(block);
    }
}

/// Frees everything that was allocated in a context that ends.
pub(crate) fn free_context(context: &Context) {
    let handle = context.shared.handle;
    let mine: Vec<(u64, Allocation)> = {
        let mut tables = process().memory.write();
        let mine: Vec<(u64, Allocation)> = tables
            .allocations
            .iter()
            .filter(|(_, allocation)| allocation.context == handle)
            .map(|(address, allocation)| (*address, allocation.clone()))
            .collect();
        for (address, _) in &mine {
            tables.allocations.remove(address);
        }
        mine
    };
    for (address, allocation) in mine {
        give_back(context, address, &allocation);
    }
}

/// Frees a module's variable, or an array's memory.
pub(crate) fn free_global(context: &Context, address: u64) {
    let allocation = process().memory.write().allocations.remove(&address);
    if let Some(allocation) = allocation {
        give_back(context, address, &allocation);
    }
}

/// Gives a device access to what a context allocated, or takes it away. Memory of the program's own mappings is not concerned.
pub(crate) fn grant_peer(owner: &Context, device: u32, granted: bool) -> R {
    let mut tables = process().memory.write();
    let handle = owner.shared.handle;
    let mut bases: Vec<u64> = Vec::new();
    for (address, allocation) in &tables.allocations {
        if allocation.context == handle
            && let Some((base, _)) = tables.mapping_at(*address)
            && bases.last() != Some(&base)
        {
            bases.push(base);
        }
    }
    for base in bases {
        tables.set_access(base, device, if granted { READ_WRITE } else { 0 })?;
    }
    Ok(())
}

pub(crate) fn cuMemAlloc_v2(c: &Caller, dptr: *mut CUdeviceptr, bytesize: usize) -> R {
    let context = context::current()?;
    if bytesize == 0 || dptr.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    context.shared.check()?;
    capture::check_unsafe_call()?;
    let address = allocate(&context, bytesize as u64, Kind::Legacy { small: false })?;
    c.put(dptr, CUdeviceptr(address))
}

pub(crate) fn cuMemAllocPitch_v2(
    c: &Caller,
    dptr: *mut CUdeviceptr,
    pPitch: *mut usize,
    WidthInBytes: usize,
    Height: usize,
    ElementSizeBytes: u32,
) -> R {
    let context = context::current()?;
    if !matches!(ElementSizeBytes, 4 | 8 | 16)
        || WidthInBytes == 0
        || Height == 0
        || dptr.is_null()
        || pPitch.is_null()
    {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    context.shared.check()?;
    capture::check_unsafe_call()?;
    let pitch = (WidthInBytes as u64)
        .checked_next_multiple_of(SMALL)
        .ok_or(CUresult::ERROR_INVALID_VALUE)?;
    let bytes = pitch
        .checked_mul(Height as u64)
        .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
    let address = allocate(&context, bytes, Kind::Legacy { small: false })?;
    c.put(dptr, CUdeviceptr(address))?;
    c.put(pPitch, pitch as usize)
}

pub(crate) fn cuMemAllocManaged(c: &Caller, dptr: *mut CUdeviceptr, bytesize: usize, flags: u32) -> R {
    let context = context::current()?;
    if bytesize == 0 || dptr.is_null() || !matches!(flags, 1 | 2) {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    context.shared.check()?;
    capture::check_unsafe_call()?;
    let address = allocate(&context, bytesize as u64, Kind::Managed)?;
    c.put(dptr, CUdeviceptr(address))
}

pub(crate) fn cuMemFree_v2(_: &Caller, dptr: CUdeviceptr) -> R {
    if dptr.is_null() {
        return Ok(());
    }
    // No context is needed, as measured; everything else that is wrong with the caller's is heard.
    match context::current() {
        Ok(_) | Err(CUresult::ERROR_INVALID_CONTEXT) => {}
        Err(code) => return Err(code),
    }
    let process = process();
    let kind = process
        .memory
        .read()
        .allocations
        .get(&dptr.0)
        .map(|allocation| allocation.kind);
    match kind {
        None | Some(Kind::Imported | Kind::Global | Kind::Array) => {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        Some(Kind::Graph) => return crate::graph_memory::free_memory(dptr.0),
        Some(_) => {}
    }
    capture::check_unsafe_call()?;
    // A program may rely on this: the call waits for all work of the device, unless the memory is a stream-ordered pool's.
    if !matches!(kind, Some(Kind::Pool(_))) {
        drain_device(dptr.0);
    }
    free_now(dptr.0)
}

/// Waits for the work of all contexts on the device of this address; of all devices if it is none's.
fn drain_device(address: u64) {
    let process = process();
    let device = process
        .memory
        .read()
        .mapping_at(address)
        .and_then(|(_, mapping)| mapping.phys.device);
    for context in process.contexts.all() {
        if device.is_none_or(|device| context.shared.device == device) {
            context.shared.drain();
        }
    }
}

/// Frees an allocation whose work is known to be over.
pub(crate) fn free_now(address: u64) -> R {
    let process = process();
    let allocation = process
        .memory
        .write()
        .allocations
        .remove(&address)
        .ok_or(CUresult::ERROR_INVALID_VALUE)?;
    match allocation.kind {
        Kind::Pool(_) => crate::pool::free_now(address, &allocation),
        Kind::Graph => crate::graph_memory::free_memory_now(address),
        _ => {
            if let Some(context) = process.contexts.get(allocation.context) {
                give_back(&context, address, &allocation);
            }
            Ok(())
        }
    }
}

pub(crate) fn cuMemGetAddressRange_v2(
    c: &Caller,
    pbase: *mut CUdeviceptr,
    psize: *mut usize,
    dptr: CUdeviceptr,
) -> R {
    context::current()?;
    let tables = process().memory.read();
    let (base, size) = match tables.allocation_at(dptr.0) {
        Some((base, allocation)) => (base, allocation.size),
        None => match tables.mapping_at(dptr.0) {
            Some((base, mapping)) => (base, mapping.size),
            None => tables
                .host_at(dptr.0)
                .map(|(base, range)| (base, range.size))
                .ok_or(CUresult::ERROR_NOT_FOUND)?,
        },
    };
    c.put_optional(pbase, CUdeviceptr(base));
    c.put_optional(psize, size as usize);
    Ok(())
}

pub(crate) fn cuMemGetInfo_v2(c: &Caller, free: *mut usize, total: *mut usize) -> R {
    let context = context::current()?;
    let usage = process().machine.usage(context.shared.device);
    c.put_optional(free, usage.free() as usize);
    c.put_optional(total, usage.total as usize);
    Ok(())
}
