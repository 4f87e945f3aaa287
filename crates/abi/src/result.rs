//! `CUresult` and the names of all its values.

use core::ffi::CStr;

/// What every driver call returns: zero for success.
///
/// A newer driver may return a number without a name here; that is legal.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[must_use]
pub struct CUresult(pub u32);

macro_rules! results {
    ($($short:ident = $number:literal, $name:literal, $text:literal;)*) => {
        impl CUresult {
            $(
                #[doc = concat!("`", $name, "`: ", $text, ".")]
                pub const $short: CUresult = CUresult($number);
            )*

            /// Every value that has a name, in the order of the numbers.
            pub const ALL: &'static [CUresult] = &[$(CUresult($number)),*];

            /// The driver's name of this value, as `cuGetErrorName` answers.
            #[must_use]
            pub const fn c_name(self) -> Option<&'static CStr> {
                match self.0 {
                    $($number => Some(c_str(concat!($name, "\0"))),)*
                    _ => None,
                }
            }

            /// What this value means, in a few words.
            #[must_use]
            pub const fn c_text(self) -> Option<&'static CStr> {
                match self.0 {
                    $($number => Some(c_str(concat!($text, "\0"))),)*
                    _ => None,
                }
            }
        }
    };
}

const fn c_str(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a table entry with an inner zero byte"),
    }
}

