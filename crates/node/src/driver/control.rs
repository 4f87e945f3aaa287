//! The command line: JSON lines in, JSON lines out, never waiting for a slow reader.

use std::os::fd::OwnedFd;
use std::time::Duration;

use ebb_policy::{Event, Outcome, Refusal, TaskSpec, Time};
use ebb_protocol::ToLayer;
use ebb_protocol::control::{Answer, Failure, Payload, Request, write_line};
use ebb_units::{Bytes, ClientId, Priority, TaskId};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::timers::Timer;
use super::trims::Then;
use super::{ControlId, Driver, PeerId, Source};
use crate::config::Scope;
use crate::{say, sys};

/// The longest request. Answers may be longer.
const MAX_REQUEST: usize = 64 << 10;
/// What may wait for a reader.
const MAX_OUT: usize = 16 << 20;
/// Connections of one user.
const MAX_CONNS: usize = 512;
/// How long a pause waits if the caller does not say.
const PAUSE_WAIT: Duration = Duration::from_secs(15);
/// The longest that a caller may have it wait.
const MAX_PAUSE_WAIT: Duration = Duration::from_secs(3600);
/// How long a library has to report.
const REPORT_WAIT: Duration = Duration::from_secs(2);

/// A connection of a command line.
#[derive(Debug)]
pub(super) struct ControlConn {
    pub fd: OwnedFd,
    pub cred: sys::Peer,
    input: Vec<u8>,
    output: Vec<u8>,
    /// An answer is outstanding: the next request waits.
    waiting: bool,
    watch: Option<Duration>,
    /// When something came.
    last: Time,
}

impl ControlConn {
    /// Nobody waits for anything here, so far as one can see.
    fn is_silent(&self) -> bool {
        !self.waiting && self.watch.is_none() && self.output.is_empty()
    }
}

/// What a request brought.
#[derive(Debug)]
pub(super) enum Reply {
    Now(Answer),
    /// Once what was changed is on the disk: a daemon that is killed after the answer must not forget it.
    Saved(Answer),
    /// The answer comes when it is known.
    Later,
}

/// What is to be changed of a task.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    pub limit: Option<Bytes>,
    pub request: Option<Bytes>,
    pub priority: Option<Priority>,
}

/// Somebody waits until a task is off the cards.
#[derive(Debug)]
pub(super) struct PauseWait {
    control: ControlId,
    task: TaskId,
    wait: Duration,
    deadline: Time,
    blocked: Option<(ClientId, Outcome)>,
    done: Option<Bytes>,
}

/// Somebody waits for a library's report.
#[derive(Debug)]
pub(super) struct QueryWait {
    control: ControlId,
    peer: PeerId,
}

fn failure(message: impl Into<String>, fix: &str) -> Answer {
    let fix = (!fix.is_empty()).then(|| fix.to_string());
    Answer::Error(Failure {
        message: message.into(),
        fix,
        usage: false,
    })
}

fn usage(message: impl Into<String>, fix: &str) -> Answer {
    Answer::Error(Failure {
        message: message.into(),
        fix: Some(fix.into()),
        usage: true,
    })
}

fn done(message: impl Into<String>) -> Reply {
    Reply::Now(Answer::Ok(Payload::Done {
        message: message.into(),
    }))
}

fn saved(message: impl Into<String>) -> Reply {
    Reply::Saved(Answer::Ok(Payload::Done {
        message: message.into(),
    }))
}

