//! What the library says about itself, through two exported functions: for a Python program in the same process, for
//! tests, and for `ebb doctor`.

use core::ffi::c_char;
use core::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;

use crate::library::{CUDA, NVML};
use crate::{barrier, bridge, classes};

/// The table of classes, one function a line: name, class, treatment. A string that ends with a zero byte and lives for ever.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ebb_classes() -> *const c_char {
    classes::text().as_ptr().cast()
}

/// The report of this process as JSON, cut to `size` bytes with a zero at the end; answers how many bytes all of it has.
///
/// # Safety
/// `buffer` is valid for `size` bytes, or `size` is 0.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ebb_report(buffer: *mut c_char, size: usize) -> usize {
    let text = barrier::run(AssertUnwindSafe(report)).unwrap_or_default();
    if size > 0 && !buffer.is_null() {
        let length = text.len().min(size - 1);
        // SAFETY: `length + 1` is not more than `size`, for which the buffer is valid; the text is ours.
        unsafe {
            core::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), length);
            buffer.add(length).write(0);
        }
    }
    text.len()
}

fn report() -> String {
    format!(
        "{{\"layer\":{{\"off\":{},\"running\":{},\"faults\":{},\"driver_functions\":{},\"routed\":{},\"routed_by_name\":{},\
         \"nvml_routed\":{}}},\"engine\":{}}}",
        barrier::is_off(),
        bridge::is_running(),
        barrier::FAULTS.load(Ordering::Relaxed),
        CUDA.known(),
        CUDA.routed.load(Ordering::Relaxed),
        CUDA.by_name.load(Ordering::Relaxed),
        NVML.routed.load(Ordering::Relaxed),
        bridge::engine().map_or_else(|| "null".into(), ebb_layer_core::Engine::report_json),
    )
}
