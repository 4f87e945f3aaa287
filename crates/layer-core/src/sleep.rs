//! Asleep: the process makes no driver call, so that the driver may checkpoint it, and its first call wakes it.
//!
//! ```text
//!   Awake --Sleep--> Preparing --ready--> Asleep --Awake--> Awake
//!     ^                 | busy, cannot,     |  no daemon: by the process itself
//!     +-----------------+ connection lost   +--------------------> Awake
//! ```
//! *Preparing*, on a thread of its own: both gates are closed, calls that are under way are waited for, the work too, and the arena's
//! segments are unpinned (the driver's checkpoint takes twice as long with them). Whatever does not end in time, and a thread of the program
//! that wants in, leads back to *Awake*. *Asleep*: the daemon has been told that it may begin; from here on it alone knows where the
//! driver stands. A checkpointed driver lets every call wait, so nothing of ours makes one: owners of devices hold still, the arena maps
//! what arrives and does not pin it. Threads of the program wait at the gates, and the first of them has the daemon woken.
//! *Awake* again: segments are pinned by several threads, and whoever copies waits for those that it needs.
//!
//! # Without a daemon
//! A process whose daemon died stays as it is until one of its threads wants in. Then the next daemon, if one comes within a few seconds,
//! is told; else the process asks the driver to restore it, as a program may for itself ([`WakesItself`]).
//!
//! # Locks
//! `state` may be taken under a device's lock. Nothing but the link's outbox, events and the gates' own are taken under it, and no driver
//! call is made.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ebb_protocol::ToDaemon;
use ebb_protocol::wire::sleep;
use ebb_units::Bytes;

use crate::core::Core;
use crate::device::{Device, Phase};
use crate::engine::{Engine, ExternalKind};
use crate::gate::{CallGate, GateOwner};
use crate::residency::movable_bytes;
use crate::threads;

/// How long a process that wants back waits for a daemon before it helps itself.
const GRACE: Duration = Duration::from_secs(5);
/// Between its attempts.
const AGAIN: Duration = Duration::from_secs(1);
/// Between looks at what ends by itself.
const LOOK: Duration = Duration::from_millis(2);

/// Brings this process back from a checkpoint, when nobody else is there to do it.
pub trait WakesItself: Send + Sync {
    /// Asks the driver to restore and unlock this process; nothing if it is neither checkpointed nor locked.
    ///
    /// # Errors
    /// What the driver answered, for the log.
    fn wake_itself(&self) -> Result<(), String>;
}

/// Where the process stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Awake,
    Preparing,
    Asleep,
}

#[derive(Debug, Default)]
struct State {
    stage: Stage,
    /// The daemon's order that it prepares for or sleeps by.
    order: u64,
    /// Preparing is to end: somebody wants in, or the order is void.
    off: bool,
    /// Who waits at the gates need not be let in soon: the task is paused.
    patient: bool,
    /// The daemon of this connection was told that somebody wants in.
    told: bool,
    /// The thread that helps itself lives.
    alone: bool,
    /// The order of which it was asked whether it could sleep; 0 if there is none.
    coming: u64,
    /// How often it slept.
    times: u64,
}

/// The part of [`Core`].
#[derive(Default)]
pub(crate) struct Sleep {
    state: Mutex<State>,
    changed: Condvar,
    /// Owners of devices hold still.
    held: AtomicBool,
    calls: OnceLock<&'static CallGate>,
    itself: OnceLock<Arc<dyn WakesItself>>,
    /// What the program has done that no checkpoint goes past, for good.
    bars: Mutex<Vec<&'static str>>,
}

impl std::fmt::Debug for Sleep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sleep")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// Why it does not sleep.
enum Not {
    Cannot(Vec<String>),
    Busy(String),
}

/// Tells of threads at the gate of calls.
struct Porter(Arc<Core>);

impl GateOwner for Porter {
    fn wanted(&self) {
        wanted(&self.0);
    }
    fn active(&self) {}
}

