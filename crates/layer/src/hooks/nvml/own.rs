//! What this process has on a card, by the driver's own account: how the layer sees what contexts and the like take.

use std::sync::OnceLock;

use ebb_abi::nvml::*;
use ebb_units::{Bytes, DeviceUuid};

use super::real;

/// What this process has on a card, by the driver's own account. `None` where that cannot be known, as in a container
/// that does not see its processes' numbers, and where it has no context yet.
pub(crate) fn process_bytes(uuid: DeviceUuid) -> Option<Bytes> {
    static READY: OnceLock<bool> = OnceLock::new();
    // Nobody holds the loader's lock here: contexts are not made in constructors of libraries.
    let ready = *READY.get_or_init(|| {
        // SAFETY: a library of the driver, found as the program itself would find it. Never closed.
        let handle =
            unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        // SAFETY: no arguments.
        !handle.is_null() && unsafe { real::nvmlInit_v2() }.is_success()
    });
    if !ready {
        return None;
    }
    let text = std::ffi::CString::new(uuid.to_string()).ok()?;
    let mut device = nvmlDevice_t(0);
    // SAFETY: a string with its terminator, and a place for the answer.
    if !unsafe { real::nvmlDeviceGetHandleByUUID(text.as_ptr(), &raw mut device) }.is_success() {
        return None;
    }
    let pid = std::process::id();
    processes(device)?
        .iter()
        .find(|process| process.pid == pid)
        .and_then(|process| {
            let bytes = process.usedGpuMemory;
            (bytes != NVML_VALUE_NOT_AVAILABLE).then_some(Bytes(bytes))
        })
}

fn processes(device: nvmlDevice_t) -> Option<Vec<nvmlProcessInfo_v3_t>> {
    let mut infos = vec![nvmlProcessInfo_v3_t::default(); 64];
    // Processes may come between two calls: a few tries.
    for _ in 0..4 {
        let mut count = u32::try_from(infos.len()).ok()?;
        // SAFETY: a place for as many entries as `count` says; both versions have the same entries.
        let result = unsafe {
            match real::nvmlDeviceGetComputeRunningProcesses_v3(device, &raw mut count, infos.as_mut_ptr()) {
                NVML_ERROR_FUNCTION_NOT_FOUND => {
                    real::nvmlDeviceGetComputeRunningProcesses_v2(device, &raw mut count, infos.as_mut_ptr())
                }
                other => other,
            }
        };
        match result {
            NVML_SUCCESS => {
                infos.truncate(count as usize);
                return Some(infos);
            }
            NVML_ERROR_INSUFFICIENT_SIZE => {
                infos.resize(count as usize * 2 + 16, nvmlProcessInfo_v3_t::default())
            }
            _ => return None,
        }
    }
    None
}
