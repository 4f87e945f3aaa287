//! From one place off the card to another: bytes in a room of another card go on to host memory, because that card needs the
//! room, or because they could not be copied home from there.
//!
//! A chunk is taken while its copy moves, as for any move, and has the old copy until the new one is complete: a failure leaves it
//! where it was. Nothing waits for this but who wants the room, so it never goes before an order or a restore that gets on.

use std::sync::Arc;
use std::time::Instant;

use ebb_alloc::Piece;
use ebb_device::Direction;

use super::chunks::Chunk;
use crate::arena::room_of;
use crate::core::Core;
use crate::device::{Device, Mode, State};
use crate::kept::HostCopy;
use crate::steps;

/// What became of one chunk.
enum Moved {
    On,
    /// It was freed, or came home.
    Gone,
    /// The arena has no room for it.
    NoRoom,
    Failed,
}

/// Gives back rooms that nobody needs, and moves chunks out of those that are to be left, as long as nothing more urgent is to be
/// done.
pub(super) fn run(core: &Arc<Core>, device: &Device) {
    core.arena.rooms.sweep(core);
    let (mut asked, mut tried) = (false, false);
    while let Some(chunk) = next(core, device) {
        tried = true;
        match move_on(core, device, chunk, &mut asked) {
            Moved::On | Moved::Gone => core.arena.rooms.sweep(core),
            Moved::NoRoom | Moved::Failed => {
                core.arena.rooms.put_off(device.index);
                break;
            }
        }
    }
    if !tried && core.arena.rooms.has_work(device.index) {
        // Somebody frees what lies there, at this moment.
        core.arena.rooms.put_off(device.index);
    }
    if asked {
        core.arena.want_no_more();
        core.link.poke();
    }
    device.wake();
}

/// A chunk whose room is to be left. `None`: there is none, or something else comes first.
fn next(core: &Core, device: &Device) -> Option<Chunk> {
    let state = device.lock();
    let other = state.stop || state.dead || !state.orders.is_empty() || core.sleep.holds();
    if other || core.is_exiting() || !core.arena.rooms.has_work(device.index) {
        return None;
    }
    let leaves = |pieces: &[Piece]| room_of(pieces).is_some_and(|room| core.arena.rooms.is_to_leave(room));
    let pool = state.pool.evicted_chunks();
    let found = pool
        .filter(|(pieces, _)| leaves(pieces))
        .map(|(_, id)| Chunk::Pool(id))
        .next();
    found.or_else(|| {
        let program = core.vmm.away(device.index);
        let mut leaving = program.iter().filter(|(pieces, _)| leaves(pieces));
        leaving.next().map(|(_, handle)| Chunk::Program(*handle))
    })
}

fn begin(core: &Core, state: &mut State, chunk: Chunk) -> Option<(u64, HostCopy)> {
    match chunk {
        Chunk::Pool(id) => state.pool.begin_rehome(id),
        Chunk::Program(handle) => core.vmm.begin_rehome(handle),
    }
}

fn end(core: &Core, device: &Device, chunk: Chunk, copy: HostCopy) {
    let mut state = device.lock();
    match chunk {
        Chunk::Pool(id) => state.pool.rehomed(id, copy),
        Chunk::Program(handle) => core.vmm.rehomed(handle, copy),
    }
    drop(state);
    device.wake();
}

fn move_on(core: &Core, device: &Device, chunk: Chunk, asked: &mut bool) -> Moved {
    let memory = &*device.memory;
    let Some((len, old)) = begin(core, &mut device.lock(), chunk) else {
        return Moved::Gone;
    };
    let Some(from) = room_of(&old.pieces).and_then(|room| core.arena.rooms.address(room)) else {
        end(core, device, chunk, old);
        return Moved::Gone;
    };
    let Some(pieces) = room_in_host(core, device, len, asked) else {
        end(core, device, chunk, old);
        return Moved::NoRoom;
    };
    let runs = old.filled(len);
    let copied = core
        .arena
        .transfer(device, Direction::Out, from, &pieces, &runs)
        .and_then(|transfer| transfer.wait(&core.arena, memory));
    if let Err(error) = copied {
        core.events.note(format!(
            "device {}: moving memory on from another card: {error}; tried again",
            device.index
        ));
        device.lock().counters.driver_errors += 1;
        if steps::settle(memory, Direction::Out) {
            core.arena.give_back(&pieces);
        } else {
            core.arena.lose(&pieces);
        }
        end(core, device, chunk, old);
        return Moved::Failed;
    }
    let room = old.pieces;
    end(core, device, chunk, HostCopy { pieces, ..old });
    core.arena.give_back(&room);
    core.arena.rooms.moved_on(len);
    Moved::On
}

/// Host memory for a chunk, after waiting for it if it has to be. `None` if none comes in time.
fn room_in_host(core: &Core, device: &Device, len: u64, asked: &mut bool) -> Option<Vec<Piece>> {
    let granule = device.memory.granularity();
    let taken = core.arena.take(len, granule);
    if taken.is_some() {
        return taken;
    }
    *asked = true;
    core.link.send(core.arena.want_now(len, granule));
    let deadline = Instant::now() + core.config.arena_wait;
    let mut state = device.lock();
    loop {
        if let Some(pieces) = core.arena.take(len, granule) {
            return Some(pieces);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        // Straight home is better.
        let home = core.gate.waiters_for(device.index) > 0 && state.pool.books.unused() > 0;
        let other = state.stop || !state.orders.is_empty() || home;
        if left.is_zero() || other || state.mode != Mode::Connected || core.is_exiting() {
            return None;
        }
        state = device.wait_for(state, left);
    }
}
