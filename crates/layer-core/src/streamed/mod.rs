//! Stream-ordered allocation: memory that is allocated and freed in the order of streams, without ever waiting for them.
//!
//! The program's pools are the driver's own objects, by which it knows them; they stay empty. What it allocates from them lies
//! in *slabs*, which are allocations of the device's pool and so leave the card and come back like any other. The way of an
//! allocation, until one step succeeds:
//!
//! ```text
//!   free to this stream, or to anybody            no call of the driver, no other lock
//!   streams that have come far enough             an event each, recorded when somebody wants to know
//!   a slab more                                   from the lease that is there
//!   what another stream freed, waiting for it     the waiting stream waits, not the program
//!   a slab more, asking the daemon                as every allocation
//! ```
//!
//! A free of the program is a few operations on tables. When the program waits for something, or an order of the daemon comes, or
//! an allocation finds no room, slabs that are wholly free go back to the device's pool: at a wait those above the pool's release
//! threshold, else all.
//!
//! * `heap`: pieces of one pool. `book`: all pools and streams. `flow`: the steps above, and shrinking.
//!
//! # Locks
//! `book` is taken under no other lock of the engine, and none is taken under it. Calls of the driver ([`Fences`]) are made under none.

mod book;
mod flow;
mod heap;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::engine::{Allocation, Engine};
use crate::error::{AllocError, FreeError};
use crate::frameworks;
use book::Book;
pub(crate) use flow::{after_quiet, make_room, make_room_waiting};

/// The owner of slabs in the device's pool: no context has this address.
pub(crate) const OWNER: u64 = u64::MAX - 1;

/// Numbers of allocations lie above those of the device's pool.
const IDS: u64 = 1 << 44;

/// A stream as the program means it. Default streams are told apart by context and thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamKey {
    /// The driver's handle, or its number of a default stream.
    pub handle: u64,
    /// The stream's context.
    pub context: u64,
    /// A number of the thread for its own default stream; else 0. Such a stream cannot be reached from another thread.
    pub thread: u64,
    /// The device of its context, as the engine numbers it.
    pub device: usize,
}

impl StreamKey {
    /// For memory of which nobody knows who still uses it.
    const fn nobodys(device: usize) -> Self {
        Self {
            handle: u64::MAX,
            context: u64::MAX,
            thread: 0,
            device,
        }
    }

    const fn is_nobodys(&self) -> bool {
        self.context == u64::MAX
    }
}

/// A mark in a stream: the driver's event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fence(pub u64);

/// What is known about a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceState {
    /// Everything before it has run.
    Passed,
    /// Not yet.
    Pending,
    /// It cannot be known any more.
    Lost,
}

/// Marks in streams, by the driver. Called with no lock of the engine held.
pub trait Fences: Debug + Send + Sync {
    /// Whether marks may be made and asked about now: not while a stream is captured.
    fn allowed(&self) -> bool;
    /// Marks the end of what a stream was given so far.
    fn record(&self, stream: &StreamKey) -> Option<Fence>;
    /// Whether a stream has come to a mark.
    fn state(&self, fence: Fence) -> FenceState;
    /// Makes what comes next in a stream wait for a mark. `false` if it does not.
    fn hold(&self, stream: &StreamKey, fence: Fence) -> bool;
    /// A mark is of no more use.
    fn recycle(&self, fence: Fence);
}

/// What the program said about a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolFacts {
    /// It never grows beyond so many bytes; 0 if it may.
    pub max_size: u64,
    /// So many bytes are kept when the program waits for something.
    pub release_threshold: u64,
    /// What another stream freed may be used when that stream turns out to have come so far.
    pub opportunistic: bool,
    /// A stream may be made to wait for another one.
    pub dependencies: bool,
}

impl Default for PoolFacts {
    fn default() -> Self {
        Self {
            max_size: 0,
            release_threshold: 0,
            opportunistic: true,
            dependencies: true,
        }
    }
}

/// A pool's figures, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolFigures {
    /// What it has of the device.
    pub reserved: u64,
    /// The most of that since it was reset.
    pub reserved_high: u64,
    /// What is allocated from it.
    pub used: u64,
    /// The most of that since it was reset.
    pub used_high: u64,
    /// What the program said about it.
    pub facts: PoolFacts,
}

