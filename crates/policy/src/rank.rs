//! Whose turn it is, and who comes next.
//!
//! Turns are stride scheduling: each task has a virtual time per device that advances while it runs, more slowly for a
//! higher priority. The waiting task with the lowest virtual time is next; a running one gives way when its turn was
//! long enough for the copying that the switch costs *and* its virtual time has caught up with that of the one waiting.
//! A task that comes back from idling enters at the floor, the lowest virtual time among those that contend, so that
//! idling earns no credit. That alone would let an endless stream of newcomers pass someone who had more than they; so
//! whoever waited for `starve_after` goes first.

use core::cmp::Reverse;
use core::time::Duration;

use ebb_units::{Bytes, ClientId, DeviceId, Priority, TaskId};

use crate::Arbiter;
use crate::event::AskKind;
use crate::state::{Client, Device, Part, RankKey, Task};
use crate::time::{Time, nanos};

/// How many of those who wait are considered for gathering at a time: with very many, the first ones are enough to keep
/// the card full, and an event stays cheap.
pub(crate) const CONSIDERED: usize = 12;

/// How many of those who wait are looked at, at most, to find these, and for room that is free. Behind them, whoever needs
/// least is served.
pub(crate) const LOOKED_AT: usize = 64;

/// How many of those who run are looked at when a turn is to end: the ones that had most, of the lowest priority.
pub(crate) const HOLDERS: usize = 64;

/// With more than [`HOLDERS`] that run, whose turn ends is looked at once in this time.
pub(crate) const CROWD: Duration = Duration::from_millis(1);

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
    /// It asks on a guess: nobody is taken from for it.
    pub(crate) humble: bool,
    /// It cannot give what it has before it is served.
    pub(crate) stalled: bool,
}

/// A client that runs, as it was when this was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holder {
    pub(crate) id: ClientId,
    pub(crate) task: TaskId,
    pub(crate) virtual_time: u64,
    /// Thousandths of virtual time for each nanosecond that it goes on.
    pub(crate) growth: u64,
    pub(crate) priority: Priority,
    pub(crate) last_touch: Time,
    pub(crate) turn: Turn,
    pub(crate) warned: Option<Time>,
    /// Its turn lasts until then at least, whoever waits.
    pub(crate) earliest: Time,
    /// Something of it is away: it does not run yet.
    pub(crate) suspended: bool,
    /// It waits for more than it can get at present.
    pub(crate) blocked: bool,
    /// Another of its gang is missing: it does nothing.
    pub(crate) broken: bool,
}

/// What of a client says how long its turn lasts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    start: Time,
    cost: u64,
    pub(crate) movable: Bytes,
    /// Of that: what leaves without a copy.
    clean: Bytes,
}

impl Turn {
    fn of(c: &Client) -> Self {
        Self {
            start: c.turn_start,
            cost: c.turn_cost,
            movable: c.movable(),
            clean: c.clean(),
        }
    }
}

