//! NVML's memory answers, and our own question to it: what does this process have on a card?
//!
//! NVML counts cards by PCI order and knows nothing of visibility masks; cards are matched by UUID only.

use core::ffi::{CStr, c_char};
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;

use ebb_abi::nvml::*;
use ebb_units::{Bytes, DeviceUuid};

use crate::hooks::with;
use crate::library::{Hook, NVML};

macro_rules! functions {
    ($($name:ident $hook:expr, ($($parameter:ident: $ty:ty),*);)*) => {
        #[derive(Clone, Copy)]
        #[repr(u16)]
        enum Function { $($name),* }

        const COUNT: usize = [$(Function::$name),*].len();

        /// The functions that are hooked or called, sorted.
        pub(crate) static NAMES: &[&CStr] = &[$(
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name holds a zero byte"),
            }
        ),*];

        /// Our functions.
        pub(crate) static HOOKS: &[Hook] = &[$(Hook($hook)),*];

        /// The real functions, by name.
        mod real {
            use super::*;
            $(
                /// # Safety
                /// As NVML's function.
                pub(super) unsafe fn $name($($parameter: $ty),*) -> nvmlReturn_t {
                    let address = NVML.real(Function::$name as usize);
                    if address == 0 {
                        return NVML_ERROR_FUNCTION_NOT_FOUND;
                    }
                    // SAFETY: the function of that name; the caller answers for the arguments.
                    unsafe {
                        let function: unsafe extern "C-unwind" fn($($ty),*) -> nvmlReturn_t = core::mem::transmute(address);
                        function($($parameter),*)
                    }
                }
            )*
        }
    };
}

const NONE: *const () = core::ptr::null();

functions! {
    nvmlDeviceGetComputeRunningProcesses_v2 NONE, (device: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v2_t);
    nvmlDeviceGetComputeRunningProcesses_v3 NONE, (device: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v3_t);
    nvmlDeviceGetHandleByUUID NONE, (uuid: *const c_char, device: *mut nvmlDevice_t);
    nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo as *const (), (device: nvmlDevice_t, memory: *mut nvmlMemory_t);
    nvmlDeviceGetMemoryInfo_v2 nvmlDeviceGetMemoryInfo_v2 as *const (), (device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t);
    nvmlDeviceGetUUID NONE, (device: nvmlDevice_t, uuid: *mut c_char, length: u32);
    nvmlInit_v2 NONE, ();
}

/// Addresses of the real functions, 0 while unknown.
pub(crate) static REAL: &[AtomicUsize] = {
    static CELLS: [AtomicUsize; COUNT] = [const { AtomicUsize::new(0) }; COUNT];
    &CELLS
};

/// Which card a handle of NVML is.
fn uuid_of(device: nvmlDevice_t) -> Option<DeviceUuid> {
    let mut text = [0 as c_char; NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    // SAFETY: a place of the length that is given along.
    let known = unsafe { real::nvmlDeviceGetUUID(device, text.as_mut_ptr(), text.len() as u32) };
    if !known.is_success() {
        return None;
    }
    let bytes = text.map(|byte| byte.cast_unsigned());
    CStr::from_bytes_until_nul(&bytes)
        .ok()?
        .to_str()
        .ok()?
        .parse()
        .ok()
}

/// Free and total of a card of the task, as `cuMemGetInfo` tells them.
fn own_world(device: nvmlDevice_t, free: u64, total: u64) -> Option<(u64, u64)> {
    with(|running| {
        let device = running.by_uuid(uuid_of(device)?)?;
        let (free, total) = running.mem_info(device.index?, free, total);
        Some((free.min(total), total))
    })
}

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
        && let Some((free, total)) = own_world(device, memory.free, memory.total)
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
        && let Some((free, total)) = own_world(device, memory.free, memory.total)
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

/// What this process has on a card, by the driver's own account. `None` where that cannot be known, as in a container
/// that does not see its processes' numbers.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted() {
        assert!(NAMES.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn both_versions_of_a_process_have_one_layout() {
        assert_eq!(
            size_of::<nvmlProcessInfo_v2_t>(),
            size_of::<nvmlProcessInfo_v3_t>()
        );
    }
}
