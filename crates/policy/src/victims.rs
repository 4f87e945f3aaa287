//! From whom a waiting client's bytes could be taken, in which order, and whether that would be enough.
//!
//! Lease that nothing uses goes first, of all that may be taken from, then whole clients: the idle, those that wait behind,
//! and those that run and have had their turn; within each kind the lowest priority first. Of the idle of one priority, what needs no
//! copy goes before the rest. The walk ends as soon as there
//! is enough. What the driver placed for the one that waits itself, and would give way to it, comes last.

use std::collections::BTreeMap;

use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

use crate::Arbiter;
use crate::action::{Depth, ReclaimReason};
use crate::rank::{Candidate, Claim, HOLDERS, Holder};
use crate::schedule::Seen;
use crate::state::{Client, HoldKey};

/// How many clients that can give nothing (what they hold is protected) are passed over.
const BARREN: usize = 256;

/// What is to be ordered for a client, and whether all it needs would come of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    pub(crate) enough: bool,
    pub(crate) orders: Vec<(ClientId, Bytes, Depth, ReclaimReason)>,
}

/// How willingly a client's memory is taken.
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

/// What is being taken from one client.
struct Take {
    client: ClientId,
    willing: Willing,
    bytes: Bytes,
    depth: Depth,
    /// An order to it is open: another has to wait for its end.
    ordered: bool,
}

/// A walk over those who hold something.
struct Walk<'a> {
    arbiter: &'a Arbiter,
    r: &'a Candidate,
    /// Still missing.
    short: Bytes,
    takes: Vec<Take>,
    /// Whoever is visited now may be visited again, by whatever walk.
    again: bool,
    place: BTreeMap<ClientId, usize>,
    /// What each task has above its protected bytes, less what is ordered of it already.
    rooms: BTreeMap<TaskId, Bytes>,
    barren: usize,
}

impl Walk<'_> {
    fn room(&mut self, c: &Client, want: Bytes, taken: Bytes) -> Bytes {
        let part = self.arbiter.part_of(c);
        if part.clients.len() == 1 && c.task != self.r.task {
            let above = part.sums.held.saturating_sub(part.protected);
            let left = above.saturating_sub(part.sums.ordered).saturating_sub(taken);
            return want.min(left);
        }
        let left = self.rooms.entry(c.task).or_insert_with(|| {
            if c.task == self.r.task {
                return Bytes::MAX;
            }
            part.sums
                .held
                .saturating_sub(part.protected)
                .saturating_sub(part.sums.ordered)
        });
        let n = want.min(*left);
        *left = left.saturating_sub(n);
        n
    }

    /// Takes from one client; whether the walk goes on.
    ///
    /// `clean`: only what needs no copy.
    fn visit(&mut self, id: ClientId, depth: Depth, clean: bool, running: Option<(&Holder, &Claim)>) -> bool {
        if self.short.is_zero() || self.barren >= BARREN {
            return false;
        }
        let c = &self.arbiter.clients[&id];
        if id == self.r.client || self.arbiter.left_alone(c) {
            return true;
        }
        let Some(willing) = self.arbiter.willing(id, c, self.r, running) else {
            return true;
        };
        let place = self.place.get(&id).copied();
        let taken = place.map_or(Bytes::ZERO, |at| self.takes[at].bytes);
        let want = match depth {
            Depth::Unused if c.order.is_some() => Bytes::ZERO,
            Depth::Unused => self.arbiter.unused(c),
            Depth::Evict if willing == Willing::Running => Bytes::ZERO,
            Depth::Evict | Depth::Beside => {
                let pending = c.order.as_ref().map_or(Bytes::ZERO, |o| o.pending());
                c.within(clean).saturating_sub(pending).saturating_sub(taken)
            }
        };
        let n = self.room(c, want.min(self.short), taken);
        if n.is_zero() {
            self.barren += 1;
            return true;
        }
        self.short = self.short.saturating_sub(n);
        match place {
            Some(at) => {
                self.takes[at].bytes = self.takes[at].bytes.saturating_add(n);
                self.takes[at].depth = depth;
            }
            None => {
                if self.again || clean || depth == Depth::Unused {
                    self.place.insert(id, self.takes.len());
                }
                self.takes.push(Take {
                    client: id,
                    willing,
                    bytes: n,
                    depth,
                    ordered: c.order.is_some(),
                });
            }
        }
        true
    }

    fn walk<'k>(&mut self, holders: impl Iterator<Item = &'k HoldKey>, depth: Depth) {
        self.walk_by_cost(holders.map(|key| (key, false)), depth);
    }

    fn walk_by_cost<'k>(&mut self, holders: impl Iterator<Item = (&'k HoldKey, bool)>, depth: Depth) {
        for (key, clean) in holders {
            if !self.visit(key.client, depth, clean, None) {
                break;
            }
        }
    }
}

