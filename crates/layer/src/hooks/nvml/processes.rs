//! Lists of processes: the task's own, by the numbers that they have where the program lives, with the bytes of the ledger.
//!
//! The form of each: ask the real one for its count first, so that wrong handles, missing rights and a library that is not started give its own
//! code; then answer from the task's world. A program that belongs to no task gets the real list.

use core::ffi::c_char;
use std::io::Read;

use ebb_abi::nvml::*;
use ebb_layer_core::world::WorldProcess;

use super::{real, world};

/// Whether the real one, asked for a count, would have answered.
fn would_answer(result: nvmlReturn_t) -> bool {
    matches!(result, NVML_SUCCESS | NVML_ERROR_INSUFFICIENT_SIZE)
}

/// Writes a list as NVML does: the count goes in as the room and comes out as the number.
///
/// # Safety
/// `count` is valid; `place` is null or valid for as many entries as `count` says.
pub(super) unsafe fn put<T>(
    list: impl ExactSizeIterator<Item = T>,
    count: *mut u32,
    place: *mut T,
) -> nvmlReturn_t {
    let number = list.len();
    // SAFETY: this function's contract.
    let room = unsafe { count.replace(u32::try_from(number).unwrap_or(u32::MAX)) };
    if number > room as usize {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    if number > 0 && place.is_null() {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (index, entry) in list.enumerate() {
        // SAFETY: `index` is below the room, for which the place is valid.
        unsafe { place.add(index).write_unaligned(entry) };
    }
    NVML_SUCCESS
}

/// The slice of the card that a handle is; "none" if it is the whole.
pub(super) fn slice_of(device: nvmlDevice_t) -> (u32, u32) {
    let (mut instance, mut compute) = (u32::MAX, u32::MAX);
    // SAFETY: two places of our own. A handle that is no slice is refused and the places stay.
    unsafe {
        if !real::nvmlDeviceGetGpuInstanceId(device, &raw mut instance).is_success()
            || !real::nvmlDeviceGetComputeInstanceId(device, &raw mut compute).is_success()
        {
            return (u32::MAX, u32::MAX);
        }
    }
    (instance, compute)
}

fn first_form(process: WorldProcess, _: (u32, u32)) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t {
        pid: process.pid,
        usedGpuMemory: process.bytes.0,
    }
}

fn second_form(process: WorldProcess, slice: (u32, u32)) -> nvmlProcessInfo_v2_t {
    nvmlProcessInfo_v2_t {
        pid: process.pid,
        usedGpuMemory: process.bytes.0,
        gpuInstanceId: slice.0,
        computeInstanceId: slice.1,
    }
}

/// `$all`: the task's processes, or none of that kind: what a task does on a card is compute.
macro_rules! lists {
    ($($name:ident $entry:ty, $form:ident, $all:expr;)*) => {$(
        /// # Safety
        /// As NVML's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            device: nvmlDevice_t,
            count: *mut u32,
            infos: *mut $entry,
        ) -> nvmlReturn_t {
            if !count.is_null() {
                let mut real_count = 0;
                // SAFETY: a place of our own, and no room.
                let result = unsafe { real::$name(device, &raw mut real_count, core::ptr::null_mut()) };
                if would_answer(result)
                    && let Some(mut processes) = world::placed(device)
                {
                    if !$all {
                        processes.clear();
                    }
                    let list = processes.into_iter().map(|(process, slice)| $form(process, slice));
                    // SAFETY: the program's places, and room as it says.
                    return unsafe { put(list, count, infos) };
                }
            }
            // SAFETY: the program's own call.
            unsafe { real::$name(device, count, infos) }
        }
    )*};
}
lists! {
    nvmlDeviceGetComputeRunningProcesses nvmlProcessInfo_v1_t, first_form, true;
    nvmlDeviceGetComputeRunningProcesses_v2 nvmlProcessInfo_v2_t, second_form, true;
    nvmlDeviceGetComputeRunningProcesses_v3 nvmlProcessInfo_v3_t, second_form, true;
    nvmlDeviceGetGraphicsRunningProcesses nvmlProcessInfo_v1_t, first_form, false;
    nvmlDeviceGetGraphicsRunningProcesses_v2 nvmlProcessInfo_v2_t, second_form, false;
    nvmlDeviceGetGraphicsRunningProcesses_v3 nvmlProcessInfo_v3_t, second_form, false;
    nvmlDeviceGetMPSComputeRunningProcesses nvmlProcessInfo_v1_t, first_form, false;
    nvmlDeviceGetMPSComputeRunningProcesses_v2 nvmlProcessInfo_v2_t, second_form, false;
    nvmlDeviceGetMPSComputeRunningProcesses_v3 nvmlProcessInfo_v3_t, second_form, false;
}

