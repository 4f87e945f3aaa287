//! What threads share, from the standard library or, under `--cfg loom`, from the model checker.

#[cfg(loom)]
pub(super) use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
pub(super) use std::sync::{Mutex, MutexGuard};

/// A lock on cache lines of its own.
#[repr(align(128))]
#[derive(Debug)]
pub(super) struct Padded<T>(Mutex<T>);

impl<T> Padded<T> {
    pub(super) fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        lock(&self.0)
    }
}

/// A panic of another thread left nothing half done that a later one could not see: every change under these locks is complete
/// before anything that can panic.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A number of this thread, as even as the order in which threads first come here.
#[cfg(not(loom))]
pub(super) fn thread() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static MINE: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    MINE.try_with(|mine| *mine).unwrap_or(0)
}

/// Model threads say which shard is theirs.
#[cfg(loom)]
pub(super) fn thread() -> usize {
    0
}
