//! What the engine answers. Each type says whose fault it is, and the layer turns it into a driver code in one place.

use ebb_device::DeviceError;
use ebb_units::Bytes;

/// Why an allocation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocError {
    /// The program's fault: nothing, or more than addresses can express. `CUDA_ERROR_INVALID_VALUE`.
    #[error("{0} is no size for an allocation")]
    Size(Bytes),
    /// It would pass the task's limit. Final until something is freed. `CUDA_ERROR_OUT_OF_MEMORY`.
    #[error("{asked} more than the {charged} in use would pass the limit of {limit}")]
    OverLimit {
        /// Rounded size of the allocation.
        asked: Bytes,
        /// What the task is charged with now.
        charged: Bytes,
        /// The limit.
        limit: Bytes,
    },
    /// It can never fit this card beside what others are promised. `CUDA_ERROR_OUT_OF_MEMORY`.
    #[error("{0} can never fit this card beside what others are promised")]
    NeverFits(Bytes),
    /// No room within the time; another try may wait longer. `CUDA_ERROR_OUT_OF_MEMORY`.
    #[error("no room for {0} within the time")]
    TimedOut(Bytes),
    /// The driver's own answer.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The engine does not manage this device (any more): use the driver's own call.
    #[error("the device is not managed")]
    Bypass,
}

/// Why a free was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FreeError {
    /// The program's fault: it points into an allocation of ours, not at its start, or at one that is freed already.
    /// `CUDA_ERROR_INVALID_VALUE`.
    #[error("the address lies in our range and is no start of a live allocation")]
    Invalid,
    /// Not ours: use the driver's own call and return its code.
    #[error("the address is not ours")]
    Bypass,
}

/// Why a touch may not go on: its memory cannot be brought back. The program gets an error code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TouchError {
    /// The card had no room for `alloc_wait_max`. `CUDA_ERROR_OUT_OF_MEMORY`.
    #[error("no room on the card to bring the program's memory back")]
    OutOfMemory,
    /// The driver kept failing; its code. Nothing is lost, and the next touch tries again.
    #[error(transparent)]
    Device(DeviceError),
}
