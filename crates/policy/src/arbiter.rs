//! [`Arbiter`]: the entry points, and what each event does to the ledger.

use core::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use ebb_units::{Bytes, ClientId, DeviceId, OrderId, TaskId};

use crate::action::{Action, DenyReason, Depth, Note, ReclaimReason, Refusal};
use crate::config::PolicyConfig;
use crate::event::{AskId, AskKind, Event, Outcome, TaskSpec, Tenant, Usage};
use crate::stall::LONGEST;
use crate::state::{Ask, Client, Device, RankKey, Task};
use crate::table::Table;
use crate::time::Time;
use crate::view::ClientState;

/// The arbiter of one node.
///
/// # Invariants
/// [`Arbiter::check`] states them and holds after every event.
#[derive(Clone, Debug)]
pub struct Arbiter {
    pub(crate) config: PolicyConfig,
    /// The time of the last event. An earlier one later on counts as this.
    pub(crate) now: Time,
    pub(crate) devices: Table<DeviceId, Device>,
    pub(crate) tasks: Table<TaskId, Task>,
    pub(crate) clients: Table<ClientId, Client>,
    pub(crate) last_order: u64,
    /// Events so far; counted where the books are checked after them.
    pub(crate) handled: u64,
    /// When clients are to be looked at anew.
    pub(crate) wakes: BTreeSet<(Time, ClientId)>,
    /// When devices are to be.
    pub(crate) rechecks: BTreeSet<(Time, DeviceId)>,
    /// Devices on which something changed in this event.
    pub(crate) dirty: Vec<DeviceId>,
    /// Memory for lists that are made in each pass.
    pub(crate) changed: Vec<ClientId>,
    pub(crate) ranks: Vec<RankKey>,
    /// Tasks whose pause waits.
    pub(crate) put_off: BTreeSet<TaskId>,
    /// Paused tasks of which nobody was told yet that they are off.
    pub(crate) telling: BTreeSet<TaskId>,
    /// What tenants weigh that do not weigh 1.
    pub(crate) weights: BTreeMap<Tenant, u32>,
    /// Tasks that have not chosen a device yet, by what they request.
    pub(crate) undecided: BTreeSet<(Reverse<Bytes>, TaskId)>,
    /// Tasks whose request does not hold in full somewhere.
    pub(crate) cut: BTreeSet<(TaskId, DeviceId)>,
}

impl Arbiter {
    /// An arbiter that knows no device yet.
    #[must_use]
    pub fn new(config: PolicyConfig) -> Self {
        Self {
            config,
            now: Time::default(),
            devices: Table::default(),
            tasks: Table::default(),
            clients: Table::default(),
            last_order: 0,
            handled: 0,
            wakes: BTreeSet::new(),
            rechecks: BTreeSet::new(),
            dirty: Vec::new(),
            changed: Vec::new(),
            ranks: Vec::new(),
            put_off: BTreeSet::new(),
            telling: BTreeSet::new(),
            weights: BTreeMap::new(),
            undecided: BTreeSet::new(),
            cut: BTreeSet::new(),
        }
    }

    /// What it decides by.
    #[must_use]
    pub fn config(&self) -> &PolicyConfig {
        &self.config
    }

    /// Decides by other numbers from the next event on. A change of them is not an event: replay it by the same call.
    pub fn set_config(&mut self, config: PolicyConfig) {
        self.config = config;
        let clients: Vec<ClientId> = self.clients.keys().copied().collect();
        for client in clients {
            self.look(client);
        }
        let devices: Vec<DeviceId> = self.devices.keys().copied().collect();
        for device in devices {
            if let Some(d) = self.devices.get_mut(&device) {
                d.again = true;
            }
            self.touch_device(device);
        }
    }

    /// Takes in one event and says what is to be done.
    pub fn handle(&mut self, now: Time, event: &Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.handle_into(now, event, &mut actions);
        actions
    }

