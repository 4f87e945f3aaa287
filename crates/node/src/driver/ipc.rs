//! Memory that programs share with each other: who may have what, who has it open, and to whom it is counted.
//!
//! ```text
//!              ShareOpen            ShareGive(OK)              ShareClose, death of the importer
//!   (nothing) ----------> asked  ----------------> open  ------------------------------------> (nothing)
//!                           | ShareGive(not OK),     | death of the exporter
//!                           | exporter gone          v
//!                           +------> (nothing)     orphan: counted to one of the importers of its block
//! ```
//! The daemon passes descriptors on and keeps none. What it says about a hold is believed by the exporter, which pins
//! memory as long as the hold lasts; so every hold ends with a `ShareLet`, whatever became of the importer.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ebb_policy::Event;
use ebb_protocol::ToLayer;
use ebb_protocol::wire::{HeldShare, MAX_FDS, feature, share};
use ebb_units::{Bytes, DeviceId, DeviceUuid};

use super::timers::Timer;
use super::{ConnId, Driver, PeerId};
use crate::config::Pinned;
use crate::{process, say};

/// How often a program is looked at that others wait for.
const OPENING_LOOK: Duration = Duration::from_secs(4);
/// What one program may have open.
const MAX_HOLDS: usize = 1 << 16;

/// A name that handles carry.
type Name = [u8; 16];

/// One opening of memory of another process.
#[derive(Clone, Debug)]
struct Hold {
    importer: PeerId,
    name: Name,
    /// `None`: it is gone.
    exporter: Option<PeerId>,
    /// The block's number, card and size, once the exporter has said it.
    block: Option<(u64, DeviceId, Bytes)>,
    /// Counted to the importer.
    inherited: bool,
    /// What the exporter was asked for and has not answered.
    open: Option<Waiting>,
}

/// The importer waits for the exporter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    /// It may take its time: what is asked for may have to come back to the card first.
    Working,
    /// It was stopped when it was looked last.
    Stopped,
}

/// All sharing of this node.
#[derive(Debug, Default)]
pub(super) struct Shares {
    names: BTreeMap<Name, PeerId>,
    holds: BTreeMap<u64, Hold>,
    /// Holds that exporters know of and this daemon does not, until importers had time to declare them.
    claimed: BTreeMap<u64, PeerId>,
}

impl Shares {
    fn of(&self, wanted: impl Fn(&Hold) -> bool) -> Vec<u64> {
        self.holds
            .iter()
            .filter(|(_, hold)| wanted(hold))
            .map(|(id, _)| *id)
            .collect()
    }
}

impl Driver {
    /// What this daemon can do; right after the welcome.
    pub(super) fn tell_features(&mut self, peer: PeerId) {
        let held = if self.sees_processes() { feature::HELD } else { 0 };
        let lodging = if self.config.peer.enabled {
            feature::LODGING
        } else {
            0
        };
        let ring = match self.config.arena.pinned {
            Pinned::All => 0,
            Pinned::Ring => feature::RING,
        };
        let common = if self.arena.has_common() {
            feature::COMMON
        } else {
            0
        };
        let bits = feature::SHARE | held | lodging | ring | common;
        self.send(peer, &ToLayer::Features { bits }, Vec::new());
    }

    /// A process says how its handles are called, and which holds on its memory it knows of.
    pub(super) fn share_name(&mut self, conn: ConnId, peer: PeerId, name: Name, lent: Vec<u64>) {
        let process = |peer: PeerId| self.peers.get(&peer).map(|peer| peer.process);
        let owner = self.shares.names.get(&name).copied();
        if owner.is_some_and(|owner| process(owner).is_some() && process(owner) != process(peer)) {
            return self.bad_packet(conn, "its name for shared memory is another's");
        }
        self.shares.names.insert(name, peer);
        self.send(peer, &ToLayer::ShareNamed { name }, Vec::new());
        for hold in self
            .shares
            .of(|hold| hold.name == name && hold.exporter.is_none())
        {
            if let Some(hold) = self.shares.holds.get_mut(&hold)
                && !hold.inherited
            {
                hold.exporter = Some(peer);
            }
        }
        let mut unknown = false;
        for hold in lent.into_iter().take(MAX_HOLDS) {
            match self.shares.holds.get(&hold) {
                Some(known) if known.exporter == Some(peer) => {}
                _ => {
                    self.shares.claimed.insert(hold, peer);
                    unknown = true;
                }
            }
        }
        if unknown {
            self.after(self.config.recovery, Timer::Shares);
        }
    }

