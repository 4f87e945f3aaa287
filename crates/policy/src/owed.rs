//! What a resume and a restore owe a task: that its memory comes back and a short turn with it.
//!
//! ```text
//!            Resume, waits at the gate                    Restored                turn_owed over
//! (paused) ────────────────────────────> owed a restore ───────────> owed a turn ────────────────> nothing owed
//!                 any full grant of a restore  ^                                                        │
//!                                              └────────────────────────────────────────────────────────┘
//! ```
//! Whoever is owed something is no victim, and a pause is *put off* until nothing is owed to any client of the task, for
//! `owed_max` and the time of the copying at the longest. Without that a pause soon after each resume leaves less time
//! than a restore takes, and nothing gets on, however long that lasts.
//!
//! Ranks that wait for each other must be on their cards together: a kernel of one does not end while another is away,
//! and then neither can be evicted. What one pause took from the clients of a task comes back together: the first that
//! asks brings the others along.

use ebb_units::{Bytes, ClientId, TaskId};

use crate::Arbiter;
use crate::action::{Action, ReclaimReason};
use crate::event::AskKind;
use crate::state::Client;
use crate::time::{Time, nanos};

impl Client {
    /// Was taken off its device together with all others of its task.
    fn away_by_pause(&self) -> bool {
        !self.evicted.is_zero() && self.last_reason == Some(ReclaimReason::Paused)
    }
}

impl Arbiter {
    /// Everything is granted to it and it has not had its turn yet, or a resume promised that.
    pub(crate) fn owed(&self, c: &Client) -> bool {
        c.owed_restore || self.now < c.owed_until
    }

    /// What a pause of a task would break: until when it may be put off, if it may.
    fn debt(&self, task: TaskId) -> Option<Time> {
        let mut copy = 0;
        let mut any = false;
        for c in self.tasks.get(&task)?.clients.iter().map(|id| &self.clients[id]) {
            any |= self.owed(c);
            if c.owed_restore {
                let d = self.device_of(c);
                // Room for it may have to be copied out first.
                let bytes = c.evicted.max(c.asked(AskKind::Restore));
                copy = copy.max(d.back.time(bytes).saturating_add(d.out.time(bytes)));
            }
        }
        let most = nanos(self.config.owed_max).saturating_add(copy.saturating_mul(2));
        any.then(|| Time(self.now.0.saturating_add(most)))
    }

    fn clients_of(&self, task: TaskId) -> Vec<ClientId> {
        self.tasks
            .get(&task)
            .map_or_else(Vec::new, |t| t.clients.iter().copied().collect())
    }

    /// Pauses a task: at once, or when it has had what it is owed.
    pub(crate) fn pause(&mut self, task: TaskId) {
        let debt = self.debt(task);
        let Some(t) = self.tasks.get_mut(&task) else {
            return;
        };
        // Asked again: answered again.
        t.pause_told = false;
        self.telling.insert(task);
        if t.paused || t.put_off.is_some() {
            return;
        }
        match debt {
            Some(until) => {
                t.put_off = Some(until);
                self.put_off.insert(task);
            }
            None => self.pause_now(task),
        }
    }

    fn pause_now(&mut self, task: TaskId) {
        let now = self.now;
        self.put_off.remove(&task);
        self.edit_task(task, |t| {
            t.paused = true;
            t.put_off = None;
            t.resumed = false;
        });
        self.telling.insert(task);
        for id in self.clients_of(task) {
            self.edit(id, |c| {
                c.settled = false;
                c.idle_released = false;
                // Somebody asked: try at once, whatever was tried before.
                c.leave_alone_until = now;
                c.restoring_until = now;
                c.forgive(now);
            });
        }
    }

    /// Lets a task run again.
    pub(crate) fn resume(&mut self, task: TaskId, out: &mut Vec<Action>) {
        let now = self.now;
        self.put_off.remove(&task);
        self.telling.remove(&task);
        let Some(t) = self.tasks.get_mut(&task) else {
            return;
        };
        t.pause_told = false;
        t.put_off = None;
        if !t.paused {
            return;
        }
        self.edit_task(task, |t| {
            t.paused = false;
            t.resumed = true;
        });
        let turn = now.after(self.config.turn_owed);
        let mut waits = false;
        for id in self.clients_of(task) {
            let wants = self.edit(id, |c| {
                c.settled = false;
                c.idle_released = false;
                for ask in &mut c.asks {
                    ask.since = now;
                }
                if c.wants_back() {
                    c.owed_restore = true;
                    return true;
                }
                if c.away_by_pause() {
                    // Who waits at the gate may not have said so yet.
                    c.owed_until = turn;
                }
                false
            });
            waits |= wants == Some(true);
        }
        if waits {
            self.bring_gang(task, out);
        }
    }

    /// One of a resumed task wants its memory back: the others that left with it are fetched, too.
    pub(crate) fn bring_gang(&mut self, task: TaskId, out: &mut Vec<Action>) {
        if !self.tasks[&task].resumed {
            return;
        }
        for id in self.clients_of(task) {
            let c = &self.clients[&id];
            if c.owed_restore || !c.away_by_pause() {
                continue;
            }
            if !c.wants_back() {
                out.push(Action::BringBack {
                    client: id,
                    foresight: None,
                });
            }
            self.edit(id, |c| c.owed_restore = true);
        }
    }

    /// Its memory is all there.
    pub(crate) fn now_owed_a_turn(&mut self, client: ClientId) {
        let until = self.now.after(self.config.turn_owed);
        self.edit(client, |c| {
            c.owed_restore = false;
            c.owed_until = until;
        });
    }

    /// Pauses that were put off for long enough take effect.
    pub(crate) fn late_pauses(&mut self) {
        if self.put_off.is_empty() {
            return;
        }
        let over = |id: &TaskId| {
            let until = self.tasks.get(id).and_then(|t| t.put_off);
            until.is_none_or(|until| until <= self.now) || self.debt(*id).is_none()
        };
        let due: Vec<TaskId> = self.put_off.iter().copied().filter(over).collect();
        for task in due {
            self.pause_now(task);
        }
    }
}

impl Client {
    /// Nothing is owed to it any more.
    pub(crate) fn forgive(&mut self, now: Time) {
        self.owed_restore = false;
        self.owed_until = self.owed_until.min(now);
    }

    /// Whoever has nothing away and waits for nothing is owed no restore.
    pub(crate) fn restore_over(&self) -> bool {
        self.owed_restore && self.evicted.is_zero() && self.incoming == Bytes::ZERO && !self.wants_back()
    }
}
