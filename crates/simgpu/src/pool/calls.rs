//! The pool functions of the interface, but for sharing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebb_abi::*;

use super::{INVALID, Make, Pool};
use crate::R;
use crate::caller::Caller;
use crate::capture;
use crate::graph::Action;
use crate::graph_memory::GraphMemory;
use crate::memory::{BLOCK, HOST, Kind, READ, READ_WRITE};
use crate::process::{lock, process};
use crate::stream::{Stream, submit};
use crate::work::Work;

pub(super) fn find(handle: CUmemoryPool) -> Result<Arc<Pool>, CUresult> {
    process()
        .pools
        .get(handle.0)
        .filter(|pool| !lock(&pool.state).destroyed)
        .ok_or(INVALID)
}

/// Where the default and the current pool of a location are kept: the devices by ordinal, then the host, then its one node.
fn slot(location: CUmemLocation) -> Result<(usize, Option<u32>), CUresult> {
    let devices = process().visible.len();
    match location.type_ {
        CU_MEM_LOCATION_TYPE_DEVICE => {
            let device = process().physical(location.id())?;
            Ok((location.id() as usize, Some(device)))
        }
        CU_MEM_LOCATION_TYPE_HOST => Ok((devices, None)),
        CU_MEM_LOCATION_TYPE_HOST_NUMA if location.u == 0 => Ok((devices + 1, None)),
        _ => Err(INVALID),
    }
}

fn default_pool(location: CUmemLocation) -> Result<Arc<Pool>, CUresult> {
    let (index, device) = slot(location)?;
    let mut slot = lock(&process().device_pools[index]);
    if let Some(pool) = &slot.0 {
        return Ok(Arc::clone(pool));
    }
    let make = Make {
        location,
        device,
        handle_types: 0,
        rdma: device.is_some(),
        usage: 0,
        max_size: 0,
    };
    let pool = Pool::new(make, None, true);
    slot.0 = Some(Arc::clone(&pool));
    Ok(pool)
}

fn current_pool(location: CUmemLocation) -> Result<Arc<Pool>, CUresult> {
    let default = default_pool(location)?;
    let current = lock(&process().device_pools[slot(location)?.0]).1;
    Ok(find(CUmemoryPool(current)).unwrap_or(default))
}

fn allocate(c: &Caller, out: *mut CUdeviceptr, bytes: usize, pool: &Pool, stream: &Arc<Stream>) -> R {
    if out.is_null() || pool.imported {
        return Err(INVALID);
    }
    // No bytes are given a place like any other number, as measured.
    let bytes = bytes.max(1);
    stream.context.check()?;
    if stream.capturing.load(Ordering::Acquire) {
        let access = lock(&pool.state).access.clone();
        let device = pool.make.device.ok_or(CUresult::ERROR_NOT_SUPPORTED)?;
        let memory = GraphMemory::new(device, bytes as u64, access)?;
        let address = memory.address;
        capture::record_action(stream, Action::Allocate(memory))?;
        return c.put(out, CUdeviceptr(address));
    }
    capture::check_implicit(stream)?;
    c.put(out, CUdeviceptr(pool.allocate(stream, bytes as u64)?))
}

pub(crate) fn cuMemAllocAsync(c: &Caller, dptr: *mut CUdeviceptr, bytesize: usize, hStream: CUstream) -> R {
    let stream = c.stream(hStream)?;
    let pool = current_pool(CUmemLocation::device(stream.context.ordinal))?;
    allocate(c, dptr, bytesize, &pool, &stream)
}

pub(crate) fn cuMemAllocFromPoolAsync(
    c: &Caller,
    dptr: *mut CUdeviceptr,
    bytesize: usize,
    pool: CUmemoryPool,
    hStream: CUstream,
) -> R {
    let stream = c.stream(hStream)?;
    allocate(c, dptr, bytesize, &*find(pool)?, &stream)
}

pub(crate) fn cuMemFreeAsync(c: &Caller, dptr: CUdeviceptr, hStream: CUstream) -> R {
    let stream = c.stream(hStream)?;
    if dptr.is_null() {
        return Ok(());
    }
    stream.context.check()?;
    if stream.capturing.load(Ordering::Acquire) {
        return free_in_capture(&stream, dptr.0);
    }
    capture::check_implicit(&stream)?;
    let process = process();
    let kind = process
        .memory
        .read()
        .allocations
        .get(&dptr.0)
        .map(|allocation| allocation.kind)
        .ok_or(INVALID)?;
    match kind {
        Kind::Pool(handle) => {
            let allocation = process
                .memory
                .write()
                .allocations
                .remove(&dptr.0)
                .ok_or(INVALID)?;
            let ticket = submit(&stream, Work::Empty)?;
            if let Some(pool) = process.pools.get(handle) {
                pool.free(dptr.0, allocation.size, Some((stream, ticket)));
            }
            Ok(())
        }
        Kind::Legacy { .. } | Kind::Managed | Kind::Graph => submit(&stream, Work::Release(dptr.0)).map(drop),
        Kind::Imported | Kind::Global | Kind::Array | Kind::External => Err(INVALID),
    }
}

