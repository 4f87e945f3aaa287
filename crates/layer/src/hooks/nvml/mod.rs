//! NVML inside a task: the task's memory and the task's processes. And our own question to it ([`own`]).
//!
//! NVML counts cards by PCI order and knows nothing of visibility masks: a card is what its handle's UUID says, however the program got the
//! handle. Many programs that ask NVML never start the driver (`nvidia-smi`); [`world`] asks the daemon for them.
//!
//! What stays the card's: utilisation, clocks, temperatures, field values, samples. Of the private tables that `nvidia-smi` reads the lists of
//! processes are ours in the drivers that [`private`] knows; everything else in them passes.

use core::ffi::{CStr, c_char};
use std::sync::atomic::AtomicUsize;

use ebb_abi::nvml::*;

use crate::library::{Hook, NVML};

mod memory;
mod own;
mod private;
mod processes;
mod utilisation;
mod world;

pub(crate) use own::{is_first, process_bytes};

macro_rules! functions {
    (@hook own $place:ident $name:ident) => { Hook($place::$name as *const ()) };
    (@hook pass $place:ident $name:ident) => { Hook(core::ptr::null()) };
    ($($how:ident $place:ident $name:ident($($parameter:ident: $ty:ty),*);)*) => {
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
        pub(crate) static HOOKS: &[Hook] = &[$(functions!(@hook $how $place $name)),*];

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

functions! {
    own processes nvmlDeviceGetAccountingPids(device: nvmlDevice_t, count: *mut u32, pids: *mut u32);
    own processes nvmlDeviceGetAccountingStats(device: nvmlDevice_t, pid: u32, stats: *mut nvmlAccountingStats_t);
    own processes nvmlDeviceGetAccountingStats_v2(device: nvmlDevice_t, stats: *mut nvmlAccountingStats_v2_t);
    own memory nvmlDeviceGetBAR1MemoryInfo(device: nvmlDevice_t, memory: *mut nvmlBAR1Memory_t);
    pass real nvmlDeviceGetComputeInstanceId(device: nvmlDevice_t, id: *mut u32);
    own processes nvmlDeviceGetComputeRunningProcesses(device: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v1_t);
    own processes nvmlDeviceGetComputeRunningProcesses_v2(device: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v2_t);
    own processes nvmlDeviceGetComputeRunningProcesses_v3(device: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v3_t);
    pass real nvmlDeviceGetGpuInstanceId(device: nvmlDevice_t, id: *mut u32);
    own processes nvmlDeviceGetGraphicsRunningProcesses(device: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v1_t);
    own processes nvmlDeviceGetGraphicsRunningProcesses_v2(device: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v2_t);
    own processes nvmlDeviceGetGraphicsRunningProcesses_v3(device: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v3_t);
    pass real nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut nvmlDevice_t);
    own processes nvmlDeviceGetMPSComputeRunningProcesses(device: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v1_t);
    own processes nvmlDeviceGetMPSComputeRunningProcesses_v2(device: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v2_t);
    own processes nvmlDeviceGetMPSComputeRunningProcesses_v3(device: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v3_t);
    pass real nvmlDeviceGetMaxMigDeviceCount(device: nvmlDevice_t, count: *mut u32);
    own memory nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, memory: *mut nvmlMemory_t);
    own memory nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t);
    pass real nvmlDeviceGetMigDeviceHandleByIndex(device: nvmlDevice_t, index: u32, slice: *mut nvmlDevice_t);
    pass real nvmlDeviceGetMigMode(device: nvmlDevice_t, current: *mut u32, pending: *mut u32);
    own utilisation nvmlDeviceGetProcessUtilization(device: nvmlDevice_t, samples: *mut nvmlProcessUtilizationSample_t, count: *mut u32, since: u64);
    own utilisation nvmlDeviceGetProcessesUtilizationInfo(device: nvmlDevice_t, info: *mut nvmlProcessesUtilizationInfo_v1_t);
    own processes nvmlDeviceGetRunningProcessDetailList(device: nvmlDevice_t, list: *mut nvmlProcessDetailList_v1_t);
    pass real nvmlDeviceGetUUID(device: nvmlDevice_t, uuid: *mut c_char, length: u32);
    pass real nvmlInit_v2();
    own private nvmlInternalGetExportTable(table: *mut *const usize, id: *const [u8; 16]);
    own processes nvmlSystemGetProcessName(pid: u32, name: *mut c_char, length: u32);
}

/// Addresses of the real functions, 0 while unknown.
pub(crate) static REAL: &[AtomicUsize] = {
    static CELLS: [AtomicUsize; COUNT] = [const { AtomicUsize::new(0) }; COUNT];
    &CELLS
};

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
