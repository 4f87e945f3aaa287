//! What whoever runs a task should know: that it is to give way, and why memory was refused to it.

use std::fmt::Write;
use std::time::Duration;

use ebb_policy::{DenyReason, Time};
use ebb_protocol::control::{Answer, GoneRow, Payload, TaskNews};
use ebb_units::{Bytes, ClientId, TaskId};

use super::Driver;
use crate::say;

/// How long a task has to save itself when the operator wants it to give way.
pub(super) const BY_RULE: Duration = Duration::from_secs(30);

/// Who asks twice a second and has not for so long has gone.
const HEARD: Duration = Duration::from_secs(10);

/// What is kept of a task until it is asked for.
#[derive(Clone, Debug, Default)]
pub(super) struct News {
    give_way: Option<Time>,
    /// When somebody asked last who has the program give way.
    heard: Option<Time>,
    denials: u64,
    report: Option<String>,
    refused: Option<Time>,
}

/// Tasks that ended after memory was refused to them are remembered so often.
const KEPT: usize = 16;

/// A task that ended after memory was refused to it.
#[derive(Clone, Debug)]
pub(super) struct Gone {
    task: TaskId,
    name: String,
    ended: Time,
    refused: Time,
    report: String,
}

impl Driver {
    /// A task is to save itself.
    pub(super) fn give_way(&mut self, task: TaskId, within: Duration) {
        let at = self.now().after(within);
        let news = self.news.entry(task).or_default();
        news.give_way = Some(news.give_way.map_or(at, |before| before.min(at)));
    }

    pub(super) fn task_of_client(&self, client: ClientId) -> Option<TaskId> {
        let (peer, _) = self.clients.get(&client)?;
        Some(self.peers.get(peer)?.task)
    }

    /// An allocation was refused for good: the program will hear of no memory, and may end for it.
    pub(super) fn note_denial(&mut self, client: ClientId, why: DenyReason) {
        let Some(task) = self.task_of_client(client) else {
            return;
        };
        let report = self.report_denial(task, client, why);
        say::info!("{report}");
        let now = self.now();
        let news = self.news.entry(task).or_default();
        news.refused = Some(now);
        news.denials += 1;
        news.report = Some(report);
    }

    /// A task ended. What was refused to it may be why, and whoever looks for it finds the report.
    pub(super) fn remember_refusals(&mut self, task: TaskId, name: &str) {
        let Some(News {
            report: Some(report),
            refused: Some(refused),
            ..
        }) = self.news.remove(&task)
        else {
            return;
        };
        if self.gone.len() >= KEPT {
            self.gone.pop_front();
        }
        self.gone.push_back(Gone {
            task,
            name: name.into(),
            ended: self.now(),
            refused,
            report,
        });
    }

    /// Tasks that ended after memory was refused to them, by number or name, or all; the oldest first.
    pub(super) fn gone_rows(&self, only: Option<&str>) -> Vec<GoneRow> {
        let now = self.now();
        let millis = |at: Time| u64::try_from(now.since(at).as_millis()).unwrap_or(u64::MAX);
        let meant = |gone: &&Gone| only.is_none_or(|only| gone.task.to_string() == only || gone.name == only);
        self.gone
            .iter()
            .filter(meant)
            .map(|gone| GoneRow {
                task: gone.task,
                name: gone.name.clone(),
                ended_ms: millis(gone.ended),
                refused_ms: millis(gone.refused),
                report: gone.report.clone(),
            })
            .collect()
    }

    fn report_denial(&self, task: TaskId, client: ClientId, why: DenyReason) -> String {
        let view = self.arbiter.snapshot();
        let device = self.clients.get(&client).map(|(_, device)| *device);
        let name = |id: TaskId| {
            self.tasks
                .get(&id)
                .map_or_else(|| id.to_string(), |t| format!("{id} `{}`", t.name))
        };
        let mut text = format!("{} was refused memory: {why}\n", name(task));
        if let Some(card) = view.devices.iter().find(|d| Some(d.device) == device) {
            let _ = writeln!(
                text,
                "the card: {} to give, of which programs outside ebb hold {} and {} are free",
                card.capacity, card.unmanaged, card.free
            );
            for t in &view.tasks {
                let on = t.clients.iter().filter(|c| c.device == card.device);
                let (mut held, mut away, mut state) = (Bytes::ZERO, Bytes::ZERO, Vec::new());
                for c in on {
                    held = held.saturating_add(c.lease).saturating_add(c.overhead);
                    away = away.saturating_add(c.evicted);
                    state.push(c.state.as_str());
                }
                if state.is_empty() {
                    continue;
                }
                state.dedup();
                let _ = writeln!(
                    text,
                    "  {}: {held} on the card, {away} in host memory, request {}, {}",
                    name(t.task),
                    t.request,
                    state.join(", ")
                );
            }
        }
        text += match why {
            DenyReason::OverLimit { .. } => {
                "what to change: a higher --limit (`ebb limit` while it runs), or a smaller batch"
            }
            DenyReason::NeverFits { .. } => {
                "what to change: a smaller batch or a larger card; others that keep what they requested while they idle \
                 (idle_release = off) could lend it"
            }
            DenyReason::Deadlock { .. } => {
                "what to change: requests (--request) for the tasks that share memory with others, so that they do not all \
                 wait with what they hold"
            }
            DenyReason::TimedOut => {
                "what to change: a longer policy.alloc_wait_max, or a request (--request) for it"
            }
        };
        text
    }

    /// Whether somebody is there who has the task give way when it is told to.
    pub(super) fn gives_way(&self, task: TaskId) -> bool {
        let heard = self.news.get(&task).and_then(|news| news.heard);
        heard.is_some_and(|at| self.now().since(at) < HEARD)
    }

    /// What happened to a task; that it is to give way is told once, and to those who care.
    pub(super) fn tell_news(&mut self, task: TaskId, gives_way: bool) -> Answer {
        let tasks = &self.tasks;
        self.news.retain(|id, _| tasks.contains_key(id));
        let now = self.now();
        let news = self.news.entry(task).or_default();
        let left = match gives_way {
            true => {
                news.heard = Some(now);
                news.give_way.take()
            }
            false => None,
        };
        let left = left.map(|at| at.since(now).as_millis());
        Answer::Ok(Payload::News(TaskNews {
            give_way_ms: left.map(|ms| u64::try_from(ms).unwrap_or(u64::MAX)),
            denials: news.denials,
            report: news.report.clone(),
        }))
    }
}
