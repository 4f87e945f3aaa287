//! What the arbiter remembers of devices, tasks and clients.

use std::collections::{BTreeMap, BTreeSet};

use core::cmp::Reverse;
use core::time::Duration;

use ebb_units::{Bytes, ClientId, DeviceId, OrderId, Priority, TaskId};

use crate::action::{Depth, Grounds, ReclaimReason};
use crate::config::PolicyConfig;
use crate::event::{AskId, AskKind, Outcome, TaskSpec, Tenant, Usage};
use crate::lodging::Lodgers;
use crate::predict::Rhythm;
use crate::rank::HOLDERS;
use crate::table::Table;
use crate::time::{Time, nanos};
use crate::view::ClientState;

/// One GPU.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    pub(crate) capacity: Bytes,
    pub(crate) unmanaged: Bytes,
    pub(crate) peak: Bytes,
    /// The client for which room is being gathered: nobody else gets partial grants, or free room that it needs.
    pub(crate) gathering: Option<ClientId>,
    pub(crate) out: Rate,
    pub(crate) back: Rate,
    /// Copying that is not yet paid off by time on the GPU, in nanoseconds of GPU time owed for it at `debt_at`.
    pub(crate) debt: u64,
    pub(crate) debt_at: Time,
    /// Virtual time below which no task enters the contention: idling earns no credit.
    pub(crate) floor: u64,
    /// More is held than there is, by a change that no grant made.
    pub(crate) excused: bool,
    /// Tasks that have more than their limit by a change that no grant made.
    pub(crate) excused_tasks: BTreeSet<TaskId>,
    /// Tasks with clients here.
    pub(crate) parts: Table<TaskId, Part>,
    /// Sum over the parts.
    pub(crate) sums: Totals,
    /// Guaranteed here, to all tasks, clients or not.
    pub(crate) guaranteed: Bytes,
    /// Of that: never lent.
    pub(crate) kept: Bytes,
    /// Sum over the parts.
    pub(crate) barred: Bytes,
    pub(crate) index: Index,
    /// Time that one task would have had by now if all that ran had shared the GPU evenly, up to `gpu_at`.
    pub(crate) gpu: u64,
    pub(crate) gpu_at: Time,
    /// Tasks that run.
    pub(crate) running: u32,
    /// Tenants that contend: with how many tasks, and their weights.
    pub(crate) tenants: BTreeMap<Tenant, (u64, u64)>,
    /// Clients that were told to save themselves.
    pub(crate) warned: BTreeSet<ClientId>,
    /// Clients that changed since the last pass.
    pub(crate) touched: Vec<ClientId>,
    /// The pass is due.
    pub(crate) dirty: bool,
    /// Something changed that may help someone who waits: it is worth while to look who can be served.
    pub(crate) again: bool,
    /// When a turn may end in favour of someone who waits.
    pub(crate) recheck: Option<Time>,
    /// Bytes of other cards' clients.
    pub(crate) lodgers: Lodgers,
    /// When whose turn ends was looked at last.
    pub(crate) looked: Option<Time>,
}

impl Device {
    pub(crate) fn new(capacity: Bytes, unmanaged: Bytes, config: &PolicyConfig) -> Self {
        Self {
            capacity,
            unmanaged,
            peak: Bytes::ZERO,
            gathering: None,
            out: Rate::assumed(config.out_rate),
            back: Rate::assumed(config.in_rate),
            debt: 0,
            debt_at: Time::default(),
            floor: 0,
            excused: false,
            excused_tasks: BTreeSet::new(),
            parts: Table::default(),
            sums: Totals::default(),
            guaranteed: Bytes::ZERO,
            kept: Bytes::ZERO,
            barred: Bytes::ZERO,
            index: Index::default(),
            gpu: 0,
            gpu_at: Time::default(),
            running: 0,
            tenants: BTreeMap::new(),
            warned: BTreeSet::new(),
            touched: Vec::new(),
            dirty: false,
            again: false,
            recheck: None,
            lodgers: Lodgers::default(),
            looked: None,
        }
    }

    /// What virtual times are counted by.
    pub(crate) fn clock(&self, now: Time) -> Clock {
        let since = now.0.saturating_sub(self.gpu_at.0);
        Clock {
            now,
            gpu: self.gpu.saturating_add(since / u64::from(self.running.max(1))),
            capacity: self.capacity,
        }
    }