    /// A process says what it has open.
    pub(super) fn share_held(&mut self, peer: PeerId, held: Vec<HeldShare>, all: bool) {
        let named: BTreeSet<u64> = held.iter().map(|held| held.hold).collect();
        let mut unknown = false;
        for held in held {
            if self.shares.holds.contains_key(&held.hold) || self.holds_of(peer) >= MAX_HOLDS {
                continue;
            }
            let Some(device) = self.device_named(held.device) else {
                continue;
            };
            let exporter = self.shares.names.get(&held.name).copied();
            self.shares.claimed.remove(&held.hold);
            let card = self.devices.get(&device).map_or(Bytes::ZERO, |card| card.total);
            unknown |= exporter.is_none();
            self.shares.holds.insert(
                held.hold,
                Hold {
                    importer: peer,
                    name: held.name,
                    exporter,
                    block: Some((held.block, device, held.bytes.min(card))),
                    inherited: held.inherited,
                    open: None,
                },
            );
        }
        if all {
            // What it does not name it has closed while nobody listened.
            for hold in self
                .shares
                .of(|hold| hold.importer == peer && hold.block.is_some())
            {
                if !named.contains(&hold) {
                    self.share_close(peer, hold);
                }
            }
        }
        if unknown {
            self.after(self.config.recovery, Timer::Shares);
        }
    }

    /// The time is over in which programs declare themselves: what only one side knows of has ended.
    pub(super) fn shares_overdue(&mut self) {
        for (hold, exporter) in std::mem::take(&mut self.shares.claimed) {
            if !self.shares.holds.contains_key(&hold) {
                self.send(exporter, &ToLayer::ShareLet { hold }, Vec::new());
            }
        }
        let names: BTreeSet<Name> = self
            .shares
            .holds
            .values()
            .filter(|hold| hold.exporter.is_none() && !hold.inherited)
            .map(|hold| hold.name)
            .collect();
        for name in names {
            self.inherit(name, None);
        }
    }

    fn holds_of(&self, peer: PeerId) -> usize {
        self.shares
            .holds
            .values()
            .filter(|hold| hold.importer == peer)
            .count()
    }

    /// A program opens memory of another.
    pub(super) fn share_open(
        &mut self,
        conn: ConnId,
        peer: PeerId,
        id: u64,
        handle: [u8; share::HANDLE],
        from: u32,
    ) {
        let mut name = [0; 16];
        name.copy_from_slice(&handle[share::NAME]);
        match self.shares.holds.get(&id) {
            Some(known) if known.importer != peer || known.name != name => {
                return self.bad_packet(conn, "it names a hold that is another's");
            }
            Some(_) => {}
            None if from != 0 => return self.refuse_share(peer, id, share::UNKNOWN),
            None if self.holds_of(peer) >= MAX_HOLDS => return self.refuse_share(peer, id, share::FAILED),
            None => {
                let exporter = self.shares.names.get(&name).copied();
                let hold = Hold {
                    importer: peer,
                    name,
                    exporter,
                    block: None,
                    inherited: false,
                    open: None,
                };
                self.shares.holds.insert(id, hold);
            }
        }
        let process = |peer: PeerId| self.peers.get(&peer).map(|peer| peer.process);
        let exporter = self.shares.holds.get(&id).and_then(|hold| hold.exporter);
        let Some(exporter) = exporter.filter(|exporter| self.is_connected(*exporter)) else {
            return self.end_hold(id, share::UNKNOWN);
        };
        if process(exporter) == process(peer) {
            return self.end_hold(id, share::OWN);
        }
        let pid = process(peer)
            .and_then(|key| self.processes.get(&key))
            .map_or(0, |process| process.pid);
        let ask = ToLayer::ShareAsk {
            hold: id,
            pid,
            handle,
            from,
        };
        self.send(exporter, &ask, Vec::new());
        if let Some(hold) = self.shares.holds.get_mut(&id)
            && hold.open.replace(Waiting::Working).is_none()
        {
            self.after(OPENING_LOOK, Timer::Opening(id));
        }
    }

