//! The way out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use ebb_device::{DeviceError, Direction};
use ebb_protocol::ToDaemon;
use ebb_protocol::wire::outcome;
use ebb_units::Bytes;

use super::chunks::{self, Chunk, Out, Undone};
use super::survey::Survey;
use super::{drops, mesh, reopen};
use crate::arena::{Readiness, Transfer, room_of};
use crate::core::Core;
use crate::device::{Device, Mode, Order, Phase};
use crate::kept::HostCopy;
use crate::{beside, frameworks, sleep, steps, streamed};

/// A chunk whose copy is under way, or that needs none.
pub(super) struct Leaving {
    chunk: Chunk,
    pub(super) out: Out,
    /// Where its bytes are when the transfer is over.
    copy: HostCopy,
    transfer: Option<Transfer>,
    /// Bytes of the copy.
    copied: u64,
    pub(super) mapped: Mapped,
}

/// Whether a chunk that leaves is mapped still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mapped {
    Untried,
    /// It is; it goes by itself.
    Tried,
    Not,
}

impl Leaving {
    pub(super) fn is_copied(&self) -> bool {
        self.transfer.is_some()
    }
}

/// What an order did.
#[derive(Default)]
struct Done {
    copied: u64,
    unchanged: u64,
    zero: u64,
    from: Option<Instant>,
    until: Option<Instant>,
}

/// Carries an order out: unused lease first, then cached chunks, then eviction.
pub(super) fn carry_out(core: &Arc<Core>, device: &Arc<Device>, order: &Order) {
    let mut left = order.bytes;
    let mut done = Done::default();
    device.lock().trouble = None;
    core.events.note(format!(
        "device {}: {} wanted back: {}",
        device.index,
        Bytes(order.bytes),
        order.reason
    ));
    let mut result = outcome::DONE;
    if order.beside {
        result = beside_alone(core, device, order, &mut left);
    } else {
        give_without_copy(core, device, order, &mut left);
    }
    if !order.beside && left > 0 && !device.lock().is_void(order) {
        result = evict(core, device, order, &mut left, &mut done);
        // What was freed meanwhile went to the cache.
        give_without_copy(core, device, order, &mut left);
        if left == 0 {
            result = outcome::DONE;
        }
    }
    let nanos = done
        .from
        .zip(done.until)
        .map_or(0, |(from, until)| until.duration_since(from).as_nanos());
    let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
    let mut state = device.lock();
    state.current = None;
    let trouble = state.trouble.take();
    if result == outcome::FAILED {
        // Before the order's end, which the daemon may take for the last word on it.
        sleep::not_released(core, device.index, trouble.as_deref());
    }
    let counters = &mut state.counters;
    counters.evictions += u64::from(done.copied + done.unchanged + done.zero > 0);
    counters.bytes_out += done.copied;
    counters.bytes_unchanged += done.unchanged;
    counters.bytes_zero += done.zero;
    counters.nanos_out += nanos;
    match result {
        outcome::BUSY => counters.busy += 1,
        outcome::CAPTURING => counters.capturing += 1,
        outcome::NO_ROOM => counters.no_room += 1,
        outcome::FAILED => counters.failed += 1,
        _ => {}
    }
    if let Some(slot) = state.slot.filter(|_| order.epoch == state.epoch) {
        // What is left to be sent away is judged by this.
        if let Some(news) = state.beside_news(core) {
            core.link.send(news);
        }
        if let Some(news) = state.clean_news(core) {
            core.link.send(news);
        }
        // More may be away than was copied, and what is to come back is judged by that.
        if state.pool.books.evicted != state.told_evicted
            && let Some(usage) = state.usage(core, core.touches(device.index))
        {
            core.link.send(usage);
        }
        core.link.send(ToDaemon::ReclaimDone {
            device: slot,
            order: order.id,
            outcome: result,
            copied: Bytes(done.copied),
            nanos,
        });
    }
    drop(state);
    core.link.poke();
    core.arena.rest(core);
}

