//! Whose turn it is, and who comes next.
//!
//! Turns are stride scheduling: each task has a virtual time per device that advances while it runs, more slowly for a
//! higher priority. The waiting task with the lowest virtual time is next; a running one gives way when its turn was
//! long enough for the copying that the switch costs *and* its virtual time has caught up with that of the one waiting.
//! A task that comes back from idling enters at the floor, the lowest virtual time among those that contend, so that
//! idling earns no credit. That alone would let an endless stream of newcomers pass someone who had more than they; so
//! whoever waited for `starve_after` goes first.

use ebb_units::{Bytes, ClientId, DeviceId, Priority, TaskId};

use crate::Arbiter;
use crate::event::AskKind;
use crate::state::{Client, Device, RankKey};
use crate::time::{Time, nanos};

/// How many of those who wait are considered for gathering at a time: with very many, the first ones are enough to keep
/// the card full, and an event stays cheap.
pub(crate) const CONSIDERED: usize = 12;

/// How many of those who wait are looked at, at most, to find these, and for room that is free. Behind them, whoever needs
/// least is served.
pub(crate) const LOOKED_AT: usize = 64;

/// How many of those who run are looked at when a turn is to end: the ones that had most, of the lowest priority.
pub(crate) const HOLDERS: usize = 64;

/// A client that waits for lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) client: ClientId,
    pub(crate) task: TaskId,
    /// Its place.
    pub(crate) key: RankKey,
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

/// A client that runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holder<'a> {
    pub(crate) id: ClientId,
    pub(crate) client: &'a Client,
    pub(crate) virtual_time: u64,
    /// Thousandths of virtual time for each nanosecond that it goes on.
    pub(crate) growth: u64,
    pub(crate) priority: Priority,
}

impl Arbiter {
    /// Restored as far as grants go, or just about to be.
    pub(crate) fn restoring(&self, client: &Client) -> bool {
        client.restoring(self.now)
    }

    pub(crate) fn left_alone(&self, client: &Client) -> bool {
        client.left_alone(self.now)
    }

    /// Uses the GPU, or must be taken to.
    pub(crate) fn active(&self, client: &Client) -> bool {
        client.active(self.now, &self.config)
    }

    /// A task's virtual time on a device.
    pub(crate) fn virtual_time(&self, task: TaskId, device: DeviceId) -> u64 {
        let t = &self.tasks[&task];
        let on = |device: DeviceId| {
            let d = self.devices.get(&device)?;
            Some(d.parts.get(&task)?.virtual_time(d.clock(self.now), d.pace(t)))
        };
        let own = || on(device).unwrap_or_else(|| t.past_time.get(&device).copied().unwrap_or(0));
        if t.clients.len() <= 1 {
            return own();
        }
        // Those that wait for each other are ranked alike wherever they are, so that their turns come together.
        let mut devices: Vec<DeviceId> = t.clients.iter().map(|c| self.clients[c].device).collect();
        devices.sort_unstable();
        devices.dedup();
        if devices.len() <= 1 {
            return own();
        }
        let sum: u128 = devices.iter().filter_map(|d| on(*d)).map(u128::from).sum();
        u64::try_from(sum / devices.len() as u128).unwrap_or(u64::MAX)
    }

    /// To be called before a task that did not use a device starts to: it joins at the floor.
    pub(crate) fn enter_contention(&mut self, task: TaskId, device: DeviceId) {
        if self.part(task, device).is_some_and(|part| part.wanting()) {
            return;
        }
        let lowest = self.lowest_contending(device);
        let (now, Some(t)) = (self.now, self.tasks.get_mut(&task)) else {
            return;
        };
        let Some(d) = self.devices.get_mut(&device) else {
            return;
        };
        d.floor = d.floor.max(lowest.unwrap_or(0));
        d.settle_part(task, t, now);
        match d.parts.get_mut(&task) {
            Some(part) => {
                part.virtual_time = part.virtual_time.max(d.floor);
            }
            None => {
                let v = t.past_time.entry(device).or_default();
                *v = (*v).max(d.floor);
            }
        }
    }