/// Which pool is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhichPool {
    /// The one that is set for a device.
    Current(usize),
    /// The one with this handle.
    Handle(u64),
}

/// Why there was no allocation from a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The pool is not one of ours, or not known yet.
    #[error("the pool is not known")]
    Unknown,
    /// The pool's own largest size forbids it.
    #[error("the pool may not grow so far")]
    Full,
    /// As any allocation.
    #[error(transparent)]
    Alloc(#[from] AllocError),
}

/// What the program has waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// All work of a context.
    Context(u64),
    /// A stream.
    Stream(StreamKey),
    /// An event, which says nothing of any stream as a whole.
    Event,
}

/// Everything about pools, in the engine.
#[derive(Debug, Default)]
pub(crate) struct Streamed {
    book: Mutex<Book>,
    /// Wakes who waits until nobody records on a stream.
    idle: Condvar,
    fences: OnceLock<Arc<dyn Fences>>,
    /// Slabs there are: most programs have none, and then nothing here costs more than a load.
    slabs: AtomicUsize,
    /// What a wait of the program would change: pools that should shrink then, and streams that are not known to have come so far.
    eager: AtomicUsize,
}

/// The books, held. What others may know without the lock is brought up to date when they are let go.
struct Held<'a> {
    streamed: &'a Streamed,
    book: MutexGuard<'a, Book>,
}

impl std::ops::Deref for Held<'_> {
    type Target = Book;
    fn deref(&self) -> &Book {
        &self.book
    }
}

impl std::ops::DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut Book {
        &mut self.book
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let (slabs, eager) = (self.book.slabs(), self.book.ripe() + self.book.unsettled());
        if self.streamed.slabs.load(Ordering::Relaxed) != slabs {
            self.streamed.slabs.store(slabs, Ordering::Release);
        }
        if self.streamed.eager.load(Ordering::Relaxed) != eager {
            self.streamed.eager.store(eager, Ordering::Release);
        }
    }
}

impl Streamed {
    fn lock(&self) -> Held<'_> {
        Held {
            streamed: self,
            book: self.book.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// The driver's marks.
    pub(crate) fn fences(&self) -> Option<Arc<dyn Fences>> {
        self.fences.get().cloned()
    }

    /// Whether pools have any memory.
    fn is_used(&self) -> bool {
        self.slabs.load(Ordering::Acquire) != 0
    }

    /// The device goes; its memory is the caller's business.
    pub(crate) fn drop_device(&self, device: usize) {
        self.lock().drop_device(device);
    }

    /// Whether an address lies in memory of a pool, allocated or not.
    pub(crate) fn contains(&self, ptr: u64) -> bool {
        self.is_used() && self.lock().contains(ptr)
    }

    pub(crate) fn lookup(&self, ptr: u64) -> Option<Allocation> {
        if !self.is_used() {
            return None;
        }
        let found = self.lock().find(ptr)?;
        Some(Allocation {
            base: found.live.at,
            size: found.live.size,
            device: found.device,
            owner: 0,
            id: found.live.id | IDS,
            pool: found.pool,
        })
    }

    /// For the report: reserved, used, and bytes of slabs in which nothing lives.
    pub(crate) fn sums(&self, device: usize) -> (u64, u64, u64) {
        self.lock().sums(device)
    }
}

impl Engine {
    /// How streams are marked. Once, at the start; without it only the stream that freed memory gets it again.
    pub fn set_fences(&self, fences: Arc<dyn Fences>) {
        let _ = self.core.streamed.fences.set(fences);
    }

    /// A pool of the program on a device. A known one stays as it is.
    pub fn pool_register(&self, handle: u64, device: usize, facts: PoolFacts) {
        if !self.core.is_child() && self.core.device(device).is_some() {
            self.core.streamed.lock().register(handle, device, facts);
        }
    }

    /// Which pool allocations of a device come from; `None` if it is not one of ours.
    pub fn pool_set_current(&self, device: usize, handle: Option<u64>) {
        if !self.core.is_child() {
            self.core.streamed.lock().set_current(device, handle);
        }
    }

