//! From whom a waiting client's bytes could be taken, in which order, and whether that would be enough.

use core::cmp::Reverse;
use std::collections::BTreeMap;

use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

use crate::Arbiter;
use crate::action::{Depth, ReclaimReason};
use crate::ledger::Sums;
use crate::rank::Candidate;
use crate::state::Client;

/// What is to be ordered for a client, and whether all it needs would come of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    pub(crate) enough: bool,
    pub(crate) orders: Vec<(ClientId, Bytes, Depth, ReclaimReason)>,
}

/// How willingly a client's memory is taken; the first is taken first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Willing {
    /// Does not use the GPU.
    Idle,
    /// Waits for lease itself, behind the one that it would be taken for.
    Waiting,
    /// Runs, but its turn is over.
    TurnOver,
    /// Runs: only what it does not use.
    Running,
}

/// A client that could give something.
struct Victim {
    client: ClientId,
    task: TaskId,
    willing: Willing,
    /// An order to it is open; another has to wait for its end.
    ordered: bool,
    /// Unused lease.
    unused: Bytes,
    /// What else it could give, by eviction.
    more: Bytes,
}

impl Victim {
    fn all(&self) -> Bytes {
        self.unused.saturating_add(self.more)
    }
}

impl Arbiter {
    /// The most that a client could have on its device if every turn were over and everyone could be evicted.
    pub(crate) fn usable(&self, id: ClientId, sums: &Sums) -> Bytes {
        let client = &self.clients[&id];
        let siblings = sums[&client.task].stuck.saturating_sub(client.stuck());
        let others: Bytes = sums
            .iter()
            .filter(|(task, _)| **task != client.task)
            .map(|(_, s)| s.stuck.max(s.protected.min(s.held)))
            .sum();
        let by_limit = self.task_of(client).limit().saturating_sub(siblings);
        self.managed(client.device)
            .saturating_sub(siblings)
            .saturating_sub(others)
            .min(by_limit)
            .saturating_sub(client.overhead)
    }

    /// Whether a candidate could be served if every turn were over and everyone could be evicted.
    pub(crate) fn possible(&self, r: &Candidate, sums: &Sums) -> bool {
        let all = self.clients[&r.client]
            .lease
            .saturating_add(r.need)
            .saturating_add(r.later);
        all <= self.usable(r.client, sums)
    }

    /// How `r` could get all that it needs.
    ///
    /// `order` is the list of candidates, `r` among them.
    pub(crate) fn plan(&self, device: DeviceId, r: &Candidate, order: &[Candidate], sums: &Sums) -> Plan {
        let mut victims = self.victims(device, r, order, sums);
        let need = r.need.saturating_add(r.later);
        let own = self.clients[&r.client]
            .order
            .as_ref()
            .map_or(Bytes::ZERO, |o| o.pending());
        let ordered: Bytes = sums.values().map(|s| s.ordered).sum();
        let ordered_of_siblings = sums[&r.task].ordered.saturating_sub(own);
        let mut short = need
            .saturating_sub(self.free(device))
            .saturating_sub(ordered.saturating_sub(own));
        let over_limit = need
            .saturating_sub(self.tasks[&r.task].limit().saturating_sub(sums[&r.task].held))
            .saturating_sub(ordered_of_siblings);
        let mut takes: BTreeMap<ClientId, (Bytes, Depth)> = BTreeMap::new();

        // What would pass the task's limit has to come from the task itself. A new allocation adds to the live bytes,
        // so evicting others of the task would not make room for it under the limit.
        let evict = !r.copy_in.is_zero();
        let left = Self::take(&mut victims, over_limit, &mut takes, |v| v.task == r.task, evict);
        if !left.is_zero() {
            return Plan::default();
        }
        short = short.saturating_sub(over_limit);
        let left = Self::take(&mut victims, short, &mut takes, |_| true, true);
        let reason = |v: &Victim| match v.willing {
            _ if r.guaranteed => ReclaimReason::Guarantee { client: r.client },
            Willing::TurnOver => ReclaimReason::TurnEnded { client: r.client },
            _ => ReclaimReason::Demand { client: r.client },
        };
        Plan {
            enough: left.is_zero(),
            orders: victims
                .iter()
                .filter(|v| !v.ordered)
                .filter_map(|v| takes.get(&v.client).map(|(b, d)| (v.client, *b, *d, reason(v))))
                .collect(),
        }
    }

