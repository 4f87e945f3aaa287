//! Hibernated tasks: all of a task off its cards, contexts included, by the driver's own checkpoint; and back.
//!
//! ```text
//!            may it?       paused in the arbiter     libraries are quiet      helper: lock, checkpoint
//!  ──> Asking ────> Evicting ────────────> Preparing ────────────> Down ────────────────────> Asleep
//!        │ no          │ busy                 │ busy                 │ refused, undone          │ it wakes, or `ebb resume`
//!        v             v                      v                      v                          v
//!      gone  <───── the task goes on, and whoever asked is told <────┘                        Room: overhead and memory are asked for
//!        ^                                                                                      │ granted in full
//!        └──── the libraries are told <──────────────────────────────────────────────────────  Up   (failed: Asleep, tried again later)
//! ```
//! *Undo*: a helper died or hung amid *Down*; another brings back what the first one took, however often that takes.
//!
//! # The ledger
//! A process that is down holds nothing: its overhead and what lease it still had (arrays, graphs) are *parked* here and given back. Before
//! the driver is asked to restore it, all of it and the evicted bytes are asked for as one restore, so that neither the driver's restore nor the
//! copies that follow it can fail for room. Then the overhead's part of the lease becomes overhead in one step, and the library gets the rest.
//!
//! # Who dies
//! * The helper: its commands look at states before they do something; the next one goes on from there.
//! * The program: its part is dropped; what it held is free anyhow.
//! * The daemon: its helpers end with it, amid whatever they are at. Programs sleep on, and tell the next daemon that they do
//!   ([`Driver::sleeping`]). It counts them as down, has a helper look, and wakes those that are not. Which of a task's processes say it
//!   first, and what else is said or asked by then, is chance: one that comes when the others are being woken already is *late*
//!   (`late.rs`), and nobody is told that it is awake whom the driver was not asked about.

mod ends;
mod helpers;
mod late;
mod phases;
mod room;
mod unasked;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ebb_policy::{Event, Outcome, Time};
use ebb_protocol::ToLayer;
use ebb_protocol::control::{Answer, Failure, Payload};
use ebb_protocol::wire::sleep;
use ebb_units::{Bytes, DeviceId, TaskId};

use super::control::Reply;
use super::timers::Timer;
use super::{ControlId, Driver, PeerId};
use crate::checkpoint::Helper;
use crate::say;

/// How long a helper may take to load the driver, and a library to say what is in the way.
const ASK_WAIT: Duration = Duration::from_secs(30);
/// How long evicting and getting ready may take if the caller does not say.
const WAIT: Duration = Duration::from_secs(15);
/// What the driver may take for its part beyond the copying of what it moves itself, which is slow.
const DRIVER_WAIT: Duration = Duration::from_secs(60);
const DRIVER_BYTES_PER_SECOND: u64 = 500_000_000;
/// Between attempts to bring a task back: twice as long each time, up to the second.
const RETRY: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// After so many attempts whoever runs is believed to, and not locked once more to be sure: that may be what the attempts fail at.
const TRIES: u32 = 2;
/// A task that was not to be hibernated is not tried again unasked for so long.
const LEAVE_ALONE: Duration = Duration::from_secs(60);
/// How long a helper without work is kept, so that the next task need not wait for the driver to be loaded.
const KEEP_HELPER: Duration = Duration::from_secs(60);
/// How often a process that slept before this daemon is looked at: a call of the earlier daemon's helper may be carried out late.
const LOOKS: u32 = 3;
/// Between those looks.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// How often idle tasks are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// Asks that are made here and not by a library.
const OURS: u64 = 1 << 63;

/// Where a task stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Asking,
    Evicting,
    Preparing,
    Down,
    Undo,
    Asleep,
    Room,
    Up,
}

/// What a client had on its card besides what was evicted.
#[derive(Clone, Copy, Debug, Default)]
struct Parked {
    lease: Bytes,
    overhead: Bytes,
    /// The part of the overhead that NVML saw and its library did not.
    extra: Bytes,
    /// The ask for all of it, while room is made.
    ask: u64,
    granted: Bytes,
    complete: bool,
}

