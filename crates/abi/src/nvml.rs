//! The part of NVML that we read or answer: memory, processes, names, utilisation.

#![expect(missing_docs, reason = "the names are NVML's own")]

use super::macros::driver_struct;
use core::ffi::c_char;

/// What every NVML call returns: zero for success. Newer values are legal.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[must_use]
pub struct nvmlReturn_t(pub u32);

macro_rules! results {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        $(pub const $name: nvmlReturn_t = nvmlReturn_t($number);)*

        impl nvmlReturn_t {
            /// What this value means, in a few words, as `nvmlErrorString` answers.
            #[must_use]
            pub const fn c_text(self) -> &'static core::ffi::CStr {
                match self.0 {
                    $($number => $text,)*
                    _ => c"unknown error",
                }
            }
        }
    };
}

results! {
    NVML_SUCCESS = 0, c"success";
    NVML_ERROR_UNINITIALIZED = 1, c"the library was not initialised";
    NVML_ERROR_INVALID_ARGUMENT = 2, c"an argument is invalid";
    NVML_ERROR_NOT_SUPPORTED = 3, c"not supported";
    NVML_ERROR_NO_PERMISSION = 4, c"no permission";
    NVML_ERROR_ALREADY_INITIALIZED = 5, c"already initialised";
    NVML_ERROR_NOT_FOUND = 6, c"not found";
    NVML_ERROR_INSUFFICIENT_SIZE = 7, c"the buffer is too small";
    NVML_ERROR_INSUFFICIENT_POWER = 8, c"power cables are not attached";
    NVML_ERROR_DRIVER_NOT_LOADED = 9, c"the driver is not loaded";
    NVML_ERROR_TIMEOUT = 10, c"timed out";
    NVML_ERROR_IRQ_ISSUE = 11, c"interrupts do not arrive";
    NVML_ERROR_LIBRARY_NOT_FOUND = 12, c"the library was not found";
    NVML_ERROR_FUNCTION_NOT_FOUND = 13, c"the function was not found";
    NVML_ERROR_CORRUPTED_INFOROM = 14, c"the device's own information is damaged";
    NVML_ERROR_GPU_IS_LOST = 15, c"the device is lost";
    NVML_ERROR_RESET_REQUIRED = 16, c"the device must be reset";
    NVML_ERROR_OPERATING_SYSTEM = 17, c"the operating system refused";
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18, c"the library and the driver differ in version";
    NVML_ERROR_IN_USE = 19, c"the device is in use";
    NVML_ERROR_MEMORY = 20, c"out of memory";
    NVML_ERROR_NO_DATA = 21, c"no data";
    NVML_ERROR_VGPU_ECC_NOT_SUPPORTED = 22, c"not supported while ECC is on";
    NVML_ERROR_INSUFFICIENT_RESOURCES = 23, c"not enough resources";
    NVML_ERROR_FREQ_NOT_SUPPORTED = 24, c"the frequency is not supported";
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25, c"the structure's version is not known";
    NVML_ERROR_DEPRECATED = 26, c"deprecated";
    NVML_ERROR_NOT_READY = 27, c"not ready";
    NVML_ERROR_GPU_NOT_FOUND = 28, c"no device was found";
    NVML_ERROR_INVALID_STATE = 29, c"the state does not allow this";
    NVML_ERROR_RESET_TYPE_NOT_SUPPORTED = 30, c"this kind of reset is not supported";
    NVML_ERROR_UNKNOWN = 999, c"unknown error";
}

impl nvmlReturn_t {
    /// Whether this is success.
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.0 == 0
    }

    /// Success as `Ok`, anything else as `Err`.
    pub const fn ok(self) -> Result<(), nvmlReturn_t> {
        if self.0 == 0 { Ok(()) } else { Err(self) }
    }
}

/// A device.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct nvmlDevice_t(pub usize);

impl crate::Zero for nvmlDevice_t {
    const ZERO: Self = Self(0);
}

