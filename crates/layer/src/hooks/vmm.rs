//! The program's own virtual memory management. It holds handles of ours; here they are turned into the driver's for the
//! length of one call, and the engine hears what the driver accepted.
//!
//! Calls about memory of ours go through the gate: inside it everything is on the card, so that the driver itself checks
//! and answers. Host memory, kinds of memory that do not live on one device, imported handles and whatever else has a
//! handle of the driver's go straight through, without a lock and without a look at any device.

use core::ffi::c_void;

use ebb_abi::*;
use ebb_device::{Grant, Location};
use ebb_layer_core::vmm::{self, Use};
use ebb_layer_core::{AllocError, PinReason};

use crate::barrier::{self, Passage};
use crate::bridge::{self, Running};
use crate::hooks::{imports, with};
use crate::peek;
use crate::symbols::real;

/// What a call with a handle of ours gets that is none (any more), or that a forked child inherited.
pub(crate) fn no_such_handle() -> CUresult {
    if bridge::is_running() {
        CUresult::ERROR_INVALID_VALUE
    } else {
        CUresult::ERROR_NOT_INITIALIZED
    }
}

/// Makes a call through the gate.
fn inside(call: impl FnOnce() -> CUresult) -> CUresult {
    let passage = barrier::enter();
    if let Passage::Refused(code) = passage {
        return code;
    }
    let result = barrier::uncancelled(call);
    barrier::leave(passage);
    result
}

/// Makes a call with the driver's handle for one of ours. What the driver accepted is told by `then`.
fn with_real(
    handle: CUmemGenericAllocationHandle,
    pin: Option<PinReason>,
    call: impl FnOnce(CUmemGenericAllocationHandle) -> CUresult,
    then: impl FnOnce(&Running, &Use),
) -> CUresult {
    if !vmm::is_ours(handle.0) {
        return call(handle);
    }
    inside(|| {
        let Some(used) = with(|running| running.engine.vmm_begin_use(handle.0)) else {
            return no_such_handle();
        };
        let result = call(CUmemGenericAllocationHandle(used.real));
        with(|running| {
            if result.is_success() {
                then(running, &used);
            }
            running
                .engine
                .vmm_end_use(&used, pin.filter(|_| result.is_success()));
            Some(())
        });
        result
    })
}

/// Whether some of these addresses are the pool's own. To the program they are memory of `cuMemAlloc`, of which nothing can be mapped
/// anew. The pool's range may lie right behind a reservation of the program, so that one that goes too far reaches into it.
fn is_of_pool(ptr: CUdeviceptr, size: usize) -> bool {
    with(|running| running.engine.overlaps(ptr.0, size as u64).then_some(())).is_some()
}

/// Whether a range touches memory that the program made and mapped.
fn is_mapped(ptr: CUdeviceptr, size: usize) -> bool {
    with(|running| running.engine.vmm_overlaps(ptr.0, size as u64).then_some(())).is_some()
}

