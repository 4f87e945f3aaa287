//! Memory of other interfaces (Vulkan and the like), imported by descriptor. What stands for theirs here is a descriptor that
//! `cuMemExportToShareableHandle` made. There are no semaphores of other interfaces, so none can be imported.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::context;
use crate::handles::fresh;
use crate::memory::phys::{Phys, fresh_buffer_id};
use crate::memory::{Allocation, Kind, READ_WRITE, alloc};
use crate::process::{lock, process};

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
const HANDLE: CUresult = CUresult::ERROR_INVALID_HANDLE;

static MEMORY: Mutex<Option<HashMap<usize, Arc<Phys>>>> = Mutex::new(None);

pub(crate) fn cuImportExternalMemory(
    c: &Caller,
    extMem_out: *mut CUexternalMemory,
    memHandleDesc: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
) -> R {
    context::current()?;
    let d = c.get(memHandleDesc)?;
    if extMem_out.is_null() || d.size == 0 || d.flags & !1 != 0 {
        return Err(INVALID);
    }
    match d.type_ {
        CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD => {}
        CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD | CU_EXTERNAL_MEMORY_HANDLE_TYPE_NVSCIBUF => {
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        _ => return Err(INVALID),
    }
    let process = process();
    let fd = d.handle[0] as u32 as i32;
    let object = process
        .machine
        .import_object(fd)
        .map_err(|_| CUresult::ERROR_OPERATING_SYSTEM)?;
    let ordinal = process.ordinal(object.device).ok_or(INVALID)?;
    if d.size > object.bytes {
        return Err(INVALID);
    }
    let properties = CUmemAllocationProp {
        type_: CU_MEM_ALLOCATION_TYPE_PINNED,
        location: CUmemLocation::device(ordinal),
        ..CUmemAllocationProp::default()
    };
    let phys = Phys::import(process.machine, process.arena, object, properties);
    let handle = fresh();
    lock(&MEMORY).get_or_insert_default().insert(handle, phys);
    // The descriptor is the driver's from here on, as the interface says.
    // SAFETY: the program gave the descriptor away; it was open a moment ago.
    unsafe { libc::close(fd) };
    c.put(extMem_out, CUexternalMemory(handle))
}

pub(crate) fn cuExternalMemoryGetMappedBuffer(
    c: &Caller,
    devPtr: *mut CUdeviceptr,
    extMem: CUexternalMemory,
    bufferDesc: *const CUDA_EXTERNAL_MEMORY_BUFFER_DESC,
) -> R {
    let context = context::current()?;
    let d = c.get(bufferDesc)?;
    let phys = lock(&MEMORY)
        .as_ref()
        .and_then(|all| all.get(&extMem.0).cloned())
        .ok_or(HANDLE)?;
    let inside = d.offset.checked_add(d.size).is_some_and(|end| end <= phys.bytes);
    if devPtr.is_null() || d.flags != 0 || d.size == 0 || !inside {
        return Err(INVALID);
    }
    let device = phys.device.ok_or(INVALID)?;
    let base = alloc::map_phys(phys, vec![(device, READ_WRITE)])?;
    let allocation = Allocation {
        size: d.size,
        kind: Kind::External,
        context: context.shared.handle,
        buffer_id: fresh_buffer_id(),
        shared: false,
    };
    let address = base + d.offset;
    process().memory.write().allocations.insert(address, allocation);
    c.put(devPtr, CUdeviceptr(address))
}

/// Mapped buffers stay until they are freed.
pub(crate) fn cuDestroyExternalMemory(_: &Caller, extMem: CUexternalMemory) -> R {
    let gone = lock(&MEMORY).as_mut().and_then(|all| all.remove(&extMem.0));
    gone.map(drop).ok_or(HANDLE)
}

pub(crate) fn cuImportExternalSemaphore(
    c: &Caller,
    extSem_out: *mut CUexternalSemaphore,
    semHandleDesc: *const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC,
) -> R {
    context::current()?;
    let d = c.get(semHandleDesc)?;
    if extSem_out.is_null() {
        return Err(INVALID);
    }
    match d.type_ {
        CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD
        | CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD => Err(CUresult::ERROR_OPERATING_SYSTEM),
        CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_NVSCISYNC => Err(CUresult::ERROR_NOT_SUPPORTED),
        _ => Err(INVALID),
    }
}

pub(crate) fn cuDestroyExternalSemaphore(_: &Caller, _extSem: CUexternalSemaphore) -> R {
    Err(HANDLE)
}

pub(crate) fn cuSignalExternalSemaphoresAsync(
    c: &Caller,
    _extSemArray: *const CUexternalSemaphore,
    _paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS,
    _numExtSems: u32,
    stream: CUstream,
) -> R {
    c.stream(stream)?;
    Err(HANDLE)
}

pub(crate) fn cuWaitExternalSemaphoresAsync(
    c: &Caller,
    _extSemArray: *const CUexternalSemaphore,
    _paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
    _numExtSems: u32,
    stream: CUstream,
) -> R {
    c.stream(stream)?;
    Err(HANDLE)
}