impl Arbiter {
    /// The most that a client could have on its device if every turn were over and everyone could be evicted.
    pub(crate) fn usable(&self, id: ClientId) -> Bytes {
        let client = &self.clients[&id];
        let others = self.device_of(client).sums.locked;
        let others = others.saturating_sub(self.part_of(client).sums.locked);
        self.usable_beside(id, Bytes::ZERO, others)
    }

    /// The same, where so much of its own task's other clients stays beside what never leaves, and so much of other tasks.
    pub(crate) fn usable_beside(&self, id: ClientId, own: Bytes, others: Bytes) -> Bytes {
        let client = &self.clients[&id];
        let stuck = self.part_of(client).sums.stuck;
        let siblings = stuck.saturating_sub(client.stuck()).saturating_add(own);
        let by_limit = self
            .allowance(client.task, client.device)
            .saturating_sub(siblings);
        self.device_of(client)
            .managed()
            .saturating_sub(siblings)
            .saturating_sub(others)
            .min(by_limit)
            .saturating_sub(client.fixed())
    }

    /// What a candidate has when it is served.
    pub(crate) fn served_with(&self, r: &Candidate) -> Bytes {
        let lease = self.clients[&r.client].lease;
        lease.saturating_add(r.need).saturating_add(r.later)
    }

    /// Whether a candidate could be served if every turn were over and everyone could be evicted.
    pub(crate) fn possible(&self, r: &Candidate) -> bool {
        self.served_with(r) <= self.usable(r.client)
    }

    /// How `r` could get all that it needs.
    pub(crate) fn plan(&self, device: DeviceId, r: &Candidate, seen: &Seen) -> Plan {
        let d = &self.devices[&device];
        let client = &self.clients[&r.client];
        let part = self.part_of(client);
        let need = r.need.saturating_add(r.later);
        // What is evicted of it has to come back; what is sent away beside its lease makes room for it.
        let own = client.order.as_ref().filter(|o| o.depth != Depth::Beside);
        let own = own.map_or(Bytes::ZERO, |o| o.pending());
        let ordered_of_siblings = part.sums.ordered.saturating_sub(own);
        let short = need
            .saturating_sub(d.free())
            .saturating_sub(d.sums.ordered.saturating_sub(own))
            .saturating_sub(d.lodgers.coming());
        let over_limit = need
            .saturating_sub(self.limit_room(r.task, device))
            .saturating_sub(ordered_of_siblings);
        let mut walk = Walk {
            arbiter: self,
            r,
            short: over_limit,
            takes: Vec::new(),
            again: true,
            place: BTreeMap::new(),
            rooms: BTreeMap::new(),
            barren: 0,
        };
        // What would pass the task's limit has to come from the task itself. A new allocation adds to the live bytes,
        // so evicting others of the task would not make room for it under the limit.
        if !over_limit.is_zero() {
            let mut siblings: Vec<(Option<Willing>, HoldKey)> = part
                .clients
                .iter()
                .map(|id| (self.willing(*id, &self.clients[id], r, None), self.hold_key(*id)))
                .collect();
            siblings.sort();
            walk.walk(siblings.iter().map(|(_, key)| key), Depth::Unused);
            if !r.copy_in.is_zero() {
                walk.walk(siblings.iter().map(|(_, key)| key), Depth::Evict);
            }
            if !walk.short.is_zero() {
                return Plan::default();
            }
        }
        walk.short = short.saturating_sub(over_limit);
        walk.barren = 0;
        walk.again = false;
        if !walk.short.is_zero() {
            walk.walk(d.index.spare.iter(), Depth::Unused);
            walk.walk_by_cost(d.index.idle_by_cost(), Depth::Evict);
            if !walk.short.is_zero() {
                let waiting = seen.waiting.get_or_init(|| {
                    let some = d.index.waiting.iter().take(HOLDERS);
                    let mut some: Vec<HoldKey> = some.map(|key| self.hold_key(key.client)).collect();
                    some.sort_unstable();
                    some
                });
                walk.barren = 0;
                walk.walk(waiting.iter(), Depth::Evict);
            }
            if !walk.short.is_zero() {
                let claim = self.claim(device, r);
                walk.barren = 0;
                for h in seen.running.get_or_init(|| self.holders_in_order(device)) {
                    if !walk.visit(h.id, Depth::Evict, false, Some((h, &claim))) {
                        break;
                    }
                }
            }
        }
        // Last, what the driver placed for itself: without us it would give way to the allocation, too.
        let own_room = self.own_room(client, walk.short);
        walk.short = walk.short.saturating_sub(own_room);
        let reason = |t: &Take| match t.willing {
            _ if r.guaranteed => ReclaimReason::Guarantee { client: r.client },
            Willing::TurnOver => ReclaimReason::TurnEnded { client: r.client },
            _ => ReclaimReason::Demand { client: r.client },
        };
        Plan {
            enough: walk.short.is_zero(),
            orders: walk
                .takes
                .iter()
                .filter(|t| !t.ordered)
                .map(|t| (t.client, t.bytes, t.depth, reason(t)))
                .chain((!own_room.is_zero() && client.order.is_none()).then_some((
                    r.client,
                    own_room,
                    Depth::Beside,
                    ReclaimReason::Own,
                )))
                .collect(),
        }
    }

