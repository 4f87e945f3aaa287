//! The books: sums and indices over clients, kept right with every change of one.
//!
//! A client is changed through [`Arbiter::edit`] only. What of it is in the books at present is noted in [`Linked`], so that
//! it can be taken out exactly, whatever time has passed. Predicates that change with time alone (who is active, whose
//! grant is fresh) are as of the last look at the client; each client has a *wake* for the next moment at which one of them
//! may change, and is looked at again then. A wake may come too early, never too late, so that a touch, which only puts it
//! off, need not move it.
//!
//! Nothing here walks over all clients or all tasks. What is done for one client costs the logarithm of how many there
//! are, and the number of processes that its own task has on the same device. [`Arbiter::check`] counts everything anew.

use core::cmp::Reverse;

use ebb_units::{Bytes, ClientId, DeviceId, Priority, TaskId};

use crate::Arbiter;
use crate::config::PolicyConfig;
use crate::event::{AskKind, Tenant};
use crate::state::{Client, Device, HoldKey, Holding, Index, Linked, Part, RankKey, Task, Totals};
use crate::time::Time;

/// Where a client stands among those who wait, and what for.
#[derive(Clone, Copy, Debug)]
struct Rank {
    key: RankKey,
    need: Bytes,
    least: Bytes,
}

/// More than any card has.
pub(crate) const MOST_SAID: Bytes = Bytes(1 << 48);

impl Totals {
    /// What a client adds to its part.
    pub(crate) fn of(c: &Client) -> Self {
        // What a client says is an allegation. No sum of these can pass what a number holds, so that every one can be taken
        // out again exactly.
        let sane = |bytes: Bytes| bytes.min(MOST_SAID);
        Self {
            held: sane(c.held()),
            away: sane(c.away()),
            stuck: sane(c.stuck()),
            ordered: sane(c.order.as_ref().map_or(Bytes::ZERO, |o| o.pending())),
            locked: Bytes::ZERO,
        }
    }

    pub(crate) fn replace(&mut self, old: &Self, new: &Self) {
        let swap =
            |sum: &mut Bytes, old: Bytes, new: Bytes| *sum = sum.saturating_sub(old).saturating_add(new);
        swap(&mut self.held, old.held, new.held);
        swap(&mut self.away, old.away, new.away);
        swap(&mut self.stuck, old.stuck, new.stuck);
        swap(&mut self.ordered, old.ordered, new.ordered);
        swap(&mut self.locked, old.locked, new.locked);
    }
}

impl Client {
    pub(crate) fn restoring(&self, now: Time) -> bool {
        now < self.restoring_until
    }

    pub(crate) fn left_alone(&self, now: Time) -> bool {
        now < self.leave_alone_until
    }

    /// Until when it uses the GPU, or must be taken to.
    pub(crate) fn active_until(&self, config: &PolicyConfig) -> Time {
        let busy = if self.busy {
            self.leave_alone_until
        } else {
            Time::default()
        };
        self.last_touch
            .after(config.idle_after)
            .max(self.restoring_until)
            .max(busy)
    }

    pub(crate) fn active(&self, now: Time, config: &PolicyConfig) -> bool {
        now < self.active_until(config)
    }

    /// Until when its time counts.
    fn runs_until(&self, config: &PolicyConfig) -> Time {
        if self.suspended() || !self.asks.is_empty() {
            return Time::default();
        }
        let until = self.last_touch.after(config.idle_after);
        if self.busy {
            until.max(self.leave_alone_until)
        } else {
            until
        }
    }

    /// Lease that nothing uses. Fresh grants do not count: the allocation that they are for is under way.
    pub(crate) fn unused(&self, now: Time, config: &PolicyConfig) -> Bytes {
        if now < self.last_grant.after(config.idle_after) {
            return Bytes::ZERO;
        }
        self.unused.min(self.movable_lease())
    }

