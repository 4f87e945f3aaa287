//! The way in.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_device::{DeviceError, Direction};
use ebb_protocol::ToDaemon;
use ebb_protocol::wire::ask_kind;
use ebb_units::Bytes;

use super::chunks::{self, Chunk, In};
use super::{DEPTH, rehome, reopen};
use crate::arena::{Readiness, Transfer, room_of};
use crate::core::Core;
use crate::device::{Device, Failing, Mode, Phase};
use crate::error::TouchError;
use crate::steps;

/// The first pause after a failure, and the longest.
const BACK_OFF: Duration = Duration::from_millis(5);
pub(super) const BACK_OFF_MAX: Duration = Duration::from_millis(500);
/// How long errors other than a full card are tried before waiting threads hear of them.
const PATIENCE: Duration = Duration::from_secs(10);
/// Before asking again for what was denied.
const ASK_AGAIN: Duration = Duration::from_millis(250);
/// Between looks at a copy, while room for the next one may come. A chunk takes twenty times as long.
const LOOK: Duration = Duration::from_micros(100);

/// A chunk whose copy is under way, or that needs none.
struct Coming {
    chunk: In,
    transfer: Option<Transfer>,
    /// Bytes of the copy.
    copied: u64,
}

#[expect(clippy::large_enum_variant, reason = "one at a time, and most are this")]
enum Begun {
    UnderWay(Coming),
    /// No chunk that can be begun with the lease that there is, or none at all.
    Nothing,
    Failed,
}

impl Coming {
    fn is_by_ring(&self) -> bool {
        self.transfer.as_ref().is_some_and(Transfer::is_by_ring)
    }

    fn is_over(&self, device: &Device) -> bool {
        let transfer = self.transfer.as_ref();
        transfer.is_none_or(|transfer| transfer.is_done(&*device.memory))
    }
}

/// Which of these to wait for: the first, or one that is over before it, since what goes through the ring is slower than what goes straight.
fn first_over(device: &Device, under_way: &VecDeque<Coming>) -> usize {
    if !under_way.iter().any(Coming::is_by_ring) {
        return 0;
    }
    let over = |coming: &Coming| coming.is_over(device);
    let straight = || under_way.iter().position(|coming| !coming.is_by_ring());
    under_way.iter().position(over).or_else(straight).unwrap_or(0)
}

/// Brings everything back, as lease comes in. Returns when all is back, or an order is to be carried out first, or
/// nobody waits for it any more because it keeps failing.
pub(super) fn run(core: &Arc<Core>, device: &Arc<Device>) {
    let mut under_way: VecDeque<Coming> = VecDeque::new();
    let mut todo: VecDeque<(Chunk, u64)> = VecDeque::new();
    let (mut copied, mut from, mut until) = (0, None, None);
    let mut failed = false;
    core.arena.forgive();
    // What is left empty on other cards goes beside the copies.
    let rooms = &core.arena.rooms;
    let _helper = rooms
        .any_of(device.index)
        .then(|| rooms.help(core, device, Vec::new()));
    loop {
        let (interrupted, seen) = {
            let state = device.lock();
            let interrupted = state.stop || state.dead || !state.orders.is_empty() || core.sleep.holds();
            (interrupted, state.version)
        };
        let by_ring = under_way.iter().filter(|coming| coming.is_by_ring()).count();
        let free = (under_way.len() - by_ring < DEPTH, by_ring < DEPTH);
        if !interrupted && !failed && (free.0 || free.1) {
            match begin(core, device, &mut todo, free, under_way.is_empty()) {
                Begun::UnderWay(chunk) => {
                    from.get_or_insert_with(Instant::now);
                    under_way.push_back(chunk);
                    continue;
                }
                // Room that comes while a chunk is copied in is used at once: whoever makes it copies out at the same time.
                Begun::Nothing if todo.is_empty() && more_comes(core, device, &under_way, seen) => continue,
                Begun::Nothing => {}
                Begun::Failed => failed = true,
            }
        }
        if let Some(chunk) = under_way.remove(first_over(device, &under_way)) {
            let bytes = chunk.copied;
            if finish(core, device, chunk) {
                copied += bytes;
                until = Some(Instant::now());
            } else {
                failed = true;
            }
            continue;
        }
        let mut state = device.lock();
        if interrupted {
            break;
        }
        if state.pool.books.evicted == 0 {
            let nanos = from.zip(until).map_or(0, |(from, until): (Instant, Instant)| {
                until.duration_since(from).as_nanos()
            });
            let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
            state.counters.restores += 1;
            state.counters.bytes_in += copied;
            state.counters.nanos_in += nanos;
            // Who waits goes on at once, and was counted when it came.
            let waited_for = core.gate.waiters_for(device.index) > 0;
            state.back_at = (!waited_for).then(|| core.touches(device.index));
            if let Some(news) = state.clean_news(core) {
                core.link.send(news);
            }
            if let Some(slot) = state.slot {
                core.link.send(ToDaemon::Restored {
                    device: slot,
                    copied: Bytes(copied),
                    nanos,
                });
            }
            drop(state);
            reopen(core, device);
            return;
        }
        if failed {
            failed = false;
            let pause = give_up_or_pause(core, device, &mut state);
            if core.arena.rooms.has_work(device.index) {
                drop(state);
                rehome::run(core, device);
                continue;
            }
            if pause.is_none() && core.gate.waiters_for(device.index) == 0 {
                break;
            }
            drop(device.wait_for(state, pause.unwrap_or(BACK_OFF_MAX)));
            continue;
        }
        if state.version != seen {
            // A grant or a free came after the look at the lease: look again.
            continue;
        }
        state.phase = Phase::Waiting;
        let denied = ask(core, &mut state, 0);
        if core.arena.rooms.has_work(device.index) {
            // Home is not open: what lies on a card that needs its room goes to the host meanwhile.
            drop(state);
            rehome::run(core, device);
            continue;
        }
        // Woken by grants, frees, orders, a change of the connection.
        let later = core.arena.rooms.next_try(device.index);
        match later.into_iter().chain(denied.then_some(ASK_AGAIN)).min() {
            Some(later) => drop(device.wait_for(state, later)),
            None => drop(device.wait(state)),
        }
    }
    // An order comes first, the device goes, or the process is to sleep: the next round goes on from here.
    let mut state = device.lock();
    if core.sleep.holds() {
        // The daemon asks by itself for what a process that sleeps needs.
        state.cancel_restore_asks(core);
    }
    // An order overtakes the wish; so does a failure that nobody waits behind.
    state.bring_back = false;
    if state.pool.books.evicted > 0 {
        state.phase = Phase::Evicted;
    }
    state.counters.bytes_in += copied;
}

