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

use core::cell::OnceCell;

use ebb_units::{Bytes, ClientId, DeviceId, OrderId, TaskId};

use crate::Arbiter;
use crate::action::{Action, DenyReason, Depth, Grounds, Note, ReclaimReason};
use crate::event::{AskId, AskKind, Outcome};
use crate::rank::{CONSIDERED, CROWD, Candidate, HOLDERS, Holder, LOOKED_AT};
use crate::state::{Client, Device, HoldKey, Order};
use crate::time::{Time, nanos};
use crate::victims::Plan;

/// Those who hold memory of the device, once somebody asked for them; the one first who would be taken from first.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) running: OnceCell<Vec<Holder>>,
    pub(crate) waiting: OnceCell<Vec<HoldKey>>,
}

/// The most rounds of one pass.
const ROUNDS: usize = 16;

impl Arbiter {
    /// Does what can be done now on every device where something changed.
    pub(crate) fn schedule(&mut self, out: &mut Vec<Action>) {
        self.late_pauses();
        // One device's pass may change what another one's clients are to do.
        for _ in 0..ROUNDS {
            let mut devices = core::mem::take(&mut self.dirty);
            devices.sort_unstable();
            for device in &devices {
                self.pass(*device, out);
            }
            devices.clear();
            if self.dirty.is_empty() {
                // Kept for its memory.
                self.dirty = devices;
                break;
            }
        }
        self.tell_paused(out);
    }

    fn pass(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let mut touched = core::mem::take(&mut self.changed);
        self.touched_on(device, &mut touched);
        for id in &touched {
            self.give_up_order(*id, out);
        }
        for id in &touched {
            self.expire_asks(*id, out);
            self.evict_paused(*id, out);
        }
        self.recall_lodgers(device, out);
        self.shrink_tasks(device, out);
        self.shrink_device(device, out);
        let d = &self.devices[&device];
        let waited_for =
            d.again && (!d.index.rank.is_empty() || d.gathering.is_some() || !d.index.orders.is_empty());
        if !waited_for && self.devices[&device].again {
            self.cancel_unneeded(device, out);
        }
        // What one got decides what others can have: until nothing changes (or for long enough).
        let mut seen = Seen::default();
        for _ in 0..if waited_for { ROUNDS } else { 0 } {
            let before = out.len();
            seen = Seen::default();
            self.serve(device, out);
            if self.devices[&device].touched.len() != touched.len() {
                self.touched_on(device, &mut touched);
                for id in &touched {
                    self.expire_asks(*id, out);
                }
            }
            self.gather(device, &seen, out);
            self.cancel_unneeded(device, out);
            if out.len() == before {
                break;
            }
        }
        let said = out.len();
        self.touched_on(device, &mut touched);
        for id in &touched {
            self.release_idle(*id, out);
            self.foresee(*id, out);
        }
        if waited_for {
            self.warn(device, out);
            self.break_deadlock(device, out);
        }
        self.keep_marks(device, out);
        self.settle(device);
        if let Some(d) = self.devices.get_mut(&device)
            && core::mem::take(&mut d.again)
        {
            // Those who run are as they were seen last, if nothing was decided since.
            let seen = seen.running.into_inner().filter(|_| out.len() == said);
            self.set_recheck(device, seen.as_deref());
        }
        self.touched_on(device, &mut touched);
        for id in &touched {
            self.note_state(*id);
        }
        touched.clear();
        // Kept for its memory.
        self.changed = touched;
        if let Some(d) = self.devices.get_mut(&device) {
            d.touched.clear();
            d.dirty = false;
        }
    }

    /// The clients of a device that changed, in order, each once.
    fn touched_on(&mut self, device: DeviceId, into: &mut Vec<ClientId>) {
        into.clear();
        if let Some(d) = self.devices.get_mut(&device) {
            d.touched.sort_unstable();
            d.touched.dedup();
            into.extend_from_slice(&d.touched);
        }
    }

