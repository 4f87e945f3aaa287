//! The words every other crate uses: bytes, quantities, identities, priorities.
//!
//! Nothing here does I/O. A number that crosses a crate border has one of these types, so that bytes are not
//! mistaken for granules, a client for a task, or a device's index for its identity.

#![forbid(unsafe_code)]

mod bytes;
mod ids;
mod quantity;
mod uuid;

pub use bytes::{Bytes, GRANULE};
pub use ids::{ClientId, DeviceId, OrderId, Priority, PriorityError, TaskId};
pub use quantity::QuantityError;
pub use uuid::{DeviceUuid, UuidError};
