//! When the arbiter wants to be woken.
//!
//! Each client has a wake ([`crate::book`]), each device on which somebody waits a time at which the next turn may end.
//! Before the first of these a tick changes nothing, with one exception that is left to the next event: while one process of a
//! task runs and another waits, the place of the one that waits changes all the time. The one that runs is heard of often,
//! or it becomes idle, and that time is among the wakes.

use core::time::Duration;

use ebb_units::{ClientId, DeviceId};

use crate::Arbiter;
use crate::event::AskKind;
use crate::rank::{CONSIDERED, CROWD, Candidate, Holder, LOOKED_AT};
use crate::state::{Ask, Client};
use crate::time::Time;

/// Use of the GPU is heard of within that time.
const HEARD: Duration = Duration::from_millis(200);

impl Arbiter {
    /// When [`crate::Event::Tick`] is due, if nothing else happens before. Always later than the last event. A tick at that
    /// time may find nothing to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        let wake = self.wakes.first().map(|(at, _)| *at);
        let turn = self.rechecks.first().map(|(at, _)| *at);
        let pause = self
            .put_off
            .iter()
            .filter_map(|task| self.tasks[task].put_off)
            .min();
        [wake, turn, pause]
            .into_iter()
            .flatten()
            .filter(|at| *at > self.now)
            .min()
    }

    /// Lets time pass: whoever is due is looked at anew.
    pub(crate) fn advance(&mut self, now: Time) {
        if now <= self.now {
            return;
        }
        self.now = now;
        while let Some((at, id)) = self.wakes.first().copied().filter(|(at, _)| *at <= now) {
            self.wakes.remove(&(at, id));
            if let Some(c) = self.clients.get_mut(&id) {
                c.linked.wake = None;
                self.look(id);
            }
        }
        while let Some((at, device)) = self.rechecks.first().copied().filter(|(at, _)| *at <= now) {
            self.rechecks.remove(&(at, device));
            if let Some(d) = self.devices.get_mut(&device) {
                d.recheck = None;
                d.again = true;
            }
            self.touch_device(device);
        }
    }

    /// The next moment at which time alone may change what is to be done about a client.
    pub(crate) fn next_wake(&self, id: ClientId, c: &Client) -> Option<Time> {
        let config = &self.config;
        let mut next: Option<Time> = None;
        let mut at = |t: Time| {
            if t > self.now && next.is_none_or(|n| t < n) {
                next = Some(t);
            }
        };
        at(c.active_until(config));
        at(c.restoring_until);
        at(c.leave_alone_until);
        at(c.owed_until);
        if !c.unused.is_zero() {
            at(c.last_grant.after(config.idle_after));
        }
        if let Some((warned, _)) = c.warned {
            at(warned.after(config.preempt_grace));
        }
        if let Some(order) = &c.order {
            at(order.last_progress.after(config.order_timeout));
        }
        for a in &c.asks {
            if let Some(t) = self.ask_deadline(id, c, a) {
                at(t);
            }
            at(a.since.after(config.patience));
            if let Some(since) = self.gang_waits_since(c) {
                at(since.after(config.starve_after));
            }
        }
        if let Some(t) = self.idle_release_at(c) {
            at(t);
        }
        if let Some(t) = self.foresee_at(c) {
            at(t);
        }
        next
    }

    /// When an ask is denied for having waited, if ever.
    pub(crate) fn ask_deadline(&self, id: ClientId, c: &Client, a: &Ask) -> Option<Time> {
        if self.task_of(c).paused {
            return None;
        }
        let patient = a.since.after(self.config.alloc_wait_max);
        match a.kind {
            AskKind::Alloc if a.long => Some(patient),
            // One that is being served is worth waiting for.
            AskKind::Alloc if self.device_of(c).gathering == Some(id) => Some(patient),
            AskKind::Alloc => Some(a.since.after(self.config.alloc_wait).min(patient)),
            AskKind::Restore => self.restore_over_limit(c).is_some().then_some(patient),
        }
    }

    /// How long a client that is released after so long must not have used the GPU: no less than what it takes to hear of use.
    fn rest(&self, wait: Duration) -> Duration {
        wait.max(HEARD.min(self.config.idle_after))
    }

    /// Whether a client that is released by a time of its own has rested as long, although others still count it as one that works.
    pub(crate) fn has_rested(&self, c: &Client) -> bool {
        let wait = self.task_of(c).spec.idle_release;
        let rested = wait.is_some_and(|wait| c.last_touch.after(self.rest(wait)) <= self.now);
        rested && !self.restoring(c) && !(c.busy && self.left_alone(c))
    }

    /// When a client's memory is released unasked, if it is to be.
    pub(crate) fn idle_release_at(&self, c: &Client) -> Option<Time> {
        let t = self.task_of(c);
        let wait = t.spec.idle_release?;
        if t.paused || c.idle_released || c.order.is_some() || !c.asks.is_empty() || c.movable().is_zero() {
            return None;
        }
        let idle = c.last_touch.after(self.rest(wait));
        let mut at = idle.max(c.restoring_until).max(c.last_grant.after(wait));
        if c.left_alone(self.now) {
            at = at.max(c.leave_alone_until);
        }
        Some(at)
    }

    /// Sets when someone who waits on a device could be served because someone else had their turn.
    /// `seen`: those who run, if they are known and nothing has changed since.
    pub(crate) fn set_recheck(&mut self, device: DeviceId, seen: Option<&[Holder]>) {
        let mut next: Option<Time> = None;
        let mut looked = None;
        let d = &self.devices[&device];
        if d.index.rank.is_empty() || d.index.running.is_empty() {
            // Nobody waits for a turn to end.
        } else if d.crowded() && d.gathering.is_some() {
            // The plan for the one who gathers holds. If it fails, that is an event, or the end of an order's time.
            next = d.recheck.filter(|at| *at > self.now);
            next = next.or_else(|| Some(self.now.after(CROWD * 10)));
        } else if self.looked_lately(d) {
            next = d.looked.map(|at| at.after(CROWD));
        } else {
            looked = Some(self.now);
            let waiting = d.index.rank.iter().take(LOOKED_AT).map(|key| self.candidate(key));
            let waiting: Vec<Candidate> = waiting
                .filter(|c| !c.humble && self.possible_now(c))
                .take(CONSIDERED)
                .collect();
            if !waiting.is_empty() {
                next = match seen {
                    Some(holders) => self.next_turn(device, holders, &waiting),
                    None => self.next_turn(device, &self.holders(device), &waiting),
                };
            }
        }
        let late = d.lodgers.next_late(self.config.order_timeout);
        next = next.into_iter().chain(late).min();
        let Some(d) = self.devices.get_mut(&device) else {
            return;
        };
        d.looked = looked.or(d.looked);
        if d.recheck == next {
            return;
        }
        if let Some(old) = d.recheck {
            self.rechecks.remove(&(old, device));
        }
        if let Some(new) = next {
            self.rechecks.insert((new, device));
        }
        d.recheck = next;
    }
}
