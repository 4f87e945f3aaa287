//! Memory nodes of graphs, and the memory that a device keeps for them.
//!
//! An allocation node has an address for the graph's life and physical memory from its launch until it is freed. What is freed stays with the
//! device's graph memory (*reserved*, not *used*) for the next launch, until the program trims it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::memory::phys::{Phys, fresh_buffer_id};
use crate::memory::{Allocation, BLOCK, Kind, Mapping};
use crate::process::{lock, process};

/// What one device keeps for graphs.
#[derive(Debug, Default)]
struct Kept {
    idle: Vec<Arc<Phys>>,
    used: u64,
    reserved: u64,
    used_high: u64,
    reserved_high: u64,
}

static KEPT: [Mutex<Kept>; ebb_simdev::MAX_DEVICES] = [const {
    Mutex::new(Kept {
        idle: Vec::new(),
        used: 0,
        reserved: 0,
        used_high: 0,
        reserved_high: 0,
    })
}; ebb_simdev::MAX_DEVICES];

/// Memory of an allocation node.
#[derive(Debug)]
pub(crate) struct GraphMemory {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    size: u64,
    pub(crate) device: u32,
    access: Vec<(u32, u32)>,
}

impl GraphMemory {
    pub(crate) fn new(device: u32, bytes: u64, access: Vec<(u32, u32)>) -> Result<Arc<Self>, CUresult> {
        let size = bytes
            .checked_next_multiple_of(BLOCK)
            .filter(|size| *size > 0)
            .ok_or(CUresult::ERROR_INVALID_VALUE)?;
        let address = process()
            .memory
            .write()
            .reserve(size, BLOCK, 0, false)
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
        Ok(Arc::new(Self {
            address,
            bytes,
            size,
            device,
            access,
        }))
    }

    pub(crate) fn is_attached(&self) -> bool {
        process().memory.read().mappings.contains_key(&self.address)
    }

    /// Puts physical memory behind the address.
    pub(crate) fn attach(&self) -> R {
        if self.is_attached() {
            return Ok(());
        }
        let phys = take(self.device, self.size)?;
        let mut tables = process().memory.write();
        tables.map(
            self.address,
            Mapping {
                size: self.size,
                phys,
                offset: 0,
                access: self.access.clone(),
            },
        )?;
        let allocation = Allocation {
            size: self.bytes,
            kind: Kind::Graph,
            context: 0,
            buffer_id: fresh_buffer_id(),
            shared: false,
        };
        tables.allocations.insert(self.address, allocation);
        Ok(())
    }

    /// Takes the physical memory away again.
    pub(crate) fn detach(&self) {
        detach(self.address);
    }
}

impl Drop for GraphMemory {
    /// What was launched and not freed stays there until the program frees it.
    fn drop(&mut self) {
        let mut orphans = lock(&ORPHANS);
        if self.is_attached() {
            orphans.insert(self.address);
        } else {
            process().memory.write().unreserve(self.address);
        }
    }
}

/// Memory whose nodes are gone. Taken before the tables of memory.
static ORPHANS: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

fn kept(device: u32) -> std::sync::MutexGuard<'static, Kept> {
    lock(&KEPT[device as usize])
}

/// Kept memory of this size, or new memory.
fn take(device: u32, size: u64) -> Result<Arc<Phys>, CUresult> {
    let idle = {
        let mut kept = kept(device);
        kept.idle
            .iter()
            .position(|phys| phys.bytes == size)
            .map(|index| kept.idle.swap_remove(index))
    };
    let fresh = idle.is_none();
    let phys = match idle {
        Some(phys) => phys,
        None => Phys::new(
            process().machine,
            process().arena,
            Some(device),
            size,
            CUmemAllocationProp::default(),
            false,
        )?,
    };
    let mut kept = kept(device);
    if fresh {
        kept.reserved += size;
        kept.reserved_high = kept.reserved_high.max(kept.reserved);
    }
    kept.used += size;
    kept.used_high = kept.used_high.max(kept.used);
    Ok(phys)
}

fn detach(address: u64) {
    let mapping = {
        let mut orphans = lock(&ORPHANS);
        let mut tables = process().memory.write();
        tables.allocations.remove(&address);
        let mapping = tables.unmap(address);
        if orphans.remove(&address) {
            tables.unreserve(address);
        }
        mapping
    };
    if let Some(mapping) = mapping
        && let Some(device) = mapping.phys.device
    {
        let mut kept = kept(device);
        kept.used -= mapping.size;
        kept.idle.push(mapping.phys);
    }
}

/// Gives back what a device keeps for graphs and no graph uses. Says whether there was any.
pub(crate) fn trim(device: Option<u32>) -> bool {
    let Some(device) = device else { return false };
    let idle = {
        let mut kept = kept(device);
        let idle = std::mem::take(&mut kept.idle);
        kept.reserved -= idle.iter().map(|phys| phys.bytes).sum::<u64>();
        idle
    };
    !idle.is_empty()
}

/// All memory that is kept without an address: a checkpoint moves it too.
pub(crate) fn idle_memory() -> Vec<Arc<Phys>> {
    KEPT.iter().flat_map(|kept| lock(kept).idle.clone()).collect()
}

/// `cuMemFree` of a graph's memory.
pub(crate) fn free_memory(address: u64) -> R {
    for context in process().contexts.all() {
        context.shared.drain();
    }
    free_memory_now(address)
}

/// The same when the work is known to be over.
pub(crate) fn free_memory_now(address: u64) -> R {
    detach(address);
    Ok(())
}

pub(crate) fn cuDeviceGetGraphMemAttribute(
    c: &Caller,
    device: CUdevice,
    attr: CUgraphMem_attribute,
    value: *mut c_void,
) -> R {
    let physical = process().physical(device.0)?;
    let figure = {
        let kept = kept(physical);
        match attr {
            CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT => kept.used,
            CU_GRAPH_MEM_ATTR_USED_MEM_HIGH => kept.used_high,
            CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT => kept.reserved,
            CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH => kept.reserved_high,
            _ => return Err(CUresult::ERROR_INVALID_VALUE),
        }
    };
    c.put(value.cast::<u64>(), figure)
}

pub(crate) fn cuDeviceSetGraphMemAttribute(
    c: &Caller,
    device: CUdevice,
    attr: CUgraphMem_attribute,
    value: *mut c_void,
) -> R {
    let physical = process().physical(device.0)?;
    // A high-water mark can only be set back.
    if c.get(value.cast_const().cast::<u64>())? != 0 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let mut kept = kept(physical);
    match attr {
        CU_GRAPH_MEM_ATTR_USED_MEM_HIGH => kept.used_high = kept.used,
        CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH => kept.reserved_high = kept.reserved,
        _ => return Err(CUresult::ERROR_INVALID_VALUE),
    }
    Ok(())
}

pub(crate) fn cuDeviceGraphMemTrim(_: &Caller, device: CUdevice) -> R {
    trim(Some(process().physical(device.0)?));
    Ok(())
}
