//! Multicast objects: a team of devices whose bound memory is written as one. The rules of making, binding and mapping are the driver's; the writing is
//! not simulated: a mapping of the object is memory of its own.
//!
//! ```text
//! created ──AddDevice × numDevices──> complete ──Bind──> bound ──Unbind──> complete
//! ```
//! Binding and mapping wait until the team is complete. Bound memory lives until it is unbound or the object goes.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::memory::phys::Phys;
use crate::memory::vmm;
use crate::process::{MemHandle, lock, process};

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;

#[derive(Debug)]
struct Binding {
    device: u32,
    at: u64,
    size: u64,
    /// Holds the memory.
    _memory: Arc<Phys>,
}

#[derive(Debug, Default)]
struct Team {
    devices: Vec<u32>,
    bindings: Vec<Binding>,
}

/// What makes a memory handle a multicast object.
#[derive(Debug)]
pub(crate) struct Multicast {
    size: u64,
    wanted: usize,
    shared: bool,
    team: Mutex<Team>,
    changed: Condvar,
}

impl Multicast {
    /// Waits until all devices are there.
    pub(crate) fn wait_complete(&self) {
        let mut team = lock(&self.team);
        while team.devices.len() < self.wanted {
            team = self.changed.wait(team).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Devices have it when there is more than one.
pub(crate) fn is_supported() -> bool {
    process().machine.config().devices > 1
}

/// Whether the process has an object, used or not: a checkpoint does not go past one.
pub(crate) fn exists() -> bool {
    let handles = process().mem_handles.all();
    handles.iter().any(|handle| handle.multicast.is_some())
}

fn check(p: &CUmulticastObjectProp) -> R {
    if !is_supported() {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    let posix = u64::from(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0);
    let devices = process().machine.config().devices;
    if p.flags != 0 || p.size == 0 || p.numDevices < 2 || p.numDevices > devices {
        return Err(INVALID);
    }
    if p.handleTypes & !posix != 0 {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    Ok(())
}

fn unit() -> u64 {
    process().machine.config().granularity
}

pub(crate) fn cuMulticastGetGranularity(
    c: &Caller,
    granularity: *mut usize,
    prop: *const CUmulticastObjectProp,
    option: CUmulticastGranularity_flags,
) -> R {
    check(&c.get(prop)?)?;
    if option.0 > CU_MULTICAST_GRANULARITY_RECOMMENDED.0 {
        return Err(INVALID);
    }
    c.put(granularity, unit() as usize)
}

pub(crate) fn cuMulticastCreate(
    c: &Caller,
    mcHandle: *mut CUmemGenericAllocationHandle,
    prop: *const CUmulticastObjectProp,
) -> R {
    let p = c.get(prop)?;
    check(&p)?;
    if mcHandle.is_null() || !(p.size as u64).is_multiple_of(unit()) {
        return Err(INVALID);
    }
    let (machine, arena) = (process().machine, process().arena);
    let shared = p.handleTypes != 0;
    let mut properties = CUmemAllocationProp {
        type_: CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType(p.handleTypes as u32),
        ..CUmemAllocationProp::default()
    };
    properties.allocFlags[3] = vmm::MULTICAST_MARK;
    let phys = Phys::new(machine, arena, None, p.size as u64, properties, shared)?;
    let multicast = Multicast {
        size: p.size as u64,
        wanted: p.numDevices as usize,
        shared,
        team: Mutex::default(),
        changed: Condvar::new(),
    };
    c.put(mcHandle, vmm::add_handle(phys, Some(multicast)))
}

/// The handle with its object.
fn find(handle: CUmemGenericAllocationHandle) -> Result<Arc<MemHandle>, CUresult> {
    process()
        .mem_handles
        .get(handle.0 as usize)
        .filter(|found| found.multicast.is_some())
        .ok_or(INVALID)
}

pub(crate) fn cuMulticastAddDevice(_: &Caller, mcHandle: CUmemGenericAllocationHandle, dev: CUdevice) -> R {
    let device = process().physical(dev.0)?;
    let handle = find(mcHandle)?;
    let object = handle.multicast.as_ref().ok_or(INVALID)?;
    let mut team = lock(&object.team);
    if team.devices.contains(&device) || team.devices.len() == object.wanted {
        return Err(INVALID);
    }
    team.devices.push(device);
    object.changed.notify_all();
    Ok(())
}

fn bind(
    handle: CUmemGenericAllocationHandle,
    device: Option<CUdevice>,
    at: usize,
    memory: Arc<Phys>,
    from: u64,
    size: usize,
    flags: u64,
) -> R {
    let found = find(handle)?;
    let object = found.multicast.as_ref().ok_or(INVALID)?;
    let (at, size) = (at as u64, size as u64);
    let owner = memory.device.ok_or(INVALID)?;
    if let Some(device) = device
        && process().physical(device.0)? != owner
    {
        return Err(INVALID);
    }
    let fits = |start: u64, whole: u64| start.checked_add(size).is_some_and(|end| end <= whole);
    let whole = [at, from, size].iter().all(|part| part.is_multiple_of(unit()));
    if flags != 0 || size == 0 || !whole || !fits(at, object.size) || !fits(from, memory.bytes) {
        return Err(INVALID);
    }
    if object.shared && memory.exported_fd().is_none() {
        return Err(INVALID);
    }
    object.wait_complete();
    let mut team = lock(&object.team);
    let taken = team
        .bindings
        .iter()
        .any(|other| other.device == owner && at < other.at + other.size && other.at < at + size);
    if taken || !team.devices.contains(&owner) {
        return Err(INVALID);
    }
    team.bindings.push(Binding {
        device: owner,
        at,
        size,
        _memory: memory,
    });
    Ok(())
}

fn memory_of(handle: CUmemGenericAllocationHandle) -> Result<Arc<Phys>, CUresult> {
    process()
        .mem_handles
        .get(handle.0 as usize)
        .filter(|found| found.multicast.is_none())
        .map(|found| Arc::clone(&found.phys))
        .ok_or(INVALID)
}

pub(crate) fn cuMulticastBindMem(
    _: &Caller,
    mcHandle: CUmemGenericAllocationHandle,
    mcOffset: usize,
    memHandle: CUmemGenericAllocationHandle,
    memOffset: usize,
    size: usize,
    flags: u64,
) -> R {
    let memory = memory_of(memHandle)?;
    bind(mcHandle, None, mcOffset, memory, memOffset as u64, size, flags)
}

pub(crate) fn cuMulticastBindMem_v2(
    _: &Caller,
    mcHandle: CUmemGenericAllocationHandle,
    dev: CUdevice,
    mcOffset: usize,
    memHandle: CUmemGenericAllocationHandle,
    memOffset: usize,
    size: usize,
    flags: u64,
) -> R {
    let memory = memory_of(memHandle)?;
    bind(
        mcHandle,
        Some(dev),
        mcOffset,
        memory,
        memOffset as u64,
        size,
        flags,
    )
}

/// The memory that is mapped at an address: of the program's own mappings, or of a pool.
fn memory_at(address: CUdeviceptr) -> Result<(Arc<Phys>, u64), CUresult> {
    let tables = process().memory.read();
    let pool = tables
        .allocation_at(address.0)
        .is_none_or(|(_, allocation)| matches!(allocation.kind, crate::memory::Kind::Pool(_)));
    let (base, mapping) = tables.mapping_at(address.0).filter(|_| pool).ok_or(INVALID)?;
    Ok((Arc::clone(&mapping.phys), mapping.offset + address.0 - base))
}

pub(crate) fn cuMulticastBindAddr(
    _: &Caller,
    mcHandle: CUmemGenericAllocationHandle,
    mcOffset: usize,
    memptr: CUdeviceptr,
    size: usize,
    flags: u64,
) -> R {
    let (memory, from) = memory_at(memptr)?;
    bind(mcHandle, None, mcOffset, memory, from, size, flags)
}

pub(crate) fn cuMulticastBindAddr_v2(
    _: &Caller,
    mcHandle: CUmemGenericAllocationHandle,
    dev: CUdevice,
    mcOffset: usize,
    memptr: CUdeviceptr,
    size: usize,
    flags: u64,
) -> R {
    let (memory, from) = memory_at(memptr)?;
    bind(mcHandle, Some(dev), mcOffset, memory, from, size, flags)
}

pub(crate) fn cuMulticastUnbind(
    _: &Caller,
    mcHandle: CUmemGenericAllocationHandle,
    dev: CUdevice,
    mcOffset: usize,
    size: usize,
) -> R {
    let device = process().physical(dev.0)?;
    let handle = find(mcHandle)?;
    let object = handle.multicast.as_ref().ok_or(INVALID)?;
    let mut team = lock(&object.team);
    let index = team
        .bindings
        .iter()
        .position(|it| it.device == device && it.at == mcOffset as u64 && it.size == size as u64)
        .ok_or(INVALID)?;
    let gone = team.bindings.swap_remove(index);
    drop(team);
    drop(gone);
    Ok(())
}
