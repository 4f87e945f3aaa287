//! A device's memory leaves the card and comes back. One owner thread per device does it all.
//!
//! ```text
//! Resident -> Closing -> CopyingOut -> Evicted -> Waiting(lease) -> CopyingIn -> Resident
//!    ^           | busy      | failed     ^           ^                | failed
//!    +-----------+-----------+            |           +----------------+ what is back stays; retried with back-off
//!      mapped again, nothing lost         +--- some chunks went before the failure
//! ```
//! *Resident*: the gate is open as far as this device goes. In every other phase it holds the gate closed, and from
//! *CopyingOut* on the device is quiet: nothing of the program runs.
//!
//! # Rules
//! * A chunk's physical memory goes only after the copy of it was waited for and found good.
//! * What moves is a chunk of the pool or a memory that the program made itself; `chunks` makes one form of both.
//! * A chunk is in one place. What moves is known to the owner alone ([`crate::pool::Place::Moving`]); frees of it wait
//!   for these few milliseconds.
//! * What need not be copied is not ([`survey`]): what equals its kept copy, and what is zero.
//! * Any failure leaves chunks on the card or in host memory, whole. While one is in host memory the gate stays closed.
//! * Small blocks may be brought together meanwhile ([`mesh`]): the same bytes at the same addresses, in fewer granules.
//! * Bytes that lie on another card go on to host memory when that card is wanted ([`rehome`]); a restore takes them from where they are.
//! * Lease is counted before the driver's call on the way in, and after it on the way out.
//! * No driver call is made under a lock; waiting is bounded, or ends with a change of state.

#[cfg(test)]
mod beside_tests;
mod chunks;
#[cfg(test)]
mod clean_tests;
mod drops;
mod evict;
mod mesh;
mod rehome;
#[cfg(test)]
mod rehome_tests;
mod restore;
mod survey;
#[cfg(test)]
mod tests;
mod trim;

use std::sync::Arc;
use std::time::Duration;

use crate::core::Core;
use crate::device::{Device, Order, Phase};
use crate::frameworks;
pub(crate) use chunks::movable_bytes;
pub(crate) use mesh::make_room as mesh_for_room;

/// Chunks under way at once: one whose copy ends, one that copies, one that is made ready.
const DEPTH: usize = 3;

enum Job {
    Order(Order),
    /// What is kept is wanted back, by the number of the question.
    Trim(u64),
    Restore,
    /// Bytes on other cards are to go, or to go elsewhere.
    Rehome,
    /// Small blocks are to be brought together for an allocation.
    Mesh,
    /// The device rests.
    Rest,
    /// Everything evicted was freed.
    Reopen,
    End,
}

/// The life of the owner thread.
pub(crate) fn own(core: &Arc<Core>, device: &Arc<Device>) {
    let mut rest = mesh::Rest::new();
    loop {
        let job = next(core, device, &mut rest);
        // Also while the program ends: its own destructors may wait for a restore.
        let _at_driver = core.at_driver();
        match job {
            Job::Order(order) => evict::carry_out(core, device, &order),
            Job::Trim(query) => trim::carry_out(core, device, query),
            Job::Mesh => mesh::needed(core, device),
            Job::Rest => mesh::rested(core, device),
            Job::Restore => restore::run(core, device),
            Job::Rehome => rehome::run(core, device),
            Job::Reopen => reopen(core, device),
            Job::End => break,
        }
    }
    let mut state = device.lock();
    let closed = std::mem::take(&mut state.closed);
    state.phase = Phase::Resident;
    state.owner_ended = true;
    drop(state);
    device.wake();
    if closed {
        core.gate.open(device.index);
    }
}

fn next(core: &Core, device: &Device, rest: &mut mesh::Rest) -> Job {
    let mut paused = false;
    let mut state = device.lock();
    loop {
        if state.stop {
            return Job::End;
        }
        if core.sleep.holds() {
            state = device.wait(state);
            continue;
        }
        if let Some(order) = state.orders.pop_front() {
            state.current = Some((order.id, false));
            return Job::Order(order);
        }
        if let Some(query) = state.trims.pop_front() {
            return Job::Trim(query);
        }
        if state.mesh.wanted > state.mesh.done {
            return Job::Mesh;
        }
        if state.closed && (state.pool.books.evicted == 0 || state.dead) {
            if state.torn && !state.dead && !paused {
                // It was tried: again in a while.
                let pause = restore::give_up_or_pause(core, device, &mut state);
                state = device.wait_for(state, pause.unwrap_or(restore::BACK_OFF_MAX));
                paused = true;
                continue;
            }
            return Job::Reopen;
        }
        if state.closed && (state.bring_back || core.gate.waiters_for(device.index) > 0) {
            return Job::Restore;
        }
        let rooms = &core.arena.rooms;
        if !state.dead && rooms.has_work(device.index) {
            return Job::Rehome;
        }
        let rested = if state.closed || state.dead {
            None
        } else {
            rest.due(core, device)
        };
        if rested == Some(Duration::ZERO) {
            return Job::Rest;
        }
        state = match rooms.next_try(device.index).into_iter().chain(rested).min() {
            Some(later) => device.wait_for(state, later),
            None => device.wait(state),
        };
    }
}

/// Lets the program in again. Not while something is torn: the next round tries again.
fn reopen(core: &Core, device: &Device) {
    let mut state = device.lock();
    if state.torn && !state.dead && !state.stop {
        state.phase = Phase::Evicted;
        drop(state);
        if let Err(error) = frameworks::mend(core, device.index) {
            restore::failure(core, device, "mapping blocks again", error);
            return;
        }
        state = device.lock();
    }
    state.torn = false;
    state.phase = Phase::Resident;
    state.failing = None;
    state.bring_back = false;
    state.cancel_restore_asks(core);
    let closed = std::mem::take(&mut state.closed);
    drop(state);
    if closed {
        core.gate.open(device.index);
    }
    core.link.poke();
}