    /// An order without progress counts as refused.
    fn give_up_order(&mut self, id: ClientId, out: &mut Vec<Action>) {
        let (now, timeout) = (self.now, self.config.order_timeout);
        let late = self.clients.get(&id).is_some_and(|c| {
            c.order
                .as_ref()
                .is_some_and(|o| o.last_progress.after(timeout) <= now)
        });
        if !late {
            return;
        }
        // Looks at the whole task: only where there is something to give up.
        let (retry, retry_max) = (self.config.retry, self.longest_pause(id));
        let given_up = self.edit(id, |c| {
            let order = c.order.take()?;
            c.idle_released = false;
            c.last_outcome = Some(Outcome::Busy);
            let pause_ms = c.back_off(now, retry, retry_max, true);
            Some((order, pause_ms))
        });
        if let Some((order, pause_ms)) = given_up.flatten() {
            if !order.cancelled {
                out.push(Action::CancelReclaim {
                    client: id,
                    order: order.id,
                });
            }
            out.push(Action::Note(Note::BackingOff {
                client: id,
                order: order.id,
                outcome: Outcome::Busy,
                pause_ms,
            }));
        }
    }

    /// Why an allocation cannot be, if it cannot.
    pub(crate) fn over_limit(&self, id: ClientId, bytes: Bytes) -> Option<DenyReason> {
        let client = &self.clients[&id];
        let limit = self.task_of(client).spec.limit?;
        let charged = self.footprint(client.task, client.device);
        if charged.saturating_add(bytes) <= limit {
            return None;
        }
        let least = charged.saturating_sub(self.unused_beside(id));
        (least.saturating_add(bytes) > limit).then_some(DenyReason::OverLimit {
            asked: bytes,
            charged,
            limit,
        })
    }

    /// The same for the device: others that never lend what is guaranteed to them would always be in the way. One that lends
    /// when it idles, or is paused, is waited for.
    pub(crate) fn never_fits(&self, id: ClientId, bytes: Bytes) -> Option<DenyReason> {
        let client = &self.clients[&id];
        let d = self.device_of(client);
        let own = self.task_of(client).kept(client.device);
        let usable = d.managed().saturating_sub(d.kept.saturating_sub(own));
        let held = client.held().saturating_sub(client.loose);
        let footprint = held.saturating_add(client.away()).saturating_add(bytes);
        (footprint > usable).then_some(DenyReason::NeverFits { footprint, usable })
    }

    /// Why a restore has to wait for another limit, if it has.
    pub(crate) fn restore_over_limit(&self, client: &Client) -> Option<DenyReason> {
        let limit = self.allowance(client.task, client.device);
        let asked = client.asked(AskKind::Restore);
        let charged = client.held();
        (charged.saturating_add(asked) > limit).then_some(DenyReason::OverLimit {
            asked,
            charged,
            limit,
        })
    }

