//! What was decided about each task, kept for `ebb ps --why`.
//!
//! The event log has all of it; here the last decisions of each task are kept in the words of people, with tasks by their
//! names, and those that gave next to those that got. Bounded: a ring for each task, none for tasks that are gone.

use std::collections::{BTreeMap, VecDeque};

use ebb_policy::{Action, Depth, Event, Note, Outcome, Stuck, Time, Wait};
use ebb_protocol::control::{Answer, DecisionRow, GoneRow, Payload, TaskWhy, WaitRow};
use ebb_units::{Bytes, ClientId, TaskId};

use super::Driver;

/// Decisions that are kept of a task.
const KEPT: usize = 32;
/// A restore below this is not worth a line: programs that share a card get one a turn, all of them alike.
const WORTH_A_LINE: Bytes = Bytes::mib(2);

/// The last decisions, by task.
#[derive(Debug, Default)]
pub(super) struct Decisions(BTreeMap<TaskId, VecDeque<(Time, String)>>);

impl Decisions {
    fn push(&mut self, task: TaskId, at: Time, text: String) {
        let ring = self.0.entry(task).or_default();
        if ring.len() >= KEPT {
            ring.pop_front();
        }
        ring.push_back((at, text));
    }

    fn forget(&mut self, task: TaskId) {
        self.0.remove(&task);
    }
}