    /// Like [`Self::handle`], appending to a buffer.
    pub fn handle_into(&mut self, now: Time, event: &Event, out: &mut Vec<Action>) {
        self.advance(now);
        self.apply(event, out);
        self.schedule(out);
        if cfg!(debug_assertions) {
            // All of it, now and then: tests that look closely ask for it themselves.
            self.handled += 1;
            if self.handled < 32 || self.handled.is_multiple_of(16) {
                assert_eq!(self.check(), Ok(()), "after {event:?}");
            }
        }
    }

    fn apply(&mut self, event: &Event, out: &mut Vec<Action>) {
        match *event {
            Event::Device {
                device,
                capacity,
                unmanaged,
            } => self.device(device, capacity, unmanaged, out),
            Event::Tenant { tenant, weight } => self.tenant(tenant, weight),
            Event::TaskAdded {
                task,
                ref spec,
                ref devices,
                adopt,
            } => self.task_added(task, spec, devices, adopt, out),
            Event::TaskChanged {
                task,
                ref spec,
                force,
            } => self.task_changed(task, spec, force, out),
            Event::TaskRemoved { task } => self.task_removed(task, out),
            Event::ClientJoined {
                client,
                task,
                device,
                lease,
                evicted,
                overhead,
            } => self.joined(client, task, device, [lease, evicted, overhead], out),
            Event::ClientLeft { client, kept } => match self.remove_client(client) {
                Some(left) => {
                    if let Some(device) = self.devices.get_mut(&left.device) {
                        // No more than was booked for it: what stays cannot be more than what was there.
                        let kept = kept.min(left.lease).min(left.linked.sums.held);
                        device.unmanaged = device.unmanaged.saturating_add(kept);
                    }
                }
                None => ignored(out, format!("{client} left, but is not known")),
            },
            Event::Ask {
                client,
                ask,
                kind,
                bytes,
                long,
            } => self.ask(client, ask, kind, bytes, long, out),
            Event::AskCancelled { client, ask } => {
                if self.known(client, out) {
                    // An unknown ask is normal here: the cancellation crossed the answer.
                    let (now, retry) = (self.now, self.config.retry);
                    self.edit(client, |c| {
                        c.asks.retain(|a| a.id != ask);
                        c.asks_changed(now, retry);
                        if c.restore_over() {
                            c.owed_restore = false;
                        }
                    });
                }
            }
            Event::Returned { client, bytes } => {
                self.give_back(client, bytes, out);
            }
            Event::Inherited { client, from, bytes } => self.inherited(client, from, bytes, out),
            Event::BecameOverhead { client, bytes } => {
                if self.known(client, out) {
                    self.edit(client, |c| {
                        let real = bytes.min(c.lease);
                        c.give_back(real);
                        c.overhead = c.overhead.saturating_add(real);
                    });
                }
            }
            Event::Usage { client, usage } => self.usage(client, usage, out),
            Event::Touched { client } => self.touched(client, out),
            Event::ReclaimProgress { client, order, bytes } => self.progress(client, order, bytes, out),
            Event::ReclaimDone {
                client,
                order,
                outcome,
                copied,
                nanos,
            } => self.reclaimed(client, order, outcome, copied, nanos, out),
            Event::Restored {
                client,
                copied,
                nanos,
            } => self.restored(client, copied, nanos, out),
            Event::Pause { task } | Event::Resume { task } if !self.tasks.contains_key(&task) => {
                ignored(out, format!("{task} is not known"));
            }
            Event::Pause { task } => self.pause(task),
            Event::Resume { task } => self.resume(task, out),
            Event::Trim { device } => self.trim(device, out),
            Event::Shrink { device, priority } => self.shrink(device, priority, out),
            Event::LodgingAsked {
                client,
                ref lenders,
                bytes,
                most,
            } => self.lodging_asked(client, lenders, bytes, most, out),
            Event::LodgingLeft {
                client,
                lender,
                bytes,
            } => self.lodging_left(client, lender, bytes, out),
            Event::LodgingHeld { client, ref held } => self.lodging_held(client, held, out),
            Event::Tick => {}
        }
    }