impl Sleep {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether owners of devices are to hold still.
    pub(crate) fn holds(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    /// For the report: where it stands, how often it slept.
    pub(crate) fn facts(&self) -> (&'static str, u64) {
        let state = self.lock();
        let name = match state.stage {
            Stage::Awake => "awake",
            Stage::Preparing => "preparing",
            Stage::Asleep => "asleep",
        };
        (name, state.times)
    }

    /// In a forked child: its calls pass. Takes no lock.
    pub(crate) fn forget_in_child(&self) {
        if let Some(calls) = self.calls.get() {
            calls.reset_in_child();
        }
    }
}

impl Engine {
    /// The gate of all calls that do not touch memory, and who brings the process back where no daemon does. Once, at the start.
    pub fn set_sleep(&self, calls: &'static CallGate, itself: Arc<dyn WakesItself>) {
        calls.arm(Arc::new(Porter(Arc::clone(&self.core))));
        let _ = self.core.sleep.calls.set(calls);
        let _ = self.core.sleep.itself.set(itself);
    }

    /// The program did something that the driver's checkpoint does not go past, for as long as the process lives.
    pub fn bars_sleep(&self, what: &'static str) {
        if self.core.is_child() {
            return;
        }
        let mut bars = self
            .core
            .sleep
            .bars
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !bars.contains(&what) {
            bars.push(what);
        }
    }
}

/// What is in the way of a checkpoint, for a person, a reason a line. Empty: nothing that is known of.
pub(crate) fn reasons(core: &Core) -> Vec<String> {
    let mut reasons: Vec<String> = core
        .sleep
        .bars
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .iter()
        .map(ToString::to_string)
        .collect();
    if core.sleep.calls.get().is_none() || core.is_passthrough() {
        reasons.push("the library does not manage this process".into());
    }
    for device in core.devices() {
        let state = device.lock();
        if state.dead {
            reasons.push("its context was lost to an error".into());
        }
        for (reason, bytes) in crate::report::pinned(core, &state) {
            reasons.push(format!("{} pinned: {reason}", Bytes(bytes)));
        }
        for kind in [ExternalKind::Managed, ExternalKind::Ipc] {
            let bytes = state.external.get(&kind).copied().unwrap_or(0);
            if bytes > 0 {
                reasons.push(format!("{} of {}", Bytes(bytes), kind.name()));
            }
        }
    }
    let open = core.share.sums();
    if open.open > 0 {
        reasons.push(format!("{} of another process is open", Bytes(open.open_bytes)));
    }
    reasons.dedup();
    reasons
}

/// The daemon's order. Waits for nothing.
pub(crate) fn ordered(core: &Arc<Core>, order: u64, ask: bool, patient: bool, wait: Duration) {
    if ask {
        let reasons = reasons(core);
        let outcome = if reasons.is_empty() {
            sleep::READY
        } else {
            sleep::CANNOT
        };
        if outcome == sleep::READY {
            // Its memory is evicted next, and unpinned by the way.
            core.sleep.lock().coming = order;
            core.arena.sleep_comes();
            core.link.poke();
        }
        return answer(core, order, outcome, &reasons.join("\n"));
    }
    {
        let mut state = core.sleep.lock();
        if state.stage != Stage::Awake {
            drop(state);
            return answer(core, order, sleep::BUSY, "it has another such order");
        }
        *state = State {
            stage: Stage::Preparing,
            order,
            patient,
            alone: state.alone,
            times: state.times,
            ..State::default()
        };
    }
    let with = Arc::clone(core);
    if threads::spawn("ebb-sleep", move || prepare(&with, order, wait)).is_err() {
        core.sleep.lock().stage = Stage::Awake;
        answer(core, order, sleep::BUSY, "there is no thread to be had");
    }
}

/// An order to release memory has failed. If that was on the way to a hibernation, the daemon learns what did not work, for who asked for it.
/// Device lock allowed.
pub(crate) fn not_released(core: &Core, device: usize, what: Option<&str>) {
    let coming = core.sleep.lock().coming;
    if coming != 0 {
        let what = what.unwrap_or("the order was taken back, or the context is lost");
        let text = format!("its memory on device {device} could not be released: {what}");
        answer(core, coming, sleep::BUSY, &text);
    }
}

fn answer(core: &Core, order: u64, outcome: u32, text: &str) {
    let mut text = text.as_bytes().to_vec();
    text.truncate(4096);
    core.link.send(ToDaemon::SleepAnswer { order, outcome, text });
}

fn prepare(core: &Arc<Core>, order: u64, wait: Duration) {
    let deadline = Instant::now() + wait;
    let mut closed = Closed::default();
    let result = get_ready(core, deadline, &mut closed);
    let mut state = core.sleep.lock();
    let not = match result {
        Ok(()) if !state.off => {
            // Told under the lock: who wants in from here on has the daemon told after this.
            state.stage = Stage::Asleep;
            state.times += 1;
            answer(core, order, sleep::READY, "");
            state.told = is_wanted(core);
            if state.told {
                core.link.send(ToDaemon::WakeMe { order });
            }
            drop(state);
            core.events
                .note("asleep: every driver call of the program wakes it");
            return;
        }
        Ok(()) => Not::Busy("a call of the program came in between".into()),
        Err(not) => not,
    };
    drop(state);
    rise(core, &closed.devices);
    let (outcome, text) = match not {
        Not::Cannot(reasons) => (sleep::CANNOT, reasons.join("\n")),
        Not::Busy(why) => (sleep::BUSY, why),
    };
    core.events.note(format!("not put to sleep: {text}"));
    answer(core, order, outcome, &text);
}

/// What is closed on the way to sleep.
#[derive(Default)]
struct Closed {
    devices: Vec<usize>,
}

fn get_ready(core: &Arc<Core>, deadline: Instant, closed: &mut Closed) -> Result<(), Not> {
    let reasons = reasons(core);
    if !reasons.is_empty() {
        return Err(Not::Cannot(reasons));
    }
    let busy = |what: &str| Not::Busy(what.into());
    let Some(calls) = core.sleep.calls.get() else {
        return Err(busy("the library is not ready"));
    };
    core.sleep.held.store(true, Ordering::Release);
    core.wake_devices();
    calls.close(0);
    let inside = || !calls.drain(0, Instant::now());
    patiently(core, deadline, inside, "a call of the driver has not returned")?;
    // Devices come and go by such calls: from here on there are no others.
    closed.devices = core.devices().iter().map(|device| device.index).collect();
    for device in &closed.devices {
        core.gate.close(*device);
    }
    if !core.sleep.lock().patient && core.gate.waiters() > 0 {
        return Err(busy("it waits for its memory"));
    }
    for device in core.devices() {
        let inside = || !core.gate.drain(device.index, Instant::now());
        patiently(
            core,
            deadline,
            inside,
            "a call that uses the GPU has not returned",
        )?;
    }
    if core.captures() > 0 {
        return Err(busy("it records a graph"));
    }
    if core.arena.rooms.any() {
        return Err(busy("some of its memory lies on another card"));
    }
    for device in core.devices() {
        patiently(
            core,
            deadline,
            || at_work(&device),
            "its memory is on its way at this moment",
        )?;
        // In slices, so that a thread that wants in is not kept waiting.
        let mut work = None;
        let running = || {
            work = device
                .quiet
                .within(&device.memory, Instant::now() + Duration::from_millis(50));
            work.is_none()
        };
        patiently(core, deadline, running, "its work on the GPU does not end")?;
        if let Some(Err(error)) = work {
            return Err(Not::Busy(format!("waiting for its work failed: {error}")));
        }
        let state = device.lock();
        let there = movable_bytes(core, &device, &state) + state.pool.books.cached;
        if there > 0 {
            return Err(Not::Busy(format!(
                "{} that could be released are on the card",
                Bytes(there)
            )));
        }
    }
    core.arena
        .unpin_all(core)
        .map_err(|error| Not::Busy(format!("host memory cannot be unpinned: {error}")))?;
    Ok(())
}

/// Whether a device's owner is at work. It begins nothing while it is held.
fn at_work(device: &Device) -> bool {
    let state = device.lock();
    state.current.is_some() || !matches!(state.phase, Phase::Resident | Phase::Evicted)
}

/// Waits while something is so, until the deadline, and until somebody wants in.
fn patiently(core: &Core, deadline: Instant, mut is_so: impl FnMut() -> bool, what: &str) -> Result<(), Not> {
    loop {
        if core.sleep.lock().off || core.is_exiting() {
            return Err(Not::Busy("a call of the program came in between".into()));
        }
        if !is_so() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(Not::Busy(what.into()));
        }
        std::thread::sleep(LOOK);
    }
}