fn create(running: &Running, size: usize, prop: &CUmemAllocationProp) -> Option<Result<u64, CUresult>> {
    if prop.type_ != CU_MEM_ALLOCATION_TYPE_PINNED || prop.location.type_ != CU_MEM_LOCATION_TYPE_DEVICE {
        return None;
    }
    // The device is the one in the properties, whatever context the thread has or has not.
    let device = CUdevice(prop.location.u.cast_signed());
    let index = running
        .index_of(device)
        .or_else(|| running.attach(device, None))?;
    let made = running
        .engine
        .vmm_create(index, size as u64, ebb_cuda::props_of(prop));
    match made {
        Ok(handle) => Some(Ok(handle)),
        // The driver refuses such a size by its own code.
        Err(AllocError::Size(_)) => None,
        Err(error) => bridge::alloc_code(error).map(Err),
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemCreate(
    handle: *mut CUmemGenericAllocationHandle,
    size: usize,
    prop: *const CUmemAllocationProp,
    flags: u64,
) -> CUresult {
    // SAFETY: the program's properties, or null.
    if let Some(asked) = unsafe { prop.as_ref() }
        && !handle.is_null()
        && flags == 0
        && size != 0
    {
        match with(|running| create(running, size, asked)) {
            Some(Ok(ours)) => {
                // SAFETY: not null, and the program's place for the answer.
                unsafe { handle.write(CUmemGenericAllocationHandle(ours)) };
                return CUresult::SUCCESS;
            }
            Some(Err(code)) => return code,
            None => {}
        }
    }
    // SAFETY: the program's own call.
    unsafe { real::cuMemCreate(handle, size, prop, flags) }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> CUresult {
    if !vmm::is_ours(handle.0) {
        // SAFETY: the program's own call.
        let result = unsafe { real::cuMemRelease(handle) };
        if result.is_success() {
            imports::released(handle);
        }
        return result;
    }
    match with(|running| running.engine.vmm_release(handle.0).then_some(())) {
        Some(()) => CUresult::SUCCESS,
        None => no_such_handle(),
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemMap(
    ptr: CUdeviceptr,
    size: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: u64,
) -> CUresult {
    if is_of_pool(ptr, size) {
        return CUresult::ERROR_INVALID_VALUE;
    }
    if !vmm::is_ours(handle.0) {
        // SAFETY: the program's own call.
        let result = unsafe { real::cuMemMap(ptr, size, offset, handle, flags) };
        if result.is_success() {
            imports::mapped(handle, ptr, size);
        }
        return result;
    }
    with_real(
        handle,
        // Drivers so far map from the beginning only, and that is how memory is mapped again.
        (offset != 0).then_some(PinReason::Unrepeatable),
        // SAFETY: the program's own call, with the driver's handle in the place of ours.
        |handle| unsafe { real::cuMemMap(ptr, size, offset, handle, flags) },
        |running, used| running.engine.vmm_mapped(used, ptr.0, size as u64),
    )
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemUnmap(ptr: CUdeviceptr, size: usize) -> CUresult {
    if is_of_pool(ptr, size) {
        return CUresult::ERROR_INVALID_VALUE;
    }
    if !is_mapped(ptr, size) {
        // SAFETY: the program's own call.
        let result = unsafe { real::cuMemUnmap(ptr, size) };
        if result.is_success() {
            imports::unmapped(ptr, size);
        }
        return result;
    }
    let done = with(|running| running.engine.vmm_unmap_away(ptr.0, size as u64).then_some(()));
    if done.is_some() {
        return CUresult::SUCCESS;
    }
    inside(|| {
        let mut taken = with(|running| Some(running.engine.vmm_take(ptr.0, size as u64)));
        // SAFETY: the program's own call.
        let result = unsafe { real::cuMemUnmap(ptr, size) };
        with(|running| {
            let taken = taken.take()?;
            if result.is_success() {
                running.engine.vmm_unmapped(taken);
                imports::unmapped(ptr, size);
            } else {
                running.engine.vmm_still_mapped(taken);
            }
            Some(())
        });
        result
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemSetAccess(
    ptr: CUdeviceptr,
    size: usize,
    desc: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    if is_of_pool(ptr, size) {
        return CUresult::ERROR_INVALID_VALUE;
    }
    // SAFETY: the program's own call.
    let call = || unsafe { real::cuMemSetAccess(ptr, size, desc, count) };
    if !is_mapped(ptr, size) {
        return call();
    }
    // SAFETY: plain numbers, in the program's list, which the driver is about to read.
    if let Some(wanted) = unsafe { peek::list(desc, count) } {
        // A device that the program has not used yet, and whose kernels will reach this memory: known from now on.
        with(|running| {
            for one in wanted {
                let device = CUdevice(one.location.u.cast_signed());
                if one.location.type_ == CU_MEM_LOCATION_TYPE_DEVICE && running.index_of(device).is_none() {
                    running.attach(device, None);
                }
            }
            Some(())
        });
    }
    inside(|| {
        let result = call();
        if result.is_success() && count > 0 {
            with(|running| {
                // SAFETY: the driver has read so many of them.
                let given = unsafe { core::slice::from_raw_parts(desc, count) };
                let grants: Vec<Grant> = given
                    .iter()
                    .map(|one| Grant {
                        location: place(&one.location),
                        flags: one.flags.0,
                    })
                    .collect();
                running.engine.vmm_granted(ptr.0, size as u64, &grants);
                let owners = running.engine.devices_in(ptr.0, size as u64);
                for one in given {
                    running.gains_access(&one.location, owners);
                }
                Some(())
            });
        }
        result
    })
}

fn place(location: &CUmemLocation) -> Location {
    Location {
        kind: location.type_.0,
        id: location.u,
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemGetAccess(
    flags: *mut u64,
    location: *const CUmemLocation,
    ptr: CUdeviceptr,
) -> CUresult {
    // What was granted is known without the driver, also while the memory is away.
    let known = with(|running| {
        // SAFETY: the program's location, or null.
        let location = unsafe { location.as_ref() }?;
        running.engine.vmm_access(ptr.0, place(location))
    });
    if let Some(known) = known
        && !flags.is_null()
    {
        // SAFETY: not null, and the program's place for the answer.
        unsafe { flags.write(known.into()) };
        return CUresult::SUCCESS;
    }
    // SAFETY: the program's own call.
    about(ptr, 1, || unsafe { real::cuMemGetAccess(flags, location, ptr) })
}

/// Makes a call about addresses: through the gate if memory of the program is mapped there.
pub(crate) fn about(ptr: CUdeviceptr, size: usize, call: impl FnOnce() -> CUresult) -> CUresult {
    if is_mapped(ptr, size) {
        inside(call)
    } else {
        call()
    }
}

/// As [`about`], for a call that lets somebody else hold the memory.
pub(crate) fn shares(
    ptr: CUdeviceptr,
    size: usize,
    reason: PinReason,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    if !is_mapped(ptr, size) {
        return call();
    }
    inside(|| {
        let result = call();
        if result.is_success() {
            with(|running| {
                running.engine.vmm_pin_range(ptr.0, size as u64, reason);
                Some(())
            });
        }
        result
    })
}

/// A number for the mapping at an address, to tell it from every other: the driver's own changes when memory comes back.
pub(crate) fn buffer_id(running: &Running, ptr: u64) -> Option<u64> {
    // Far from the driver's own numbers, and from those of the pool.
    Some(running.engine.vmm_serial(ptr)? | 1 << 49)
}

/// The handle of the program's own memory at an address, with one reference more.
pub(crate) fn retain(addr: *mut c_void) -> Option<CUmemGenericAllocationHandle> {
    let handle = with(|running| running.engine.vmm_retain(addr.addr() as u64))?;
    Some(CUmemGenericAllocationHandle(handle))
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemGetAllocationPropertiesFromHandle(
    prop: *mut CUmemAllocationProp,
    handle: CUmemGenericAllocationHandle,
) -> CUresult {
    with_real(
        handle,
        None,
        // SAFETY: the program's own call, with the driver's handle in the place of ours.
        |handle| unsafe { real::cuMemGetAllocationPropertiesFromHandle(prop, handle) },
        |_, _| {},
    )
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemExportToShareableHandle(
    shareableHandle: *mut c_void,
    handle: CUmemGenericAllocationHandle,
    handleType: CUmemAllocationHandleType,
    flags: u64,
) -> CUresult {
    // Whoever has the descriptor, this process too, gets a handle of the driver's for it and is not charged: this is.
    with_real(
        handle,
        Some(PinReason::Exported),
        // SAFETY: as above.
        |handle| unsafe { real::cuMemExportToShareableHandle(shareableHandle, handle, handleType, flags) },
        |_, _| {},
    )
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuLogicalEndpointBindMem(
    leId: CUlogicalEndpointId,
    dev: CUdevice,
    offset: u64,
    memHandle: CUmemGenericAllocationHandle,
    memOffset: u64,
    size: u64,
    flags: u64,
) -> CUresult {
    with_real(
        memHandle,
        Some(PinReason::Multicast),
        // SAFETY: as above.
        |memory| unsafe { real::cuLogicalEndpointBindMem(leId, dev, offset, memory, memOffset, size, flags) },
        |_, _| {},
    )
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemAddressFree(ptr: CUdeviceptr, size: usize) -> CUresult {
    if is_of_pool(ptr, size) {
        return CUresult::ERROR_INVALID_VALUE;
    }
    // Addresses that are mapped cannot go, and what is away is mapped as far as the program can see.
    // SAFETY: the program's own call.
    about(ptr, size, || unsafe { real::cuMemAddressFree(ptr, size) })
}

/// Makes a call that maps memory into sparse arrays, with the driver's handles in the place of ours.
fn map_arrays(
    infos: *mut CUarrayMapInfo,
    count: u32,
    call: impl FnOnce(*mut CUarrayMapInfo) -> CUresult,
) -> CUresult {
    inside(|| {
        // SAFETY: plain numbers, in the program's list, which the driver reads as well.
        let Some(list) = (unsafe { peek::list(infos, count as usize) }) else {
            return call(infos);
        };
        let has_ours = |info: &CUarrayMapInfo| {
            info.memOperationType == CU_MEM_OPERATION_TYPE_MAP && vmm::is_ours(info.memHandle)
        };
        if !list.iter().any(has_ours) {
            return call(infos);
        }
        let mut translated = list;
        let mut uses = Vec::new();
        let known = with(|running| {
            for info in translated.iter_mut().filter(|info| has_ours(info)) {
                match running.engine.vmm_begin_use(info.memHandle) {
                    Some(used) => {
                        info.memHandle = used.real;
                        uses.push(used);
                    }
                    None => return Some(false),
                }
            }
            Some(true)
        });
        let result = match known {
            Some(true) => call(translated.as_mut_ptr()),
            _ => no_such_handle(),
        };
        with(|running| {
            for used in &uses {
                // Arrays are not moved, and so neither is what they are made of.
                let pin = result.is_success().then_some(PinReason::Unrepeatable);
                running.engine.vmm_end_use(used, pin);
            }
            Some(())
        });
        result
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemMapArrayAsync(
    mapInfoList: *mut CUarrayMapInfo,
    count: u32,
    hStream: CUstream,
) -> CUresult {
    // SAFETY: the program's own call, with the driver's handles in the place of ours.
    map_arrays(mapInfoList, count, |list| unsafe {
        real::cuMemMapArrayAsync(list, count, hStream)
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemMapArrayAsync_ptsz(
    mapInfoList: *mut CUarrayMapInfo,
    count: u32,
    hStream: CUstream,
) -> CUresult {
    // SAFETY: as above.
    map_arrays(mapInfoList, count, |list| unsafe {
        real::cuMemMapArrayAsync_ptsz(list, count, hStream)
    })
}