/// In a capture only what the same capture allocated can be freed as a node.
fn free_in_capture(stream: &Arc<Stream>, address: u64) -> R {
    let memory = capture::with_graph(stream, |graph| {
        crate::graph_nodes::memory_at(&lock(&graph.nodes), address)
    })?;
    capture::record_action(stream, Action::Free(memory.ok_or(INVALID)?)).map(drop)
}

/// There are no managed pools here, although the devices say that they have what these need: see docs/simulated-gpu.md.
fn check_type(kind: CUmemAllocationType) -> R {
    match kind {
        CU_MEM_ALLOCATION_TYPE_PINNED => Ok(()),
        CU_MEM_ALLOCATION_TYPE_MANAGED => Err(CUresult::ERROR_NOT_SUPPORTED),
        _ => Err(INVALID),
    }
}

pub(crate) fn cuMemPoolCreate(c: &Caller, pool: *mut CUmemoryPool, poolProps: *const CUmemPoolProps) -> R {
    let p = c.get(poolProps)?;
    if pool.is_null() {
        return Err(INVALID);
    }
    check_type(p.allocType)?;
    let (_, device) = slot(p.location)?;
    let posix = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
    if p.location.type_ == CU_MEM_LOCATION_TYPE_HOST && p.handleTypes != CU_MEM_HANDLE_TYPE_NONE {
        return Err(INVALID);
    }
    if p.handleTypes.0 & !posix != 0 {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    let make = Make {
        location: p.location,
        device,
        handle_types: p.handleTypes.0,
        rdma: p.gpuDirectRDMACapable != 0,
        usage: p.usage,
        max_size: (p.maxSize as u64).checked_next_multiple_of(BLOCK).unwrap_or(0),
    };
    c.put(pool, CUmemoryPool(Pool::new(make, None, false).handle))
}

pub(crate) fn cuMemPoolDestroy(_: &Caller, pool: CUmemoryPool) -> R {
    let found = find(pool)?;
    if found.default {
        return Err(INVALID);
    }
    for slot in &process().device_pools {
        let mut slot = lock(slot);
        if slot.1 == pool.0 {
            slot.1 = 0;
        }
    }
    let mut state = lock(&found.state);
    state.destroyed = true;
    found.settle(&mut state, |piece| piece.stream.is_done(piece.ticket));
    found.shrink(&mut state, 0);
    found.end_if_over(state);
    Ok(())
}

pub(crate) fn cuMemPoolTrimTo(_: &Caller, pool: CUmemoryPool, minBytesToKeep: usize) -> R {
    let pool = find(pool)?;
    let mut state = lock(&pool.state);
    pool.settle_observed(&mut state);
    pool.shrink(&mut state, minBytesToKeep as u64);
    Ok(())
}

fn is_switch(attribute: CUmemPool_attribute) -> bool {
    matches!(
        attribute,
        CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
            | CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC
            | CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
    )
}

pub(crate) fn cuMemPoolGetAttribute(
    c: &Caller,
    pool: CUmemoryPool,
    attr: CUmemPool_attribute,
    value: *mut c_void,
) -> R {
    let pool = find(pool)?;
    let state = lock(&pool.state);
    let number = match attr {
        _ if is_switch(attr) => i32::from(Pool::reuses(&state, attr)),
        CU_MEMPOOL_ATTR_ALLOCATION_TYPE => CU_MEM_ALLOCATION_TYPE_PINNED.0 as i32,
        CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES if pool.imported => 0,
        CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES => pool.make.handle_types as i32,
        CU_MEMPOOL_ATTR_LOCATION_ID => pool.make.location.id(),
        CU_MEMPOOL_ATTR_LOCATION_TYPE => pool.make.location.type_.0 as i32,
        CU_MEMPOOL_ATTR_HW_DECOMPRESS_ENABLED => i32::from(pool.make.usage & 2 != 0),
        CU_MEMPOOL_ATTR_LOCALITY_DOMAIN_ID => -1,
        _ => {
            let figure = match attr {
                CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => state.threshold,
                CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT => state.heap.totals().0,
                CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => state.reserved_high,
                CU_MEMPOOL_ATTR_USED_MEM_CURRENT => state.used,
                CU_MEMPOOL_ATTR_USED_MEM_HIGH => state.used_high,
                CU_MEMPOOL_ATTR_MAX_POOL_SIZE => pool.make.max_size,
                _ => return Err(INVALID),
            };
            return c.put(value.cast::<u64>(), figure);
        }
    };
    c.put(value.cast::<i32>(), number)
}

pub(crate) fn cuMemPoolSetAttribute(
    c: &Caller,
    pool: CUmemoryPool,
    attr: CUmemPool_attribute,
    value: *mut c_void,
) -> R {
    let pool = find(pool)?;
    let mut state = lock(&pool.state);
    if is_switch(attr) {
        let on = c.get(value.cast_const().cast::<i32>())? != 0;
        state.off.retain(|known| *known != attr.0);
        if !on {
            state.off.push(attr.0);
        }
        return Ok(());
    }
    let figure = c.get(value.cast_const().cast::<u64>())?;
    match attr {
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => state.threshold = figure,
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH if figure == 0 => state.reserved_high = state.heap.totals().0,
        CU_MEMPOOL_ATTR_USED_MEM_HIGH if figure == 0 => state.used_high = state.used,
        _ => return Err(INVALID),
    }
    Ok(())
}

/// Who is meant by a location that accesses memory.
fn accessor(location: CUmemLocation) -> Result<u32, CUresult> {
    slot(location).map(|(_, device)| device.unwrap_or(HOST))
}

pub(crate) fn cuMemPoolSetAccess(
    c: &Caller,
    pool: CUmemoryPool,
    map: *const CUmemAccessDesc,
    count: usize,
) -> R {
    let pool = find(pool)?;
    let own = pool.make.device.unwrap_or(HOST);
    let mut wanted = Vec::new();
    for description in c.array(map, count)? {
        let who = accessor(description.location)?;
        let flags = description.flags.0;
        // Its own location keeps its access, and the processor does not reach a device's memory.
        let allowed = matches!(flags, 0 | READ | READ_WRITE)
            && (who != own || flags == READ_WRITE)
            && (who != HOST || own == HOST || flags == 0);
        if !allowed {
            return Err(INVALID);
        }
        wanted.push((who, flags));
    }
    let mut state = lock(&pool.state);
    let mut tables = process().memory.write();
    for (who, flags) in wanted {
        state.access.retain(|(known, _)| *known != who);
        if flags != 0 {
            state.access.push((who, flags));
        }
        let blocks = state.heap.blocks().into_iter().map(|(base, _)| base);
        for base in blocks.chain(state.imports.iter().copied()) {
            tables.set_access(base, who, flags)?;
        }
    }
    Ok(())
}

pub(crate) fn cuMemPoolGetAccess(
    c: &Caller,
    flags: *mut CUmemAccess_flags,
    memPool: CUmemoryPool,
    location: *mut CUmemLocation,
) -> R {
    let pool = find(memPool)?;
    let who = accessor(c.get(location.cast_const())?)?;
    let state = lock(&pool.state);
    let granted = state.access.iter().find(|(known, _)| *known == who);
    c.put(flags, CUmemAccess_flags(granted.map_or(0, |(_, flags)| *flags)))
}

fn set_current(location: CUmemLocation, handle: CUmemoryPool) -> R {
    let pool = find(handle)?;
    let (index, device) = slot(location)?;
    if pool.imported || pool.make.device != device || pool.make.location.type_ != location.type_ {
        return Err(INVALID);
    }
    lock(&process().device_pools[index]).1 = handle.0;
    Ok(())
}

pub(crate) fn cuDeviceGetDefaultMemPool(c: &Caller, pool_out: *mut CUmemoryPool, dev: CUdevice) -> R {
    c.put(
        pool_out,
        CUmemoryPool(default_pool(CUmemLocation::device(dev.0))?.handle),
    )
}

pub(crate) fn cuDeviceGetMemPool(c: &Caller, pool: *mut CUmemoryPool, dev: CUdevice) -> R {
    c.put(
        pool,
        CUmemoryPool(current_pool(CUmemLocation::device(dev.0))?.handle),
    )
}

pub(crate) fn cuDeviceSetMemPool(_: &Caller, dev: CUdevice, pool: CUmemoryPool) -> R {
    set_current(CUmemLocation::device(dev.0), pool)
}

pub(crate) fn cuMemGetDefaultMemPool(
    c: &Caller,
    pool_out: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    type_: CUmemAllocationType,
) -> R {
    check_type(type_)?;
    let pool = default_pool(c.get(location.cast_const())?)?;
    c.put(pool_out, CUmemoryPool(pool.handle))
}

pub(crate) fn cuMemGetMemPool(
    c: &Caller,
    pool: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    type_: CUmemAllocationType,
) -> R {
    check_type(type_)?;
    let found = current_pool(c.get(location.cast_const())?)?;
    c.put(pool, CUmemoryPool(found.handle))
}

pub(crate) fn cuMemSetMemPool(
    c: &Caller,
    location: *mut CUmemLocation,
    type_: CUmemAllocationType,
    pool: CUmemoryPool,
) -> R {
    check_type(type_)?;
    set_current(c.get(location.cast_const())?, pool)
}
