//! The way into every call: is the driver initialised, is this a forked child, is the call told to fail, does a checkpoint
//! hold the process?

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

use ebb_abi::CUresult;

use crate::R;
use crate::caller::Caller;
use crate::faults::Faults;

/// `cuInit` succeeded.
const READY: u32 = 1;
/// There are faults to inject or calls to trace.
const HOOKED: u32 = 2;
/// This is a child that was forked after `cuInit`: nothing works in it.
const FORKED: u32 = 4;
/// A checkpoint holds the process: calls wait.
const LOCKED: u32 = 8;
/// `Faults::from_env` was not called yet.
const FRESH: u32 = 16;

/// One word, so that the usual case is one load and one comparison.
static GATE: AtomicU32 = AtomicU32::new(FRESH);
static FAULTS: OnceLock<Faults> = OnceLock::new();
static LOCK: Mutex<()> = Mutex::new(());
static UNLOCKED: Condvar = Condvar::new();

/// Facts about a symbol that are known when it is compiled.
#[derive(Debug)]
pub(crate) struct Entry {
    name: &'static str,
    /// The zero stream means the calling thread's own.
    per_thread: bool,
    /// May be called before `cuInit`.
    always: bool,
    /// Goes on while a checkpoint holds the process.
    checkpoint: bool,
}

impl Entry {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self {
            name,
            per_thread: ends_with(name, "_ptds") || ends_with(name, "_ptsz"),
            always: starts_with(name, "cuInit")
                || starts_with(name, "cuDriverGetVersion")
                || starts_with(name, "cuGetError")
                || starts_with(name, "cuGetProcAddress")
                || starts_with(name, "cuGetExportTable"),
            checkpoint: starts_with(name, "cuCheckpoint"),
        }
    }
}

const fn starts_with(text: &str, part: &str) -> bool {
    matches_at(text, part, 0)
}

const fn ends_with(text: &str, part: &str) -> bool {
    text.len() >= part.len() && matches_at(text, part, text.len() - part.len())
}

const fn matches_at(text: &str, part: &str, at: usize) -> bool {
    if text.len() < at + part.len() {
        return false;
    }
    let mut index = 0;
    while index < part.len() {
        if text.as_bytes()[at + index] != part.as_bytes()[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// Runs the body of a call. No panic leaves it: a panic is a fault of the simulation and comes out as UNKNOWN.
///
/// # Safety
/// The arguments that `body` uses are as the driver's interface demands.
#[inline(always)]
pub(crate) unsafe fn enter(entry: &'static Entry, body: impl FnOnce(&Caller) -> R) -> CUresult {
    if GATE.load(Ordering::Acquire) != READY
        && let Err(code) = enter_slowly(entry)
    {
        return code;
    }
    // SAFETY: the promise of this function's caller.
    let caller = unsafe { Caller::new(entry.per_thread) };
    match catch_unwind(AssertUnwindSafe(|| body(&caller))) {
        Ok(Ok(())) => CUresult::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => CUresult::ERROR_UNKNOWN,
    }
}

#[cold]
#[inline(never)]
fn enter_slowly(entry: &'static Entry) -> R {
    catch_unwind(|| {
        if GATE.load(Ordering::Acquire) & FRESH != 0 {
            let faults = FAULTS.get_or_init(|| {
                Faults::from_env().unwrap_or_else(|message| {
                    // The one thing that this library ever prints: a wrong test set-up must not look like a passing test.
                    eprintln!("ebb simulated GPU: {message}");
                    Faults::default()
                })
            });
            if !faults.is_empty() {
                GATE.fetch_or(HOOKED, Ordering::AcqRel);
            }
            GATE.fetch_and(!FRESH, Ordering::AcqRel);
        }
        let gate = GATE.load(Ordering::Acquire);
        if gate & FORKED != 0 && !(entry.always && entry.name != "cuInit") {
            return Err(CUresult::ERROR_NOT_INITIALIZED);
        }
        if gate & HOOKED != 0
            && let Some(faults) = FAULTS.get()
        {
            faults.at(entry.name)?;
        }
        if gate & READY == 0 && !entry.always {
            return Err(CUresult::ERROR_NOT_INITIALIZED);
        }
        if gate & LOCKED != 0 && !entry.always && !entry.checkpoint {
            wait_unlocked();
        }
        Ok(())
    })
    .unwrap_or(Err(CUresult::ERROR_UNKNOWN))
}

fn wait_unlocked() {
    let mut guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    while GATE.load(Ordering::Acquire) & LOCKED != 0 {
        guard = UNLOCKED.wait(guard).unwrap_or_else(PoisonError::into_inner);
    }
}

/// `cuInit` succeeded: calls may come in.
pub(crate) fn set_ready() {
    GATE.fetch_or(READY, Ordering::AcqRel);
}

/// Whether `cuInit` succeeded in this process.
pub(crate) fn is_ready() -> bool {
    GATE.load(Ordering::Acquire) & (READY | FORKED) == READY
}

/// In a forked child: nothing works any more. Takes no lock.
pub(crate) fn set_forked() {
    GATE.fetch_or(FORKED, Ordering::AcqRel);
}

/// Holds calls back, or lets them go on.
pub(crate) fn set_locked(locked: bool) {
    let _guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    if locked {
        GATE.fetch_or(LOCKED, Ordering::AcqRel);
    } else {
        GATE.fetch_and(!LOCKED, Ordering::AcqRel);
        UNLOCKED.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_know_their_symbol() {
        assert!(Entry::new("cuMemcpy_ptds").per_thread);
        assert!(Entry::new("cuLaunchKernel_ptsz").per_thread);
        assert!(!Entry::new("cuLaunchKernel").per_thread);
        assert!(Entry::new("cuGetProcAddress_v2").always);
        assert!(!Entry::new("cuMemAlloc_v2").always);
    }
}