/// # Safety
/// As NVML's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn nvmlDeviceGetRunningProcessDetailList(
    device: nvmlDevice_t,
    list: *mut nvmlProcessDetailList_v1_t,
) -> nvmlReturn_t {
    // SAFETY: null, or the program's structure, whose first field says its version: nothing behind it is read for another one.
    if !list.is_null() && unsafe { (&raw const (*list).version).read() } == nvmlProcessDetailList_v1 {
        // SAFETY: a structure of this version.
        let asked = unsafe { &mut *list };
        let mut question = nvmlProcessDetailList_v1_t {
            version: asked.version,
            mode: asked.mode,
            ..nvmlProcessDetailList_v1_t::default()
        };
        // SAFETY: a structure of our own, and no room.
        let result = unsafe { real::nvmlDeviceGetRunningProcessDetailList(device, &raw mut question) };
        if would_answer(result)
            && let Some(mut processes) = world::placed(device)
        {
            if !matches!(asked.mode, NVML_PROCESS_MODE_COMPUTE | NVML_PROCESS_MODE_ALL) {
                processes.clear();
            }
            let entries = processes
                .into_iter()
                .map(|(process, slice)| nvmlProcessDetail_v1_t {
                    pid: process.pid,
                    usedGpuMemory: process.bytes.0,
                    gpuInstanceId: slice.0,
                    computeInstanceId: slice.1,
                    usedGpuCcProtectedMemory: 0,
                });
            // SAFETY: the program's structure, and room as it says.
            return unsafe { put(entries, &raw mut asked.numProcArrayEntries, asked.procArray) };
        }
    }
    // SAFETY: the program's own call.
    unsafe { real::nvmlDeviceGetRunningProcessDetailList(device, list) }
}

/// Processes that the driver keeps accounts of: the task's own. Those that have ended are known to nobody here and left out.
///
/// # Safety
/// As NVML's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn nvmlDeviceGetAccountingPids(
    device: nvmlDevice_t,
    count: *mut u32,
    pids: *mut u32,
) -> nvmlReturn_t {
    if !count.is_null()
        && let Some(processes) = world::processes(device)
    {
        let mut all = vec![0u32; 4096];
        let mut number = all.len() as u32;
        // SAFETY: places of our own, with the room that is given along. The driver keeps at most that many.
        let result = unsafe { real::nvmlDeviceGetAccountingPids(device, &raw mut number, all.as_mut_ptr()) };
        if !result.is_success() {
            return result;
        }
        all.truncate(number as usize);
        let own: Vec<u32> = processes
            .iter()
            .filter(|process| all.contains(&process.seen_pid))
            .map(|process| process.pid)
            .collect();
        // SAFETY: the program's places, and room as it says.
        return unsafe { put(own.into_iter(), count, pids) };
    }
    // SAFETY: the program's own call.
    unsafe { real::nvmlDeviceGetAccountingPids(device, count, pids) }
}

/// The number by which NVML knows a process of the task; `None` for any other, the same number in a program of no task.
fn seen_as(device: nvmlDevice_t, pid: u32) -> Option<u32> {
    match world::processes(device) {
        Some(processes) => processes
            .iter()
            .find(|process| process.pid == pid)
            .map(|process| process.seen_pid),
        None => Some(pid),
    }
}

/// # Safety
/// As NVML's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn nvmlDeviceGetAccountingStats(
    device: nvmlDevice_t,
    pid: u32,
    stats: *mut nvmlAccountingStats_t,
) -> nvmlReturn_t {
    match seen_as(device, pid) {
        // SAFETY: the program's own call, for the same process.
        Some(pid) => unsafe { real::nvmlDeviceGetAccountingStats(device, pid, stats) },
        None => NVML_ERROR_NOT_FOUND,
    }
}