    /// One more task runs, or one less.
    pub(crate) fn count_running(&mut self, now: Time, before: bool, after: bool) {
        if before != after {
            self.gpu = self.clock(now).gpu;
            self.gpu_at = now;
            self.running = self.running - u32::from(before) + u32::from(after);
        }
    }

    /// Virtual time for each nanosecond of a task's dominant resource: the inverse of its weight.
    ///
    /// A tenant's weight is shared by its tasks that contend, so that with more tasks each has less.
    pub(crate) fn pace(&self, t: &Task) -> u64 {
        let pace = t.pace() * PACE;
        let Some((tasks, weight)) = self
            .tenants
            .get(&t.spec.tenant)
            .filter(|_| self.tenants.len() > 1)
        else {
            return pace;
        };
        let (all, weights) = self
            .tenants
            .values()
            .fold((0, 0), |(n, w), (tasks, weight)| (n + tasks, w + weight));
        (pace * tasks * weights / (weight * all).max(1)).max(1)
    }

    /// How fast a task's virtual time would grow if it runs, in thousandths of a nanosecond a nanosecond.
    pub(crate) fn growth(&self, t: &Task, part: &Part) -> u64 {
        let gpu = 1000 / u64::from(self.running.max(1));
        let held = u128::from(part.sums.held.0) * 1000 / u128::from(self.capacity.0.max(1));
        let memory = u64::try_from(held).unwrap_or(1000).min(1000);
        self.pace(t).saturating_mul(gpu.max(memory).max(1))
    }

    /// What is owed at a time.
    pub(crate) fn debt(&self, now: Time) -> u64 {
        self.debt.saturating_sub(now.0.saturating_sub(self.debt_at.0))
    }

    pub(crate) fn owe(&mut self, now: Time, more: u64, most: u64) {
        self.debt = self.debt(now).saturating_add(more).min(most);
        self.debt_at = now;
    }

    /// More run than are looked at.
    pub(crate) fn crowded(&self) -> bool {
        self.index.running.len() > HOLDERS
    }

    /// Everything that is not free.
    pub(crate) fn used(&self) -> Bytes {
        self.sums
            .held
            .saturating_add(self.unmanaged)
            .saturating_add(self.lodgers.bytes())
    }

    pub(crate) fn free(&self) -> Bytes {
        self.capacity.saturating_sub(self.used())
    }

    /// More is held than there is.
    pub(crate) fn over(&self) -> bool {
        self.used() > self.capacity
    }

    /// What clients can have in sum.
    pub(crate) fn managed(&self) -> Bytes {
        self.capacity.saturating_sub(self.unmanaged)
    }
}

/// Resolution of paces.
pub(crate) const PACE: u64 = 64;

/// What the virtual times of a device are counted by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    pub(crate) now: Time,
    /// An even share of the GPU's time.
    pub(crate) gpu: u64,
    pub(crate) capacity: Bytes,
}

/// Sums that are kept up to date with every change of a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Lease and overhead.
    pub(crate) held: Bytes,
    /// What is away and has to come back.
    pub(crate) away: Bytes,
    /// Overhead that is not loose, and pinned lease.
    pub(crate) stuck: Bytes,
    /// What open orders may still bring.
    pub(crate) ordered: Bytes,
    /// What nobody else can get now, whatever is evicted: of a device, the sum of its parts'.
    pub(crate) locked: Bytes,
}

/// A task on a device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Part {
    pub(crate) clients: BTreeSet<ClientId>,
    pub(crate) sums: Totals,
    /// Clients that wait for lease.
    pub(crate) asking: u32,
    /// Clients that use the GPU, as of their last look.
    pub(crate) active: u32,
    /// Clients that run, as of their last look.
    pub(crate) runs: u32,
    /// What nothing may take from it at present.
    pub(crate) protected: Bytes,
    /// Sum over its clients: what the stalled ones hold.
    pub(crate) stalled: Bytes,
    /// What nobody else can get of it before somebody who is stalled is served.
    pub(crate) barred: Bytes,
    /// Weighted time of its dominant resource on the device, up to `settled_at`.
    pub(crate) virtual_time: u64,
    pub(crate) settled_at: Time,
    /// [`Clock::gpu`] then.
    pub(crate) settled_gpu: u64,
    /// Time that the link was used for it since.
    pub(crate) link: u64,
    /// Until when one of its clients runs, as far as is known now.
    pub(crate) run_until: Time,
    /// Where it is among those that contend.
    pub(crate) contends: Option<u64>,
    /// It holds more than its limit.
    pub(crate) excess: bool,
}

