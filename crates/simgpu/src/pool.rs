//! Stream-ordered memory pools.
//!
//! A pool owns blocks of device memory and gives out pieces. A piece that is freed in a stream may be reused at once in that stream, and by
//! everyone when the stream has come to the place where it was freed. Blocks without pieces are kept until the program waits for
//! something; then the pool shrinks to its release threshold.

use std::sync::{Arc, Mutex};

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::capture;
use crate::context::{self, Shared};
use crate::graph::{Action, GraphMemory};
use crate::handles::fresh;
use crate::memory::heap::{Heap, SMALL};
use crate::memory::phys::fresh_buffer_id;
use crate::memory::{Allocation, BLOCK, Kind, READ_WRITE, alloc};
use crate::process::{lock, process};
use crate::stream::{Stream, submit};
use crate::work::Work;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;

#[derive(Debug)]
struct Freed {
    address: u64,
    bytes: u64,
    stream: Arc<Stream>,
    ticket: u64,
}

#[derive(Debug, Default)]
struct State {
    heap: Heap,
    freed: Vec<Freed>,
    threshold: u64,
    used: u64,
    used_high: u64,
    reserved_high: u64,
    /// The reuse switches: on unless the program turned them off.
    off: Vec<u32>,
    /// The program destroyed the pool; it goes when its last piece does.
    destroyed: bool,
    /// Devices that may access it besides its own.
    peers: Vec<u32>,
}

/// A pool.
#[derive(Debug)]
pub(crate) struct Pool {
    handle: usize,
    device: u32,
    max_size: u64,
    state: Mutex<State>,
}

impl Pool {
    fn new(device: u32, max_size: u64) -> Arc<Self> {
        let pool = Arc::new(Self {
            handle: fresh(),
            device,
            max_size,
            state: Mutex::default(),
        });
        process().pools.insert(pool.handle, Arc::clone(&pool));
        pool
    }

    fn devices(&self, state: &State) -> Vec<u32> {
        std::iter::once(self.device)
            .chain(state.peers.iter().copied())
            .collect()
    }

    /// Pieces whose stream has passed the place where they were freed become everyone's.
    fn settle(state: &mut State, wait: bool) {
        let freed = std::mem::take(&mut state.freed);
        for piece in freed {
            if wait {
                piece.stream.wait_for(piece.ticket);
            }
            if piece.stream.is_done(piece.ticket) {
                state.heap.give(piece.address, piece.bytes);
            } else {
                state.freed.push(piece);
            }
        }
    }

    fn allocate(&self, stream: &Arc<Stream>, bytes: u64) -> Result<u64, CUresult> {
        let size = bytes
            .checked_next_multiple_of(SMALL)
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
        let mut state = lock(&self.state);
        let own = state.freed.iter().position(|piece| {
            Arc::ptr_eq(&piece.stream, stream) && piece.bytes.next_multiple_of(SMALL) == size
        });
        let address = match own {
            Some(index) => state.freed.swap_remove(index).address,
            None => {
                Self::settle(&mut state, false);
                match state.heap.take(size) {
                    Some(address) => address,
                    None => self.grow(&mut state, size)?,
                }
            }
        };
        state.used += size;
        state.used_high = state.used_high.max(state.used);
        drop(state);
        let allocation = Allocation {
            size: bytes,
            kind: Kind::Pool(self.handle),
            context: 0,
            buffer_id: fresh_buffer_id(),
        };
        process().memory.write().allocations.insert(address, allocation);
        Ok(address)
    }

    fn grow(&self, state: &mut State, size: u64) -> Result<u64, CUresult> {
        let block = size
            .checked_next_multiple_of(BLOCK)
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
        if block > process().machine.config().memory {
            return Err(CUresult::ERROR_OUT_OF_MEMORY);
        }
        if self.max_size > 0 && state.heap.totals().0 + block > self.max_size {
            return Err(CUresult::ERROR_OUT_OF_MEMORY);
        }
        let devices = self.devices(state);
        let base = match alloc::map_block(self.device, block, &devices) {
            Err(CUresult::ERROR_OUT_OF_MEMORY) => {
                // What is only kept for later makes room first.
                Self::settle(state, true);
                Self::shrink(state, 0);
                if let Some(address) = state.heap.take(size) {
                    return Ok(address);
                }
                alloc::map_block(self.device, block, &devices)?
            }
            other => other?,
        };
        state.heap.add(base, block);
        state.reserved_high = state.reserved_high.max(state.heap.totals().0);
        state.heap.take(size).ok_or(CUresult::ERROR_OUT_OF_MEMORY)
    }

