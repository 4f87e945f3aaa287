//! `fork` and `exit`.
//!
//! A child of a fork has one thread, none of the engine's, and no right to the parent's memory, lease or socket: it
//! forgets everything and passes every call on (that it is one it knows from `alive.rs`, before any handler). If the parent had not started the engine, the child may start its own. The handlers
//! are registered when the engine starts, so a program that never uses a GPU forks without us.

use core::ffi::{c_int, c_void};
use core::panic::AssertUnwindSafe;

use crate::{barrier, bridge};

// What `pthread_atfork` and `atexit` are made of. Those two are no symbols of the shared C library.
unsafe extern "C" {
    fn __register_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
        object: *mut c_void,
    ) -> c_int;
    fn __cxa_atexit(handler: extern "C" fn(*mut c_void), argument: *mut c_void, object: *mut c_void)
    -> c_int;
}

/// Registers the handlers, once a process.
pub(crate) fn register() {
    // SAFETY: functions that never unwind, in a library that is never unloaded (`-z nodelete`). If there is no memory for
    // the handlers, a child keeps the parent's state, whose driver calls fail there as they would without us.
    unsafe {
        __register_atfork(None, None, Some(child), core::ptr::null_mut());
        __cxa_atexit(exiting, core::ptr::null_mut(), core::ptr::null_mut());
    }
}

unsafe extern "C" fn child() {
    bridge::forget_in_child();
    crate::hooks::capture::forget_in_child();
    crate::hooks::graphs::forget_in_child();
    crate::hooks::imports::forget_in_child();
    crate::hooks::ipc::forget_in_child();
    crate::frameworks::forget_in_child();
    tell(bridge::inherited(), ebb_layer_core::Engine::child_after_fork);
}

extern "C" fn exiting(_: *mut c_void) {
    // The program's own destructors may still free memory after this; nothing of ours begins by itself any more.
    crate::hooks::memory::exiting();
    tell(bridge::engine(), ebb_layer_core::Engine::shutdown);
}

fn tell(engine: Option<&ebb_layer_core::Engine>, what: impl FnOnce(&ebb_layer_core::Engine)) {
    if let Some(engine) = engine {
        barrier::catch(AssertUnwindSafe(|| what(engine)));
    }
}