/// Asks for the lease that is missing while some is on its way in, and waits for it as long as the copy takes that is waited for next. `true`: there is
/// more to begin with.
fn more_comes(core: &Core, device: &Device, under_way: &VecDeque<Coming>, seen: u64) -> bool {
    let Some(next) = under_way.get(first_over(device, under_way)) else {
        return false;
    };
    let coming = under_way.iter().map(|coming| coming.chunk.len).sum();
    {
        let mut state = device.lock();
        if ask(core, &mut state, coming) || state.restore_outstanding() == 0 {
            return state.version != seen;
        }
    }
    loop {
        if next.is_over(device) {
            return false;
        }
        let state = device.lock();
        if state.version != seen {
            return true;
        }
        drop(device.wait_for(state, LOOK));
    }
}

/// Asks for the lease that is missing and not asked for yet; so much of what is away has it already. `true` if an earlier ask was denied: a pause is
/// due.
fn ask(core: &Core, state: &mut crate::device::State, coming: u64) -> bool {
    let denied: Vec<u64> = state
        .asks
        .iter()
        .filter(|(_, ask)| ask.restore && ask.denied.is_some())
        .map(|(id, _)| *id)
        .collect();
    for id in &denied {
        state.asks.remove(id);
    }
    if !denied.is_empty() {
        core.events
            .note("the daemon refused room for memory that is to come back; asking again");
        return true;
    }
    if state.mode != Mode::Connected {
        return false;
    }
    let books = &state.pool.books;
    let missing = books
        .evicted
        .saturating_sub(coming)
        .saturating_sub(books.unused())
        .saturating_sub(state.restore_outstanding());
    if missing > 0 {
        state.ask(core, ask_kind::RESTORE, missing, true);
    }
    false
}

/// After a failure: how long to pause, or `None` after the waiting threads were told.
pub(super) fn give_up_or_pause(
    core: &Core,
    device: &Device,
    state: &mut crate::device::State,
) -> Option<Duration> {
    let Some(failing) = state.failing else {
        // A chunk that was under way has arrived since.
        return Some(BACK_OFF);
    };
    let (patience, error) = match failing.error {
        DeviceError::OutOfMemory => (core.waits.alloc_max(), TouchError::OutOfMemory),
        other => (core.waits.alloc_max().min(PATIENCE), TouchError::Device(other)),
    };
    if failing.since.elapsed() >= patience {
        core.gate.fail_waiters(device.index, error);
        return None;
    }
    let pause = BACK_OFF.saturating_mul(1 << failing.tries.min(10));
    Some(pause.min(BACK_OFF_MAX))
}

