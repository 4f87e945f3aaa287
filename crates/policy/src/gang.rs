//! Ranks: processes of one task on several devices, which wait for each other.
//!
//! ```text
//!            one is to give way, or has to wait            all who asked can be had, everywhere at once
//! (together) ───────────────────────────────> (broken) ─────────────────────────────────────> (together)
//!                                             gives to whoever waits, on every device
//! ```
//! A gang of which one rank is away does nothing: what its other ranks hold is of use to nobody. So as soon as one is told to give way in the
//! middle of its work, the others are victims like those whose turn is over, for whoever waits on their devices; what nobody waits for stays
//! where it is, for moving it would be copying in vain. And none of them comes back alone: room is gathered for a rank only if it
//! can be gathered at that moment on the devices of all others that wait or were sent away in the middle of their work, and then it is gathered on all of them.
//!
//! Not so for what a task requested (it is never refused that, whatever becomes of the other ranks), for who asks for new memory only (nobody
//! knows whether what ranks allocate belongs together, but who is brought back waits for them), and for ranks that could not be served whatever
//! is evicted. Nor for processes of a task on one device.

use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

use crate::Arbiter;
use crate::action::{Action, Depth, Note, ReclaimReason};
use crate::rank::Candidate;
use crate::schedule::Seen;
use crate::state::{Client, RankKey, Task};
use crate::time::Time;

impl Arbiter {
    /// A task's clients on other devices than one of them.
    fn ranks_beside(&self, task: TaskId, device: DeviceId) -> impl Iterator<Item = (ClientId, &Client)> {
        // Most tasks have one client, and mostly it is that one.
        self.beside(self.tasks.get(&task).filter(|t| t.clients.len() > 1), device)
    }

    fn beside<'a>(
        &'a self,
        task: Option<&'a Task>,
        device: DeviceId,
    ) -> impl Iterator<Item = (ClientId, &'a Client)> {
        let ids = task.into_iter().flat_map(|t| &t.clients);
        ids.filter_map(|id| Some((*id, self.clients.get(id)?)))
            .filter(move |(_, c)| c.device != device)
    }

    /// A rank is on its way off its device, or is away and its gang waits for it.
    pub(crate) fn missing(&self, id: ClientId, c: &Client) -> bool {
        let leaves = c.order.as_ref().is_some_and(|o| {
            let turn = matches!(
                o.reason,
                ReclaimReason::TurnEnded { .. } | ReclaimReason::Guarantee { .. }
            );
            turn && o.depth == Depth::Evict && !o.cancelled && c.interrupted
        });
        leaves || (c.suspended() && !self.coming(id, c) && (c.wants_back() || c.interrupted))
    }

    /// It is being brought back, or room for it is made.
    pub(crate) fn coming(&self, id: ClientId, c: &Client) -> bool {
        c.suspended() && (self.restoring(c) || self.device_of(c).gathering == Some(id))
    }

    /// It is there, and another rank of its gang comes.
    pub(crate) fn expects(&self, c: &Client) -> bool {
        !c.suspended()
            && self
                .ranks_beside(c.task, c.device)
                .any(|(_, other)| other.linked.coming)
    }

    /// Another rank of its gang is missing.
    pub(crate) fn broken(&self, c: &Client) -> bool {
        let mut others = self.ranks_beside(c.task, c.device);
        others.any(|(_, other)| other.linked.missing)
    }

    /// Since when a client's gang waits: all of its ranks have the same place, wherever they are.
    pub(crate) fn gang_waits_since(&self, c: &Client) -> Option<Time> {
        let others = self.ranks_beside(c.task, c.device);
        let since = others.filter_map(|(_, other)| other.linked.waits_since);
        since.chain(c.waits_since()).min()
    }

    /// One of them is missing, or not any more.
    pub(crate) fn look_at_gang(&mut self, task: TaskId, device: DeviceId) {
        // Also if a single one is left: it is no rank of anything any more.
        let beside = self.beside(self.tasks.get(&task), device);
        for id in beside.map(|(id, _)| id).collect::<Vec<ClientId>>() {
            self.look(id);
        }
    }

    /// Those of a candidate's gang that have to come with it: where they stand in their lines, or will if they have not asked yet.
    fn comes_with(&self, r: &Candidate) -> Vec<(DeviceId, bool, Candidate)> {
        let device = self.clients[&r.client].device;
        let away = |c: &Client| !self.restoring(c) && (!c.asks.is_empty() || c.suspended() && c.interrupted);
        let others = self.ranks_beside(r.task, device).filter(|(_, c)| away(c));
        let place = |(client, c): (ClientId, &Client)| match c.linked.rank {
            Some(key) => (c.device, true, self.candidate(&key)),
            None => {
                let need = c.away();
                let will = Candidate {
                    client,
                    key: RankKey { client, ..r.key },
                    guaranteed: false,
                    need,
                    short: need.saturating_sub(self.free(c.device)),
                    later: Bytes::ZERO,
                    copy_in: need,
                    stalled: false,
                    ..*r
                };
                (c.device, false, will)
            }
        };
        others.map(place).collect()
    }

    /// Whether all of a candidate's gang that is away can come back with it now.
    pub(crate) fn gang_can(&self, r: &Candidate) -> bool {
        // Most tasks have one client, and most asks are for what is new.
        if r.guaranteed || r.copy_in.is_zero() || self.tasks[&r.task].clients.len() <= 1 {
            return true;
        }
        self.comes_with(r)
            .iter()
            .all(|(device, _, other)| match self.devices[device].gathering {
                Some(g) => g == other.client || other.guaranteed || !self.possible_now(other),
                None => !self.possible_now(other) || self.could_gather(*device, other),
            })
    }

    fn could_gather(&self, device: DeviceId, r: &Candidate) -> bool {
        let first = self.first_in_line(device);
        let passed = first.is_none_or(|first| !first.starving || first.client == r.client);
        passed && self.plan(device, r, &Seen::default()).enough
    }

    /// Room is gathered for a candidate, or it was served: it is gathered for the others of its gang as well.
    pub(crate) fn gather_gang(&mut self, r: &Candidate, out: &mut Vec<Action>) {
        if r.copy_in.is_zero() || self.tasks[&r.task].clients.len() <= 1 {
            return;
        }
        for (device, asked, other) in self.comes_with(r) {
            if !asked {
                // It was told to come back when the first of them asked, and may have been on its way out.
                out.push(Action::BringBack {
                    client: other.client,
                    foresight: None,
                });
                continue;
            }
            if self.devices[&device].gathering.is_some() {
                continue;
            }
            let plan = self.plan(device, &other, &Seen::default());
            if !plan.enough {
                continue;
            }
            out.push(Action::Note(Note::Reserved {
                client: other.client,
                bytes: other.need,
            }));
            self.set_gathering(device, Some(other.client));
            self.turn_costs(device, &other, &plan);
            if let Some(d) = self.devices.get_mut(&device) {
                d.again = true;
            }
            self.touch_device(device);
        }
    }

    /// A rank wants its memory back: those that were sent away in the middle of their work as it was are told to ask, too.
    pub(crate) fn bring_ranks(&self, task: TaskId, device: DeviceId, out: &mut Vec<Action>) {
        for (client, c) in self.ranks_beside(task, device) {
            if c.interrupted && !c.evicted.is_zero() && c.asks.is_empty() && !self.restoring(c) {
                out.push(Action::BringBack {
                    client,
                    foresight: None,
                });
            }
        }
    }
}
