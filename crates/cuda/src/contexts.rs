//! [`CallScope`]: a driver call of ours leaves nothing behind on the thread that makes it.

use ebb_abi::{CUcontext, CUstreamCaptureMode};
use ebb_device::DeviceError;

use crate::DriverTable;

/// While it lives, a context is current on this thread and the thread's capture mode is relaxed, so that no call of ours
/// breaks a capture of the program's. Dropping it puts both back.
///
/// Not for threads that may be cancelled inside: it is used on ours, and around calls that are no cancellation points.
#[derive(Debug)]
pub struct CallScope<'a> {
    table: &'a DriverTable,
    mode: Option<CUstreamCaptureMode>,
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode(2);

impl<'a> CallScope<'a> {
    /// Makes `context` current.
    ///
    /// # Errors
    /// The driver's; the thread is as before.
    pub fn enter(table: &'a DriverTable, context: CUcontext) -> Result<Self, DeviceError> {
        // SAFETY: `context` is a context of the program's; if it is gone by now, the driver says so.
        unsafe { table.context_push(context) }?;
        let mut mode = RELAXED;
        // SAFETY: `mode` is a live value that the driver reads and replaces. A driver without the call has no captures.
        let exchanged = unsafe { table.exchange_capture_mode(&raw mut mode) };
        Ok(Self {
            table,
            mode: exchanged.is_ok().then_some(mode),
        })
    }
}

impl Drop for CallScope<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.mode {
            // SAFETY: as in `enter`. A failure leaves the thread relaxed, which forbids nothing.
            let _ = unsafe { self.table.exchange_capture_mode(&raw mut mode) };
        }
        let mut popped = CUcontext::NULL;
        // SAFETY: pops what `enter` pushed on this thread. It fails only if the driver is gone, and the stack with it.
        let _ = unsafe { self.table.context_pop(&raw mut popped) };
    }
}