/// # Safety
/// As NVML's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn nvmlDeviceGetAccountingStats_v2(
    device: nvmlDevice_t,
    stats: *mut nvmlAccountingStats_v2_t,
) -> nvmlReturn_t {
    // SAFETY: null, or the program's structure; the number of the process goes in.
    let Some(pid) = unsafe { stats.as_ref() }.map(|stats| stats.pid) else {
        // SAFETY: the program's own call.
        return unsafe { real::nvmlDeviceGetAccountingStats_v2(device, stats) };
    };
    let Some(seen) = seen_as(device, pid) else {
        return NVML_ERROR_NOT_FOUND;
    };
    // SAFETY: not null, see above; the call is the program's own, for the same process.
    unsafe {
        (*stats).pid = seen;
        let result = real::nvmlDeviceGetAccountingStats_v2(device, stats);
        (*stats).pid = pid;
        result
    }
}

/// The name of a process by its number *here*: NVML would name the host's process of that number.
///
/// # Safety
/// As NVML's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn nvmlSystemGetProcessName(
    pid: u32,
    name: *mut c_char,
    length: u32,
) -> nvmlReturn_t {
    // SAFETY: the program's own call.
    let result = unsafe { real::nvmlSystemGetProcessName(pid, name, length) };
    let answered = matches!(
        result,
        NVML_SUCCESS | NVML_ERROR_NOT_FOUND | NVML_ERROR_NO_PERMISSION
    );
    if !answered || name.is_null() || length == 0 || !world::in_task() {
        return result;
    }
    let Some(text) = crate::barrier::run(|| first_word(pid)).flatten() else {
        return NVML_ERROR_NOT_FOUND;
    };
    let cut = text.len().min(length as usize - 1);
    // SAFETY: the program's place of `length` bytes; `cut` and one are not more.
    unsafe {
        core::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), cut);
        name.add(cut).write(0);
    }
    NVML_SUCCESS
}

/// How a process of this namespace was called.
fn first_word(pid: u32) -> Option<Vec<u8>> {
    let mut line = Vec::new();
    let file = std::fs::File::open(format!("/proc/{pid}/cmdline")).ok()?;
    file.take(4096).read_to_end(&mut line).ok()?;
    line.split(|byte| *byte == 0).next().map(<[u8]>::to_vec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_units::Bytes;

    #[test]
    fn room_and_number() {
        let list = || [7u32, 8].into_iter();
        let mut place = [0u32; 3];
        let ask = |room: u32, place: *mut u32| {
            let mut count = room;
            // SAFETY: the place is null or has three entries.
            let result = unsafe { put(list(), &raw mut count, place) };
            (result, count)
        };
        assert_eq!(ask(0, core::ptr::null_mut()), (NVML_ERROR_INSUFFICIENT_SIZE, 2));
        assert_eq!(ask(1, place.as_mut_ptr()), (NVML_ERROR_INSUFFICIENT_SIZE, 2));
        assert_eq!(ask(3, place.as_mut_ptr()), (NVML_SUCCESS, 2));
        assert_eq!(ask(2, core::ptr::null_mut()).0, NVML_ERROR_INVALID_ARGUMENT);
        assert_eq!(place, [7, 8, 0]);
        let mut count = 5;
        // SAFETY: nothing is written for an empty list.
        let none = unsafe { put(core::iter::empty::<u32>(), &raw mut count, core::ptr::null_mut()) };
        assert_eq!((none, count), (NVML_SUCCESS, 0));
    }

    #[test]
    fn forms() {
        let process = WorldProcess {
            pid: 3,
            seen_pid: 30,
            bytes: Bytes(9),
        };
        assert_eq!(first_form(process, (1, 2)).pid, 3);
        let second = second_form(process, (1, 2));
        assert_eq!(
            (
                second.pid,
                second.usedGpuMemory,
                second.gpuInstanceId,
                second.computeInstanceId
            ),
            (3, 9, 1, 2)
        );
        let own = first_word(std::process::id()).expect("this process");
        assert!(!own.is_empty() && !own.contains(&0));
        assert_eq!(first_word(u32::MAX), None);
    }
}