/// Lets everybody go on.
fn rise(core: &Arc<Core>, devices: &[usize]) {
    core.arena.sleep_does_not_come(core);
    core.sleep.held.store(false, Ordering::Release);
    for device in devices {
        core.gate.open(*device);
    }
    {
        let mut state = core.sleep.lock();
        state.stage = Stage::Awake;
        state.off = false;
    }
    if let Some(calls) = core.sleep.calls.get() {
        calls.open(0);
    }
    core.sleep.changed.notify_all();
    core.wake_devices();
    core.link.poke();
}

/// The driver lets calls in again. Makes no driver call.
pub(crate) fn awake(core: &Arc<Core>, order: u64) {
    {
        let mut state = core.sleep.lock();
        match state.stage {
            Stage::Asleep if state.order == order => {}
            // It undoes what it did and says so.
            Stage::Preparing if state.order == order => {
                state.off = true;
                return;
            }
            // It was asked, and is not told to.
            Stage::Awake if state.coming == order => {
                state.coming = 0;
                drop(state);
                return core.arena.sleep_does_not_come(core);
            }
            Stage::Awake | Stage::Preparing | Stage::Asleep => return,
        }
        // Nobody else gets here with this order.
        state.order = 0;
    }
    core.events.note("awake again");
    // Devices come and go by calls of the program, and none has been made since.
    let devices: Vec<usize> = core.devices().iter().map(|device| device.index).collect();
    rise(core, &devices);
}

