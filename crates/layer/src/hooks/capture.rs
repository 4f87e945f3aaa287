//! Stream capture: who captures, and what must not happen meanwhile.
//!
//! `cuCtxSynchronize` during a capture fails *and breaks the capture*, on any thread and in any mode. So: no eviction while a stream
//! is captured (the engine counts), no waiting for a free (it is put off), and a capture does not begin while a free waits.
//!
//! ```text
//!   waiting = 0, streams = {}  --without_captures-->  waiting > 0   --done-->  waiting = 0
//!             |                                           |
//!             +--begin--> streams = {s}                   +--begin: waits until waiting = 0
//! ```

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use ebb_abi::*;

use crate::bridge::{self, Running};
use crate::hooks::{graphs, memory, with};
use crate::symbols::real;

/// Which streams are captured. A thread's own default stream is told apart by the thread.
type Key = (CUstream, u64);

/// A capture.
#[derive(Debug)]
struct Capture {
    key: Key,
    /// The graph that it makes, which is gone if it comes to nothing. Null if that is the program's, or not known.
    makes: CUgraph,
}

#[derive(Debug)]
struct State {
    streams: Vec<Capture>,
    /// Threads that wait for the GPU at this moment and must not meet a capture.
    waiting: u32,
    /// Captures that want to begin and wait for those: nobody else is to be woken, which is a call of the kernel.
    beginning: u32,
    /// Frees for the end of the last capture.
    put_off: Vec<u64>,
}

static STATE: Mutex<State> = Mutex::new(State {
    streams: Vec::new(),
    waiting: 0,
    beginning: 0,
    put_off: Vec::new(),
});
static CHANGED: Condvar = Condvar::new();
/// How many streams are captured, for who only wants to know whether any is.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