#[derive(Debug)]
struct Member {
    /// The order by which its library sleeps, or will.
    order: u64,
    /// On its present connection it has said that it sleeps, or was told to.
    said: bool,
    /// What its library said last, to this stage's question.
    answer: Option<(u32, String)>,
    parked: BTreeMap<DeviceId, Parked>,
}

impl Member {
    fn new(order: u64) -> Self {
        Self {
            order,
            said: true,
            answer: None,
            parked: BTreeMap::new(),
        }
    }
}

#[derive(Debug)]
struct Sleep {
    stage: Stage,
    order: u64,
    members: BTreeMap<PeerId, Member>,
    /// Processes of the task that sleep, too, and came when it was too late for them to be members.
    late: BTreeMap<PeerId, late::Late>,
    wait: Duration,
    /// Who wants to hear how it ended.
    hibernators: Vec<ControlId>,
    resumers: Vec<ControlId>,
    /// A thread of the program waits.
    wanted: bool,
    /// A process of it believes itself awake: it is let in, also if the task is paused.
    self_woken: bool,
    /// Its programs say that it sleeps: so often is the driver still asked, and not before then.
    looks: u32,
    look_at: Time,
    helper: Option<u64>,
    /// It was told something and has not done it yet.
    told: bool,
    /// When the stage has lasted too long.
    due: Time,
    /// Not to be tried again before then.
    retry_at: Time,
    began: Time,
    /// What an eviction failed by.
    blocked: Option<Outcome>,
    tries: u32,
    /// Why it is not done yet, or not at all.
    why: String,
}

impl Sleep {
    fn new(stage: Stage, order: u64, wait: Duration, now: Time) -> Self {
        Self {
            stage,
            order,
            members: BTreeMap::new(),
            late: BTreeMap::new(),
            wait,
            hibernators: Vec::new(),
            resumers: Vec::new(),
            wanted: false,
            self_woken: false,
            looks: 0,
            look_at: now,
            helper: None,
            told: false,
            due: now,
            retry_at: now,
            began: now,
            blocked: None,
            tries: 0,
            why: String::new(),
        }
    }
}

#[derive(Debug)]
struct Tool {
    helper: Helper,
    /// For whom it works.
    task: Option<TaskId>,
    ready: bool,
    owner: u32,
    /// Since when it has nothing to do.
    idle_since: Time,
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct Sleeps {
    tasks: BTreeMap<TaskId, Sleep>,
    tools: BTreeMap<u64, Tool>,
    /// Tasks for which something has happened.
    moved: BTreeSet<TaskId>,
    /// Not to be hibernated unasked before then.
    left_alone: BTreeMap<TaskId, Time>,
    looking: bool,
    phases: phases::Phases,
}

fn failure(message: impl Into<String>, fix: &str) -> Answer {
    Answer::Error(Failure {
        message: message.into(),
        fix: (!fix.is_empty()).then(|| fix.to_string()),
        usage: false,
    })
}

fn done(message: impl Into<String>) -> Answer {
    Answer::Ok(Payload::Done {
        message: message.into(),
    })
}

impl Driver {
    /// `ebb hibernate`, or nobody: then nobody is told.
    pub(super) fn hibernate(
        &mut self,
        control: Option<ControlId>,
        task: TaskId,
        wait: Option<Duration>,
    ) -> Reply {
        if let Some(sleep) = self.sleeps.tasks.get_mut(&task) {
            if sleep.stage == Stage::Asleep && !sleep.wanted {
                return Reply::Now(done(format!("{task} is hibernated already")));
            }
            if matches!(sleep.stage, Stage::Asleep | Stage::Room | Stage::Up) {
                let message = format!("{task} is coming back at this moment");
                return Reply::Now(failure(
                    message,
                    "pause it first: `ebb pause` keeps it off the card",
                ));
            }
            sleep.hibernators.extend(control);
            return Reply::Later;
        }
        let order = self.new_id();
        let members: BTreeMap<PeerId, Member> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.task == task && !peer.clients.is_empty())
            .map(|(id, _)| (*id, Member::new(order)))
            .collect();
        if members.is_empty() {
            let message = format!("{task} has nothing on a card");
            return Reply::Now(failure(message, "`ebb ps` shows what is there"));
        }
        if let Some(why) = self.not_to_hibernate(task, &members) {
            return Reply::Now(failure(
                format!("{task} cannot be hibernated: {why}"),
                "`ebb pause` takes its memory off the card, without its contexts",
            ));
        }
        let now = self.now();
        let mut sleep = Sleep::new(Stage::Asking, order, wait.unwrap_or(WAIT), now);
        sleep.members = members;
        sleep.hibernators.extend(control);
        sleep.due = now.after(ASK_WAIT);
        self.sleeps.tasks.insert(task, sleep);
        self.going_down(task);
        self.after(ASK_WAIT, Timer::Sleep(task));
        self.take_helper(task);
        self.ask_members(task, true);
        Reply::Later
    }