driver_struct! {
    nvmlMemory_t [24, 8] {
        @0 total: u64,
        @8 free: u64,
        @16 used: u64,
    }
    nvmlMemory_v2_t [40, 8] {
        @0 version: u32,
        @8 total: u64,
        @16 reserved: u64,
        @24 free: u64,
        @32 used: u64,
    }
    nvmlBAR1Memory_t [24, 8] {
        @0 bar1Total: u64,
        @8 bar1Free: u64,
        @16 bar1Used: u64,
    }
    nvmlProcessInfo_v1_t [16, 8] {
        @0 pid: u32,
        @8 usedGpuMemory: u64,
    }
    nvmlProcessInfo_v2_t [24, 8] {
        @0 pid: u32,
        @8 usedGpuMemory: u64,
        @16 gpuInstanceId: u32,
        @20 computeInstanceId: u32,
    }
    nvmlUtilization_t [8, 4] {
        @0 gpu: u32,
        @4 memory: u32,
    }
    nvmlPciInfo_t [68, 4] {
        @0 busIdLegacy: [c_char; 16],
        @16 domain: u32,
        @20 bus: u32,
        @24 device: u32,
        @28 pciDeviceId: u32,
        @32 pciSubSystemId: u32,
        @36 busId: [c_char; 32],
    }
    nvmlProcessUtilizationSample_t [32, 8] {
        @0 pid: u32,
        @8 timeStamp: u64,
        @16 smUtil: u32,
        @20 memUtil: u32,
        @24 encUtil: u32,
        @28 decUtil: u32,
    }
    nvmlProcessDetail_v1_t [32, 8] {
        @0 pid: u32,
        @8 usedGpuMemory: u64,
        @16 gpuInstanceId: u32,
        @20 computeInstanceId: u32,
        @24 usedGpuCcProtectedMemory: u64,
    }
    nvmlProcessDetailList_v1_t [24, 8] {
        @0 version: u32,
        @4 mode: u32,
        @8 numProcArrayEntries: u32,
        @16 procArray: *mut nvmlProcessDetail_v1_t,
    }
    nvmlProcessUtilizationInfo_v1_t [40, 8] {
        @0 timeStamp: u64,
        @8 pid: u32,
        @12 smUtil: u32,
        @16 memUtil: u32,
        @20 encUtil: u32,
        @24 decUtil: u32,
        @28 jpgUtil: u32,
        @32 ofaUtil: u32,
    }
    nvmlProcessesUtilizationInfo_v1_t [24, 8] {
        @0 version: u32,
        @4 processSamplesCount: u32,
        @8 lastSeenTimeStamp: u64,
        @16 procUtilArray: *mut nvmlProcessUtilizationInfo_v1_t,
    }
    nvmlAccountingStats_t [56, 8] {
        @0 gpuUtilization: u32,
        @4 memoryUtilization: u32,
        @8 maxMemoryUsage: u64,
        @16 time: u64,
        @24 startTime: u64,
        @32 isRunning: u32,
        @36 reserved: [u32; 5],
    }
    nvmlAccountingStats_v2_t [64, 8] {
        @0 pid: u32,
        @4 isRunning: u32,
        @8 gpuUtilization: u32,
        @12 memoryUtilization: u32,
        @16 maxMemoryUsage: u64,
        @24 sampleCount: u32,
        @32 sumGpuUtil: u64,
        @40 sumFbUtil: u64,
        @48 time: u64,
        @56 startTime: u64,
    }
    nvmlUUID_v1_t [52, 4] {
        @0 version: u32,
        @4 type_: u32,
        @8 value: [u8; 41],
    }
}

/// The third version of the process calls takes the second version's structure.
pub type nvmlProcessInfo_v3_t = nvmlProcessInfo_v2_t;

/// An entry of the private process lists that `nvidia-smi` reads: the public entry, and the program's name behind it.
///
/// Found by looking at what driver 580.159 writes; see [`PRIVATE_LISTS`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PrivateProcess {
    /// The number, the bytes, the slice.
    pub process: nvmlProcessDetail_v1_t,
    /// The program's command, with a zero at its end.
    pub name: [u8; 4096],
}

/// The identity of the private table of functions that `nvidia-smi` asks for, as driver 580.159 hands it out.
pub const PRIVATE_TABLE: [u8; 16] = [
    0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4,
];
/// Its size in bytes, which is its first word, in that driver. Another size is another table.
pub const PRIVATE_TABLE_SIZE: usize = 0x870;
/// Where in it the lists of compute, graphics and MPS processes are: functions of a device, a count and a place for
/// [`PrivateProcess`]es.
pub const PRIVATE_LISTS: [usize; 3] = [213, 214, 215];

/// The version field of a versioned structure: its size, and its number in the top byte.
#[must_use]
pub const fn struct_version<T>(number: u32) -> u32 {
    let size = core::mem::size_of::<T>();
    assert!(size < 1 << 24);
    size as u32 | number << 24
}

/// What `nvmlMemory_v2_t::version` must hold.
pub const nvmlMemory_v2: u32 = struct_version::<nvmlMemory_v2_t>(2);

/// What `nvmlProcessDetailList_v1_t::version` must hold.
pub const nvmlProcessDetailList_v1: u32 = struct_version::<nvmlProcessDetailList_v1_t>(1);
/// What `nvmlProcessesUtilizationInfo_v1_t::version` must hold.
pub const nvmlProcessesUtilizationInfo_v1: u32 = struct_version::<nvmlProcessesUtilizationInfo_v1_t>(1);
/// What `nvmlUUID_v1_t::version` must hold.
pub const nvmlUUID_v1: u32 = struct_version::<nvmlUUID_v1_t>(1);
/// `nvmlUUID_v1_t::value` is text.
pub const NVML_UUID_TYPE_ASCII: u32 = 1;
/// `nvmlUUID_v1_t::value` is the bytes themselves.
pub const NVML_UUID_TYPE_BINARY: u32 = 2;
/// `nvmlProcessDetailList_v1_t::mode`: processes with a compute context.
pub const NVML_PROCESS_MODE_COMPUTE: u32 = 0;
/// Processes of every kind.
pub const NVML_PROCESS_MODE_ALL: u32 = 3;

/// A figure that NVML could not get.
pub const NVML_VALUE_NOT_AVAILABLE: u64 = u64::MAX;
/// Bytes for a UUID as text.
pub const NVML_DEVICE_UUID_V2_BUFFER_SIZE: usize = 96;
/// Bytes for a device's name.
pub const NVML_DEVICE_NAME_V2_BUFFER_SIZE: usize = 96;
/// Bytes for the driver's version as text.
pub const NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE: usize = 80;
/// `nvmlInitWithFlags`: do not fail when there is no device.
pub const NVML_INIT_FLAG_NO_GPUS: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_field_is_size_and_number() {
        assert_eq!(nvmlMemory_v2, 0x0200_0028);
    }
}
