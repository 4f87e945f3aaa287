//! The ledger's side: what a task that is down held is parked, and asked for again as one before it comes back.

use std::collections::BTreeSet;

use ebb_policy::{AskId, AskKind, Event};
use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

use super::{OURS, Parked, Stage};
use crate::driver::{Driver, PeerId};
use crate::say;

impl Driver {
    /// Whether the driver holds nothing for this session at present.
    pub(in crate::driver) fn is_down(&self, peer: PeerId) -> bool {
        let record = self.sleep_of(peer).and_then(|task| self.sleeps.tasks.get(&task));
        record.is_some_and(|sleep| {
            let member = sleep.members.get(&peer);
            matches!(sleep.stage, Stage::Asleep | Stage::Room | Stage::Up)
                && member.is_some_and(|member| !member.parked.is_empty())
        })
    }

    /// What the members of a task hold by the ledger: session, card, lease, overhead.
    pub(super) fn held(&self, task: TaskId) -> impl Iterator<Item = (PeerId, DeviceId, Bytes, Bytes)> {
        let members: BTreeSet<PeerId> = self
            .sleeps
            .tasks
            .get(&task)
            .into_iter()
            .flat_map(|sleep| sleep.members.keys().copied())
            .collect();
        let views = self.arbiter.snapshot().tasks;
        let clients = self.clients.clone();
        views
            .into_iter()
            .filter(move |view| view.task == task)
            .flat_map(|view| view.clients)
            .filter_map(move |view| {
                let (peer, device) = clients.get(&view.client).copied()?;
                members
                    .contains(&peer)
                    .then_some((peer, device, view.lease, view.overhead))
            })
    }

    /// What a task that is down held is nobody's.
    pub(super) fn park(&mut self, task: TaskId) {
        let clients = self.parked(task);
        for (peer, device, parked) in clients {
            let Some(known) = self.client_mut(peer, device) else {
                continue;
            };
            let (client, extra) = (known.id, std::mem::take(&mut known.extra));
            let sleep = self.sleeps.tasks.get_mut(&task);
            let member = sleep.and_then(|sleep| sleep.members.get_mut(&peer));
            if let Some(parked) = member.and_then(|member| member.parked.get_mut(&device)) {
                parked.extra = extra;
            }
            self.mark(peer);
            self.feed_usage(peer, device);
            if !parked.lease.is_zero() {
                self.feed(Event::Returned {
                    client,
                    bytes: parked.lease,
                });
            }
        }
        self.settle();
    }

    pub(super) fn parked(&self, task: TaskId) -> Vec<(PeerId, DeviceId, Parked)> {
        self.sleeps
            .tasks
            .get(&task)
            .into_iter()
            .flat_map(|sleep| &sleep.members)
            .flat_map(|(peer, member)| {
                member
                    .parked
                    .iter()
                    .map(|(device, parked)| (*peer, *device, *parked))
            })
            .collect()
    }