    /// What the daemon itself sees in the way.
    fn not_to_hibernate(&self, task: TaskId, members: &BTreeMap<PeerId, Member>) -> Option<String> {
        for id in members.keys() {
            let peer = self.peers.get(id)?;
            let pid = self.processes.get(&peer.process).map_or(0, |process| process.pid);
            if peer.conn.is_none() {
                return Some(format!("process {pid} is not connected"));
            }
        }
        let strange: Bytes = self
            .devices
            .keys()
            .map(|device| self.strange_bytes(task, *device))
            .sum();
        (!strange.is_zero()).then(|| format!("a process of it passes ebb by and holds {strange}"))
    }

    fn ask_members(&mut self, task: TaskId, ask: bool) {
        let patient = self.tasks.get(&task).is_some_and(|task| task.paused);
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return;
        };
        let wait_ms = u64::try_from(sleep.wait.as_millis()).unwrap_or(u64::MAX);
        let order = sleep.order;
        let peers: Vec<PeerId> = sleep.members.keys().copied().collect();
        for member in sleep.members.values_mut() {
            member.answer = None;
        }
        let message = ToLayer::Sleep {
            order,
            ask,
            patient,
            wait_ms,
        };
        for peer in peers {
            self.send(peer, &message, Vec::new());
        }
    }

    /// The task by whose record a session sleeps.
    fn sleep_of(&self, peer: PeerId) -> Option<TaskId> {
        let task = self.peers.get(&peer)?.task;
        let sleep = self.sleeps.tasks.get(&task)?;
        sleep.members.contains_key(&peer).then_some(task)
    }

    pub(super) fn sleep_answer(&mut self, peer: PeerId, order: u64, outcome: u32, text: &[u8]) {
        let Some(task) = self.sleep_of(peer) else { return };
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return;
        };
        let asking = sleep.stage == Stage::Asking;
        if sleep.order == order
            && let Some(member) = sleep.members.get_mut(&peer)
            // What it says beyond its answer, of a release that failed, is for later.
            && !(asking && member.answer.is_some())
        {
            let text = super::tasks::clean_lines(&String::from_utf8_lossy(text));
            member.answer = Some((outcome, text));
            self.sleeps.moved.insert(task);
        }
    }

    /// The word for a session's state and why, if it is not the arbiter's.
    pub(super) fn sleep_state(&self, peer: PeerId) -> Option<(&'static str, String)> {
        let task = self.sleep_of(peer)?;
        let sleep = self.sleeps.tasks.get(&task)?;
        let (word, why) = match sleep.stage {
            Stage::Asking => return None,
            Stage::Evicting => ("hibernating", "its memory leaves the card"),
            Stage::Preparing => ("hibernating", "its calls are waited for"),
            Stage::Down => ("hibernating", "the driver moves the rest"),
            Stage::Undo => ("waking", "it was not hibernated, and what was begun is undone"),
            Stage::Asleep if sleep.wanted && self.tasks.get(&task).is_some_and(|task| task.paused) => {
                ("hibernated", "a thread of it waits; its task is paused")
            }
            Stage::Asleep if sleep.wanted => ("waking", "it waits to be tried again"),
            Stage::Asleep => ("hibernated", "its next GPU call brings it back"),
            Stage::Room => ("waking", "room for it is made"),
            Stage::Up => ("waking", "the driver brings it back"),
        };
        let why = match sleep.why.as_str() {
            "" => why.into(),
            said => format!("{why}; {said}"),
        };
        Some((word, why))
    }

    fn due_in(&mut self, task: TaskId, wait: Duration) {
        let due = self.now().after(wait);
        if let Some(sleep) = self.sleeps.tasks.get_mut(&task) {
            sleep.due = due;
        }
        self.after(wait, Timer::Sleep(task));
    }

    /// Goes on with the tasks for which something has happened. Apart from where that is heard, which may be amid the arbiter's actions.
    pub(super) fn go_on_sleeping(&mut self) {
        while let Some(task) = self.sleeps.moved.pop_first() {
            self.go_on_with(task);
            self.settle();
        }
    }

    fn go_on_with(&mut self, task: TaskId) {
        let Some(sleep) = self.sleeps.tasks.get(&task) else {
            return;
        };
        let up = if sleep.tries < TRIES { "up" } else { "in" };
        let tool = sleep.helper.and_then(|id| self.sleeps.tools.get(&id));
        let ready = tool.is_some_and(|tool| tool.ready);
        match sleep.stage {
            Stage::Asking | Stage::Preparing => {
                let bad = sleep
                    .members
                    .iter()
                    .find_map(|(peer, member)| match &member.answer {
                        Some((outcome, why)) if *outcome != sleep::READY => {
                            Some((*peer, *outcome, why.clone()))
                        }
                        _ => None,
                    });
                if let Some((peer, outcome, why)) = bad {
                    let pid = self.pid_of(peer);
                    let why = format!("process {pid}: {}", why.replace('\n', "; "));
                    let fix = if outcome == sleep::BUSY {
                        "try again when it is idle, or pause it first: `ebb pause`"
                    } else {
                        "`ebb pause` takes its memory off the card, without its contexts"
                    };
                    return self.give_up_sleep(task, &why, fix);
                }
                if sleep.members.values().any(|member| member.answer.is_none()) {
                    return;
                }
                if sleep.stage == Stage::Asking {
                    // The helper loads the driver meanwhile.
                    self.evict_to_sleep(task);
                } else if ready {
                    let limit = u64::try_from(sleep.wait.as_millis()).unwrap_or(u64::MAX);
                    self.phase(task, "quiet and unpinned");
                    if let Some(sleep) = self.sleeps.tasks.get_mut(&task) {
                        sleep.stage = Stage::Down;
                    }
                    self.command(task, &format!("down {}", limit.clamp(100, 60_000)));
                }
            }
            Stage::Asleep => {
                let paused = self.tasks.get(&task).is_some_and(|task| task.paused);
                let back = !sleep.resumers.is_empty() || sleep.self_woken || sleep.wanted && !paused;
                let now = self.now();
                let look = sleep.looks > 0 && now >= sleep.look_at;
                if sleep.told {
                    // It looks: what is to be done comes after that.
                } else if ready && look {
                    self.look(task);
                } else if back && now >= sleep.retry_at {
                    self.make_room(task);
                } else if look && sleep.helper.is_none() {
                    self.take_helper(task);
                }
            }
            Stage::Room => {
                self.ask_for_room(task);
                let Some(sleep) = self.sleeps.tasks.get(&task) else {
                    return;
                };
                let all = sleep
                    .members
                    .values()
                    .flat_map(|member| member.parked.values())
                    .all(|parked| parked.complete);
                if all && ready {
                    self.phase(task, "room");
                    if let Some(sleep) = self.sleeps.tasks.get_mut(&task) {
                        sleep.stage = Stage::Up;
                    }
                    self.command(task, up);
                }
            }
            Stage::Undo => {
                if ready && !sleep.told && self.now() >= sleep.retry_at {
                    self.command(task, up);
                }
            }
            Stage::Evicting | Stage::Down | Stage::Up => {}
        }
    }

    fn pid_of(&self, peer: PeerId) -> u32 {
        self.peers
            .get(&peer)
            .and_then(|peer| self.processes.get(&peer.process))
            .map_or(0, |process| process.pid)
    }

    fn evict_to_sleep(&mut self, task: TaskId) {
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return;
        };
        sleep.stage = Stage::Evicting;
        let wait = sleep.wait;
        self.phase(task, "asked");
        self.due_in(task, wait);
        // Paused already, it is asked again, and answers again.
        self.feed(Event::Pause { task });
    }

    /// The arbiter has a task off the cards, as far as that goes.
    pub(super) fn evicted_to_sleep(&mut self, task: TaskId) {
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return;
        };
        if sleep.stage != Stage::Evicting {
            return;
        }
        sleep.stage = Stage::Preparing;
        let wait = sleep.wait + WAIT;
        self.phase(task, "evicted");
        self.ask_members(task, false);
        self.due_in(task, wait);
    }

    pub(super) fn evicting_blocked(&mut self, task: TaskId, outcome: Outcome) {
        if let Some(sleep) = self.sleeps.tasks.get_mut(&task)
            && sleep.stage == Stage::Evicting
        {
            sleep.blocked = Some(outcome);
        }
    }

    /// The driver has all processes of a task in host memory.
    fn is_asleep(&mut self, task: TaskId) {
        let held: Vec<_> = self.held(task).collect();
        let now = self.now();
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return;
        };
        sleep.stage = Stage::Asleep;
        sleep.due = now;
        sleep.why.clear();
        // It was alone for a while, as a library that helps itself is.
        sleep.self_woken = sleep.members.values().any(|member| !member.said);
        let mut sum = Bytes::ZERO;
        for (peer, device, lease, overhead) in held {
            let Some(member) = sleep.members.get_mut(&peer) else {
                continue;
            };
            sum = sum.saturating_add(lease).saturating_add(overhead);
            member.parked.insert(
                device,
                Parked {
                    lease,
                    overhead,
                    ..Parked::default()
                },
            );
        }
        let took = now.since(sleep.began).as_secs_f64();
        let waiting = std::mem::take(&mut sleep.hibernators);
        say::info!("{task} is hibernated: {sum} were its contexts' and its driver's, in {took:.2} s");
        self.park(task);
        for control in waiting {
            self.answer(
                control,
                &done(format!("{task} is hibernated: nothing of it is on a card")),
            );
        }
        self.let_helper_go(task);
        self.look_at_cards();
        self.take_late_ones(task);
        self.sleeps.moved.insert(task);
    }

    /// Tries again after a while, longer each time.
    fn again_later(&mut self, task: TaskId) {
        let now = self.now();
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return;
        };
        let wait = RETRY.saturating_mul(1 << sleep.tries.min(10)).min(RETRY_MAX);
        sleep.tries += 1;
        sleep.retry_at = now.after(wait);
        self.after(wait, Timer::Sleep(task));
    }

    /// The driver has all processes of a task back, and lets their calls in.
    fn is_awake(&mut self, task: TaskId) {
        let parked = self.parked(task);
        let Some(sleep) = self.sleeps.tasks.get(&task) else {
            return;
        };
        let took = self.now().since(sleep.began).as_secs_f64();
        say::info!("{task} is back after {took:.2} s");
        let paused = self.tasks.get(&task).is_some_and(|task| task.paused);
        let orders: Vec<(PeerId, u64)> = sleep.members.iter().map(|(peer, m)| (*peer, m.order)).collect();
        self.let_helper_go(task);
        let sleep = self.sleeps.tasks.remove(&task);
        for (peer, device, parked) in parked {
            let Some(client) = self.client_mut(peer, device).map(|client| client.id) else {
                continue;
            };
            if let Some(client) = self.client_mut(peer, device) {
                client.extra = parked.extra;
            }
            self.feed(Event::BecameOverhead {
                client,
                bytes: parked.overhead,
            });
            // The rest is for what was evicted; what was parked of the lease the library has in its books already.
            let bytes = parked
                .granted
                .saturating_sub(parked.overhead)
                .saturating_sub(parked.lease);
            self.mark(peer);
            self.send(
                peer,
                &ToLayer::Grant {
                    device: device.0,
                    ask: 0,
                    bytes,
                },
                Vec::new(),
            );
        }
        for (peer, order) in orders {
            self.send(peer, &ToLayer::Awake { order }, Vec::new());
        }
        if paused {
            // Paused while it came back.
            self.feed(Event::Pause { task });
        }
        let (resumers, late) = sleep.map_or_else(Default::default, |sleep| (sleep.resumers, sleep.late));
        for control in resumers {
            self.answer(control, &done(format!("{task} is back and may run")));
        }
        self.look_at_cards();
        self.begin_with(late);
    }

    /// It is not hibernated: everybody goes on.
    fn give_up_sleep(&mut self, task: TaskId, why: &str, fix: &str) {
        // A helper that undid what it did may be at work for another.
        self.let_helper_go(task);
        let now = self.now();
        let Some(sleep) = self.sleeps.tasks.remove(&task) else {
            return;
        };
        say::info!("{task} is not hibernated: {why}");
        self.sleeps.left_alone.insert(task, now.after(LEAVE_ALONE));
        for (peer, member) in &sleep.members {
            let order = member.order;
            self.send(*peer, &ToLayer::Awake { order }, Vec::new());
        }
        let paused = self.tasks.get(&task).is_some_and(|task| task.paused);
        if !paused && !matches!(sleep.stage, Stage::Asking) {
            self.feed(Event::Resume { task });
        }
        let answer = failure(format!("{task} is not hibernated: {why}"), fix);
        for control in sleep.hibernators {
            self.answer(control, &answer);
        }
        for control in sleep.resumers {
            self.answer(control, &done(format!("{task} may run")));
        }
        self.begin_with(sleep.late);
    }

    /// Time is over for a stage, or it is time to try again.
    pub(super) fn sleep_due(&mut self, task: TaskId) {
        let now = self.now();
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return;
        };
        let early = matches!(sleep.stage, Stage::Asking | Stage::Evicting | Stage::Preparing);
        if early && now < sleep.due {
            return;
        }
        let helper = sleep.helper;
        match sleep.stage {
            Stage::Asking => {
                let silent = sleep.members.iter().find(|(_, member)| member.answer.is_none());
                let why = match silent.map(|(peer, _)| *peer) {
                    Some(peer) => format!("the library of process {} does not answer", self.pid_of(peer)),
                    None => "the driver does not start".into(),
                };
                if let Some(id) = helper {
                    self.drop_helper(id);
                }
                self.give_up_sleep(task, &why, "`ebb doctor` with its pid says more");
            }
            Stage::Evicting => {
                let blocked = sleep.blocked;
                let said = sleep
                    .members
                    .iter()
                    .find_map(|(peer, member)| match &member.answer {
                        Some((outcome, why)) if *outcome != sleep::READY => Some((*peer, why.clone())),
                        _ => None,
                    });
                let (why, fix) = match blocked {
                    Some(Outcome::NoRoom) => (
                        "the host arena has no room for what it holds".to_string(),
                        "raise arena.budget in the settings, or end another program",
                    ),
                    Some(Outcome::Failed) => (
                        match said {
                            Some((peer, why)) => format!("process {}: {why}", self.pid_of(peer)),
                            None => "its memory could not be released".to_string(),
                        },
                        "`ebb doctor` with its pid says more",
                    ),
                    _ => (
                        "its work on the GPU did not end in time".to_string(),
                        "try again with a longer --wait",
                    ),
                };
                self.give_up_sleep(task, &why, fix);
            }
            Stage::Preparing => {
                self.give_up_sleep(
                    task,
                    "its calls of the driver do not end",
                    "try again when it is idle",
                );
            }
            Stage::Down | Stage::Up | Stage::Undo | Stage::Asleep if sleep.told && now >= sleep.due => {
                if let Some(id) = helper {
                    self.drop_helper(id);
                }
                self.helper_failed(task, "the driver did not answer in time");
            }
            Stage::Undo => {
                if helper.is_none() {
                    self.take_helper(task);
                }
                self.sleeps.moved.insert(task);
            }
            Stage::Asleep => {
                self.sleeps.moved.insert(task);
            }
            Stage::Down | Stage::Room | Stage::Up => {}
        }
    }
}