    /// Weighs a tenant anew.
    fn tenant(&mut self, tenant: Tenant, weight: u32) {
        let weight = weight.max(1);
        self.weights.insert(tenant, weight);
        let (tasks, now) = (&self.tasks, self.now);
        let all: Vec<DeviceId> = self.devices.keys().copied().collect();
        for id in all {
            let Some(d) = self.devices.get_mut(&id) else {
                continue;
            };
            let contending: Vec<TaskId> = d.parts.keys().copied().collect();
            for task in contending {
                d.settle_part(task, &tasks[&task], now);
            }
            if let Some((_, w)) = d.tenants.get_mut(&tenant) {
                *w = u64::from(weight);
            }
            d.again = true;
            if !d.dirty {
                d.dirty = true;
                self.dirty.push(id);
            }
        }
    }

    fn known(&self, client: ClientId, out: &mut Vec<Action>) -> bool {
        let known = self.clients.contains_key(&client);
        if !known {
            ignored(out, format!("{client} is not known"));
        }
        known
    }

    fn device(&mut self, device: DeviceId, capacity: Bytes, unmanaged: Bytes, out: &mut Vec<Action>) {
        match self.devices.get_mut(&device) {
            Some(d) => {
                d.capacity = capacity;
                d.unmanaged = unmanaged;
            }
            None => {
                self.devices
                    .insert(device, Device::new(capacity, unmanaged, &self.config));
                let named: Vec<TaskId> = self
                    .tasks
                    .iter()
                    .filter(|(_, t)| t.named.contains(&device))
                    .map(|(id, _)| *id)
                    .collect();
                for task in named {
                    self.guarantee(task, device, out);
                }
            }
        }
        if let Some(d) = self.devices.get_mut(&device) {
            d.again = true;
        }
        self.touch_device(device);
        self.excuse(device, None, out);
        self.mend_guarantees(out);
    }

    /// A figure grew by itself: the sums may be over for a while.
    pub(crate) fn excuse(&mut self, device: DeviceId, task: Option<TaskId>, out: &mut Vec<Action>) {
        let Some(d) = self.devices.get_mut(&device) else {
            return;
        };
        if d.over() && !d.excused {
            d.excused = true;
            out.push(Action::Note(Note::Overcommitted {
                device,
                bytes: d.used().saturating_sub(d.capacity),
            }));
        }
        if let Some(task) = task
            && d.index.excess.contains(&task)
        {
            d.excused_tasks.insert(task);
        }
    }

    /// A client's task may be above its limit for a while, if it is.
    pub(crate) fn excuse_task(&mut self, client: ClientId) {
        let Some((task, device)) = self.clients.get(&client).map(|c| (c.task, c.device)) else {
            return;
        };
        if let Some(d) = self.devices.get_mut(&device)
            && d.index.excess.contains(&task)
        {
            d.excused_tasks.insert(task);
        }
    }

    fn task_added(
        &mut self,
        task: TaskId,
        spec: &TaskSpec,
        devices: &[DeviceId],
        adopt: bool,
        out: &mut Vec<Action>,
    ) {
        let verdict = if self.tasks.contains_key(&task) {
            Err(Refusal::Exists { task })
        } else if adopt {
            Ok(())
        } else {
            self.admit(task, spec, devices)
        };
        if let Err(why) = verdict {
            out.push(Action::TaskRefused { task, why });
            return;
        }
        let named: BTreeSet<DeviceId> = devices.iter().copied().collect();
        self.tasks.insert(task, Task::new(spec.clone(), named.clone()));
        self.edit_task(task, |_| ());
        for device in named {
            self.guarantee(task, device, out);
        }
        out.push(Action::TaskAccepted { task });
    }

