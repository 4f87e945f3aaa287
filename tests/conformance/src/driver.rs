//! [`Driver`]: every function of the driver as a method, found by `dlopen` and `dlsym` as a program that knows nothing of
//! any interposer finds them.
//!
//! The methods take what the driver takes, bad pointers included, because behaviours pass those on purpose; each behaviour
//! runs in a process of its own, so that a crash is that behaviour's result and nobody else's. Before every call stands
//! [`evict::between_calls`], which in one of the modes takes the memory off the card.

#![allow(
    non_snake_case,
    dead_code,
    clippy::too_many_arguments,
    reason = "the names, the number and the parameters are the driver's own"
)]

use std::ffi::{CStr, CString, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use ebb_abi::*;

use crate::evict;
use crate::observe::Skip;

/// The driver. There is one in a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Driver;

macro_rules! methods {
    ($($name:ident($($parameter:ident: $ty:ty),*);)*) => {
        impl Driver {
            $(
                pub(crate) fn $name(self, $($parameter: $ty),*) -> CUresult {
                    static AT: AtomicUsize = AtomicUsize::new(0);
                    let at = found(&AT, stringify!($name));
                    evict::between_calls();
                    type Function = unsafe extern "C" fn($($ty),*) -> CUresult;
                    // SAFETY: `at` is the driver's function of this name, whose C signature this line of the list is.
                    let function = unsafe { std::mem::transmute::<usize, Function>(at) };
                    // SAFETY: the behaviour passes live places, or bad ones whose refusal is what it looks at; see the
                    // module's words on crashes.
                    unsafe { function($($parameter),*) }
                }
            )*
        }
    };
}
for_each_driver_function!(methods);

/// The open driver library, or why there is none.
pub(crate) fn library() -> Result<*mut c_void, String> {
    static LIBRARY: OnceLock<Result<usize, String>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| {
            // SAFETY: the name is a C string; loading a driver runs its constructors, which is what a program does.
            let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
            if library.is_null() {
                // SAFETY: after a failed dlopen there is a message, a C string that lives until the next call.
                let why = unsafe { CStr::from_ptr(libc::dlerror()) };
                Err(why.to_string_lossy().into_owned())
            } else {
                Ok(library as usize)
            }
        })
        .clone()
        .map(|address| address as *mut c_void)
}

/// The driver's symbol, or null.
pub(crate) fn symbol(name: &str) -> *mut c_void {
    let (Ok(library), Ok(name)) = (library(), CString::new(name)) else {
        return std::ptr::null_mut();
    };
    // SAFETY: the handle is never closed; the name is a C string.
    unsafe { libc::dlsym(library, name.as_ptr()) }
}

fn found(at: &AtomicUsize, name: &'static str) -> usize {
    let known = at.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let symbol = symbol(name);
    if symbol.is_null() {
        std::panic::panic_any(Skip(format!("this driver has no {name}")));
    }
    at.store(symbol as usize, Ordering::Relaxed);
    symbol as usize
}
