//! The gate: every call that may make the GPU use memory passes it, and it can be closed for a device.
//!
//! ```text
//!   a thread                                the owner of a device's residency
//!   enter: depth := 1                       close: the device is closed; CLOSED := 1
//!          (compiler fence)                        membarrier (every thread of the process)
//!          CLOSED? -> see below             drain: wait until no thread is inside for the device, bounded
//!   ... the real call ...                   ... nothing of the program uses the device from here ...
//!   leave: depth := 0 (release)             open:  the device is open; CLOSED := 0 if it was the last; wake
//!
//!   while some device is closed
//!   depth := 0; which devices may the call touch?
//!   mask := those; depth := 1, narrow (then a fence)
//!   one of them closed? -> depth := 0, wait until none is, again
//! ```
//!
//! Either the thread sees `CLOSED`, or the owner sees the depth: the barrier on the owner's side makes the pair of store
//! and load in `enter` as good as fenced, so that a passage costs about 3 ns. Where the kernel refuses `membarrier`, a
//! flag sends every thread through a real fence instead (8 ns). `model.rs` tries every interleaving of all of it.
//!
//! # Several devices
//! While nothing is closed a thread goes in for *all* devices and nobody asks which it needs. Only when some device is closed is
//! that found out, and the thread goes in *narrowly*, for those. So an owner may take a thread for inside that has nothing to do with its
//! device (it waits a little longer), and never the other way round: a thread that is inside for a device stays so
//! in every word that it writes until its outermost leave, and none gets in for a closed one.
//!
//! A thread that is inside for everything goes in again without asking (hooks inside hooks, calls that the driver makes on our thread):
//! the owner waits for its outermost leave. One that is inside narrowly and needs more waits as if it were outside; owners that it keeps
//! waiting meanwhile give up at their bound.
//!
//! # Locks
//! `state` is taken last, after every other lock of this crate, and nothing is called under it.

#[cfg(test)]
mod model;
mod set;
mod slots;
#[cfg(test)]
mod tests;
mod tls;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::thread::{MembarrierCommand, membarrier};

use crate::core::MAX_DEVICES;
use crate::error::TouchError;
pub use set::DeviceSet;
use slots::{DEPTH, LANES, NARROW, Slot, Slots};

/// Some device is closed.
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

/// What [`Gate::knock`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knock {
    /// The thread is inside: [`Gate::leave`] must follow.
    Inside,
    /// It is not: [`Gate::enter_slowly`] has to decide. Whether the passage was counted.
    Ask(bool),
}

/// The gate of a process. Never freed: threads keep pointers into it.
///
/// `KIND` says which of a thread's words finds its place at it: 0 for calls that may use memory, 1 for the others
/// ([`CallGate`]). A thread passes one of each kind without looking for its place.
#[derive(Default)]
#[repr(align(128))]
pub struct Gate<const KIND: usize = 0> {
    flags: AtomicU32,
    /// The closed devices. Changed under `state`.
    closed: AtomicU64,
    slots: Slots,
    state: Mutex<State>,
    changed: Condvar,
    owner: Mutex<Option<Arc<dyn GateOwner>>>,
}

/// The gate of all other calls of the driver: closed only while the driver itself may hold calls back, which it does for the whole
/// process, so that it is closed for every device or for none. See [`crate::sleep`].
pub type CallGate = Gate<1>;

impl<const KIND: usize> std::fmt::Debug for Gate<KIND> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate")
            .field("flags", &self.flags)
            .field("closed", &self.closed)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct State {
    /// How often each device was closed and not opened.
    closers: [u32; MAX_DEVICES],
    /// Threads that wait for each device.
    waiters: [u32; MAX_DEVICES],
    /// Threads that wait.
    waiting: u32,
    /// Why waiting for a device was given up last, and which of all failures that was: those who waited already return it.
    failed: [(u64, TouchError); MAX_DEVICES],
    failures: u64,
}

impl Default for State {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    const fn new() -> Self {
        Self {
            closers: [0; MAX_DEVICES],
            waiters: [0; MAX_DEVICES],
            waiting: 0,
            failed: [(0, TouchError::OutOfMemory); MAX_DEVICES],
            failures: 0,
        }
    }
}

impl<const KIND: usize> Gate<KIND> {
    /// An open gate.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            flags: AtomicU32::new(0),
            closed: AtomicU64::new(0),
            slots: Slots::new(),
            state: Mutex::new(State::new()),
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

    /// Goes in, for the devices that the call `needs`; waits while one of them is closed. Every `Ok` needs its
    /// [`Self::leave`] on the same thread. `needs` is asked only while some device is closed, on this thread, outside.
    ///
    /// # Errors
    /// [`TouchError`]: the program's memory cannot be brought back; the thread isn't inside, and must not leave.
    #[inline(always)]
    pub fn enter_for(&'static self, needs: impl Fn() -> DeviceSet) -> Result<(), TouchError> {
        match self.knock() {
            Knock::Inside => Ok(()),
            Knock::Ask(counted) => self.enter_slowly(counted, &needs),
        }
    }

