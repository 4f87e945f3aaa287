//! Who is active, whose turn it is, and who comes next.
//!
//! Turns are stride scheduling: each task has a virtual time per device that advances while it runs, more slowly for a
//! higher priority. The waiting task with the lowest virtual time is next; a running one gives way when its turn was
//! long enough for the copying that the switch costs *and* its virtual time has caught up with that of the one waiting.
//! A task that comes back from idling enters at the floor, the lowest virtual time among those that contend, so that
//! idling earns no credit. That alone would let an endless stream of newcomers pass someone who had more than they; so
//! whoever waited for `starve_after` goes first.

use core::cmp::Reverse;

use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

use crate::Arbiter;
use crate::event::AskKind;
use crate::ledger::Sums;
use crate::state::Client;
use crate::time::{Time, nanos};

/// A client that waits for lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) client: ClientId,
    pub(crate) task: TaskId,
    /// With that, its task stays within its request.
    pub(crate) guaranteed: bool,
    /// What it is served with next: all that it wants back, and the oldest of its allocations. The later ones compete
    /// anew, so that one too many does not stop the others.
    pub(crate) need: Bytes,
    /// What of all that is more than is free.
    pub(crate) short: Bytes,
    /// Evicted bytes that it has not asked for yet, but will have to.
    pub(crate) later: Bytes,
    /// The evicted part of both: bytes that will be copied in.
    pub(crate) copy_in: Bytes,
    pub(crate) since: Time,
    /// It waited so long that it goes first, whatever time others had.
    pub(crate) starving: bool,
}

impl Arbiter {
    /// Restored as far as grants go, or just about to be.
    pub(crate) fn restoring(&self, client: &Client) -> bool {
        self.now < client.restoring_until
    }

    pub(crate) fn left_alone(&self, client: &Client) -> bool {
        self.now < client.leave_alone_until
    }

    /// Uses the GPU, or must be taken to.
    pub(crate) fn active(&self, client: &Client) -> bool {
        self.now < client.last_touch.after(self.config.idle_after)
            || self.restoring(client)
            || (client.busy && self.left_alone(client))
    }

    /// Whether a task uses the device or waits to.
    pub(crate) fn wanting(&self, task: TaskId, device: DeviceId) -> bool {
        self.of(task, device)
            .any(|(_, c)| !c.asks.is_empty() || self.active(c))
    }

    /// Bytes of a task that nothing may take from it at present.
    pub(crate) fn protected(&self, task: TaskId, device: DeviceId) -> Bytes {
        self.protected_if(task, device, self.wanting(task, device))
    }

    pub(crate) fn protected_if(&self, task: TaskId, device: DeviceId, wanting: bool) -> Bytes {
        let t = &self.tasks[&task];
        if t.paused || (t.spec.idle_release.is_some() && !wanting) {
            Bytes::ZERO
        } else {
            t.guaranteed(device)
        }
    }

    /// Advances virtual times from the last event to `now`, and pays off copying.
    pub(crate) fn account(&mut self, now: Time) {
        let before = self.now;
        if now <= before {
            return;
        }
        let mut ran: std::collections::BTreeMap<(TaskId, DeviceId), u64> = Default::default();
        for client in self.clients.values() {
            if client.suspended() || !client.asks.is_empty() {
                continue;
            }
            let mut until = client.last_touch.after(self.config.idle_after);
            if client.busy {
                until = until.max(client.leave_alone_until);
            }
            let until = until.min(now);
            let time = ran.entry((client.task, client.device)).or_default();
            *time = (*time).max(until.0.saturating_sub(before.0));
        }
        for ((task, device), time) in ran {
            if let Some(t) = self.tasks.get_mut(&task) {
                let advance = time.saturating_mul(t.pace());
                let v = t.virtual_time.entry(device).or_default();
                *v = v.saturating_add(advance);
            }
        }
        let elapsed = now.0 - before.0;
        for device in self.devices.values_mut() {
            device.debt = device.debt.saturating_sub(elapsed);
        }
        self.now = now;
    }

