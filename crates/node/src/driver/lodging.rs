//! Room that one card lends to what another evicts: the conversation with programs. Who gets how much is the arbiter's business.
//!
//! The memory is made by the program that borrows it, on the lender's card, so NVML shows it there under that program. It is counted to the
//! program's account on its *own* card, as lodged, and to nobody on the lender's: a program without an account there is no stranger for it.

use std::collections::BTreeMap;
use std::time::Duration;

use ebb_policy::{Event, Time};
use ebb_protocol::ToLayer;
use ebb_protocol::wire::LodgedAt;
use ebb_units::{Bytes, ClientId, DeviceId, DeviceUuid};

use super::{Driver, PeerId};

/// How long what was lodged a moment ago may still show in NVML.
const GRACE: Duration = Duration::from_secs(3);
/// More cards than one can reach.
const MAX_LENDERS: usize = 64;

/// When processes had room on cards last, by process id.
pub(super) type Lately = BTreeMap<(u32, DeviceId), Time>;

impl Driver {
    fn client_id(&mut self, peer: PeerId, device: DeviceId) -> Option<ClientId> {
        self.client_mut(peer, device).map(|client| client.id)
    }

    /// The cards that a program's card reaches.
    pub(super) fn lodging_lenders(&mut self, peer: PeerId, device: DeviceId, mut lenders: Vec<DeviceUuid>) {
        lenders.truncate(MAX_LENDERS);
        if let Some(client) = self.client_mut(peer, device) {
            client.lenders = lenders;
        }
    }

    /// A program is about to evict, and looks for room elsewhere.
    pub(super) fn lodging_ask(&mut self, peer: PeerId, device: DeviceId, bytes: Bytes) {
        let Some(client) = self.client_mut(peer, device) else {
            return;
        };
        let (id, lenders) = (client.id, client.lenders.clone());
        let known = lenders.iter().filter_map(|uuid| self.device_named(*uuid));
        // What others hold is known only when all have said so.
        let open = self.recovery.is_none() && self.config.peer.enabled;
        let lenders: Vec<DeviceId> = known.filter(|_| open).collect();
        self.feed(Event::LodgingAsked {
            client: id,
            lenders,
            bytes,
            most: self.config.peer.limit,
        });
    }

    pub(super) fn lodging_left(&mut self, peer: PeerId, device: DeviceId, lender: DeviceUuid, bytes: Bytes) {
        let Some(client) = self.client_id(peer, device) else {
            return;
        };
        let Some(lender) = self.device_named(lender) else {
            return;
        };
        self.note_lodged(peer, lender);
        self.feed(Event::LodgingLeft {
            client,
            lender,
            bytes,
        });
    }

    pub(super) fn lodging_held(&mut self, peer: PeerId, device: DeviceId, held: &[LodgedAt]) {
        let Some(client) = self.client_id(peer, device) else {
            return;
        };
        let named = |at: &LodgedAt| Some((self.device_named(at.lender)?, at.bytes));
        let held: Vec<(DeviceId, Bytes)> = held.iter().filter_map(named).collect();
        for (lender, _) in &held {
            self.note_lodged(peer, *lender);
        }
        self.feed(Event::LodgingHeld { client, held });
    }

    /// The arbiter's answer to an ask.
    pub(super) fn lodging_lent(&mut self, client: ClientId, lender: Option<DeviceId>, bytes: Bytes) {
        let Some((peer, device)) = self.clients.get(&client).copied() else {
            return;
        };
        let lends = |lender| self.devices.get(&lender).map(|device| device.uuid);
        let uuid = lender.and_then(lends).unwrap_or(DeviceUuid([0; 16]));
        if let Some(lender) = lender {
            self.note_lodged(peer, lender);
        }
        self.send(
            peer,
            &ToLayer::LodgingLent {
                device: device.0,
                lender: uuid,
                bytes,
            },
            Vec::new(),
        );
    }

    /// Room is wanted back.
    pub(super) fn lodging_wanted(&mut self, client: ClientId, lender: DeviceId, bytes: Bytes) {
        let Some((peer, device)) = self.clients.get(&client).copied() else {
            return;
        };
        let Some(uuid) = self.devices.get(&lender).map(|device| device.uuid) else {
            return;
        };
        self.send(
            peer,
            &ToLayer::LodgingWanted {
                device: device.0,
                lender: uuid,
                bytes,
            },
            Vec::new(),
        );
    }

    /// NVML's next words may show what was there a moment ago, or what is about to be.
    fn note_lodged(&mut self, peer: PeerId, lender: DeviceId) {
        let process = self.peers.get(&peer).map(|peer| peer.process);
        let Some(pid) = process.and_then(|key| self.processes.get(&key)).map(|p| p.pid) else {
            return;
        };
        let now = self.now();
        self.lodged_lately.retain(|_, at| now.since(*at) < GRACE);
        self.lodged_lately.insert((pid, lender), now);
    }

    /// Whether a process had room on a card a moment ago.
    pub(super) fn lodged_lately(&self, pid: u32, lender: DeviceId) -> bool {
        let now = self.now();
        let at = self.lodged_lately.get(&(pid, lender));
        at.is_some_and(|at| now.since(*at) < GRACE)
    }
}
