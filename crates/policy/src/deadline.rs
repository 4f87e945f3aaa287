//! When the arbiter wants to be woken.
//!
//! Before that time a tick changes nothing, with one exception that is left to the next event: while one process of a task
//! runs and another waits, the place of the one that waits changes all the time. The one that runs is heard of often, or
//! it becomes idle, and that time is among the deadlines.

use ebb_units::{ClientId, DeviceId};

use crate::Arbiter;
use crate::rank::Candidate;
use crate::schedule::CONSIDERED;
use crate::state::Client;
use crate::time::Time;
use crate::view::ClientState;

impl Arbiter {
    /// When [`crate::Event::Tick`] is due, if nothing else happens before. Always later than the last event.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        let mut next: Option<Time> = None;
        let mut at = |t: Time| {
            if t > self.now && next.is_none_or(|n| t < n) {
                next = Some(t);
            }
        };
        for (id, c) in &self.clients {
            for ask in &c.asks {
                if let Some(t) = self.ask_deadline(*id, ask.id) {
                    at(t);
                }
            }
            if let Some(order) = &c.order {
                at(order.last_progress.after(self.config.order_timeout));
            }
            if let Some(t) = self.idle_release_at(*id) {
                at(t);
            }
            if self.task_of(c).paused {
                at(c.leave_alone_until);
            }
            if c.state == ClientState::Active {
                // Nobody may wait for it, but people look.
                at(c.last_touch.after(self.config.idle_after));
            }
        }
        self.owed_deadlines(&mut at);
        for device in self.devices.keys() {
            self.contention_deadlines(*device, &mut at);
        }
        next
    }

    /// When someone who waits could be served because someone else became idle or had their turn.
    fn contention_deadlines(&self, device: DeviceId, at: &mut impl FnMut(Time)) {
        let sums = self.sums(device);
        let order = self.candidates(device, &sums);
        let over = self.used(device) > self.devices[&device].capacity;
        if order.is_empty() && !over {
            return;
        }
        let could: Vec<Candidate> = order
            .iter()
            .filter(|c| self.possible(c, &sums))
            .take(CONSIDERED)
            .copied()
            .collect();
        for (id, c) in self.on(device) {
            at(c.last_touch.after(self.config.idle_after));
            at(c.last_grant.after(self.config.idle_after));
            at(c.restoring_until);
            at(c.leave_alone_until);
            self.turn_deadlines(id, c, &could, at);
        }
        for candidate in &order {
            at(candidate.since.after(self.config.patience));
            at(candidate.since.after(self.config.starve_after));
        }
    }

    fn turn_deadlines(&self, id: ClientId, c: &Client, order: &[Candidate], at: &mut impl FnMut(Time)) {
        if !self.active(c) || c.suspended() {
            return;
        }
        for candidate in order.iter().filter(|o| o.client != id) {
            at(self.turn_end(c, candidate).max(self.caught_up(c, candidate)));
        }
    }
}
