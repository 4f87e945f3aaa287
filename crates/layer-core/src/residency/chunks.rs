//! What moves: a chunk of the pool, or a memory of the program. One form for the ways out and in.

use std::collections::BTreeMap;
use std::sync::Arc;

use ebb_alloc::Piece;
use ebb_device::{DeviceError, Handle};

use crate::arena::Readiness;
use crate::core::Core;
use crate::device::{Device, State};
use crate::kept::{HostCopy, Ticket};
use crate::pool::{ChunkId, Stuck, choose};
use crate::steps;
use crate::vmm::{self, Away, Remains, Seat};

/// A piece of memory that moves as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Chunk {
    Pool(ChunkId),
    /// By its handle.
    Program(u64),
}

impl Chunk {
    /// Where all of it can be read as it lies, its handle, and its kept copy. Takes no driver call.
    pub(super) fn readable(
        self,
        core: &Core,
        device: &Device,
        state: &State,
    ) -> Option<(u64, Handle, Option<Ticket>)> {
        match self {
            Self::Pool(id) => state.pool.on_card(id),
            Self::Program(handle) => core.vmm.readable(&*device.memory, handle),
        }
    }
}

/// What an eviction of `bytes` may take, in the order in which it takes them, with the bytes that each has to copy: what
/// nobody has written first, for that costs no copy.
pub(super) fn candidates(core: &Core, device: &Device, state: &State, bytes: u64) -> Vec<(Chunk, u64)> {
    let program = core
        .vmm
        .candidates(&state.pool, device.index, device.memory.can_copy());
    let (written, blank): (Vec<_>, Vec<_>) = program
        .into_iter()
        .map(|(handle, len, written)| (Chunk::Program(handle), len, written))
        .partition(|(.., written)| *written);
    let free: u64 = blank.iter().map(|(_, len, _)| len).sum();
    let written = written.into_iter().map(|(chunk, len, _)| (chunk, len));
    let copied = state
        .pool
        .resident()
        .into_iter()
        .map(|(id, len)| (Chunk::Pool(id), len))
        .chain(written)
        .collect();
    blank
        .into_iter()
        .map(|(chunk, ..)| (chunk, 0))
        .chain(choose(copied, bytes.saturating_sub(free)))
        .collect()
}

/// Bytes that an eviction could take.
pub(crate) fn movable_bytes(core: &Core, device: &Device, state: &State) -> u64 {
    let can_copy = device.memory.can_copy();
    state.pool.movable_bytes() + core.vmm.movable_bytes(&state.pool, device.index, can_copy)
}

/// What is away, in the order in which it lies in host memory, so that segments run empty one after another: those with
/// least in them first. What is on disk is not among it: as much of it as there is lease for is asked for, in the order
/// in which it will be copied in. With each the segment that it begins in, 0 if it is in none. `Err`: some of it cannot be read.
pub(super) fn away(
    core: &Arc<Core>,
    device: &Device,
    state: &State,
) -> Result<Vec<(Chunk, u64)>, DeviceError> {
    let program = core.vmm.away(device.index);
    let mut full: BTreeMap<u64, u64> = BTreeMap::new();
    let mut all: Vec<(&[Piece], Chunk)> = Vec::new();
    let pool = state
        .pool
        .evicted_chunks()
        .map(|(pieces, id)| (pieces, Chunk::Pool(id)));
    let program = program
        .iter()
        .map(|(pieces, handle)| (pieces.as_slice(), Chunk::Program(*handle)));
    for (pieces, chunk) in pool.chain(program) {
        for piece in pieces {
            *full.entry(piece.segment).or_default() += piece.len;
        }
        all.push((pieces, chunk));
    }
    all.sort_by_key(|(pieces, _)| pieces.first().map(|p| (full[&p.segment], p.segment, p.offset)));
    let books = &state.pool.books;
    let mut lease = if books.alone { u64::MAX } else { books.unused() };
    let (mut ready, mut missing, mut unreadable) = (Vec::new(), Vec::new(), false);
    for (pieces, chunk) in all {
        let readiness = core.arena.readiness(pieces);
        unreadable |= readiness == Readiness::Unreadable;
        if readiness == Readiness::Ready {
            ready.push((chunk, pieces.first().map_or(0, |piece| piece.segment)));
        }
        // What is read before there is room for it on the card would stand in the way of who makes that room.
        let len: u64 = pieces.iter().map(|piece| piece.len).sum();
        if len <= lease {
            lease -= len;
            if readiness != Readiness::Ready {
                missing.push(pieces);
            }
        } else {
            lease = 0;
        }
    }
    core.arena.fetch(core, missing.into_iter().flatten());
    if unreadable && ready.is_empty() {
        return Err(UNREADABLE);
    }
    Ok(ready)
}

