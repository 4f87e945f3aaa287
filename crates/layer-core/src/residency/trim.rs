//! Giving back what is kept for later, because somebody asked: no byte that lives leaves the card, and nothing waits for work.

use ebb_protocol::ToDaemon;
use ebb_units::Bytes;

use super::mesh;
use crate::core::Core;
use crate::device::Device;
use crate::{frameworks, streamed};

/// Gives back what streams-ordered pools and the frameworks' pool do not need, cached spans, and the lease for all that.
pub(super) fn carry_out(core: &Core, device: &Device, query: u64) {
    let dead = device.lock().dead;
    if !dead {
        streamed::make_room(core, device.index);
        frameworks::trim_as_owner(core, device.index);
        mesh::trimmed(core, device);
        let apart = device.lock().pool.drop_cached(u64::MAX);
        device.take_apart(core, &apart);
        device.retry_stuck();
    }
    let mut state = device.lock();
    let bytes = state.give_unused();
    if let Some(device) = state.slot {
        let bytes = Bytes(bytes);
        if !bytes.is_zero() {
            core.link.send(ToDaemon::Return { device, bytes });
        }
        core.link.send(ToDaemon::Trimmed { device, query, bytes });
    }
    drop(state);
    core.events.note(format!(
        "device {}: a trim gave {} back",
        device.index,
        Bytes(bytes)
    ));
    core.link.poke();
}
