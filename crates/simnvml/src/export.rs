//! The exported functions: a panic barrier around each, and its other versions.

#![allow(unreachable_pub, reason = "the symbols are what is public")]
#![allow(
    clippy::missing_safety_doc,
    reason = "all: the arguments are as NVML's interface demands"
)]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ebb_abi::c_char;

use crate::*;
use crate::{R, device, private, process, system};

fn enter(body: impl FnOnce() -> R) -> nvmlReturn_t {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => NVML_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => NVML_ERROR_UNKNOWN,
    }
}

macro_rules! export {
    ($($($name:ident)+ ($($parameter:ident: $ty:ty),*) => $body:expr;)*) => {$(
        export!(@each [$($name)+] ($($parameter: $ty),*) $body);
    )*};
    (@each [$name:ident $($more:ident)*] $parameters:tt $body:expr) => {
        export!(@one $name $parameters $body);
        export!(@each [$($more)*] $parameters $body);
    };
    (@each [] $parameters:tt $body:expr) => {};
    (@one $name:ident ($($parameter:ident: $ty:ty),*) $body:expr) => {
        #[doc = concat!("NVML's `", stringify!($name), "`.")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($parameter: $ty),*) -> nvmlReturn_t {
            let body: unsafe fn($($ty),*) -> R = $body;
            // SAFETY: the program promises that the arguments are as the interface demands.
            enter(|| unsafe { body($($parameter),*) })
        }
    };
}

