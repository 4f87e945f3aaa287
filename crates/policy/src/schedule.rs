//! The pass that runs after every event: who gets what, and from whom it comes.
//!
//! ```text
//!            free room is enough                 all granted
//! waiting ────────────────────────────────────────────────────> served
//!    │  ^                                             ^
//!    │  │ no longer possible, or a task within its    │
//!    │  │ request needs the room                      │
//!    v  │                                             │
//! gathering (one client a device): orders to victims ─┘
//! ```
//! One client a device *gathers*: a plan that covers all it needs exists before the first byte is taken from anyone, and
//! until it is served (or the plan fails) all room that comes free is its own. What a client got of a failed gathering
//! stays with it, but it cannot run with that and so it counts as taken first: two half restored clients never wait for
//! each other.

use ebb_units::{Bytes, ClientId, DeviceId, OrderId, TaskId};

use crate::Arbiter;
use crate::action::{Action, DenyReason, Depth, Note, ReclaimReason};
use crate::event::{AskId, AskKind, Outcome};
use crate::ledger::Sums;
use crate::rank::Candidate;
use crate::state::Order;
use crate::time::{Time, nanos};

/// How many of those who wait are considered for gathering at a time: with very many, the first ones are enough to keep
/// the card full, and an event stays cheap.
pub(crate) const CONSIDERED: usize = 12;

/// The most rounds of one pass.
const ROUNDS: usize = 16;

impl Arbiter {
    /// Does on every device what can be done now.
    pub(crate) fn schedule(&mut self, out: &mut Vec<Action>) {
        self.late_pauses();
        let devices: Vec<DeviceId> = self.devices.keys().copied().collect();
        for device in devices {
            self.give_up_orders(device, out);
            self.expire_asks(device, out);
            self.evict_paused(device, out);
            self.shrink_tasks(device, out);
            self.shrink_device(device, out);
            // What one got decides what others can have: until nothing changes (or for long enough).
            for _ in 0..ROUNDS {
                let before = out.len();
                self.serve(device, out);
                self.expire_asks(device, out);
                self.gather(device, out);
                self.cancel_unneeded(device, out);
                if out.len() == before {
                    break;
                }
            }
            self.release_idle(device, out);
            self.settle(device);
        }
        self.tell_paused(out);
    }

    /// An order without progress counts as refused.
    fn give_up_orders(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let (now, config) = (self.now, self.config.clone());
        for (id, c) in self.clients.iter_mut().filter(|(_, c)| c.device == device) {
            let late = c
                .order
                .as_ref()
                .is_some_and(|o| o.last_progress.after(config.order_timeout) <= now);
            if !late {
                continue;
            }
            if let Some(order) = c.order.take() {
                if !order.cancelled {
                    out.push(Action::CancelReclaim {
                        client: *id,
                        order: order.id,
                    });
                }
                c.idle_released = false;
                c.last_outcome = Some(Outcome::Busy);
                let pause_ms = c.back_off(now, config.retry, config.retry_max, true);
                out.push(Action::Note(Note::BackingOff {
                    client: *id,
                    order: order.id,
                    outcome: Outcome::Busy,
                    pause_ms,
                }));
            }
        }
    }

    /// Why an allocation cannot be, if it cannot.
    pub(crate) fn over_limit(&self, id: ClientId, bytes: Bytes) -> Option<DenyReason> {
        let client = &self.clients[&id];
        let limit = self.task_of(client).spec.limit?;
        let charged = self.footprint(client.task, client.device);
        let least = charged.saturating_sub(self.unused_beside(id));
        (least.saturating_add(bytes) > limit).then_some(DenyReason::OverLimit {
            asked: bytes,
            charged,
            limit,
        })
    }

    /// The same for the device: others that want what is guaranteed to them would always be in the way.
    pub(crate) fn never_fits(&self, id: ClientId, bytes: Bytes) -> Option<DenyReason> {
        let client = &self.clients[&id];
        let guaranteed: Bytes = self
            .tasks
            .iter()
            .filter(|(id, t)| **id != client.task && !t.guaranteed(client.device).is_zero())
            .map(|(id, _)| self.protected(*id, client.device))
            .sum();
        let usable = self.managed(client.device).saturating_sub(guaranteed);
        let footprint = client.held().saturating_add(client.away()).saturating_add(bytes);
        (footprint > usable).then_some(DenyReason::NeverFits { footprint, usable })
    }