    fn holding(&self, paused: bool, now: Time, config: &PolicyConfig, key: HoldKey) -> Holding {
        if self.movable().is_zero() {
            return Holding::Nothing;
        }
        let idle = HoldKey {
            virtual_time: Reverse(0),
            ..key
        };
        if paused {
            return Holding::Idle(idle);
        }
        let stopped = self.suspended() && !self.restoring(now);
        if !stopped && self.active(now, config) {
            Holding::Running(key)
        } else if self.asks.is_empty() {
            Holding::Idle(idle)
        } else {
            Holding::Waiting(key)
        }
    }
}

impl Device {
    /// Counts a task's time up to now. To be called before anything of it changes.
    pub(crate) fn settle_part(&mut self, task: TaskId, t: &Task, now: Time) {
        let (clock, pace) = (self.clock(now), self.pace(t));
        if let Some(part) = self.parts.get_mut(&task) {
            part.settle(clock, pace);
        }
    }

    /// A task of a tenant begins to contend, or ends.
    fn count_tenant(&mut self, tenant: Tenant, weight: u32, more: bool) {
        let (tasks, _) = self
            .tenants
            .entry(tenant)
            .or_insert((0, u64::from(weight.max(1))));
        *tasks = if more { *tasks + 1 } else { tasks.saturating_sub(1) };
        if *tasks == 0 {
            self.tenants.remove(&tenant);
        }
    }
}

impl Index {
    fn hold(&mut self, [old, new]: [Holding; 2], movable: [Bytes; 2]) {
        if let Some(sum) = self.movable_of(old) {
            *sum = sum.saturating_sub(movable[0]);
        }
        if let Some(sum) = self.movable_of(new) {
            *sum = sum.saturating_add(movable[1]);
        }
        if old == new {
            return;
        }
        match old {
            Holding::Nothing => {}
            Holding::Idle(key) => drop(self.idle.remove(&key)),
            Holding::Waiting(key) => drop(self.waiting.remove(&key)),
            Holding::Running(key) => drop(self.running.remove(&key)),
        }
        match new {
            Holding::Nothing => {}
            Holding::Idle(key) => drop(self.idle.insert(key)),
            Holding::Waiting(key) => drop(self.waiting.insert(key)),
            Holding::Running(key) => drop(self.running.insert(key)),
        }
    }

    fn movable_of(&mut self, holding: Holding) -> Option<&mut Bytes> {
        match holding {
            Holding::Nothing => None,
            Holding::Idle(_) => Some(&mut self.movable[0]),
            Holding::Waiting(_) => Some(&mut self.movable[1]),
            Holding::Running(_) => Some(&mut self.movable[2]),
        }
    }

    fn rank(&mut self, client: ClientId, old: Option<(RankKey, Bytes)>, new: Option<(RankKey, Bytes)>) {
        if old == new {
            return;
        }
        if let Some((key, need)) = old {
            self.rank.remove(&key);
            self.needs.remove(&(need, client));
        }
        if let Some((key, need)) = new {
            self.rank.insert(key);
            self.needs.insert((need, client));
        }
    }
}

impl Arbiter {
    /// Changes a client, and the books with it. `None` if it is not known.
    pub(crate) fn edit<R>(&mut self, id: ClientId, change: impl FnOnce(&mut Client) -> R) -> Option<R> {
        let c = self.clients.get_mut(&id)?;
        if let Some(t) = self.tasks.get(&c.task)
            && let Some(d) = self.devices.get_mut(&c.device)
        {
            d.settle_part(c.task, t, self.now);
        }
        let result = change(c);
        self.link(id);
        Some(result)
    }

    /// Looks at a client anew.
    pub(crate) fn look(&mut self, id: ClientId) {
        self.edit(id, |_| ());
    }

