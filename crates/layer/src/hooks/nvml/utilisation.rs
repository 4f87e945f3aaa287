//! How much each process uses a card: samples of the task's own processes, by the numbers that they have here.

use ebb_abi::nvml::*;
use ebb_layer_core::world::WorldProcess;

use super::{real, world};

/// Keeps the entries of the task's processes, renamed, at the front; how many they are.
///
/// # Safety
/// `entries` is valid for `count` entries.
unsafe fn keep<T>(
    entries: *mut T,
    count: u32,
    processes: &[WorldProcess],
    pid_of: fn(&mut T) -> &mut u32,
) -> u32 {
    let mut kept = 0;
    for index in 0..count as usize {
        // SAFETY: below the count, for which the place is valid.
        let pid = pid_of(unsafe { &mut *entries.add(index) });
        let Some(process) = processes.iter().find(|process| process.seen_pid == *pid) else {
            continue;
        };
        *pid = process.pid;
        // SAFETY: both are below the count; they may be the same entry.
        unsafe { core::ptr::copy(entries.add(index), entries.add(kept as usize), 1) };
        kept += 1;
    }
    kept
}

/// # Safety
/// As NVML's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn nvmlDeviceGetProcessUtilization(
    device: nvmlDevice_t,
    samples: *mut nvmlProcessUtilizationSample_t,
    count: *mut u32,
    since: u64,
) -> nvmlReturn_t {
    // SAFETY: the program's own call.
    let result = unsafe { real::nvmlDeviceGetProcessUtilization(device, samples, count, since) };
    if !result.is_success() || samples.is_null() || count.is_null() {
        return result;
    }
    let Some(processes) = world::processes(device) else {
        return result;
    };
    // SAFETY: NVML has just written so many samples.
    let kept = unsafe { keep(samples, *count, &processes, |sample| &mut sample.pid) };
    // SAFETY: as above.
    unsafe { count.write(kept) };
    if kept == 0 { NVML_ERROR_NOT_FOUND } else { result }
}

/// # Safety
/// As NVML's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn nvmlDeviceGetProcessesUtilizationInfo(
    device: nvmlDevice_t,
    info: *mut nvmlProcessesUtilizationInfo_v1_t,
) -> nvmlReturn_t {
    // SAFETY: the program's own call.
    let result = unsafe { real::nvmlDeviceGetProcessesUtilizationInfo(device, info) };
    // SAFETY: null, or the program's structure, whose first field says its version: nothing behind it is read for another one.
    let known =
        !info.is_null() && unsafe { (&raw const (*info).version).read() } == nvmlProcessesUtilizationInfo_v1;
    if !result.is_success() || !known {
        return result;
    }
    // SAFETY: a structure of this version, in which NVML has just written.
    let info = unsafe { &mut *info };
    let Some(processes) = world::processes(device).filter(|_| !info.procUtilArray.is_null()) else {
        return result;
    };
    // SAFETY: NVML has just written so many samples.
    info.processSamplesCount = unsafe {
        keep(
            info.procUtilArray,
            info.processSamplesCount,
            &processes,
            |sample| &mut sample.pid,
        )
    };
    if info.processSamplesCount == 0 {
        NVML_ERROR_NOT_FOUND
    } else {
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_units::Bytes;

    #[test]
    fn neighbours_are_left_out_and_ours_renamed() {
        let process = |pid, seen_pid| WorldProcess {
            pid,
            seen_pid,
            bytes: Bytes(1),
        };
        let sample = |pid, gpu| nvmlProcessUtilizationSample_t {
            pid,
            smUtil: gpu,
            ..nvmlProcessUtilizationSample_t::default()
        };
        let mut samples = [sample(500, 1), sample(700, 2), sample(7, 3), sample(701, 4)];
        let processes = [process(7, 700), process(8, 701)];
        // SAFETY: as many entries as are said.
        let kept = unsafe { keep(samples.as_mut_ptr(), 4, &processes, |sample| &mut sample.pid) };
        let kept: Vec<_> = samples[..kept as usize]
            .iter()
            .map(|s| (s.pid, s.smUtil))
            .collect();
        assert_eq!(kept, [(7, 2), (8, 4)]);
    }
}