impl Part {
    /// It uses the device or waits to.
    pub(crate) fn wanting(&self) -> bool {
        self.asking > 0 || self.active > 0
    }

    pub(crate) fn footprint(&self) -> Bytes {
        self.sums.held.saturating_add(self.sums.away)
    }

    /// The most that it used of any resource counts: of the GPU's time, of the memory while it ran, or of the link.
    pub(crate) fn virtual_time(&self, clock: Clock, pace: u64) -> u64 {
        let ran = self.run_until.min(clock.now).0.saturating_sub(self.settled_at.0);
        if ran == 0 && self.link == 0 {
            return self.virtual_time;
        }
        let passed = clock.now.0.saturating_sub(self.settled_at.0);
        let part_of = |n: u64, of: u64| {
            u64::try_from(u128::from(ran) * u128::from(n) / u128::from(of.max(1))).unwrap_or(ran)
        };
        let gpu = part_of(clock.gpu.saturating_sub(self.settled_gpu), passed).min(ran);
        let memory = part_of(self.sums.held.0, clock.capacity.0).min(ran);
        let dominant = gpu.max(memory).max(self.link);
        self.virtual_time.saturating_add(dominant.saturating_mul(pace))
    }

    /// Counts the time up to now. To be called before what it depends on changes.
    pub(crate) fn settle(&mut self, clock: Clock, pace: u64) {
        self.virtual_time = self.virtual_time(clock, pace);
        self.settled_at = clock.now;
        self.settled_gpu = clock.gpu;
        self.link = 0;
    }
}

/// Clients of a device in the orders in which they are looked for. Who is where is noted in [`Linked`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Index {
    /// Who waits, the next one first.
    pub(crate) rank: BTreeSet<RankKey>,
    /// The same by the least that they could be granted.
    pub(crate) needs: BTreeSet<(Bytes, ClientId)>,
    /// Who holds memory that could be moved, by kind; the first is taken first.
    pub(crate) idle: BTreeSet<HoldKey>,
    pub(crate) waiting: BTreeSet<HoldKey>,
    pub(crate) running: BTreeSet<HoldKey>,
    /// Who has lease that nothing uses.
    pub(crate) spare: BTreeSet<HoldKey>,
    /// Who idles and has what leaves without a copy.
    pub(crate) clean: BTreeSet<HoldKey>,
    /// How much there is to move of each of these, in the order idle, waiting, running.
    pub(crate) movable: [Bytes; 3],
    /// Who has an order that somebody else needs.
    pub(crate) orders: BTreeSet<ClientId>,
    /// Tasks that use the device or wait to, by virtual time. That of those that run may be more by now.
    pub(crate) contends: BTreeSet<(u64, TaskId)>,
    /// Tasks above their limit.
    pub(crate) excess: BTreeSet<TaskId>,
}

/// The order of those who wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RankKey {
    pub(crate) burst: bool,
    pub(crate) patient: bool,
    /// Only where priorities preempt.
    pub(crate) class: Reverse<Priority>,
    pub(crate) virtual_time: u64,
    pub(crate) priority: Reverse<Priority>,
    pub(crate) since: Time,
    pub(crate) client: ClientId,
}

/// The order of those who hold memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HoldKey {
    pub(crate) priority: Priority,
    pub(crate) virtual_time: Reverse<u64>,
    pub(crate) last_touch: Time,
    pub(crate) client: ClientId,
}

/// The keys of one priority, whatever else is in them.
fn of_priority(priority: Priority) -> core::ops::RangeInclusive<HoldKey> {
    let key = |virtual_time, last_touch, client| HoldKey {
        priority,
        virtual_time: Reverse(virtual_time),
        last_touch: Time(last_touch),
        client: ClientId(client),
    };
    key(u64::MAX, 0, 0)..=key(0, u64::MAX, u64::MAX)
}