    /// The program destroyed a pool: what is allocated from it lives on. `false` if it is not one of ours.
    pub fn pool_destroy(&self, handle: u64) -> bool {
        if self.core.is_child() {
            return false;
        }
        let ours = self.core.streamed.lock().destroy(handle);
        if ours {
            flow::shrink_ripe(&self.core);
        }
        ours
    }

    /// A pool's figures; `None` if it is not one of ours.
    #[must_use]
    pub fn pool_figures(&self, handle: u64) -> Option<PoolFigures> {
        if self.core.is_child() {
            return None;
        }
        self.core.streamed.lock().figures(handle)
    }

    /// The device of a pool; `None` if it is not one of ours.
    #[must_use]
    pub fn pool_device(&self, handle: u64) -> Option<usize> {
        if self.core.is_child() {
            return None;
        }
        let book = self.core.streamed.lock();
        book.pool(book.by_handle(handle)?).map(|pool| pool.device)
    }

    /// Changes what the program said about a pool. `false` if it is not one of ours.
    pub fn pool_change(&self, handle: u64, change: impl FnOnce(&mut PoolFacts)) -> bool {
        !self.core.is_child() && self.core.streamed.lock().facts_mut(handle, change)
    }

    /// Resets a pool's highest figure, of what it reserved or of what was used. `false` if it is not one of ours.
    pub fn pool_reset_high(&self, handle: u64, reserved: bool) -> bool {
        !self.core.is_child() && self.core.streamed.lock().reset_high(handle, reserved)
    }

    /// Gives back what a pool does not need, down to `keep` bytes. `false` if it is not one of ours.
    pub fn pool_trim(&self, handle: u64, keep: u64) -> bool {
        !self.core.is_child() && flow::trim_to(&self.core, handle, keep)
    }

    /// Allocates from a pool in the order of a stream. Call it with no lock held and outside the gate.
    ///
    /// # Errors
    /// [`PoolError`]; nothing was allocated.
    #[inline]
    pub fn pool_alloc(&self, pool: WhichPool, stream: &StreamKey, size: u64) -> Result<u64, PoolError> {
        if self.core.is_passthrough() {
            return Err(AllocError::Bypass.into());
        }
        flow::alloc(&self.core, pool, stream, size)
    }

    /// Frees memory of a pool in the order of a stream, or of the stream that it was allocated on. It never waits. `None` if no
    /// memory of a pool lies there.
    #[inline]
    pub fn pool_free(&self, ptr: u64, stream: Option<&StreamKey>) -> Option<Result<(), FreeError>> {
        if self.core.is_child() || !self.core.streamed.is_used() {
            return None;
        }
        flow::free(&self.core, ptr, stream)
    }

    /// Before the program waits for something: a number for [`Self::pool_waited`], if that would do anything.
    #[inline]
    #[must_use]
    pub fn pool_mark(&self) -> Option<u64> {
        if self.core.streamed.eager.load(Ordering::Acquire) == 0 || self.core.is_child() {
            return None;
        }
        Some(self.core.streamed.lock().now())
    }

    /// The program has waited for something, without an error: pools shrink to their thresholds.
    pub fn pool_waited(&self, mark: u64, waited: &Waited) {
        if !self.core.is_child() {
            flow::waited(&self.core, mark, waited);
        }
    }

    /// Before the program destroys a stream by its handle: from here on another stream may get that handle.
    pub fn stream_goes(&self, handle: u64) {
        if !self.core.is_child() {
            flow::streams_go(
                &self.core,
                |key| key.thread == 0 && key.handle == handle,
                flow::End::Soon,
            );
            frameworks::streams_go(&self.core, |key| key.thread == 0 && key.handle == handle, false);
        }
    }

    /// A context has gone, and all work of its streams is over.
    pub fn streams_of_context_gone(&self, context: u64) {
        if !self.core.is_child() {
            flow::streams_go(&self.core, |key| key.context == context, flow::End::Over);
            frameworks::streams_go(&self.core, |key| key.context == context, true);
        }
    }

    /// A thread ends, and with it its own default streams: they were marked when something was freed on them.
    pub fn streams_of_thread_gone(&self, thread: u64) {
        if thread != 0 && !self.core.is_child() {
            flow::streams_go(&self.core, |key| key.thread == thread, flow::End::Unreachable);
            frameworks::streams_go(&self.core, |key| key.thread == thread, false);
        }
    }
}