    /// The lowest virtual time among those that contend. Those that run are brought up to date on the way.
    fn lowest_contending(&mut self, device: DeviceId) -> Option<u64> {
        let now = self.now;
        let d = self.devices.get_mut(&device)?;
        for _ in 0..CONSIDERED {
            let (key, task) = d.index.contends.first().copied()?;
            let (clock, pace) = (d.clock(now), d.pace(self.tasks.get(&task)?));
            let part = d.parts.get_mut(&task)?;
            let v = part.virtual_time(clock, pace);
            if v == key {
                return Some(v);
            }
            part.contends = Some(v);
            d.index.contends.remove(&(key, task));
            d.index.contends.insert((v, task));
        }
        // With very many the lowest may be a little more by now.
        d.index.contends.first().map(|(key, _)| *key)
    }

    pub(crate) fn candidate(&self, key: &RankKey) -> Candidate {
        let c = &*self.clients[&key.client];
        let need = c.linked.need;
        let later = c.away().saturating_sub(c.asked(AskKind::Restore));
        Candidate {
            client: key.client,
            task: c.task,
            key: *key,
            guaranteed: !key.burst,
            need,
            short: need.saturating_add(later).saturating_sub(self.free(c.device)),
            later,
            copy_in: c.away(),
            since: key.since,
            starving: !key.patient,
        }
    }