    /// When an ask is denied for having waited, if ever.
    pub(crate) fn ask_deadline(&self, id: ClientId, ask: AskId) -> Option<Time> {
        let client = &self.clients[&id];
        if self.task_of(client).paused {
            return None;
        }
        let a = client.asks.iter().find(|a| a.id == ask)?;
        let patient = a.since.after(self.config.alloc_wait_max);
        match a.kind {
            AskKind::Alloc if a.long => Some(patient),
            // One that is being served is worth waiting for.
            AskKind::Alloc if self.devices[&client.device].gathering == Some(id) => Some(patient),
            AskKind::Alloc => Some(a.since.after(self.config.alloc_wait).min(patient)),
            AskKind::Restore => self.restore_over_limit(id).is_some().then_some(patient),
        }
    }

    /// Why a restore has to wait for another limit, if it has.
    pub(crate) fn restore_over_limit(&self, id: ClientId) -> Option<DenyReason> {
        let client = &self.clients[&id];
        let limit = self.task_of(client).limit();
        let asked = client.asked(AskKind::Restore);
        let charged = client.held();
        (charged.saturating_add(asked) > limit).then_some(DenyReason::OverLimit {
            asked,
            charged,
            limit,
        })
    }

    fn expire_asks(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let open: Vec<(ClientId, AskId)> = self
            .on(device)
            .flat_map(|(id, c)| c.asks.iter().map(move |a| (id, a.id)))
            .collect();
        for (id, ask) in open {
            let Some(a) = self.clients[&id].asks.iter().find(|a| a.id == ask).cloned() else {
                continue;
            };
            let late = self.ask_deadline(id, ask).is_some_and(|t| t <= self.now);
            let denied = match a.kind {
                AskKind::Alloc => match self.over_limit(id, a.left) {
                    Some(reason) => Some((reason, true)),
                    None => late.then_some((DenyReason::TimedOut, false)),
                },
                AskKind::Restore => late
                    .then(|| self.restore_over_limit(id))
                    .flatten()
                    .map(|reason| (reason, false)),
            };
            if let Some((reason, last)) = denied {
                self.deny(id, ask, reason, last, out);
            }
        }
    }

    pub(crate) fn deny(
        &mut self,
        id: ClientId,
        ask: AskId,
        reason: DenyReason,
        last: bool,
        out: &mut Vec<Action>,
    ) {
        if let Some(c) = self.clients.get_mut(&id) {
            c.asks.retain(|a| a.id != ask);
            // It has its answer and goes on with it.
            c.last_touch = self.now;
        }
        out.push(Action::Deny {
            client: id,
            ask,
            reason,
            last,
        });
    }

    /// Gives an order, unless one is open.
    fn order(
        &mut self,
        id: ClientId,
        bytes: Bytes,
        depth: Depth,
        reason: ReclaimReason,
        out: &mut Vec<Action>,
    ) {
        let now = self.now;
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        let most = c.movable();
        if c.order.is_some() || most.is_zero() || bytes.is_zero() {
            return;
        }
        if depth == Depth::Evict {
            // What overrules a promise ends it.
            c.forgive(now);
        }
        self.last_order += 1;
        let order = OrderId(self.last_order);
        c.last_reason = Some(reason);
        c.order = Some(Order {
            id: order,
            bytes: bytes.min(most),
            got: Bytes::ZERO,
            depth,
            reason,
            last_progress: now,
            cancelled: false,
            evicted_before: c.evicted,
        });
        out.push(Action::Reclaim {
            client: id,
            order,
            bytes,
            depth,
            reason,
        });
    }

    fn evict_paused(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let ids: Vec<ClientId> = self
            .on(device)
            .filter(|(_, c)| self.task_of(c).paused && !c.settled && !self.left_alone(c))
            .map(|(id, _)| id)
            .collect();
        for id in ids {
            self.order(id, Bytes::MAX, Depth::Evict, ReclaimReason::Paused, out);
        }
    }

    /// Brings tasks back under their limits: what they do not use always, live memory only where that was forced.
    fn shrink_tasks(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        for (task, sum) in self.sums(device) {
            let excess = sum
                .held
                .saturating_sub(self.tasks[&task].limit())
                .saturating_sub(sum.ordered);
            if excess.is_zero() {
                continue;
            }
            let forced = self.tasks[&task].forced;
            let mut clients: Vec<_> = self
                .of(task, device)
                .filter(|(_, c)| c.order.is_none() && !self.left_alone(c))
                .map(|(id, c)| (self.active(c), c.last_touch, id, self.unused(c), c.movable()))
                .collect();
            clients.sort();
            let mut left = excess;
            let mut orders = Vec::new();
            for (_, _, id, unused, _) in &clients {
                let n = left.min(*unused);
                left = left.saturating_sub(n);
                orders.push((*id, n, Depth::Unused));
            }
            if forced {
                for ((_, _, _, _, movable), order) in clients.iter().zip(&mut orders) {
                    let n = left.min(movable.saturating_sub(order.1));
                    left = left.saturating_sub(n);
                    if !n.is_zero() {
                        order.1 = order.1.saturating_add(n);
                        order.2 = Depth::Evict;
                    }
                }
            }
            for (id, bytes, depth) in orders {
                self.order(id, bytes, depth, ReclaimReason::LimitLowered, out);
            }
        }
    }