impl Index {
    /// Who idles, by what taking from them costs: for each priority, the lowest first, those with clean memory (only that is meant: `true`),
    /// and then all of them.
    pub(crate) fn idle_by_cost(&self) -> impl Iterator<Item = (&HoldKey, bool)> {
        const ALL: [Priority; 3] = [Priority::Low, Priority::Normal, Priority::High];
        // Most of the time nobody has any.
        let priorities = if self.clean.is_empty() {
            &ALL[..0]
        } else {
            &ALL[..]
        };
        let whole = self
            .clean
            .is_empty()
            .then(|| self.idle.iter().map(|key| (key, false)));
        let apart = priorities.iter().flat_map(|priority| {
            let clean = self.clean.range(of_priority(*priority)).map(|key| (key, true));
            let idle = self.idle.range(of_priority(*priority));
            clean.chain(idle.map(|key| (key, false)))
        });
        whole.into_iter().flatten().chain(apart)
    }
}

/// Which kind of holder a client is, whoever wants its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holding {
    /// Nothing that could be moved.
    Nothing,
    Idle(HoldKey),
    Waiting(HoldKey),
    Running(HoldKey),
}

/// What of a client is in the sums and indices at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Linked {
    pub(crate) sums: Totals,
    pub(crate) asking: bool,
    pub(crate) active: bool,
    /// Its time on the GPU counts.
    pub(crate) runs: bool,
    pub(crate) rank: Option<RankKey>,
    /// What it is served with next, and the least that it could be granted.
    pub(crate) need: Bytes,
    pub(crate) least: Bytes,
    pub(crate) holding: Holding,
    /// How much it holds that could be moved.
    pub(crate) movable: Bytes,
    /// It has waited for longer than patience lasts.
    pub(crate) waited: bool,
    /// Since when it waits.
    pub(crate) waits_since: Option<Time>,
    /// It is not there, and its gang waits for it.
    pub(crate) missing: bool,
    /// It comes back.
    pub(crate) coming: bool,
    /// Another of its gang is missing.
    pub(crate) broken: bool,
    /// Another of its gang comes back, and then it goes on.
    pub(crate) expects: bool,
    /// It is not taken from for a while.
    pub(crate) guarded: bool,
    /// What of it nobody can get as long as its task waits.
    pub(crate) stalled: Bytes,
    /// An order is open, whatever for.
    pub(crate) ordered: bool,
    pub(crate) spare: Option<HoldKey>,
    pub(crate) clean: Option<HoldKey>,
    pub(crate) order: bool,
    /// When it is to be looked at again, if nothing happens before. May be earlier than needed.
    pub(crate) wake: Option<Time>,
}

impl Linked {
    /// Whether anybody who waits could be served otherwise than before.
    pub(crate) fn matters(&self, before: &Self) -> bool {
        let kind = |l: &Self| core::mem::discriminant(&l.holding);
        let what = |l: &Self| {
            (
                l.sums,
                l.rank,
                (l.need, l.least, l.waited),
                l.active,
                l.movable,
                (l.guarded, l.stalled, l.broken, l.expects),
                l.ordered,
                l.spare.is_some(),
            )
        };
        kind(self) != kind(before) || what(self) != what(before)
    }
}

impl Default for Linked {
    fn default() -> Self {
        Self {
            sums: Totals::default(),
            asking: false,
            active: false,
            runs: false,
            rank: None,
            need: Bytes::ZERO,
            least: Bytes::ZERO,
            holding: Holding::Nothing,
            movable: Bytes::ZERO,
            waited: false,
            waits_since: None,
            missing: false,
            coming: false,
            broken: false,
            expects: false,
            guarded: false,
            stalled: Bytes::ZERO,
            ordered: false,
            spare: None,
            clean: None,
            order: false,
            wake: None,
        }
    }
}

/// A link's speed in one direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    per_second: u64,
    /// Nanoseconds a byte, times 2^40.
    per_byte: u64,
    measured: bool,
}

impl Rate {
    pub(crate) fn assumed(per_second: u64) -> Self {
        let mut rate = Self {
            per_second: 1,
            per_byte: 0,
            measured: false,
        };
        rate.set(per_second);
        rate
    }

    /// Takes in one copy. Small ones say more about fixed costs than about the link.
    pub(crate) fn sample(&mut self, bytes: Bytes, nanos: u64) {
        if bytes < Bytes::mib(32) || nanos == 0 {
            return;
        }
        let seen = u64::try_from(u128::from(bytes.0) * 1_000_000_000 / u128::from(nanos)).unwrap_or(u64::MAX);
        self.set(if self.measured {
            u64::try_from((u128::from(self.per_second) * 3 + u128::from(seen)) / 4).unwrap_or(u64::MAX)
        } else {
            seen
        });
        self.measured = true;
    }

