//! Bringing a program's memory back just before it is needed, and making room for that before.
//!
//! Each client's idle times are kept ([`crate::predict`]). While one is away, it is looked at whenever a moment comes at which
//! one of them would be about to end. If what is expected to be saved is clearly more than what would be copied for nothing, and
//! nobody waits, its program is told to bring it back; if the room is taken by clients that idle and are themselves not
//! expected so soon, those are released first.
//!
//! A guess never costs anybody else a turn: until it is known to be right, its ask stands behind all others and takes nothing from
//! anyone, and its memory counts as idle. A wrong one makes the client quiet, for longer each time, so that there are never
//! more than twelve an hour, and no more than four if none is right.

use core::time::Duration;

use ebb_units::{Bytes, ClientId};

use crate::Arbiter;
use crate::action::{Action, Depth, Note, ReclaimReason};
use crate::predict::{Ahead, Foresight};
use crate::state::Client;
use crate::time::Time;

/// What telling a program and its answer take beside the copying.
const ANSWER: Duration = Duration::from_millis(100);
/// How long a guess asks behind all others.
const HUMBLE: Duration = Duration::from_secs(1);
/// When to look again if somebody else was in the way.
const LATER: Duration = Duration::from_secs(1);
/// Who is so likely to return meanwhile, in thousandths, gives nothing for somebody else's return.
const LIKELY: u32 = 250;
/// How many idle clients are looked at.
const LOOKED_AT: usize = 64;

impl Client {
    /// It was brought back on a guess, and has not used the GPU since.
    pub(crate) fn guessed(&self) -> bool {
        self.rhythm.ahead.is_some_and(|a| self.last_touch <= a.at)
    }

    /// Its ask is for a guess, and no program is known to wait for it.
    pub(crate) fn humble(&self, now: Time) -> bool {
        self.guessed() && self.rhythm.ahead.is_some_and(|a| now < a.humble_until)
    }

    /// It uses the GPU again after it idled.
    pub(crate) fn learn_return(&mut self, now: Time, idle_after: Duration) {
        let gap = now.since(self.last_touch);
        if gap > idle_after {
            self.rhythm.returned(gap);
        }
    }
}

impl Arbiter {
    /// What bringing a client back takes.
    fn copying(&self, c: &Client) -> (Duration, Duration) {
        let d = self.device_of(c);
        let bytes = c.evicted;
        let back = Duration::from_nanos(d.back.time(bytes));
        (back + ANSWER, Duration::from_nanos(d.out.time(bytes)))
    }

    /// Whether a client could be brought back at all.
    fn may_return(&self, c: &Client) -> bool {
        let t = self.task_of(c);
        let away = !c.evicted.is_zero() && c.asks.is_empty() && c.order.is_none();
        away && !t.paused && !self.active(c)
    }

    /// When a client's return is to be thought about.
    pub(crate) fn foresee_at(&self, c: &Client) -> Option<Time> {
        if !self.config.predict {
            return None;
        }
        if let Some(ahead) = c.rhythm.ahead {
            return Some(ahead.humble_until)
                .filter(|at| *at > self.now)
                .or(Some(ahead.until));
        }
        if !self.may_return(c) {
            return None;
        }
        c.rhythm.next_look(self.now, c.last_touch)
    }

    /// Brings a client back if that is worth it.
    pub(crate) fn foresee(&mut self, id: ClientId, out: &mut Vec<Action>) {
        if !self.config.predict {
            return;
        }
        let now = self.now;
        let Some(c) = self.clients.get(&id) else {
            return;
        };
        if let Some(ahead) = c.rhythm.ahead {
            if ahead.until <= now {
                self.edit(id, |c| c.rhythm.was_wrong(now));
            }
            return;
        }
        if !self.may_return(c) {
            return;
        }
        let (wait, out_again) = self.copying(c);
        // The link's speed is measured all the time: what changes by little is not booked anew.
        if wait.abs_diff(c.rhythm.lead) > wait / 8 {
            self.edit(id, |c| c.rhythm.lead = wait);
        }
        let Some(c) = self.clients.get(&id) else {
            return;
        };
        let put_off = self.task_of(c).put_off.is_some();
        if !c.rhythm.speaks(now) || now < c.rhythm.retry_at || put_off {
            return;
        }
        let idle = now.since(c.last_touch);
        let foresight = c.rhythm.foresight(idle, wait, wait + out_again);
        if !foresight.worth_it() {
            return;
        }
        let d = self.device_of(c);
        let away = c.away();
        let quiet = d.index.rank.is_empty() && d.gathering.is_none() && !d.over();
        if !quiet || self.limit_room(c.task, c.device) < away {
            self.edit(id, |c| c.rhythm.retry_at = now.after(LATER));
            return;
        }
        let kept = self.thousandths(c.device, self.config.low_mark);
        let short = away.saturating_add(kept).saturating_sub(d.free());
        if short.is_zero() {
            self.bring_back(id, foresight, out);
        } else {
            self.make_room(id, short, foresight, out);
        }
    }