/// What counts of the one for whom somebody is to give way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    virtual_time: u64,
    /// Copying it in, in nanoseconds.
    back: u64,
    priority: Priority,
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
        let here = self
            .devices
            .get(&device)
            .and_then(|d| Some((d, d.parts.get(&task)?)));
        match here {
            Some((d, part)) => self.virtual_time_of(t, d, part, task, device),
            None => self.virtual_time_everywhere(t, task, device),
        }
    }

    /// The same, of a task that is there.
    fn virtual_time_of(&self, t: &Task, d: &Device, part: &Part, task: TaskId, device: DeviceId) -> u64 {
        if t.clients.len() <= 1 {
            return part.virtual_time(d.clock(self.now), d.pace(t));
        }
        self.virtual_time_everywhere(t, task, device)
    }

    fn virtual_time_everywhere(&self, t: &Task, task: TaskId, device: DeviceId) -> u64 {
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
        let c = &self.clients[&key.client];
        let need = c.linked.need;
        // What it has lease for already is not missing: an order may bring less than its chunks were large.
        let later = c
            .away()
            .saturating_sub(c.unused)
            .saturating_sub(c.asked(AskKind::Restore));
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
            humble: c.humble(self.now),
            stalled: !c.linked.stalled.is_zero(),
        }
    }

    /// Those who run on a device and may have to give way, as far as they are looked at.
    pub(crate) fn holders(&self, device: DeviceId) -> Vec<Holder> {
        let d = &self.devices[&device];
        let mut holders = Vec::with_capacity(HOLDERS.min(d.index.running.len()));
        for key in d.index.running.iter().take(HOLDERS) {
            let c = &self.clients[&key.client];
            let (t, part) = (self.task_of(c), &d.parts[&c.task]);
            holders.push(Holder {
                id: key.client,
                task: c.task,
                virtual_time: self.virtual_time_of(t, d, part, c.task, device),
                growth: d.growth(t, part),
                priority: t.spec.priority,
                last_touch: c.last_touch,
                turn: Turn::of(c),
                warned: c.warned.map(|(at, _)| at),
                earliest: c.turn_start.after(self.config.min_turn),
                suspended: c.suspended(),
                blocked: self.blocked(key.client, c),
                broken: c.linked.broken,
            });
        }
        holders
    }

    /// The same, the one first who would be taken from first.
    pub(crate) fn holders_in_order(&self, device: DeviceId) -> Vec<Holder> {
        let mut holders = self.holders(device);
        holders.sort_unstable_by_key(|h| (h.priority, Reverse(h.virtual_time), h.last_touch, h.id));
        holders
    }

    pub(crate) fn claim(&self, device: DeviceId, next: &Candidate) -> Claim {
        Claim {
            virtual_time: self.virtual_time(next.task, device),
            back: self.devices[&device].back.time(next.copy_in),
            priority: self.tasks[&next.task].spec.priority,
        }
    }

    /// Whether those whose turns are over in favour of a candidate have so much.
    pub(crate) fn have_over(
        &self,
        device: DeviceId,
        holders: &[Holder],
        next: &Candidate,
        bytes: Bytes,
    ) -> bool {
        let d = &self.devices[&device];
        let claim = self.claim(device, next);
        let mut left = bytes;
        for h in holders.iter().filter(|h| !h.suspended && h.id != next.client) {
            if left.is_zero() {
                break;
            }
            if self.gives_way(d, h, next, &claim) {
                left = left.saturating_sub(h.turn.movable);
            }
        }
        left.is_zero()
    }

    /// Whether one who runs has to give way to a candidate now.
    pub(crate) fn gives_way(&self, d: &Device, h: &Holder, next: &Candidate, claim: &Claim) -> bool {
        if h.broken && h.task != next.task {
            return true;
        }
        if h.blocked && next.stalled {
            return h.earliest <= self.now;
        }
        // What rules most of them out comes first.
        let classes = self.config.preempt && !next.starving && claim.priority != h.priority;
        let too_soon = h.earliest > self.now || (!next.starving && h.virtual_time < claim.virtual_time);
        (classes || !too_soon) && self.gives_way_at(d, h, next, claim) <= self.now
    }

    /// When one who runs has to give way to a candidate.
    fn gives_way_at(&self, d: &Device, h: &Holder, next: &Candidate, claim: &Claim) -> Time {
        if h.broken && h.task != next.task {
            return self.now;
        }
        if h.blocked && next.stalled {
            // Its time does not grow while it waits, and it is not served before that one is.
            return h.earliest;
        }
        let higher = claim.priority > h.priority;
        if self.config.preempt && !next.starving && claim.priority != h.priority {
            return self.preempted_at(h.warned, higher);
        }
        let turn = self.turn_end_at(d, h.turn, next, claim.back, higher);
        let behind = self.behind(h.task, h.virtual_time, next, claim.virtual_time);
        turn.max(self.after_growth(behind, h.growth))
    }

    /// When the next of those who run will have to give way to the first of some candidates, if any will.
    pub(crate) fn next_turn(
        &self,
        device: DeviceId,
        holders: &[Holder],
        candidates: &[Candidate],
    ) -> Option<Time> {
        let d = &self.devices[&device];
        let mut claims = [None; CONSIDERED];
        for (claim, c) in claims.iter_mut().zip(candidates) {
            *claim = Some(self.claim(device, c));
        }
        let lowest = claims.iter().flatten().map(|c| c.virtual_time).min()?;
        // Nobody gives way before that: the turn that its copying and the least copying for any of these are worth, and until
        // it has caught up with the lowest. Most need not be looked at any closer than that.
        let any_time = self.config.preempt || candidates.iter().any(|c| c.starving || c.stalled);
        let most = claims.iter().flatten().map(|c| (c.virtual_time, c.back));
        let (latest, dearest) = most.fold((0, 0), |(v, back), c| (v.max(c.0), back.max(c.1)));
        let largest = candidates.iter().map(|c| c.short).max().unwrap_or_default();
        let highest = claims.iter().flatten().map(|c| c.priority).max();
        let back = claims.iter().flatten().map(|c| c.back).min().unwrap_or(0);
        let short = candidates.iter().map(|c| c.short).min().unwrap_or_default();
        let mut bounds = [(Time(u64::MAX), 0); HOLDERS];
        let mut len = 0;
        for (n, h) in holders.iter().enumerate().filter(|(_, h)| !h.suspended) {
            if !self.config.preempt
                && h.virtual_time > latest
                && self.turn_of(d, h.turn, largest, dearest) <= self.now
            {
                // Has had its turn, whoever of these comes next.
                continue;
            }
            let bound = if any_time {
                self.now
            } else {
                let behind = lowest.saturating_sub(h.virtual_time);
                let turn = if highest > Some(h.priority) {
                    h.earliest
                } else {
                    self.turn_of(d, h.turn, short, back)
                };
                turn.max(self.after_growth(behind, h.growth))
            };
            bounds[len] = (bound, n);
            len += 1;
        }
        let bounds = &mut bounds[..len];
        bounds.sort_unstable();
        let mut soonest: Option<Time> = None;
        for (next, claim) in candidates.iter().zip(claims.iter().flatten()) {
            for (bound, n) in &*bounds {
                if soonest.is_some_and(|s| *bound >= s) {
                    break;
                }
                let h = &holders[*n];
                if h.id == next.client {
                    continue;
                }
                let at = self.gives_way_at(d, h, next, claim);
                if at > self.now && at != Time(u64::MAX) && soonest.is_none_or(|s| at < s) {
                    soonest = Some(at);
                }
            }
        }
        soonest
    }

    /// When the turn of a running client may end in favour of a waiting one, as far as time on the GPU goes.
    pub(crate) fn turn_end(&self, holder: &Client, next: &Candidate) -> Time {
        let d = self.device_of(holder);
        let higher = self.tasks[&next.task].spec.priority > self.task_of(holder).spec.priority;
        self.turn_end_at(d, Turn::of(holder), next, d.back.time(next.copy_in), higher)
    }

    fn turn_end_at(&self, d: &Device, held: Turn, next: &Candidate, back: u64, higher: bool) -> Time {
        if next.starving {
            return held.start.after(self.config.min_turn);
        }
        let full = self.turn_of(d, held, next.short, back);
        if higher {
            // Early, if the copying of earlier switches is paid for.
            let early = held
                .start
                .after(self.config.min_turn)
                .max(Time(self.now.0.saturating_add(d.debt(self.now))));
            full.min(early)
        } else {
            full
        }
    }

    /// When a turn that ends for so much, which then is copied in, is worth its copying.
    fn turn_of(&self, d: &Device, held: Turn, short: Bytes, back: u64) -> Time {
        let out = short.min(held.movable).saturating_sub(held.clean);
        let copy = d.out.time(out).saturating_add(back);
        let turn = copy
            .max(held.cost)
            .saturating_mul(u64::from(self.config.turn_per_copy))
            .max(nanos(self.config.min_turn));
        Time(held.start.0.saturating_add(turn))
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
        let wait = match behind.checked_mul(1000) {
            Some(behind) => u128::from(behind / growth.max(1)),
            None => u128::from(behind) * 1000 / u128::from(growth.max(1)),
        };
        Time(
            self.now
                .0
                .saturating_add(u64::try_from(wait).unwrap_or(u64::MAX).max(MOMENT)),
        )
    }

    /// When a client that runs loses its memory to another class: after its time to save itself, or never.
    fn preempted_at(&self, warned: Option<Time>, higher: bool) -> Time {
        if !higher {
            return Time(u64::MAX);
        }
        let warned = warned.unwrap_or(self.now);
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
            let (now, owed) = (self.now, self.now.after(self.config.turn_owed));
            for id in clients {
                self.edit(id, |c| {
                    c.turn_start = now;
                    c.owed_until = c.owed_until.max(owed);
                    // It goes on where it waited for the others.
                    c.last_touch = now;
                });
            }
        }
    }

    /// Whether a client runs, and need not give way to a waiting one yet.
    pub(crate) fn in_turn(&self, id: ClientId, next: &Candidate) -> bool {
        let client = &self.clients[&id];
        let runs = self.active(client) && !client.suspended() && !client.lease.is_zero();
        runs && !self.turn_over(id, client, next)
    }

    /// Whether a running client must give way to a waiting one.
    pub(crate) fn turn_over(&self, id: ClientId, holder: &Client, next: &Candidate) -> bool {
        if next.stalled && self.blocked(id, holder) {
            return holder.turn_start.after(self.config.min_turn) <= self.now;
        }
        let (own, other) = (
            self.task_of(holder).spec.priority,
            self.tasks[&next.task].spec.priority,
        );
        if self.config.preempt && !next.starving && own != other {
            return self.preempted_at(holder.warned.map(|(at, _)| at), other > own) <= self.now;
        }
        self.turn_end(holder, next) <= self.now && self.caught_up(holder, next) <= self.now
    }
}