pub(super) fn failure(core: &Core, device: &Device, doing: &str, error: DeviceError) {
    core.events
        .note(format!("device {}: {doing}: {error}", device.index));
    let mut state = device.lock();
    state.counters.driver_errors += 1;
    let failing = state.failing.get_or_insert(Failing {
        since: Instant::now(),
        tries: 0,
        error,
    });
    failing.tries += 1;
    failing.error = error;
    if error == DeviceError::Gone {
        state.dead = true;
    }
}

/// Makes room for the next chunk and starts its copy. `free`: whether one more may go straight, and by way of the ring. What can do neither now is
/// waited for only if there is nothing else (`alone`).
fn begin(
    core: &Arc<Core>,
    device: &Device,
    todo: &mut VecDeque<(Chunk, u64)>,
    free: (bool, bool),
    alone: bool,
) -> Begun {
    let memory = &*device.memory;
    device.retry_stuck();
    let coming = {
        let mut state = device.lock();
        if todo.is_empty() {
            match chunks::away(core, device, &state) {
                Ok(ready) => todo.extend(ready),
                Err(error) => {
                    drop(state);
                    failure(core, device, "copying in", error);
                    return Begun::Failed;
                }
            }
        }
        loop {
            let segments = todo.iter().map(|(_, segment)| *segment);
            let ready = core.arena.first_ready(segments, free.0, free.1);
            let next = ready.or(alone.then_some(0)).and_then(|at| todo.remove(at));
            let Some((next, _)) = next else {
                return Begun::Nothing;
            };
            match In::begin(core, &mut state, next) {
                Ok(Some(coming)) if core.arena.readiness(&coming.copy.pieces) != Readiness::Ready => {
                    coming.not_yet(core, &mut state);
                }
                Ok(Some(coming)) => {
                    state.phase = Phase::CopyingIn;
                    break coming;
                }
                Ok(None) => {}
                Err(_) => {
                    // Looked at anew when there is more: what is on disk may have come by then.
                    todo.clear();
                    return Begun::Nothing;
                }
            }
        }
    };
    let (coming, at) = match coming.bring(core, device) {
        Ok(brought) => brought,
        Err(error) => {
            failure(core, device, "making room to copy in", error);
            device.wake();
            return Begun::Failed;
        }
    };
    if coming.copy.is_blank() {
        return Begun::UnderWay(Coming {
            chunk: coming,
            transfer: None,
            copied: 0,
        });
    }
    let filled = coming.copy.filled(coming.len);
    let fill = || {
        for (from, len) in coming.copy.zeros(coming.len) {
            memory.zero(at + from, len)?;
        }
        core.arena
            .transfer(device, Direction::In, at, &coming.copy.pieces, &filled)
    };
    match fill() {
        Ok(transfer) => Begun::UnderWay(Coming {
            chunk: coming,
            transfer: Some(transfer),
            copied: filled.iter().map(|(_, len)| len).sum(),
        }),
        Err(error) => {
            failure(core, device, "copying in", error);
            undo(core, device, coming);
            Begun::Failed
        }
    }
}

/// A copy failed, or may have: takes the device memory away again. The host copy is as good as before.
fn undo(core: &Core, device: &Device, chunk: In) {
    // If it cannot be known whether the copy still runs, the memory goes all the same: the driver keeps it alive for
    // copies that it has begun, and faults the ones that it has not, into a context that is lost anyway.
    let _ = steps::settle(&*device.memory, Direction::In);
    if let Some(room) = room_of(&chunk.copy.pieces) {
        // By way of host memory, in case it is the link between the cards.
        core.arena.rooms.doubt(room);
        core.arena.rooms.shun(core, room);
    }
    chunk.undo(core, device);
    device.wake();
}

/// Waits for a copy. `false` if the chunk is still in host memory.
fn finish(core: &Core, device: &Device, coming: Coming) -> bool {
    let Coming { chunk, transfer, .. } = coming;
    if let Some(transfer) = transfer
        && let Err(error) = transfer.wait(&core.arena, &*device.memory)
    {
        failure(core, device, "copying in", error);
        undo(core, device, chunk);
        return false;
    }
    let pieces = chunk.done(core, device);
    core.arena.give_back(&pieces);
    core.arena.rooms.sweep_beside(core, device.index);
    // A restore may wait half-way, for room that somebody else can only make once it has the segments that this emptied.
    core.link.poke();
    device.wake();
    true
}