fn millis(time: core::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A time as people say it.
fn seconds(ms: u64) -> String {
    match ms {
        0..10_000 => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
        10_000..600_000 => format!("{} s", ms / 1000),
        _ => format!("{} min", ms / 60_000),
    }
}

impl Driver {
    /// A client as its task is called.
    fn who(&self, client: ClientId) -> String {
        self.task_of_client(client)
            .map_or_else(|| "a program that is gone".into(), |task| self.called(task))
    }

    pub(super) fn called(&self, task: TaskId) -> String {
        let known = self.tasks.get(&task);
        known.map_or_else(|| task.to_string(), |t| format!("{task} {}", t.name))
    }

    fn note(&mut self, client: ClientId, at: Time, text: String) {
        if let Some(task) = self.task_of_client(client) {
            self.decisions.push(task, at, text);
        }
    }

    /// Something was decided about a task, and not by the arbiter.
    pub(super) fn decided(&mut self, task: TaskId, text: String) {
        let now = self.now();
        self.decisions.push(task, now, text);
    }

    /// Its own library refused it memory.
    pub(super) fn note_refusal(&mut self, client: ClientId, why: &ebb_policy::DenyReason) {
        let now = self.now();
        self.note(client, now, format!("refused for good: {why}"));
    }

    /// What an event says that decisions led to.
    pub(super) fn note_event(&mut self, now: Time, event: &Event) {
        match event {
            Event::Restored {
                client,
                copied,
                nanos,
            } if *copied >= WORTH_A_LINE => {
                let took = seconds(nanos / 1_000_000);
                self.note(*client, now, format!("{copied} came back in {took}"));
            }
            Event::ReclaimDone {
                client,
                outcome,
                copied,
                nanos,
                ..
            } => {
                let text = match outcome {
                    Outcome::Done | Outcome::NothingLeft if *copied < WORTH_A_LINE => return,
                    Outcome::Done | Outcome::NothingLeft => {
                        format!("{copied} left in {}", seconds(nanos / 1_000_000))
                    }
                    Outcome::Busy => "could not give: its work on the GPU did not end in time".into(),
                    Outcome::Failed => "could not give: a call of the driver failed".into(),
                    Outcome::NoRoom => "could not give all of it: host memory is full".into(),
                };
                self.note(*client, now, text);
            }
            Event::TaskRemoved { task } => self.decisions.forget(*task),
            _ => {}
        }
    }

    /// What was decided.
    pub(super) fn note_decision(&mut self, now: Time, action: &Action) {
        match action {
            Action::Reclaim {
                client,
                bytes,
                depth,
                reason,
                grounds,
                ..
            } => {
                let amount = match *bytes {
                    Bytes::MAX => "all of it".to_string(),
                    bytes => bytes.to_string(),
                };
                let what = if *depth == Depth::Unused { "unused " } else { "" };
                let of = if *depth == Depth::Beside {
                    " of what the driver placed for it"
                } else {
                    ""
                };
                let mut why = reason.to_string();
                if let Some(other) = reason.beneficiary() {
                    why = why.replace(&other.to_string(), &self.who(other));
                    let giver = self.who(*client);
                    self.note(
                        other,
                        now,
                        format!("{amount} {what}taken from {giver}: {grounds}"),
                    );
                }
                self.note(*client, now, format!("gives {amount}{of}: {why} ({grounds})"));
            }
            Action::CancelReclaim { client, .. } => {
                self.note(*client, now, "keeps it: nobody needs it any more".into());
            }
            Action::Deny {
                client, reason, last, ..
            } => {
                let again = if *last { "for good" } else { "for now" };
                self.note(*client, now, format!("refused {again}: {reason}"));
            }
            Action::Warn {
                client,
                by,
                within_ms,
            } => {
                let by = self.who(*by);
                let within = seconds(*within_ms);
                self.note(*client, now, format!("is to give way to {by} in {within}"));
            }
            Action::BringBack { client, foresight } => {
                let text = match foresight {
                    Some(foresight) => format!("brought back before it asks: {foresight}"),
                    None => "brought back with the rest of its task".into(),
                };
                self.note(*client, now, text);
            }
            Action::PauseDone { task, left } => {
                let text = format!("paused; {left} of it cannot leave");
                self.decisions.push(*task, now, text);
            }
            Action::LodgingLent {
                client,
                lender: Some(lender),
                bytes,
            } => {
                let card = self.devices.get(lender).map_or(lender.0, |d| d.index);
                self.note(
                    *client,
                    now,
                    format!("{bytes} of it may lie on GPU {card}, which has room"),
                );
            }
            Action::LodgingWanted { client, bytes, .. } => {
                let text = format!("{bytes} of it leave the other card: it is needed there");
                self.note(*client, now, text);
            }
            Action::Note(Note::Reserved { client, bytes }) => {
                self.note(*client, now, format!("is next: {bytes} are gathered for it"));
            }
            Action::Note(Note::ReservationDropped { client }) => {
                let text = "is not next any more: what it needs cannot be had now";
                self.note(*client, now, text.into());
            }
            Action::Note(Note::BackingOff { client, pause_ms, .. }) => {
                let pause = seconds(*pause_ms);
                self.note(*client, now, format!("is left alone for {pause}"));
            }
            Action::Note(Note::RoomAhead {
                client, foresight, ..
            }) => {
                self.note(*client, now, format!("room is made before it asks: {foresight}"));
            }
            Action::Note(Note::GuaranteeCut {
                task,
                request,
                guaranteed,
                ..
            }) => {
                let text =
                    format!("of its request of {request} only {guaranteed} hold: others requested the rest");
                self.decisions.push(*task, now, text);
            }
            _ => {}
        }
    }

    /// What is known of one task, or of all.
    pub(super) fn why(&mut self, only: Option<TaskId>, gone: Vec<GoneRow>) -> Answer {
        self.settle();
        let now = self.now();
        let tasks = self
            .tasks
            .iter()
            .filter(|(id, _)| only.is_none_or(|only| only == **id))
            .map(|(id, task)| TaskWhy {
                task: *id,
                name: task.name.clone(),
                waits: self.waits(*id, now),
                decisions: self
                    .decisions
                    .0
                    .get(id)
                    .into_iter()
                    .flatten()
                    .map(|(at, text)| DecisionRow {
                        ago_ms: millis(now.since(*at)),
                        text: text.clone(),
                    })
                    .collect(),
            })
            .collect();
        Answer::Ok(Payload::Why { tasks, gone })
    }

    fn waits(&self, task: TaskId, now: Time) -> Vec<WaitRow> {
        let mut rows = Vec::new();
        for peer in self.peers.values().filter(|peer| peer.task == task) {
            for (device, client) in &peer.clients {
                let Some(wait) = self.arbiter.waiting(client.id) else {
                    continue;
                };
                rows.push(WaitRow {
                    pid: self.processes.get(&peer.process).map_or(0, |p| p.pid),
                    gpu: self.devices.get(device).map_or(device.0, |d| d.index),
                    waited_ms: millis(now.since(wait.since)),
                    needs: wait.needs,
                    later: wait.later,
                    free: wait.free,
                    coming: wait.coming,
                    short: wait.short(),
                    place: u32::try_from(wait.place).unwrap_or(u32::MAX),
                    text: self.in_words(&wait, now),
                });
            }
        }
        rows
    }

    fn in_words(&self, wait: &Wait, now: Time) -> String {
        let mut text = format!("needs {}", wait.needs);
        if !wait.later.is_zero() {
            text += &format!(" and {} that is away", wait.later);
        }
        text += &format!(": {} free", wait.free);
        if !wait.coming.is_zero() {
            text += &format!(", {} on its way", wait.coming);
        }
        match wait.short() {
            Bytes::ZERO => {}
            short => text += &format!(", {short} missing"),
        }
        match &wait.stuck {
            Some(Stuck::Limit(reason)) => return format!("{text}; {reason}"),
            Some(Stuck::Requested { usable }) => {
                return format!("{text}; what others requested or cannot give leaves {usable} for it");
            }
            Some(Stuck::Stalled { usable }) => {
                return format!(
                    "{text}; others wait as well and are busy until they are served, which leaves {usable} for it"
                );
            }
            None => {}
        }
        if let Some(room) = wait.limit_room {
            text += &format!("; its limit leaves {room}, so the rest has to come from its own task");
        }
        if wait.gathering {
            return text + "; it is next";
        }
        if let Some(before) = wait.behind {
            text += &format!("; {} is served before", self.who(before));
        } else if wait.place > 1 {
            text += &format!("; number {} in line", wait.place);
        }
        if let Some((holder, at)) = wait.turn {
            let left = seconds(millis(at.since(now)));
            text += &format!("; the turn of {} may end in {left}", self.who(holder));
        }
        text
    }
}