    /// To be called before a task that did not use a device starts to: it joins at the floor.
    pub(crate) fn enter_contention(&mut self, task: TaskId, device: DeviceId) {
        if self.wanting(task, device) {
            return;
        }
        let lowest = self
            .sums(device)
            .iter()
            .filter(|(other, s)| **other != task && s.wanting)
            .map(|(other, _)| self.tasks[other].virtual_time(device))
            .min();
        let Some(d) = self.devices.get_mut(&device) else {
            return;
        };
        d.floor = d.floor.max(lowest.unwrap_or(0));
        let floor = d.floor;
        if let Some(t) = self.tasks.get_mut(&task) {
            let v = t.virtual_time.entry(device).or_default();
            *v = (*v).max(floor);
        }
    }

    /// The clients that wait for lease on a device, the next one first.
    ///
    /// Tasks within their request come first, by priority and time. The others go by virtual time.
    pub(crate) fn candidates(&self, device: DeviceId, sums: &Sums) -> Vec<Candidate> {
        let free = self.free(device);
        let mut all: Vec<_> = self
            .on(device)
            .filter(|(_, c)| !c.asks.is_empty() && !self.task_of(c).paused)
            .map(|(id, c)| self.candidate(id, c, sums, free))
            .collect();
        all.sort_by_key(|c| {
            let t = &self.tasks[&c.task];
            let v = if c.guaranteed { 0 } else { t.virtual_time(device) };
            let v = if c.starving { 0 } else { v };
            (
                !c.guaranteed,
                !c.starving,
                v,
                Reverse(t.spec.priority),
                c.since,
                c.client,
            )
        });
        all
    }

    fn candidate(&self, id: ClientId, c: &Client, sums: &Sums, free: Bytes) -> Candidate {
        let back = c.asked(AskKind::Restore);
        let new = c
            .asks
            .iter()
            .find(|a| a.kind == AskKind::Alloc)
            .map_or(Bytes::ZERO, |a| a.left);
        let since = c.asks.iter().map(|a| a.since).min().unwrap_or(self.now);
        let after = sums[&c.task].footprint.saturating_add(new);
        let need = back.saturating_add(new);
        let later = c.away().saturating_sub(back);
        Candidate {
            client: id,
            task: c.task,
            guaranteed: after <= self.task_of(c).guaranteed(c.device),
            need,
            short: need.saturating_add(later).saturating_sub(free),
            later,
            copy_in: c.away(),
            since,
            starving: since.after(self.config.starve_after) <= self.now,
        }
    }

    /// When the turn of a running client may end in favour of a waiting one, as far as time on the GPU goes.
    pub(crate) fn turn_end(&self, holder: &Client, next: &Candidate) -> Time {
        let d = &self.devices[&holder.device];
        let moved = next.short.min(holder.movable());
        let copy = d.out.time(moved).saturating_add(d.back.time(next.copy_in));
        let turn = copy
            .max(holder.turn_cost)
            .saturating_mul(u64::from(self.config.turn_per_copy))
            .max(nanos(self.config.min_turn));
        let full = Time(holder.turn_start.0.saturating_add(turn));
        let higher = self.tasks[&next.task].spec.priority > self.task_of(holder).spec.priority;
        if higher {
            // Early, if the copying of earlier switches is paid for.
            let early = holder
                .turn_start
                .after(self.config.min_turn)
                .max(Time(self.now.0.saturating_add(d.debt)));
            full.min(early)
        } else {
            full
        }
    }

    /// When a running task's virtual time will have caught up with that of a waiting one, if it goes on running.
    pub(crate) fn caught_up(&self, holder: &Client, next: &Candidate) -> Time {
        if next.starving {
            return self.now;
        }
        let t = self.task_of(holder);
        let behind = self.tasks[&next.task]
            .virtual_time(holder.device)
            .saturating_sub(t.virtual_time(holder.device));
        Time(self.now.0.saturating_add(behind.div_ceil(t.pace())))
    }

    /// Whether a running client must give way to a waiting one.
    pub(crate) fn turn_over(&self, holder: &Client, next: &Candidate) -> bool {
        self.turn_end(holder, next) <= self.now && self.caught_up(holder, next) <= self.now
    }
}