    /// Changes a task, and the books of it and its clients with it.
    pub(crate) fn edit_task<R>(&mut self, id: TaskId, change: impl FnOnce(&mut Task) -> R) -> Option<R> {
        let t = self.tasks.get_mut(&id)?;
        let old = t.spec.tenant;
        for device in t.clients.iter().map(|client| self.clients[client].device) {
            if let Some(d) = self.devices.get_mut(&device) {
                d.settle_part(id, t, self.now);
            }
        }
        let before: Vec<(DeviceId, Bytes, Bytes)> = t
            .guaranteed
            .iter()
            .map(|(device, g)| (*device, *g, t.kept(*device)))
            .collect();
        self.undecided.remove(&(Reverse(t.spec.request), id));
        let result = change(t);
        if t.guaranteed.is_empty() && !t.spec.request.is_zero() {
            self.undecided.insert((Reverse(t.spec.request), id));
        }
        for (device, guaranteed, kept) in before {
            if let Some(d) = self.devices.get_mut(&device) {
                d.guaranteed = d.guaranteed.saturating_sub(guaranteed);
                d.kept = d.kept.saturating_sub(kept);
            }
        }
        for (device, guaranteed) in &t.guaranteed {
            if let Some(d) = self.devices.get_mut(device) {
                d.guaranteed = d.guaranteed.saturating_add(*guaranteed);
                d.kept = d.kept.saturating_add(t.kept(*device));
            }
            if *guaranteed < t.spec.request {
                self.cut.insert((id, *device));
            } else {
                self.cut.remove(&(id, *device));
            }
        }
        let tenant = t.spec.tenant;
        let weight = self.weights.get(&tenant).copied().unwrap_or(1);
        let clients: Vec<ClientId> = t.clients.iter().copied().collect();
        let mut devices: Vec<DeviceId> = Vec::new();
        for client in &clients {
            let device = self.clients[client].device;
            if let Err(at) = devices.binary_search(&device) {
                devices.insert(at, device);
            }
        }
        for device in devices {
            if let Some(d) = self.devices.get_mut(&device) {
                d.again = true;
                if old != tenant && d.parts.get(&id).is_some_and(|part| part.contends.is_some()) {
                    d.count_tenant(old, 1, false);
                    d.count_tenant(tenant, weight, true);
                }
            }
            self.part_changed(device, id);
        }
        for client in clients {
            self.look(client);
        }
        Some(result)
    }

    /// Puts a client that is new into the books.
    pub(crate) fn enter(&mut self, id: ClientId, client: Client) {
        let (task, device) = (client.task, client.device);
        let now = self.now;
        self.clients.insert(id, client);
        if let Some(t) = self.tasks.get_mut(&task) {
            t.clients.insert(id);
            let past = t.past_time.remove(&device);
            if let Some(d) = self.devices.get_mut(&device) {
                let clock = d.clock(now);
                let part = d.parts.or_insert_with(task, || Part {
                    virtual_time: past.unwrap_or(0),
                    settled_at: now,
                    settled_gpu: clock.gpu,
                    ..Part::default()
                });
                if let Some(part) = part {
                    part.clients.insert(id);
                }
            }
        }
        self.link(id);
        // Its task has several from now on.
        let t = self.tasks.get(&task).filter(|t| t.clients.len() == 2);
        if let Some(other) = t.and_then(|t| t.clients.iter().copied().find(|other| *other != id)) {
            self.look(other);
        }
    }