export! {
    nvmlInit nvmlInit_v2() => || system::init();
    nvmlInitWithFlags(_flags: u32) => |_| system::init();
    nvmlShutdown() => || system::shutdown();
    nvmlSystemGetDriverVersion(version: *mut c_char, length: u32) => system::driver_version;
    nvmlSystemGetNVMLVersion(version: *mut c_char, length: u32) => system::nvml_version;
    nvmlSystemGetCudaDriverVersion nvmlSystemGetCudaDriverVersion_v2(version: *mut i32) => system::cuda_driver_version;
    nvmlSystemGetProcessName(pid: u32, name: *mut c_char, length: u32) => system::process_name;
    nvmlDeviceGetCount nvmlDeviceGetCount_v2(count: *mut u32) => device::count;
    nvmlDeviceGetHandleByIndex nvmlDeviceGetHandleByIndex_v2(index: u32, handle: *mut nvmlDevice_t) => device::by_index;
    nvmlDeviceGetHandleByUUID(uuid: *const c_char, handle: *mut nvmlDevice_t) => device::by_uuid;
    nvmlDeviceGetHandleByPciBusId nvmlDeviceGetHandleByPciBusId_v2(
        id: *const c_char, handle: *mut nvmlDevice_t) => device::by_pci;
    nvmlDeviceGetIndex(handle: nvmlDevice_t, index: *mut u32) => device::index;
    nvmlDeviceGetName(handle: nvmlDevice_t, name: *mut c_char, length: u32) => device::name;
    nvmlDeviceGetUUID(handle: nvmlDevice_t, uuid: *mut c_char, length: u32) => device::uuid;
    nvmlDeviceGetPciInfo nvmlDeviceGetPciInfo_v2 nvmlDeviceGetPciInfo_v3(
        handle: nvmlDevice_t, info: *mut nvmlPciInfo_t) => device::pci;
    nvmlDeviceGetMemoryInfo(handle: nvmlDevice_t, memory: *mut nvmlMemory_t) => device::memory;
    nvmlDeviceGetMemoryInfo_v2(handle: nvmlDevice_t, memory: *mut nvmlMemory_v2_t) => device::memory_v2;
    nvmlDeviceGetBAR1MemoryInfo(handle: nvmlDevice_t, memory: *mut nvmlBAR1Memory_t) => device::bar1;
    nvmlDeviceGetComputeRunningProcesses(
        handle: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v1_t) => device::processes_v1;
    nvmlDeviceGetComputeRunningProcesses_v2 nvmlDeviceGetComputeRunningProcesses_v3(
        handle: nvmlDevice_t, count: *mut u32, infos: *mut nvmlProcessInfo_v2_t) => device::processes_v2;
    nvmlDeviceGetGraphicsRunningProcesses nvmlDeviceGetGraphicsRunningProcesses_v2
    nvmlDeviceGetGraphicsRunningProcesses_v3 nvmlDeviceGetMPSComputeRunningProcesses
    nvmlDeviceGetMPSComputeRunningProcesses_v2 nvmlDeviceGetMPSComputeRunningProcesses_v3(
        handle: nvmlDevice_t, count: *mut u32, _infos: *mut c_void) => |handle, count, _| {
            // SAFETY: the program promises that the arguments are as the interface demands.
            unsafe { device::no_processes(handle, count) }
        };
    nvmlDeviceGetUtilizationRates(handle: nvmlDevice_t, utilization: *mut nvmlUtilization_t) => device::utilization;
    nvmlDeviceGetCudaComputeCapability(handle: nvmlDevice_t, major: *mut i32, minor: *mut i32) => device::capability;
    nvmlDeviceGetMinorNumber(handle: nvmlDevice_t, number: *mut u32) => device::index;
    nvmlDeviceGetComputeMode(handle: nvmlDevice_t, mode: *mut u32) => |handle, place| {
        // SAFETY: as above.
        unsafe { device::figure(handle, place, 0) }
    };
    nvmlDeviceGetPersistenceMode(handle: nvmlDevice_t, mode: *mut u32) => |handle, place| {
        // SAFETY: as above.
        unsafe { device::figure(handle, place, 1) }
    };
    nvmlDeviceGetArchitecture(handle: nvmlDevice_t, architecture: *mut u32) => |handle, place| {
        // Hopper, which the compute capability stands for.
        // SAFETY: as above.
        unsafe { device::figure(handle, place, 9) }
    };
    nvmlDeviceGetBrand(handle: nvmlDevice_t, brand: *mut u32) => |handle, place| {
        // SAFETY: as above.
        unsafe { device::figure(handle, place, 14) }
    };
    nvmlDeviceGetMaxMigDeviceCount(handle: nvmlDevice_t, count: *mut u32) => device::most_slices;
    nvmlDeviceIsMigDeviceHandle(handle: nvmlDevice_t, is_mig: *mut u32) => device::is_slice;
    nvmlDeviceGetMigMode(handle: nvmlDevice_t, current: *mut u32, pending: *mut u32) => device::mig_mode;
    nvmlDeviceGetTemperature(handle: nvmlDevice_t, _sensor: u32, _temperature: *mut u32) => |handle, _, _| {
        device::unsupported(handle)
    };
    nvmlDeviceGetPowerUsage nvmlDeviceGetFanSpeed nvmlDeviceGetDisplayMode nvmlDeviceGetEnforcedPowerLimit(
        handle: nvmlDevice_t, _value: *mut u32) => |handle, _| device::unsupported(handle);
    nvmlDeviceGetHandleByUUIDV(uuid: *const nvmlUUID_v1_t, handle: *mut nvmlDevice_t) => device::by_uuid_value;
    nvmlDeviceGetHandleBySerial(serial: *const c_char, handle: *mut nvmlDevice_t) => device::by_serial;
    nvmlDeviceGetSerial(handle: nvmlDevice_t, serial: *mut c_char, length: u32) => device::serial;
    nvmlDeviceGetRunningProcessDetailList(
        handle: nvmlDevice_t, list: *mut nvmlProcessDetailList_v1_t) => process::details;
    nvmlDeviceGetProcessUtilization(
        handle: nvmlDevice_t, samples: *mut nvmlProcessUtilizationSample_t, count: *mut u32, since: u64) => process::utilization;
    nvmlDeviceGetProcessesUtilizationInfo(
        handle: nvmlDevice_t, info: *mut nvmlProcessesUtilizationInfo_v1_t) => process::utilization_info;
    nvmlDeviceGetAccountingMode(handle: nvmlDevice_t, mode: *mut u32) => process::accounting_mode;
    nvmlDeviceGetAccountingBufferSize(handle: nvmlDevice_t, size: *mut u32) => process::accounting_buffer;
    nvmlDeviceGetAccountingPids(handle: nvmlDevice_t, count: *mut u32, pids: *mut u32) => process::accounting_pids;
    nvmlDeviceGetAccountingStats(
        handle: nvmlDevice_t, pid: u32, stats: *mut nvmlAccountingStats_t) => process::accounting_stats;
    nvmlDeviceGetAccountingStats_v2(
        handle: nvmlDevice_t, stats: *mut nvmlAccountingStats_v2_t) => process::accounting_stats_v2;
    nvmlInternalGetExportTable(table: *mut *const usize, id: *const [u8; 16]) => private::table;
    nvmlDeviceGetGpuInstanceId(handle: nvmlDevice_t, id: *mut u32) => device::gpu_instance;
    nvmlDeviceGetComputeInstanceId(handle: nvmlDevice_t, id: *mut u32) => device::compute_instance;
    nvmlDeviceGetMigDeviceHandleByIndex(handle: nvmlDevice_t, index: u32, slice: *mut nvmlDevice_t) => device::slice;
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
        slice: nvmlDevice_t, handle: *mut nvmlDevice_t) => device::card_of_slice;
    nvmlDeviceGetEncoderUtilization nvmlDeviceGetDecoderUtilization nvmlDeviceGetDriverModel(
        handle: nvmlDevice_t, _percent: *mut u32, _period: *mut u32) => |handle, _, _| device::unsupported(handle);
    nvmlDeviceGetClockInfo nvmlDeviceGetMaxClockInfo(
        handle: nvmlDevice_t, _kind: u32, _mhz: *mut u32) => |handle, _, _| device::unsupported(handle);
    nvmlDeviceGetPerformanceState nvmlDeviceGetPowerManagementLimit nvmlDeviceGetDisplayActive(
        handle: nvmlDevice_t, _state: *mut u32) => |handle, _| device::unsupported(handle);
    nvmlDeviceGetTotalEccErrors(handle: nvmlDevice_t, _kind: u32, _counter: u32, _count: *mut u64) => |handle, _, _, _| {
        device::unsupported(handle)
    };
    nvmlDeviceGetEccMode(
        handle: nvmlDevice_t, _a: *mut c_void, _b: *mut c_void) => |handle, _, _| device::unsupported(handle);
}

/// NVML's `nvmlErrorString`: a text that lives as long as the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlErrorString(result: nvmlReturn_t) -> *const c_char {
    result.c_text().as_ptr()
}