    /// Those who run on a device and may have to give way, as far as they are looked at.
    pub(crate) fn holders(&self, device: DeviceId) -> Vec<Holder<'_>> {
        let d = &self.devices[&device];
        let running = d.index.running.iter().take(HOLDERS);
        running
            .map(|key| {
                let c = &*self.clients[&key.client];
                let t = self.task_of(c);
                Holder {
                    id: key.client,
                    client: c,
                    virtual_time: self.virtual_time(c.task, device),
                    growth: d.growth(t, &d.parts[&c.task]),
                    priority: t.spec.priority,
                }
            })
            .filter(|h| !h.client.suspended())
            .collect()
    }

    /// What those who run would have to give if their turns are over in favour of a candidate, and when the next turn will be.
    pub(crate) fn prospects(
        &self,
        device: DeviceId,
        holders: &[Holder<'_>],
        next: &Candidate,
    ) -> (Bytes, Option<Time>) {
        let d = &self.devices[&device];
        let back = d.back.time(next.copy_in);
        let v = self.virtual_time(next.task, device);
        let priority = self.tasks[&next.task].spec.priority;
        let (mut over, mut soonest) = (Bytes::ZERO, None);
        for h in holders.iter().filter(|h| h.id != next.client) {
            let at = if self.config.preempt && !next.starving && priority != h.priority {
                self.preempted_at(h.client, priority > h.priority)
            } else {
                let turn = self.turn_end_at(d, h.client, next, back, priority > h.priority);
                let behind = self.behind(h.client.task, h.virtual_time, next, v);
                turn.max(self.after_growth(behind, h.growth))
            };
            if at == Time(u64::MAX) {
                continue;
            }
            if at <= self.now {
                over = over.saturating_add(h.client.movable());
            } else if soonest.is_none_or(|s| at < s) {
                soonest = Some(at);
            }
        }
        (over, soonest)
    }

    /// When the turn of a running client may end in favour of a waiting one, as far as time on the GPU goes.
    pub(crate) fn turn_end(&self, holder: &Client, next: &Candidate) -> Time {
        let d = self.device_of(holder);
        let higher = self.tasks[&next.task].spec.priority > self.task_of(holder).spec.priority;
        self.turn_end_at(d, holder, next, d.back.time(next.copy_in), higher)
    }

    fn turn_end_at(&self, d: &Device, holder: &Client, next: &Candidate, back: u64, higher: bool) -> Time {
        let moved = next.short.min(holder.movable());
        let copy = d.out.time(moved).saturating_add(back);
        let turn = copy
            .max(holder.turn_cost)
            .saturating_mul(u64::from(self.config.turn_per_copy))
            .max(nanos(self.config.min_turn));
        if next.starving {
            return holder.turn_start.after(self.config.min_turn);
        }
        let full = Time(holder.turn_start.0.saturating_add(turn));
        if higher {
            // Early, if the copying of earlier switches is paid for.
            let early = holder
                .turn_start
                .after(self.config.min_turn)
                .max(Time(self.now.0.saturating_add(d.debt(self.now))));
            full.min(early)
        } else {
            full
        }
    }

    /// When a running task's virtual time will have caught up with that of a waiting one, if it goes on running.
    pub(crate) fn caught_up(&self, holder: &Client, next: &Candidate) -> Time {
        let v = self.virtual_time(next.task, holder.device);
        let behind = self.behind(
            holder.task,
            self.virtual_time(holder.task, holder.device),
            next,
            v,
        );
        let growth = self
            .device_of(holder)
            .growth(self.task_of(holder), self.part_of(holder));
        self.after_growth(behind, growth)
    }

    /// By how much a holder's virtual time is behind that of one who waits.
    ///
    /// Of two tasks with several processes each that are level, the older one comes first: if each gave way to the other on
    /// another device, neither would ever be whole.
    fn behind(&self, holder: TaskId, own: u64, next: &Candidate, theirs: u64) -> u64 {
        if next.starving {
            return 0;
        }
        let several = |task| self.tasks[&task].clients.len() > 1;
        let tie = own == theirs && next.task > holder && several(holder) && several(next.task);
        theirs.saturating_sub(own).max(u64::from(tie))
    }

    /// When a virtual time that grows so fast has grown by so much. Not sooner than in a moment: what is behind by next to
    /// nothing is not looked at a thousand times.
    fn after_growth(&self, behind: u64, growth: u64) -> Time {
        const MOMENT: u64 = 1_000_000;
        if behind == 0 {
            return self.now;
        }
        let wait = u128::from(behind) * 1000 / u128::from(growth.max(1));
        Time(
            self.now
                .0
                .saturating_add(u64::try_from(wait).unwrap_or(u64::MAX).max(MOMENT)),
        )
    }

    /// When a client that runs loses its memory to another class: after its time to save itself, or never.
    fn preempted_at(&self, holder: &Client, higher: bool) -> Time {
        if !higher {
            return Time(u64::MAX);
        }
        let warned = holder.warned.map_or(self.now, |(at, _)| at);
        warned.after(self.config.preempt_grace)
    }

    /// All of a task that is on several devices is there: its turn begins now, everywhere. What one of its processes had
    /// before, while another was away, was of no use to it.
    pub(crate) fn begin_turn_together(&mut self, task: TaskId) {
        let Some(t) = self.tasks.get(&task).filter(|t| t.clients.len() > 1) else {
            return;
        };
        let clients: Vec<ClientId> = t.clients.iter().copied().collect();
        let one = self.clients[&clients[0]].device;
        let several = clients.iter().any(|id| self.clients[id].device != one);
        if several && clients.iter().all(|id| !self.clients[id].suspended()) {
            let now = self.now;
            for id in clients {
                self.edit(id, |c| c.turn_start = now);
            }
        }
    }

    /// Whether a running client must give way to a waiting one.
    pub(crate) fn turn_over(&self, holder: &Client, next: &Candidate) -> bool {
        let (own, other) = (
            self.task_of(holder).spec.priority,
            self.tasks[&next.task].spec.priority,
        );
        if self.config.preempt && !next.starving && own != other {
            return self.preempted_at(holder, other > own) <= self.now;
        }
        self.turn_end(holder, next) <= self.now && self.caught_up(holder, next) <= self.now
    }
}