    /// Takes a client out of the books.
    pub(crate) fn remove_client(&mut self, id: ClientId) -> Option<Client> {
        let c = self.clients.remove(&id)?;
        self.lodger_gone(id);
        if let Some(wake) = c.linked.wake {
            self.wakes.remove(&(wake, id));
        }
        self.touch_device(c.device);
        let now = self.now;
        if let Some(t) = self.tasks.get_mut(&c.task) {
            t.clients.remove(&id);
        }
        let d = self.devices.get_mut(&c.device)?;
        let old = c.linked;
        d.again = true;
        d.index
            .hold([old.holding, Holding::Nothing], [old.movable, Bytes::ZERO]);
        d.index.rank(id, old.rank.map(|key| (key, old.least)), None);
        if let Some(key) = old.spare {
            d.index.spare.remove(&key);
        }
        if let Some(key) = old.clean {
            d.index.clean.remove(&key);
        }
        d.index.orders.remove(&id);
        d.warned.remove(&id);
        if d.gathering == Some(id) {
            d.gathering = None;
        }
        if let Some(t) = self.tasks.get(&c.task) {
            d.settle_part(c.task, t, now);
        }
        if let Some(part) = d.parts.get_mut(&c.task) {
            part.clients.remove(&id);
            part.sums.replace(&old.sums, &Totals::default());
            part.stalled = part.stalled.saturating_sub(old.stalled);
            part.asking -= u32::from(old.asking);
            part.active -= u32::from(old.active);
            let ran = part.runs > 0;
            part.runs -= u32::from(old.runs);
            let runs = part.runs > 0;
            d.sums.replace(&old.sums, &Totals::default());
            d.count_running(now, ran, runs);
        }
        self.part_changed(c.device, c.task);
        let d = self.devices.get_mut(&c.device)?;
        if d.parts.get(&c.task).is_some_and(|part| part.clients.is_empty())
            && let Some(part) = d.parts.remove(&c.task)
        {
            if let Some(key) = part.contends {
                d.index.contends.remove(&(key, c.task));
            }
            d.sums.replace(&part.sums, &Totals::default());
            if let Some(t) = self.tasks.get_mut(&c.task) {
                t.past_time.insert(c.device, part.virtual_time);
            }
        }
        if old.asking {
            self.look_at_stalled(c.task);
        }
        if old.missing || old.coming || old.waits_since.is_some() {
            self.look_at_gang(c.task, c.device);
        }
        Some(c)
    }

    pub(crate) fn touch_device(&mut self, device: DeviceId) {
        if let Some(d) = self.devices.get_mut(&device)
            && !d.dirty
        {
            d.dirty = true;
            self.dirty.push(device);
        }
    }

    /// Brings the books to what a client is now.
    fn link(&mut self, id: ClientId) {
        let Some(c) = self.clients.get(&id) else {
            return;
        };
        let (task, device) = (c.task, c.device);
        let stalled = self.stalled(c).min(MOST_SAID);
        let gang = [
            self.missing(id, c),
            self.coming(id, c),
            self.broken(c),
            self.expects(c),
        ];
        self.touch_device(device);
        let config = &self.config;
        let now = self.now;
        let (Some(c), Some(d)) = (self.clients.get_mut(&id), self.devices.get_mut(&device)) else {
            return;
        };
        d.touched.push(id);
        let sums = Totals::of(c);
        let (asking, active) = (!c.asks.is_empty(), c.active(now, config));
        let old = c.linked;
        c.linked.sums = sums;
        c.linked.asking = asking;
        c.linked.stalled = stalled;
        let since = c.waits_since();
        let l = &mut c.linked;
        [l.missing, l.coming, l.broken, l.expects] = gang;
        l.waits_since = since;
        let before = (old.missing, old.coming, old.waits_since);
        let moved = (l.missing, l.coming, l.waits_since) != before;
        c.linked.active = active;
        let alone = c.runs_until(config);
        d.sums.replace(&old.sums, &sums);
        let runs = alone > now;
        c.linked.runs = runs;
        let Some(part) = d.parts.get_mut(&task) else {
            return;
        };
        let ran = part.runs > 0;
        part.runs = part.runs - u32::from(old.runs) + u32::from(runs);
        let counts = (ran, part.runs > 0);
        part.sums.replace(&old.sums, &sums);
        part.stalled = part.stalled.saturating_sub(old.stalled).saturating_add(stalled);
        part.asking = part.asking - u32::from(old.asking) + u32::from(asking);
        part.active = part.active - u32::from(old.active) + u32::from(active);
        part.run_until = if part.clients.len() == 1 {
            alone
        } else {
            let until = |id| self.clients.get(id).map(|c| c.runs_until(config));
            part.clients.iter().filter_map(until).max().unwrap_or_default()
        };
        d.count_running(now, counts.0, counts.1);
        self.part_changed(device, task);
        self.index(id, device, task, old);
        if asking != old.asking {
            self.look_at_stalled(task);
        }
        if moved {
            self.look_at_gang(task, device);
        }
    }

