//! The state driver: one thread that owns everything, so that nothing needs a lock.
//!
//! Packets, lines, deaths, timers and workers' answers become events of the arbiter; its actions become messages. What
//! may block is done by workers ([`crate::worker`]). A peer can cost the driver no more than a bounded queue.

mod beside;
mod cards;
pub(crate) mod common;
mod conns;
mod control;
mod disk;
mod estates;
mod held;
mod hidden;
mod ipc;
mod lodging;
mod memory;
mod news;
mod peers;
mod rules;
mod shrunk;
mod sleep;
mod strangers;
mod tasks;
mod timers;
mod trims;
mod troubles;
mod view;
mod why;
mod worlds;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use ebb_policy::{Action, Arbiter, DenyReason, Depth, Event, Note, Outcome, Refusal, Time};
use ebb_protocol::control::Totals;
use ebb_protocol::wire::{ToLayer, deny};
use ebb_units::{Bytes, ClientId, DeviceId, TaskId};
use rustix::event::epoll;

use crate::arena::{Arena, Job, Move};
use crate::config::{Config, ConfigError};
use crate::eventlog::{EventLog, Record};
use crate::place::Place;
use crate::say;
use crate::statefile::StateFile;
use crate::worker::{Answers, FromWorker, Waker, Worker};
use cards::Device;
use conns::LayerConn;
use control::ControlConn;
pub(crate) use disk::DiskTier;
use held::AskedHeld;
use peers::Peer;
use tasks::{Process, Recovery, Retired, Task};
use timers::Timer;

/// A connection of a program. Never reused.
type ConnId = u64;
/// A connection of a command line. Never reused.
type ControlId = u64;
/// A session: one library in one process, over all its connections.
type PeerId = u64;
/// A process, whatever its pid is reused for.
type ProcessKey = u64;

/// What an epoll event is about: a kind in the top byte, an id below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    LayerListener,
    ControlListener,
    Waker,
    Signals,
    Layer(ConnId),
    Control(ControlId),
    Death(ProcessKey),
}

impl Source {
    fn to_u64(self) -> u64 {
        let (kind, id) = match self {
            Self::LayerListener => (1, 0),
            Self::ControlListener => (2, 0),
            Self::Waker => (3, 0),
            Self::Signals => (4, 0),
            Self::Layer(id) => (5, id),
            Self::Control(id) => (6, id),
            Self::Death(id) => (7, id),
        };
        kind << 56 | id
    }

    fn from_u64(n: u64) -> Option<Self> {
        let id = n & ((1 << 56) - 1);
        Some(match n >> 56 {
            1 => Self::LayerListener,
            2 => Self::ControlListener,
            3 => Self::Waker,
            4 => Self::Signals,
            5 => Self::Layer(id),
            6 => Self::Control(id),
            7 => Self::Death(id),
            _ => return None,
        })
    }
}

/// Everything that the daemon knows.
#[derive(Debug)]
pub(crate) struct Driver {
    config: Config,
    /// Where the config came from, to read it again.
    config_path: Option<std::path::PathBuf>,
    uid: u32,
    epoll: OwnedFd,
    place: Place,
    waker: Waker,
    answers: Answers,
    from_workers: Receiver<FromWorker>,
    signals: Option<OwnedFd>,
    /// Closed for a moment to tell a peer that there is no descriptor left for it.
    spare: Option<File>,

    started: Instant,
    arbiter: Arbiter,
    pending: VecDeque<Event>,
    /// What left accounts lately.
    shrunk: shrunk::Shrunk,
    verdicts: BTreeMap<TaskId, Result<(), Refusal>>,
    timers: BTreeSet<(Time, Timer)>,
    totals: Totals,

    log: Option<EventLog>,
    log_trouble: Option<String>,
    log_lost: u64,
    state_worker: Option<Worker<StateFile>>,
    state_trouble: Option<String>,
    state_dirty: bool,
    state_sequence: u64,

    news: BTreeMap<TaskId, news::News>,
    decisions: why::Decisions,
    rules: crate::rules::Engine,
    rules_timed: bool,
    /// What they did last.
    fired: VecDeque<rules::Fired>,
    /// Tasks that ended after memory was refused to them.
    gone: VecDeque<news::Gone>,
    /// Why a change of the settings was refused.
    settings_trouble: Option<String>,
    /// Why the last notification did not arrive.
    notify_trouble: Option<String>,
    notices: Option<Worker<(crate::rules::NotifyConfig, crate::rules::notify::News)>>,
    notices_waiting: Arc<AtomicU64>,