results! {
    SUCCESS = 0, "CUDA_SUCCESS", "no error";
    ERROR_INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE", "a parameter is invalid";
    ERROR_OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory";
    ERROR_NOT_INITIALIZED = 3, "CUDA_ERROR_NOT_INITIALIZED", "the driver is not initialised";
    ERROR_DEINITIALIZED = 4, "CUDA_ERROR_DEINITIALIZED", "the driver is shutting down";
    ERROR_PROFILER_DISABLED = 5, "CUDA_ERROR_PROFILER_DISABLED", "profiler disabled";
    ERROR_PROFILER_NOT_INITIALIZED = 6, "CUDA_ERROR_PROFILER_NOT_INITIALIZED", "profiler not initialized";
    ERROR_PROFILER_ALREADY_STARTED = 7, "CUDA_ERROR_PROFILER_ALREADY_STARTED", "profiler already started";
    ERROR_PROFILER_ALREADY_STOPPED = 8, "CUDA_ERROR_PROFILER_ALREADY_STOPPED", "profiler already stopped";
    ERROR_STUB_LIBRARY = 34, "CUDA_ERROR_STUB_LIBRARY", "stub library";
    ERROR_CALL_REQUIRES_NEWER_DRIVER = 36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "call requires newer driver";
    ERROR_DEVICE_UNAVAILABLE = 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "device unavailable";
    ERROR_MULTICAST_RESOURCE_FULL = 47, "CUDA_ERROR_MULTICAST_RESOURCE_FULL", "multicast resource full";
    ERROR_NO_DEVICE = 100, "CUDA_ERROR_NO_DEVICE", "no device is visible";
    ERROR_INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE", "no such device";
    ERROR_DEVICE_NOT_LICENSED = 102, "CUDA_ERROR_DEVICE_NOT_LICENSED", "device not licensed";
    ERROR_INVALID_IMAGE = 200, "CUDA_ERROR_INVALID_IMAGE", "the code image is invalid";
    ERROR_INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT", "the context is invalid or none is current";
    ERROR_CONTEXT_ALREADY_CURRENT = 202, "CUDA_ERROR_CONTEXT_ALREADY_CURRENT", "context already current";
    ERROR_MAP_FAILED = 205, "CUDA_ERROR_MAP_FAILED", "could not be mapped";
    ERROR_UNMAP_FAILED = 206, "CUDA_ERROR_UNMAP_FAILED", "could not be unmapped";
    ERROR_ARRAY_IS_MAPPED = 207, "CUDA_ERROR_ARRAY_IS_MAPPED", "array is mapped";
    ERROR_ALREADY_MAPPED = 208, "CUDA_ERROR_ALREADY_MAPPED", "already mapped";
    ERROR_NO_BINARY_FOR_GPU = 209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no code in the image runs on this device";
    ERROR_ALREADY_ACQUIRED = 210, "CUDA_ERROR_ALREADY_ACQUIRED", "already acquired";
    ERROR_NOT_MAPPED = 211, "CUDA_ERROR_NOT_MAPPED", "not mapped";
    ERROR_NOT_MAPPED_AS_ARRAY = 212, "CUDA_ERROR_NOT_MAPPED_AS_ARRAY", "not mapped as array";
    ERROR_NOT_MAPPED_AS_POINTER = 213, "CUDA_ERROR_NOT_MAPPED_AS_POINTER", "not mapped as pointer";
    ERROR_ECC_UNCORRECTABLE = 214, "CUDA_ERROR_ECC_UNCORRECTABLE", "ecc uncorrectable";
    ERROR_UNSUPPORTED_LIMIT = 215, "CUDA_ERROR_UNSUPPORTED_LIMIT", "unsupported limit";
    ERROR_CONTEXT_ALREADY_IN_USE = 216, "CUDA_ERROR_CONTEXT_ALREADY_IN_USE", "context already in use";
    ERROR_PEER_ACCESS_UNSUPPORTED = 217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access unsupported";
    ERROR_INVALID_PTX = 218, "CUDA_ERROR_INVALID_PTX", "invalid ptx";
    ERROR_INVALID_GRAPHICS_CONTEXT = 219, "CUDA_ERROR_INVALID_GRAPHICS_CONTEXT", "invalid graphics context";
    ERROR_NVLINK_UNCORRECTABLE = 220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", "nvlink uncorrectable";
    ERROR_JIT_COMPILER_NOT_FOUND = 221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "jit compiler not found";
    ERROR_UNSUPPORTED_PTX_VERSION = 222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "unsupported ptx version";
    ERROR_JIT_COMPILATION_DISABLED = 223, "CUDA_ERROR_JIT_COMPILATION_DISABLED", "jit compilation disabled";
    ERROR_UNSUPPORTED_EXEC_AFFINITY = 224, "CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY", "unsupported exec affinity";
    ERROR_UNSUPPORTED_DEVSIDE_SYNC = 225, "CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", "unsupported devside sync";
    ERROR_CONTAINED = 226, "CUDA_ERROR_CONTAINED", "contained";
    ERROR_INSUFFICIENT_LOADER_VERSION = 227, "CUDA_ERROR_INSUFFICIENT_LOADER_VERSION", "insufficient loader version";
    ERROR_INVALID_SOURCE = 300, "CUDA_ERROR_INVALID_SOURCE", "the source is invalid";
    ERROR_FILE_NOT_FOUND = 301, "CUDA_ERROR_FILE_NOT_FOUND", "file not found";
    ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND = 302, "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", "shared object symbol not found";
    ERROR_SHARED_OBJECT_INIT_FAILED = 303, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", "shared object init failed";
    ERROR_OPERATING_SYSTEM = 304, "CUDA_ERROR_OPERATING_SYSTEM", "an operating system call failed";
    ERROR_INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE", "the handle is invalid";
    ERROR_ILLEGAL_STATE = 401, "CUDA_ERROR_ILLEGAL_STATE", "the state does not allow this";
    ERROR_LOSSY_QUERY = 402, "CUDA_ERROR_LOSSY_QUERY", "lossy query";
    ERROR_NOT_FOUND = 500, "CUDA_ERROR_NOT_FOUND", "the name is not found";
    ERROR_NOT_READY = 600, "CUDA_ERROR_NOT_READY", "work is still pending";
    ERROR_ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "a kernel or copy used an illegal address";
    ERROR_LAUNCH_OUT_OF_RESOURCES = 701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "launch out of resources";
    ERROR_LAUNCH_TIMEOUT = 702, "CUDA_ERROR_LAUNCH_TIMEOUT", "a kernel ran too long";
    ERROR_LAUNCH_INCOMPATIBLE_TEXTURING = 703, "CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING", "launch incompatible texturing";
    ERROR_PEER_ACCESS_ALREADY_ENABLED = 704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled";
    ERROR_PEER_ACCESS_NOT_ENABLED = 705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access is not enabled";
    ERROR_PRIMARY_CONTEXT_ACTIVE = 708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "the primary context is active";
    ERROR_CONTEXT_IS_DESTROYED = 709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "the context is destroyed";
    ERROR_ASSERT = 710, "CUDA_ERROR_ASSERT", "assert";
    ERROR_TOO_MANY_PEERS = 711, "CUDA_ERROR_TOO_MANY_PEERS", "too many peers";
    ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "the host memory is already registered";
    ERROR_HOST_MEMORY_NOT_REGISTERED = 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "the host memory is not registered";
    ERROR_HARDWARE_STACK_ERROR = 714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error";
    ERROR_ILLEGAL_INSTRUCTION = 715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "illegal instruction";
    ERROR_MISALIGNED_ADDRESS = 716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address";
    ERROR_INVALID_ADDRESS_SPACE = 717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "invalid address space";
    ERROR_INVALID_PC = 718, "CUDA_ERROR_INVALID_PC", "invalid pc";
    ERROR_LAUNCH_FAILED = 719, "CUDA_ERROR_LAUNCH_FAILED", "a launch failed";
    ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "cooperative launch too large";
    ERROR_TENSOR_MEMORY_LEAK = 721, "CUDA_ERROR_TENSOR_MEMORY_LEAK", "tensor memory leak";
    ERROR_NOT_PERMITTED = 800, "CUDA_ERROR_NOT_PERMITTED", "not permitted";
    ERROR_NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED", "not supported";
    ERROR_SYSTEM_NOT_READY = 802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not ready";
    ERROR_SYSTEM_DRIVER_MISMATCH = 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system driver mismatch";
    ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "compat not supported on device";
    ERROR_MPS_CONNECTION_FAILED = 805, "CUDA_ERROR_MPS_CONNECTION_FAILED", "mps connection failed";
    ERROR_MPS_RPC_FAILURE = 806, "CUDA_ERROR_MPS_RPC_FAILURE", "mps rpc failure";
    ERROR_MPS_SERVER_NOT_READY = 807, "CUDA_ERROR_MPS_SERVER_NOT_READY", "mps server not ready";
    ERROR_MPS_MAX_CLIENTS_REACHED = 808, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", "mps max clients reached";
    ERROR_MPS_MAX_CONNECTIONS_REACHED = 809, "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", "mps max connections reached";
    ERROR_MPS_CLIENT_TERMINATED = 810, "CUDA_ERROR_MPS_CLIENT_TERMINATED", "mps client terminated";
    ERROR_CDP_NOT_SUPPORTED = 811, "CUDA_ERROR_CDP_NOT_SUPPORTED", "cdp not supported";
    ERROR_CDP_VERSION_MISMATCH = 812, "CUDA_ERROR_CDP_VERSION_MISMATCH", "cdp version mismatch";
    ERROR_STREAM_CAPTURE_UNSUPPORTED = 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted while a stream is being captured";
    ERROR_STREAM_CAPTURE_INVALIDATED = 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "the capture was invalidated";
    ERROR_STREAM_CAPTURE_MERGE = 902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "stream capture merge";
    ERROR_STREAM_CAPTURE_UNMATCHED = 903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "stream capture unmatched";
    ERROR_STREAM_CAPTURE_UNJOINED = 904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "the capture has streams that were not joined";
    ERROR_STREAM_CAPTURE_ISOLATION = 905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "a dependency would leave the capture";
    ERROR_STREAM_CAPTURE_IMPLICIT = 906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "the legacy stream would depend on a capture";
    ERROR_CAPTURED_EVENT = 907, "CUDA_ERROR_CAPTURED_EVENT", "the event was recorded in a capture";
    ERROR_STREAM_CAPTURE_WRONG_THREAD = 908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "the capture belongs to another thread";
    ERROR_TIMEOUT = 909, "CUDA_ERROR_TIMEOUT", "timeout";
    ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", "graph exec update failure";
    ERROR_EXTERNAL_DEVICE = 911, "CUDA_ERROR_EXTERNAL_DEVICE", "external device";
    ERROR_INVALID_CLUSTER_SIZE = 912, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "invalid cluster size";
    ERROR_FUNCTION_NOT_LOADED = 913, "CUDA_ERROR_FUNCTION_NOT_LOADED", "function not loaded";
    ERROR_INVALID_RESOURCE_TYPE = 914, "CUDA_ERROR_INVALID_RESOURCE_TYPE", "invalid resource type";
    ERROR_INVALID_RESOURCE_CONFIGURATION = 915, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", "invalid resource configuration";
    ERROR_KEY_ROTATION = 916, "CUDA_ERROR_KEY_ROTATION", "key rotation";
    ERROR_STREAM_DETACHED = 917, "CUDA_ERROR_STREAM_DETACHED", "stream detached";
    ERROR_GRAPH_RECAPTURE_FAILURE = 918, "CUDA_ERROR_GRAPH_RECAPTURE_FAILURE", "graph recapture failure";
    ERROR_FABRIC_NOT_READY = 919, "CUDA_ERROR_FABRIC_NOT_READY", "fabric not ready";
    ERROR_UNKNOWN = 999, "CUDA_ERROR_UNKNOWN", "unknown error";
}

