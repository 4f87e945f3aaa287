//! Tasks and the processes that keep them: who they are, when they end, what a restarted daemon knows of them.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::time::Duration;

use ebb_policy::{Event, Refusal, TaskSpec};
use ebb_protocol::control::{Answer, Failure, NewTask, Payload};
use ebb_units::{Bytes, ClientId, DeviceUuid, TaskId};
use rustix::event::epoll;
use rustix::process::{Pid, PidfdFlags};

use super::control::Reply;
use super::timers::Timer;
use super::{ControlId, Driver, PeerId, ProcessKey, Source};
use crate::statefile::{SavedProcess, SavedTask, StateFile, from_hex, hex};
use crate::{process, say};

/// The longest name of a task, in characters.
const MAX_NAME: usize = 64;
/// How many ended tasks are remembered for a child that connects late.
const MAX_RETIRED: usize = 1024;

/// One `ebb run`, or one process that came without.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub name: String,
    pub owner: u32,
    pub spec: TaskSpec,
    pub paused: bool,
    /// How long after a release for idleness it is hibernated unasked.
    pub hibernate_after: Option<Duration>,
    /// What names it; `None` for a process that came without.
    pub token: Option<[u8; 32]>,
    /// It lives as long as one of these.
    pub keepers: BTreeSet<ProcessKey>,
}

/// A task that ended. A child of its program may still be on its way to us, and gets the same limits.
#[derive(Clone, Debug)]
pub(super) struct Retired {
    token: [u8; 32],
    name: String,
    owner: u32,
    spec: TaskSpec,
    hibernate_after: Option<Duration>,
}

/// A process, by pidfd: known dead the moment that it is.
#[derive(Debug)]
pub(super) struct Process {
    pub pid: u32,
    pub start: u64,
    pub uid: u32,
    pub cgroup: String,
    pidfd: OwnedFd,
    /// Its sessions; more than one if the library is loaded more than once.
    pub peers: BTreeSet<PeerId>,
}

/// After a restart: what is waited for before anything is granted.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    waiting: BTreeSet<ProcessKey>,
    /// What came meanwhile.
    asks: Vec<Event>,
}

impl Driver {
    /// The process at the other end of a connection.
    pub(super) fn process_of(&mut self, pid: u32, uid: u32, pidfd: Option<OwnedFd>) -> Option<ProcessKey> {
        let start = process::start_time(pid)?;
        if let Some(key) = self.by_pid.get(&pid).copied() {
            if self.processes.get(&key).is_some_and(|known| known.start == start) {
                return Some(key);
            }
            // The pid was used again; the old process's death is about to be told.
            self.process_died(key);
        }
        let pidfd = match pidfd {
            Some(fd) => fd,
            None => {
                let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
                rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?
            }
        };
        let key = self.new_id();
        // A dead one is readable at once: its end is then handled like any other.
        self.watch(&pidfd, Source::Death(key), epoll::EventFlags::IN)
            .ok()?;
        let cgroup = process::cgroup(pid);
        self.processes.insert(
            key,
            Process {
                pid,
                start,
                uid,
                cgroup,
                pidfd,
                peers: BTreeSet::new(),
            },
        );
        self.by_pid.insert(pid, key);
        Some(key)
    }

    /// A process is dead: all that it held is free, now.
    pub(super) fn process_died(&mut self, key: ProcessKey) {
        let Some(dead) = self.processes.remove(&key) else {
            return;
        };
        let _ = epoll::delete(&self.epoll, &dead.pidfd);
        if self.by_pid.get(&dead.pid) == Some(&key) {
            self.by_pid.remove(&dead.pid);
        }
        if !dead.peers.is_empty() {
            self.note_departed(dead.pid);
        }
        for peer in dead.peers {
            self.remove_peer(peer);
        }
        let tasks: Vec<TaskId> = self
            .tasks
            .iter()
            .filter(|(_, task)| task.keepers.contains(&key))
            .map(|(id, _)| *id)
            .collect();
        for id in tasks {
            if let Some(task) = self.tasks.get_mut(&id) {
                task.keepers.remove(&key);
                if task.keepers.is_empty() {
                    self.end_task(id);
                }
            }
        }
        self.recovered(key);
        self.state_dirty = true;
        self.look_at_cards();
    }

    fn end_task(&mut self, id: TaskId) {
        let Some(task) = self.tasks.remove(&id) else {
            return;
        };
        self.remember_refusals(id, &task.name);
        self.feed(Event::TaskRemoved { task: id });
        self.dirty_tasks.remove(&id);
        self.forget_phases(id);
        self.fail_pauses(id);
        if let Some(token) = task.token {
            self.tokens.remove(&token);
            self.retired.push_back(Retired {
                token,
                name: task.name,
                owner: task.owner,
                spec: task.spec,
                hibernate_after: task.hibernate_after,
            });
            if self.retired.len() > MAX_RETIRED {
                self.retired.pop_front();
            }
        }
        self.state_dirty = true;
    }

