//! Processes on our cards that passed us by: who they are, what they hold, and why they are not ours, as far as that can be seen.
//!
//! NVML shows a process, the ledger has no account of it on that card. Its bytes are promised to nobody. Where its environment names a
//! task, they count against that task's limit as well: a child that gets round the library does not get round the limit of the rest.

use std::collections::BTreeMap;

use ebb_protocol::control::StrangerRow;
use ebb_units::{Bytes, DeviceId, TaskId};

use super::Driver;
use crate::eventlog::Record;
use crate::nvml::Card;
use crate::say;

/// One of them, on one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stranger {
    pub bytes: Bytes,
    program: String,
    task: Option<TaskId>,
    why: &'static str,
}

impl Driver {
    /// Takes over who is on a card without an account there. Tells of those that come and go.
    pub(super) fn see_strangers(&mut self, id: DeviceId, card: &Card, foreign: &[(u32, Bytes)]) {
        let mut now = BTreeMap::new();
        for (pid, bytes) in foreign {
            let facts = card.facts.get(pid);
            let stranger = Stranger {
                bytes: *bytes,
                program: facts.map_or_else(String::new, |facts| super::tasks::clean_name(&facts.program)),
                task: facts
                    .and_then(|facts| facts.token.as_ref())
                    .and_then(|token| self.tokens.get(token))
                    .copied(),
                why: facts.map_or("it has ended, or cannot be seen from here", |facts| {
                    facts.why.text()
                }),
            };
            now.insert(*pid, stranger);
        }
        let Some(device) = self.devices.get_mut(&id) else {
            return;
        };
        if device.strangers == now {
            return;
        }
        let (uuid, index) = (device.uuid, device.index);
        let before = std::mem::replace(&mut device.strangers, now.clone());
        let t = self.now();
        let mut record = |pid: u32, stranger: &Stranger, bytes: Bytes| {
            if let Some(log) = &mut self.log {
                log.push(&Record::Stranger {
                    t,
                    device: uuid,
                    pid,
                    program: stranger.program.clone(),
                    bytes,
                    why: stranger.why.into(),
                });
            }
        };
        for (pid, stranger) in &now {
            if !before.contains_key(pid) {
                let (program, bytes, why) = (&stranger.program, stranger.bytes, stranger.why);
                say::warning!(
                    "process {pid} ({program}) holds {bytes} of GPU {index} and is not managed: {why}"
                );
                record(*pid, stranger, stranger.bytes);
            }
        }
        for (pid, stranger) in &before {
            if !now.contains_key(pid) {
                say::info!("process {pid} ({}) has left GPU {index}", stranger.program);
                record(*pid, stranger, Bytes::ZERO);
            }
        }
        let tasks = before
            .values()
            .chain(now.values())
            .filter_map(|stranger| stranger.task);
        self.dirty_tasks.extend(tasks);
    }

    /// What processes of a task hold on a card past the library.
    pub(super) fn strange_bytes(&self, task: TaskId, device: DeviceId) -> Bytes {
        self.devices.get(&device).map_or(Bytes::ZERO, |device| {
            device
                .strangers
                .values()
                .filter(|stranger| stranger.task == Some(task))
                .map(|stranger| stranger.bytes)
                .sum()
        })
    }

    /// For `ebb doctor`: where a process that is not ours is and why it is not, and what to do about it.
    pub(super) fn stranger_named(&self, pid: u32) -> Option<(String, &'static str)> {
        self.devices.values().find_map(|device| {
            let stranger = device.strangers.get(&pid)?;
            let message = format!(
                "process {pid} ({}) holds {} of GPU {} and is not managed: {}",
                stranger.program, stranger.bytes, device.index, stranger.why
            );
            let fix = if stranger.task.is_some() {
                "what it holds counts against its task's limit and is promised to nobody; start a program that the library can be loaded into"
            } else {
                "start it with `ebb run`, or leave it: what it holds is promised to nobody"
            };
            Some((message, fix))
        })
    }
}

/// For people, the largest first.
pub(super) fn rows(strangers: &BTreeMap<u32, Stranger>) -> Vec<StrangerRow> {
    let mut rows: Vec<StrangerRow> = strangers
        .iter()
        .map(|(pid, stranger)| StrangerRow {
            pid: *pid,
            program: stranger.program.clone(),
            task: stranger.task,
            bytes: stranger.bytes,
            why: stranger.why.into(),
        })
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    rows
}
