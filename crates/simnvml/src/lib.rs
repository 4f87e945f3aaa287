//! The simulated GPU's `libnvidia-ml.so.1`: devices, memory and processes as the shared ledger has them.
//!
//! It looks and never holds: a process that loads it takes no slot in the ledger. Devices are the physical ones in bus
//! order; `CUDA_VISIBLE_DEVICES` does not count, as with the real library.

#![allow(non_snake_case, reason = "functions carry NVML's names")]

mod device;
mod export;
mod place;
mod private;
mod process;
mod system;

pub(crate) use ebb_abi::nvml::*;

/// What a call comes to.
pub(crate) type R = Result<(), nvmlReturn_t>;

/// Answers through an argument.
///
/// # Safety
/// `place` is null or good for one value.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) -> R {
    if place.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, and good for one value by the caller's promise.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

/// Answers a text in a buffer.
///
/// # Safety
/// `place` is null or good for `room` bytes.
pub(crate) unsafe fn put_text(place: *mut ebb_abi::c_char, room: u32, text: &str) -> R {
    if place.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    if text.len() >= room as usize {
        return Err(NVML_ERROR_INSUFFICIENT_SIZE);
    }
    // SAFETY: the buffer is good for `room` bytes, which is more than the text and its zero take.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), place.cast::<u8>(), text.len());
        place.add(text.len()).write(0);
    }
    Ok(())
}

/// Reads a text argument.
///
/// # Safety
/// `place` is null or a string with its zero, unchanged during the call.
pub(crate) unsafe fn text<'a>(place: *const ebb_abi::c_char) -> Result<&'a str, nvmlReturn_t> {
    if place.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, and a string by the caller's promise.
    unsafe { std::ffi::CStr::from_ptr(place) }
        .to_str()
        .map_err(|_| NVML_ERROR_INVALID_ARGUMENT)
}
