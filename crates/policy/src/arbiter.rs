//! [`Arbiter`]: the entry points, and what each event does to the ledger.

use std::collections::{BTreeMap, BTreeSet};

use ebb_units::{Bytes, ClientId, DeviceId, OrderId, TaskId};

use crate::action::{Action, DenyReason, Depth, Note, ReclaimReason, Refusal};
use crate::config::PolicyConfig;
use crate::event::{AskId, AskKind, Event, Outcome, TaskSpec, Usage};
use crate::state::{Ask, Client, Device, Rate, Task};
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
    pub(crate) devices: BTreeMap<DeviceId, Device>,
    pub(crate) tasks: BTreeMap<TaskId, Task>,
    pub(crate) clients: BTreeMap<ClientId, Client>,
    pub(crate) last_order: u64,
}

impl Arbiter {
    /// An arbiter that knows no device yet.
    #[must_use]
    pub fn new(config: PolicyConfig) -> Self {
        Self {
            config,
            now: Time::default(),
            devices: BTreeMap::new(),
            tasks: BTreeMap::new(),
            clients: BTreeMap::new(),
            last_order: 0,
        }
    }

    /// What it decides by.
    #[must_use]
    pub fn config(&self) -> &PolicyConfig {
        &self.config
    }

    /// Decides by other numbers from now on. A change of them is not an event: replay it by the same call.
    pub fn set_config(&mut self, config: PolicyConfig) {
        self.config = config;
    }

    /// Takes in one event and says what is to be done.
    pub fn handle(&mut self, now: Time, event: &Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.handle_into(now, event, &mut actions);
        actions
    }

    /// Like [`Self::handle`], appending to a buffer.
    pub fn handle_into(&mut self, now: Time, event: &Event, out: &mut Vec<Action>) {
        self.account(now);
        self.apply(event, out);
        self.schedule(out);
        self.note_states();
        debug_assert_eq!(self.check(), Ok(()), "after {event:?}");
    }

    fn apply(&mut self, event: &Event, out: &mut Vec<Action>) {
        match *event {
            Event::Device {
                device,
                capacity,
                unmanaged,
            } => self.device(device, capacity, unmanaged, out),
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
            Event::ClientLeft { client } => {
                if self.clients.remove(&client).is_none() {
                    ignored(out, format!("{client} left, but is not known"));
                }
            }
            Event::Ask {
                client,
                ask,
                kind,
                bytes,
                long,
            } => self.ask(client, ask, kind, bytes, long, out),
            Event::AskCancelled { client, ask } => {
                if let Some(c) = self.known(client, out) {
                    // An unknown ask is normal here: the cancellation crossed the answer.
                    c.asks.retain(|a| a.id != ask);
                    if c.restore_over() {
                        c.owed_restore = false;
                    }
                }
            }
            Event::Returned { client, bytes } => {
                self.give_back(client, bytes, out);
            }
            Event::Inherited { client, from, bytes } => self.inherited(client, from, bytes, out),
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
            Event::Tick => {}
        }
    }

    fn known(&mut self, client: ClientId, out: &mut Vec<Action>) -> Option<&mut Client> {
        let known = self.clients.get_mut(&client);
        if known.is_none() {
            ignored(out, format!("{client} is not known"));
        }
        known
    }

    fn device(&mut self, device: DeviceId, capacity: Bytes, unmanaged: Bytes, out: &mut Vec<Action>) {
        let config = &self.config;
        let d = self.devices.entry(device).or_insert_with(|| Device {
            capacity,
            unmanaged,
            peak: Bytes::ZERO,
            gathering: None,
            out: Rate::assumed(config.out_rate),
            back: Rate::assumed(config.in_rate),
            debt: 0,
            floor: 0,
            excused: false,
        });
        d.capacity = capacity;
        d.unmanaged = unmanaged;
        self.excuse(device, out);
        let named: Vec<TaskId> = self
            .tasks
            .iter()
            .filter(|(_, t)| t.named.contains(&device) && !t.guaranteed.contains_key(&device))
            .map(|(id, _)| *id)
            .collect();
        for task in named {
            self.guarantee(task, device, out);
        }
        self.mend_guarantees(out);
    }