    /// Somebody still waits for memory of another program, perhaps. One that was stopped at two looks is not waited for any longer.
    pub(super) fn opening_waits(&mut self, id: u64) {
        let Some(hold) = self.shares.holds.get(&id) else {
            return;
        };
        let (Some(waiting), Some(exporter)) = (hold.open, hold.exporter) else {
            return;
        };
        let pid = self
            .peers
            .get(&exporter)
            .and_then(|peer| self.processes.get(&peer.process))
            .map(|process| process.pid);
        let now = match pid.filter(|pid| process::is_stopped(*pid)) {
            Some(pid) if waiting == Waiting::Stopped => {
                say::warning!(
                    "pid {pid} is stopped and cannot hand out its memory: who wants to open it is refused"
                );
                return self.end_hold(id, share::FAILED);
            }
            Some(_) => Waiting::Stopped,
            None => Waiting::Working,
        };
        if let Some(hold) = self.shares.holds.get_mut(&id) {
            hold.open = Some(now);
            self.after(OPENING_LOOK, Timer::Opening(id));
        }
    }

    fn refuse_share(&mut self, importer: PeerId, hold: u64, status: u32) {
        let refused = ToLayer::ShareChunks {
            hold,
            status,
            device: DeviceUuid([0; 16]),
            block: 0,
            bytes: Bytes::ZERO,
            offset: Bytes::ZERO,
            size: Bytes::ZERO,
            from: 0,
            count: 0,
            chunks: Vec::new(),
        };
        self.send(importer, &refused, Vec::new());
    }

    /// Opening did not work out.
    fn end_hold(&mut self, id: u64, status: u32) {
        if let Some(hold) = self.forget_hold(id) {
            self.refuse_share(hold.importer, id, status);
        }
    }

    /// A hold is over: the exporter hears of it, and what was counted to the importer goes to the next, or is given back.
    fn forget_hold(&mut self, id: u64) -> Option<Hold> {
        let hold = self.shares.holds.remove(&id)?;
        if let Some(exporter) = hold.exporter {
            self.send(exporter, &ToLayer::ShareLet { hold: id }, Vec::new());
        } else if let Some((block, device, bytes)) = hold.block.filter(|_| hold.inherited)
            && !self.inherit(hold.name, Some(hold.importer)).contains(&block)
            && let Some(client) = self.client_mut(hold.importer, device).map(|client| client.id)
        {
            self.mark(hold.importer);
            self.feed(Event::Returned { client, bytes });
        }
        Some(hold)
    }

    /// A program hands its memory out.
    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    pub(super) fn share_give(
        &mut self,
        conn: ConnId,
        peer: PeerId,
        id: u64,
        status: u32,
        device: DeviceId,
        [block, from, count]: [u64; 3],
        [bytes, offset, size]: [Bytes; 3],
        chunks: Vec<Bytes>,
        fds: Vec<OwnedFd>,
    ) {
        let known = self
            .shares
            .holds
            .get_mut(&id)
            .filter(|hold| hold.exporter == Some(peer))
            .map(|hold| {
                hold.open = None;
                hold.importer
            });
        let Some(importer) = known else {
            // The importer is gone meanwhile.
            return self.send(peer, &ToLayer::ShareLet { hold: id }, Vec::new());
        };
        if status != share::OK {
            return self.end_hold(id, status);
        }
        let card = self.devices.get(&device).map(|card| (card.uuid, card.total));
        let Some((uuid, total)) = card.filter(|_| chunks.len() == fds.len() && fds.len() <= MAX_FDS) else {
            self.bad_packet(conn, "it hands out memory that cannot be");
            return self.end_hold(id, share::FAILED);
        };
        if let Some(hold) = self.shares.holds.get_mut(&id) {
            hold.block = Some((block, device, bytes.min(total)));
        }
        let cut = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let message = ToLayer::ShareChunks {
            hold: id,
            status,
            device: uuid,
            block,
            bytes,
            offset,
            size,
            from: cut(from),
            count: cut(count),
            chunks,
        };
        self.send(importer, &message, fds.into_iter().map(Arc::new).collect());
    }