    /// Live bytes of a task on a device: allocated, wherever they are, and overhead.
    pub(crate) fn live(&self, task: TaskId, device: DeviceId) -> Bytes {
        let unused: Bytes = self.of(task, device).map(|(_, c)| self.unused(c)).sum();
        self.footprint(task, device).saturating_sub(unused)
    }

    fn check_change(&self, task: TaskId, spec: &TaskSpec, force: bool) -> Result<(), Refusal> {
        let Some(t) = self.tasks.get(&task) else {
            return Err(Refusal::Unknown { task });
        };
        let devices: Vec<DeviceId> = t.guaranteed.keys().copied().collect();
        if spec.request > t.spec.request {
            self.admit(task, spec, &devices)?;
        } else if let Some(limit) = spec.limit
            && spec.request > limit
        {
            return Err(Refusal::RequestAboveLimit {
                request: spec.request,
                limit,
            });
        }
        if let Some(limit) = spec.limit
            && !force
            && limit < t.limit()
        {
            for device in self.devices.keys() {
                if self.live(task, *device) > limit {
                    // Part of it nothing uses, by its last account, though it is too fresh to be counted on.
                    let cached: Bytes = self
                        .of(task, *device)
                        .map(|(_, c)| c.unused.min(c.movable_lease()))
                        .sum();
                    return Err(Refusal::LimitBelowLive {
                        device: *device,
                        limit,
                        live: self.footprint(task, *device).saturating_sub(cached),
                        cached,
                    });
                }
            }
        }
        Ok(())
    }

    fn task_changed(&mut self, task: TaskId, spec: &TaskSpec, force: bool, out: &mut Vec<Action>) {
        if let Err(why) = self.check_change(task, spec, force) {
            out.push(Action::ChangeRefused { task, why });
            return;
        }
        let limit = spec.limit.unwrap_or(Bytes::MAX);
        let below = self.devices.keys().any(|d| self.live(task, *d) > limit);
        self.edit_task(task, |t| {
            t.forced = below && (force || t.forced);
            t.spec = spec.clone();
        });
        let devices: Vec<DeviceId> = self.tasks[&task].guaranteed.keys().copied().collect();
        for device in devices {
            self.guarantee(task, device, out);
        }
        let all: Vec<DeviceId> = self.devices.keys().copied().collect();
        for device in all {
            self.excuse(device, Some(task), out);
        }
        self.mend_guarantees(out);
        out.push(Action::TaskChanged { task });
    }

    fn task_removed(&mut self, task: TaskId, out: &mut Vec<Action>) {
        let Some(t) = self.tasks.get(&task) else {
            ignored(out, format!("{task} ended, but is not known"));
            return;
        };
        let clients: Vec<ClientId> = t.clients.iter().copied().collect();
        let devices: Vec<DeviceId> = t.guaranteed.keys().copied().collect();
        for client in clients {
            self.remove_client(client);
        }
        self.edit_task(task, |t| t.guaranteed.clear());
        self.tasks.remove(&task);
        self.undecided.retain(|(_, id)| *id != task);
        self.put_off.remove(&task);
        self.telling.remove(&task);
        for device in devices {
            self.cut.remove(&(task, device));
            // Those that wait are promised more, maybe.
            if let Some(d) = self.devices.get_mut(&device) {
                d.again = true;
            }
            self.touch_device(device);
        }
        self.mend_guarantees(out);
    }

    fn joined(
        &mut self,
        client: ClientId,
        task: TaskId,
        device: DeviceId,
        [lease, evicted, overhead]: [Bytes; 3],
        out: &mut Vec<Action>,
    ) {
        if self.clients.contains_key(&client) {
            return ignored(out, format!("{client} joined, but is there already"));
        }
        if !self.tasks.contains_key(&task) {
            return ignored(out, format!("{client} joined {task}, which is not known"));
        }
        if !self.devices.contains_key(&device) {
            return ignored(out, format!("{client} joined on {device}, which is not known"));
        }
        if !self.tasks[&task].guaranteed.contains_key(&device) {
            self.guarantee(task, device, out);
        }
        self.enter_contention(task, device);
        self.enter(
            client,
            Client::new(task, device, self.now, [lease, evicted, overhead]),
        );
        self.excuse(device, Some(task), out);
    }