    fn expire_asks(&mut self, id: ClientId, out: &mut Vec<Action>) {
        let mut at = 0;
        while let Some(c) = self.clients.get(&id)
            && let Some(a) = c.asks.get(at)
        {
            let late = self.ask_deadline(id, c, a).is_some_and(|t| t <= self.now);
            let denied = match a.kind {
                AskKind::Alloc => match self.over_limit(id, a.left) {
                    Some(reason) => Some((reason, true)),
                    None => late.then_some((DenyReason::TimedOut, false)),
                },
                AskKind::Restore => late
                    .then(|| self.restore_over_limit(c))
                    .flatten()
                    .map(|reason| (reason, false)),
            };
            match denied {
                Some((reason, last)) => {
                    let ask = a.id;
                    self.deny(id, ask, reason, last, out);
                }
                None => at += 1,
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
        let (now, retry) = (self.now, self.config.retry);
        self.edit(id, |c| {
            c.asks.retain(|a| a.id != ask);
            // It has its answer and goes on with it.
            c.last_touch = now;
            c.asks_changed(now, retry);
        });
        out.push(Action::Deny {
            client: id,
            ask,
            reason,
            last,
        });
    }

    /// Gives an order, unless one is open.
    pub(crate) fn order(
        &mut self,
        id: ClientId,
        bytes: Bytes,
        depth: Depth,
        reason: ReclaimReason,
        out: &mut Vec<Action>,
    ) {
        let now = self.now;
        let Some(c) = self.clients.get(&id) else {
            return;
        };
        let most = match depth {
            Depth::Beside => c.loose,
            Depth::Unused | Depth::Evict => c.movable(),
        };
        if c.order.is_some() || most.is_zero() || bytes.is_zero() {
            return;
        }
        self.last_order += 1;
        let order = OrderId(self.last_order);
        let grounds = self.grounds(c, bytes.min(most), depth);
        self.edit(id, |c| {
            if depth == Depth::Evict {
                // What overrules a promise ends it.
                c.forgive(now);
                if !c.suspended() {
                    c.interrupted = (grounds.active || c.linked.broken) && reason.for_others();
                }
            }
            c.last_reason = Some(reason);
            c.last_grounds = grounds;
            c.warned = None;
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
        });
        out.push(Action::Reclaim {
            client: id,
            order,
            bytes,
            depth,
            reason,
            grounds,
        });
        self.unwarn(id);
    }

    /// What is known of a client at the moment at which it is chosen.
    fn grounds(&self, c: &Client, bytes: Bytes, depth: Depth) -> Grounds {
        let idle = self.now.since(c.last_touch).as_millis();
        let part = self.part_of(c);
        let t = self.task_of(c);
        Grounds {
            idle_ms: u64::try_from(idle).unwrap_or(u64::MAX),
            active: self.active(c) && (self.restoring(c) || !c.suspended()),
            waiting: !c.asks.is_empty(),
            unused: depth == Depth::Unused,
            clean: depth == Depth::Evict && !c.clean().is_zero() && c.to_copy(bytes).is_zero(),
            burst: part.footprint() > t.guaranteed(c.device),
            priority: t.spec.priority,
        }
    }

    fn evict_paused(&mut self, id: ClientId, out: &mut Vec<Action>) {
        let due = self
            .clients
            .get(&id)
            .is_some_and(|c| self.task_of(c).paused && !c.settled && !self.left_alone(c));
        if due {
            self.order(id, Bytes::MAX, Depth::Evict, ReclaimReason::Paused, out);
        }
    }

    /// Brings tasks back under their limits: what they do not use always, live memory only where that was forced.
    fn shrink_tasks(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let tasks: Vec<TaskId> = self.devices[&device].index.excess.iter().copied().collect();
        for task in tasks {
            let sums = self.devices[&device].parts[&task].sums;
            let excess = sums
                .held
                .saturating_sub(self.tasks[&task].limit())
                .saturating_sub(sums.ordered);
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

    /// Takes back what the device does not have (any more): unused lease, then from the idle, then from those who wait.
    ///
    /// Clients that run keep what they use: it is there, or the driver would not have given it. What is over by the books
    /// is the reserve, and evicting a program for that could stop it for good. Nothing is granted until the sum is right.
    fn shrink_device(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let d = &self.devices[&device];
        let mut left = d
            .used()
            .saturating_sub(d.capacity)
            .saturating_sub(d.sums.ordered)
            .saturating_sub(d.lodgers.coming());
        if left.is_zero() {
            return;
        }
        let may = |id: &ClientId| {
            let c = &self.clients[id];
            c.order.is_none() && !self.left_alone(c)
        };
        let mut orders: Vec<(ClientId, Bytes, Depth)> = Vec::new();
        for id in d.index.spare.iter().map(|key| key.client).filter(&may) {
            if left.is_zero() {
                break;
            }
            let n = left.min(self.unused(&self.clients[&id]));
            left = left.saturating_sub(n);
            orders.push((id, n, Depth::Unused));
        }
        // Those within what their task requested come last.
        let protected = |id: &ClientId| {
            let part = self.part_of(&self.clients[id]);
            part.footprint() <= part.protected
        };
        let stopped = || {
            let waiting = d.index.waiting.iter().map(|key| (key, false));
            let all = d.index.idle_by_cost().chain(waiting);
            all.map(|(key, clean)| (key.client, clean))
                .filter(|(id, _)| may(id))
        };
        let bursts = stopped().filter(|(id, _)| !protected(id));
        for (id, clean) in bursts.chain(stopped().filter(|(id, _)| protected(id))) {
            if left.is_zero() {
                break;
            }
            let at = orders.iter().position(|(other, ..)| *other == id);
            let taken = at.map_or(Bytes::ZERO, |at| orders[at].1);
            let n = left.min(self.clients[&id].within(clean).saturating_sub(taken));
            left = left.saturating_sub(n);
            if n.is_zero() {
                continue;
            }
            match at {
                Some(at) => orders[at] = (id, taken.saturating_add(n), Depth::Evict),
                None => orders.push((id, n, Depth::Evict)),
            }
        }
        for (id, bytes, depth) in orders {
            self.order(id, bytes, depth, ReclaimReason::Overcommitted, out);
        }
    }

    /// The waiting client that has waited long enough to keep others from starting to run before it.
    ///
    /// Only once it is owed the card: as long as someone who runs has had less of it, others may go on behind that.
    ///
    /// A rank whose gang cannot come at present keeps nobody from a device that it could not use, until it goes first whatever others had.
    fn barrier(&self, device: DeviceId) -> Option<Candidate> {
        let d = &self.devices[&device];
        let next = self.first_in_line(device)?;
        let waited = next.since.after(self.config.patience) <= self.now;
        let owed = || {
            d.index
                .running
                .iter()
                .take(HOLDERS)
                .map(|key| (key.client, &self.clients[&key.client]))
                .filter(|(id, c)| *id != next.client && !c.suspended() && !c.linked.broken)
                .all(|(_, c)| self.caught_up(c, &next) <= self.now)
        };
        let comes = || next.starving || self.gang_can(&next);
        (waited && owed() && comes()).then_some(next)
    }

    /// The first who waits beyond what its task requested, and could be served.
    pub(crate) fn first_in_line(&self, device: DeviceId) -> Option<Candidate> {
        let bursts = self.devices[&device].index.rank.iter().filter(|key| key.burst);
        let mut some = bursts.take(LOOKED_AT).map(|key| self.candidate(key));
        some.find(|c| !c.humble && self.possible_now(c))
    }

    /// Whether a candidate may be served with regard to one that has waited long.
    fn may_pass(&self, c: &Candidate, barrier: Option<&Candidate>) -> bool {
        let Some(b) = barrier else {
            return true;
        };
        c.guaranteed
            || c.client == b.client
            || self.device_of(&self.clients[&c.client]).gathering == Some(c.client)
            || self.in_turn(c.client, b)
    }

    /// Grants what free room is enough for.
    fn serve(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let d = &self.devices[&device];
        let free = d.free();
        if d.index.needs.first().is_none_or(|(least, _)| *least > free) {
            return;
        }
        let mut first = core::mem::take(&mut self.ranks);
        first.extend(self.devices[&device].index.rank.iter().take(LOOKED_AT));
        let barrier = self.barrier(device);
        let d = &self.devices[&device];
        let kept = d
            .gathering
            .and_then(|g| self.clients.get(&g).map(|c| (g, c.linked.need)));
        for key in &first {
            // What is free is less than anybody could be granted.
            let d = &self.devices[&device];
            let free = d.free();
            if d.index.needs.first().is_none_or(|(least, _)| *least > free) {
                break;
            }
            let c = self.candidate(key);
            self.serve_one(device, &c, kept, barrier.as_ref(), out);
        }
        let all = first.len() < LOOKED_AT;
        first.clear();
        // Kept for its memory.
        self.ranks = first;
        if all {
            return;
        }
        // Behind those, whoever needs least.
        while let Some((least, id)) = self.devices[&device].index.needs.first().copied() {
            let before = out.len();
            if least > self.free(device) {
                break;
            }
            let Some(key) = self.clients[&id].linked.rank else {
                break;
            };
            let c = self.candidate(&key);
            self.serve_one(device, &c, kept, barrier.as_ref(), out);
            if out.len() == before {
                break;
            }
        }
    }

    fn serve_one(
        &mut self,
        device: DeviceId,
        c: &Candidate,
        kept: Option<(ClientId, Bytes)>,
        barrier: Option<&Candidate>,
        out: &mut Vec<Action>,
    ) {
        // Room that comes free belongs to the one who gathers.
        let kept = match kept {
            Some((g, need))
                if g != c.client && !c.guaranteed && self.devices[&device].gathering == Some(g) =>
            {
                need
            }
            _ => Bytes::ZERO,
        };
        let room = self
            .free(device)
            .saturating_sub(kept)
            .min(self.limit_room(c.task, device));
        if room.is_zero() || !self.may_pass(c, barrier) || !self.gang_can(c) {
            return;
        }
        let client = &self.clients[&c.client];
        let back = client.asked(AskKind::Restore);
        let new_room = self.new_room(c.task, device);
        let mut left = room;
        let asks: Vec<(AskId, AskKind, Bytes)> = client.asks.iter().map(|a| (a.id, a.kind, a.left)).collect();
        for (ask, kind, bytes) in asks {
            let fits = match kind {
                AskKind::Alloc => bytes <= left && bytes <= new_room,
                AskKind::Restore => back <= room && bytes <= left,
            };
            if fits {
                left = left.saturating_sub(bytes);
                self.grant(c.client, ask, bytes, out);
            }
        }
        if left < room {
            self.gather_gang(c, out);
        }
    }

    /// Chooses the client to gather for, gives it what is free, and orders the rest from others.
    fn gather(&mut self, device: DeviceId, seen: &Seen, out: &mut Vec<Action>) {
        let d = &self.devices[&device];
        let before = d.gathering;
        if d.index.rank.is_empty() {
            self.set_gathering(device, None);
            return;
        }
        let current = before
            .and_then(|g| self.clients.get(&g))
            .and_then(|c| c.linked.rank)
            .map(|key| self.candidate(&key));
        let kept = current.and_then(|c| {
            let plan = self.plan(device, &c, seen);
            (plan.enough && self.gang_can(&c)).then_some((c, plan))
        });
        let d = &self.devices[&device];
        let barrier = self.barrier(device);
        let stopped = d.index.movable[0].saturating_add(d.index.movable[1]);
        // More than could come of any plan: most candidates of a full card need not be looked at more closely.
        let hopeless = |c: &Candidate| {
            let need = c.need.saturating_add(c.later);
            let coming = d.sums.ordered.saturating_add(d.lodgers.coming());
            let own = self.clients[&c.client].loose;
            let short = need.saturating_sub(d.free()).saturating_sub(coming);
            let short = short.saturating_sub(own);
            if c.guaranteed || !d.index.spare.is_empty() || short <= stopped {
                return false;
            }
            let holders = seen.running.get_or_init(|| self.holders_in_order(device));
            !self.have_over(device, holders, c, short.saturating_sub(stopped))
        };
        let first = |guaranteed_only: bool| {
            d.index
                .rank
                .iter()
                .take_while(|key| !key.burst || !guaranteed_only)
                .take(LOOKED_AT)
                .map(|key| self.candidate(key))
                .filter(|c| !c.humble && self.may_pass(c, barrier.as_ref()) && self.possible_now(c))
                .take(CONSIDERED)
                .filter(|c| !hopeless(c))
                .find_map(|c| {
                    let plan = self.plan(device, &c, seen);
                    (plan.enough && self.gang_can(&c)).then_some((c, plan))
                })
        };
        let chosen = match kept {
            Some((c, plan)) if c.guaranteed => Some((c, plan)),
            Some(kept) => first(true).or(Some(kept)),
            None if self.looked_lately(d) => None,
            None => first(false),
        };
        let after = chosen.as_ref().map(|(c, _)| c.client);
        if before != after {
            if let Some(client) = before
                && current.is_some()
            {
                out.push(Action::Note(Note::ReservationDropped { client }));
            }
            if let Some((c, _)) = &chosen {
                out.push(Action::Note(Note::Reserved {
                    client: c.client,
                    bytes: c.need,
                }));
            }
        }
        self.set_gathering(device, after);
        let Some((c, plan)) = chosen else {
            return;
        };
        if before != after {
            self.turn_costs(device, &c, &plan);
            self.gather_gang(&c, out);
        }
        self.grant_pieces(device, &c, out);
        let trial = self.trial(device, plan.orders.iter().map(|order| order.0));
        for (victim, bytes, depth, reason) in plan.orders {
            if !trial || depth == Depth::Unused || self.on_trial(victim) {
                self.order(victim, bytes, depth, reason, out);
            }
        }
    }

    /// Whose turn ends was looked at a moment ago, and is not looked at with every event, since very many run.
    pub(crate) fn looked_lately(&self, d: &Device) -> bool {
        d.crowded() && d.looked.is_some_and(|at| self.now < at.after(CROWD))
    }

    /// Notes what the copying is that a client's turn begins with.
    pub(crate) fn turn_costs(&mut self, device: DeviceId, c: &Candidate, plan: &Plan) {
        let d = &self.devices[&device];
        let short = c.need.saturating_sub(d.free());
        let clean_of = |(id, bytes, ..): &(ClientId, Bytes, Depth, ReclaimReason)| {
            let clean = self.clients.get(id).map_or(Bytes::ZERO, Client::clean);
            clean.min(*bytes)
        };
        let clean: Bytes = plan.orders.iter().map(clean_of).sum();
        let out = d.out.time(short.saturating_sub(clean));
        let cost = out.saturating_add(d.back.time(c.copy_in));
        self.edit(c.client, |c| c.turn_cost = cost);
    }

    /// Room is gathered for this client from here on. Both are looked at: it shows in their state and their deadlines.
    pub(crate) fn set_gathering(&mut self, device: DeviceId, client: Option<ClientId>) {
        let Some(d) = self.devices.get_mut(&device) else {
            return;
        };
        let before = core::mem::replace(&mut d.gathering, client);
        if before == client {
            return;
        }
        for id in before.into_iter().chain(client) {
            self.look(id);
        }
    }

    /// Streams what is free to the restore asks of the one who gathers.
    fn grant_pieces(&mut self, device: DeviceId, c: &Candidate, out: &mut Vec<Action>) {
        let restores: Vec<(AskId, Bytes)> = self.clients[&c.client]
            .asks
            .iter()
            .filter(|a| a.kind == AskKind::Restore)
            .map(|a| (a.id, a.left))
            .collect();
        for (ask, left) in restores {
            let room = self.free(device).min(self.limit_room(c.task, device));
            if !room.is_zero() {
                self.grant(c.client, ask, left.min(room), out);
            }
        }
    }

    fn grant(&mut self, id: ClientId, ask: AskId, bytes: Bytes, out: &mut Vec<Action>) {
        let (now, retry) = (self.now, self.config.retry);
        let client = &self.clients[&id];
        let was_active = self.active(client) && client.linked.stalled.is_zero();
        let d = self.device_of(client);
        debug_assert!(bytes <= d.free(), "a grant never passes the device");
        debug_assert!(
            bytes <= self.limit_room(client.task, client.device),
            "a grant never passes the limit"
        );
        let device = client.device;
        let gathered = d.gathering == Some(id);
        let own_cost = d.back.time(client.incoming.saturating_add(bytes));
        // Twice the estimate, and what a client may take to answer: only a fallback for news that never come.
        let restore_time = nanos(self.config.order_timeout).saturating_add(own_cost.saturating_mul(2));
        let granted = self.edit(id, |c| {
            let at = c.asks.iter().position(|a| a.id == ask)?;
            let kind = c.asks[at].kind;
            c.asks[at].left = c.asks[at].left.saturating_sub(bytes);
            let complete = c.asks[at].left.is_zero();
            if complete {
                c.asks.remove(at);
            }
            c.lease = c.lease.saturating_add(bytes);
            c.last_grant = now;
            if !c.guessed() {
                c.last_touch = now;
            }
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
            c.asks_changed(now, retry);
            let served = !c.wants_back() && (c.asks.is_empty() || (complete && kind == AskKind::Alloc));
            Some((complete, served))
        });
        let Some((complete, served)) = granted.flatten() else {
            return;
        };
        // What comes back may pass a limit that the driver's own memory has outgrown.
        self.excuse_task(id);
        if served && gathered {
            self.set_gathering(device, None);
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
        let d = &self.devices[&device];
        if d.gathering.is_some() || d.over() {
            return;
        }
        // Those that were for others, and those of clients that changed.
        let ordered = |id: &&ClientId| self.clients.get(id).is_some_and(|c| c.order.is_some());
        let changed = d.touched.iter().filter(ordered);
        let mut ids: Vec<ClientId> = d.index.orders.iter().chain(changed).copied().collect();
        ids.sort_unstable();
        ids.dedup();
        for id in ids {
            let Some(c) = self.clients.get(&id) else { continue };
            let Some(order) = c.order.as_ref().filter(|o| !o.cancelled) else {
                continue;
            };
            let needed = match order.reason {
                ReclaimReason::Own
                | ReclaimReason::Demand { .. }
                | ReclaimReason::TurnEnded { .. }
                | ReclaimReason::Guarantee { .. }
                | ReclaimReason::Overcommitted => false,
                ReclaimReason::LimitLowered => self.held(c.task, device) > self.task_of(c).limit(),
                ReclaimReason::Paused => self.task_of(c).paused,
                ReclaimReason::IdleRelease
                | ReclaimReason::LowMark
                | ReclaimReason::Operator
                | ReclaimReason::Foreseen { .. }
                    if order.depth == Depth::Unused =>
                {
                    true
                }
                ReclaimReason::IdleRelease if self.has_rested(c) => c.asks.is_empty(),
                ReclaimReason::IdleRelease
                | ReclaimReason::LowMark
                | ReclaimReason::Operator
                | ReclaimReason::Foreseen { .. } => !self.active(c) && c.asks.is_empty(),
            };
            if !needed {
                let order = order.id;
                self.edit(id, |c| {
                    if let Some(o) = &mut c.order {
                        o.cancelled = true;
                    }
                });
                out.push(Action::CancelReclaim { client: id, order });
            }
        }
    }

    fn release_idle(&mut self, id: ClientId, out: &mut Vec<Action>) {
        let due = self
            .clients
            .get(&id)
            .and_then(|c| self.idle_release_at(c))
            .is_some_and(|t| t <= self.now);
        // With marks, memory that idles stays until there is little free.
        if due && self.config.low_mark == 0 {
            self.edit(id, |c| c.idle_released = true);
            self.order(id, Bytes::MAX, Depth::Evict, ReclaimReason::IdleRelease, out);
        }
    }

    /// Excuses end when the sums are right again; peaks are taken.
    fn settle(&mut self, device: DeviceId) {
        let Some(d) = self.devices.get_mut(&device) else {
            return;
        };
        let used = d.used();
        d.peak = d.peak.max(used);
        d.excused &= used > d.capacity;
        let Device {
            excused_tasks, index, ..
        } = d;
        excused_tasks.retain(|task| index.excess.contains(task));
    }

    /// Says once that a pause is complete.
    fn tell_paused(&mut self, out: &mut Vec<Action>) {
        let ids: Vec<TaskId> = self.telling.iter().copied().collect();
        for task in ids {
            let Some(t) = self.tasks.get(&task).filter(|t| t.paused && !t.pause_told) else {
                self.telling.remove(&task);
                continue;
            };
            let ids: Vec<ClientId> = t.clients.iter().copied().collect();
            if self.lodging_of_paused(&ids, out) {
                continue;
            }
            let t = &self.tasks[&task];
            let clients = || t.clients.iter().map(|id| &self.clients[id]);
            if clients().any(|c| c.order.is_some() || !(c.settled || c.movable().is_zero())) {
                continue;
            }
            let left = clients().map(|c| c.held()).sum();
            if let Some(t) = self.tasks.get_mut(&task) {
                t.pause_told = true;
            }
            self.telling.remove(&task);
            out.push(Action::PauseDone { task, left });
        }
    }
}