    /// A program has closed what it had open.
    pub(super) fn share_close(&mut self, peer: PeerId, id: u64) {
        if self
            .shares
            .holds
            .get(&id)
            .is_some_and(|hold| hold.importer == peer)
        {
            self.forget_hold(id);
        }
    }

    /// A connection is over; what was asked of the program is not answered any more.
    pub(super) fn shares_unanswered(&mut self, exporter: PeerId) {
        for id in self
            .shares
            .of(|hold| hold.exporter == Some(exporter) && hold.block.is_none())
        {
            self.end_hold(id, share::UNKNOWN);
        }
    }

    /// A session is over for good. Its lease is still in the ledger.
    pub(super) fn shares_left(&mut self, peer: PeerId) {
        for id in self.shares.of(|hold| hold.importer == peer) {
            self.forget_hold(id);
        }
        self.shares_unanswered(peer);
        self.shares.claimed.retain(|_, exporter| *exporter != peer);
        let names: Vec<Name> = self
            .shares
            .names
            .extract_if(.., |_, owner| *owner == peer)
            .map(|(name, _)| name)
            .collect();
        for hold in self.shares.holds.values_mut() {
            if hold.exporter == Some(peer) {
                hold.exporter = None;
            }
        }
        for name in names {
            self.inherit(name, Some(peer));
        }
    }

    /// A program has left a card, with everything that it had there.
    pub(super) fn shares_detached(&mut self, peer: PeerId, device: DeviceId) {
        let there = |hold: &Hold| hold.block.is_some_and(|(_, card, _)| card == device);
        for id in self.shares.of(|hold| hold.importer == peer && there(hold)) {
            self.forget_hold(id);
        }
        let mut names = BTreeSet::new();
        for hold in self.shares.holds.values_mut() {
            if hold.exporter == Some(peer) && there(hold) {
                hold.exporter = None;
                names.insert(hold.name);
            }
        }
        for name in names {
            self.inherit(name, Some(peer));
        }
    }

    /// The process of that name is gone. Each of its blocks that somebody still has open is counted to one of those; it was
    /// counted to `from`. Returns the blocks that were not counted to anybody before.
    fn inherit(&mut self, name: Name, from: Option<PeerId>) -> BTreeSet<u64> {
        let orphans: Vec<(u64, Hold)> = self
            .shares
            .holds
            .iter()
            .filter(|(_, hold)| hold.name == name && hold.exporter.is_none())
            .map(|(id, hold)| (*id, hold.clone()))
            .collect();
        let mut counted: BTreeSet<u64> = orphans
            .iter()
            .filter(|(_, hold)| hold.inherited)
            .filter_map(|(_, hold)| Some(hold.block?.0))
            .collect();
        let mut new = BTreeSet::new();
        for (id, hold) in orphans {
            let Some((block, device, bytes)) = hold.block.filter(|(block, ..)| !counted.contains(block))
            else {
                continue;
            };
            let Some(client) = self.client_mut(hold.importer, device).map(|client| client.id) else {
                continue;
            };
            let from = from
                .filter(|from| *from != hold.importer)
                .and_then(|from| self.client_mut(from, device))
                .map(|client| client.id);
            counted.insert(block);
            new.insert(block);
            if let Some(hold) = self.shares.holds.get_mut(&id) {
                hold.inherited = true;
            }
            say::info!("{bytes} of a program that is gone are counted to {client}, which has them open");
            self.mark(hold.importer);
            self.feed(Event::Inherited {
                client,
                from: from.filter(|from| *from != client),
                bytes,
            });
            let message = ToLayer::ShareInherit {
                hold: id,
                device: device.0,
                bytes,
            };
            self.send(hold.importer, &message, Vec::new());
        }
        new
    }
}
