//! What the driver placed for programs beside their leases, as far as it can be ordered away: managed memory, and what it keeps for graphs.
//!
//! NVML sees it as memory that a process has beyond its account, and so it is overhead. The library says how much of that could go at the
//! most (that is *loose*), and what went. Its word is believed at once, so that who waits for the room has it, until NVML's next sample says how it is.

use ebb_units::{Bytes, DeviceId};

use super::{Driver, PeerId};

impl Driver {
    /// A library tells how much could go, and how much went.
    pub(super) fn beside(&mut self, peer: PeerId, device: DeviceId, loose: Bytes, gone: Bytes) {
        let Some(client) = self.client_mut(peer, device) else {
            return;
        };
        client.loose = loose;
        client.extra = client.extra.saturating_sub(gone);
        if !gone.is_zero() {
            let process = self.peers.get(&peer).map(|peer| peer.process);
            let process = process.and_then(|key| self.processes.get(&key));
            if let Some(pid) = process.map(|process| process.pid) {
                self.has_gone(pid, device, gone);
            }
            self.mark(peer);
        }
        self.feed_usage(peer, device);
    }

    /// A library tells how much of what it has would leave without a copy.
    pub(super) fn clean(&mut self, peer: PeerId, device: DeviceId, clean: Bytes) {
        if let Some(client) = self.client_mut(peer, device) {
            client.usage.clean = clean;
            self.feed_usage(peer, device);
        }
    }
}
