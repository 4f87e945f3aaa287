//! What the driver places by itself: managed memory, and what it keeps for graphs. The caller has made a context current.

use ebb_abi::*;
use ebb_device::DeviceError;
use ebb_units::Bytes;

use crate::{DriverTable, check};

/// Enqueues that managed memory moves to the host.
pub(crate) fn push_to_host(
    table: &DriverTable,
    device: CUdevice,
    stream: CUstream,
    addr: u64,
    len: u64,
) -> Result<(), DeviceError> {
    let mut concurrent = 0;
    // SAFETY: a valid place for the answer. An unknown attribute is an error, and then the answer is no.
    let known = unsafe {
        table.cuDeviceGetAttribute(
            &raw mut concurrent,
            CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
            device,
        )
    };
    // Where the processor must not touch managed memory while the GPU works, it is not for us to move it.
    if !known.is_success() || concurrent == 0 {
        return check("cuMemPrefetchAsync", CUresult::ERROR_NOT_SUPPORTED);
    }
    let (at, count) = (CUdeviceptr(addr), Bytes(len).to_usize());
    let host = CUmemLocation {
        type_: CU_MEM_LOCATION_TYPE_HOST,
        u: 0,
    };
    // SAFETY: no pointers of the host; the driver checks the range. A stream of ours.
    let newer = unsafe { table.cuMemPrefetchAsync_v2(at, count, host, 0, stream) };
    if newer != CUresult::ERROR_NOT_SUPPORTED {
        return check("cuMemPrefetchAsync", newer);
    }
    // SAFETY: as above. Drivers before 12.2 have only this form.
    check("cuMemPrefetchAsync", unsafe {
        table.cuMemPrefetchAsync(at, count, CU_DEVICE_CPU, stream)
    })
}

/// Lets go of what is kept for graphs and not in use. Returns what is still kept.
pub(crate) fn trim_graphs(table: &DriverTable, device: CUdevice) -> Result<u64, DeviceError> {
    // SAFETY: no pointers.
    check("cuDeviceGraphMemTrim", unsafe {
        table.cuDeviceGraphMemTrim(device)
    })?;
    let mut kept = 0u64;
    // SAFETY: a valid place for a figure of 64 bits, which is what this attribute is.
    check("cuDeviceGetGraphMemAttribute", unsafe {
        table.cuDeviceGetGraphMemAttribute(
            device,
            CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT,
            (&raw mut kept).cast(),
        )
    })?;
    Ok(kept)
}

/// Bytes in use on the current context's device.
pub(crate) fn occupied(table: &DriverTable) -> Result<u64, DeviceError> {
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: valid places for both answers.
    check("cuMemGetInfo", unsafe {
        table.cuMemGetInfo_v2(&raw mut free, &raw mut total)
    })?;
    Ok(total.saturating_sub(free) as u64)
}