    /// Takes `amount` from victims, unused lease of all of them before any eviction, and says what is missing.
    fn take(
        victims: &mut [Victim],
        mut amount: Bytes,
        takes: &mut BTreeMap<ClientId, (Bytes, Depth)>,
        from: impl Fn(&Victim) -> bool,
        evict: bool,
    ) -> Bytes {
        for depth in [Depth::Unused, Depth::Evict] {
            if depth == Depth::Evict && !evict {
                break;
            }
            for v in victims.iter_mut().filter(|v| from(v)) {
                let there = if depth == Depth::Unused {
                    &mut v.unused
                } else {
                    &mut v.more
                };
                let n = amount.min(*there);
                if n.is_zero() {
                    continue;
                }
                amount = amount.saturating_sub(n);
                *there = there.saturating_sub(n);
                let take = takes.entry(v.client).or_insert((Bytes::ZERO, depth));
                take.0 = take.0.saturating_add(n);
                take.1 = depth;
            }
        }
        amount
    }

    fn victims(&self, device: DeviceId, r: &Candidate, order: &[Candidate], sums: &Sums) -> Vec<Victim> {
        let mut ranked: Vec<_> = self
            .on(device)
            .filter(|(id, c)| *id != r.client && !self.left_alone(c) && !c.movable().is_zero())
            .filter_map(|(id, c)| self.willing(id, c, r, order, sums).map(|w| (id, c, w)))
            .collect();
        ranked.sort_by_key(|(id, c, w)| {
            let t = self.task_of(c);
            let v = match w {
                Willing::Idle => 0,
                _ => t.virtual_time(device),
            };
            (*w, t.spec.priority, Reverse(v), c.last_touch, *id)
        });

        // What a task has above its protected bytes, less what is ordered of it already.
        let mut rooms: BTreeMap<TaskId, Bytes> = BTreeMap::new();
        let mut room = |task: TaskId, want: Bytes| {
            let left = rooms.entry(task).or_insert_with(|| {
                if task == r.task {
                    return Bytes::MAX;
                }
                let s = &sums[&task];
                s.held.saturating_sub(s.protected).saturating_sub(s.ordered)
            });
            let n = want.min(*left);
            *left = left.saturating_sub(n);
            n
        };
        let mut victims: Vec<Victim> = ranked
            .iter()
            .map(|(id, c, willing)| Victim {
                client: *id,
                task: c.task,
                willing: *willing,
                ordered: c.order.is_some(),
                unused: if c.order.is_some() {
                    Bytes::ZERO
                } else {
                    room(c.task, self.unused(c))
                },
                more: Bytes::ZERO,
            })
            .collect();
        for (victim, (_, c, willing)) in victims.iter_mut().zip(&ranked) {
            if *willing != Willing::Running {
                let pending = c.order.as_ref().map_or(Bytes::ZERO, |o| o.pending());
                let rest = c.movable().saturating_sub(pending).saturating_sub(victim.unused);
                victim.more = room(c.task, rest);
            }
        }
        victims.retain(|v| !v.all().is_zero());
        victims
    }

    /// Whether, and how willingly, a client's memory would be taken for `r`.
    fn willing(
        &self,
        id: ClientId,
        c: &Client,
        r: &Candidate,
        order: &[Candidate],
        sums: &Sums,
    ) -> Option<Willing> {
        if self.task_of(c).paused {
            return Some(Willing::Idle);
        }
        if self.restoring(c) && !r.guaranteed || self.now < c.owed_until {
            return None;
        }
        let stopped = c.suspended() && !self.restoring(c);
        if !stopped && self.active(c) {
            let yields = r.guaranteed
                || (self.turn_over(c, r) && (c.asks.is_empty() || self.goes_before(r, id, order)));
            return Some(if yields {
                Willing::TurnOver
            } else {
                Willing::Running
            });
        }
        if c.asks.is_empty() {
            return Some(Willing::Idle);
        }
        let before = r.guaranteed
            || self.devices[&c.device].gathering == Some(r.client)
            || self.goes_before(r, id, order)
            || order
                .iter()
                .find(|o| o.client == id)
                .is_some_and(|o| !self.possible(o, sums));
        before.then_some(Willing::Waiting)
    }

    /// Whether `r` stands before another waiting client.
    fn goes_before(&self, r: &Candidate, other: ClientId, order: &[Candidate]) -> bool {
        let place = |id| order.iter().position(|c| c.client == id);
        match (place(r.client), place(other)) {
            (Some(a), Some(b)) => a < b,
            _ => true,
        }
    }
}
