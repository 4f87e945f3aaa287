//! Stream-ordered memory pools.
//!
//! A pool owns blocks of memory and gives out pieces. Where a new piece comes from, in this order:
//!
//! 1. what was freed earlier in the same stream;
//! 2. what nobody uses;
//! 3. what was freed in a stream that this one was made to wait for (`REUSE_FOLLOW_EVENT_DEPENDENCIES`);
//! 4. what was freed in a stream that has come to the place of the free (`REUSE_ALLOW_OPPORTUNISTIC`);
//! 5. a new block;
//! 6. if the device has no room: what another stream will free, and this one waits (`REUSE_ALLOW_INTERNAL_DEPENDENCIES`);
//! 7. at last, blocks without pieces are given back and the block is asked for again.
//!
//! A piece that was freed in a stream counts as outstanding until the program has *seen* that the stream came so far (by a
//! synchronisation or a query that succeeded): only then can its block go back to the device, by trimming or by the next
//! synchronisation, which shrinks a pool to its release threshold.
//!
//! `calls` has the functions of the interface, `share` what goes between processes.

mod calls;
mod share;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ebb_abi::*;

use crate::R;
use crate::context::Shared;
use crate::memory::heap::{Heap, SMALL};
use crate::memory::phys::{Phys, fresh_buffer_id};
use crate::memory::{Allocation, BLOCK, HOST, Kind, READ_WRITE, alloc};
use crate::process::{lock, process};
use crate::stream::{Stream, submit_now};
use crate::work::Work;

pub(crate) use calls::*;
pub(crate) use share::*;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;

/// A piece that was freed in a stream and is not everyone's yet.
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
    /// Access by physical device index ([`HOST`]: the processor), its own location's included.
    access: Vec<(u32, u32)>,
    /// Of an imported pool: where each imported piece's block is mapped.
    imports: Vec<u64>,
}

/// What a pool was made as.
#[derive(Debug, Clone, Copy)]
struct Make {
    location: CUmemLocation,
    /// The physical index of its device; `None` is the host.
    device: Option<u32>,
    handle_types: u32,
    rdma: bool,
    usage: u16,
    max_size: u64,
}

/// A pool.
#[derive(Debug)]
pub(crate) struct Pool {
    handle: usize,
    make: Make,
    /// What other processes know it by, if it is shared.
    name: u64,
    /// It is another process's: pieces come from there and not from here.
    imported: bool,
    /// It is the default of its location, and stays.
    default: bool,
    state: Mutex<State>,
}

static NEXT_NAME: AtomicU64 = AtomicU64::new(1);

impl Pool {
    fn new(make: Make, imported: Option<u64>, default: bool) -> Arc<Self> {
        let name = imported.unwrap_or_else(|| {
            u64::from(std::process::id()) << 32 | NEXT_NAME.fetch_add(1, Ordering::Relaxed)
        });
        let own = (make.device.unwrap_or(HOST), READ_WRITE);
        let pool = Arc::new(Self {
            handle: crate::handles::fresh(),
            make,
            name,
            imported: imported.is_some(),
            default,
            state: Mutex::new(State {
                access: vec![own],
                ..State::default()
            }),
        });
        process().pools.insert(pool.handle, Arc::clone(&pool));
        pool
    }

    fn reuses(state: &State, attribute: CUmemPool_attribute) -> bool {
        !state.off.contains(&attribute.0)
    }

    /// A freed piece becomes everyone's: of an imported pool, it goes.
    fn give(&self, state: &mut State, address: u64, bytes: u64) {
        if self.imported {
            share::drop_import(state, address);
        } else {
            state.heap.give(address, bytes);
        }
    }

    /// Freed pieces that pass the test become everyone's.
    fn settle(&self, state: &mut State, is_over: impl Fn(&Freed) -> bool) {
        for piece in std::mem::take(&mut state.freed) {
            if is_over(&piece) {
                self.give(state, piece.address, piece.bytes);
            } else {
                state.freed.push(piece);
            }
        }
    }

    fn settle_observed(&self, state: &mut State) {
        self.settle(state, |piece| piece.stream.is_observed(piece.ticket));
    }

    /// Takes `size` bytes out of the smallest freed piece that is large enough and passes the test.
    fn take_freed(
        state: &mut State,
        size: u64,
        may: impl Fn(&Freed) -> bool,
    ) -> Option<(u64, Arc<Stream>, u64)> {
        let index = (0..state.freed.len())
            .filter(|index| state.freed[*index].bytes >= size && may(&state.freed[*index]))
            .min_by_key(|index| state.freed[*index].bytes)?;
        let piece = &mut state.freed[index];
        let found = (piece.address, Arc::clone(&piece.stream), piece.ticket);
        if piece.bytes == size {
            state.freed.swap_remove(index);
        } else {
            piece.address += size;
            piece.bytes -= size;
        }
        Some(found)
    }

    fn allocate(&self, stream: &Arc<Stream>, bytes: u64) -> Result<u64, CUresult> {
        let size = bytes
            .checked_next_multiple_of(SMALL)
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
        let mut state = lock(&self.state);
        let address = self.find_room(&mut state, stream, size)?;
        state.used += size;
        state.used_high = state.used_high.max(state.used);
        drop(state);
        let allocation = Allocation {
            size: bytes,
            kind: Kind::Pool(self.handle),
            context: 0,
            buffer_id: fresh_buffer_id(),
            shared: false,
        };
        process().memory.write().allocations.insert(address, allocation);
        Ok(address)
    }