    fn excess_of_device(&self, device: DeviceId) -> Bytes {
        let ordered: Bytes = self
            .on(device)
            .filter_map(|(_, c)| c.order.as_ref())
            .map(|o| o.pending())
            .sum();
        self.used(device)
            .saturating_sub(self.devices[&device].capacity)
            .saturating_sub(ordered)
    }

    /// Takes back what the device does not have (any more): unused lease, then from the idle, then from those who wait.
    ///
    /// Clients that run keep what they use: it is there, or the driver would not have given it. What is over by the books
    /// is the reserve, and evicting a program for that could stop it for good. Nothing is granted until the sum is right.
    fn shrink_device(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let mut left = self.excess_of_device(device);
        if left.is_zero() {
            return;
        }
        let mut clients: Vec<_> = self
            .on(device)
            .filter(|(_, c)| c.order.is_none() && !self.left_alone(c))
            .map(|(id, c)| {
                let within = self.footprint(c.task, device) <= self.protected(c.task, device);
                let runs = self.active(c) && !c.suspended();
                (within, runs, self.task_of(c).spec.priority, c.last_touch, id)
            })
            .collect();
        clients.sort();
        let mut orders: Vec<(ClientId, Bytes, Depth)> = Vec::new();
        for (.., id) in &clients {
            let n = left.min(self.unused(&self.clients[id]));
            left = left.saturating_sub(n);
            orders.push((*id, n, Depth::Unused));
        }
        for order in &mut orders {
            let c = &self.clients[&order.0];
            if self.active(c) && !c.suspended() {
                continue;
            }
            let n = left.min(c.movable().saturating_sub(order.1));
            left = left.saturating_sub(n);
            if !n.is_zero() {
                order.1 = order.1.saturating_add(n);
                order.2 = Depth::Evict;
            }
        }
        for (id, bytes, depth) in orders {
            self.order(id, bytes, depth, ReclaimReason::Overcommitted, out);
        }
    }

    /// The waiting client that has waited long enough to keep others from starting to run before it.
    ///
    /// Only once it is owed the card: as long as someone who runs has had less of it, others may go on behind that.
    fn barrier(&self, device: DeviceId, order: &[Candidate], sums: &Sums) -> Option<Candidate> {
        let next = order.iter().find(|c| !c.guaranteed && self.possible(c, sums))?;
        let waited = next.since.after(self.config.patience) <= self.now;
        let owed = || {
            self.on(device)
                .filter(|(id, c)| *id != next.client && self.active(c) && !c.suspended())
                .all(|(_, c)| self.caught_up(c, next) <= self.now)
        };
        (waited && owed()).then_some(*next)
    }

    /// Whether a candidate may be served with regard to one that has waited long.
    fn may_pass(&self, c: &Candidate, barrier: Option<&Candidate>) -> bool {
        let Some(b) = barrier else {
            return true;
        };
        let client = &self.clients[&c.client];
        let runs = self.active(client) && !client.suspended() && !client.lease.is_zero();
        c.guaranteed
            || c.client == b.client
            || self.devices[&client.device].gathering == Some(c.client)
            || (runs && !self.turn_over(client, b))
    }

    /// Grants what free room is enough for.
    fn serve(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let sums = self.sums(device);
        let order = self.candidates(device, &sums);
        if order.is_empty() {
            return;
        }
        let barrier = self.barrier(device, &order, &sums);
        for c in &order {
            // Room that comes free belongs to the one who gathers.
            let kept = match self.devices[&device].gathering {
                Some(g) if g != c.client && !c.guaranteed => order
                    .iter()
                    .find(|o| o.client == g)
                    .map_or(Bytes::ZERO, |o| o.need),
                _ => Bytes::ZERO,
            };
            if !self.may_pass(c, barrier.as_ref()) {
                continue;
            }
            let room = self
                .free(device)
                .saturating_sub(kept)
                .min(self.limit_room(c.task, device));
            let back = self.clients[&c.client].asked(AskKind::Restore);
            let mut left = room;
            for a in self.clients[&c.client].asks.clone() {
                let fits = match a.kind {
                    AskKind::Alloc => a.left <= left,
                    AskKind::Restore => back <= room && a.left <= left,
                };
                if fits {
                    left = left.saturating_sub(a.left);
                    self.grant(c.client, a.id, a.left, out);
                }
            }
        }
    }