    /// How long a copy takes, in nanoseconds.
    pub(crate) fn time(self, bytes: Bytes) -> u64 {
        u64::try_from((u128::from(bytes.0) * u128::from(self.per_byte)) >> 40).unwrap_or(u64::MAX)
    }

    fn set(&mut self, per_second: u64) {
        self.per_second = per_second.max(1);
        let per_byte = (1_000_000_000u128 << 40) / u128::from(self.per_second);
        self.per_byte = u64::try_from(per_byte).unwrap_or(u64::MAX);
    }
}

/// One `ebb run`.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub(crate) spec: TaskSpec,
    /// Devices that were named when it was added.
    pub(crate) named: BTreeSet<DeviceId>,
    /// What of its request holds on each device that it uses: all of it, unless others' requests left less.
    pub(crate) guaranteed: BTreeMap<DeviceId, Bytes>,
    /// Its clients, on all devices.
    pub(crate) clients: BTreeSet<ClientId>,
    /// Weighted time on devices that it has no client on at present.
    pub(crate) past_time: BTreeMap<DeviceId, u64>,
    pub(crate) paused: bool,
    pub(crate) pause_told: bool,
    /// A pause was asked for and waits for what the task is owed, until then at the longest.
    pub(crate) put_off: Option<Time>,
    /// Was paused before it ran: its clients come back together.
    pub(crate) resumed: bool,
    /// The limit was forced below what is live: evict to keep it.
    pub(crate) forced: bool,
}

impl Task {
    pub(crate) fn new(spec: TaskSpec, named: BTreeSet<DeviceId>) -> Self {
        Self {
            spec,
            named,
            guaranteed: BTreeMap::new(),
            clients: BTreeSet::new(),
            past_time: BTreeMap::new(),
            paused: false,
            pause_told: false,
            put_off: None,
            resumed: false,
            forced: false,
        }
    }

    pub(crate) fn limit(&self) -> Bytes {
        self.spec.limit.unwrap_or(Bytes::MAX)
    }

    pub(crate) fn guaranteed(&self, device: DeviceId) -> Bytes {
        // Most tasks request nothing, and need not be looked up for that.
        if self.spec.request.is_zero() {
            return Bytes::ZERO;
        }
        self.guaranteed.get(&device).copied().unwrap_or(Bytes::ZERO)
    }

    /// What nothing may take from it on a device at present.
    pub(crate) fn protected(&self, device: DeviceId, wanting: bool) -> Bytes {
        if self.paused || (self.spec.idle_release.is_some() && !wanting) {
            Bytes::ZERO
        } else {
            self.guaranteed(device)
        }
    }

    /// What it never lends.
    pub(crate) fn kept(&self, device: DeviceId) -> Bytes {
        if self.spec.idle_release.is_none() && !self.paused {
            self.guaranteed(device)
        } else {
            Bytes::ZERO
        }
    }

    /// Virtual nanoseconds for each nanosecond on the GPU: the inverse of the weights 4, 2 and 1.
    pub(crate) fn pace(&self) -> u64 {
        match self.spec.priority {
            Priority::High => 1,
            Priority::Normal => 2,
            Priority::Low => 4,
        }
    }
}

/// An open ask.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) id: AskId,
    pub(crate) kind: AskKind,
    pub(crate) left: Bytes,
    pub(crate) long: bool,
    pub(crate) since: Time,
}

/// An open order.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) id: OrderId,
    /// What it should bring; less than was written in the order if that was "everything".
    pub(crate) bytes: Bytes,
    pub(crate) got: Bytes,
    pub(crate) depth: Depth,
    pub(crate) reason: ReclaimReason,
    pub(crate) last_progress: Time,
    pub(crate) cancelled: bool,
    pub(crate) evicted_before: Bytes,
}

impl Order {
    /// What may still come of it, as far as anyone may count on.
    pub(crate) fn pending(&self) -> Bytes {
        if self.cancelled {
            Bytes::ZERO
        } else {
            self.bytes.saturating_sub(self.got)
        }
    }
}

