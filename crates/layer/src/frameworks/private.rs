//! Private pools: for each capture, and for each number that the program names.
//!
//! A graph runs again with the addresses that it was captured with. What is allocated while a stream is captured comes from a pool of that capture,
//! one for each of its streams, because two branches of a graph may run side by side; until the graph and all its instances are gone (`hooks/graphs.rs`
//! knows when) nobody else gets it.
//!
//! # Locks
//! `BOOK` for a look, under no call.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::*;
use ebb_layer_core::StreamKey;

use super::props;
use crate::bridge::Running;
use crate::hooks::{capture, graphs};

/// What a private pool is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum For {
    /// A capture, by the driver's number of it, which never comes again.
    Capture(u64),
    /// What the program named.
    Named(u64),
}

/// Engine's number of the device, what for, and which stream: to the engine's number of the pool.
type Book = HashMap<(usize, For, Option<StreamKey>), u64>;

static BOOK: Mutex<Option<Book>> = Mutex::new(None);

thread_local! {
    /// The device and the number of the pool that this thread allocates from.
    static NAMED: Cell<Option<(usize, u64)>> = const { Cell::new(None) };
}

fn book() -> MutexGuard<'static, Option<Book>> {
    BOOK.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn forget_in_child() {
    if let Ok(mut book) = BOOK.try_lock() {
        *book = None;
    }
}

pub(super) fn begin(index: usize, pool: u64) {
    NAMED.set(Some((index, pool)));
}

pub(super) fn end() {
    NAMED.set(None);
}

/// The private pool for an allocation of this thread, if it needs one.
pub(super) fn of(running: &Running, index: usize, stream: CUstream, key: Option<&StreamKey>) -> Option<u64> {
    if let Some((device, pool)) = NAMED.get()
        && device == index
    {
        return get(running, index, For::Named(pool), key).map(|(number, _)| number);
    }
    if !capture::any() {
        return None;
    }
    let (id, graph) = captured(running, stream)?;
    let (number, new) = get(running, index, For::Capture(id), key)?;
    if new {
        graphs::has_private(graph, id);
    }
    Some(number)
}

/// The capture that a stream is part of, and the graph that comes of it.
fn captured(running: &Running, stream: CUstream) -> Option<(u64, CUgraph)> {
    let (mut status, mut id, mut graph) = (CU_STREAM_CAPTURE_STATUS_NONE, 0, CUgraph::NULL);
    // SAFETY: valid places, or null for what is not wanted; the driver checks the stream.
    let known = unsafe {
        running.table.cuStreamGetCaptureInfo_v2(
            stream,
            &raw mut status,
            &raw mut id,
            &raw mut graph,
            core::ptr::null_mut(),
            core::ptr::null_mut(),
        )
    };
    (known.is_success() && status == CU_STREAM_CAPTURE_STATUS_ACTIVE).then_some((id, graph))
}

/// The pool, and whether it is the first of what it is for.
fn get(running: &Running, index: usize, what: For, key: Option<&StreamKey>) -> Option<(u64, bool)> {
    let place = (index, what, key.copied());
    if let Some(number) = book().as_ref().and_then(|book| book.get(&place)) {
        return Some((*number, false));
    }
    let made = running
        .engine
        .framework_private(index, || props(running, index))
        .ok()?;
    let mut book = book();
    let book = book.get_or_insert_default();
    let first = !book.keys().any(|(_, other, _)| *other == what);
    // A stream is one thread's while it is captured: nobody else has made it meanwhile. If two did, one stays empty.
    Some((*book.entry(place).or_insert(made), first))
}

/// A capture's graph and all its instances are gone.
pub(crate) fn capture_over(running: &Running, id: u64) {
    over(running, |(_, what, _)| *what == For::Capture(id));
}

pub(super) fn forget(running: &Running, index: usize, pool: u64) {
    over(running, |(device, what, _)| {
        *device == index && *what == For::Named(pool)
    });
}

/// A device goes, and its pools with it.
pub(crate) fn device_gone(index: usize) {
    if let Some(book) = book().as_mut() {
        book.retain(|(device, _, _), _| *device != index);
    }
}

fn over(running: &Running, which: impl Fn(&(usize, For, Option<StreamKey>)) -> bool) {
    let gone: Vec<(usize, u64)> = match book().as_mut() {
        Some(book) => book
            .extract_if(|place, _| which(place))
            .map(|((device, _, _), number)| (device, number))
            .collect(),
        None => return,
    };
    for (device, number) in gone {
        running.engine.framework_private_over(device, number);
    }
}