/// Lease that is unused, then cached spans and what stream-ordered pools keep.
fn give_without_copy(core: &Core, device: &Device, order: &Order, left: &mut u64) {
    let mut state = device.lock();
    state.give_lease(core, order, left);
    if *left > 0 && state.pool.books.stuck > 0 {
        drop(state);
        device.retry_stuck();
        state = device.lock();
        state.give_lease(core, order, left);
    }
    if *left > state.pool.books.cached && !state.dead {
        drop(state);
        streamed::make_room(core, device.index);
        frameworks::make_room_as_owner(core, device.index, *left);
        state = device.lock();
        state.give_lease(core, order, left);
    }
    while *left > 0 && state.mode != Mode::Alone && !state.is_void(order) {
        // One span at a time: each is reported as soon as it is gone.
        let apart = state.pool.drop_cached(1);
        if apart.chunks.is_empty() {
            break;
        }
        drop(state);
        device.take_apart(core, &apart);
        state = device.lock();
        state.give_lease(core, order, left);
    }
}

/// Evicts until `left` is nothing; an [`outcome`].
fn evict(core: &Arc<Core>, device: &Device, order: &Order, left: &mut u64, done: &mut Done) -> u32 {
    {
        let state = device.lock();
        if state.dead || core.is_exiting() {
            return outcome::FAILED;
        }
        if chunks::movable_bytes(core, device, &state) == 0 {
            drop(state);
            return beside_alone(core, device, order, left);
        }
    }
    // Before the gate closes: as long as there is no room for a single chunk, the program may go on.
    let granule = device.memory.granularity();
    let (first, all, whole) = {
        let state = device.lock();
        let chosen = chunks::candidates(core, device, &state, *left);
        let copied = |(_, len): &(Chunk, u64)| (*len > 0).then_some(*len);
        let all: u64 = chosen.iter().filter_map(copied).sum();
        // What goes without a copy needs no room and goes first.
        let rest = left.saturating_sub(chunks::movable_bytes(core, device, &state) - all);
        match chosen.iter().find_map(copied) {
            Some(first) if rest > 0 => (first, all.min(rest).max(first), whole_chunks(&chosen, rest)),
            _ => (0, 0, Vec::new()),
        }
    };
    let elsewhere = core.arena.rooms.ask(core, device, whole.iter().sum());
    // Its rooms are made while the program comes to a halt, and then ahead of the copies.
    let _helper = (elsewhere > 0).then(|| core.arena.rooms.help(core, device, whole));
    // What turns out to be changed of those asks for room when it is known.
    let here = all
        .saturating_sub(elsewhere)
        .saturating_sub(core.arena.kept_common(device.index));
    let mut room = core.arena.has_room(here, granule);
    if !room {
        core.link.send(core.arena.want_now(here, granule));
        room = elsewhere >= first || await_room(core, device, order, first);
        // What is zero needs no room. To find that out costs the program some milliseconds, and somebody waits for it.
        if !room && (device.lock().unprinted || device.lock().is_void(order)) {
            want_no_more(core, device);
            return outcome::NO_ROOM;
        }
    }
    if let Err(result) = close(core, device, Instant::now() + core.waits.busy()) {
        want_no_more(core, device);
        return result;
    }
    // What streams freed is nobody's now, whatever they were doing: it goes without a copy.
    streamed::after_quiet(core, device.index);
    frameworks::after_quiet(core, device.index, *left);
    give_without_copy(core, device, order, left);
    if !room && *left > 0 {
        mesh::in_place_of_copies(core, device, *left);
        give_without_copy(core, device, order, left);
    }
    core.arena.copies(true);
    let result = copy_out(core, device, order, room, left, done);
    core.arena.copies(false);
    want_no_more(core, device);
    beside::send_away(core, device, order, left);
    let mut state = device.lock();
    state.phase = Phase::Evicted;
    let back = state.pool.books.evicted == 0;
    let used = state.pool.books.used;
    drop(state);
    if back {
        reopen(core, device);
    }
    result.unwrap_or_else(|| {
        if *left > 0 {
            nothing_left(device, used)
        } else {
            outcome::DONE
        }
    })
}

/// The chunks that so many bytes are, as they are taken, by their lengths: a room elsewhere holds one chunk.
fn whole_chunks(chosen: &[(Chunk, u64)], bytes: u64) -> Vec<u64> {
    let mut sum = 0;
    let copied = chosen.iter().map(|(_, len)| *len).filter(|len| *len > 0);
    copied
        .take_while(|len| {
            let more = sum < bytes;
            sum += len;
            more
        })
        .collect()
}

/// The eviction needs no more room than it has.
fn want_no_more(core: &Core, device: &Device) {
    core.arena.want_no_more();
    core.arena.rooms.end(core, device);
    core.link.poke();
}

