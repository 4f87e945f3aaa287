//! Sums over the ledger. Always counted anew: there are a few dozen clients, and a sum that is not stored cannot drift.

use std::collections::BTreeMap;

use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

use crate::Arbiter;
use crate::state::{Client, Task};

/// A task on a device, counted once for a whole decision.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    /// Lease and overhead.
    pub(crate) held: Bytes,
    /// That, and what is away.
    pub(crate) footprint: Bytes,
    /// Overhead and pinned lease.
    pub(crate) stuck: Bytes,
    /// Open orders.
    pub(crate) ordered: Bytes,
    /// It uses the device or waits to.
    pub(crate) wanting: bool,
    /// What nothing may take from it at present.
    pub(crate) protected: Bytes,
}

/// Every task that has clients on a device.
pub(crate) type Sums = BTreeMap<TaskId, Sum>;

impl Arbiter {
    /// Counts all tasks on a device.
    pub(crate) fn sums(&self, device: DeviceId) -> Sums {
        let mut sums = Sums::new();
        for (_, c) in self.on(device) {
            let s = sums.entry(c.task).or_default();
            s.held = s.held.saturating_add(c.held());
            s.footprint = s.footprint.saturating_add(c.held()).saturating_add(c.away());
            s.stuck = s.stuck.saturating_add(c.stuck());
            let ordered = c.order.as_ref().map_or(Bytes::ZERO, |o| o.pending());
            s.ordered = s.ordered.saturating_add(ordered);
            s.wanting |= !c.asks.is_empty() || self.active(c);
        }
        for (task, s) in &mut sums {
            s.protected = self.protected_if(*task, device, s.wanting);
        }
        sums
    }

    /// The clients on a device.
    pub(crate) fn on(&self, device: DeviceId) -> impl Iterator<Item = (ClientId, &Client)> {
        self.clients
            .iter()
            .filter(move |(_, c)| c.device == device)
            .map(|(id, c)| (*id, c))
    }

    /// A task's clients on a device.
    pub(crate) fn of(&self, task: TaskId, device: DeviceId) -> impl Iterator<Item = (ClientId, &Client)> {
        self.on(device).filter(move |(_, c)| c.task == task)
    }

    /// Clients never outlive their task.
    pub(crate) fn task_of(&self, client: &Client) -> &Task {
        &self.tasks[&client.task]
    }

    /// Everything that is not free.
    pub(crate) fn used(&self, device: DeviceId) -> Bytes {
        let held: Bytes = self.on(device).map(|(_, c)| c.held()).sum();
        held.saturating_add(self.devices[&device].unmanaged)
    }

    pub(crate) fn free(&self, device: DeviceId) -> Bytes {
        self.devices[&device].capacity.saturating_sub(self.used(device))
    }

    /// What clients can have in sum.
    pub(crate) fn managed(&self, device: DeviceId) -> Bytes {
        let d = &self.devices[&device];
        d.capacity.saturating_sub(d.unmanaged)
    }

    /// A task's lease and overhead on a device.
    pub(crate) fn held(&self, task: TaskId, device: DeviceId) -> Bytes {
        self.of(task, device).map(|(_, c)| c.held()).sum()
    }

    /// What a task would hold if all of it were on the device.
    pub(crate) fn footprint(&self, task: TaskId, device: DeviceId) -> Bytes {
        self.of(task, device)
            .map(|(_, c)| c.held().saturating_add(c.away()))
            .sum()
    }

    /// Lease of a client that nothing uses. Fresh grants do not count: the allocation that they are for is under way.
    pub(crate) fn unused(&self, client: &Client) -> Bytes {
        if self.now < client.last_grant.after(self.config.idle_after) {
            return Bytes::ZERO;
        }
        client.unused.min(client.movable())
    }

    /// Unused lease of a task's other clients.
    pub(crate) fn unused_beside(&self, id: ClientId) -> Bytes {
        let client = &self.clients[&id];
        self.of(client.task, client.device)
            .filter(|(other, _)| *other != id)
            .map(|(_, c)| self.unused(c))
            .sum()
    }

    /// How much more a task may hold on a device.
    pub(crate) fn limit_room(&self, task: TaskId, device: DeviceId) -> Bytes {
        self.tasks[&task].limit().saturating_sub(self.held(task, device))
    }

    /// Guaranteed to tasks other than `task` on a device.
    pub(crate) fn guaranteed_beside(&self, task: TaskId, device: DeviceId) -> Bytes {
        self.tasks
            .iter()
            .filter(|(id, _)| **id != task)
            .map(|(_, t)| t.guaranteed(device))
            .sum()
    }
}
