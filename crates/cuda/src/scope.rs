//! [`Scope`]: a context made current, and capture rules relaxed, for a few calls.

use ebb_abi::{CU_STREAM_CAPTURE_MODE_RELAXED, CUcontext, CUstreamCaptureMode};
use ebb_device::DeviceError;

use crate::{DriverTable, check};

/// While it lives, a context is current on the calling thread, and calls that a capture of the program elsewhere
/// would forbid are allowed. Both are put back when it is dropped. Bound to its thread.
#[derive(Debug)]
pub struct Scope<'a> {
    table: &'a DriverTable,
    pushed: bool,
    mode: Option<CUstreamCaptureMode>,
    _thread: core::marker::PhantomData<*const ()>,
}

impl<'a> Scope<'a> {
    /// Makes `context` current, unless it is already.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver refuses, for instance because the context is destroyed.
    pub fn enter(table: &'a DriverTable, context: CUcontext) -> Result<Self, DeviceError> {
        let mut scope = Self::plainly(table, context)?;
        let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a valid place, read and written.
        if unsafe { table.cuThreadExchangeStreamCaptureMode(&raw mut mode) }.is_success() {
            scope.mode = Some(mode);
        }
        Ok(scope)
    }

    /// The same where nobody captures: two calls of the driver less.
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub(crate) fn plainly(table: &'a DriverTable, context: CUcontext) -> Result<Self, DeviceError> {
        let mut current = CUcontext::NULL;
        // SAFETY: a valid place for the answer.
        check("cuCtxGetCurrent", unsafe {
            table.cuCtxGetCurrent(&raw mut current)
        })?;
        let pushed = current != context;
        if pushed {
            // SAFETY: no pointers. The driver checks the handle.
            check("cuCtxPushCurrent", unsafe { table.cuCtxPushCurrent_v2(context) })?;
        }
        Ok(Self {
            table,
            pushed,
            mode: None,
            _thread: core::marker::PhantomData,
        })
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.mode {
            // SAFETY: a valid place, read and written. It cannot fail for a mode that the driver gave us.
            let _ = unsafe { self.table.cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        }
        if self.pushed {
            let mut popped = CUcontext::NULL;
            // SAFETY: a valid place. What is on top is what `enter` pushed: calls in between are ours and balanced.
            let _ = unsafe { self.table.cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}