    /// A figure grew by itself: the sums may be over for a while.
    fn excuse(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let used = self.used(device);
        if let Some(d) = self.devices.get_mut(&device)
            && used > d.capacity
            && !d.excused
        {
            d.excused = true;
            out.push(Action::Note(Note::Overcommitted {
                device,
                bytes: used.saturating_sub(d.capacity),
            }));
        }
        let over: Vec<TaskId> = self
            .tasks
            .iter()
            .filter(|(id, t)| t.spec.limit.is_some_and(|limit| self.held(**id, device) > limit))
            .map(|(id, _)| *id)
            .collect();
        for task in over {
            if let Some(t) = self.tasks.get_mut(&task) {
                t.excused.insert(device);
            }
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
        self.tasks.insert(
            task,
            Task {
                spec: spec.clone(),
                named: named.clone(),
                guaranteed: BTreeMap::new(),
                virtual_time: BTreeMap::new(),
                paused: false,
                pause_told: false,
                put_off: None,
                resumed: false,
                forced: false,
                excused: BTreeSet::new(),
            },
        );
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
                let live = self.live(task, *device);
                if live > limit {
                    return Err(Refusal::LimitBelowLive {
                        device: *device,
                        limit,
                        live,
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
        let below = self
            .devices
            .keys()
            .any(|d| self.live(task, *d) > limit && self.held(task, *d) > limit);
        let Some(t) = self.tasks.get_mut(&task) else {
            return;
        };
        t.forced = below && (force || t.forced);
        t.spec = spec.clone();
        let devices: Vec<DeviceId> = t.guaranteed.keys().copied().collect();
        for device in devices {
            self.guarantee(task, device, out);
        }
        let all: Vec<DeviceId> = self.devices.keys().copied().collect();
        for device in all {
            self.excuse(device, out);
        }
        self.mend_guarantees(out);
        out.push(Action::TaskChanged { task });
    }

    fn task_removed(&mut self, task: TaskId, out: &mut Vec<Action>) {
        if self.tasks.remove(&task).is_none() {
            ignored(out, format!("{task} ended, but is not known"));
            return;
        }
        self.clients.retain(|_, c| c.task != task);
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
        let now = self.now;
        self.clients.insert(
            client,
            Client {
                task,
                device,
                lease,
                overhead,
                evicted,
                incoming: Bytes::ZERO,
                pinned: Bytes::ZERO,
                unused: Bytes::ZERO,
                asks: Vec::new(),
                order: None,
                last_touch: now,
                last_grant: now,
                turn_start: now,
                turn_cost: 0,
                restoring_until: now,
                owed_restore: false,
                owed_until: Time::default(),
                leave_alone_until: now,
                pause: core::time::Duration::ZERO,
                busy: false,
                idle_released: false,
                settled: false,
                last_reason: None,
                last_outcome: None,
                state: ClientState::Active,
                state_since: now,
                releases: 0,
                restores: 0,
            },
        );
        self.excuse(device, out);
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
        let Some(c) = self.known(client, out) else {
            return;
        };
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
        self.enter_contention(task, device);
        if let Some(c) = self.clients.get_mut(&client) {
            c.asks.push(Ask {
                id: ask,
                kind,
                left: bytes,
                long,
                since: now,
            });
            c.restoring_until = now;
        }
        if kind == AskKind::Restore {
            self.bring_gang(task, out);
        }
    }

    /// Lowers a client's lease; what a client says can make no sum negative.
    fn give_back(&mut self, client: ClientId, bytes: Bytes, out: &mut Vec<Action>) -> Bytes {
        let Some(c) = self.known(client, out) else {
            return Bytes::ZERO;
        };
        let held = c.lease;
        if bytes > held {
            out.push(Action::Note(Note::GaveBackTooMuch {
                client,
                said: bytes,
                held,
            }));
        }
        let real = bytes.min(held);
        c.lease = held.saturating_sub(real);
        c.unused = c.unused.saturating_sub(real);
        c.incoming = c.incoming.min(c.lease);
        real
    }

    /// Lease moves from one client to another, or comes from one that is gone.
    fn inherited(&mut self, client: ClientId, from: Option<ClientId>, bytes: Bytes, out: &mut Vec<Action>) {
        let Some(device) = self.known(client, out).map(|c| c.device) else {
            return;
        };
        let from = from.and_then(|from| self.clients.get_mut(&from));
        if let Some(from) = from.filter(|from| from.device == device) {
            from.lease = from.lease.saturating_sub(bytes);
            from.pinned = from.pinned.saturating_sub(bytes);
            from.unused = from.unused.min(from.lease);
            from.incoming = from.incoming.min(from.lease);
        }
        if let Some(c) = self.clients.get_mut(&client) {
            c.lease = c.lease.saturating_add(bytes);
            // It stays where it is until the client says otherwise.
            c.pinned = c.pinned.saturating_add(bytes);
        }
        self.excuse(device, out);
    }

    fn usage(&mut self, client: ClientId, usage: Usage, out: &mut Vec<Action>) {
        let Some(c) = self.known(client, out) else {
            return;
        };
        let idle_lease = c.lease.saturating_sub(usage.resident);
        c.overhead = usage.overhead;
        if usage.pinned < c.pinned {
            // What could not be moved can be now: a pause goes on.
            c.settled = false;
        }
        c.pinned = usage.pinned;
        c.evicted = usage.evicted;
        c.incoming = c.incoming.min(usage.evicted).min(idle_lease);
        c.unused = idle_lease.saturating_sub(c.incoming).saturating_add(usage.cached);
        let device = c.device;
        if c.restore_over() {
            // It freed what was away instead of waiting for it.
            self.now_owed_a_turn(client);
        }
        self.excuse(device, out);
    }

    fn touched(&mut self, client: ClientId, out: &mut Vec<Action>) {
        let now = self.now;
        let Some(c) = self.known(client, out) else {
            return;
        };
        let (task, device) = (c.task, c.device);
        self.enter_contention(task, device);
        if let Some(c) = self.clients.get_mut(&client) {
            c.last_touch = now;
            c.idle_released = false;
        }
    }

    fn progress(&mut self, client: ClientId, order: OrderId, bytes: Bytes, out: &mut Vec<Action>) {
        let now = self.now;
        let real = self.give_back(client, bytes, out);
        let Some(c) = self.clients.get_mut(&client) else {
            return;
        };
        // A restore that was cut short: the lease for it goes first.
        match c.order.as_mut().filter(|o| o.id == order) {
            Some(o) => {
                o.got = o.got.saturating_add(real);
                o.last_progress = now;
                if o.depth == Depth::Evict {
                    c.incoming = c.incoming.saturating_sub(real);
                    c.restoring_until = now;
                }
            }
            // The bytes are free all the same.
            None => ignored(
                out,
                format!("{client} reports progress of {order}, which is closed"),
            ),
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
        let (now, config) = (self.now, self.config.clone());
        let Some(c) = self.known(client, out) else {
            return;
        };
        let (task, device) = (c.task, c.device);
        let mut before = c.evicted;
        let open = c.order.take_if(|o| o.id == order);
        if let Some(o) = &open {
            before = o.evicted_before;
        }
        c.evicted = c.evicted.max(before.saturating_add(copied));
        if !copied.is_zero() {
            c.releases += 1;
        }
        match open {
            None => ignored(
                out,
                format!("{client} reports the end of {order}, which is closed"),
            ),
            Some(o) => {
                let short = o.got < o.bytes && !c.movable().is_zero();
                let failed = match outcome {
                    Outcome::Done | Outcome::NothingLeft => short && o.depth == Depth::Evict,
                    Outcome::Busy | Outcome::Failed | Outcome::NoRoom => true,
                };
                if short && o.depth == Depth::Unused {
                    // It has less unused than it said last.
                    c.unused = Bytes::ZERO;
                }
                c.last_outcome = Some(outcome);
                if failed && !o.cancelled {
                    let busy = outcome == Outcome::Busy;
                    if outcome == Outcome::NoRoom && !copied.is_zero() {
                        // Host memory moves on: what was copied may be what another needs to make room there.
                        c.pause = core::time::Duration::ZERO;
                    }
                    let pause_ms = c.back_off(now, config.retry, config.retry_max, busy);
                    out.push(Action::Note(Note::BackingOff {
                        client,
                        order,
                        outcome,
                        pause_ms,
                    }));
                } else if !failed {
                    c.pause = core::time::Duration::ZERO;
                    c.busy = false;
                }
                // What is left of an idle client is tried again when it was left alone for a while.
                if matches!(outcome, Outcome::Busy | Outcome::Failed | Outcome::NoRoom) || o.cancelled {
                    c.idle_released = false;
                }
                if o.reason == ReclaimReason::Paused && !o.cancelled {
                    match outcome {
                        Outcome::Done | Outcome::NothingLeft => c.settled = true,
                        _ => out.push(Action::PauseBlocked {
                            task,
                            client,
                            outcome,
                        }),
                    }
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
            d.debt = d.debt.saturating_add(owed).min(MOST);
            let rate = if outward { &mut d.out } else { &mut d.back };
            rate.sample(bytes, time);
        }
    }

    fn restored(&mut self, client: ClientId, copied: Bytes, time: u64, out: &mut Vec<Action>) {
        let now = self.now;
        let Some(c) = self.known(client, out) else {
            return;
        };
        let (task, device) = (c.task, c.device);
        self.enter_contention(task, device);
        if let Some(c) = self.clients.get_mut(&client) {
            c.evicted = Bytes::ZERO;
            c.incoming = Bytes::ZERO;
            c.restoring_until = now;
            c.turn_start = now;
            c.last_touch = now;
            c.idle_released = false;
            c.restores += 1;
            // Whatever it still asked to get back, it did not need. Every ask gets an answer all the same.
            let needless: Vec<AskId> = c
                .asks
                .iter()
                .filter(|a| a.kind == AskKind::Restore)
                .map(|a| a.id)
                .collect();
            for ask in needless {
                self.deny(client, ask, DenyReason::TimedOut, false, out);
            }
        }
        self.now_owed_a_turn(client);
        self.copied(device, copied, time, false);
    }
}

fn ignored(out: &mut Vec<Action>, what: String) {
    out.push(Action::Note(Note::Ignored { what }));
}