    /// Asks for all the room that a task needs to come back.
    pub(super) fn make_room(&mut self, task: TaskId) {
        let now = self.now();
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return;
        };
        (sleep.stage, sleep.began) = (Stage::Room, now);
        let helper = sleep.helper;
        self.coming_up(task);
        if helper.is_none() {
            self.take_helper(task);
        }
        self.feed(Event::Resume { task });
        self.ask_for_room(task);
        self.sleeps.moved.insert(task);
    }

    /// Asks for what has not been asked for: all of it at first, and what a library declares when others of the task are waited for already.
    pub(super) fn ask_for_room(&mut self, task: TaskId) {
        for (peer, device, parked) in self.parked(task) {
            if parked.ask != 0 {
                continue;
            }
            let ask = OURS | self.new_id();
            let Some(client) = self.client_mut(peer, device) else {
                // It has nothing there any more.
                let sleep = self.sleeps.tasks.get_mut(&task);
                if let Some(member) = sleep.and_then(|sleep| sleep.members.get_mut(&peer)) {
                    member.parked.remove(&device);
                }
                continue;
            };
            let (id, evicted) = (client.id, client.usage.evicted);
            client.asks.insert(ask);
            let bytes = evicted
                .saturating_add(parked.lease)
                .saturating_add(parked.overhead);
            let sleep = self.sleeps.tasks.get_mut(&task);
            let known = sleep
                .and_then(|sleep| sleep.members.get_mut(&peer))
                .and_then(|member| member.parked.get_mut(&device));
            if let Some(known) = known {
                (known.ask, known.granted, known.complete) = (ask, Bytes::ZERO, false);
            }
            self.ask_or_hold(Event::Ask {
                client: id,
                ask: AskId(ask),
                kind: AskKind::Restore,
                bytes,
                long: true,
            });
        }
    }

    pub(super) fn parked_by_ask(
        &mut self,
        peer: PeerId,
        device: DeviceId,
        ask: u64,
    ) -> Option<(TaskId, &mut Parked)> {
        let task = self.sleep_of(peer)?;
        let member = self.sleeps.tasks.get_mut(&task)?.members.get_mut(&peer)?;
        let parked = member.parked.get_mut(&device)?;
        (parked.ask == ask).then_some((task, parked))
    }

    /// Room for a task that is to come back. `false`: the ask is a library's.
    pub(in crate::driver) fn room_granted(
        &mut self,
        peer: PeerId,
        device: DeviceId,
        ask: u64,
        bytes: Bytes,
        complete: bool,
    ) -> bool {
        if ask & OURS == 0 {
            return false;
        }
        if let Some((task, parked)) = self.parked_by_ask(peer, device, ask) {
            parked.granted = parked.granted.saturating_add(bytes);
            parked.complete |= complete;
            self.sleeps.moved.insert(task);
        } else if let Some(client) = self.client_mut(peer, device).map(|client| client.id) {
            // For a wake that was given up meanwhile.
            self.feed(Event::Returned { client, bytes });
        }
        true
    }

    /// No room for it at present. `false`: the ask is a library's.
    pub(in crate::driver) fn room_denied(&mut self, peer: PeerId, device: DeviceId, ask: u64) -> bool {
        if ask & OURS == 0 {
            return false;
        }
        if let Some((task, _)) = self.parked_by_ask(peer, device, ask) {
            self.up_failed(task, "its limit leaves no room for it");
        }
        true
    }

    /// It is not brought back now: what was granted is free, and it is tried again.
    pub(super) fn up_failed(&mut self, task: TaskId, why: &str) {
        say::warning!("{task} is not brought back yet: {why}");
        for (peer, device, parked) in self.parked(task) {
            let Some(client) = self.client_mut(peer, device).map(|client| {
                client.asks.remove(&parked.ask);
                client.id
            }) else {
                continue;
            };
            if parked.ask != 0 && !parked.complete {
                self.drop_held_ask(client, parked.ask);
                self.feed(Event::AskCancelled {
                    client,
                    ask: AskId(parked.ask),
                });
            }
            if !parked.granted.is_zero() {
                self.feed(Event::Returned {
                    client,
                    bytes: parked.granted,
                });
            }
        }
        if let Some(sleep) = self.sleeps.tasks.get_mut(&task) {
            for parked in sleep
                .members
                .values_mut()
                .flat_map(|member| member.parked.values_mut())
            {
                (parked.ask, parked.granted, parked.complete) = (0, Bytes::ZERO, false);
            }
            sleep.stage = Stage::Asleep;
            sleep.wanted = true;
            sleep.why = why.into();
        }
        self.again_later(task);
        self.take_late_ones(task);
    }

    /// The client that a task's record calls down holds nothing, whatever its library says.
    pub(in crate::driver) fn feed_usage(&mut self, peer: PeerId, device: DeviceId) {
        self.note_told(peer, device);
        let down = self.is_parked(peer, device);
        let Some(client) = self.client_mut(peer, device) else {
            return;
        };
        let event = client.usage_event(down);
        self.feed(event);
    }

    /// For clients of the arbiter that sleep: no order reaches them.
    pub(in crate::driver) fn is_client_down(&self, client: ClientId) -> bool {
        self.clients
            .get(&client)
            .is_some_and(|(peer, _)| self.is_down(*peer))
    }
}