    /// The order that the module's description gives.
    fn find_room(&self, state: &mut State, stream: &Arc<Stream>, size: u64) -> Result<u64, CUresult> {
        let same = |piece: &Freed| Arc::ptr_eq(&piece.stream, stream);
        if let Some((address, ..)) = Self::take_freed(state, size, same) {
            return Ok(address);
        }
        self.settle_observed(state);
        if let Some(address) = state.heap.take(size) {
            return Ok(address);
        }
        if Self::reuses(state, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES) {
            let behind = |piece: &Freed| stream.runs_after(piece.stream.handle, piece.ticket);
            if let Some((address, ..)) = Self::take_freed(state, size, behind) {
                return Ok(address);
            }
        }
        if Self::reuses(state, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC) {
            let over = |piece: &Freed| piece.stream.is_done(piece.ticket);
            if let Some((address, ..)) = Self::take_freed(state, size, over) {
                return Ok(address);
            }
        }
        match self.grow(state, size) {
            Err(CUresult::ERROR_OUT_OF_MEMORY) => {}
            other => return other,
        }
        if Self::reuses(state, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES)
            && let Some((address, other, ticket)) = Self::take_freed(state, size, |_| true)
        {
            submit_now(stream, [Work::Wait(other, ticket)]);
            return Ok(address);
        }
        self.settle(state, |piece| {
            piece.stream.wait_for(piece.ticket);
            true
        });
        if let Some(address) = state.heap.take(size) {
            return Ok(address);
        }
        self.shrink(state, 0);
        self.grow(state, size)
    }

    fn grow(&self, state: &mut State, size: u64) -> Result<u64, CUresult> {
        let oom = CUresult::ERROR_OUT_OF_MEMORY;
        let block = size.checked_next_multiple_of(BLOCK).ok_or(oom)?;
        let capacity = process().machine.config().memory;
        if (self.make.device.is_some() && block > capacity)
            || (self.make.max_size > 0 && state.heap.totals().0 + block > self.make.max_size)
        {
            return Err(oom);
        }
        let mut properties = CUmemAllocationProp {
            type_: CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: CUmemAllocationHandleType(self.make.handle_types),
            location: self.make.location,
            ..CUmemAllocationProp::default()
        };
        properties.allocFlags[0] = u16::from(self.make.rdma) << 8;
        let phys = Phys::new(
            process().machine,
            process().arena,
            self.make.device,
            block,
            properties,
            self.make.handle_types != 0,
        )?;
        let base = alloc::map_phys(phys, state.access.clone())?;
        state.heap.add(base, block);
        state.reserved_high = state.reserved_high.max(state.heap.totals().0);
        state.heap.take(size).ok_or(oom)
    }

    /// Gives blocks without pieces back as long as at least `keep` bytes stay.
    fn shrink(&self, state: &mut State, keep: u64) {
        for (base, size) in state.heap.empty_blocks() {
            if state.heap.totals().0 < keep.saturating_add(size) {
                continue;
            }
            state.heap.remove(base);
            alloc::unmap_block(base);
        }
    }

    /// A piece's table entry is gone; `when` it was freed in stream order is the stream and the place.
    fn free(self: &Arc<Self>, address: u64, bytes: u64, when: Option<(Arc<Stream>, u64)>) {
        let size = bytes.next_multiple_of(SMALL);
        let mut state = lock(&self.state);
        state.used = state.used.saturating_sub(size);
        match when {
            Some((stream, ticket)) => state.freed.push(Freed {
                address,
                bytes: size,
                stream,
                ticket,
            }),
            None => self.give(&mut state, address, size),
        }
        self.end_if_over(state);
    }

    /// A destroyed pool goes with its last piece.
    fn end_if_over(&self, mut state: std::sync::MutexGuard<'_, State>) {
        if !state.destroyed || state.used > 0 {
            return;
        }
        self.settle(&mut state, |piece| piece.stream.is_done(piece.ticket));
        self.shrink(&mut state, 0);
        if state.freed.is_empty() {
            drop(state);
            process().pools.remove(self.handle);
        }
    }
}

/// After the program waited for something of a context: its device's pools shrink to their thresholds.
pub(crate) fn after_synchronise(context: &Shared) {
    for pool in process().pools.all() {
        if pool.make.device.is_none_or(|device| device == context.device) {
            let mut state = lock(&pool.state);
            pool.settle_observed(&mut state);
            let keep = state.threshold;
            pool.shrink(&mut state, keep);
            pool.end_if_over(state);
        }
    }
}

/// A device (`None`: the host) has no room for a request of this process: its pools give back what they only keep. Says whether that
/// was anything. A pool that is at work just now is left alone.
pub(crate) fn give_back_kept(device: Option<u32>) -> bool {
    let Some(number) = device else { return false };
    let mut any = crate::graph_memory::trim(device) | crate::memory::managed::make_room(number);
    for pool in process().pools.all() {
        if pool.make.device == device
            && let Ok(mut state) = pool.state.try_lock()
        {
            let before = state.heap.totals().0;
            pool.settle(&mut state, |piece| piece.stream.is_done(piece.ticket));
            pool.shrink(&mut state, 0);
            any |= state.heap.totals().0 < before;
        }
    }
    any
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
