//! What is done for those who will wait, and for those who would wait for ever.
//!
//! * **Marks.** Nothing moves while more than the low mark is free. Then what nobody uses (caches, and what pools do not need), and after that memory
//!   that has idled long enough, is released up to the high mark, in one batch: the next ones who come do not wait for a copy, and a card that has room is left alone.
//! * **Warning.** Where priorities preempt, a client that is to give way is told, and has its time to save itself. For that
//!   time it counts as of the priority that it gives way to, so that nobody between the two takes from it what it needs for
//!   saving.
//! * **Deadlock.** Movable memory of those who wait goes to whoever is next, so waiting for movable memory always ends. What
//!   cannot be moved can be held by those who wait for more of it. If everybody who holds such memory waits, and nobody's
//!   wish can be met, one is refused: the youngest ask of the lowest priority.

use std::collections::BTreeMap;

use ebb_units::{Bytes, ClientId, DeviceId, Priority, TaskId};

use crate::Arbiter;
use crate::action::{Action, DenyReason, Depth, Note, ReclaimReason};
use crate::event::AskKind;
use crate::rank::{CONSIDERED, Candidate, LOOKED_AT};

fn unknown(device: DeviceId) -> Action {
    Action::Note(Note::Ignored {
        what: format!("{device} is not known"),
    })
}

/// How many idle clients are looked at for one batch.
const BATCH: usize = 256;

impl Arbiter {
    pub(crate) fn thousandths(&self, device: DeviceId, of: u32) -> Bytes {
        let capacity = u128::from(self.devices[&device].capacity.0);
        Bytes(u64::try_from(capacity * u128::from(of) / 1000).unwrap_or(u64::MAX))
    }

    /// Releases idle memory if little is free.
    pub(crate) fn keep_marks(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        if self.config.low_mark == 0 {
            return;
        }
        let d = &self.devices[&device];
        // What is on its way counts.
        let coming = d.sums.ordered.saturating_add(d.lodgers.coming());
        let free = d.free().saturating_add(coming);
        if free >= self.thousandths(device, self.config.low_mark) {
            return;
        }
        let high = self.config.high_mark.max(self.config.low_mark);
        let mut short = self.thousandths(device, high).saturating_sub(free);
        let mut orders: BTreeMap<ClientId, (Bytes, Depth)> = BTreeMap::new();
        // What nobody uses goes first, whoever has it: that costs no copy.
        for key in d.index.spare.iter().take(BATCH) {
            if short.is_zero() {
                break;
            }
            let n = short.min(self.unused(&self.clients[&key.client]));
            short = short.saturating_sub(n);
            orders.insert(key.client, (n, Depth::Unused));
        }
        for (key, clean) in d.index.idle_by_cost().take(BATCH) {
            if short.is_zero() {
                break;
            }
            let c = &self.clients[&key.client];
            if self.idle_release_at(c).is_some_and(|at| at <= self.now) {
                let taken = orders.get(&key.client).map_or(Bytes::ZERO, |(bytes, _)| *bytes);
                let n = short.min(c.within(clean).saturating_sub(taken));
                if n.is_zero() {
                    continue;
                }
                short = short.saturating_sub(n);
                orders.insert(key.client, (taken.saturating_add(n), Depth::Evict));
            }
        }
        for (id, (bytes, depth)) in orders {
            // What is left of it may go in the next batch.
            self.order(id, bytes, depth, ReclaimReason::LowMark, out);
        }
    }

    /// Takes back what nobody uses.
    pub(crate) fn trim(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let Some(d) = self.devices.get(&device) else {
            return out.push(unknown(device));
        };
        let spare: Vec<(ClientId, Bytes)> = d
            .index
            .spare
            .iter()
            .map(|key| (key.client, self.unused(&self.clients[&key.client])))
            .collect();
        for (id, bytes) in spare {
            self.order(id, bytes, Depth::Unused, ReclaimReason::Operator, out);
        }
    }

    /// Takes back what idle tasks of a priority have above their requests.
    pub(crate) fn shrink(&mut self, device: DeviceId, priority: Priority, out: &mut Vec<Action>) {
        let Some(d) = self.devices.get(&device) else {
            return out.push(unknown(device));
        };
        let mut left: BTreeMap<TaskId, Bytes> = BTreeMap::new();
        let mut orders = Vec::new();
        for key in d.index.idle.iter().filter(|key| key.priority == priority) {
            let c = &self.clients[&key.client];
            let above = left.entry(c.task).or_insert_with(|| {
                let sums = &d.parts[&c.task].sums;
                let requested = self.task_of(c).guaranteed(device);
                sums.held.saturating_sub(requested).saturating_sub(sums.ordered)
            });
            let n = c.movable().min(*above);
            *above = above.saturating_sub(n);
            orders.push((key.client, n));
        }
        for (id, bytes) in orders {
            self.order(id, bytes, Depth::Evict, ReclaimReason::Operator, out);
        }
    }