    /// Goes in for everything.
    ///
    /// # Errors
    /// As [`Self::enter_for`].
    #[inline(always)]
    pub fn enter(&'static self) -> Result<(), TouchError> {
        self.enter_for(|| DeviceSet::ALL)
    }

    /// Goes in if nothing is closed and nobody wants to know. The answer must be used: see [`Knock`].
    #[inline(always)]
    #[must_use]
    pub fn knock(&'static self) -> Knock {
        let Some(slot) = tls::head::<KIND>() else {
            return Knock::Ask(false);
        };
        if slot.gate.load(Ordering::Relaxed) != self.id() {
            return Knock::Ask(false);
        }
        let word = slot.word.load(Ordering::Relaxed);
        slot.count();
        slot.word.store(word.wrapping_add(1), Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        if self.flags.load(Ordering::Acquire) | word == 0 {
            return Knock::Inside;
        }
        slot.word.store(word, Ordering::Release);
        Knock::Ask(true)
    }

    /// Goes out. Without an `enter` before it does nothing.
    #[inline(always)]
    pub fn leave(&'static self) {
        match tls::head::<KIND>() {
            Some(slot) if slot.gate.load(Ordering::Relaxed) == self.id() => go_out(slot),
            _ => self.leave_other(),
        }
    }

    /// Whether the calling thread is inside.
    #[must_use]
    pub fn is_inside(&'static self) -> bool {
        Slot::find(tls::head::<KIND>(), self.id())
            .is_some_and(|slot| slot.word.load(Ordering::Relaxed) & DEPTH > 0)
    }

    #[inline(always)]
    fn id(&self) -> usize {
        core::ptr::from_ref(self).addr()
    }

    /// The calling thread's slot, taken if it has none.
    fn slot(&'static self) -> &'static Slot {
        if let Some(slot) = Slot::find(tls::head::<KIND>(), self.id()) {
            return slot;
        }
        let slot = self.slots.take(self.id());
        slot.link(tls::head::<KIND>());
        tls::set_head::<KIND>(Some(slot));
        tls::on_thread_exit();
        slot
    }

    /// From here on the calling thread's passages count as use of that device; of all devices if it isn't known.
    /// Nothing depends on it but which device looks idle.
    pub fn works_on(&'static self, device: Option<usize>) {
        let lane = device.map_or(0, lane_of);
        self.slot()
            .lane
            .store(u32::try_from(lane).unwrap_or(0), Ordering::Relaxed);
    }

    /// The way in that [`Self::knock`] left open.
    ///
    /// # Errors
    /// As [`Self::enter_for`].
    #[cold]
    pub fn enter_slowly(
        &'static self,
        counted: bool,
        needs: &dyn Fn() -> DeviceSet,
    ) -> Result<(), TouchError> {
        let slot = self.slot();
        if !counted {
            slot.count();
        }
        let before = slot.word.load(Ordering::Relaxed);
        let outer = match (before & DEPTH, before & NARROW) {
            (0, _) => DeviceSet::NONE,
            (_, 0) => DeviceSet::ALL,
            _ => DeviceSet(slot.mask.load(Ordering::Relaxed)),
        };
        loop {
            // For everything, as on the short way.
            if before & NARROW != 0 {
                slot.mask.store(DeviceSet::ALL.0, Ordering::Relaxed);
            }
            slot.word.store(before + 1, Ordering::Release);
            fence(Ordering::SeqCst);
            let flags = self.flags.load(Ordering::SeqCst);
            if flags & WATCHED != 0 && self.flags.fetch_and(!WATCHED, Ordering::AcqRel) & WATCHED != 0 {
                self.tell(|owner| owner.active());
            }
            if flags & CLOSED == 0 || outer == DeviceSet::ALL {
                return Ok(());
            }
            step_back(slot, before, outer);
            let more = needs().without(outer);
            slot.mask.store(outer.with(more).0, Ordering::Relaxed);
            slot.word
                .store(((before & DEPTH) + 1) | NARROW, Ordering::Release);
            fence(Ordering::SeqCst);
            if !DeviceSet(self.closed.load(Ordering::SeqCst)).meets(more) {
                return Ok(());
            }
            step_back(slot, before, outer);
            self.wait_open(more)?;
        }
    }

    #[cold]
    fn leave_other(&'static self) {
        if let Some(slot) = Slot::find(tls::head::<KIND>(), self.id()) {
            go_out(slot);
        }
    }

    fn wait_open(&self, needed: DeviceSet) -> Result<(), TouchError> {
        let mut state = self.state();
        let before = state.failures;
        state.waiting += 1;
        for device in needed.iter() {
            state.waiters[device] += 1;
        }
        drop(state);
        self.tell(|owner| owner.wanted());
        let mut state = self.state();
        let answer = loop {
            let closed = DeviceSet(self.closed.load(Ordering::Relaxed) & needed.0);
            if closed.is_empty() {
                break Ok(());
            }
            let failed = closed.iter().map(|device| state.failed[device]);
            if let Some((_, error)) = failed
                .max_by_key(|(number, _)| *number)
                .filter(|(n, _)| *n > before)
            {
                break Err(error);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.waiting -= 1;
        for device in needed.iter() {
            state.waiters[device] -= 1;
        }
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
    pub(crate) fn close(&self, device: usize) {
        let mut state = self.state();
        state.closers[device] += 1;
        if state.closers[device] == 1 {
            self.closed.fetch_or(DeviceSet::one(device).0, Ordering::SeqCst);
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

    /// Waits until no thread is inside for a device, or until the deadline. Only of use while it is closed: a thread that was seen
    /// outside then cannot be inside later.
    pub(crate) fn drain(&self, device: usize, deadline: Instant) -> bool {
        let device = DeviceSet::one(device);
        let mut nap = Duration::from_micros(20);
        let mut inside: Vec<&Slot> = self.slots.iter().collect();
        for round in 0u32.. {
            inside.retain(|slot| slot.is_inside(device));
            if inside.is_empty() {
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

    /// Takes one close of a device back; the last one lets everybody in who needs no other closed one.
    pub(crate) fn open(&self, device: usize) {
        let mut state = self.state();
        let closers = &mut state.closers[device];
        *closers = closers.saturating_sub(1);
        if *closers == 0 {
            let bit = DeviceSet::one(device);
            let before = DeviceSet(self.closed.fetch_and(!bit.0, Ordering::Release));
            if before.without(bit).is_empty() {
                self.flags.fetch_and(!CLOSED, Ordering::Release);
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Sends everybody who waits for a device at this moment away with an error. The gate stays closed.
    pub(crate) fn fail_waiters(&self, device: usize, error: TouchError) {
        let mut state = self.state();
        state.failures += 1;
        state.failed[device] = (state.failures, error);
        drop(state);
        self.changed.notify_all();
    }

    /// How many threads wait for a device.
    pub(crate) fn waiters_for(&self, device: usize) -> u32 {
        self.state().waiters[device]
    }

    /// How many threads wait at the closed gate.
    pub(crate) fn waiters(&self) -> u32 {
        self.state().waiting
    }

    /// Asks to be told (once) of the next passage. Passages before this call are all in [`Self::passages`] after it.
    pub(crate) fn watch(&self) {
        self.flags.fetch_or(WATCHED, Ordering::SeqCst);
        self.barrier();
    }

    /// Whether nobody has passed since [`Self::watch`].
    pub(crate) fn is_watched(&self) -> bool {
        self.flags.load(Ordering::SeqCst) & WATCHED != 0
    }

    /// Passages so far, of all threads. A counter to compare with itself.
    #[must_use]
    pub fn passages(&self) -> u64 {
        self.passages_of(DeviceSet::ALL)
    }

    /// Passages so far that may have used one of these devices: of threads that work on them, and of threads of which
    /// nothing is known. A counter to compare with itself.
    #[must_use]
    pub fn passages_of(&self, devices: DeviceSet) -> u64 {
        let mut lanes = [false; LANES];
        lanes[0] = true;
        devices.iter().for_each(|device| lanes[lane_of(device)] = true);
        let counted = |slot: &Slot| {
            let used = slot.passages.iter().zip(lanes).filter(|(_, used)| *used);
            used.fold(0u64, |sum, (count, _)| {
                sum.wrapping_add(count.load(Ordering::Relaxed))
            })
        };
        self.slots
            .iter()
            .fold(0, |sum, slot| sum.wrapping_add(counted(slot)))
    }

    /// After `fork`, in the child: open for ever. Takes no lock.
    pub fn reset_in_child(&self) {
        self.closed.store(0, Ordering::SeqCst);
        self.flags.store(0, Ordering::SeqCst);
    }
}

/// The counter for threads that work on a device; devices far apart share one.
const fn lane_of(device: usize) -> usize {
    1 + device % (LANES - 1)
}

/// One step out; at the outermost one nothing stays that a later passage could be taken for.
#[inline(always)]
fn go_out(slot: &Slot) {
    let word = slot.word.load(Ordering::Relaxed);
    let left = if word & DEPTH <= 1 { 0 } else { word - 1 };
    slot.word.store(left, Ordering::Release);
}

/// Back to where the thread stood before it tried.
fn step_back(slot: &Slot, before: u32, outer: DeviceSet) {
    slot.word.store(before, Ordering::Release);
    slot.mask.store(outer.0, Ordering::Release);
}