/// One process on one device.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) task: TaskId,
    pub(crate) device: DeviceId,
    pub(crate) lease: Bytes,
    pub(crate) overhead: Bytes,
    /// Of that: what an order can send away.
    pub(crate) loose: Bytes,
    /// In host memory, by its own account or by what its orders copied.
    pub(crate) evicted: Bytes,
    /// Granted for evicted bytes that are not known to be back yet.
    pub(crate) incoming: Bytes,
    pub(crate) pinned: Bytes,
    /// Lease with no memory behind it that nothing is coming back into.
    pub(crate) idle_lease: Bytes,
    /// Lease that nothing uses, by its last account: that, and what lies in pools.
    pub(crate) unused: Bytes,
    /// Lease whose bytes host memory has as they are, as far as it believes.
    pub(crate) clean: Bytes,
    pub(crate) asks: Vec<Ask>,
    pub(crate) order: Option<Order>,
    pub(crate) last_touch: Time,
    pub(crate) last_grant: Time,
    pub(crate) turn_start: Time,
    /// Copying that its turn was bought with, in nanoseconds: its turn is to be worth it.
    pub(crate) turn_cost: u64,
    /// All is granted and being copied in; not a victim until then, whatever becomes of the news that it is back.
    pub(crate) restoring_until: Time,
    /// Its memory is to come back before anything is taken from it again.
    pub(crate) owed_restore: bool,
    /// And then it is to have its turn.
    pub(crate) owed_until: Time,
    pub(crate) leave_alone_until: Time,
    pub(crate) pause: Duration,
    /// The first of the refusals that made the pause so long; says nothing if there is no pause.
    pub(crate) refused_since: Time,
    /// Counts as active while it is left alone: its GPU work did not end.
    pub(crate) busy: bool,
    pub(crate) idle_released: bool,
    /// Pausing it is done as far as it goes.
    pub(crate) settled: bool,
    /// It was taken from in the middle of its work, and is not back since.
    pub(crate) interrupted: bool,
    /// Was told to save itself, when and for what priority.
    pub(crate) warned: Option<(Time, Priority)>,
    pub(crate) last_reason: Option<ReclaimReason>,
    pub(crate) last_grounds: Grounds,
    pub(crate) last_outcome: Option<Outcome>,
    pub(crate) state: ClientState,
    pub(crate) state_since: Time,
    pub(crate) releases: u64,
    pub(crate) restores: u64,
    /// What its idle times were.
    pub(crate) rhythm: Rhythm,
    pub(crate) linked: Linked,
}

/// What of a client its accounts of its use decide; each as in [`Client`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Books {
    pub(crate) overhead: Bytes,
    pub(crate) loose: Bytes,
    pub(crate) pinned: Bytes,
    evicted: Bytes,
    clean: Bytes,
    incoming: Bytes,
    idle_lease: Bytes,
    unused: Bytes,
}

impl Client {
    /// What an account of its use makes of its books.
    pub(crate) fn books_after(&self, usage: &Usage) -> Books {
        let above = self.lease.saturating_sub(usage.resident);
        let incoming = self.incoming.min(usage.evicted).min(above);
        let idle_lease = above.saturating_sub(incoming);
        Books {
            overhead: usage.overhead,
            loose: usage.loose.min(usage.overhead),
            pinned: usage.pinned,
            evicted: usage.evicted,
            clean: usage.clean,
            incoming,
            idle_lease,
            unused: idle_lease.saturating_add(usage.cached),
        }
    }

    pub(crate) fn keep_books(&mut self, books: Books) {
        (self.overhead, self.loose) = (books.overhead, books.loose);
        (self.pinned, self.evicted, self.clean) = (books.pinned, books.evicted, books.clean);
        (self.incoming, self.idle_lease, self.unused) = (books.incoming, books.idle_lease, books.unused);
    }

    /// Whether its books are as this says already, and nothing is under way that would have it looked at.
    pub(crate) fn has_said(&self, usage: &Usage) -> bool {
        let books = Books {
            overhead: self.overhead,
            loose: self.loose,
            pinned: self.pinned,
            evicted: self.evicted,
            clean: self.clean,
            incoming: self.incoming,
            idle_lease: self.idle_lease,
            unused: self.unused,
        };
        let as_before = self.books_after(usage) == books;
        as_before && self.order.is_none() && self.asks.is_empty() && !self.restore_over()
    }