/// What the program's call hears whose memory cannot be read back from disk: the driver's word for memory that is lost.
const UNREADABLE: DeviceError = DeviceError::Driver {
    code: 214,
    call: "reading memory back from disk",
};

/// A chunk on its way out.
#[derive(Debug)]
pub(super) struct Out {
    pub(super) len: u64,
    /// Whether somebody can have written it.
    pub(super) written: bool,
    /// The physical memory.
    pub(super) handle: Handle,
    /// Its kept copy, if it has one still: the mover's now.
    pub(super) kept: Option<Ticket>,
    what: OutOf,
}

#[derive(Debug)]
enum OutOf {
    Pool {
        id: ChunkId,
        at: u64,
    },
    Program {
        handle: u64,
        leaving: vmm::Leaving,
        seat: Option<Seat>,
    },
}

impl Out {
    /// Begins. `None` if it is not there any more.
    pub(super) fn begin(core: &Core, state: &mut State, chunk: Chunk) -> Option<Self> {
        match chunk {
            Chunk::Pool(id) => {
                let (at, len, handle, kept) = state.pool.begin_out(id)?;
                Some(Self {
                    len,
                    written: true,
                    handle,
                    kept,
                    what: OutOf::Pool { id, at },
                })
            }
            Chunk::Program(handle) => {
                let leaving = core.vmm.begin_out(&state.pool, handle)?;
                Some(Self {
                    len: leaving.len,
                    written: leaving.written,
                    handle: leaving.real,
                    kept: leaving.kept,
                    what: OutOf::Program {
                        handle,
                        leaving,
                        seat: None,
                    },
                })
            }
        }
    }

    /// Where copies reach it; may take driver calls.
    pub(super) fn seat(&mut self, device: &Device) -> Result<u64, DeviceError> {
        match &mut self.what {
            OutOf::Pool { at, .. } => Ok(*at),
            OutOf::Program { leaving, seat, .. } => {
                match Seat::take(&*device.memory, leaving.len, leaving.real, &leaving.maps) {
                    Ok(taken) => {
                        *seat = Some(taken);
                        Ok(taken.at)
                    }
                    Err(failed) => {
                        device.lock().pool.keep_remains(failed.remains);
                        Err(failed.error)
                    }
                }
            }
        }
    }

    /// Where it lay, for the copies are over.
    fn leave_seat(&mut self, device: &Device) {
        if let OutOf::Program { seat, leaving, .. } = &mut self.what
            && let Some(seat) = seat.take()
            && let Some(remains) = seat.leave(&*device.memory, leaving.len)
        {
            device.lock().pool.keep_remains(Some(remains));
        }
    }

    /// It stays on the card. The device is not locked.
    pub(super) fn stays(mut self, core: &Core, device: &Device) {
        self.leave_seat(device);
        self.stays_locked(core, &mut device.lock());
    }

    /// It stays on the card; nothing was done with it.
    pub(super) fn stays_locked(self, core: &Core, state: &mut State) {
        match self.what {
            OutOf::Pool { id, .. } => state.pool.stays(id, self.handle),
            OutOf::Program { handle, leaving, .. } => core.vmm.stays(handle, leaving.real),
        }
    }