    /// The second half of [`Self::link`]: `before` is what was booked at its beginning.
    fn index(&mut self, id: ClientId, device: DeviceId, task: TaskId, before: Linked) {
        let rank = self.clients.get(&id).and_then(|c| self.rank_of(id, c));
        let wake = self.clients.get(&id).and_then(|c| self.next_wake(id, c));
        let v = self.virtual_time(task, device);
        let (config, now) = (&self.config, self.now);
        let (Some(c), Some(d), Some(t)) = (
            self.clients.get_mut(&id),
            self.devices.get_mut(&device),
            self.tasks.get(&task),
        ) else {
            return;
        };
        let key = HoldKey {
            priority: t.spec.priority,
            virtual_time: Reverse(v),
            last_touch: c.last_touch,
            client: id,
        };
        let holding = c.holding(t.paused, now, config, key);
        let unused = c.unused(now, config);
        let spare = (!unused.is_zero() && c.order.is_none()).then_some(HoldKey {
            virtual_time: Reverse(0),
            ..key
        });
        let clean = match holding {
            Holding::Idle(key) if !c.clean().is_zero() => Some(key),
            _ => None,
        };
        let order = c
            .order
            .as_ref()
            .is_some_and(|o| !o.cancelled && o.reason.for_others());
        let movable = c.movable().min(MOST_SAID);
        let waited = c
            .waits_since()
            .is_some_and(|since| since.after(config.patience) <= now);
        let saves_itself = c
            .warned
            .is_some_and(|(at, _)| now < at.after(config.preempt_grace));
        let guarded = c.restoring(now) || c.left_alone(now) || now < c.owed_until || saves_itself;
        let old = c.linked;
        let new = &mut c.linked;
        new.rank = rank.map(|r| r.key);
        new.need = rank.map_or(Bytes::ZERO, |r| r.need);
        new.least = rank.map_or(Bytes::ZERO, |r| r.least);
        new.holding = holding;
        new.movable = movable;
        new.guarded = guarded;
        new.waited = waited;
        new.ordered = c.order.is_some();
        new.spare = spare;
        new.clean = clean;
        new.order = order;
        d.again |= new.matters(&before);
        d.index.rank(
            id,
            old.rank.map(|key| (key, old.least)),
            rank.map(|r| (r.key, r.least)),
        );
        d.index.hold([old.holding, holding], [old.movable, movable]);
        if old.spare != spare {
            if let Some(key) = old.spare {
                d.index.spare.remove(&key);
            }
            if let Some(key) = spare {
                d.index.spare.insert(key);
            }
        }
        if old.clean != clean {
            if let Some(key) = old.clean {
                d.index.clean.remove(&key);
            }
            if let Some(key) = clean {
                d.index.clean.insert(key);
            }
        }
        if old.order != order {
            if order {
                d.index.orders.insert(id);
            } else {
                d.index.orders.remove(&id);
            }
        }
        // One that is too early stays: it costs a look, and moving it would cost as much each time.
        if let Some(at) = wake
            && old.wake.is_none_or(|set| at < set)
        {
            if let Some(set) = old.wake {
                self.wakes.remove(&(set, id));
            }
            c.linked.wake = Some(at);
            self.wakes.insert((at, id));
        }
    }