    fn ask(
        &mut self,
        client: ClientId,
        ask: AskId,
        kind: AskKind,
        bytes: Bytes,
        long: bool,
        out: &mut Vec<Action>,
    ) {
        let now = self.now;
        if !self.known(client, out) {
            return;
        }
        let c = &self.clients[&client];
        if c.asks.iter().any(|a| a.id == ask) {
            return ignored(out, format!("{client} asked {ask} twice"));
        }
        let (task, device) = (c.task, c.device);
        if bytes.is_zero() {
            out.push(Action::Grant {
                client,
                ask,
                bytes,
                complete: true,
            });
            return;
        }
        if kind == AskKind::Alloc {
            let never = self.over_limit(client, bytes);
            if let Some(reason) = never.or_else(|| self.never_fits(client, bytes)) {
                return self.deny(client, ask, reason, true, out);
            }
        }
        let (predict, idle_after) = (self.config.predict, self.config.idle_after);
        self.enter_contention(task, device);
        self.edit(client, |c| {
            if predict && !c.humble(now) && c.asks.is_empty() {
                // It waits for the GPU, as far as anybody knows.
                c.learn_return(now, idle_after);
            }
            c.asks.push(Ask {
                id: ask,
                kind,
                left: bytes,
                long,
                since: now,
            });
            c.restoring_until = now;
            c.alone_for_at_most(now, LONGEST);
        });
        if kind == AskKind::Restore {
            self.bring_gang(task, out);
            self.bring_ranks(task, device, out);
        }
    }

    /// Lowers a client's lease; what a client says can make no sum negative.
    fn give_back(&mut self, client: ClientId, bytes: Bytes, out: &mut Vec<Action>) -> Bytes {
        if !self.known(client, out) {
            return Bytes::ZERO;
        }
        let held = self.clients[&client].lease;
        if bytes > held {
            out.push(Action::Note(Note::GaveBackTooMuch {
                client,
                said: bytes,
                held,
            }));
        }
        let real = bytes.min(held);
        self.edit(client, |c| c.give_back(real));
        real
    }

    /// Lease moves from one client to another, or comes from one that is gone.
    fn inherited(&mut self, client: ClientId, from: Option<ClientId>, bytes: Bytes, out: &mut Vec<Action>) {
        if !self.known(client, out) {
            return;
        }
        let (task, device) = (self.clients[&client].task, self.clients[&client].device);
        if let Some(from) = from.filter(|from| self.clients.get(from).is_some_and(|c| c.device == device)) {
            self.edit(from, |from| {
                from.lease = from.lease.saturating_sub(bytes);
                from.pinned = from.pinned.saturating_sub(bytes);
                from.unused = from.unused.min(from.lease);
                from.idle_lease = from.idle_lease.min(from.lease);
                from.incoming = from.incoming.min(from.lease);
            });
        }
        self.edit(client, |c| {
            c.lease = c.lease.saturating_add(bytes);
            // It stays where it is until the client says otherwise.
            c.pinned = c.pinned.saturating_add(bytes);
        });
        self.excuse(device, Some(task), out);
    }

