//! Owned, typed wrappers over the driver's virtual-memory and copy calls.
//!
//! * [`DriverTable`]: the calls that we make, looked up once by whoever knows where the real driver is. A call that this
//!   driver does not have is an error of that call, not of the whole.
//! * [`CudaDevice`]: [`ebb_device::DeviceMemory`] over them.

mod contexts;
mod device;
mod table;

pub use contexts::CallScope;
pub use device::CudaDevice;
pub use table::{DriverTable, check};