    /// What a task has on a device, or may not be taken from it there, changed.
    pub(crate) fn part_changed(&mut self, device: DeviceId, task: TaskId) {
        let (Some(d), Some(t)) = (self.devices.get_mut(&device), self.tasks.get(&task)) else {
            return;
        };
        let Some(part) = d.parts.get_mut(&task) else {
            return;
        };
        let wanting = part.wanting();
        part.protected = t.protected(device, wanting);
        let old = part.sums;
        part.sums.locked = old.stuck.max(part.protected.min(old.held));
        let new = part.sums;
        d.again |= old.locked != new.locked;
        d.sums.locked = d
            .sums
            .locked
            .saturating_sub(old.locked)
            .saturating_add(new.locked);
        let barred = new.locked.max(new.stuck.saturating_add(part.stalled));
        d.again |= part.barred != barred;
        d.barred = d.barred.saturating_sub(part.barred).saturating_add(barred);
        part.barred = barred;
        let contends = wanting.then_some(part.virtual_time);
        let (contended, tenant) = (part.contends.is_some(), t.spec.tenant);
        if part.contends != contends {
            if let Some(key) = part.contends {
                d.index.contends.remove(&(key, task));
            }
            if let Some(key) = contends {
                d.index.contends.insert((key, task));
            }
            part.contends = contends;
        }
        let asking = part.asking;
        let waiting: Vec<ClientId> = if asking > 0 {
            part.clients.iter().copied().collect()
        } else {
            Vec::new()
        };
        let excess = part.sums.held > t.limit();
        if excess != part.excess {
            part.excess = excess;
            if excess {
                d.index.excess.insert(task);
            } else {
                d.index.excess.remove(&task);
            }
        }
        if contended != wanting {
            let weight = self.weights.get(&tenant).copied().unwrap_or(1);
            d.count_tenant(tenant, weight, wanting);
        }
        for id in waiting {
            let Some(c) = self.clients.get(&id).filter(|c| c.linked.rank.is_some()) else {
                continue;
            };
            let new = self.rank_of(id, c);
            let old = c.linked;
            if let Some(d) = self.devices.get_mut(&device) {
                // What its sibling got may be what it cannot have any more.
                d.touched.push(id);
            }
            if new.map(|r| r.key) == old.rank {
                continue;
            }
            if let Some(c) = self.clients.get_mut(&id) {
                c.linked.rank = new.map(|r| r.key);
                c.linked.need = new.map_or(Bytes::ZERO, |r| r.need);
                c.linked.least = new.map_or(Bytes::ZERO, |r| r.least);
            }
            if let Some(d) = self.devices.get_mut(&device) {
                d.again = true;
                d.index.rank(
                    id,
                    old.rank.map(|key| (key, old.least)),
                    new.map(|r| (r.key, r.least)),
                );
            }
        }
    }

    /// Where a client stands among those who wait, and what it needs; `None` if it does not wait or may not be served.
    fn rank_of(&self, id: ClientId, c: &Client) -> Option<Rank> {
        let t = self.tasks.get(&c.task)?;
        if c.asks.is_empty() || t.paused {
            return None;
        }
        let part = self.devices.get(&c.device)?.parts.get(&c.task)?;
        let back = c.asked(AskKind::Restore);
        let new = c.next_alloc();
        let since = self.gang_waits_since(c).unwrap_or(self.now);
        let humble = c.humble(self.now);
        let guaranteed = !humble && part.footprint().saturating_add(new) <= t.guaranteed(c.device);
        let starving = since.after(self.config.starve_after) <= self.now;
        let key = RankKey {
            burst: !guaranteed,
            patient: !starving,
            class: Reverse(if self.config.preempt {
                t.spec.priority
            } else {
                Priority::Low
            }),
            virtual_time: if guaranteed || starving {
                0
            } else if humble {
                u64::MAX
            } else {
                self.virtual_time(c.task, c.device)
            },
            priority: Reverse(t.spec.priority),
            since,
            client: id,
        };
        let allocs = c.asks.iter().filter(|a| a.kind == AskKind::Alloc).map(|a| a.left);
        let restore = (!back.is_zero()).then_some(back);
        Some(Rank {
            key,
            need: back.saturating_add(new),
            least: allocs.chain(restore).min().unwrap_or_default(),
        })
    }

