//! Hooks, by what they are for. `touch` is generated; the others are written by hand.
//!
//! The form of a hook: ask what to do (behind the barrier), make the real call (outside it), tell what came of it
//! (behind the barrier again). Where nothing of the real call is wanted, the answer is ours.

pub(crate) mod between;
pub(crate) mod capture;
pub(crate) mod current;
pub(crate) mod external;
pub(crate) mod forbidden;
pub(crate) mod graphs;
pub(crate) mod green;
pub(crate) mod imports;
pub(crate) mod ipc;
pub(crate) mod lifetime;
pub(crate) mod memory;
pub(crate) mod multicast;
pub(crate) mod needs;
pub(crate) mod nvml;
pub(crate) mod pools;
pub(crate) mod query;
pub(crate) mod share;
pub(crate) mod touch;
pub(crate) mod vmm;

pub(crate) use capture::*;
pub(crate) use current::*;
pub(crate) use external::*;
pub(crate) use graphs::*;
pub(crate) use green::*;
pub(crate) use imports::*;
pub(crate) use ipc::*;
pub(crate) use lifetime::*;
pub(crate) use memory::*;
pub(crate) use multicast::*;
pub(crate) use pools::*;
pub(crate) use query::*;
pub(crate) use share::*;
pub(crate) use vmm::*;

use crate::barrier;
use crate::bridge::{self, Running};

/// Runs our own code with the engine, if there is one. `None` if there is none, if it has nothing to say, or if it panicked.
/// The code may make calls of the driver: it runs inside their gate.
pub(crate) fn with<T>(code: impl FnOnce(&'static Running) -> Option<T>) -> Option<T> {
    let running = bridge::running()?;
    let inside = barrier::call();
    let result = barrier::run(|| code(running)).flatten();
    barrier::called(inside);
    result
}

/// The same for code that makes none: it answers while the process sleeps, and does not wake it.
pub(crate) fn with_books<T>(code: impl FnOnce(&'static Running) -> Option<T>) -> Option<T> {
    let running = bridge::running()?;
    barrier::run(|| code(running)).flatten()
}