    fn bring_back(&mut self, id: ClientId, foresight: Foresight, out: &mut Vec<Action>) {
        let now = self.now;
        self.edit(id, |c| {
            c.rhythm.ahead = Some(Ahead {
                at: now,
                humble_until: now.after(HUMBLE),
                until: now.after(Duration::from_millis(foresight.within_ms.saturating_mul(2))),
            });
        });
        out.push(Action::BringBack {
            client: id,
            foresight: Some(foresight),
        });
    }

    /// Releases what idles and is not expected so soon, if there is enough of it and the return is still worth that.
    fn make_room(&mut self, id: ClientId, short: Bytes, foresight: Foresight, out: &mut Vec<Action>) {
        let now = self.now;
        let Some(c) = self.clients.get(&id) else {
            return;
        };
        let device = c.device;
        let d = self.device_of(c);
        // What is on its way comes first.
        let mut left = short.saturating_sub(d.sums.ordered);
        let mut orders: Vec<(ClientId, Bytes, Depth)> = Vec::new();
        let mut all = foresight;
        for key in d.index.spare.iter().take(LOOKED_AT) {
            let v = &self.clients[&key.client];
            let n = left.min(self.unused(v));
            if key.client != id && !n.is_zero() && v.order.is_none() && !self.left_alone(v) {
                left = left.saturating_sub(n);
                orders.push((key.client, n, Depth::Unused));
            }
        }
        for key in d.index.idle.iter().take(LOOKED_AT) {
            if left.is_zero() {
                break;
            }
            let v = &self.clients[&key.client];
            let part = self.part_of(v);
            let above = part.sums.held.saturating_sub(part.protected);
            let idle = u64::try_from(now.since(v.last_touch).as_millis()).unwrap_or(u64::MAX);
            let meanwhile = foresight.within_ms.saturating_mul(2);
            let sure = v.rhythm.speaks(now) && v.rhythm.chance(idle, meanwhile) < LIKELY;
            // Of a task with several processes the others would wait for it.
            let alone = self.task_of(v).clients.len() == 1;
            // One that was stopped in the middle of its work will want it back at once.
            let free = v.order.is_none() && !self.left_alone(v) && !self.owed(v) && !self.active(v);
            let taken = orders.iter().any(|(other, ..)| *other == key.client);
            if key.client == id || !sure || !alone || !free || taken {
                continue;
            }
            let n = left.min(v.movable()).min(above.saturating_sub(part.sums.ordered));
            if n.is_zero() {
                continue;
            }
            let chance = u64::from(v.rhythm.chance(idle, meanwhile));
            let copies = d.out.time(v.to_copy(n)).saturating_add(d.back.time(n)) / 1_000_000;
            all.regret_ms = all.regret_ms.saturating_add(copies * chance / 1000);
            left = left.saturating_sub(n);
            orders.push((key.client, n, Depth::Evict));
        }
        if !left.is_zero() || !all.worth_it() {
            self.edit(id, |c| c.rhythm.retry_at = now.after(LATER));
            return;
        }
        let copying = Duration::from_nanos(d.out.time(short));
        self.edit(id, |c| c.rhythm.retry_at = now.after(copying.max(ANSWER)));
        if orders.is_empty() {
            return;
        }
        out.push(Action::Note(Note::RoomAhead {
            device,
            client: id,
            foresight: all,
        }));
        for (victim, bytes, depth) in orders {
            self.order(victim, bytes, depth, ReclaimReason::Foreseen { client: id }, out);
        }
    }
}
