//! Memory of a card as the task has it.

use ebb_abi::nvml::*;

use super::{real, world};

/// # Safety
/// As NVML's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn nvmlDeviceGetMemoryInfo(
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_t,
) -> nvmlReturn_t {
    // SAFETY: the program's own call.
    let result = unsafe { real::nvmlDeviceGetMemoryInfo(device, memory) };
    if result.is_success()
        // SAFETY: NVML has just written it.
        && let Some(memory) = unsafe { memory.as_mut() }
        && let Some((free, total)) = world::memory(device, memory.free, memory.total)
    {
        *memory = nvmlMemory_t {
            total,
            free,
            used: total - free,
        };
    }
    result
}

/// # Safety
/// As NVML's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn nvmlDeviceGetMemoryInfo_v2(
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_v2_t,
) -> nvmlReturn_t {
    // SAFETY: the program's own call.
    let result = unsafe { real::nvmlDeviceGetMemoryInfo_v2(device, memory) };
    if result.is_success()
        // SAFETY: NVML has just written it.
        && let Some(memory) = unsafe { memory.as_mut() }
        && let Some((free, total)) = world::memory(device, memory.free, memory.total)
    {
        // The reserve of the card is no part of the task's world.
        let version = memory.version;
        *memory = nvmlMemory_v2_t {
            version,
            total,
            reserved: 0,
            free,
            used: total - free,
        };
    }
    result
}

/// The window through which others reach the card's memory. Its size is the card's; what others map through it is not the task's
/// business, and what the task maps is counted by nobody.
///
/// # Safety
/// As NVML's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn nvmlDeviceGetBAR1MemoryInfo(
    device: nvmlDevice_t,
    memory: *mut nvmlBAR1Memory_t,
) -> nvmlReturn_t {
    // SAFETY: the program's own call.
    let result = unsafe { real::nvmlDeviceGetBAR1MemoryInfo(device, memory) };
    if result.is_success()
        && world::in_task()
        // SAFETY: NVML has just written it.
        && let Some(memory) = unsafe { memory.as_mut() }
    {
        memory.bar1Free = memory.bar1Total;
        memory.bar1Used = 0;
    }
    result
}
