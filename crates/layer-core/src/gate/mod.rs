//! The gate: every call that may make the GPU use memory passes it, and it can be closed.
//!
//! ```text
//!   a thread                                the owner of a device's residency
//!   enter: depth := 1                       close: CLOSED := 1
//!          (compiler fence)                        membarrier (every thread of the process)
//!          CLOSED? -> depth := 0, wait      drain: wait until every depth is 0, bounded
//!   ... the real call ...                   ... nothing of the program uses the device from here ...
//!   leave: depth := 0 (release)             open:  CLOSED := 0, wake
//! ```
//!
//! Either the thread sees `CLOSED`, or the owner sees the depth: the barrier on the owner's side makes the pair of store
//! and load in `enter` as good as fenced, so that a passage costs about 3 ns. Where the kernel refuses `membarrier`, a
//! flag sends every thread through a real fence instead (8 ns). `model.rs` tries every interleaving of both.
//!
//! A thread that is inside goes in again without asking (hooks inside hooks, calls that the driver makes on our thread):
//! the owner waits for its outermost leave. So a thread inside must not wait for the gate.
//!
//! # Locks
//! `state` is taken last, after every other lock of this crate, and nothing is called under it.

#[cfg(test)]
mod model;
mod slots;
#[cfg(test)]
mod tests;
mod tls;