/// Whether a stream is captured.
#[inline]
pub(crate) fn any() -> bool {
    ACTIVE.load(Ordering::Acquire) != 0
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In the child of a fork: the parent's captures are not ours. If another thread held the lock at that moment it stays held, and nobody asks
/// for it again, because the layer is off in the child.
pub(crate) fn forget_in_child() {
    if let Ok(mut state) = STATE.try_lock() {
        state.streams.clear();
        ACTIVE.store(0, Ordering::Release);
        state.put_off.clear();
        state.waiting = 0;
        state.beginning = 0;
    }
}

/// While a stream is captured, remembers a free (if `mark` says that nobody else has) and answers true.
pub(crate) fn put_off(ptr: u64, mark: impl FnOnce() -> bool) -> bool {
    let mut state = state();
    if state.streams.is_empty() {
        return false;
    }
    if mark() {
        state.put_off.push(ptr);
    }
    true
}

/// Puts a free off that is marked already.
pub(crate) fn put_off_again(ptr: u64) {
    state().put_off.push(ptr);
}

/// Does something that must not happen during a capture; `None` if there is one. A capture that wants to begin waits.
pub(crate) fn without_captures<T>(what: impl FnOnce() -> T) -> Option<T> {
    {
        let mut state = state();
        if !state.streams.is_empty() {
            return None;
        }
        state.waiting += 1;
    }
    let result = what();
    let mut state = state();
    state.waiting -= 1;
    let awaited = state.waiting == 0 && state.beginning > 0;
    drop(state);
    if awaited {
        CHANGED.notify_all();
    }
    Some(result)
}

fn key(stream: CUstream, per_thread: bool) -> Key {
    let own_default = stream == CUstream(2) || per_thread && stream.is_null();
    if own_default {
        // SAFETY: no arguments.
        let thread = unsafe { libc::pthread_self() };
        (CUstream(2), thread as u64)
    } else {
        (stream, 0)
    }
}

/// Before a capture begins.
fn begins(running: &Running, key: Key) {
    let mut state = state();
    state.beginning += 1;
    while state.waiting > 0 {
        state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    state.beginning -= 1;
    state.streams.push(Capture {
        key,
        makes: CUgraph::NULL,
    });
    ACTIVE.store(state.streams.len(), Ordering::Release);
    drop(state);
    running.engine.capture_begin();
}

/// A capture has begun that makes a graph.
fn begun(running: &Running, key: Key) {
    let (mut status, mut graph) = (CU_STREAM_CAPTURE_STATUS_NONE, CUgraph::NULL);
    // SAFETY: valid places, or null for what is not wanted.
    let known = unsafe {
        running.table.cuStreamGetCaptureInfo_v2(
            key.0,
            &raw mut status,
            core::ptr::null_mut(),
            &raw mut graph,
            core::ptr::null_mut(),
            core::ptr::null_mut(),
        )
    };
    if known.is_success()
        && let Some(capture) = state().streams.iter_mut().find(|capture| capture.key == key)
    {
        capture.makes = graph;
    }
}

/// A capture is over, or did not begin. `came`: it came to a graph.
fn ended(running: &Running, key: Key, came: bool) {
    let mut state = state();
    let Some(at) = state.streams.iter().position(|capture| capture.key == key) else {
        return;
    };
    let capture = state.streams.swap_remove(at);
    ACTIVE.store(state.streams.len(), Ordering::Release);
    let put_off = if state.streams.is_empty() {
        core::mem::take(&mut state.put_off)
    } else {
        Vec::new()
    };
    drop(state);
    running.engine.capture_end();
    if !came && !capture.makes.is_null() {
        graphs::gone(capture.makes);
    }
    if !put_off.is_empty() {
        memory::free_what_was_put_off(running, &put_off);
    }
}

/// After the driver was asked to end a capture: whether it is over. It is not if another thread must end it.
fn is_over(running: &Running, stream: CUstream) -> bool {
    let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a valid place for the answer; the driver checks the stream.
    let known = unsafe { running.table.cuStreamIsCapturing(stream, &raw mut status) };
    !known.is_success() || status == CU_STREAM_CAPTURE_STATUS_NONE
}

macro_rules! begin {
    ($($name:ident $per_thread:literal $makes:literal ($($parameter:ident: $ty:ty),*);)*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(hStream: CUstream $(, $parameter: $ty)*) -> CUresult {
            let key = key(hStream, $per_thread);
            let counted = with(|running| { begins(running, key); Some(()) }).is_some();
            // SAFETY: the program's own call.
            let result = unsafe { real::$name(hStream $(, $parameter)*) };
            if counted && !result.is_success() {
                tell(|running| ended(running, key, true));
            } else if counted && $makes {
                tell(|running| begun(running, key));
            }
            result
        }
    )*};
}
// Whether the stream is the thread's own, and whether the capture makes a graph of its own.
begin! {
    cuStreamBeginCapture false true ();
    cuStreamBeginCapture_ptsz true true ();
    cuStreamBeginCapture_v2 false true (mode: CUstreamCaptureMode);
    cuStreamBeginCapture_v2_ptsz true true (mode: CUstreamCaptureMode);
    cuStreamBeginCaptureToGraph false false (
        hGraph: CUgraph, dependencies: *const CUgraphNode, dependencyData: *const CUgraphEdgeData, numDependencies: usize,
        mode: CUstreamCaptureMode);
    cuStreamBeginCaptureToGraph_ptsz true false (
        hGraph: CUgraph, dependencies: *const CUgraphNode, dependencyData: *const CUgraphEdgeData, numDependencies: usize,
        mode: CUstreamCaptureMode);
    cuStreamBeginRecaptureToGraph false false (
        mode: CUstreamCaptureMode, hGraph: CUgraph, callbackFunc: CUgraphRecaptureCallback, userData: *mut c_void);
    cuStreamBeginRecaptureToGraph_ptsz true false (
        mode: CUstreamCaptureMode, hGraph: CUgraph, callbackFunc: CUgraphRecaptureCallback, userData: *mut c_void);
    cuStreamBeginCaptureToCig false false (streamCigCaptureParams: *mut CUstreamCigCaptureParams);
    cuStreamBeginCaptureToCig_ptsz true false (streamCigCaptureParams: *mut CUstreamCigCaptureParams);
}

macro_rules! end {
    ($($name:ident $per_thread:literal ($($parameter:ident: $ty:ty),*);)*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(hStream: CUstream $(, $parameter: $ty)*) -> CUresult {
            // SAFETY: the program's own call.
            let result = unsafe { real::$name(hStream $(, $parameter)*) };
            let key = key(hStream, $per_thread);
            tell(|running| {
                if result.is_success() || is_over(running, key.0) {
                    ended(running, key, result.is_success());
                }
            });
            result
        }
    )*};
}
end! {
    cuStreamEndCapture false (phGraph: *mut CUgraph);
    cuStreamEndCapture_ptsz true (phGraph: *mut CUgraph);
    cuStreamEndCaptureToCig false ();
    cuStreamEndCaptureToCig_ptsz true ();
}

/// A stream was destroyed, or could not be: one that was captured is so no longer.
pub(crate) fn stream_destroyed(stream: CUstream, result: CUresult) {
    if !any() {
        return;
    }
    let key = key(stream, false);
    tell(|running| {
        if result.is_success() || is_over(running, key.0) {
            ended(running, key, false);
        }
    });
}

fn tell(what: impl FnOnce(&Running)) {
    if bridge::is_running() {
        with(|running| {
            what(running);
            Some(())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_own_stream_is_told_apart() {
        let mine = key(CUstream(2), false);
        assert_eq!(mine, key(CUstream::NULL, true));
        assert_eq!(key(CUstream::NULL, false), (CUstream::NULL, 0));
        let other = std::thread::spawn(|| key(CUstream(2), false)).join().unwrap();
        assert_ne!(mine, other);
    }

    #[test]
    fn nobody_waits_during_a_capture() {
        assert_eq!(without_captures(|| 1), Some(1));
        assert!(!put_off(8, || true));
        state().streams.push(Capture {
            key: (CUstream(16), 0),
            makes: CUgraph::NULL,
        });
        assert_eq!(without_captures(|| 1), None);
        assert!(put_off(8, || true));
        assert_eq!(state().put_off, [8]);
        let mut state = state();
        state.streams.clear();
        state.put_off.clear();
    }
}