    /// Chooses the client to gather for, gives it what is free, and orders the rest from others.
    fn gather(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let sums = self.sums(device);
        let order = self.candidates(device, &sums);
        if order.is_empty() {
            if let Some(d) = self.devices.get_mut(&device) {
                d.gathering = None;
            }
            return;
        }
        let barrier = self.barrier(device, &order, &sums);
        let before = self.devices[&device].gathering;
        let current = order.iter().find(|c| Some(c.client) == before);
        let first = |guaranteed_only: bool| {
            order
                .iter()
                .filter(|c| c.guaranteed || !guaranteed_only)
                .filter(|c| self.may_pass(c, barrier.as_ref()) && self.possible(c, &sums))
                .take(CONSIDERED)
                .find_map(|c| {
                    let plan = self.plan(device, c, &order, &sums);
                    plan.enough.then_some((*c, plan))
                })
        };
        let kept = current
            .map(|c| (*c, self.plan(device, c, &order, &sums)))
            .filter(|(_, plan)| plan.enough);
        let chosen = match kept {
            Some((c, plan)) if c.guaranteed => Some((c, plan)),
            Some(kept) => first(true).or(Some(kept)),
            None => first(false),
        };
        let after = chosen.as_ref().map(|(c, _)| c.client);
        if before != after {
            if let Some(client) = before.filter(|b| order.iter().any(|c| c.client == *b)) {
                out.push(Action::Note(Note::ReservationDropped { client }));
            }
            if let Some((c, _)) = &chosen {
                out.push(Action::Note(Note::Reserved {
                    client: c.client,
                    bytes: c.need,
                }));
            }
        }
        if let Some(d) = self.devices.get_mut(&device) {
            d.gathering = after;
        }
        let Some((c, plan)) = chosen else {
            return;
        };
        if before != after {
            let d = &self.devices[&device];
            let short = c.need.saturating_sub(self.free(device));
            let cost = d.out.time(short).saturating_add(d.back.time(c.copy_in));
            if let Some(client) = self.clients.get_mut(&c.client) {
                client.turn_cost = cost;
            }
        }
        self.grant_pieces(device, &c, out);
        for (victim, bytes, depth, reason) in plan.orders {
            self.order(victim, bytes, depth, reason, out);
        }
    }

    /// Streams what is free to the restore asks of the one who gathers.
    fn grant_pieces(&mut self, device: DeviceId, c: &Candidate, out: &mut Vec<Action>) {
        for a in self.clients[&c.client].asks.clone() {
            let room = self.free(device).min(self.limit_room(c.task, device));
            if a.kind == AskKind::Restore && !room.is_zero() {
                self.grant(c.client, a.id, a.left.min(room), out);
            }
        }
    }

    fn grant(&mut self, id: ClientId, ask: AskId, bytes: Bytes, out: &mut Vec<Action>) {
        let now = self.now;
        let client = &self.clients[&id];
        let was_active = self.active(client);
        debug_assert!(
            bytes <= self.free(client.device),
            "a grant never passes the device"
        );
        debug_assert!(
            bytes <= self.limit_room(client.task, client.device),
            "a grant never passes the limit"
        );
        let d = &self.devices[&client.device];
        let gathered = d.gathering == Some(id);
        let own_cost = d.back.time(client.incoming.saturating_add(bytes));
        // Twice the estimate, and what a client may take to answer: only a fallback for news that never come.
        let restore_time = nanos(self.config.order_timeout).saturating_add(own_cost.saturating_mul(2));
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        let Some(at) = c.asks.iter().position(|a| a.id == ask) else {
            return;
        };
        let kind = c.asks[at].kind;
        c.asks[at].left = c.asks[at].left.saturating_sub(bytes);
        let complete = c.asks[at].left.is_zero();
        if complete {
            c.asks.remove(at);
        }
        c.lease = c.lease.saturating_add(bytes);
        c.last_grant = now;
        c.last_touch = now;
        c.idle_released = false;
        if kind == AskKind::Restore {
            c.incoming = c.incoming.saturating_add(bytes);
            if !c.wants_back() {
                if !gathered {
                    c.turn_cost = own_cost;
                }
                c.restoring_until = Time(now.0.saturating_add(restore_time));
                c.owed_restore = true;
                c.turn_start = now;
            }
        } else if !was_active {
            // It was stopped for want of this; its turn starts here.
            c.turn_start = now;
        }
        let served = !c.wants_back() && (c.asks.is_empty() || (complete && kind == AskKind::Alloc));
        let device = c.device;
        if served
            && let Some(d) = self.devices.get_mut(&device)
            && d.gathering == Some(id)
        {
            d.gathering = None;
        }
        out.push(Action::Grant {
            client: id,
            ask,
            bytes,
            complete,
        });
    }