/// A thread of the program waits at a gate.
pub(crate) fn wanted(core: &Arc<Core>) {
    let mut state = core.sleep.lock();
    match state.stage {
        Stage::Awake => {}
        Stage::Preparing => state.off |= !state.patient,
        Stage::Asleep if core.link.epoch() != 0 => {
            if !std::mem::replace(&mut state.told, true) {
                core.link.send(ToDaemon::WakeMe { order: state.order });
            }
        }
        Stage::Asleep => help_itself(core, &mut state),
    }
}

/// A daemon is there: it hears that this process sleeps, before it hears what it holds.
pub(crate) fn met(core: &Arc<Core>) {
    let mut state = core.sleep.lock();
    if state.stage != Stage::Asleep {
        return;
    }
    let order = state.order;
    core.link.send(ToDaemon::Sleeping { order });
    state.told = is_wanted(core);
    if state.told {
        core.link.send(ToDaemon::WakeMe { order });
    }
}

/// The connection is lost.
pub(crate) fn left(core: &Arc<Core>) {
    let mut state = core.sleep.lock();
    state.told = false;
    let coming = std::mem::take(&mut state.coming) != 0;
    match state.stage {
        Stage::Awake if coming => {
            drop(state);
            core.arena.sleep_does_not_come(core);
        }
        Stage::Awake => {}
        Stage::Preparing => state.off = true,
        Stage::Asleep if is_wanted(core) => help_itself(core, &mut state),
        Stage::Asleep => {}
    }
}

fn is_wanted(core: &Core) -> bool {
    core.gate.waiters() > 0 || core.sleep.calls.get().is_some_and(|calls| calls.waiters() > 0)
}

/// Starts the thread that helps itself, if it does not live.
fn help_itself(core: &Arc<Core>, state: &mut State) {
    if state.alone {
        return;
    }
    let with = Arc::clone(core);
    state.alone = threads::spawn("ebb-wake", move || alone(&with)).is_ok();
}

/// Waits for a daemon; without one, has the driver bring this process back.
fn alone(core: &Arc<Core>) {
    let mut due = Instant::now() + GRACE;
    let mut state = core.sleep.lock();
    while state.stage == Stage::Asleep && core.link.epoch() == 0 && !core.is_closed() {
        let left = due.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            // A daemon that comes is seen at the next look.
            let look = left.min(Duration::from_millis(200));
            let changed = core.sleep.changed.wait_timeout(state, look);
            state = changed.unwrap_or_else(PoisonError::into_inner).0;
            continue;
        }
        let order = state.order;
        drop(state);
        let itself = core.sleep.itself.get();
        match itself.map_or_else(|| Ok(()), |itself| itself.wake_itself()) {
            Ok(()) => awake(core, order),
            Err(error) => core.events.note(format!(
                "no daemon, and the driver does not bring it back: {error}"
            )),
        }
        due = Instant::now() + AGAIN;
        state = core.sleep.lock();
    }
    state.alone = false;
}