    /// Gives blocks without pieces back until the pool is no larger than `keep`.
    fn shrink(state: &mut State, keep: u64) {
        for (base, _) in state.heap.empty_blocks() {
            if state.heap.totals().0 <= keep {
                break;
            }
            state.heap.remove(base);
            alloc::unmap_block(base);
        }
    }

    fn free(self: &Arc<Self>, address: u64, bytes: u64, when: Option<(Arc<Stream>, u64)>) {
        let mut state = lock(&self.state);
        state.used = state.used.saturating_sub(bytes.next_multiple_of(SMALL));
        match when {
            Some((stream, ticket)) => state.freed.push(Freed {
                address,
                bytes,
                stream,
                ticket,
            }),
            None => {
                state.heap.give(address, bytes);
            }
        }
        if state.destroyed && state.used == 0 {
            Self::settle(&mut state, true);
            Self::shrink(&mut state, 0);
            drop(state);
            process().pools.remove(self.handle);
        }
    }
}

/// After the program waited for something of a context: its device's pools shrink to their thresholds.
pub(crate) fn after_synchronise(context: &Shared) {
    for pool in process().pools.all() {
        if pool.device == context.device {
            let mut state = lock(&pool.state);
            Pool::settle(&mut state, false);
            let keep = state.threshold;
            Pool::shrink(&mut state, keep);
        }
    }
}

/// Frees a piece whose work is known to be over; its table entry is gone already.
pub(crate) fn free_now(address: u64, allocation: &Allocation) -> R {
    if let Kind::Pool(handle) = allocation.kind
        && let Some(pool) = process().pools.get(handle)
    {
        pool.free(address, allocation.size, None);
    }
    Ok(())
}

fn find(handle: CUmemoryPool) -> Result<Arc<Pool>, CUresult> {
    process()
        .pools
        .get(handle.0)
        .filter(|pool| !lock(&pool.state).destroyed)
        .ok_or(INVALID)
}

fn default_pool(ordinal: i32) -> Result<Arc<Pool>, CUresult> {
    let device = process().physical(ordinal)?;
    let mut slot = lock(&process().device_pools[ordinal as usize]);
    if let Some(pool) = &slot.0 {
        return Ok(Arc::clone(pool));
    }
    let pool = Pool::new(device, 0);
    slot.0 = Some(Arc::clone(&pool));
    Ok(pool)
}

fn current_pool(ordinal: i32) -> Result<Arc<Pool>, CUresult> {
    let default = default_pool(ordinal)?;
    let current = lock(&process().device_pools[ordinal as usize]).1;
    Ok(process().pools.get(current).unwrap_or(default))
}

fn allocate(c: &Caller, out: *mut CUdeviceptr, bytes: usize, pool: &Pool, stream: &Arc<Stream>) -> R {
    if out.is_null() || bytes == 0 {
        return Err(INVALID);
    }
    stream.context.check()?;
    if stream.capturing.load(std::sync::atomic::Ordering::Acquire) {
        let memory = GraphMemory::new(pool.device, bytes as u64)?;
        let address = memory.address;
        capture::record_action(stream, Action::Allocate(memory))?;
        return c.put(out, CUdeviceptr(address));
    }
    capture::check_implicit(stream)?;
    c.put(out, CUdeviceptr(pool.allocate(stream, bytes as u64)?))
}

pub(crate) fn cuMemAllocAsync(c: &Caller, dptr: *mut CUdeviceptr, bytesize: usize, hStream: CUstream) -> R {
    context::current()?;
    let stream = c.stream(hStream)?;
    let pool = current_pool(stream.context.ordinal)?;
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
    if stream.capturing.load(std::sync::atomic::Ordering::Acquire) {
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
        Kind::Imported | Kind::Global => Err(INVALID),
    }
}

/// In a capture only what the same capture allocated can be freed as a node.
fn free_in_capture(stream: &Arc<Stream>, address: u64) -> R {
    let memory = capture::with_graph(stream, |graph| {
        crate::graph_nodes::memory_at(&lock(&graph.nodes), address)
    })?;
    capture::record_action(stream, Action::Free(memory.ok_or(INVALID)?)).map(drop)
}

pub(crate) fn cuMemPoolCreate(c: &Caller, pool: *mut CUmemoryPool, poolProps: *const CUmemPoolProps) -> R {
    let properties = c.get(poolProps)?;
    if pool.is_null() || properties.allocType != CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(INVALID);
    }
    if properties.location.type_ != CU_MEM_LOCATION_TYPE_DEVICE
        || properties.handleTypes != CU_MEM_HANDLE_TYPE_NONE
    {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    let device = process().physical(properties.location.id())?;
    c.put(
        pool,
        CUmemoryPool(Pool::new(device, properties.maxSize as u64).handle),
    )
}

