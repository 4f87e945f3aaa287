//! What lets somebody else hold memory. The pool's memory is not shared yet: such calls get the answer that
//! the driver gives for memory that was not made for sharing, and `ebb doctor` names them.

use core::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use ebb_abi::*;
use ebb_layer_core::PinReason;

use crate::barrier;
use crate::hooks::{multicast, vmm, with};
use crate::symbols::real;

/// Refuses a call about memory of ours; `None` if it is not ours.
fn refuse(what: &'static str, ptr: u64, code: CUresult) -> Option<CUresult> {
    with(|running| {
        if !running.engine.contains(ptr) {
            return None;
        }
        // Once a call, not once a try: some programs ask for every buffer.
        static NOTED: AtomicU32 = AtomicU32::new(0);
        let bit = what
            .bytes()
            .fold(0u32, |hash, byte| hash.rotate_left(5) ^ u32::from(byte))
            % 32;
        if NOTED.fetch_or(1 << bit, Ordering::Relaxed) & 1 << bit == 0 {
            running.engine.note(&format!(
                "{what} on memory of the pool is not supported yet: answered {code:?}"
            ));
        }
        Some(code)
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuIpcGetMemHandle(
    pHandle: *mut CUipcMemHandle,
    dptr: CUdeviceptr,
) -> CUresult {
    refuse("cuIpcGetMemHandle", dptr.0, CUresult::ERROR_INVALID_VALUE).unwrap_or_else(|| {
        // SAFETY: the program's own call.
        unsafe { real::cuIpcGetMemHandle(pHandle, dptr) }
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemRetainAllocationHandle(
    handle: *mut CUmemGenericAllocationHandle,
    addr: *mut c_void,
) -> CUresult {
    if !handle.is_null()
        && let Some(ours) = vmm::retain(addr)
    {
        // SAFETY: not null, and the program's place for the answer.
        unsafe { handle.write(ours) };
        return CUresult::SUCCESS;
    }
    // As on memory of `cuMemAlloc`, which has no handle.
    refuse(
        "cuMemRetainAllocationHandle",
        addr.addr() as u64,
        CUresult::ERROR_INVALID_VALUE,
    )
    .unwrap_or_else(|| {
        // SAFETY: the program's own call.
        unsafe { real::cuMemRetainAllocationHandle(handle, addr) }
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemGetHandleForAddressRange(
    handle: *mut c_void,
    dptr: CUdeviceptr,
    size: usize,
    handleType: CUmemRangeHandleType,
    flags: u64,
) -> CUresult {
    refuse(
        "cuMemGetHandleForAddressRange",
        dptr.0,
        CUresult::ERROR_NOT_SUPPORTED,
    )
    .unwrap_or_else(|| {
        // SAFETY: the program's own call.
        vmm::shares(dptr, size, PinReason::DmaBuf, || unsafe {
            real::cuMemGetHandleForAddressRange(handle, dptr, size, handleType, flags)
        })
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMulticastBindAddr(
    mcHandle: CUmemGenericAllocationHandle,
    mcOffset: usize,
    memptr: CUdeviceptr,
    size: usize,
    flags: u64,
) -> CUresult {
    refuse("cuMulticastBindAddr", memptr.0, CUresult::ERROR_INVALID_VALUE).unwrap_or_else(|| {
        // SAFETY: the program's own call.
        multicast::by_address(mcHandle, mcOffset, memptr, size, || unsafe {
            real::cuMulticastBindAddr(mcHandle, mcOffset, memptr, size, flags)
        })
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMulticastBindAddr_v2(
    mcHandle: CUmemGenericAllocationHandle,
    dev: CUdevice,
    mcOffset: usize,
    memptr: CUdeviceptr,
    size: usize,
    flags: u64,
) -> CUresult {
    refuse("cuMulticastBindAddr", memptr.0, CUresult::ERROR_INVALID_VALUE).unwrap_or_else(|| {
        // SAFETY: the program's own call.
        multicast::by_address(mcHandle, mcOffset, memptr, size, || unsafe {
            real::cuMulticastBindAddr_v2(mcHandle, dev, mcOffset, memptr, size, flags)
        })
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuPointerSetAttribute(
    value: *const c_void,
    attribute: CUpointer_attribute,
    ptr: CUdeviceptr,
) -> CUresult {
    refuse("cuPointerSetAttribute", ptr.0, CUresult::ERROR_NOT_SUPPORTED).unwrap_or_else(|| {
        // SAFETY: the program's own call.
        vmm::shares(ptr, 1, PinReason::SyncMemops, || unsafe {
            real::cuPointerSetAttribute(value, attribute, ptr)
        })
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuCtxEnablePeerAccess(peerContext: CUcontext, Flags: u32) -> CUresult {
    // The driver's call does not cover memory like ours: access is set for each range. Through the gate, because that
    // must not meet a range on its way out.
    let passage = barrier::enter();
    if let barrier::Passage::Refused(code) = passage {
        return code;
    }
    // SAFETY: the program's own call.
    let result = unsafe { real::cuCtxEnablePeerAccess(peerContext, Flags) };
    if matches!(
        result,
        CUresult::SUCCESS | CUresult::ERROR_PEER_ACCESS_ALREADY_ENABLED
    ) {
        with(|running| {
            running.peers(running.device_of(peerContext)?, running.current_device()?);
            Some(())
        });
    }
    barrier::leave(passage);
    result
}
