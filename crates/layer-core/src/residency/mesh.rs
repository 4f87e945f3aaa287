//! Small blocks of the frameworks' pool are brought together by copying: two granules that they keep become one, at the same addresses.
//!
//! ```text
//!                 nothing to gain, work that does not end, a capture
//! Resident ◄──────────────┐
//!    │ idle, a trim,      │        each pair: copied, waited for, mapped, released
//!    │ no room otherwise  │       ┌────┐
//!    └──► Closing ────────┴──► Meshing ┘ ──► Resident       no mapping could be made: *torn*, the gate stays closed ──► mended ──► Resident
//! ```
//! * *Idle*: nothing has touched the device for a while, and blocks have come or gone since the last time. It ends when somebody waits.
//! * *A trim*: somebody asked for all that can be had; work is not waited for.
//! * *No room*: an allocation would fail, or an eviction has nowhere to copy to. Work is waited for, as an eviction does.
//!
//! Only with the gate closed and the device quiet: what is mapped at a block's address changes. Graphs know addresses, which stay. Who knows the
//! physical memory keeps it: what is exported, registered, retained or pinned otherwise does not take part.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{evict, reopen};
use crate::core::Core;
use crate::device::{Device, Phase};
use crate::frameworks;

/// Less between blocks is not worth a closed gate to a program that rests.
const WORTH: u64 = 8;
/// How long work is waited for by who does not need it.
const MOMENT: Duration = Duration::from_millis(20);
/// How long the gate is closed for one round, at most, unless the bytes are needed.
const ROUND: Duration = Duration::from_millis(200);
/// A thread that waits for the owner gives up after so long beyond the wait for work.
const SLACK: Duration = Duration::from_secs(2);

/// What the owner knows of a device that rests.
#[derive(Debug)]
pub(super) struct Rest {
    touches: u64,
    since: Instant,
    /// The blocks when they were looked at last.
    seen: Option<u64>,
}

impl Rest {
    pub(super) fn new() -> Self {
        Self {
            touches: 0,
            since: Instant::now(),
            seen: None,
        }
    }

    /// When to look again; zero if the device has rested, and something has changed since it did so the last time. `None`: nothing is there to look at.
    pub(super) fn due(&mut self, core: &Core, device: &Device) -> Option<Duration> {
        let changes = frameworks::changes(core, device.index)?;
        let (now, rest) = (Instant::now(), core.config.pool_rest);
        let touches = core.touches(device.index);
        if touches != self.touches {
            (self.touches, self.since) = (touches, now);
        }
        let left = rest.saturating_sub(now.duration_since(self.since));
        if !left.is_zero() {
            return Some(left);
        }
        if self.seen == Some(changes) {
            return Some(rest);
        }
        self.seen = Some(changes);
        let least = WORTH * device.memory.granularity();
        let worth = frameworks::scattered(core, device.index) >= least;
        Some(if worth { Duration::ZERO } else { rest })
    }
}

/// Brings together what can be while nobody waits for the device.
pub(super) fn rested(core: &Core, device: &Device) {
    let round = Instant::now() + ROUND;
    let go_on = || {
        Instant::now() < round && core.gate.waiters_for(device.index) == 0 && device.lock().orders.is_empty()
    };
    round_of(core, device, MOMENT, go_on);
}

/// Brings together what can be, because somebody asked for it.
pub(super) fn trimmed(core: &Core, device: &Device) {
    let round = Instant::now() + ROUND;
    round_of(core, device, MOMENT, || {
        Instant::now() < round && device.lock().orders.is_empty()
    });
}

/// The same for allocations that have no room, as long as it takes.
pub(super) fn needed(core: &Core, device: &Device) {
    let wanted = device.lock().mesh.wanted;
    let gained = round_of(core, device, core.waits.busy(), || true);
    let mut state = device.lock();
    state.mesh.done = wanted;
    state.mesh.gained = gained;
    drop(state);
    device.wake();
}

/// The gate is closed, the device quiet, and there is no room to copy to: what can be had without.
pub(super) fn in_place_of_copies(core: &Core, device: &Device, bytes: u64) {
    if worth_a_look(core, device) {
        let mut left = bytes.div_ceil(device.memory.granularity());
        frameworks::mesh_as_owner(core, device, || {
            let more = left > 0 && !core.is_exiting();
            left = left.saturating_sub(1);
            more
        });
    }
}

fn worth_a_look(core: &Core, device: &Device) -> bool {
    frameworks::scattered(core, device.index) >= device.memory.granularity()
}

/// Closes the gate for it, and opens it again. How many bytes went.
fn round_of(core: &Core, device: &Device, busy: Duration, mut go_on: impl FnMut() -> bool) -> u64 {
    {
        let state = device.lock();
        if state.closed || state.dead || state.stop || core.is_exiting() {
            return 0;
        }
    }
    if !worth_a_look(core, device) || !frameworks::would_mesh(core, device.index) {
        return 0;
    }
    if evict::close(core, device, Instant::now() + busy).is_err() {
        return 0;
    }
    device.lock().phase = Phase::Meshing;
    let gained = frameworks::mesh_as_owner(core, device, || !core.is_exiting() && go_on());
    reopen(core, device);
    gained
}

/// An allocation has no room: small blocks are brought together for it, by the owner thread. Whether anything came of that. No lock held, outside the gate.
pub(crate) fn make_room(core: &Core, device: &Arc<Device>) -> bool {
    if !worth_a_look(core, device) || core.captures() > 0 {
        return false;
    }
    let changes = frameworks::changes(core, device.index);
    let deadline = Instant::now() + core.waits.busy() + SLACK;
    let mut state = device.lock();
    if state.mesh.vain == changes && changes.is_some() {
        return false;
    }
    state.mesh.wanted += 1;
    let turn = state.mesh.wanted;
    drop(state);
    device.wake();
    let mut state = device.lock();
    while state.mesh.done < turn {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || state.stop || state.dead || state.owner_ended || core.is_exiting() {
            return false;
        }
        state = device.wait_for(state, left);
    }
    if state.mesh.gained == 0 {
        // The same blocks are not looked at again for the next one that has no room.
        state.mesh.vain = changes;
        return false;
    }
    true
}