    // ---- What is read off the books.

    /// A task on a device; `None` if it has no client there.
    pub(crate) fn part(&self, task: TaskId, device: DeviceId) -> Option<&Part> {
        self.devices.get(&device)?.parts.get(&task)
    }

    /// A client's device. Clients never outlive it.
    pub(crate) fn device_of(&self, client: &Client) -> &Device {
        &self.devices[&client.device]
    }

    /// A client's task. Clients never outlive it.
    pub(crate) fn task_of(&self, client: &Client) -> &Task {
        &self.tasks[&client.task]
    }

    /// A client's part. A client is in one.
    pub(crate) fn part_of(&self, client: &Client) -> &Part {
        &self.devices[&client.device].parts[&client.task]
    }

    /// A task's clients on a device.
    pub(crate) fn of(&self, task: TaskId, device: DeviceId) -> impl Iterator<Item = (ClientId, &Client)> {
        self.part(task, device)
            .into_iter()
            .flat_map(|part| &part.clients)
            .map(|id| (*id, &self.clients[id]))
    }

    pub(crate) fn free(&self, device: DeviceId) -> Bytes {
        self.devices[&device].free()
    }

    /// A task's lease and overhead on a device.
    pub(crate) fn held(&self, task: TaskId, device: DeviceId) -> Bytes {
        self.part(task, device).map_or(Bytes::ZERO, |part| part.sums.held)
    }

    /// What a task would hold if all of it were on the device.
    pub(crate) fn footprint(&self, task: TaskId, device: DeviceId) -> Bytes {
        self.part(task, device).map_or(Bytes::ZERO, Part::footprint)
    }

    /// Lease of a client that nothing uses.
    pub(crate) fn unused(&self, client: &Client) -> Bytes {
        client.unused(self.now, &self.config)
    }

    /// Unused lease of a task's other clients.
    pub(crate) fn unused_beside(&self, id: ClientId) -> Bytes {
        let client = &self.clients[&id];
        self.of(client.task, client.device)
            .filter(|(other, _)| *other != id)
            .map(|(_, c)| self.unused(c))
            .sum()
    }

    /// The most that a task may hold on a device: its limit, or what it has, where the driver took more for it than there was room for. What was
    /// evicted comes back all the same; only a limit that was lowered by force keeps memory off the device. No word of a client makes lease
    /// alone pass the limit.
    pub(crate) fn allowance(&self, task: TaskId, device: DeviceId) -> Bytes {
        let t = &self.tasks[&task];
        let Some(limit) = t.spec.limit else {
            return Bytes::MAX;
        };
        let footprint = self.footprint(task, device);
        if t.forced || footprint <= limit {
            return limit;
        }
        let overhead: Bytes = self.of(task, device).map(|(_, c)| c.overhead).sum();
        footprint.min(limit.saturating_add(overhead))
    }

    /// How much more a task may hold on a device.
    pub(crate) fn limit_room(&self, task: TaskId, device: DeviceId) -> Bytes {
        self.allowance(task, device)
            .saturating_sub(self.held(task, device))
    }

    /// The same for new memory.
    pub(crate) fn new_room(&self, task: TaskId, device: DeviceId) -> Bytes {
        self.tasks[&task].limit().saturating_sub(self.held(task, device))
    }

    /// Guaranteed to tasks other than `task` on a device.
    pub(crate) fn guaranteed_beside(&self, task: TaskId, device: DeviceId) -> Bytes {
        let own = self
            .tasks
            .get(&task)
            .map_or(Bytes::ZERO, |t| t.guaranteed(device));
        self.devices[&device].guaranteed.saturating_sub(own)
    }
}