use std::sync::atomic::{AtomicU32, Ordering, compiler_fence, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::thread::{MembarrierCommand, membarrier};

use crate::error::TouchError;
use slots::{Slot, Slots};

/// Nobody gets in.
const CLOSED: u32 = 1;
/// The next thread that goes in says so to the owner (who sleeps until then).
const WATCHED: u32 = 2;
/// `membarrier` isn't to be had: a thread needs a fence of its own.
const FENCED: u32 = 4;

/// Who is told about threads at the gate. Called on their threads, with no lock of the gate held.
pub trait GateOwner: Send + Sync {
    /// A thread waits at the closed gate.
    fn wanted(&self);
    /// The first passage after the owner asked to be told.
    fn active(&self);
}

/// The gate of a process. Never freed: threads keep pointers into it.
#[derive(Default)]
#[repr(align(128))]
pub struct Gate {
    flags: AtomicU32,
    slots: Slots,
    state: Mutex<State>,
    changed: Condvar,
    owner: Mutex<Option<Arc<dyn GateOwner>>>,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate")
            .field("flags", &self.flags)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct State {
    /// How many devices hold the gate closed.
    closers: u32,
    /// Threads that wait.
    waiters: u32,
    /// Why the last wait was given up, and its number: those who waited already when it was counted up return it.
    failure: Option<TouchError>,
    failures: u64,
}

impl Gate {
    /// An open gate.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            flags: AtomicU32::new(0),
            slots: Slots::new(),
            state: Mutex::new(State {
                closers: 0,
                waiters: 0,
                failure: None,
                failures: 0,
            }),
            changed: Condvar::new(),
            owner: Mutex::new(None),
        }
    }

    /// Makes it ready to be closed: says who is told, and asks the kernel for its barrier.
    pub fn arm(&self, owner: Arc<dyn GateOwner>) {
        *self.owner.lock().unwrap_or_else(PoisonError::into_inner) = Some(owner);
        if membarrier(MembarrierCommand::RegisterPrivateExpedited).is_err() {
            self.use_fences();
        }
    }

    fn use_fences(&self) {
        self.flags.fetch_or(FENCED, Ordering::SeqCst);
    }

    /// Goes in; waits while the gate is closed. Every `Ok` needs its [`Self::leave`] on the same thread.
    ///
    /// # Errors
    /// [`TouchError`]: the program's memory cannot be brought back; the thread isn't inside, and must not leave.
    #[inline(always)]
    pub fn enter(&'static self) -> Result<(), TouchError> {
        if let Some(slot) = tls::head()
            && slot.gate.load(Ordering::Relaxed) == self.id()
        {
            let depth = slot.depth.load(Ordering::Relaxed);
            slot.passages.store(
                slot.passages.load(Ordering::Relaxed).wrapping_add(1),
                Ordering::Relaxed,
            );
            slot.depth.store(depth + 1, Ordering::Relaxed);
            compiler_fence(Ordering::SeqCst);
            if self.flags.load(Ordering::Acquire) == 0 {
                return Ok(());
            }
            return self.entered(slot);
        }
        self.enter_first()
    }

    /// Goes out. Without an `enter` before it does nothing.
    #[inline(always)]
    pub fn leave(&'static self) {
        match tls::head() {
            Some(slot) if slot.gate.load(Ordering::Relaxed) == self.id() => {
                let depth = slot.depth.load(Ordering::Relaxed);
                slot.depth.store(depth.saturating_sub(1), Ordering::Release);
            }
            _ => self.leave_other(),
        }
    }

    /// Whether the calling thread is inside.
    #[must_use]
    pub fn is_inside(&'static self) -> bool {
        Slot::find(tls::head(), self.id()).is_some_and(|slot| slot.depth.load(Ordering::Relaxed) > 0)
    }

    #[inline(always)]
    fn id(&self) -> usize {
        core::ptr::from_ref(self).addr()
    }

    /// The first time that a thread comes (or, with several gates, comes from another one).
    #[cold]
    fn enter_first(&'static self) -> Result<(), TouchError> {
        if let Some(slot) = Slot::find(tls::head(), self.id()) {
            return self.enter_with(slot);
        }
        let slot = self.slots.take(self.id());
        slot.link(tls::head());
        tls::set_head(Some(slot));
        tls::on_thread_exit();
        self.enter_with(slot)
    }

    fn enter_with(&'static self, slot: &'static Slot) -> Result<(), TouchError> {
        slot.passages.store(
            slot.passages.load(Ordering::Relaxed).wrapping_add(1),
            Ordering::Relaxed,
        );
        slot.depth
            .store(slot.depth.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        self.entered(slot)
    }

    /// The thread has written its depth; some flag may be set.
    #[cold]
    fn entered(&'static self, slot: &'static Slot) -> Result<(), TouchError> {
        loop {
            let mut flags = self.flags.load(Ordering::Acquire);
            if flags & FENCED != 0 {
                fence(Ordering::SeqCst);
                flags = self.flags.load(Ordering::SeqCst);
            }
            if flags & WATCHED != 0 && self.flags.fetch_and(!WATCHED, Ordering::AcqRel) & WATCHED != 0 {
                self.tell(|owner| owner.active());
            }
            if flags & CLOSED == 0 || slot.depth.load(Ordering::Relaxed) > 1 {
                return Ok(());
            }
            slot.depth.store(0, Ordering::Release);
            self.wait_open()?;
            slot.depth.store(1, Ordering::Relaxed);
            compiler_fence(Ordering::SeqCst);
        }
    }

    #[cold]
    fn leave_other(&'static self) {
        if let Some(slot) = Slot::find(tls::head(), self.id()) {
            let depth = slot.depth.load(Ordering::Relaxed);
            slot.depth.store(depth.saturating_sub(1), Ordering::Release);
        }
    }

    fn wait_open(&self) -> Result<(), TouchError> {
        let mut state = self.state();
        let before = state.failures;
        state.waiters += 1;
        drop(state);
        self.tell(|owner| owner.wanted());
        let mut state = self.state();
        let answer = loop {
            if state.closers == 0 {
                break Ok(());
            }
            if state.failures != before {
                break Err(state.failure.unwrap_or(TouchError::OutOfMemory));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.waiters -= 1;
        answer
    }

    fn tell(&self, what: impl FnOnce(&dyn GateOwner)) {
        let owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(owner) = owner {
            what(&*owner);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes it for one device. Threads may still be inside: see [`Self::drain`]. Every close needs its [`Self::open`].
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closers += 1;
        if state.closers == 1 {
            self.flags.fetch_or(CLOSED, Ordering::SeqCst);
            self.barrier();
        }
    }

    /// Every thread of the process passes a full fence somewhere between begin and end of this call, or does it
    /// by itself in `enter` from the moment on that this returns.
    fn barrier(&self) {
        fence(Ordering::SeqCst);
        if self.flags.load(Ordering::SeqCst) & FENCED == 0
            && membarrier(MembarrierCommand::PrivateExpedited).is_err()
        {
            // Refused although it was registered (a new seccomp filter): fences from here on. Threads that are between
            // their store and their load at this moment are over it long before the second look at the slots.
            self.use_fences();
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until no thread is inside, or until the deadline. Only of use while closed.
    pub(crate) fn drain(&self, deadline: Instant) -> bool {
        let mut nap = Duration::from_micros(20);
        for round in 0u32.. {
            if self
                .slots
                .iter()
                .all(|slot| slot.depth.load(Ordering::Acquire) == 0)
            {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            // Most calls take microseconds: look again soon at first, then leave the processor to them.
            if round < 64 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(nap);
                nap = (nap * 2).min(Duration::from_millis(1));
            }
        }
        false
    }

    /// Takes one close back; the last one lets everybody in.
    pub(crate) fn open(&self) {
        let mut state = self.state();
        state.closers = state.closers.saturating_sub(1);
        if state.closers == 0 {
            self.flags.fetch_and(!CLOSED, Ordering::Release);
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Sends everybody who waits at this moment away with an error. The gate stays closed.
    pub(crate) fn fail_waiters(&self, error: TouchError) {
        let mut state = self.state();
        state.failure = Some(error);
        state.failures += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// How many threads wait at the closed gate.
    pub(crate) fn waiters(&self) -> u32 {
        self.state().waiters
    }

    /// Asks to be told (once) of the next passage. Passages before this call are all in [`Self::passages`] after it.
    pub(crate) fn watch(&self) {
        self.flags.fetch_or(WATCHED, Ordering::SeqCst);
        self.barrier();
    }

    /// Whether nobody has passed since [`Self::watch`].
    #[cfg(test)]
    pub(crate) fn is_watched(&self) -> bool {
        self.flags.load(Ordering::SeqCst) & WATCHED != 0
    }

    /// Passages so far, of all threads. A counter to compare with itself.
    #[must_use]
    pub fn passages(&self) -> u64 {
        self.slots.iter().fold(0, |sum, slot| {
            sum.wrapping_add(slot.passages.load(Ordering::Relaxed))
        })
    }

    /// After `fork`, in the child: open for ever. Takes no lock.
    pub fn reset_in_child(&self) {
        self.flags.store(0, Ordering::SeqCst);
    }
}
