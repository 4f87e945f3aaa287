//! `ebb trim`: libraries are asked for what they keep for later. They give lease back as they always do; here is only who waits for the sum.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ebb_protocol::ToLayer;
use ebb_protocol::control::{Answer, Payload, TrimmedTask};
use ebb_units::{Bytes, DeviceId, TaskId};

use super::control::{Figures, Reply};
use super::timers::Timer;
use super::{ControlId, Driver, PeerId};

/// How long a library has: it waits for nothing, but a moment's eviction goes first.
const WAIT: Duration = Duration::from_secs(10);

/// What a trim is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Then {
    /// The sum is told.
    Tell,
    /// A task's figures are changed, which what it kept was in the way of.
    Change(TaskId, Figures),
}

/// Somebody waits for what tasks give back.
#[derive(Debug)]
pub(super) struct TrimWait {
    pub control: ControlId,
    /// What is done then.
    then: Then,
    /// Who has not answered yet.
    open: BTreeSet<(PeerId, DeviceId)>,
    tasks: BTreeMap<TaskId, TrimmedTask>,
    /// The task of each that was asked.
    of: BTreeMap<PeerId, TaskId>,
}

impl Driver {
    /// Asks the processes of these tasks.
    pub(super) fn trim(&mut self, control: ControlId, tasks: &[TaskId], then: Then) -> Reply {
        let query = self.new_id();
        let mut wait = TrimWait {
            control,
            then,
            open: BTreeSet::new(),
            tasks: BTreeMap::new(),
            of: BTreeMap::new(),
        };
        for task in tasks {
            let name = self
                .tasks
                .get(task)
                .map_or_else(String::new, |known| known.name.clone());
            let row = TrimmedTask {
                task: *task,
                name,
                bytes: Bytes::ZERO,
                silent: 0,
            };
            wait.tasks.insert(*task, row);
        }
        for (id, peer) in &self.peers {
            // One that sleeps has nothing on a card.
            if wait.tasks.contains_key(&peer.task) && peer.conn.is_some() && !self.is_down(*id) {
                wait.of.insert(*id, peer.task);
                wait.open.extend(peer.clients.keys().map(|device| (*id, *device)));
            }
        }
        let asked: Vec<(PeerId, DeviceId)> = wait.open.iter().copied().collect();
        self.trims.insert(query, wait);
        for (peer, device) in asked {
            let device = device.0;
            self.send(peer, &ToLayer::Trim { device, query }, Vec::new());
        }
        self.after(WAIT, Timer::Trim(query));
        self.end_trim(query, false);
        Reply::Later
    }

    /// A library has given back what it kept on a card.
    pub(super) fn trimmed(&mut self, peer: PeerId, device: DeviceId, query: u64, bytes: Bytes) {
        if let Some(wait) = self.trims.get_mut(&query)
            && wait.open.remove(&(peer, device))
        {
            if let Some(row) = wait.of.get(&peer).and_then(|task| wait.tasks.get_mut(task)) {
                row.bytes = row.bytes.saturating_add(bytes);
            }
            self.end_trim(query, false);
        }
    }

    pub(super) fn trim_timed_out(&mut self, query: u64) {
        self.end_trim(query, true);
    }

    /// A library that was asked hung up.
    pub(super) fn fail_trims(&mut self, peer: PeerId) {
        let queries: Vec<u64> = self.trims.keys().copied().collect();
        for query in queries {
            if let Some(wait) = self.trims.get_mut(&query) {
                wait.fail(|open| open.0 == peer);
            }
            self.end_trim(query, false);
        }
    }

    /// Answers, if nobody is asked any more or the time is over.
    fn end_trim(&mut self, query: u64, over: bool) {
        let ends = self
            .trims
            .get(&query)
            .is_some_and(|wait| over || wait.open.is_empty());
        if let Some(mut wait) = ends.then(|| self.trims.remove(&query)).flatten() {
            wait.fail(|_| true);
            match wait.then {
                Then::Tell => {
                    let tasks = wait.tasks.into_values().collect();
                    self.answer(wait.control, &Answer::Ok(Payload::Trimmed { tasks }));
                }
                Then::Change(task, figures) => match self.change(task, figures, None) {
                    Reply::Now(answer) => self.answer(wait.control, &answer),
                    Reply::Saved(answer) => self.answer_saved(wait.control, answer),
                    Reply::Later => {}
                },
            }
        }
    }
}

impl TrimWait {
    /// These do not answer.
    fn fail(&mut self, which: impl Fn(&(PeerId, DeviceId)) -> bool) {
        let silent: BTreeSet<PeerId> = self
            .open
            .extract_if(.., |open| which(open))
            .map(|open| open.0)
            .collect();
        for peer in silent {
            if let Some(row) = self.of.get(&peer).and_then(|task| self.tasks.get_mut(task)) {
                row.silent += 1;
            }
        }
    }
}
