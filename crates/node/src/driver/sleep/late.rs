//! Programs that sleep already, and say so to a daemon that was not there when they went: which record of their task takes them.
//!
//! ```text
//!                       no record, or Asleep, Room                  any other stage
//! *sleeping* ────────> member: looked at, woken with the others    late ──> when that record is over, or asleep: once more from the left
//!     ^                   | its connection ends and begins anew
//!     +── said again ─────+── not said: it has woken itself. The driver is told to let it in, whatever it was at
//! ```
//! Whoever is told *Awake* lets its threads call the driver, so nobody is told who may be locked or checkpointed: only who was in the
//! helper's list when it brought processes up.

use std::collections::BTreeMap;

use ebb_policy::Time;
use ebb_protocol::ToLayer;
use ebb_units::{Bytes, TaskId};

use super::{LOOK_AGAIN, LOOKS, Member, Sleep, Stage, WAIT};
use crate::driver::timers::Timer;
use crate::driver::{Driver, PeerId};
use crate::say;

/// A process that waits for its turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Late {
    order: u64,
    /// A thread of it waits.
    wanted: bool,
}

impl Driver {
    /// A session says that it sleeps: the connection, or this daemon, is new. Before it says what it holds.
    pub(in crate::driver) fn sleeping(&mut self, peer: PeerId, order: u64) {
        let Some(task) = self.peers.get(&peer).map(|peer| peer.task) else {
            return;
        };
        let now = self.now();
        if let Some(sleep) = self.sleeps.tasks.get_mut(&task)
            && let Some(member) = sleep.members.get_mut(&peer)
        {
            let known = member.order == order;
            member.said = true;
            if known {
                return;
            }
            // It went to sleep for somebody else. What it is told by this record's order it passes over.
            member.order = order;
            if !matches!(sleep.stage, Stage::Asking | Stage::Evicting | Stage::Preparing) {
                return;
            }
            sleep.members.remove(&peer);
            sleep.late.insert(peer, Late { order, wanted: false });
            return self.give_up_sleep(task, "a process of it sleeps already", "`ebb resume` wakes it");
        }
        let before = self.sleeps.tasks.contains_key(&task);
        let sleep = self
            .sleeps
            .tasks
            .entry(task)
            .or_insert_with(|| Sleep::new(Stage::Asleep, order, WAIT, now));
        if !matches!(sleep.stage, Stage::Asleep | Stage::Room) {
            sleep.late.insert(peer, Late { order, wanted: false });
            return;
        }
        sleep.members.insert(peer, Member::new(order));
        (sleep.looks, sleep.look_at) = (LOOKS, now);
        let has_helper = sleep.helper.is_some();
        self.sleeps.moved.insert(task);
        if !before {
            say::info!("{task} was hibernated before this daemon started");
        }
        if !has_helper {
            // It looks whether that is so.
            self.take_helper(task);
        }
    }

    /// A thread of a program that sleeps wants in.
    pub(in crate::driver) fn wake_me(&mut self, peer: PeerId, order: u64) {
        let Some(task) = self.peers.get(&peer).map(|peer| peer.task) else {
            return;
        };
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            // Nobody here knows of it: nothing keeps it asleep.
            return self.send(peer, &ToLayer::Awake { order }, Vec::new());
        };
        if let Some(late) = sleep.late.get_mut(&peer) {
            late.wanted = true;
        } else if !sleep.members.contains_key(&peer) {
            return self.send(peer, &ToLayer::Awake { order }, Vec::new());
        }
        // Of those that went to sleep together none is woken alone.
        sleep.wanted = true;
        self.sleeps.moved.insert(task);
    }

    /// Those that were late for a record that is over: they have one of their own.
    pub(super) fn begin_with(&mut self, late: BTreeMap<PeerId, Late>) {
        for (peer, late) in late {
            self.sleeping(peer, late.order);
            if late.wanted {
                self.wake_me(peer, late.order);
            }
        }
    }

    /// The task sleeps: it can take those that were late.
    pub(super) fn take_late_ones(&mut self, task: TaskId) {
        let late = self
            .sleeps
            .tasks
            .get_mut(&task)
            .map(|sleep| std::mem::take(&mut sleep.late));
        self.begin_with(late.unwrap_or_default());
    }

    pub(super) fn forget_late(&mut self, peer: PeerId) {
        for sleep in self.sleeps.tasks.values_mut() {
            sleep.late.remove(&peer);
        }
    }

    /// A session's connection is new: what it was is not known until it says so.
    pub(in crate::driver) fn sleeper_is_back(&mut self, peer: PeerId) {
        let Some(task) = self.sleep_of(peer) else { return };
        let member = self
            .sleeps
            .tasks
            .get_mut(&task)
            .and_then(|sleep| sleep.members.get_mut(&peer));
        if let Some(member) = member {
            member.said = false;
        }
    }

    /// What a session that sleeps declares counts as parked: lease and overhead that it is entered with are nothing.
    pub(in crate::driver) fn declared_asleep(
        &mut self,
        peer: PeerId,
        device: ebb_units::DeviceId,
        lease: Bytes,
        overhead: Bytes,
    ) -> bool {
        let Some(task) = self.sleep_of(peer) else {
            return false;
        };
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return false;
        };
        if !matches!(sleep.stage, Stage::Asleep | Stage::Room | Stage::Up) {
            return false;
        }
        let (stage, Some(member)) = (sleep.stage, sleep.members.get_mut(&peer)) else {
            return false;
        };
        if !member.said || stage == Stage::Up {
            // It had waited for a daemon for long enough, or the driver has been asked to bring it back: this is on the card or will be,
            // whether there was room for it or not.
            member.parked.remove(&device);
            sleep.self_woken |= !member.said;
            self.sleeps.moved.insert(task);
            return false;
        }
        let parked = member.parked.entry(device).or_default();
        (parked.lease, parked.overhead) = (lease, overhead);
        // In Room it has to be asked for.
        self.sleeps.moved.insert(task);
        true
    }

    /// Whether what a session holds on a card is parked: by the ledger nothing of it is there.
    pub(super) fn is_parked(&self, peer: PeerId, device: ebb_units::DeviceId) -> bool {
        let sleep = self.sleep_of(peer).and_then(|task| self.sleeps.tasks.get(&task));
        let Some(sleep) = sleep else { return false };
        let member = sleep.members.get(&peer);
        matches!(sleep.stage, Stage::Asleep | Stage::Room | Stage::Up)
            && member.is_some_and(|member| member.parked.contains_key(&device))
    }

    /// A look is over, or could not be had.
    pub(super) fn looked(&mut self, task: TaskId) {
        let now: Time = self.now();
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return;
        };
        sleep.looks = sleep.looks.saturating_sub(1);
        sleep.look_at = now.after(LOOK_AGAIN);
        if sleep.looks > 0 {
            self.after(LOOK_AGAIN, Timer::Sleep(task));
        }
        self.sleeps.moved.insert(task);
    }
}