    /// Where it is mapped, if that is in one place, for nobody else, and unmapping it needs nothing besides.
    pub(super) fn place(&self) -> Option<u64> {
        match self.what {
            OutOf::Pool { at, .. } => Some(at),
            OutOf::Program { .. } => None,
        }
    }

    /// Its bytes are safe: takes it off the card. `mapped`: whether it is mapped still, as what has no [`Self::place`] always is. What
    /// failed, and whether it is on the card still.
    pub(super) fn take_down(
        mut self,
        core: &Core,
        device: &Device,
        copy: HostCopy,
        mapped: bool,
    ) -> Result<(), Undone> {
        self.leave_seat(device);
        let memory = &*device.memory;
        match &self.what {
            OutOf::Pool { id, at } => {
                if mapped && let Err(error) = memory.unmap(*at, self.len) {
                    self.stays_locked(core, &mut device.lock());
                    return Err(Undone::Stands("unmapping", error, copy));
                }
                let released = memory.release(self.handle);
                let pool = &mut device.lock().pool;
                match released {
                    Ok(()) => pool.moved_out(*id, copy),
                    Err(_) => pool.moved_out_but_stuck(*id, copy, self.handle),
                }
                released.map_err(|error| Undone::Stuck("releasing", error))
            }
            OutOf::Program { handle, leaving, .. } => {
                match vmm::take_down(memory, self.len, leaving.real, &leaving.maps) {
                    vmm::Down::Gone => {
                        let pool = &mut device.lock().pool;
                        core.vmm.moved_out(pool, *handle, copy, None);
                        Ok(())
                    }
                    vmm::Down::Stands(error) => {
                        self.stays_locked(core, &mut device.lock());
                        Err(Undone::Stands("unmapping", error, copy))
                    }
                    vmm::Down::Remains(error, remains) => {
                        let pool = &mut device.lock().pool;
                        core.vmm.moved_out(pool, *handle, copy, Some(remains));
                        Err(Undone::Stuck("releasing", error))
                    }
                }
            }
        }
    }
}

