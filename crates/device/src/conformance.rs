//! What every [`crate::DeviceMemory`] must do, as functions that a test calls.