pub(crate) fn cuMemPoolDestroy(_: &Caller, pool: CUmemoryPool) -> R {
    let found = find(pool)?;
    if process()
        .device_pools
        .iter()
        .any(|slot| lock(slot).0.as_ref().is_some_and(|it| it.handle == pool.0))
    {
        return Err(INVALID);
    }
    let mut state = lock(&found.state);
    state.destroyed = true;
    Pool::settle(&mut state, false);
    if state.used == 0 && state.freed.is_empty() {
        Pool::shrink(&mut state, 0);
        drop(state);
        process().pools.remove(pool.0);
    } else {
        Pool::shrink(&mut state, 0);
    }
    Ok(())
}

pub(crate) fn cuMemPoolTrimTo(_: &Caller, pool: CUmemoryPool, minBytesToKeep: usize) -> R {
    let pool = find(pool)?;
    let mut state = lock(&pool.state);
    Pool::settle(&mut state, false);
    Pool::shrink(&mut state, minBytesToKeep as u64);
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
    if is_switch(attr) {
        return c.put(value.cast::<i32>(), i32::from(!state.off.contains(&attr.0)));
    }
    let figure = match attr {
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => state.threshold,
        CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT => state.heap.totals().0,
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => state.reserved_high,
        CU_MEMPOOL_ATTR_USED_MEM_CURRENT => state.used,
        CU_MEMPOOL_ATTR_USED_MEM_HIGH => state.used_high,
        _ => return Err(INVALID),
    };
    c.put(value.cast::<u64>(), figure)
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

pub(crate) fn cuMemPoolSetAccess(
    c: &Caller,
    pool: CUmemoryPool,
    map: *const CUmemAccessDesc,
    count: usize,
) -> R {
    let pool = find(pool)?;
    let mut state = lock(&pool.state);
    for description in c.array(map, count)? {
        if description.location.type_ != CU_MEM_LOCATION_TYPE_DEVICE {
            return Err(INVALID);
        }
        let device = process().physical(description.location.id())?;
        let flags = description.flags.0;
        if device == pool.device {
            if flags != READ_WRITE {
                return Err(INVALID);
            }
            continue;
        }
        state.peers.retain(|peer| *peer != device);
        if flags == READ_WRITE {
            state.peers.push(device);
        }
        let mut tables = process().memory.write();
        for (base, _) in state.heap.blocks() {
            tables.set_access(base, device, flags)?;
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
    let device = process().physical(c.get(location.cast_const())?.id())?;
    let state = lock(&pool.state);
    let granted = pool.devices(&state).contains(&device);
    c.put(
        flags,
        if granted {
            CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        } else {
            CU_MEM_ACCESS_FLAGS_PROT_NONE
        },
    )
}

pub(crate) fn cuDeviceGetDefaultMemPool(c: &Caller, pool_out: *mut CUmemoryPool, dev: CUdevice) -> R {
    c.put(pool_out, CUmemoryPool(default_pool(dev.0)?.handle))
}

pub(crate) fn cuDeviceGetMemPool(c: &Caller, pool: *mut CUmemoryPool, dev: CUdevice) -> R {
    c.put(pool, CUmemoryPool(current_pool(dev.0)?.handle))
}

pub(crate) fn cuDeviceSetMemPool(_: &Caller, dev: CUdevice, pool: CUmemoryPool) -> R {
    let device = process().physical(dev.0)?;
    if find(pool)?.device != device {
        return Err(INVALID);
    }
    lock(&process().device_pools[dev.0 as usize]).1 = pool.0;
    Ok(())
}

fn of_location(c: &Caller, location: *mut CUmemLocation) -> Result<i32, CUresult> {
    let location = c.get(location.cast_const())?;
    if location.type_ == CU_MEM_LOCATION_TYPE_DEVICE {
        Ok(location.id())
    } else {
        Err(CUresult::ERROR_NOT_SUPPORTED)
    }
}

pub(crate) fn cuMemGetDefaultMemPool(
    c: &Caller,
    pool_out: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    _type: CUmemAllocationType,
) -> R {
    let ordinal = of_location(c, location)?;
    cuDeviceGetDefaultMemPool(c, pool_out, CUdevice(ordinal))
}

pub(crate) fn cuMemGetMemPool(
    c: &Caller,
    pool: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    _type: CUmemAllocationType,
) -> R {
    let ordinal = of_location(c, location)?;
    cuDeviceGetMemPool(c, pool, CUdevice(ordinal))
}

pub(crate) fn cuMemSetMemPool(
    c: &Caller,
    location: *mut CUmemLocation,
    _type: CUmemAllocationType,
    pool: CUmemoryPool,
) -> R {
    let ordinal = of_location(c, location)?;
    cuDeviceSetMemPool(c, CUdevice(ordinal), pool)
}
