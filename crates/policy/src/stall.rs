//! Those who cannot give because they wait.
//!
//! ```text
//!            asks                     a reclaim is refused                    served, denied or withdrawn
//! (has GPU work or a capture open) ─> waits ─────────────────────> stalled ───────────────────────────────> lets go
//!                                       ^                             │
//!                                       └──── left alone for long enough: tried again
//! ```
//! An allocation inside a stream capture, or one that work on the GPU waits for, ends before the capture or the work
//! does. Whoever waits in it can neither be evicted nor go on, so that to stand in line behind the one that wants its
//! memory is to wait for oneself. So: a client whose last reclaim was refused is *stalled* as long as it is left alone for
//! that and it, or another process of its task (their work may wait for each other), waits for memory anywhere.
//!
//! What the stalled hold counts as there for nobody. Who needs it is *blocked*: it keeps its place, but room is gathered for
//! the next in line who can be served, and what the blocked have themselves may be taken for that. They wait, so it is quiet.
//!
//! When the stalled are tried again, nothing is taken from anybody else until they gave: if they refuse once more, it would
//! have been for nothing, each time.
//!
//! No refusal that such a wait explains is held against anybody for long: the pauses between the attempts stay short, and
//! when the wait is over the next attempt comes soon.

use core::time::Duration;

use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

use crate::Arbiter;
use crate::rank::Candidate;
use crate::state::Client;
use crate::time::Time;

/// The longest that a client is left alone that waits itself.
pub(crate) const LONGEST: Duration = Duration::from_secs(4);

impl Client {
    /// Is not left alone for longer than that from here on.
    pub(crate) fn alone_for_at_most(&mut self, now: Time, most: Duration) {
        self.leave_alone_until = self.leave_alone_until.min(now.after(most));
    }

    /// It has its answer: what was in the way of giving may be over.
    pub(crate) fn asks_changed(&mut self, now: Time, retry: Duration) {
        if self.asks.is_empty() && !self.pause.is_zero() {
            self.pause = Duration::ZERO;
            self.alone_for_at_most(now, retry);
        }
    }
}

impl Arbiter {
    /// A task waits for memory somewhere.
    fn task_waits(&self, task: TaskId) -> bool {
        self.tasks.get(&task).is_some_and(|t| {
            let mut clients = t.clients.iter().filter_map(|id| self.clients.get(id));
            clients.any(|c| !c.asks.is_empty())
        })
    }

    /// What of a client can be had by nobody until somebody is served.
    pub(crate) fn stalled(&self, c: &Client) -> Bytes {
        if c.left_alone(self.now) && self.task_waits(c.task) {
            c.movable()
        } else {
            Bytes::ZERO
        }
    }

    /// The longest that a client is left alone for another refusal.
    pub(crate) fn longest_pause(&self, id: ClientId) -> Duration {
        let most = self.config.retry_max;
        let waits = self.clients.get(&id).is_some_and(|c| self.task_waits(c.task));
        if waits { most.min(LONGEST) } else { most }
    }

    /// It was refused last time, for what may not be over.
    pub(crate) fn on_trial(&self, id: ClientId) -> bool {
        let c = self.clients.get(&id);
        c.is_some_and(|c| !c.pause.is_zero() && self.task_waits(c.task))
    }

    /// Whether one of those who are to give to somebody, or were told to already, is on trial.
    pub(crate) fn trial(&self, device: DeviceId, mut victims: impl Iterator<Item = ClientId>) -> bool {
        victims.any(|id| self.on_trial(id))
            || self.devices[&device]
                .index
                .orders
                .iter()
                .any(|id| self.on_trial(*id))
    }

    /// A client of the task began to wait or ended, and may have been the last but one: its others are looked at, if a refusal of theirs may count otherwise.
    pub(crate) fn look_at_stalled(&mut self, task: TaskId) {
        let Some(t) = self.tasks.get(&task) else {
            return;
        };
        let alone = |id: &ClientId| {
            let c = self.clients.get(id);
            c.is_some_and(|c| c.left_alone(self.now) || !c.linked.stalled.is_zero())
        };
        let ids: Vec<ClientId> = t.clients.iter().copied().filter(alone).collect();
        for id in ids {
            self.look(id);
        }
    }

    /// All that are stalled on a device have refused whatever was tried for so long that it is no long work: they wait for
    /// each other.
    pub(crate) fn stalled_for_good(&self, device: DeviceId) -> bool {
        let patience = self.config.order_timeout;
        let mut stalled = self.devices[&device]
            .parts
            .values()
            .filter(|part| !part.stalled.is_zero())
            .flat_map(|part| &part.clients)
            .map(|id| &self.clients[id])
            .filter(|c| !c.linked.stalled.is_zero());
        stalled.all(|c| {
            let waits = c
                .waits_since()
                .is_none_or(|since| since.after(patience) <= self.now);
            waits && c.refused_since.after(patience) <= self.now
        })
    }

    /// The most that a client could have on its device if every turn were over and all but the stalled could be evicted.
    pub(crate) fn usable_now(&self, id: ClientId) -> Bytes {
        let client = &self.clients[&id];
        let part = self.part_of(client);
        let own = part.stalled.saturating_sub(client.linked.stalled);
        let others = self.device_of(client).barred.saturating_sub(part.barred);
        self.usable_beside(id, own, others)
    }

    /// Whether a candidate can be served before any of the stalled is.
    pub(crate) fn possible_now(&self, r: &Candidate) -> bool {
        self.served_with(r) <= self.usable_now(r.client)
    }

    /// Whether a client waits and cannot be served at present: it stands in nobody's way.
    pub(crate) fn blocked(&self, id: ClientId, c: &Client) -> bool {
        c.linked
            .rank
            .is_some_and(|key| key.client == id && !self.possible_now(&self.candidate(&key)))
    }
}