/// Nothing of the pool can move, or is to: what the driver places by itself goes all the same.
fn beside_alone(core: &Arc<Core>, device: &Device, order: &Order, left: &mut u64) -> u32 {
    if beside::has_any(core, device) {
        if let Err(result) = close(core, device, Instant::now() + core.waits.busy()) {
            return result;
        }
        beside::send_away(core, device, order, left);
        let back = device.lock().pool.books.evicted == 0;
        if back {
            reopen(core, device);
        }
    }
    let used = device.lock().pool.books.used;
    if *left == 0 {
        outcome::DONE
    } else {
        nothing_left(device, used)
    }
}

fn nothing_left(_: &Device, used: u64) -> u32 {
    // All that there was is given back, or what remains cannot be moved.
    if used == 0 {
        outcome::DONE
    } else {
        outcome::NOTHING_LEFT
    }
}

/// Closes the gate and waits until nothing of the program runs on the device. Not at all, or completely.
pub(super) fn close(core: &Core, device: &Device, deadline: Instant) -> Result<(), u32> {
    if core.captures() > 0 {
        return Err(outcome::CAPTURING);
    }
    let mut state = device.lock();
    if state.closed {
        return Ok(());
    }
    state.closed = true;
    state.phase = Phase::Closing;
    drop(state);
    core.gate.close(device.index);
    let result = if !core.gate.drain(device.index, deadline) {
        Err(outcome::BUSY)
    } else if core.captures() > 0 {
        // It began before the gate closed. From here on none can begin: that passes the gate.
        Err(outcome::CAPTURING)
    } else {
        quiet(core, device, deadline)
    };
    if result.is_err() {
        reopen(core, device);
    }
    result
}

/// Waits for all work that may use the device's memory: its own, and that of devices that reach it.
fn quiet(core: &Core, device: &Device, deadline: Instant) -> Result<(), u32> {
    let users = core.reach.users(device.index);
    for user in core.devices() {
        if !users.has(user.index) {
            continue;
        }
        match user.quiet.within(&user.memory, deadline) {
            Some(Ok(())) => {}
            None => return Err(outcome::BUSY),
            Some(Err(error)) => {
                note_error(core, &user, "waiting for its work", error);
                return Err(outcome::FAILED);
            }
        }
    }
    Ok(())
}

fn note_error(core: &Core, device: &Device, doing: &str, error: DeviceError) {
    core.events
        .note(format!("device {}: {doing}: {error}", device.index));
    let mut state = device.lock();
    state.counters.driver_errors += 1;
    state.trouble = Some(format!("{doing}: {error}"));
    if error == DeviceError::Gone {
        state.dead = true;
    }
}

/// The pipeline: while one chunk copies, the one before it is unmapped and released; those that need no copy leave several at a time. `None` if nothing went wrong. Without
/// `room`, only what needs none leaves.
fn copy_out(
    core: &Arc<Core>,
    device: &Device,
    order: &Order,
    room: bool,
    left: &mut u64,
    done: &mut Done,
) -> Option<u32> {
    device.lock().phase = Phase::CopyingOut;
    let (mut survey, mut feed) = if *left > 0 {
        Survey::take(core, device, *left)
    } else {
        Default::default()
    };
    let granule = device.memory.granularity();
    let mut under_way: VecDeque<Leaving> = VecDeque::new();
    let mut result = None;
    loop {
        let coming: u64 = under_way.iter().map(|chunk| chunk.out.len).sum();
        let mut more = false;
        if result.is_none() && drops::is_open(&under_way) && *left > coming {
            let void = {
                let state = device.lock();
                state.is_void(order) || core.is_exiting()
            };
            more = feed.look(&mut survey, core, device, false);
            match feed.next(room) {
                Some(_) if void => result = Some(outcome::FAILED),
                Some(id) => match begin(core, device, id, &survey, done) {
                    Begun::UnderWay(chunk) => {
                        under_way.push_back(chunk);
                        continue;
                    }
                    Begun::Gone => continue,
                    Begun::NoRoom(len) => {
                        let movable = chunks::movable_bytes(core, device, &device.lock());
                        let more = left.saturating_sub(coming).min(movable).max(len);
                        core.link.send(core.arena.want_now(more, granule));
                        if !under_way.is_empty() {
                            // Asked for now, needed when what is under way is done.
                            feed.put_back(id);
                        } else if await_room(core, device, order, len) {
                            feed.put_back(id);
                            continue;
                        } else {
                            result = Some(outcome::NO_ROOM);
                        }
                    }
                    Begun::Again => {
                        feed.put_back(id);
                        continue;
                    }
                    Begun::Failed => result = Some(outcome::FAILED),
                },
                None if more && under_way.is_empty() => {
                    feed.look(&mut survey, core, device, true);
                    continue;
                }
                None => {}
            }
        }
        drops::unmap_neighbours(device, &mut under_way);
        let Some(chunk) = under_way.pop_front() else {
            // Nothing under way: either all is done, or there is nothing more to begin.
            if result.is_some() || *left == 0 || !more && feed.is_empty(room) {
                return result.or((*left > 0 && !room).then_some(outcome::NO_ROOM));
            }
            continue;
        };
        match finish(core, device, chunk, done) {
            Finished::Gone => {}
            Finished::Again(chunk) => feed.put_back(chunk),
            Finished::Stands => result = Some(outcome::FAILED),
        }
        core.arena.copied(core);
        device.lock().give_lease(core, order, left);
    }
}

