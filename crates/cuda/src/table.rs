//! The driver's calls that we make.

use std::ffi::{CStr, c_void};
use std::fmt;

use ebb_abi::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationProp, CUmemGenericAllocationHandle, CUresult, CUstream,
    CUstreamCaptureMode,
};
use ebb_device::DeviceError;

macro_rules! driver_table {
    ($( $field:ident = $symbol:literal ( $($arg:ident: $ty:ty),* ); )*) => {
        /// Pointers to the driver's functions. `None` where the driver has no such function.
        ///
        /// # Invariants
        /// Every pointer is the driver's function of that symbol, whose parameters are those of the method.
        #[derive(Clone, Copy)]
        pub struct DriverTable {
            $( $field: Option<unsafe extern "C" fn($($ty),*) -> CUresult>, )*
        }

        impl DriverTable {
            /// Looks every function up.
            ///
            /// # Safety
            /// For each symbol, `resolve` returns null or the driver's function of exactly that name, which stays loaded
            /// for the rest of the process.
            pub unsafe fn load(mut resolve: impl FnMut(&CStr) -> *mut c_void) -> Self {
                Self { $(
                    $field: {
                        let pointer = resolve($symbol);
                        // SAFETY: null is `None`; anything else is, by this function's contract, the function of this
                        // symbol, whose C parameters are those listed here.
                        unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($ty),*) -> CUresult>>(pointer) }
                    },
                )* }
            }

            $(
                #[doc = concat!("Calls the driver's function of symbol `", stringify!($symbol), "`.")]
                ///
                /// # Safety
                /// Pointers point to what the driver reads or writes there; handles are live ones of the driver's.
                ///
                /// # Errors
                /// The driver's answer, or "not found" if it has no such function.
                pub unsafe fn $field(&self, $($arg: $ty),*) -> Result<(), DeviceError> {
                    let call = stringify!($field);
                    let Some(function) = self.$field else {
                        return Err(DeviceError::Driver { code: CUresult::ERROR_NOT_FOUND.0, call });
                    };
                    // SAFETY: the pointer is that function (invariant of the type); the arguments are the caller's duty.
                    check(unsafe { function($($arg),*) }, call)
                }
            )*
        }
    };
}

driver_table! {
    address_reserve = c"cuMemAddressReserve"(ptr: *mut CUdeviceptr, size: usize, align: usize, hint: CUdeviceptr, flags: u64);
    address_free = c"cuMemAddressFree"(ptr: CUdeviceptr, size: usize);
    create = c"cuMemCreate"(handle: *mut CUmemGenericAllocationHandle, size: usize, prop: *const CUmemAllocationProp, flags: u64);
    release = c"cuMemRelease"(handle: CUmemGenericAllocationHandle);
    map = c"cuMemMap"(ptr: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64);
    unmap = c"cuMemUnmap"(ptr: CUdeviceptr, size: usize);
    set_access = c"cuMemSetAccess"(ptr: CUdeviceptr, size: usize, desc: *const CUmemAccessDesc, count: usize);
    granularity = c"cuMemGetAllocationGranularity"(out: *mut usize, prop: *const CUmemAllocationProp, option: CUmemAllocationGranularity_flags);
    mem_info = c"cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    copy_out_async = c"cuMemcpyDtoHAsync_v2"(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream);
    copy_in_async = c"cuMemcpyHtoDAsync_v2"(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream);
    host_register = c"cuMemHostRegister_v2"(ptr: *mut c_void, bytes: usize, flags: u32);
    host_unregister = c"cuMemHostUnregister"(ptr: *mut c_void);
    stream_create = c"cuStreamCreate"(stream: *mut CUstream, flags: u32);
    stream_destroy = c"cuStreamDestroy_v2"(stream: CUstream);
    event_create = c"cuEventCreate"(event: *mut CUevent, flags: u32);
    event_record = c"cuEventRecord"(event: CUevent, stream: CUstream);
    event_query = c"cuEventQuery"(event: CUevent);
    event_synchronize = c"cuEventSynchronize"(event: CUevent);
    event_destroy = c"cuEventDestroy_v2"(event: CUevent);
    context_push = c"cuCtxPushCurrent_v2"(context: CUcontext);
    context_pop = c"cuCtxPopCurrent_v2"(context: *mut CUcontext);
    context_synchronize = c"cuCtxSynchronize"();
    exchange_capture_mode = c"cuThreadExchangeStreamCaptureMode"(mode: *mut CUstreamCaptureMode);
    device_attribute = c"cuDeviceGetAttribute"(value: *mut i32, attribute: CUdevice_attribute, device: CUdevice);
}

impl fmt::Debug for DriverTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverTable").finish_non_exhaustive()
    }
}

/// A driver's answer as a result.
///
/// # Errors
/// Everything but success. Out of memory, and a driver or context that is gone, are errors of their own.
pub fn check(result: CUresult, call: &'static str) -> Result<(), DeviceError> {
    match result {
        CUresult::SUCCESS => Ok(()),
        CUresult::ERROR_OUT_OF_MEMORY => Err(DeviceError::OutOfMemory),
        CUresult::ERROR_DEINITIALIZED | CUresult::ERROR_CONTEXT_IS_DESTROYED => Err(DeviceError::Gone),
        CUresult(code) => Err(DeviceError::Driver { code, call }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_function_is_an_error_of_its_call() {
        // SAFETY: null is allowed for every symbol.
        let table = unsafe { DriverTable::load(|_| std::ptr::null_mut()) };
        // SAFETY: nothing is called.
        let result = unsafe { table.context_synchronize() };
        assert_eq!(
            result,
            Err(DeviceError::Driver {
                code: 500,
                call: "context_synchronize"
            })
        );
    }

    #[test]
    fn answers_are_sorted_by_what_can_be_done() {
        assert_eq!(check(CUresult(0), "x"), Ok(()));
        assert_eq!(check(CUresult(2), "x"), Err(DeviceError::OutOfMemory));
        assert_eq!(check(CUresult(4), "x"), Err(DeviceError::Gone));
        assert_eq!(check(CUresult(709), "x"), Err(DeviceError::Gone));
        assert_eq!(
            check(CUresult(12_345), "x"),
            Err(DeviceError::Driver {
                code: 12_345,
                call: "x"
            })
        );
    }
}