impl CUresult {
    /// Whether this is success.
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.0 == 0
    }

    /// Success as `Ok`, anything else as `Err`.
    pub const fn ok(self) -> Result<(), CUresult> {
        if self.0 == 0 { Ok(()) } else { Err(self) }
    }

    /// The driver's name of this value, if it has one here.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        self.c_name().and_then(|name| name.to_str().ok())
    }
}

impl From<Result<(), CUresult>> for CUresult {
    fn from(result: Result<(), CUresult>) -> Self {
        match result {
            Ok(()) => CUresult::SUCCESS,
            Err(error) => error,
        }
    }
}

impl core::fmt::Debug for CUresult {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name}({})", self.0),
            None => write!(f, "CUresult({})", self.0),
        }
    }
}

impl core::fmt::Display for CUresult {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.c_text().and_then(|text| text.to_str().ok()) {
            Some(text) => write!(f, "{text} ({self:?})"),
            None => write!(f, "driver error {}", self.0),
        }
    }
}

impl std::error::Error for CUresult {}

impl crate::Zero for CUresult {
    const ZERO: Self = CUresult::SUCCESS;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_drivers() {
        assert_eq!(CUresult::SUCCESS.name(), Some("CUDA_SUCCESS"));
        assert_eq!(CUresult::ERROR_OUT_OF_MEMORY.0, 2);
        assert_eq!(
            CUresult::ERROR_OUT_OF_MEMORY.name(),
            Some("CUDA_ERROR_OUT_OF_MEMORY")
        );
        assert_eq!(CUresult(123_456).name(), None);
        assert_eq!(format!("{}", CUresult(123_456)), "driver error 123456");
    }

    #[test]
    fn the_table_is_in_order_and_complete() {
        assert!(CUresult::ALL.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(
            CUresult::ALL
                .iter()
                .all(|value| value.c_name().is_some() && value.c_text().is_some())
        );
    }
}
