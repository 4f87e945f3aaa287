//! One GPU's memory by the driver's own calls.
//!
//! [`DriverTable`] holds the driver's functions by name, from wherever the caller finds them (the layer: the real functions
//! behind its hooks; a test: a library that it opened). [`CudaDevice`] is [`ebb_device::DeviceMemory`] over it.

mod beside;
mod device;
mod fingerprint;
mod import;
mod lenders;
mod maps;
mod options;
mod scope;
mod table;

pub use device::{CudaDevice, DeviceFacts, props_of};
pub use import::Imported;
pub use scope::Scope;
pub use table::DriverTable;

use ebb_abi::CUresult;
use ebb_device::DeviceError;

/// What a driver's answer means to the parts above.
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<(), DeviceError> {
    match result {
        CUresult::SUCCESS => Ok(()),
        CUresult::ERROR_OUT_OF_MEMORY => Err(DeviceError::OutOfMemory),
        CUresult::ERROR_DEINITIALIZED
        | CUresult::ERROR_NOT_INITIALIZED
        | CUresult::ERROR_CONTEXT_IS_DESTROYED => Err(DeviceError::Gone),
        CUresult(code) => Err(DeviceError::Driver { code, call }),
    }
}