    fn add_task(&mut self, task: Task, adopt: bool) -> Result<TaskId, Refusal> {
        let id = TaskId(self.next_task);
        self.next_task += 1;
        self.add_task_as(id, task, adopt)?;
        Ok(id)
    }

    fn add_task_as(&mut self, id: TaskId, task: Task, adopt: bool) -> Result<(), Refusal> {
        // Which of several cards it will use is the program's choice.
        let devices = if self.devices.len() == 1 {
            self.devices.keys().copied().collect()
        } else {
            Vec::new()
        };
        self.decide(
            id,
            Event::TaskAdded {
                task: id,
                spec: task.spec.clone(),
                devices,
                adopt,
            },
        )?;
        if let Some(token) = task.token {
            self.tokens.insert(token, id);
        }
        self.tasks.insert(id, task);
        self.state_dirty = true;
        Ok(())
    }

    /// The task that a session belongs to: by its token, else one of its own.
    pub(super) fn task_for(&mut self, token: &[u8; 32], key: ProcessKey, program: &str) -> Option<TaskId> {
        let owner = self.processes.get(&key)?.uid;
        let known = self.tokens.get(token).copied();
        let id = if let Some(id) = known {
            id
        } else {
            let retired = self
                .retired
                .iter()
                .position(|old| old.token == *token && old.token != [0; 32]);
            let task = match retired.and_then(|at| self.retired.remove(at)) {
                Some(old) => Task {
                    name: old.name,
                    owner: old.owner,
                    spec: old.spec,
                    paused: false,
                    hibernate_after: old.hibernate_after,
                    token: Some(old.token),
                    keepers: BTreeSet::new(),
                },
                None => Task {
                    name: clean_name(program),
                    owner,
                    spec: self.config.task.clone(),
                    paused: false,
                    hibernate_after: self.config.hibernate_after,
                    token: None,
                    keepers: BTreeSet::new(),
                },
            };
            // The program runs already, whatever the sums say.
            self.add_task(task, true).ok()?
        };
        self.tasks.get_mut(&id)?.keepers.insert(key);
        self.state_dirty = true;
        Some(id)
    }

    /// `ebb run` asks for a task whose first process it is.
    pub(super) fn create_task(&mut self, control: ControlId, new: NewTask) -> Reply {
        let refuse = |message: String, fix: &str| {
            Reply::Now(Answer::Error(Failure {
                message,
                fix: Some(fix.into()),
                usage: true,
            }))
        };
        let Some((pid, uid)) = self.controls.get(&control).map(|c| (c.cred.pid, c.cred.uid)) else {
            return Reply::Later;
        };
        if let Some(failure) = self.figures_fail(new.request, new.limit) {
            return Reply::Now(Answer::Error(failure));
        }
        let pidfd = self
            .controls
            .get(&control)
            .and_then(|c| crate::sys::peer_pidfd(&c.fd));
        let Some(key) = self.process_of(pid, uid, pidfd) else {
            return refuse(
                "the daemon cannot see your process: it lives in another pid namespace".into(),
                "run the daemon with the host's pid namespace",
            );
        };
        let token = match process::random_token() {
            Ok(token) => token,
            Err(e) => {
                let message = format!("no random numbers for a token: {e}");
                return Reply::Now(Answer::Error(Failure {
                    message,
                    fix: None,
                    usage: false,
                }));
            }
        };
        let idle_release = match new.idle_release_ms {
            None => self.config.task.idle_release,
            Some(0) => None,
            Some(ms) => Some(Duration::from_millis(ms)),
        };
        let spec = TaskSpec {
            request: new.request,
            limit: new.limit,
            priority: new.priority,
            idle_release,
            tenant: ebb_policy::Tenant(uid),
        };
        let task = Task {
            name: clean_name(&new.name),
            owner: uid,
            spec,
            paused: false,
            hibernate_after: match new.hibernate_after_ms {
                None => self.config.hibernate_after,
                Some(0) => None,
                Some(ms) => Some(Duration::from_millis(ms)),
            },
            token: Some(token),
            keepers: BTreeSet::from([key]),
        };
        match self.add_task(task, false) {
            Ok(id) => {
                say::info!("{id} `{}` of user {uid}, pid {pid}", self.tasks[&id].name);
                Reply::Saved(Answer::Ok(Payload::Task {
                    task: id,
                    token: hex(&token),
                }))
            }
            Err(why) => {
                self.forget_unless_used(key);
                let fix = "lower the request, or wait until other tasks have ended (`ebb ps` lists them)";
                refuse(self.explain(&why), fix)
            }
        }
    }