#[expect(clippy::large_enum_variant, reason = "one at a time, and most are this")]
enum Begun {
    UnderWay(Leaving),
    /// It was freed.
    Gone,
    /// The arena has no room for so many bytes.
    NoRoom(u64),
    /// Not to another card: the next try goes by the host.
    Again,
    Failed,
}

/// What became of a chunk whose copy was under way.
enum Finished {
    Gone,
    /// It is still there, and may go by the host.
    Again(Chunk),
    Stands,
}

fn begin(core: &Core, device: &Device, chunk: Chunk, survey: &Survey, done: &mut Done) -> Begun {
    let _placing = core.arena.placing();
    let (mut out, mut copy, runs) = {
        let mut state = device.lock();
        let Some(out) = Out::begin(core, &mut state, chunk) else {
            return Begun::Gone;
        };
        let Some((copy, runs)) = copy_for(core, device, &out, chunk, survey) else {
            let len = out.len;
            out.stays_locked(core, &mut state);
            drop(state);
            device.wake();
            return Begun::NoRoom(len);
        };
        (out, copy, runs)
    };
    if runs.is_empty() {
        return Begun::UnderWay(Leaving {
            chunk,
            out,
            copy,
            transfer: None,
            copied: 0,
            mapped: Mapped::Untried,
        });
    }
    if !furnish(core, device, out.len, &mut copy) {
        let len = out.len;
        out.stays(core, device);
        device.wake();
        return Begun::NoRoom(len);
    }
    done.from.get_or_insert_with(Instant::now);
    let at = match out.seat(device) {
        Ok(at) => at,
        Err(error) => {
            note_error(core, device, "making room to copy from", error);
            stay(core, device, out, &copy, false);
            return Begun::Failed;
        }
    };
    match core
        .arena
        .transfer(device, Direction::Out, at, &copy.pieces, &runs)
    {
        Ok(transfer) => Begun::UnderWay(Leaving {
            chunk,
            out,
            copy,
            transfer: Some(transfer),
            copied: runs.iter().map(|(_, len)| len).sum(),
            mapped: Mapped::Untried,
        }),
        Err(error) => {
            note_error(core, device, "copying out", error);
            let again = is_links_fault(core, &copy, error);
            stay(core, device, out, &copy, true);
            if again { Begun::Again } else { Begun::Failed }
        }
    }
}

/// A copy failed: whether it was one to another card, which is not asked again then. Chunks that did not get there go by the host.
fn is_links_fault(core: &Core, copy: &HostCopy, error: DeviceError) -> bool {
    let room = room_of(&copy.pieces).filter(|_| error != DeviceError::Gone);
    room.inspect(|room| core.arena.rooms.shun(core, room)).is_some()
}

/// Makes the room on another card that a copy is to go to. If the driver does not give it, host memory has to do; `false` if there is
/// none of that either.
fn furnish(core: &Core, device: &Device, len: u64, copy: &mut HostCopy) -> bool {
    let Some(room) = room_of(&copy.pieces) else {
        return true;
    };
    let Err(error) = core.arena.rooms.build(core, device, room) else {
        return true;
    };
    core.events.note(format!(
        "device {}: no memory on another card: {error}",
        device.index
    ));
    match core.arena.take(len, device.memory.granularity()) {
        Some(pieces) => copy.pieces = pieces,
        None => return false,
    }
    true
}

