//! How long each part of a task's last hibernation took, and of its way back: shown in listings, for whoever measures it.

use std::collections::BTreeMap;

use ebb_policy::Time;
use ebb_protocol::control::{HibernationRow, PhaseRow};
use ebb_units::TaskId;

use crate::driver::{Driver, PeerId};

/// One task's.
#[derive(Clone, Debug, Default)]
struct Record {
    row: HibernationRow,
    /// When the phase that lasts began.
    since: Time,
    /// It is on its way back.
    waking: bool,
}

/// The records, by task.
#[derive(Debug, Default)]
pub(super) struct Phases(BTreeMap<TaskId, Record>);

impl Driver {
    /// A hibernation begins.
    pub(super) fn going_down(&mut self, task: TaskId) {
        let since = self.now();
        let fresh = Record {
            since,
            ..Record::default()
        };
        self.sleeps.phases.0.insert(task, fresh);
    }

    /// The way back begins, perhaps once more.
    pub(super) fn coming_up(&mut self, task: TaskId) {
        let since = self.now();
        let record = self.sleeps.phases.0.entry(task).or_default();
        record.row.up.clear();
        (record.since, record.waking) = (since, true);
    }

    /// A phase is over.
    pub(super) fn phase(&mut self, task: TaskId, what: &str) {
        let now = self.now();
        let Some(record) = self.sleeps.phases.0.get_mut(&task) else {
            return;
        };
        let phase = PhaseRow {
            what: what.into(),
            ns: u64::try_from(now.since(record.since).as_nanos()).unwrap_or(u64::MAX),
        };
        record.since = now;
        if record.waking {
            &mut record.row.up
        } else {
            &mut record.row.down
        }
        .push(phase);
    }

    /// All of a session's memory is back: if that is the end of a hibernation, it is the last phase.
    pub(in crate::driver) fn restored_after_sleep(&mut self, peer: PeerId) {
        let Some(task) = self.peers.get(&peer).map(|peer| peer.task) else {
            return;
        };
        let over = self
            .sleeps
            .phases
            .0
            .get(&task)
            .is_some_and(|record| record.waking);
        if over && !self.sleeps.tasks.contains_key(&task) {
            self.phase(task, "copied in");
            if let Some(record) = self.sleeps.phases.0.get_mut(&task) {
                record.waking = false;
            }
        }
    }

    pub(in crate::driver) fn hibernation_row(&self, task: TaskId) -> Option<HibernationRow> {
        self.sleeps.phases.0.get(&task).map(|record| record.row.clone())
    }

    pub(in crate::driver) fn forget_phases(&mut self, task: TaskId) {
        self.sleeps.phases.0.remove(&task);
    }
}
