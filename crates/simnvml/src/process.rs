//! What can be asked about processes beyond the plain lists: details, utilisation, accounts.

use ebb_simdev::{Machine, ProcessUse, now_ns};

use crate::device::{busy_percent, find};
use crate::place::Place;
use crate::*;

/// Most processes that the library keeps accounts of.
const ACCOUNTS: u32 = 4000;

fn found(device: nvmlDevice_t) -> Result<(&'static Machine, u32, Vec<ProcessUse>), nvmlReturn_t> {
    let (machine, index) = find(device)?;
    let processes = Place::of(device)?.processes().into_iter();
    Ok((machine, index, processes.map(|(process, _)| process).collect()))
}

/// Writes a list: the count goes in as the room and comes out as the number.
///
/// # Safety
/// As the interface demands, here and below: `count` is null or good for one value, `place` null or good for as many as it says.
pub(crate) unsafe fn list<T>(all: Vec<T>, count: *mut u32, place: *mut T) -> R {
    if count.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, and good for one value by the caller's promise.
    let room = unsafe { count.read_unaligned() } as usize;
    // SAFETY: as above.
    unsafe { count.write_unaligned(all.len() as u32) };
    if all.is_empty() {
        return Ok(());
    }
    if room < all.len() || place.is_null() {
        return Err(NVML_ERROR_INSUFFICIENT_SIZE);
    }
    for (index, entry) in all.into_iter().enumerate() {
        // SAFETY: good for `room` entries by the caller's promise, and `index` is below it.
        unsafe { place.add(index).write_unaligned(entry) };
    }
    Ok(())
}

pub(crate) unsafe fn details(device: nvmlDevice_t, place: *mut nvmlProcessDetailList_v1_t) -> R {
    let (_, _, processes) = found(device)?;
    // SAFETY: null or a structure by the caller's promise.
    let asked = unsafe { place.as_mut() }.ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
    if asked.version != nvmlProcessDetailList_v1 || asked.mode > NVML_PROCESS_MODE_ALL {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    let wanted = matches!(asked.mode, NVML_PROCESS_MODE_COMPUTE | NVML_PROCESS_MODE_ALL);
    let entries = processes.into_iter().filter(|_| wanted);
    let entries = entries
        .map(|process| nvmlProcessDetail_v1_t {
            pid: process.pid,
            usedGpuMemory: process.bytes,
            gpuInstanceId: u32::MAX,
            computeInstanceId: u32::MAX,
            usedGpuCcProtectedMemory: 0,
        })
        .collect();
    // SAFETY: the caller's promise.
    unsafe { list(entries, &raw mut asked.numProcArrayEntries, asked.procArray) }
}

/// One sample a process: the simulation knows how busy a device is, not who made it so.
pub(crate) unsafe fn utilization(
    device: nvmlDevice_t,
    samples: *mut nvmlProcessUtilizationSample_t,
    count: *mut u32,
    since: u64,
) -> R {
    let (machine, index, processes) = found(device)?;
    let now = now_ns() / 1000;
    if processes.is_empty() || since >= now {
        return Err(NVML_ERROR_NOT_FOUND);
    }
    let busy = busy_percent(machine, index);
    let all = processes
        .into_iter()
        .map(|process| nvmlProcessUtilizationSample_t {
            pid: process.pid,
            timeStamp: now,
            smUtil: busy,
            memUtil: busy,
            ..nvmlProcessUtilizationSample_t::default()
        })
        .collect();
    // SAFETY: the caller's promise.
    unsafe { list(all, count, samples) }
}

pub(crate) unsafe fn utilization_info(
    device: nvmlDevice_t,
    place: *mut nvmlProcessesUtilizationInfo_v1_t,
) -> R {
    let (machine, index, processes) = found(device)?;
    // SAFETY: null or a structure by the caller's promise.
    let asked = unsafe { place.as_mut() }.ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
    if asked.version != nvmlProcessesUtilizationInfo_v1 {
        return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    let now = now_ns() / 1000;
    if processes.is_empty() || asked.lastSeenTimeStamp >= now {
        return Err(NVML_ERROR_NOT_FOUND);
    }
    let busy = busy_percent(machine, index);
    let all = processes
        .into_iter()
        .map(|process| nvmlProcessUtilizationInfo_v1_t {
            timeStamp: now,
            pid: process.pid,
            smUtil: busy,
            memUtil: busy,
            ..nvmlProcessUtilizationInfo_v1_t::default()
        })
        .collect();
    // SAFETY: the caller's promise.
    unsafe { list(all, &raw mut asked.processSamplesCount, asked.procUtilArray) }
}

pub(crate) unsafe fn accounting_pids(device: nvmlDevice_t, count: *mut u32, pids: *mut u32) -> R {
    let (_, _, processes) = found(device)?;
    let all = processes.iter().map(|process| process.pid).collect();
    // SAFETY: the caller's promise.
    unsafe { list(all, count, pids) }
}

/// The account of a live process: what it holds now is the most that the simulation knows it to have held.
pub(crate) unsafe fn accounting_stats(
    device: nvmlDevice_t,
    pid: u32,
    stats: *mut nvmlAccountingStats_t,
) -> R {
    let (_, _, processes) = found(device)?;
    let process = processes.iter().find(|process| process.pid == pid);
    let answer = nvmlAccountingStats_t {
        maxMemoryUsage: process.ok_or(NVML_ERROR_NOT_FOUND)?.bytes,
        isRunning: 1,
        ..nvmlAccountingStats_t::default()
    };
    // SAFETY: the caller's promise.
    unsafe { put(stats, answer) }
}

pub(crate) unsafe fn accounting_stats_v2(device: nvmlDevice_t, stats: *mut nvmlAccountingStats_v2_t) -> R {
    let (_, _, processes) = found(device)?;
    // SAFETY: null or a structure by the caller's promise.
    let asked = unsafe { stats.as_mut() }.ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
    let process = processes.iter().find(|process| process.pid == asked.pid);
    *asked = nvmlAccountingStats_v2_t {
        pid: asked.pid,
        maxMemoryUsage: process.ok_or(NVML_ERROR_NOT_FOUND)?.bytes,
        isRunning: 1,
        ..nvmlAccountingStats_v2_t::default()
    };
    Ok(())
}

pub(crate) unsafe fn accounting_mode(device: nvmlDevice_t, mode: *mut u32) -> R {
    find(device)?;
    // SAFETY: the caller's promise.
    unsafe { put(mode, 1) }
}

pub(crate) unsafe fn accounting_buffer(device: nvmlDevice_t, size: *mut u32) -> R {
    find(device)?;
    // SAFETY: the caller's promise.
    unsafe { put(size, ACCOUNTS) }
}
