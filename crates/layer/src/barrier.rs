//! The barrier between our faults and the program, and the way through the gate.
//!
//! A panic of ours is caught, counted, and ends what the layer takes on in this process: everything new goes to the
//! driver as if we were not there (memory that is ours already is still found, freed and brought back). Cancelling a thread must not unwind through
//! a `catch_unwind`, which would end the program: where our own code may block, cancelling is put off until it is done ([`run`]).

use core::ffi::c_int;
use std::panic::{AssertUnwindSafe, UnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use ebb_abi::CUresult;
use ebb_layer_core::{CallGate, DeviceSet, Gate, Knock};

use crate::bridge;

/// The process's gate. It exists before the engine, and costs nothing until somebody passes it.
pub(crate) static GATE: Gate = Gate::new();

/// The gate of all other calls of the driver: closed while the driver may be checkpointed.
pub(crate) static CALLS: CallGate = CallGate::new();

/// Panics of our own that were caught.
pub(crate) static FAULTS: AtomicU64 = AtomicU64::new(0);

/// Whether hooks do anything.
static MODE: AtomicU8 = AtomicU8::new(UNKNOWN);
/// The environment has not been read.
const UNKNOWN: u8 = 0;
/// Hooks work.
const ON: u8 = 1;
/// `EBB=off`.
const OFF: u8 = 2;

/// Whether the layer is switched off by the environment.
pub(crate) fn is_off() -> bool {
    match MODE.load(Ordering::Relaxed) {
        UNKNOWN => {
            // SAFETY: a literal; the C library's `getenv` takes no lock, and the value is read at once.
            let value = unsafe { libc::getenv(c"EBB".as_ptr()) };
            let off = !value.is_null() && {
                // SAFETY: a string of the environment, which ends with a zero byte.
                let text = unsafe { core::ffi::CStr::from_ptr(value) }.to_bytes();
                matches!(text, b"off" | b"OFF" | b"0" | b"no" | b"false")
            };
            let mode = if off { OFF } else { ON };
            quiet_panics();
            MODE.store(mode, Ordering::Relaxed);
            off
        }
        mode => mode == OFF,
    }
}

/// Runs our own code; `None` if it panicked, after which the layer takes on nothing new.
#[inline]
pub(crate) fn catch<T>(code: impl FnOnce() -> T + UnwindSafe) -> Option<T> {
    match catch_unwind(code) {
        Ok(value) => Some(value),
        Err(payload) => {
            fault();
            // Dropping a payload may panic again.
            core::mem::forget(payload);
            None
        }
    }
}

#[cold]
fn fault() {
    FAULTS.fetch_add(1, Ordering::Relaxed);
    if let Err(payload) = catch_unwind(bridge::give_up) {
        core::mem::forget(payload);
    }
}

/// Runs our own code that may block, with the thread safe from being cancelled. `None` if it panicked.
pub(crate) fn run<T>(code: impl FnOnce() -> T) -> Option<T> {
    let before = set_cancel_state(PTHREAD_CANCEL_DISABLE);
    let result = catch(AssertUnwindSafe(code));
    if before != PTHREAD_CANCEL_DISABLE {
        set_cancel_state(before);
    }
    result
}

/// Makes a real call with the thread safe from being cancelled: for hooks that hold something across it. None of the calls
/// that they make waits for anything that a cancelling thread would be needed for.
pub(crate) fn uncancelled<T>(call: impl FnOnce() -> T) -> T {
    let before = set_cancel_state(PTHREAD_CANCEL_DISABLE);
    let result = call();
    if before != PTHREAD_CANCEL_DISABLE {
        set_cancel_state(before);
    }
    result
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

fn set_cancel_state(state: c_int) -> c_int {
    let mut before = 0;
    // SAFETY: a state of the two that exist, and a place for the old one. Enabling again does not act upon a pending
    // cancellation by itself in deferred mode, and in asynchronous mode there is nothing of ours on the stack to drop.
    unsafe { pthread_setcancelstate(state, &raw mut before) };
    before
}

/// How a call stands to the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passage {
    /// The layer is not in use: nothing to leave.
    Free,
    /// Inside: [`leave`] must follow.
    Inside,
    /// The program's memory cannot be brought back: the call must not be made.
    Refused(CUresult),
}

/// Goes through the gate, before a call that may touch memory of the devices that it `needs`.
#[inline(always)]
pub(crate) fn enter_for(needs: impl Fn() -> DeviceSet) -> Passage {
    if !bridge::is_running() {
        return Passage::Free;
    }
    match GATE.knock() {
        Knock::Inside => Passage::Inside,
        Knock::Ask(counted) => enter_slowly(counted, &needs),
    }
}

/// Goes through the gate, before a call that may touch anything.
#[inline(always)]
pub(crate) fn enter() -> Passage {
    enter_for(|| DeviceSet::ALL)
}

/// Before a call of the driver that does not touch memory, or before code of ours that makes some. Whether [`called`] has to follow.
#[inline(always)]
pub(crate) fn call() -> bool {
    bridge::is_running()
        && match CALLS.knock() {
            Knock::Inside => true,
            Knock::Ask(counted) => call_slowly(counted),
        }
}

/// The thread's first call, or the process sleeps: then this wakes it.
#[cold]
fn call_slowly(counted: bool) -> bool {
    let entered = catch_unwind(AssertUnwindSafe(|| {
        CALLS.enter_slowly(counted, &|| DeviceSet::ALL)
    }));
    match entered {
        Ok(entered) => entered.is_ok(),
        Err(payload) => {
            core::mem::forget(payload);
            fault();
            false
        }
    }
}

/// After it.
#[inline(always)]
pub(crate) fn called(inside: bool) {
    if inside {
        CALLS.leave();
    }
}

/// Where some device is closed, or somebody wants to know. What `needs` asks the driver are no cancellation points either, nor is
/// waiting: the waits are raw futex calls.
#[cold]
fn enter_slowly(counted: bool, needs: &dyn Fn() -> DeviceSet) -> Passage {
    // To find out what a call needs may take calls of the driver.
    let needs = || {
        let inside = call();
        let set = needs();
        called(inside);
        set
    };
    match catch_unwind(AssertUnwindSafe(|| GATE.enter_slowly(counted, &needs))) {
        Ok(Ok(())) => Passage::Inside,
        Ok(Err(error)) => Passage::Refused(bridge::touch_code(error)),
        Err(payload) => {
            core::mem::forget(payload);
            fault();
            Passage::Free
        }
    }
}

/// Leaves the gate.
#[inline(always)]
pub(crate) fn leave(passage: Passage) {
    if matches!(passage, Passage::Inside) {
        GATE.leave();
    }
}

/// Keeps `std` from reporting our panics on the program's standard error. Our copy of `std` is ours alone.
pub(crate) fn quiet_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| std::panic::set_hook(Box::new(|_| {})));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caught_fault_counts() {
        quiet_panics();
        let before = FAULTS.load(Ordering::Relaxed);
        assert_eq!(catch(|| 7), Some(7));
        assert_eq!(run(|| -> u8 { panic!("on purpose") }), None);
        assert_eq!(FAULTS.load(Ordering::Relaxed), before + 1);
        assert!(!is_off());
    }

    #[test]
    fn cancelling_is_allowed_again_afterwards() {
        let before = set_cancel_state(PTHREAD_CANCEL_DISABLE);
        set_cancel_state(before);
        run(|| assert_eq!(set_cancel_state(PTHREAD_CANCEL_DISABLE), PTHREAD_CANCEL_DISABLE));
        assert_eq!(set_cancel_state(before), before);
    }
}
