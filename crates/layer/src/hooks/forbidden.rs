//! Whether a capture forbids an allocation: only the driver knows.
//!
//! An allocation from the pool asks the driver nothing. Yet in a capture that is not relaxed the driver refuses `cuMemAlloc` and breaks the
//! capture, and programs rely on hearing so. While any stream is captured the driver is therefore asked for the smallest piece, and what it
//! refuses is refused. Freeing a piece waits for the device, as every free does: they go when the program has waited for a free of its own.
//!
//! # Locks
//! `PIECES`, held for a look, under no other and no call of the driver.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::{CUcontext, CUdeviceptr, CUresult};

use crate::bridge::Running;
use crate::hooks::capture;
use crate::symbols::real;

/// What the driver gave when it was asked, with the context that it belongs to.
static PIECES: Mutex<Vec<(CUcontext, CUdeviceptr)>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn pieces() -> MutexGuard<'static, Vec<(CUcontext, CUdeviceptr)>> {
    PIECES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The driver's code, if it refuses an allocation at this moment for another reason than room.
pub(crate) fn refused(running: &Running) -> Option<CUresult> {
    if capture::any() { ask(running) } else { None }
}

#[cold]
fn ask(running: &Running) -> Option<CUresult> {
    let context = running.current_context()?;
    let mut piece = CUdeviceptr::NULL;
    // SAFETY: a valid place for the answer.
    let result = unsafe { real::cuMemAlloc_v2(&raw mut piece, 1) };
    match result {
        CUresult::SUCCESS => {
            keep(context, piece);
            None
        }
        // The pool may have room, and knows how to make some.
        CUresult::ERROR_OUT_OF_MEMORY => None,
        code => Some(code),
    }
}

fn keep(context: CUcontext, piece: CUdeviceptr) {
    let mut pieces = pieces();
    pieces.push((context, piece));
    COUNT.store(pieces.len(), Ordering::Release);
}

fn take_all() -> Vec<(CUcontext, CUdeviceptr)> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Vec::new();
    }
    let mut pieces = pieces();
    COUNT.store(0, Ordering::Release);
    core::mem::take(&mut *pieces)
}

/// Frees the pieces. No stream is captured, and the caller has just waited for the device.
pub(crate) fn free_pieces() {
    for (_, piece) in take_all() {
        // Nobody is left to be told of a failure: the piece ends with its context.
        // SAFETY: memory of ours that the driver gave, in a context that still lives, freed once.
        let _ = unsafe { real::cuMemFree_v2(piece) };
    }
}

/// A context goes, and its pieces with it: their addresses may be somebody else's soon.
pub(crate) fn context_goes(context: CUcontext) {
    if COUNT.load(Ordering::Acquire) != 0 {
        let mut pieces = pieces();
        pieces.retain(|(of, _)| *of != context);
        COUNT.store(pieces.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_context_are_forgotten_with_it() {
        let (a, b) = (CUcontext(16), CUcontext(32));
        keep(a, CUdeviceptr(512));
        keep(b, CUdeviceptr(1024));
        context_goes(a);
        assert_eq!(take_all(), [(b, CUdeviceptr(1024))]);
        assert!(take_all().is_empty());
    }
}
