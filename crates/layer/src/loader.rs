//! `dlsym` and `dlvsym`: how look-ups through the loader are seen.
//!
//! The loader tells callers apart by the return address: `RTLD_NEXT` means "after the object that calls", and `RTLD_DEFAULT`
//! begins at its scope. So both are assembly that asks [`filter`], and then either returns its answer or *jumps* to the C
//! library's function with the stack and registers as they came. A look-up of any other name costs one comparison of three bytes.
//!
//! `std` itself calls `dlsym` in its start-up of threads: the filter takes no lock, allocates nothing and cannot panic for other names.

use core::ffi::{CStr, c_char, c_void};
use core::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;

use crate::library::{CUDA, Library, NVML};
use crate::{barrier, elf};

/// What the assembly does next: `jump` with everything as it came, or return `value`.
#[repr(C)]
pub(crate) struct Verdict {
    value: usize,
    jump: usize,
}

const RTLD_NEXT: usize = usize::MAX;

#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlsym(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        "push rsi",
        ".cfi_adjust_cfa_offset 8",
        "sub rsp, 8",
        ".cfi_adjust_cfa_offset 8",
        "mov rdx, [rsp + 24]",
        "call {filter}",
        "add rsp, 8",
        ".cfi_adjust_cfa_offset -8",
        "pop rsi",
        ".cfi_adjust_cfa_offset -8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        "test rdx, rdx",
        "jne 2f",
        "ret",
        "2: jmp rdx",
        ".cfi_endproc",
        filter = sym dlsym_filter,
    )
}

#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlvsym(
    _handle: *mut c_void,
    _name: *const c_char,
    _version: *const c_char,
) -> *mut c_void {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        "push rsi",
        ".cfi_adjust_cfa_offset 8",
        "push rdx",
        ".cfi_adjust_cfa_offset 8",
        "mov rcx, [rsp + 24]",
        "call {filter}",
        "mov rcx, rdx",
        "pop rdx",
        ".cfi_adjust_cfa_offset -8",
        "pop rsi",
        ".cfi_adjust_cfa_offset -8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        "test rcx, rcx",
        "jne 2f",
        "ret",
        "2: jmp rcx",
        ".cfi_endproc",
        filter = sym dlvsym_filter,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlsym(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-32]!",
        ".cfi_adjust_cfa_offset 32",
        ".cfi_rel_offset x29, 0",
        ".cfi_rel_offset x30, 8",
        "stp x0, x1, [sp, #16]",
        "mov x2, x30",
        "bl {filter}",
        "mov x9, x0",
        "mov x10, x1",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        ".cfi_adjust_cfa_offset -32",
        "cbnz x10, 2f",
        "mov x0, x9",
        "ret",
        "2: br x10",
        ".cfi_endproc",
        filter = sym dlsym_filter,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlvsym(
    _handle: *mut c_void,
    _name: *const c_char,
    _version: *const c_char,
) -> *mut c_void {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-48]!",
        ".cfi_adjust_cfa_offset 48",
        ".cfi_rel_offset x29, 0",
        ".cfi_rel_offset x30, 8",
        "stp x0, x1, [sp, #16]",
        "str x2, [sp, #32]",
        "mov x3, x30",
        "bl {filter}",
        "mov x9, x0",
        "mov x10, x1",
        "ldp x0, x1, [sp, #16]",
        "ldr x2, [sp, #32]",
        "ldp x29, x30, [sp], #48",
        ".cfi_adjust_cfa_offset -48",
        "cbnz x10, 2f",
        "mov x0, x9",
        "ret",
        "2: br x10",
        ".cfi_endproc",
        filter = sym dlvsym_filter,
    )
}

unsafe extern "C" fn dlsym_filter(handle: usize, name: *const c_char, caller: usize) -> Verdict {
    // SAFETY: the caller of `dlsym` passed a name that ends with a zero byte, or null.
    unsafe { filter(elf::real_dlsym(), handle, name, core::ptr::null(), caller) }
}

unsafe extern "C" fn dlvsym_filter(
    handle: usize,
    name: *const c_char,
    version: *const c_char,
    caller: usize,
) -> Verdict {
    // SAFETY: as above, for both strings.
    unsafe { filter(elf::real_dlvsym(), handle, name, version, caller) }
}

/// Which library a name could belong to.
///
/// # Safety
/// `name` is null or ends with a zero byte.
unsafe fn owner_of(name: *const c_char) -> Option<&'static Library> {
    if name.is_null() {
        return None;
    }
    // SAFETY: each byte is read only if the one before it was not the terminator.
    let at = |index: usize| unsafe { name.add(index).cast::<u8>().read() };
    match at(0) {
        b'c' if at(1) == b'u' && at(2).is_ascii_uppercase() => Some(&CUDA),
        b'n' if at(1) == b'v' && at(2) == b'm' && at(3) == b'l' && at(4).is_ascii_uppercase() => Some(&NVML),
        _ => None,
    }
}

/// # Safety
/// `name` and `version` are null or end with a zero byte.
unsafe fn filter(
    real: usize,
    handle: usize,
    name: *const c_char,
    version: *const c_char,
    caller: usize,
) -> Verdict {
    let forward = Verdict { value: 0, jump: real };
    if real == 0 {
        // Not a glibc that we know. There is nothing to forward to: as if the symbol did not exist.
        return Verdict { value: 0, jump: 0 };
    }
    // SAFETY: this function's contract.
    let Some(library) = (unsafe { owner_of(name) }) else {
        return forward;
    };
    // An interposer asks for what comes after it: it gets that, or two of us would call each other for ever.
    if handle == RTLD_NEXT {
        return forward;
    }
    // SAFETY: `owner_of` found a string of at least three bytes.
    let name = unsafe { CStr::from_ptr(name) };
    let look_up = || {
        let ask = |handle: usize| {
            // SAFETY: both strings end with a zero byte; `real` is the C library's function.
            unsafe { call(real, handle, name, version) }
        };
        library.route_look_up(name, handle, caller, &ask)
    };
    match barrier::catch(AssertUnwindSafe(look_up)) {
        Some(Some(value)) => Verdict { value, jump: 0 },
        _ => forward,
    }
}

/// Calls the C library's `dlsym` or `dlvsym` as ourselves.
///
/// # Safety
/// `real` is one of the two, and takes `version` if that is not null. `version` ends with a zero byte.
#[inline(never)]
unsafe fn call(real: usize, handle: usize, name: &CStr, version: *const c_char) -> usize {
    let handle = core::ptr::without_provenance_mut::<c_void>(handle);
    // A third argument that `dlsym` does not know does no harm in either calling convention.
    // SAFETY: the address of a C function of this signature, by the contract.
    let real: unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void =
        unsafe { core::mem::transmute(real) };
    // SAFETY: the function's own contract: strings end with a zero byte; any handle is answered with null at worst
    // as far as the program's own call would have been.
    let found = unsafe { real(handle, name.as_ptr(), version) };
    // Not a tail call: the return address must be ours.
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    found.addr()
}

/// The next definition of a name after this library in the loader's order, 0 if none.
pub(crate) fn next(name: &CStr) -> usize {
    in_object(RTLD_NEXT, name)
}

/// The definition of a name behind a handle of `dlopen`, 0 if none.
pub(crate) fn in_object(handle: usize, name: &CStr) -> usize {
    match elf::real_dlsym() {
        0 => 0,
        // SAFETY: the C library's `dlsym`; the handle is `RTLD_NEXT` or one that `dlopen` gave and that is never closed.
        real => unsafe { call(real, handle, name, core::ptr::null()) },
    }
}