    /// Tells those who will have to give way to a higher priority.
    pub(crate) fn warn(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        if !self.config.preempt {
            return;
        }
        let d = &self.devices[&device];
        if d.index.rank.is_empty() {
            let warned: Vec<ClientId> = d.warned.iter().copied().collect();
            for id in warned {
                self.unwarn(id);
            }
            return;
        }
        if d.gathering.is_some() {
            return;
        }
        let waiting = d.index.rank.iter().take(LOOKED_AT).map(|key| self.candidate(key));
        let next: Option<Candidate> = waiting
            .filter(|c| !c.humble && self.possible(c))
            .take(CONSIDERED)
            .next();
        let Some(next) = next else {
            return;
        };
        let priority = next.key.priority.0;
        let stopped = d.index.movable[0].saturating_add(d.index.movable[1]);
        let mut short = next.short.saturating_sub(stopped);
        let mut warn = Vec::new();
        for h in self.holders(device).iter().filter(|h| !h.suspended) {
            if short.is_zero() || h.priority >= priority {
                break;
            }
            if h.warned.is_none() {
                warn.push(h.id);
            }
            short = short.saturating_sub(h.turn.movable);
        }
        let now = self.now;
        let within_ms = u64::try_from(self.config.preempt_grace.as_millis()).unwrap_or(u64::MAX);
        for id in warn {
            self.edit(id, |c| c.warned = Some((now, priority)));
            if let Some(d) = self.devices.get_mut(&device) {
                d.warned.insert(id);
                d.again = true;
            }
            out.push(Action::Warn {
                client: id,
                by: next.client,
                within_ms,
            });
        }
    }

    /// A warning is over: it gave way, or nobody waits any more.
    pub(crate) fn unwarn(&mut self, id: ClientId) {
        let Some(device) = self.clients.get(&id).map(|c| c.device) else {
            return;
        };
        if let Some(d) = self.devices.get_mut(&device)
            && d.warned.remove(&id)
        {
            self.edit(id, |c| c.warned = None);
        }
    }

    /// Refuses one ask if everybody waits for everybody.
    pub(crate) fn break_deadlock(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let d = &self.devices[&device];
        if d.index.rank.is_empty()
            || d.gathering.is_some()
            || d.running > 0
            || !d.sums.ordered.is_zero()
            || !d.lodgers.coming().is_zero()
            || d.over()
        {
            return;
        }
        // Somebody who holds what is in the way and does not wait may let go of it. Two are needed to wait for each other.
        let mut holders = 0;
        for part in d.parts.values().filter(|part| !part.barred.is_zero()) {
            let all_wait = part.clients.iter().all(|id| {
                let c = &self.clients[id];
                !c.asks.is_empty() || c.held().is_zero()
            });
            if !all_wait {
                return;
            }
            holders += 1;
        }
        if holders < 2 {
            return;
        }
        let for_good = self.stalled_for_good(device);
        let mut victim: Option<(Candidate, ebb_units::Priority)> = None;
        for key in &d.index.rank {
            let c = self.candidate(key);
            if self.possible_now(&c) || (self.possible(&c) && !for_good) {
                return;
            }
            let patient = key.since.after(self.config.patience) <= self.now;
            let allocs = self.clients[&key.client]
                .asks
                .iter()
                .any(|a| a.kind == AskKind::Alloc);
            let priority = key.priority.0;
            // What holds the place of what is guaranteed to somebody waits for more than is guaranteed to it: one of those goes.
            if patient
                && key.burst
                && allocs
                && victim.as_ref().is_none_or(|(v, p)| {
                    (priority, core::cmp::Reverse(key.since)) < (*p, core::cmp::Reverse(v.since))
                })
            {
                victim = Some((c, priority));
            }
        }
        let Some((victim, _)) = victim else {
            return;
        };
        let c = &self.clients[&victim.client];
        let Some(ask) = c
            .asks
            .iter()
            .rev()
            .find(|a| a.kind == AskKind::Alloc)
            .map(|a| a.id)
        else {
            return;
        };
        let reason = DenyReason::Deadlock {
            footprint: self.served_with(&victim),
            usable: self.usable_now(victim.client),
        };
        self.deny(victim.client, ask, reason, true, out);
    }
}
