//! Synchronous allocations, which come from the pool, and what frees them.
//!
//! `cuMemFree` waits for all work in the driver, and programs rely on it. Freeing in the pool is no fence, so the hook
//! waits first. While a stream is captured nobody may wait: such frees are put off until the last capture ends.

use core::ffi::c_void;
use core::panic::AssertUnwindSafe;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use ebb_abi::*;
use ebb_layer_core::threads;
use ebb_units::Bytes;

use crate::barrier;
use crate::bridge::{self, Running};
use crate::hooks::{capture, external, forbidden, graphs, pools, share, with};
use crate::symbols::real;

/// The driver's pitch of rows: each begins at a multiple of this.
const PITCH: usize = 512;

/// What our own code decided about a call.
enum Answer<T> {
    /// This is the result.
    Ours(T),
    /// This is the error.
    Code(CUresult),
}

fn allocate(running: &Running, size: usize) -> Option<Answer<u64>> {
    let (index, context) = running.here()?;
    if let Some(code) = forbidden::refused(running) {
        return Some(Answer::Code(code));
    }
    match running.engine.alloc(index, size as u64, context.0 as u64) {
        Ok(ptr) => Some(Answer::Ours(ptr)),
        Err(error) => bridge::alloc_code(error).map(Answer::Code),
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytesize: usize) -> CUresult {
    if !dptr.is_null() && bytesize != 0 {
        match with(|running| allocate(running, bytesize)) {
            Some(Answer::Ours(ptr)) => {
                // SAFETY: not null, and the program's place for the answer.
                unsafe { dptr.write(CUdeviceptr(ptr)) };
                return CUresult::SUCCESS;
            }
            Some(Answer::Code(code)) => return code,
            None => {}
        }
    }
    // Nothing to allocate, no place for it, no context, no engine: the driver knows what to answer.
    // SAFETY: the program's own call.
    unsafe { real::cuMemAlloc_v2(dptr, bytesize) }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemAllocPitch_v2(
    dptr: *mut CUdeviceptr,
    pPitch: *mut usize,
    WidthInBytes: usize,
    Height: usize,
    ElementSizeBytes: u32,
) -> CUresult {
    let legal = !dptr.is_null() && !pPitch.is_null() && matches!(ElementSizeBytes, 4 | 8 | 16);
    let pitch = WidthInBytes.checked_next_multiple_of(PITCH);
    if legal
        && let Some(pitch) = pitch
        && let Some(size) = pitch.checked_mul(Height)
        && size != 0
    {
        match with(|running| allocate(running, size)) {
            Some(Answer::Ours(ptr)) => {
                // SAFETY: neither is null, and both are the program's places for the answer.
                unsafe {
                    dptr.write(CUdeviceptr(ptr));
                    pPitch.write(pitch);
                }
                return CUresult::SUCCESS;
            }
            Some(Answer::Code(code)) => return code,
            None => {}
        }
    }
    // SAFETY: the program's own call.
    unsafe { real::cuMemAllocPitch_v2(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes) }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemFree_v2(dptr: CUdeviceptr) -> CUresult {
    match with(|running| free_ours(running, dptr.0)) {
        Some(code) => code,
        None => {
            // SAFETY: the program's own call.
            let result = unsafe { real::cuMemFree_v2(dptr) };
            if result.is_success() {
                external::gone(external::Id::Pointer(dptr.0));
                pools::freed_by_driver();
            }
            result
        }
    }
}

/// Frees memory of ours; `None` if it is not.
fn free_ours(running: &Running, ptr: u64) -> Option<CUresult> {
    if ptr == 0 {
        return None;
    }
    if let Some(freed) = pools::free_plainly(running, ptr) {
        return Some(freed);
    }
    let found = running.engine.lookup(ptr);
    if found.is_none() && !running.engine.contains(ptr) {
        return None;
    }
    let Some(allocation) = found.filter(|allocation| allocation.base == ptr && !is_pending(ptr)) else {
        return Some(CUresult::ERROR_INVALID_VALUE);
    };
    let waited = capture::without_captures(|| {
        running.quiesce(allocation.device)?;
        forbidden::free_pieces();
        Ok(())
    });
    match waited {
        Some(Ok(())) => {}
        // An error of earlier work, which the driver's own free would report as well. The context is lost then.
        Some(Err(error)) => return bridge::device_code(error),
        None if capture::put_off(ptr, || set_pending(ptr)) => return Some(CUresult::SUCCESS),
        // The capture has just ended.
        None => return free_ours(running, ptr),
    }
    share::sync::freed(&allocation);
    match running.engine.free_of(&allocation) {
        Ok(()) => Some(CUresult::SUCCESS),
        Err(error) => bridge::free_code(error),
    }
}

/// Frees that wait for the end of a capture or for a place in a stream.
static PENDING: Mutex<Option<HashSet<u64>>> = Mutex::new(None);
static PENDING_COUNT: AtomicUsize = AtomicUsize::new(0);

fn pending() -> MutexGuard<'static, Option<HashSet<u64>>> {
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_pending(ptr: u64) -> bool {
    PENDING_COUNT.load(Ordering::Acquire) != 0 && pending().as_ref().is_some_and(|set| set.contains(&ptr))
}

fn set_pending(ptr: u64) -> bool {
    let new = pending().get_or_insert_default().insert(ptr);
    PENDING_COUNT.fetch_add(usize::from(new), Ordering::AcqRel);
    new
}

fn no_longer_pending(ptr: u64) -> bool {
    let was = pending().as_mut().is_some_and(|set| set.remove(&ptr));
    PENDING_COUNT.fetch_sub(usize::from(was), Ordering::AcqRel);
    was
}

/// After the last capture ended: the frees that were put off.
pub(crate) fn free_what_was_put_off(running: &Running, put_off: &[u64]) {
    let mut waited: Vec<usize> = Vec::new();
    for &ptr in put_off {
        let Some(allocation) = running.lookup(ptr).filter(|allocation| allocation.base == ptr) else {
            no_longer_pending(ptr);
            continue;
        };
        if !waited.contains(&allocation.device) {
            match capture::without_captures(|| running.quiesce(allocation.device)) {
                Some(Ok(())) => waited.push(allocation.device),
                // A lost context, or the next capture: still pending, for the next end of a capture.
                Some(Err(_)) | None => {
                    capture::put_off_again(ptr);
                    continue;
                }
            }
        }
        no_longer_pending(ptr);
        share::sync::freed(&allocation);
        // Nobody is left to be told; the engine has noted what went wrong.
        let _ = running.engine.free(ptr);
    }
}

/// Addresses whose place in a stream was reached, to the thread that frees them. Started at the first.
static REACHED: OnceLock<Option<Sender<u64>>> = OnceLock::new();

/// Set when `exit` has begun: no driver call begins by itself any more.
static EXITING: AtomicBool = AtomicBool::new(false);

/// Whether `exit` has begun.
pub(crate) fn is_exiting() -> bool {
    EXITING.load(Ordering::SeqCst)
}

/// `exit` has begun.
pub(crate) fn exiting() {
    EXITING.store(true, Ordering::SeqCst);
}

fn start_freeing(running: &'static Running) -> Option<Sender<u64>> {
    let (sender, reached) = channel::<u64>();
    let free = move || {
        for ptr in reached {
            if EXITING.load(Ordering::SeqCst) {
                return;
            }
            barrier::catch(AssertUnwindSafe(|| {
                no_longer_pending(ptr);
                if let Some(allocation) = running.lookup(ptr) {
                    share::sync::freed(&allocation);
                }
                let _ = running.engine.free(ptr);
            }));
        }
    };
    threads::spawn("ebb-free", free).ok().map(|_| sender)
}

/// Called by the driver, on a thread of its own, when everything before the free has run. It must not call the driver.
unsafe extern "C" fn reached(data: *mut c_void) {
    barrier::catch(|| {
        if let Some(Some(sender)) = REACHED.get() {
            // The receiver is gone only at exit.
            let _ = sender.send(data.addr() as u64);
        }
    });
}

/// Enqueues a free of our memory on a stream; `None` if the memory is not ours.
fn free_async(running: &'static Running, ptr: u64, stream: CUstream) -> Option<CUresult> {
    if ptr == 0 {
        return None;
    }
    if let Some(freed) = pools::free_async(running, ptr, stream) {
        return Some(freed);
    }
    if !running.engine.contains(ptr) {
        return None;
    }
    if running
        .lookup(ptr)
        .is_none_or(|allocation| allocation.base != ptr)
    {
        return Some(CUresult::ERROR_INVALID_VALUE);
    }
    let table = &running.table;
    let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a valid place for the answer; the driver checks the stream.
    let known = unsafe { table.cuStreamIsCapturing(stream, &raw mut status) };
    if !known.is_success() {
        return Some(known);
    }
    if status != CU_STREAM_CAPTURE_STATUS_NONE {
        // A graph can free only what a graph or a pool has allocated.
        return Some(CUresult::ERROR_INVALID_VALUE);
    }
    if !set_pending(ptr) {
        return Some(CUresult::ERROR_INVALID_VALUE);
    }
    if REACHED.get_or_init(|| start_freeing(running)).is_none() {
        // No thread to be had: wait here. Slower, and as right.
        // SAFETY: the program's stream, which the driver has just accepted.
        let waited = unsafe { table.cuStreamSynchronize(stream) };
        no_longer_pending(ptr);
        if waited.is_success() {
            let _ = running.engine.free(ptr);
        }
        return Some(waited);
    }
    let data = core::ptr::without_provenance_mut(Bytes(ptr).to_usize());
    // SAFETY: the program's stream; a function that keeps to the rules of such functions; its data is a number.
    let enqueued = unsafe { table.cuLaunchHostFunc(stream, Some(reached), data) };
    if !enqueued.is_success() {
        no_longer_pending(ptr);
    }
    Some(enqueued)
}

macro_rules! free_async {
    ($name:ident, $stream:expr) => {
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(dptr: CUdeviceptr, hStream: CUstream) -> CUresult {
            let default: CUstream = $stream;
            let stream = if hStream.is_null() { default } else { hStream };
            match with(|running| free_async(running, dptr.0, stream)) {
                Some(code) => code,
                None => {
                    // SAFETY: the program's own call.
                    let result = unsafe { real::$name(dptr, hStream) };
                    if result.is_success() {
                        if capture::any() {
                            graphs::freed(dptr.0);
                        }
                        external::gone(external::Id::Pointer(dptr.0));
                        pools::freed_by_driver();
                    }
                    result
                }
            }
        }
    };
}
free_async!(cuMemFreeAsync, CUstream::NULL);
free_async!(cuMemFreeAsync_ptsz, CU_STREAM_PER_THREAD);

// The first versions take addresses of 32 bits. The pool has none below 4 GiB, so the driver serves them.

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemAlloc(dptr: *mut u32, bytesize: u32) -> CUresult {
    // SAFETY: the program's own call.
    unsafe { real::cuMemAlloc(dptr, bytesize) }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemAllocPitch(
    dptr: *mut u32,
    pPitch: *mut u32,
    WidthInBytes: u32,
    Height: u32,
    ElementSizeBytes: u32,
) -> CUresult {
    // SAFETY: the program's own call.
    unsafe { real::cuMemAllocPitch(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes) }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemFree(dptr: u32) -> CUresult {
    // SAFETY: the program's own call.
    unsafe { real::cuMemFree(dptr) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pending_free_is_pending_once() {
        assert!(!is_pending(64));
        assert!(set_pending(64));
        assert!(!set_pending(64));
        assert!(is_pending(64) && !is_pending(65));
        assert!(no_longer_pending(64));
        assert!(!no_longer_pending(64));
        assert!(!is_pending(64));
        assert_eq!(PENDING_COUNT.load(Ordering::Relaxed), 0);
    }
}