    /// A process that nothing here depends on is no longer watched.
    pub(super) fn forget_unless_used(&mut self, key: ProcessKey) {
        let used = self.tasks.values().any(|task| task.keepers.contains(&key))
            || self.conns.values().any(|conn| conn.process == key)
            || self
                .recovery
                .as_ref()
                .is_some_and(|recovery| recovery.waiting.contains(&key))
            || self
                .processes
                .get(&key)
                .is_some_and(|process| !process.peers.is_empty());
        if !used && let Some(process) = self.processes.remove(&key) {
            let _ = epoll::delete(&self.epoll, &process.pidfd);
            self.by_pid.remove(&process.pid);
        }
    }

    /// What is wrong with figures that no card could satisfy.
    pub(super) fn figures_fail(&self, request: Bytes, limit: Option<Bytes>) -> Option<Failure> {
        let usage = |message: String, fix: String| {
            Some(Failure {
                message,
                fix: Some(fix),
                usage: true,
            })
        };
        if let Some(limit) = limit {
            if request > limit {
                return usage(
                    format!("the request of {request} is above the limit of {limit}"),
                    "raise the limit or lower the request".into(),
                );
            }
            if limit.is_zero() {
                return usage(
                    "a limit of 0 B leaves nothing to run on".into(),
                    "leave the limit out for the whole card".into(),
                );
            }
        }
        let largest = self.devices.values().max_by_key(|device| device.total)?;
        if let Some(limit) = limit
            && limit > largest.total
        {
            return usage(
                format!(
                    "the limit of {limit} is above the card: {} has {}",
                    largest.name, largest.total
                ),
                format!(
                    "set a limit of at most {}, or leave it out",
                    largest.total.to_quantity()
                ),
            );
        }
        let roomiest = self.devices.values().max_by_key(|device| device.capacity())?;
        if request > roomiest.capacity() {
            return usage(
                format!(
                    "the request of {request} is above what tasks can get of {}: {} of {}",
                    roomiest.name,
                    roomiest.capacity(),
                    roomiest.total
                ),
                format!("request at most {}", roomiest.capacity().to_quantity()),
            );
        }
        None
    }

    /// The arbiter's reason, with the card's name for its number.
    pub(super) fn explain(&self, why: &Refusal) -> String {
        let mut text = why.to_string();
        for (id, device) in &self.devices {
            text = text.replace(
                &id.to_string(),
                &format!("card {} ({})", device.index, device.name),
            );
        }
        text
    }

    /// Takes on what an earlier daemon left.
    pub(super) fn recover(&mut self, saved: StateFile) {
        let mut recovery = Recovery::default();
        for SavedTask {
            task: id,
            token,
            owner,
            name,
            spec,
            paused,
            hibernate_after,
            processes,
        } in saved.tasks
        {
            let mut keepers = BTreeSet::new();
            for SavedProcess { pid, start, attached } in processes {
                if !process::lives(pid, start) {
                    continue;
                }
                // Its user is known for certain once it connects.
                let Some(key) = self.process_of(pid, owner, None) else {
                    continue;
                };
                keepers.insert(key);
                if attached {
                    recovery.waiting.insert(key);
                }
            }
            if keepers.is_empty() {
                continue;
            }
            let task = Task {
                name,
                owner,
                spec,
                paused,
                hibernate_after,
                token: from_hex(&token),
                keepers,
            };
            // With a token its sessions find it. Without, each makes its own again.
            if task.token.is_none() {
                continue;
            }
            if self.add_task_as(id, task, true).is_ok() && paused {
                self.feed(Event::Pause { task: id });
            }
            self.next_task = self.next_task.max(id.0 + 1);
        }
        if !recovery.waiting.is_empty() {
            say::info!(
                "waiting for {} programs to declare what they hold",
                recovery.waiting.len()
            );
            self.recovery = Some(recovery);
            self.after(self.config.recovery, Timer::Recovery);
        }
    }

    /// Whether asks have to wait until everybody has said what they hold.
    pub(super) fn ask_or_hold(&mut self, ask: Event) {
        match &mut self.recovery {
            Some(recovery) => recovery.asks.push(ask),
            None => self.feed(ask),
        }
    }

    /// An ask that was held is not wanted any more.
    pub(super) fn drop_held_ask(&mut self, client: ClientId, ask: u64) {
        if let Some(recovery) = &mut self.recovery {
            recovery.asks.retain(
                |held| !matches!(held, Event::Ask { client: c, ask: a, .. } if *c == client && a.0 == ask),
            );
        }
    }