    fn usage(&mut self, client: ClientId, usage: Usage, out: &mut Vec<Action>) {
        if !self.known(client, out) {
            return;
        }
        // The common case: it says what it said before. What time alone changes has its wakes.
        if self.clients[&client].has_said(&usage) {
            return;
        }
        let now = self.now;
        let over = self.edit(client, |c| {
            let books = c.books_after(&usage);
            if books.pinned < c.pinned || books.loose > c.loose {
                // What could not be moved can be now, or is back: a pause goes on.
                c.settled = false;
            }
            let gone = c.loose.saturating_sub(books.loose);
            let gone = gone.min(c.overhead.saturating_sub(books.overhead));
            if let Some(o) = c.order.as_mut().filter(|o| o.depth != Depth::Unused)
                && !gone.is_zero()
            {
                // No lease goes with it: that it left shows here.
                o.got = o.got.saturating_add(gone);
                o.last_progress = now;
            }
            c.keep_books(books);
            c.restore_over()
        });
        if over == Some(true) {
            // It freed what was away instead of waiting for it.
            self.now_owed_a_turn(client);
        }
        let c = &self.clients[&client];
        self.excuse(c.device, Some(c.task), out);
    }

    fn touched(&mut self, client: ClientId, out: &mut Vec<Action>) {
        let now = self.now;
        let until = now.after(self.config.idle_after);
        let Some(c) = self.clients.get_mut(&client) else {
            ignored(out, format!("{client} is not known"));
            return;
        };
        let (task, device) = (c.task, c.device);
        // The common case: it goes on as it did. Nothing that anybody waits for depends on that.
        let goes_on = c.linked.active && c.order.is_none() && c.asks.is_empty() && !c.suspended();
        if goes_on && c.state == ClientState::Active {
            c.last_touch = now;
            c.idle_released = false;
            if let (Some(d), Some(t)) = (self.devices.get_mut(&device), self.tasks.get(&task)) {
                d.settle_part(task, t, now);
                let Some(part) = d.parts.get_mut(&task) else {
                    return;
                };
                part.run_until = part.run_until.max(until);
            }
            return;
        }
        let (predict, idle_after) = (self.config.predict, self.config.idle_after);
        self.enter_contention(task, device);
        self.edit(client, |c| {
            if predict {
                c.learn_return(now, idle_after);
            }
            c.last_touch = now;
            c.idle_released = false;
        });
    }

    fn progress(&mut self, client: ClientId, order: OrderId, bytes: Bytes, out: &mut Vec<Action>) {
        let now = self.now;
        if !self.known(client, out) {
            return;
        }
        let coming = self.clients[&client].incoming;
        let real = self.give_back(client, bytes, out);
        let open = self.edit(client, |c| {
            let Some(o) = c.order.as_mut().filter(|o| o.id == order) else {
                return false;
            };
            o.got = o.got.saturating_add(real);
            o.last_progress = now;
            if o.depth == Depth::Evict {
                // What costs nothing goes first.
                c.clean = c.clean.saturating_sub(real);
                // A restore that was cut short: the lease for it goes first.
                c.incoming = coming.saturating_sub(real).min(c.lease);
                c.restoring_until = now;
            }
            true
        });
        if open == Some(false) {
            // The bytes are free all the same.
            ignored(
                out,
                format!("{client} reports progress of {order}, which is closed"),
            );
        }
    }