/// What is to be a chunk's copy, and the runs of it that are not in it yet. `None` if there is no room.
fn copy_for(
    core: &Core,
    device: &Device,
    out: &Out,
    chunk: Chunk,
    survey: &Survey,
) -> Option<(HostCopy, Vec<(u64, u64)>)> {
    if !out.written {
        return Some(Default::default());
    }
    // The chunk is taken, so that from here on no segment of its copy can go to disk that has not begun to.
    let kept = core.arena.claim(out.kept).filter(|kept| {
        let here = core.arena.readiness(&kept.pieces) == Readiness::Ready;
        if !here {
            core.arena.give_back(&kept.pieces);
        }
        here
    });
    let prints = survey.of(chunk, out.handle);
    if !prints.is_empty() && prints.iter().all(|print| print.zero) {
        let (steady, kept) = (kept.is_some(), kept.unwrap_or_default());
        core.arena.give_back(&kept.pieces);
        let pieces = Vec::new();
        let copy = HostCopy {
            pieces,
            prints,
            steady,
        };
        return Some((copy, Vec::new()));
    }
    let known = !prints.is_empty();
    let (pieces, stale) = match kept {
        Some(kept) => {
            let stale = if known {
                kept.stale(out.len, &prints)
            } else {
                vec![(0, out.len)]
            };
            let pieces = core.arena.own(kept.pieces, &stale, device.memory.granularity())?;
            (pieces, Some(stale))
        }
        None => match core.arena.rooms.book(device, out.len) {
            Some(room) => (vec![room], None),
            None => (core.arena.take(out.len, device.memory.granularity())?, None),
        },
    };
    let copy = HostCopy {
        pieces,
        prints,
        steady: stale.as_ref().is_some_and(Vec::is_empty),
    };
    let stale = stale.unwrap_or_else(|| copy.filled(out.len));
    Some((copy, stale))
}

/// The chunk stays where it is.
fn stay(core: &Core, device: &Device, out: Out, copy: &HostCopy, unsure: bool) {
    if unsure && !steps::settle(&*device.memory, Direction::Out) {
        core.arena.lose(&copy.pieces);
    } else {
        core.arena.give_back(&copy.pieces);
    }
    out.stays(core, device);
    device.wake();
}

/// Waits for a copy, then lets the chunk's memory go.
fn finish(core: &Core, device: &Device, leaving: Leaving, done: &mut Done) -> Finished {
    let Leaving {
        chunk,
        out,
        copy,
        transfer,
        copied,
        mapped,
    } = leaving;
    if let Some(transfer) = transfer {
        if let Err(error) = transfer.wait(&core.arena, &*device.memory) {
            note_error(core, device, "copying out", error);
            let again = is_links_fault(core, &copy, error);
            stay(core, device, out, &copy, true);
            return if again {
                Finished::Again(chunk)
            } else {
                Finished::Stands
            };
        }
        if let Some(room) = room_of(&copy.pieces) {
            core.arena.rooms.worked(room);
        }
    }
    let zero: u64 = copy.zeros(out.len).iter().map(|(_, len)| len).sum();
    let unchanged = if out.written { out.len - copied - zero } else { 0 };
    let down = out.take_down(core, device, copy, mapped != Mapped::Not);
    if !matches!(down, Err(Undone::Stands(..))) {
        // The daemon learns the link's speed from this: what was dropped is not counted.
        if copied > 0 {
            done.until = Some(Instant::now());
        }
        done.copied += copied;
        done.zero += zero;
        done.unchanged += unchanged;
    }
    let finished = match down {
        Ok(()) => Finished::Gone,
        Err(Undone::Stands(doing, error, copy)) => {
            core.arena.give_back(&copy.pieces);
            note_error(core, device, doing, error);
            Finished::Stands
        }
        Err(Undone::Stuck(doing, error)) => {
            note_error(core, device, doing, error);
            Finished::Stands
        }
    };
    device.wake();
    finished
}

/// Waits for room in the arena that was asked for, as long as more keeps coming. `false` if none came in time.
fn await_room(core: &Core, device: &Device, order: &Order, len: u64) -> bool {
    let granule = device.memory.granularity();
    let deadline = Instant::now() + core.config.arena_wait;
    let mut state = device.lock();
    loop {
        if core.arena.has_room(len, granule) {
            return true;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || state.is_void(order) || state.mode != Mode::Connected || core.is_exiting() {
            return false;
        }
        state = device.wait_for(state, left);
    }
}