    arena: Arena,
    arena_workers: Worker<Job>,
    equal: Option<Worker<crate::equal::Job>>,
    arena_dirty: bool,
    disk: Option<DiskTier>,
    memory: memory::Following,
    cards: Option<Worker<u64>>,
    /// How often the cards were asked to be read.
    pokes: Cell<u64>,
    /// After which poke the books are to be compared with the cards, after which they were, and when.
    look_wanted: Cell<u64>,
    looked_after: u64,
    looked: Option<Time>,
    /// Who wants to hear what its process has on a card, after which poke.
    asked_held: Vec<AskedHeld>,
    lodged_lately: lodging::Lately,
    cards_trouble: Option<String>,
    devices: BTreeMap<DeviceId, Device>,

    tasks: BTreeMap<TaskId, Task>,
    tokens: BTreeMap<[u8; 32], TaskId>,
    retired: VecDeque<Retired>,
    processes: BTreeMap<ProcessKey, Process>,
    by_pid: BTreeMap<u32, ProcessKey>,
    departed: BTreeMap<u32, Time>,
    recovery: Option<Recovery>,
    dirty_tasks: BTreeSet<TaskId>,

    conns: BTreeMap<ConnId, LayerConn>,
    peers: BTreeMap<PeerId, Peer>,
    shares: ipc::Shares,
    sleeps: sleep::Sleeps,
    clients: BTreeMap<ClientId, (PeerId, DeviceId)>,
    controls: BTreeMap<ControlId, ControlConn>,
    pauses: Vec<control::PauseWait>,
    queries: BTreeMap<u64, control::QueryWait>,
    trims: BTreeMap<u64, trims::TrimWait>,
    /// Answered, with more requests waiting behind.
    unblocked: Vec<ControlId>,
    unsaved: Vec<(u64, ControlId, ebb_protocol::control::Answer)>,

    next_id: u64,
    next_task: u64,
    next_client: u64,
    idle_since: Time,
    wakeups: Arc<AtomicU64>,
    stop: bool,
}

/// What a driver starts from.
pub(crate) struct Parts {
    pub config: Config,
    pub config_path: Option<std::path::PathBuf>,
    pub place: Place,
    pub waker: Waker,
    pub answers: Answers,
    pub from_workers: Receiver<FromWorker>,
    pub signals: Option<OwnedFd>,
    pub arena: Arena,
    pub arena_workers: Worker<Job>,
    pub equal: Option<Worker<crate::equal::Job>>,
    pub disk: Option<DiskTier>,
    pub cards: Option<Worker<u64>>,
    pub log: Option<EventLog>,
    pub state_worker: Option<Worker<StateFile>>,
    /// Why there is none.
    pub state_trouble: Option<String>,
    pub saved: StateFile,
    pub wakeups: Arc<AtomicU64>,
}

/// A text of several lines as one, without the lines that show the file.
fn in_a_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let said: Vec<&str> = lines
        .filter(|line| !line.contains(" | ") && !line.starts_with('|'))
        .collect();
    said.join(" ")
}