    /// How much of `short` bytes a client that waits can make room for by itself, evicting nothing.
    fn own_room(&self, client: &Client, short: Bytes) -> Bytes {
        if self.left_alone(client) || self.task_of(client).paused {
            return Bytes::ZERO;
        }
        let pending = client.order.as_ref().map_or(Bytes::ZERO, |o| o.pending());
        short.min(client.loose.saturating_sub(pending))
    }

    /// Where a holder stands now.
    fn hold_key(&self, id: ClientId) -> HoldKey {
        let c = &self.clients[&id];
        HoldKey {
            priority: self.task_of(c).spec.priority,
            virtual_time: core::cmp::Reverse(self.virtual_time(c.task, c.device)),
            last_touch: c.last_touch,
            client: id,
        }
    }

    /// Whether, and how willingly, a client's memory would be taken for `r`.
    ///
    /// `running`: the same client as it was seen among those who run, and what counts of `r`.
    fn willing(
        &self,
        id: ClientId,
        c: &Client,
        r: &Candidate,
        running: Option<(&Holder, &Claim)>,
    ) -> Option<Willing> {
        if self.task_of(c).paused {
            return Some(Willing::Idle);
        }
        if self.restoring(c) && !r.guaranteed || self.now < c.owed_until {
            return None;
        }
        if let Some((at, inherited)) = c.warned
            && self.now < at.after(self.config.preempt_grace)
            && (r.key.priority.0 < inherited || !r.guaranteed)
        {
            // It is saving itself for a higher priority, and may not use the GPU while it writes that down. Who stands between the two
            // must not stop that, nor whom it is for.
            return None;
        }
        if c.linked.broken && c.task != r.task {
            // It does nothing until all of its gang are back, and they come back together.
            return Some(Willing::TurnOver);
        }
        if c.linked.expects && !r.guaranteed {
            return None;
        }
        let stopped = c.suspended() && !self.restoring(c);
        if !stopped && self.active(c) {
            let over = || match running {
                Some((h, claim)) => self.gives_way(self.device_of(c), h, r, claim),
                None => self.turn_over(id, c, r),
            };
            let behind = || c.asks.is_empty() || self.goes_before(r, c) || self.blocked(id, c);
            let yields = r.guaranteed || (over() && behind());
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
            || self.device_of(c).gathering == Some(r.client)
            || self.goes_before(r, c)
            || self.blocked(id, c)
            || self.needs_to_go_on(r, c);
        before.then_some(Willing::Waiting)
    }

    /// Whether `r` is in the middle of its turn, which the other one waits for the end of: what it needs to go on comes from that
    /// one. Otherwise, on a full card, each would wait at its first allocation until its turn is over, and none would ever get on.
    fn needs_to_go_on(&self, r: &Candidate, other: &Client) -> bool {
        other.linked.rank.is_some_and(|key| {
            r.key.priority <= key.priority && self.in_turn(r.client, &self.candidate(&key))
        })
    }

    /// Whether `r` stands before another waiting client.
    fn goes_before(&self, r: &Candidate, other: &Client) -> bool {
        other.linked.rank.is_none_or(|key| r.key < key)
    }
}