    pub(crate) fn new(
        task: TaskId,
        device: DeviceId,
        now: Time,
        [lease, evicted, overhead]: [Bytes; 3],
    ) -> Self {
        Self {
            task,
            device,
            lease,
            overhead,
            loose: Bytes::ZERO,
            evicted,
            incoming: Bytes::ZERO,
            pinned: Bytes::ZERO,
            unused: Bytes::ZERO,
            idle_lease: Bytes::ZERO,
            clean: Bytes::ZERO,
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
            pause: Duration::ZERO,
            refused_since: now,
            busy: false,
            idle_released: false,
            settled: false,
            interrupted: false,
            warned: None,
            last_reason: None,
            last_grounds: Grounds::default(),
            last_outcome: None,
            state: ClientState::Active,
            state_since: now,
            releases: 0,
            restores: 0,
            rhythm: Rhythm::default(),
            linked: Linked::default(),
        }
    }

    pub(crate) fn give_back(&mut self, bytes: Bytes) {
        self.lease = self.lease.saturating_sub(bytes);
        self.unused = self.unused.saturating_sub(bytes);
        self.idle_lease = self.idle_lease.saturating_sub(bytes);
        self.clean = self.clean.min(self.lease);
        self.incoming = self.incoming.min(self.lease);
    }

    /// What could be moved at all: lease, and overhead that is loose.
    pub(crate) fn movable(&self) -> Bytes {
        self.movable_lease().saturating_add(self.loose)
    }

    /// Lease that could be moved at all.
    pub(crate) fn movable_lease(&self) -> Bytes {
        self.lease.saturating_sub(self.pinned)
    }

    /// What an order takes without a copy, besides what nothing uses.
    pub(crate) fn clean(&self) -> Bytes {
        let used = self.movable_lease().saturating_sub(self.unused);
        self.clean.min(used)
    }

    /// What could be taken from it, or only what of that is clean (and what nothing uses, which always goes before it).
    pub(crate) fn within(&self, clean: bool) -> Bytes {
        if clean {
            let free = self.unused.min(self.movable_lease());
            free.saturating_add(self.clean())
        } else {
            self.movable()
        }
    }

    /// Of so many bytes taken from it: what has to be copied, as far as it believes. What costs nothing goes first.
    pub(crate) fn to_copy(&self, bytes: Bytes) -> Bytes {
        bytes.saturating_sub(self.unused).saturating_sub(self.clean())
    }

    /// Overhead that stays whatever is ordered.
    pub(crate) fn fixed(&self) -> Bytes {
        self.overhead.saturating_sub(self.loose)
    }

    /// Lease and overhead.
    pub(crate) fn held(&self) -> Bytes {
        self.lease.saturating_add(self.overhead)
    }

    /// What stays on the device whatever is ordered.
    pub(crate) fn stuck(&self) -> Bytes {
        self.fixed().saturating_add(self.pinned.min(self.lease))
    }

    /// Bytes that need lease before the client can run again. A chunk may be more than was ordered of it: then the client keeps lease
    /// that nothing uses, asks for so much less when the chunk is to come back, and would be taken for one that never fits
    /// if that counted twice.
    pub(crate) fn away(&self) -> Bytes {
        self.evicted
            .saturating_sub(self.incoming)
            .saturating_sub(self.idle_lease)
            .max(self.asked(AskKind::Restore))
    }

    pub(crate) fn asked(&self, kind: AskKind) -> Bytes {
        self.asks.iter().filter(|a| a.kind == kind).map(|a| a.left).sum()
    }

    /// The oldest of its allocations that wait.
    pub(crate) fn next_alloc(&self) -> Bytes {
        let mut allocs = self.asks.iter().filter(|a| a.kind == AskKind::Alloc);
        allocs.next().map_or(Bytes::ZERO, |a| a.left)
    }

    pub(crate) fn waits_since(&self) -> Option<Time> {
        self.asks.iter().map(|a| a.since).min()
    }

    pub(crate) fn wants_back(&self) -> bool {
        self.asks.iter().any(|a| a.kind == AskKind::Restore)
    }

    /// Something of it is not on the device: it cannot run.
    pub(crate) fn suspended(&self) -> bool {
        !self.evicted.is_zero() || self.wants_back()
    }

    /// Leaves it alone for longer each time.
    pub(crate) fn back_off(&mut self, now: Time, first: Duration, most: Duration, busy: bool) -> u64 {
        self.pause = if self.pause.is_zero() {
            self.refused_since = now;
            first
        } else {
            self.pause.saturating_mul(2).min(most)
        };
        self.leave_alone_until = now.after(self.pause);
        self.busy = busy;
        nanos(self.pause) / 1_000_000
    }
}