    /// Takes orders back whose reason is gone.
    fn cancel_unneeded(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let gathering = self.devices[&device].gathering.is_some();
        let over = self.used(device) > self.devices[&device].capacity;
        let ids: Vec<ClientId> = self
            .on(device)
            .filter(|(_, c)| c.order.as_ref().is_some_and(|o| !o.cancelled))
            .map(|(id, _)| id)
            .collect();
        for id in ids {
            let c = &self.clients[&id];
            let Some(order) = &c.order else { continue };
            let needed = match order.reason {
                ReclaimReason::Demand { .. }
                | ReclaimReason::TurnEnded { .. }
                | ReclaimReason::Guarantee { .. } => gathering || over,
                ReclaimReason::Overcommitted => gathering || over,
                ReclaimReason::LimitLowered => {
                    gathering || self.held(c.task, device) > self.task_of(c).limit()
                }
                ReclaimReason::Paused => self.task_of(c).paused,
                ReclaimReason::IdleRelease => gathering || over || (!self.active(c) && c.asks.is_empty()),
            };
            if !needed {
                let order = order.id;
                if let Some(o) = self.clients.get_mut(&id).and_then(|c| c.order.as_mut()) {
                    o.cancelled = true;
                }
                out.push(Action::CancelReclaim { client: id, order });
            }
        }
    }

    /// When a client's memory is released unasked, if it is to be.
    pub(crate) fn idle_release_at(&self, id: ClientId) -> Option<Time> {
        let c = &self.clients[&id];
        let t = self.task_of(c);
        let wait = t.spec.idle_release?;
        if t.paused || c.idle_released || c.order.is_some() || !c.asks.is_empty() || c.movable().is_zero() {
            return None;
        }
        // An active client is never released, however short the time is set.
        let idle = c.last_touch.after(wait.max(self.config.idle_after));
        let mut at = idle.max(c.restoring_until).max(c.last_grant.after(wait));
        if self.left_alone(c) {
            at = at.max(c.leave_alone_until);
        }
        Some(at)
    }

    fn release_idle(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let ids: Vec<ClientId> = self
            .on(device)
            .map(|(id, _)| id)
            .filter(|id| self.idle_release_at(*id).is_some_and(|t| t <= self.now))
            .collect();
        for id in ids {
            if let Some(c) = self.clients.get_mut(&id) {
                c.idle_released = true;
            }
            self.order(id, Bytes::MAX, Depth::Evict, ReclaimReason::IdleRelease, out);
        }
    }

    /// Excuses end when the sums are right again; peaks are taken.
    fn settle(&mut self, device: DeviceId) {
        let used = self.used(device);
        if let Some(d) = self.devices.get_mut(&device) {
            d.peak = d.peak.max(used);
            d.excused &= used > d.capacity;
        }
        let excused: Vec<TaskId> = self
            .tasks
            .iter()
            .filter(|(_, t)| t.excused.contains(&device))
            .map(|(id, _)| *id)
            .collect();
        for task in excused {
            if self.held(task, device) <= self.tasks[&task].limit()
                && let Some(t) = self.tasks.get_mut(&task)
            {
                t.excused.remove(&device);
            }
        }
    }

    /// Says once that a pause is complete.
    fn tell_paused(&mut self, out: &mut Vec<Action>) {
        let ids: Vec<TaskId> = self
            .tasks
            .iter()
            .filter(|(_, t)| t.paused && !t.pause_told)
            .map(|(id, _)| *id)
            .collect();
        for task in ids {
            let clients = || self.clients.values().filter(|c| c.task == task);
            if clients().any(|c| c.order.is_some() || !(c.settled || c.movable().is_zero())) {
                continue;
            }
            let left = clients().map(|c| c.held()).sum();
            if let Some(t) = self.tasks.get_mut(&task) {
                t.pause_told = true;
            }
            out.push(Action::PauseDone { task, left });
        }
    }
}
