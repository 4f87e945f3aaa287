//! The caller of a C function, and what its pointers may be used for.

use std::ffi::CStr;

use ebb_abi::{CUresult, c_char};

use crate::R;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;

/// The program on the other side of a call.
///
/// Holding one tells you: a call of the C interface is on, and every pointer among its arguments is null or good for what
/// the interface says it is for, until the call returns. That is the program's promise, given where the value is made
/// ([`Caller::new`]), so that reading and writing through the arguments needs no further argument here. Pointers
/// that do not come from the call's arguments must not be given to it.
#[derive(Debug)]
pub(crate) struct Caller {
    /// The zero stream of this call is the calling thread's own.
    pub(crate) per_thread: bool,
}

impl Caller {
    /// # Safety
    /// The call's arguments are as the driver's interface demands.
    pub(crate) unsafe fn new(per_thread: bool) -> Self {
        Self { per_thread }
    }

    /// Answers through an argument that must not be null.
    pub(crate) fn put<T>(&self, place: *mut T, value: T) -> R {
        if place.is_null() {
            return Err(INVALID);
        }
        // SAFETY: not null, and by the type's invariant good for one value.
        unsafe { place.write_unaligned(value) };
        Ok(())
    }

    /// Answers through an argument that may be null.
    pub(crate) fn put_optional<T>(&self, place: *mut T, value: T) {
        let _ = self.put(place, value);
    }

    /// Reads an argument that must not be null.
    pub(crate) fn get<T: Copy>(&self, place: *const T) -> Result<T, CUresult> {
        if place.is_null() {
            return Err(INVALID);
        }
        // SAFETY: not null, and by the type's invariant good for one value.
        Ok(unsafe { place.read_unaligned() })
    }

    /// Reads an array of `count` values; null is an empty array if `count` is zero.
    pub(crate) fn array<T: Copy>(&self, place: *const T, count: usize) -> Result<Vec<T>, CUresult> {
        if count == 0 {
            return Ok(Vec::new());
        }
        // No list of a real program is so long: a number that is a mistake.
        if place.is_null() || count > 1 << 24 {
            return Err(INVALID);
        }
        // SAFETY: not null, and by the type's invariant good for `count` values; each read stays inside.
        Ok((0..count)
            .map(|index| unsafe { place.add(index).read_unaligned() })
            .collect())
    }

    /// Answers an array: as many of `values` as `room` allows.
    pub(crate) fn put_array<T: Copy>(&self, place: *mut T, room: usize, values: &[T]) -> R {
        for (index, value) in values.iter().take(room).enumerate() {
            if place.is_null() {
                return Err(INVALID);
            }
            // SAFETY: not null, and by the type's invariant good for `room` values; `index` is below it.
            unsafe { place.add(index).write_unaligned(*value) };
        }
        Ok(())
    }

    /// Reads a text.
    pub(crate) fn text(&self, place: *const c_char) -> Result<&str, CUresult> {
        if place.is_null() {
            return Err(INVALID);
        }
        // SAFETY: not null, and by the type's invariant a string with its zero, unchanged during the call.
        unsafe { CStr::from_ptr(place) }.to_str().map_err(|_| INVALID)
    }

    /// Answers a text in a buffer of `room` bytes, cut to fit, always with its zero.
    pub(crate) fn put_text(&self, place: *mut c_char, room: usize, text: &str) -> R {
        if place.is_null() || room == 0 {
            return Err(INVALID);
        }
        let mut bytes: Vec<c_char> = text.bytes().take(room - 1).map(|byte| byte as c_char).collect();
        bytes.push(0);
        self.put_array(place, room, &bytes)
    }
}