impl Driver {
    pub(crate) fn new(parts: Parts) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let arbiter = Arbiter::new(parts.config.policy.clone());
        let next_task = parts.saved.next_task.max(1);
        let budget = parts.arena.budget();
        let mut driver = Self {
            uid: rustix::process::geteuid().as_raw(),
            epoll,
            arbiter,
            config: parts.config,
            config_path: parts.config_path,
            place: parts.place,
            waker: parts.waker,
            answers: parts.answers,
            from_workers: parts.from_workers,
            signals: parts.signals,
            spare: File::open("/dev/null").ok(),
            started: Instant::now(),
            pending: VecDeque::new(),
            shrunk: shrunk::Shrunk::default(),
            verdicts: BTreeMap::new(),
            timers: BTreeSet::new(),
            totals: Totals::default(),
            log: parts.log,
            log_trouble: None,
            log_lost: 0,
            state_worker: parts.state_worker,
            state_trouble: parts.state_trouble,
            state_dirty: false,
            state_sequence: 0,
            news: BTreeMap::new(),
            decisions: why::Decisions::default(),
            rules: crate::rules::Engine::default(),
            rules_timed: false,
            fired: VecDeque::new(),
            gone: VecDeque::new(),
            settings_trouble: None,
            notify_trouble: None,
            notices: None,
            notices_waiting: Arc::new(AtomicU64::new(0)),
            arena: parts.arena,
            arena_workers: parts.arena_workers,
            equal: parts.equal,
            arena_dirty: false,
            disk: parts.disk,
            memory: memory::Following::new(budget),
            cards: parts.cards,
            pokes: Cell::new(0),
            look_wanted: Cell::new(0),
            looked_after: 0,
            looked: None,
            asked_held: Vec::new(),
            lodged_lately: lodging::Lately::default(),
            cards_trouble: None,
            devices: BTreeMap::new(),
            tasks: BTreeMap::new(),
            tokens: BTreeMap::new(),
            retired: VecDeque::new(),
            processes: BTreeMap::new(),
            by_pid: BTreeMap::new(),
            departed: BTreeMap::new(),
            recovery: None,
            dirty_tasks: BTreeSet::new(),
            conns: BTreeMap::new(),
            peers: BTreeMap::new(),
            shares: ipc::Shares::default(),
            sleeps: sleep::Sleeps::default(),
            clients: BTreeMap::new(),
            controls: BTreeMap::new(),
            pauses: Vec::new(),
            queries: BTreeMap::new(),
            trims: BTreeMap::new(),
            unblocked: Vec::new(),
            unsaved: Vec::new(),
            next_id: 1,
            next_task,
            next_client: 1,
            idle_since: Time(0),
            wakeups: parts.wakeups,
            stop: false,
        };
        driver.listen()?;
        driver.record_start();
        driver.set_tenants(BTreeMap::new());
        driver.first_cards();
        driver.recover(parts.saved);
        driver.set_rules();
        driver.settle();
        Ok(driver)
    }

    fn listen(&self) -> std::io::Result<()> {
        self.watch(&self.place.layer, Source::LayerListener, epoll::EventFlags::IN)?;
        self.watch(
            &self.place.control,
            Source::ControlListener,
            epoll::EventFlags::IN,
        )?;
        self.watch(&self.waker, Source::Waker, epoll::EventFlags::IN)?;
        if let Some(signals) = &self.signals {
            self.watch(signals, Source::Signals, epoll::EventFlags::IN)?;
        }
        Ok(())
    }

    fn record_start(&mut self) {
        if let Some(log) = &mut self.log {
            let unix_seconds = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(0, |since| since.as_secs());
            log.push(&Record::Start {
                version: env!("CARGO_PKG_VERSION").into(),
                pid: std::process::id(),
                unix_seconds,
                rules: ebb_policy::RULES,
                policy: self.arbiter.config().into(),
            });
        }
    }

    fn watch(&self, fd: impl AsFd, source: Source, flags: epoll::EventFlags) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(source.to_u64()), flags)
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// The driver's clock.
    fn now(&self) -> Time {
        Time(u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Serves until it is told to stop.
    pub(crate) fn run(&mut self) -> std::io::Result<()> {
        let mut events = Vec::with_capacity(256);
        self.notify_ready();
        self.finish_round();
        while !self.stop {
            let timeout = self.timeout();
            events.clear();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            self.wakeups.fetch_add(1, Ordering::Relaxed);
            for event in &events {
                let (data, flags) = (event.data, event.flags);
                if let Some(source) = Source::from_u64(data.u64()) {
                    self.ready(source, flags);
                    self.settle();
                }
            }
            self.run_timers();
            self.finish_round();
        }
        say::info!("stopping; programs go on with what they have");
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        self.save_state();
        // On the disk before the place is free for the next daemon.
        self.state_worker = None;
        self.log = None;
        Ok(())
    }

    fn notify_ready(&self) {
        let text = format!("serving in {}", self.config.socket_dir.display());
        say::info!("{text}");
        let _ = sd_notify::notify(&[
            sd_notify::NotifyState::Ready,
            sd_notify::NotifyState::Status(&text),
        ]);
    }

    fn ready(&mut self, source: Source, flags: epoll::EventFlags) {
        match source {
            Source::LayerListener => self.accept_layers(),
            Source::ControlListener => self.accept_controls(),
            Source::Waker => {
                self.waker.clear();
                self.hear_workers();
            }
            Source::Signals => self.hear_signals(),
            Source::Layer(id) => self.layer_ready(id, flags),
            Source::Control(id) => self.control_ready(id, flags),
            Source::Death(key) => self.process_died(key),
        }
    }

    /// What is done once after all that happened at one moment.
    fn finish_round(&mut self) {
        loop {
            self.settle();
            if std::mem::take(&mut self.arena_dirty) {
                self.pump_arena();
                self.settle();
            }
            self.tell_limits();
            if std::mem::take(&mut self.state_dirty) {
                self.save_state();
            }
            self.answer_pauses();
            self.go_on_sleeping();
            self.watch_idle_tasks();
            if self.unblocked.is_empty() {
                break;
            }
            self.go_on_with_requests();
        }
        self.note_idleness();
    }

    /// Lets the arbiter decide on everything that is waiting, and does what it wants.
    fn settle(&mut self) {
        let mut actions = Vec::new();
        while let Some(event) = self.pending.pop_front() {
            let now = self.now();
            self.arbiter.handle_into(now, &event, &mut actions);
            self.note_event(now, &event);
            for action in &actions {
                self.note_decision(now, action);
            }
            if let Some(log) = &mut self.log {
                let record = Record::Step {
                    t: now,
                    event,
                    actions,
                };
                log.push(&record);
                let Record::Step { actions: back, .. } = record else {
                    unreachable!("made above")
                };
                actions = back;
            }
            for action in actions.drain(..) {
                self.apply(action);
            }
        }
    }

    fn apply(&mut self, action: Action) {
        match action {
            Action::TaskAccepted { task } | Action::TaskChanged { task } => {
                self.verdicts.insert(task, Ok(()));
            }
            Action::TaskRefused { task, why } | Action::ChangeRefused { task, why } => {
                self.verdicts.insert(task, Err(why));
            }
            Action::PauseDone { task, left } => self.pause_done(task, left),
            Action::PauseBlocked {
                task,
                client,
                outcome,
            } => self.pause_blocked(task, client, outcome),
            Action::Grant {
                client,
                ask,
                bytes,
                complete,
            } => self.grant(client, ask.0, bytes, complete),
            Action::Deny {
                client,
                ask,
                reason,
                last,
            } => self.deny(client, ask.0, reason, last),
            Action::Reclaim {
                client,
                order,
                bytes,
                depth,
                reason,
                grounds,
            } => {
                self.reclaim(client, order, bytes, depth, &format!("{reason} ({grounds})"));
            }
            Action::Warn {
                client,
                by,
                within_ms,
            } => {
                say::info!("{client} gives way to {by} in {within_ms} ms");
                if let Some(task) = self.task_of_client(client) {
                    self.give_way(task, Duration::from_millis(within_ms));
                }
            }
            Action::BringBack { client, .. } => {
                if let Some((peer, device)) = self.clients.get(&client).copied() {
                    self.send(peer, &ToLayer::BringBack { device: device.0 }, Vec::new());
                }
            }
            Action::CancelReclaim { client, order } => {
                if let Some((peer, device)) = self.clients.get(&client).copied() {
                    self.send(
                        peer,
                        &ToLayer::CancelReclaim {
                            device: device.0,
                            order: order.0,
                        },
                        Vec::new(),
                    );
                }
            }
            Action::LodgingLent {
                client,
                lender,
                bytes,
            } => self.lodging_lent(client, lender, bytes),
            Action::LodgingWanted {
                client,
                lender,
                bytes,
            } => self.lodging_wanted(client, lender, bytes),
            Action::Note(note) => match note {
                Note::Overcommitted { .. } | Note::GuaranteeCut { .. } => say::warning!("{note}"),
                note => say::debug!("{note}"),
            },
        }
    }

    fn grant(&mut self, client: ClientId, ask: u64, bytes: Bytes, complete: bool) {
        let Some((peer, device)) = self.clients.get(&client).copied() else {
            return;
        };
        if complete && let Some(known) = self.client_mut(peer, device) {
            known.asks.remove(&ask);
        }
        self.mark(peer);
        if self.room_granted(peer, device, ask, bytes, complete) {
            return;
        }
        self.send(
            peer,
            &ToLayer::Grant {
                device: device.0,
                ask,
                bytes,
            },
            Vec::new(),
        );
    }

    fn deny(&mut self, client: ClientId, ask: u64, why: DenyReason, last: bool) {
        let Some((peer, device)) = self.clients.get(&client).copied() else {
            return;
        };
        if let Some(known) = self.client_mut(peer, device) {
            known.asks.remove(&ask);
        }
        if self.room_denied(peer, device, ask) {
            return;
        }
        if last {
            self.totals.denials += 1;
            self.note_denial(client, why);
        }
        say::debug!("{client} is denied {ask}: {why}");
        let reason = match why {
            DenyReason::OverLimit { .. } => deny::OVER_LIMIT,
            DenyReason::NeverFits { .. } | DenyReason::Deadlock { .. } => deny::NEVER_FITS,
            DenyReason::TimedOut => deny::TIMED_OUT,
        };
        self.send(
            peer,
            &ToLayer::Deny {
                device: device.0,
                ask,
                reason,
                last,
            },
            Vec::new(),
        );
    }

    fn reclaim(
        &mut self,
        client: ClientId,
        order: ebb_units::OrderId,
        mut bytes: Bytes,
        depth: Depth,
        reason: &str,
    ) {
        let failed = |outcome| Event::ReclaimDone {
            client,
            order,
            outcome,
            copied: Bytes::ZERO,
            nanos: 0,
        };
        let Some((peer, device)) = self.clients.get(&client).copied() else {
            return self.feed(failed(Outcome::Failed));
        };
        if depth == Depth::Unused {
            // The library takes what is unused first: an order for no more than that evicts nothing.
            bytes = bytes.min(self.unused_of(client));
            if bytes.is_zero() {
                return self.feed(failed(Outcome::NothingLeft));
            }
        }
        if !self.is_connected(peer) || self.is_down(peer) {
            return self.feed(failed(Outcome::Failed));
        }
        if let Some(known) = self.client_mut(peer, device) {
            known.orders.insert(order.0);
        }
        let (device, order, reason) = (device.0, order.0, reason.as_bytes().to_vec());
        let message = match depth {
            Depth::Beside => ToLayer::SendAway {
                device,
                order,
                bytes,
                reason,
            },
            Depth::Unused | Depth::Evict => ToLayer::Reclaim {
                device,
                order,
                bytes,
                reason,
            },
        };
        self.send(peer, &message, Vec::new());
    }

    fn feed(&mut self, event: Event) {
        self.shrunk.note(Instant::now(), &event);
        self.pending.push_back(event);
    }

    /// Feeds an event and everything before it, and says how the arbiter answered about this task.
    fn decide(&mut self, task: TaskId, event: Event) -> Result<(), Refusal> {
        self.verdicts.remove(&task);
        self.feed(event);
        self.settle();
        self.verdicts.remove(&task).unwrap_or(Ok(()))
    }

    fn hear_workers(&mut self) {
        while let Ok(news) = self.from_workers.try_recv() {
            match news {
                FromWorker::Cards(cards, poked, began) => {
                    self.answer_held(cards.as_deref().unwrap_or_default(), poked);
                    if self.is_time_to_look(poked) {
                        self.see_cards(cards, began);
                    }
                }
                FromWorker::Segment(done) => {
                    let now = self.now();
                    if let Err(e) = self.arena.prepared(now, done) {
                        say::warning!("no memory for a segment of the arena: {e}");
                    }
                    self.arena_dirty = true;
                }
                FromWorker::Disk(done) => self.disk_done(done),
                FromWorker::Equal(done) => self.equal_done(done),
                FromWorker::Log { trouble, lost } => {
                    match (&trouble, &self.log_trouble) {
                        (Some(trouble), None) => say::error!("{trouble}; the daemon goes on without its log"),
                        (None, Some(_)) => {
                            say::warning!("the event log works again; {lost} records are lost")
                        }
                        _ => {}
                    }
                    (self.log_trouble, self.log_lost) = (trouble, lost);
                }
                FromWorker::Helper { helper, line } => self.helper_said(helper, line),
                FromWorker::State { sequence, result } => self.state_saved(sequence, result),
                FromWorker::Notified { trouble } => self.notify_trouble = trouble,
                FromWorker::Stop => self.stop = true,
            }
            self.settle();
        }
    }

    fn hear_signals(&mut self) {
        while let Some(number) = self.signals.as_ref().and_then(crate::sys::next_signal) {
            if number == libc::SIGHUP {
                // What is wrong with them is in the log, and `ebb doctor` says it.
                let _ = self.reload();
            } else {
                self.stop = true;
            }
        }
    }

    /// Reads the config file again. What cannot change while the daemon runs is named.
    ///
    /// # Errors
    /// What is wrong with it; all is then as it was.
    fn reload(&mut self) -> Result<Vec<String>, ConfigError> {
        let result = self.try_reload();
        self.settings_trouble = result.as_ref().err().map(|e| in_a_line(&e.to_string()));
        if let Err(e) = &result {
            say::error!("the settings stay as they are: {e}");
        }
        result
    }

    fn try_reload(&mut self) -> Result<Vec<String>, ConfigError> {
        let Some(path) = &self.config_path else {
            return Err(ConfigError::Invalid {
                what: "the daemon was started without a file of settings".into(),
                fix: "write one, and start the daemon again (`ebb daemon --stop`); programs keep what they have"
                    .into(),
            });
        };
        let new = Config::load(path)?;
        let memory = crate::budget::HostMemory::read();
        let budget = new.arena_budget(&memory)?;
        self.set_arena_budget(budget);
        let mut later = Vec::new();
        if let Some(level) = new.log {
            say::set_level(level);
        }
        let old = &self.config;
        let fixed = [
            ("scope", old.scope != new.scope),
            ("nvml", old.nvml != new.nvml),
            ("policy.busy_wait", old.busy_wait != new.busy_wait),
            ("event_log", old.event_log != new.event_log),
            ("arena.segment", old.arena.segment != new.arena.segment),
            ("arena.pinned", old.arena.pinned != new.arena.pinned),
            ("arena.share", old.arena.share != new.arena.share),
            ("disk", old.disk != new.disk),
            ("peer.enabled", old.peer.enabled != new.peer.enabled),
        ];
        for (name, changed) in fixed {
            if changed {
                say::warning!("a new `{name}` holds from the next start of the daemon");
                later.push(name.to_string());
            }
        }
        self.set_policy(new.policy);
        self.config.task = new.task;
        self.config.hibernate_after = new.hibernate_after;
        self.config.idle_exit = new.idle_exit;
        self.config.reserve = new.reserve;
        self.config.peer.limit = new.peer.limit;
        self.config.rules = new.rules;
        self.config.notify = new.notify;
        self.set_rules();
        let before = std::mem::replace(&mut self.config.tenants, new.tenants);
        self.set_tenants(before);
        self.config.arena.budget = new.arena.budget;
        self.arena_dirty = true;
        say::info!("settings read again");
        Ok(later)
    }

    /// Lets the arbiter decide by other numbers. The log says so, since the same events give other actions from there on.
    fn set_policy(&mut self, policy: ebb_policy::PolicyConfig) {
        if self.config.policy == policy {
            return;
        }
        self.settle();
        self.arbiter.set_config(policy.clone());
        let t = self.now();
        if let Some(log) = &mut self.log {
            log.push(&Record::Policy {
                t,
                policy: (&policy).into(),
            });
        }
        self.config.policy = policy;
        self.feed(Event::Tick);
        self.settle();
    }

    fn pump_arena(&mut self) {
        let mut moves = Vec::new();
        let now = self.now();
        self.follow_memory(now);
        self.arena.pump(now, &mut moves);
        self.do_moves(moves);
        #[cfg(debug_assertions)]
        self.arena.check();
        if let Some(at) = self.arena.next_deadline(now) {
            self.timers
                .insert((at.max(now.after(Duration::from_millis(10))), Timer::Arena));
        }
    }

    fn do_moves(&mut self, moves: Vec<Move>) {
        for what in moves {
            match what {
                Move::Work(job) => {
                    self.arena_workers.send(job);
                }
                Move::Recall { from, bytes } => self.send(from, &ToLayer::ArenaRecall { bytes }, Vec::new()),
                Move::Give { to, segments } => {
                    let (infos, memories): (Vec<_>, Vec<_>) = segments.into_iter().unzip();
                    // If the peer is gone by now, its death brings the segments back.
                    self.send(to, &ToLayer::ArenaGive { segments: infos }, memories);
                }
                other @ (Move::Equal(_) | Move::Offer { .. } | Move::Unkeep { .. }) => {
                    self.common_move(other)
                }
                other => self.disk_move(other),
            }
        }
    }
}