    fn reclaimed(
        &mut self,
        client: ClientId,
        order: OrderId,
        outcome: Outcome,
        copied: Bytes,
        time: u64,
        out: &mut Vec<Action>,
    ) {
        let (now, retry, retry_max) = (self.now, self.config.retry, self.longest_pause(client));
        if !self.known(client, out) {
            return;
        }
        let (task, device) = (self.clients[&client].task, self.clients[&client].device);
        let ended = self.edit(client, |c| {
            let mut before = c.evicted;
            let open = c.order.take_if(|o| o.id == order);
            if let Some(o) = &open {
                before = o.evicted_before;
            }
            c.evicted = c.evicted.max(before.saturating_add(copied));
            // What left without a copy was told before, as what is away.
            if !copied.is_zero() || c.evicted > before {
                c.releases += 1;
            }
            let o = open?;
            let short = o.got < o.bytes && !c.movable().is_zero();
            let failed = match outcome {
                Outcome::Done | Outcome::NothingLeft => short && o.depth != Depth::Unused,
                Outcome::Busy | Outcome::Failed | Outcome::NoRoom => true,
            };
            if short && o.depth == Depth::Unused {
                // It has less unused than it said last.
                c.unused = Bytes::ZERO;
            }
            c.last_outcome = Some(outcome);
            let mut pause = None;
            if failed && !o.cancelled {
                let busy = outcome == Outcome::Busy;
                if outcome == Outcome::NoRoom && !copied.is_zero() {
                    // Host memory moves on: what was copied may be what another needs to make room there.
                    c.pause = core::time::Duration::ZERO;
                }
                pause = Some(c.back_off(now, retry, retry_max, busy));
            } else if !failed {
                c.pause = core::time::Duration::ZERO;
                c.busy = false;
            }
            // What is left of an idle client is tried again when it was left alone for a while.
            if matches!(outcome, Outcome::Busy | Outcome::Failed | Outcome::NoRoom) || o.cancelled {
                c.idle_released = false;
            }
            let mut blocked = false;
            if o.reason == ReclaimReason::Paused && !o.cancelled {
                match outcome {
                    Outcome::Done | Outcome::NothingLeft => c.settled = true,
                    _ => blocked = true,
                }
            }
            Some((pause, blocked))
        });
        match ended.flatten() {
            None => ignored(
                out,
                format!("{client} reports the end of {order}, which is closed"),
            ),
            Some((pause, blocked)) => {
                if let Some(pause_ms) = pause {
                    out.push(Action::Note(Note::BackingOff {
                        client,
                        order,
                        outcome,
                        pause_ms,
                    }));
                }
                if blocked {
                    out.push(Action::PauseBlocked {
                        task,
                        client,
                        outcome,
                    });
                }
            }
        }
        self.copied(device, copied, time, true);
    }

    /// Learns the link's speed, and what a switch cost.
    fn copied(&mut self, device: DeviceId, bytes: Bytes, time: u64, outward: bool) {
        // A client's figures: no copy owes more than an hour of turns.
        const MOST: u64 = 3_600_000_000_000;
        let owed = time
            .min(MOST)
            .saturating_mul(u64::from(self.config.turn_per_copy));
        if let Some(d) = self.devices.get_mut(&device) {
            d.owe(self.now, owed, MOST);
            let rate = if outward { &mut d.out } else { &mut d.back };
            rate.sample(bytes, time);
        }
    }

    fn restored(&mut self, client: ClientId, copied: Bytes, time: u64, out: &mut Vec<Action>) {
        let now = self.now;
        if !self.known(client, out) {
            return;
        }
        let (task, device) = (self.clients[&client].task, self.clients[&client].device);
        self.enter_contention(task, device);
        let needless = self.edit(client, |c| {
            c.evicted = Bytes::ZERO;
            c.incoming = Bytes::ZERO;
            c.restoring_until = now;
            c.turn_start = now;
            if !c.guessed() {
                c.last_touch = now;
            }
            c.idle_released = false;
            c.interrupted = false;
            c.restores += 1;
            // Whatever it still asked to get back, it did not need. Every ask gets an answer all the same.
            c.asks
                .iter()
                .filter(|a| a.kind == AskKind::Restore)
                .map(|a| a.id)
                .collect::<Vec<AskId>>()
        });
        for ask in needless.unwrap_or_default() {
            self.deny(client, ask, DenyReason::TimedOut, false, out);
        }
        self.now_owed_a_turn(client);
        self.begin_turn_together(task);
        if let Some(part) = self.devices.get_mut(&device).and_then(|d| d.parts.get_mut(&task)) {
            // Who is brought back had the link.
            part.link = part.link.saturating_add(time.min(3_600_000_000_000));
        }
        self.copied(device, copied, time, false);
    }
}

fn ignored(out: &mut Vec<Action>, what: String) {
    out.push(Action::Note(Note::Ignored { what }));
}