    /// A process has declared itself, or is dead.
    pub(super) fn recovered(&mut self, key: ProcessKey) {
        if let Some(recovery) = &mut self.recovery {
            recovery.waiting.remove(&key);
            if recovery.waiting.is_empty() {
                self.end_recovery("all have");
            }
        }
    }

    pub(super) fn end_recovery(&mut self, why: &str) {
        if let Some(recovery) = self.recovery.take() {
            say::info!("programs have declared what they hold: {why}");
            for ask in recovery.asks {
                self.feed(ask);
            }
        }
    }

    /// Hands what has to survive to the disk.
    pub(super) fn save_state(&mut self) {
        let Some(worker) = &self.state_worker else { return };
        self.state_sequence += 1;
        self.state_dirty = false;
        let saved = |key: &ProcessKey| {
            let process = self.processes.get(key)?;
            let attached = process
                .peers
                .iter()
                .any(|id| self.peers.get(id).is_some_and(|peer| !peer.clients.is_empty()));
            Some(SavedProcess {
                pid: process.pid,
                start: process.start,
                attached,
            })
        };
        let tasks = self
            .tasks
            .iter()
            .map(|(id, task)| SavedTask {
                task: *id,
                token: task.token.as_ref().map(hex).unwrap_or_default(),
                owner: task.owner,
                name: task.name.clone(),
                spec: task.spec.clone(),
                paused: task.paused,
                hibernate_after: task.hibernate_after,
                processes: task.keepers.iter().filter_map(saved).collect(),
            })
            .collect();
        worker.send(StateFile::new(self.state_sequence, self.next_task, tasks));
    }

    /// A write of the state file ended.
    pub(super) fn state_saved(&mut self, sequence: u64, result: Result<(), String>) {
        let trouble = result.err();
        match (&trouble, &self.state_trouble) {
            (Some(e), None) => say::error!("limits would not survive a restart now: tasks.json: {e}"),
            (None, Some(_)) => say::warning!("tasks.json can be written again"),
            _ => {}
        }
        self.state_trouble = trouble;
        // Also after a failure: a full disk must not keep programs from starting.
        let done: Vec<_> = self
            .unsaved
            .extract_if(.., |(wanted, ..)| *wanted <= sequence)
            .collect();
        for (_, control, mut answer) in done {
            if let (Some(e), Answer::Ok(Payload::Done { message })) = (&self.state_trouble, &mut answer) {
                message.push_str(&format!(
                    "\nit holds now, but a restart of the daemon would forget it: tasks.json: {e}"
                ));
            }
            self.answer(control, &answer);
        }
    }

    /// What each of our processes held on each card at the most since then: lease, and the overhead that it knows of itself.
    pub(super) fn held_by_pid(
        &self,
        since: std::time::Instant,
    ) -> BTreeMap<DeviceUuid, BTreeMap<u32, Bytes>> {
        let mut held: BTreeMap<DeviceUuid, BTreeMap<u32, Bytes>> = BTreeMap::new();
        for task in self.arbiter.snapshot().tasks {
            for view in task.clients {
                let Some((peer, _)) = self.clients.get(&view.client) else {
                    continue;
                };
                let Some(peer) = self.peers.get(peer) else {
                    continue;
                };
                let Some(pid) = self.processes.get(&peer.process).map(|p| p.pid) else {
                    continue;
                };
                let Some(device) = self.devices.get(&view.device) else {
                    continue;
                };
                let down = self.is_client_down(view.client);
                let own = peer
                    .clients
                    .get(&view.device)
                    .filter(|_| !down)
                    .map_or(Bytes::ZERO, |client| client.usage.overhead);
                let sum = held.entry(device.uuid).or_default().entry(pid).or_default();
                let left = self.shrunk.since(since, view.client);
                *sum = sum
                    .saturating_add(view.lease)
                    .saturating_add(left)
                    .saturating_add(own);
                for (lender, bytes) in self.arbiter.lodged(view.client) {
                    if let Some(lender) = self.devices.get(&lender) {
                        let sum = held.entry(lender.uuid).or_default().entry(pid).or_default();
                        *sum = sum.saturating_add(bytes);
                    }
                }
            }
        }
        held
    }
}

/// Lines that can be shown: no other control characters.
pub(super) fn clean_lines(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() && c != '\n' { '?' } else { c })
        .collect()
}

/// A name that can be shown: no control characters, not empty, not long.
pub(super) fn clean_name(name: &str) -> String {
    let name: String = name
        .trim()
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .take(MAX_NAME)
        .collect();
    if name.is_empty() { "program".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_fit_to_be_shown() {
        assert_eq!(clean_name("  train\u{1b}[31m\n.py "), "train?[31m?.py");
        assert_eq!(clean_name(" \t"), "program");
        assert_eq!(clean_name(&"x".repeat(1000)).len(), MAX_NAME);
    }
}