impl Driver {
    pub(super) fn accept_controls(&mut self) {
        loop {
            match rustix::net::accept_with(&self.place.control, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
            {
                Ok(fd) => self.welcome_control(fd),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                Err(e) => {
                    self.accept_failed(e, false);
                    return;
                }
            }
        }
    }

    fn welcome_control(&mut self, fd: OwnedFd) {
        let Ok(cred) = sys::peer(&fd) else { return };
        // One user's connections must not use up everybody's descriptors. The one that has been silent for longest makes way, so
        // that connections left open lock nobody out of `ebb ps`.
        let own = |conn: &ControlConn| conn.cred.uid == cred.uid;
        if self.controls.values().filter(|conn| own(conn)).count() >= MAX_CONNS {
            let silent = self
                .controls
                .iter()
                .filter(|(_, conn)| own(conn) && conn.is_silent())
                .min_by_key(|(_, conn)| conn.last)
                .map(|(id, _)| *id);
            match silent {
                Some(id) => self.close_control(id),
                None => return,
            }
        }
        let id = self.new_id();
        if self
            .watch(&fd, Source::Control(id), epoll::EventFlags::IN)
            .is_err()
        {
            return;
        }
        let conn = ControlConn {
            fd,
            cred,
            input: Vec::new(),
            output: Vec::new(),
            waiting: false,
            watch: None,
            last: self.now(),
        };
        self.controls.insert(id, conn);
        if self.config.scope == Scope::User && cred.uid != self.uid && cred.uid != 0 {
            let message = format!("this daemon serves user {}, not user {}", self.uid, cred.uid);
            self.answer(id, &usage(message, "start your own: `ebb daemon --background`"));
            self.close_control(id);
        }
    }

    pub(super) fn control_ready(&mut self, id: ControlId, flags: epoll::EventFlags) {
        if flags.contains(epoll::EventFlags::OUT) {
            self.flush_control(id);
        }
        let now = self.now();
        let Some(conn) = self.controls.get_mut(&id) else {
            return;
        };
        let mut piece = [0; 4096];
        loop {
            match rustix::net::recv(&conn.fd, &mut piece, rustix::net::RecvFlags::empty()) {
                Ok((_, 0)) => {
                    // A one-shot client may close its writing end and still wait for the answer to its last line.
                    self.handle_lines(id);
                    let pending = self
                        .controls
                        .get(&id)
                        .is_some_and(|c| c.waiting || !c.output.is_empty());
                    let gone = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
                    if gone || !pending {
                        self.close_control(id);
                    } else if let Some(conn) = self.controls.get(&id) {
                        // Level-triggered: without this the end would be told again and again.
                        let mut wanted = epoll::EventFlags::empty();
                        wanted.set(epoll::EventFlags::OUT, !conn.output.is_empty());
                        let data = epoll::EventData::new_u64(Source::Control(id).to_u64());
                        let _ = epoll::modify(&self.epoll, &conn.fd, data, wanted);
                    }
                    return;
                }
                Ok((n, _)) => {
                    conn.last = now;
                    conn.input.extend_from_slice(&piece[..n]);
                    let open = conn.input.len()
                        - conn
                            .input
                            .iter()
                            .rposition(|b| *b == b'\n')
                            .map_or(0, |at| at + 1);
                    // Without an end of line, or without waiting for answers: in both cases too much.
                    if open > MAX_REQUEST || conn.input.len() > 4 * MAX_REQUEST {
                        self.answer(
                            id,
                            &usage(
                                format!("a request of more than {MAX_REQUEST} bytes"),
                                "send one JSON object a line",
                            ),
                        );
                        return self.close_control(id);
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(_) => return self.close_control(id),
            }
        }
        self.handle_lines(id);
    }

    /// Answers the requests that have arrived, one after the other.
    fn handle_lines(&mut self, id: ControlId) {
        loop {
            let Some(conn) = self.controls.get_mut(&id) else {
                return;
            };
            if conn.waiting {
                return;
            }
            let Some(end) = conn.input.iter().position(|b| *b == b'\n') else {
                return;
            };
            let line: Vec<u8> = conn.input.drain(..=end).collect();
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            conn.waiting = true;
            let reply = match serde_json::from_slice(&line) {
                Ok(request) => self.request(id, request),
                Err(e) => {
                    let message = format!("the request is not understood: {e}");
                    Reply::Now(usage(message, "use the `ebb` of the daemon's version"))
                }
            };
            match reply {
                Reply::Now(answer) => {
                    if let Some(conn) = self.controls.get_mut(&id) {
                        conn.waiting = false;
                    }
                    self.write_control(id, &answer);
                }
                Reply::Saved(answer) => self.answer_saved(id, answer),
                Reply::Later => {}
            }
        }
    }

    /// Answers once all that was changed up to now is on the disk, or cannot be written.
    pub(super) fn answer_saved(&mut self, id: ControlId, answer: Answer) {
        self.save_state();
        if self.state_worker.is_none() {
            return self.answer(id, &answer);
        }
        self.unsaved.push((self.state_sequence, id, answer));
    }

    /// Goes on with the requests that waited behind one that is answered by now. Apart from [`Self::answer`], which may
    /// run amid the arbiter's actions.
    pub(super) fn go_on_with_requests(&mut self) {
        while let Some(id) = self.unblocked.pop() {
            self.handle_lines(id);
        }
    }

    fn request(&mut self, id: ControlId, request: Request) -> Reply {
        match request {
            Request::Hello => Reply::Now(Answer::Ok(Payload::Hello {
                version: env!("CARGO_PKG_VERSION").into(),
                pid: std::process::id(),
                event_log: self.log_state(),
                troubles: self.troubles(),
            })),
            Request::CreateTask(new) => self.create_task(id, new),
            Request::List => Reply::Now(Answer::Ok(Payload::List(self.snapshot()))),
            Request::Watch { interval_ms } => {
                let interval = Duration::from_millis(interval_ms.clamp(50, 3_600_000));
                let before = self
                    .controls
                    .get_mut(&id)
                    .and_then(|conn| conn.watch.replace(interval));
                if before.is_none() {
                    self.after(interval, Timer::Watch(id));
                }
                Reply::Now(Answer::Ok(Payload::List(self.snapshot())))
            }
            Request::Pause { task, wait_ms } => self.with_task(id, &task, |this, task| {
                this.pause(
                    id,
                    task,
                    wait_ms
                        .map_or(PAUSE_WAIT, Duration::from_millis)
                        .min(MAX_PAUSE_WAIT),
                )
            }),
            Request::Hibernate { task, wait_ms } => self.with_task(id, &task, |this, task| {
                let wait = wait_ms.map(|ms| Duration::from_millis(ms).min(MAX_PAUSE_WAIT));
                this.hibernate(Some(id), task, wait)
            }),
            Request::Trim { task: Some(task) } => {
                self.with_task(id, &task, |this, task| this.trim(id, &[task], Then::Tell))
            }
            Request::Trim { task: None } => {
                let uid = self.controls.get(&id).map_or(u32::MAX, |conn| conn.cred.uid);
                let own = self
                    .tasks
                    .iter()
                    .filter(|(_, task)| uid == 0 || task.owner == uid);
                let tasks: Vec<TaskId> = own.map(|(task, _)| *task).collect();
                self.trim(id, &tasks, Then::Tell)
            }
            Request::Resume { task } => self.with_task(id, &task, |this, task| this.resume(id, task)),
            Request::Limit {
                task,
                limit,
                request,
                priority,
            } => self.with_task(id, &task, |this, task| {
                let figures = Figures {
                    limit,
                    request,
                    priority,
                };
                this.change(task, figures, Some(id))
            }),
            Request::News { task, gives_way } => self.with_task(id, &task, |this, task| {
                Reply::Now(this.tell_news(task, gives_way))
            }),
            Request::Rules => Reply::Now(self.tell_rules()),
            Request::Reload => self.reload_for(id),
            Request::Why { task: None } => {
                let gone = self.gone_rows(None);
                Reply::Now(self.why(None, gone))
            }
            Request::Why { task: Some(task) } => {
                let gone = self.gone_rows(Some(&task));
                match self.find_task(&task) {
                    Ok(task) => Reply::Now(self.why(Some(task), gone)),
                    Err(failure) if gone.is_empty() => Reply::Now(Answer::Error(failure)),
                    Err(_) => Reply::Now(Answer::Ok(Payload::Why {
                        tasks: Vec::new(),
                        gone,
                    })),
                }
            }
            Request::Doctor { pid } => self.doctor(id, pid),
            Request::Shutdown => {
                if let Some(refusal) = self.is_no_owner(id) {
                    return refusal;
                }
                self.stop = true;
                done("the daemon stops; programs go on with what they have")
            }
        }
    }

    /// The refusal for somebody to whom the daemon does not belong.
    fn is_no_owner(&self, id: ControlId) -> Option<Reply> {
        let uid = self.controls.get(&id).map_or(u32::MAX, |conn| conn.cred.uid);
        (uid != self.uid && uid != 0).then(|| {
            let message = "the daemon belongs to another user";
            Reply::Now(usage(message, "ask its owner, or use sudo"))
        })
    }

    fn reload_for(&mut self, id: ControlId) -> Reply {
        if let Some(refusal) = self.is_no_owner(id) {
            return refusal;
        }
        match self.reload() {
            Ok(later) if later.is_empty() => done("the settings were read again, and hold"),
            Ok(later) => done(format!(
                "the settings were read again, and hold; from the next start of the daemon: {}",
                later.join(", ")
            )),
            Err(e) => {
                let message = format!("the settings stay as they are: {}", e.to_string().trim_end());
                Reply::Now(usage(message, &e.fix()))
            }
        }
    }

    /// Runs `then` on the task that a selector names, if the caller may manage it.
    fn with_task(
        &mut self,
        control: ControlId,
        selector: &str,
        then: impl FnOnce(&mut Self, TaskId) -> Reply,
    ) -> Reply {
        let task = match self.find_task(selector) {
            Ok(task) => task,
            Err(failure) => return Reply::Now(Answer::Error(failure)),
        };
        let uid = self.controls.get(&control).map_or(u32::MAX, |conn| conn.cred.uid);
        let owner = self.tasks.get(&task).map_or(0, |task| task.owner);
        if uid != owner && uid != 0 {
            let message = format!("{task} belongs to user {owner}");
            return Reply::Now(usage(message, "ask that user, or use sudo"));
        }
        then(self, task)
    }

    /// `t3`, a name that is unique, or a process id.
    fn find_task(&self, selector: &str) -> Result<TaskId, Failure> {
        let list = "`ebb ps` lists the tasks";
        let usage = |message: String, fix: &str| Failure {
            message,
            fix: Some(fix.into()),
            usage: true,
        };
        if let Some(number) = selector.strip_prefix('t').and_then(|n| n.parse().ok()) {
            let id = TaskId(number);
            if self.tasks.contains_key(&id) {
                return Ok(id);
            }
        }
        let named: Vec<TaskId> = self
            .tasks
            .iter()
            .filter(|(_, task)| task.name == selector)
            .map(|(id, _)| *id)
            .collect();
        match named[..] {
            [one] => return Ok(one),
            [] => {}
            _ => {
                let ids: Vec<String> = named.iter().map(ToString::to_string).collect();
                let message = format!("{} tasks are named `{selector}`: {}", named.len(), ids.join(", "));
                return Err(usage(message, "name one of these ids"));
            }
        }
        if let Ok(pid) = selector.parse::<u32>() {
            let key = self.by_pid.get(&pid);
            let session = key
                .and_then(|key| self.processes.get(key))
                .and_then(|process| process.peers.iter().find_map(|peer| self.peers.get(peer)))
                .map(|peer| peer.task);
            let kept = || {
                let key = key?;
                self.tasks
                    .iter()
                    .find(|(_, task)| task.keepers.contains(key))
                    .map(|(id, _)| *id)
            };
            return session
                .or_else(kept)
                .ok_or_else(|| usage(format!("process {pid} belongs to no task"), list));
        }
        Err(usage(format!("there is no task `{selector}`"), list))
    }

    fn pause(&mut self, control: ControlId, task: TaskId, wait: Duration) -> Reply {
        if let Some(known) = self.tasks.get_mut(&task) {
            known.paused = true;
        }
        self.state_dirty = true;
        let deadline = self.now().after(wait);
        self.pauses.push(PauseWait {
            control,
            task,
            wait,
            deadline,
            blocked: None,
            done: None,
        });
        self.after(wait, Timer::Pause(control));
        self.feed(Event::Pause { task });
        self.settle();
        // Nobody of it is on a card: there is nothing to wait for.
        let empty = !self
            .peers
            .values()
            .any(|peer| peer.task == task && !peer.clients.is_empty());
        if empty {
            self.pause_done(task, Bytes::ZERO);
        }
        Reply::Later
    }

    pub(super) fn pause_done(&mut self, task: TaskId, left: Bytes) {
        for wait in self.pauses.iter_mut().filter(|wait| wait.task == task) {
            wait.done = Some(left);
        }
        self.evicted_to_sleep(task);
    }

    /// Answers the pauses that are complete. Apart from [`Self::pause_done`], which runs amid the arbiter's actions.
    pub(super) fn answer_pauses(&mut self) {
        let finished: Vec<PauseWait> = self.pauses.extract_if(.., |wait| wait.done.is_some()).collect();
        for PauseWait {
            control, task, done, ..
        } in finished
        {
            let left = done.unwrap_or_default();
            let message = if left.is_zero() {
                format!("{task} is paused and off the card")
            } else {
                format!(
                    "{task} is paused; {left} stay on the card (the driver's own and what cannot be moved)"
                )
            };
            self.answer_saved(control, Answer::Ok(Payload::Done { message }));
        }
    }

    pub(super) fn pause_blocked(&mut self, task: TaskId, client: ClientId, outcome: Outcome) {
        for wait in self.pauses.iter_mut().filter(|wait| wait.task == task) {
            wait.blocked = Some((client, outcome));
        }
        self.evicting_blocked(task, outcome);
    }

    /// A pause that did not work in time is taken back: the caller is told that nothing was changed.
    pub(super) fn pause_timed_out(&mut self, control: ControlId) {
        // An earlier pause over the same connection had a timer of its own.
        let now = self.now();
        let over = |wait: &PauseWait| wait.control == control && wait.done.is_none() && wait.deadline <= now;
        let Some(at) = self.pauses.iter().position(over) else {
            return;
        };
        let PauseWait {
            task, wait, blocked, ..
        } = self.pauses.remove(at);
        let others = self.pauses.iter().any(|wait| wait.task == task);
        if !others {
            if let Some(known) = self.tasks.get_mut(&task) {
                known.paused = false;
            }
            self.state_dirty = true;
            self.feed(Event::Resume { task });
            self.settle();
        }
        let pid = blocked
            .and_then(|(client, _)| self.clients.get(&client))
            .and_then(|(peer, _)| self.peers.get(peer))
            .and_then(|peer| self.processes.get(&peer.process))
            .map_or_else(
                || "a process of it".to_string(),
                |process| format!("process {}", process.pid),
            );
        let (why, fix) = match blocked.map(|(_, outcome)| outcome) {
            Some(Outcome::NoRoom) => (
                format!("the host arena has no room for what {pid} holds"),
                "raise arena.budget in the settings, or end another program",
            ),
            Some(Outcome::Failed) => (
                format!("{pid} could not release its memory, or is not connected"),
                "`ebb doctor` with its pid says more",
            ),
            _ => (
                format!("{pid} is busy: its work on the GPU did not end"),
                "try again with a longer --wait",
            ),
        };
        let seconds = wait.as_secs_f64();
        self.answer(
            control,
            &failure(format!("{task} was not paused within {seconds} s: {why}"), fix),
        );
    }

    /// A task that is waited for ended.
    pub(super) fn fail_pauses(&mut self, task: TaskId) {
        let over: Vec<PauseWait> = self.pauses.extract_if(.., |wait| wait.task == task).collect();
        for wait in over {
            self.answer(wait.control, &failure(format!("{task} ended meanwhile"), ""));
        }
    }

    fn resume(&mut self, control: ControlId, task: TaskId) -> Reply {
        let was = self
            .tasks
            .get_mut(&task)
            .is_some_and(|task| std::mem::take(&mut task.paused));
        self.state_dirty = true;
        let over: Vec<PauseWait> = self.pauses.extract_if(.., |wait| wait.task == task).collect();
        for wait in over {
            self.answer(
                wait.control,
                &failure(format!("{task} was resumed meanwhile"), ""),
            );
        }
        if self.resume_asleep(control, task) {
            return Reply::Later;
        }
        self.feed(Event::Resume { task });
        self.settle();
        saved(if was {
            format!("{task} may run again")
        } else {
            format!("{task} was not paused")
        })
    }

    /// Changes a task's figures. `trim`: for whom the task is asked for what it keeps first, if that is in the way of a limit; once.
    pub(super) fn change(&mut self, task: TaskId, figures: Figures, trim: Option<ControlId>) -> Reply {
        let Some(old) = self.tasks.get(&task).map(|task| task.spec.clone()) else {
            return Reply::Now(failure(format!("{task} ended meanwhile"), ""));
        };
        let spec = TaskSpec {
            limit: figures.limit.or(old.limit),
            request: figures.request.unwrap_or(old.request),
            priority: figures.priority.unwrap_or(old.priority),
            ..old
        };
        if let Some(failure) = self.figures_fail(spec.request, spec.limit) {
            return Reply::Now(Answer::Error(failure));
        }
        match self.decide(
            task,
            Event::TaskChanged {
                task,
                spec: spec.clone(),
                force: false,
            },
        ) {
            Ok(()) => {
                if let Some(known) = self.tasks.get_mut(&task) {
                    known.spec = spec.clone();
                }
                self.dirty_tasks.insert(task);
                self.state_dirty = true;
                let limit = spec.limit.map_or("the card".into(), |limit| limit.to_string());
                saved(format!(
                    "{task}: request {}, limit {limit}, priority {}",
                    spec.request, spec.priority
                ))
            }
            Err(why) => {
                if let Some(control) = trim
                    && matches!(why, Refusal::LimitBelowLive { cached, .. } if !cached.is_zero())
                {
                    return self.trim(control, &[task], Then::Change(task, figures));
                }
                let fix = match &why {
                    Refusal::LimitBelowLive { live, cached, .. } => {
                        let least = live.saturating_add(*cached).to_quantity();
                        format!("set a limit of at least {least}, or have the program free memory first")
                    }
                    _ => "`ebb ps` shows what other tasks have requested".to_string(),
                };
                Reply::Now(usage(self.explain(&why), &fix))
            }
        }
    }

    fn doctor(&mut self, control: ControlId, pid: u32) -> Reply {
        if let Some((message, fix)) = self.stranger_named(pid) {
            return Reply::Now(failure(message, fix));
        }
        let Some(process) = self.by_pid.get(&pid).and_then(|key| self.processes.get(key)) else {
            let message = format!("process {pid} is not known to the daemon");
            let fix = "start it with `ebb run`; one that has not used the GPU yet is not known either";
            return Reply::Now(usage(message, fix));
        };
        let uid = self.controls.get(&control).map_or(u32::MAX, |conn| conn.cred.uid);
        if uid != process.uid && uid != 0 {
            let message = format!("process {pid} belongs to user {}", process.uid);
            return Reply::Now(usage(message, "ask that user, or use sudo"));
        }
        // The session that holds something, if there is more than one.
        let peer = process.peers.iter().copied().max_by_key(|id| {
            self.peers
                .get(id)
                .map(|peer| (peer.clients.len(), peer.conn.is_some()))
        });
        let Some(peer) = peer else {
            let message = format!("process {pid} has not loaded the library, or not used the GPU yet");
            return Reply::Now(usage(
                message,
                "ask again once it has; a static program, and one that loads the driver past the preload, never does: what it holds is named after some seconds",
            ));
        };
        if !self.is_connected(peer) {
            return Reply::Now(self.doctor_answer(peer, None));
        }
        let query = self.new_id();
        self.queries.insert(query, QueryWait { control, peer });
        self.send(peer, &ToLayer::Query { query }, Vec::new());
        self.after(REPORT_WAIT, Timer::Query(query));
        Reply::Later
    }

    fn doctor_answer(&self, peer: PeerId, report: Option<serde_json::Value>) -> Answer {
        match self.process_rows(peer).into_iter().next() {
            Some(process) => Answer::Ok(Payload::Doctor { process, report }),
            None => failure("the process ended meanwhile", ""),
        }
    }

    pub(super) fn report_arrived(&mut self, peer: PeerId, query: u64, text: &[u8]) {
        // Only the session that was asked may answer.
        if self.queries.get(&query).is_none_or(|wait| wait.peer != peer) {
            return;
        }
        let report = serde_json::from_slice(text)
            .unwrap_or_else(|_| serde_json::json!({ "unreadable": String::from_utf8_lossy(text) }));
        self.finish_query(query, Some(report));
    }

    pub(super) fn query_timed_out(&mut self, query: u64) {
        self.finish_query(query, None);
    }

    fn finish_query(&mut self, query: u64, report: Option<serde_json::Value>) {
        if let Some(QueryWait { control, peer }) = self.queries.remove(&query) {
            let answer = self.doctor_answer(peer, report);
            self.answer(control, &answer);
        }
    }

    /// The library that was asked hung up.
    pub(super) fn fail_queries(&mut self, peer: PeerId) {
        let open: Vec<u64> = self
            .queries
            .iter()
            .filter(|(_, wait)| wait.peer == peer)
            .map(|(query, _)| *query)
            .collect();
        for query in open {
            self.finish_query(query, None);
        }
    }

    pub(super) fn send_watch(&mut self, id: ControlId) {
        let Some(conn) = self.controls.get(&id) else {
            return;
        };
        let Some(interval) = conn.watch else { return };
        // A reader that is behind gets the next picture, not all of them.
        if conn.output.is_empty() {
            let line = Answer::Ok(Payload::List(self.snapshot()));
            self.write_control(id, &line);
        }
        self.after(interval, Timer::Watch(id));
    }

    /// Answers the request that a connection waits for.
    pub(super) fn answer(&mut self, id: ControlId, answer: &Answer) {
        let Some(conn) = self.controls.get_mut(&id) else {
            return;
        };
        conn.waiting = false;
        self.unblocked.push(id);
        self.write_control(id, answer);
    }

    fn write_control(&mut self, id: ControlId, answer: &Answer) {
        let Some(conn) = self.controls.get_mut(&id) else {
            return;
        };
        if write_line(&mut conn.output, answer).is_err() {
            say::error!("an answer cannot be written as JSON");
        }
        if conn.output.len() > MAX_OUT {
            say::info!("a command line does not read its answers and is dropped");
            return self.close_control(id);
        }
        self.flush_control(id);
    }

    fn flush_control(&mut self, id: ControlId) {
        let Some(conn) = self.controls.get_mut(&id) else {
            return;
        };
        while !conn.output.is_empty() {
            let flags = rustix::net::SendFlags::NOSIGNAL;
            match rustix::net::send(&conn.fd, &conn.output, flags) {
                Ok(n) => drop(conn.output.drain(..n)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => return self.close_control(id),
            }
        }
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::OUT, !conn.output.is_empty());
        let data = epoll::EventData::new_u64(Source::Control(id).to_u64());
        let _ = epoll::modify(&self.epoll, &conn.fd, data, flags);
    }

    pub(super) fn close_control(&mut self, id: ControlId) {
        if let Some(conn) = self.controls.remove(&id) {
            let _ = epoll::delete(&self.epoll, &conn.fd);
        }
        // What it waited for is nobody's business any more. A pause stays.
        self.pauses.retain(|wait| wait.control != id);
        self.queries.retain(|_, wait| wait.control != id);
        self.trims.retain(|_, wait| wait.control != id);
        self.forget_sleep_waiter(id);
        self.unsaved.retain(|(_, control, _)| *control != id);
    }

    /// The event log's path, and its trouble if it has any.
    pub(super) fn log_state(&self) -> Option<String> {
        let path = self.config.event_log_path()?;
        Some(match (&self.log_trouble, self.log_lost) {
            (Some(trouble), lost) => format!("{trouble} ({lost} records lost)"),
            (None, 0) => path.display().to_string(),
            (None, lost) => format!("{} ({lost} records lost)", path.display()),
        })
    }
}
