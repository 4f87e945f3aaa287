//! Which context is current on a thread: so it is known which device its work uses, without asking at every call.
//!
//! Only which device looks idle depends on it. What a call may touch is found out by `needs`.

use ebb_abi::*;

use crate::bridge;
use crate::hooks::with;
use crate::symbols::real;

macro_rules! changes {
    ($($name:ident($($parameter:ident: $ty:ty),*);)*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name($($parameter: $ty),*) -> CUresult {
            // SAFETY: the program's own call.
            let result = unsafe { real::$name($($parameter),*) };
            if bridge::is_running() && result.is_success() {
                with(|running| { running.works_on_current(); Some(()) });
            }
            result
        }
    )*};
}
changes! {
    cuCtxSetCurrent(ctx: CUcontext);
    cuCtxPushCurrent(ctx: CUcontext);
    cuCtxPushCurrent_v2(ctx: CUcontext);
    cuCtxPopCurrent(pctx: *mut CUcontext);
    cuCtxPopCurrent_v2(pctx: *mut CUcontext);
}
