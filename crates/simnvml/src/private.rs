//! The private table of functions that `nvidia-smi` asks for, with the three lists of processes in it and nothing else.

use std::sync::OnceLock;

use crate::device::find;
use crate::process::list;
use crate::*;

type List = unsafe extern "C" fn(nvmlDevice_t, *mut u32, *mut PrivateProcess) -> nvmlReturn_t;

/// The table, if it is the one that is asked for.
///
/// # Safety
/// Both are null or good for one value.
pub(crate) unsafe fn table(place: *mut *const usize, id: *const [u8; 16]) -> R {
    static TABLE: OnceLock<Box<[usize]>> = OnceLock::new();
    // SAFETY: null or good for one value by the caller's promise.
    let id = unsafe { id.as_ref() }.ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
    if *id != PRIVATE_TABLE {
        return Err(NVML_ERROR_NOT_SUPPORTED);
    }
    let table = TABLE.get_or_init(|| {
        let mut words = vec![0; PRIVATE_TABLE_SIZE / size_of::<usize>()];
        words[0] = PRIVATE_TABLE_SIZE;
        let lists: [List; 3] = [compute, none, none];
        for (at, list) in PRIVATE_LISTS.into_iter().zip(lists) {
            words[at] = list as usize;
        }
        words.into()
    });
    // SAFETY: the caller's promise.
    unsafe { put(place, table.as_ptr()) }
}

fn code(result: R) -> nvmlReturn_t {
    result.err().unwrap_or(NVML_SUCCESS)
}

unsafe extern "C" fn compute(
    device: nvmlDevice_t,
    count: *mut u32,
    place: *mut PrivateProcess,
) -> nvmlReturn_t {
    code(find(device).and_then(|(machine, index)| {
        let entries = machine.processes(index).into_iter().map(|process| {
            let mut name = [0; 4096];
            let line = std::fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
            let word = line.split(|byte| *byte == 0).next().unwrap_or_default();
            let length = word.len().min(name.len() - 1);
            name[..length].copy_from_slice(&word[..length]);
            PrivateProcess {
                process: nvmlProcessDetail_v1_t {
                    pid: process.pid,
                    usedGpuMemory: process.bytes,
                    gpuInstanceId: u32::MAX,
                    computeInstanceId: u32::MAX,
                    usedGpuCcProtectedMemory: 0,
                },
                name,
            }
        });
        // SAFETY: as the lists of processes are asked for.
        unsafe { list(entries.collect(), count, place) }
    }))
}

unsafe extern "C" fn none(device: nvmlDevice_t, count: *mut u32, place: *mut PrivateProcess) -> nvmlReturn_t {
    // SAFETY: as above.
    code(find(device).and_then(|_| unsafe { list(Vec::new(), count, place) }))
}
