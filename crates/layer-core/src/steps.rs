//! Sequences of driver calls that happen as a whole or not at all.
//!
//! Each undoes what it did when a later call fails. Undoing may fail too: what the driver would not take back is returned
//! as [`Stuck`], stays in the books as used, and is tried again later.

use ebb_alloc::Piece;
use ebb_device::{DeviceError, DeviceMemory, Direction, Handle};

use crate::pool::{Dismantle, Stuck};

/// A failed sequence: the first error, and what is left of it.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) error: DeviceError,
    pub(crate) stuck: Vec<Stuck>,
}

/// Unmaps (if mapped) and releases.
fn take_down(memory: &dyn DeviceMemory, mut one: Stuck) -> Result<(), Stuck> {
    if let Some(at) = one.at {
        memory.unmap(at, one.len).map_err(|_| one)?;
        one.at = None;
    }
    memory.release(one.handle).map_err(|_| one)
}

/// Backs a span with chunks of `chunk` bytes (the last may be smaller), with access.
pub(crate) fn build(
    memory: &dyn DeviceMemory,
    base: u64,
    len: u64,
    chunk: u64,
) -> Result<Vec<(u64, Handle)>, Failed> {
    let mut done: Vec<(u64, Handle)> = Vec::new();
    let undo = |error, done: &[(u64, Handle)], unmapped: Option<(u64, Handle)>| {
        let mut at = base;
        let mapped = done.iter().map(|(len, handle)| {
            let one = Stuck {
                handle: *handle,
                len: *len,
                at: Some(at),
                gives: true,
            };
            at += len;
            one
        });
        let unmapped = unmapped.map(|(len, handle)| Stuck {
            handle,
            len,
            at: None,
            gives: true,
        });
        let stuck = mapped
            .chain(unmapped)
            .filter_map(|one| take_down(memory, one).err())
            .collect();
        Failed { error, stuck }
    };
    let mut at = base;
    while at < base + len {
        let piece = chunk.min(base + len - at);
        let handle = match memory.create(piece) {
            Ok(handle) => handle,
            Err(error) => return Err(undo(error, &done, None)),
        };
        if let Err(error) = memory.map(at, piece, handle) {
            return Err(undo(error, &done, Some((piece, handle))));
        }
        done.push((piece, handle));
        at += piece;
    }
    match memory.set_access(base, len) {
        Ok(()) => Ok(done),
        Err(error) => Err(undo(error, &done, None)),
    }
}

/// Takes chunks apart; returns what the driver would not take back.
pub(crate) fn apart(memory: &dyn DeviceMemory, what: &Dismantle) -> Vec<Stuck> {
    what.chunks
        .iter()
        .filter_map(|(at, len, handle)| {
            let one = Stuck {
                handle: *handle,
                len: *len,
                at: Some(*at),
                gives: true,
            };
            take_down(memory, one).err()
        })
        .collect()
}

/// Tries once more what was stuck; returns what still is.
pub(crate) fn again(memory: &dyn DeviceMemory, stuck: &[Stuck]) -> Vec<Stuck> {
    stuck
        .iter()
        .filter_map(|one| take_down(memory, *one).err())
        .collect()
}

/// Makes physical memory for one chunk and maps it with access.
pub(crate) fn bring(memory: &dyn DeviceMemory, at: u64, len: u64) -> Result<Handle, Failed> {
    let handles = build(memory, at, len, len).map_err(|mut failed| {
        failed.stuck.iter_mut().for_each(|one| one.gives = false);
        failed
    })?;
    handles.first().map(|(_, handle)| *handle).ok_or(Failed {
        error: DeviceError::Gone,
        stuck: Vec::new(),
    })
}

/// Takes one chunk away again whose addresses stay its own.
pub(crate) fn take_away(memory: &dyn DeviceMemory, at: u64, len: u64, handle: Handle) -> Option<Stuck> {
    let one = Stuck {
        handle,
        len,
        at: Some(at),
        gives: false,
    };
    take_down(memory, one).err()
}

/// A run of a chunk that lies in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Which piece.
    pub(crate) piece: usize,
    /// Where in it.
    pub(crate) from: u64,
    /// Where in the chunk.
    pub(crate) at: u64,
    pub(crate) len: u64,
}

/// Cuts runs of one chunk (where in it, and how long; in order) at the borders of its pieces.
pub(crate) fn runs(pieces: &[Piece], runs: &[(u64, u64)]) -> Vec<Run> {
    let mut all = Vec::new();
    for (run, len) in runs {
        let mut start = 0;
        for (number, piece) in pieces.iter().enumerate() {
            let at = (*run).max(start);
            let to = (run + len).min(start + piece.len);
            if at < to {
                all.push(Run {
                    piece: number,
                    from: at - start,
                    at,
                    len: to - at,
                });
            }
            start += piece.len;
        }
    }
    all
}

/// After an error in a direction: waits until nothing is under way there. `false` if that cannot be known; then the
/// host memory of those copies must never be used for anything else.
pub(crate) fn settle(memory: &dyn DeviceMemory, direction: Direction) -> bool {
    for _ in 0..2 {
        if let Ok(marker) = memory.mark(direction)
            && memory.wait(marker).is_ok()
        {
            return true;
        }
    }
    memory.quiesce().is_ok()
}