/// What [`Out::take_down`] could not do.
#[derive(Debug)]
pub(super) enum Undone {
    /// It is on the card as before; the copy is not needed.
    Stands(&'static str, DeviceError, HostCopy),
    /// Its bytes are in host memory, and something of it is on the card still.
    Stuck(&'static str, DeviceError),
}

/// A chunk on its way in.
#[derive(Debug)]
pub(super) struct In {
    pub(super) len: u64,
    /// Where its bytes are.
    pub(super) copy: HostCopy,
    what: InTo,
    real: Option<Handle>,
}

#[derive(Debug)]
enum InTo {
    Pool {
        id: ChunkId,
        at: u64,
    },
    Program {
        handle: u64,
        away: Away,
        seat: Option<Seat>,
    },
}

impl In {
    /// Begins, if there is lease for it. `Err` says how much is missing; `Ok(None)` that it is not away any more.
    pub(super) fn begin(core: &Core, state: &mut State, chunk: Chunk) -> Result<Option<Self>, u64> {
        Ok(match chunk {
            Chunk::Pool(id) => state.pool.begin_in(id)?.map(|(at, len, copy)| Self {
                len,
                copy,
                what: InTo::Pool { id, at },
                real: None,
            }),
            Chunk::Program(handle) => core.vmm.begin_in(&mut state.pool, handle)?.map(|away| Self {
                len: away.len,
                copy: away.copy.clone(),
                what: InTo::Program {
                    handle,
                    away,
                    seat: None,
                },
                real: None,
            }),
        })
    }

    /// It is on disk, or about to go there: it stays away. Nothing was done with it.
    pub(super) fn not_yet(self, core: &Core, state: &mut State) {
        match self.what {
            InTo::Pool { id, .. } => state.pool.not_moved_in(id, self.copy, None),
            InTo::Program { handle, .. } => core.vmm.not_moved_in(&mut state.pool, handle, self.copy, None),
        }
    }

    /// Makes it anew, mapped as it was, with garbage in it. The address to copy to. On an error it is away as before.
    pub(super) fn bring(mut self, core: &Core, device: &Device) -> Result<(Self, u64), DeviceError> {
        let memory = &*device.memory;
        let failed = match &mut self.what {
            InTo::Pool { at, .. } => match steps::bring(memory, *at, self.len) {
                Ok(handle) => {
                    self.real = Some(handle);
                    let at = *at;
                    return Ok((self, at));
                }
                Err(failed) => {
                    let stuck = failed.stuck.first().copied();
                    (failed.error, Left::Pool(stuck))
                }
            },
            InTo::Program { away, seat, .. } => {
                match vmm::put_up(memory, self.len, &away.props, &away.maps) {
                    Ok(real) if self.copy.is_blank() => {
                        self.real = Some(real);
                        return Ok((self, 0));
                    }
                    Ok(real) => match Seat::take(memory, self.len, real, &away.maps) {
                        Ok(taken) => {
                            *seat = Some(taken);
                            self.real = Some(real);
                            return Ok((self, taken.at));
                        }
                        Err(failed) => {
                            device.lock().pool.keep_remains(failed.remains);
                            let remains = vmm::discard(memory, self.len, real, &away.maps);
                            (failed.error, Left::Program(remains))
                        }
                    },
                    Err(failed) => (failed.error, Left::Program(failed.remains)),
                }
            }
        };
        let (error, left) = failed;
        self.stays_away(core, device, left);
        Err(error)
    }

    fn stays_away(self, core: &Core, device: &Device, left: Left) {
        let pool = &mut device.lock().pool;
        match (self.what, left) {
            (InTo::Pool { id, .. }, Left::Pool(stuck)) => pool.not_moved_in(id, self.copy, stuck),
            (InTo::Pool { id, .. }, Left::Program(_)) => pool.not_moved_in(id, self.copy, None),
            (InTo::Program { handle, .. }, left) => {
                let remains = match left {
                    Left::Program(remains) => remains,
                    Left::Pool(_) => None,
                };
                core.vmm.not_moved_in(pool, handle, self.copy, remains);
            }
        }
    }

    /// A copy failed, or may have: takes the memory away again. Its bytes are where they were.
    pub(super) fn undo(mut self, core: &Core, device: &Device) {
        let memory = &*device.memory;
        let left = match (&mut self.what, self.real) {
            (InTo::Pool { at, .. }, Some(real)) => Left::Pool(steps::take_away(memory, *at, self.len, real)),
            (InTo::Program { away, seat, .. }, Some(real)) => {
                let seat = seat.take().and_then(|seat| seat.leave(memory, self.len));
                device.lock().pool.keep_remains(seat);
                Left::Program(vmm::discard(memory, self.len, real, &away.maps))
            }
            (_, None) => Left::Pool(None),
        };
        self.stays_away(core, device, left);
    }

    /// Its bytes are there. Returns the pieces that are free: all of them, or none if they are kept.
    pub(super) fn done(mut self, core: &Core, device: &Device) -> Vec<Piece> {
        if let InTo::Program { seat, .. } = &mut self.what
            && let Some(seat) = seat.take()
        {
            let remains = seat.leave(&*device.memory, self.len);
            device.lock().pool.keep_remains(remains);
        }
        let at_most = core.config.keep_max.get();
        let (kept, free) = match core.arena.keep(self.copy, at_most, device.index, self.len) {
            Ok(ticket) => (Some(ticket), Vec::new()),
            Err(copy) => (None, copy.pieces),
        };
        let mut state = device.lock();
        match (&self.what, self.real) {
            (InTo::Pool { id, .. }, Some(real)) => {
                state.pool.moved_in(*id, real, kept);
            }
            (InTo::Program { handle, .. }, Some(real)) => {
                core.vmm.moved_in(&mut state.pool, *handle, real, kept);
            }
            (_, None) => debug_assert!(false, "only what was brought is done"),
        }
        state.failing = None;
        free
    }
}

/// What the driver would not take back of an attempt.
#[derive(Debug)]
enum Left {
    Pool(Option<Stuck>),
    Program(Option<Remains>),
}
