//! Host memory for evicted chunks: segments that the daemon lends, as memfds.
//!
//! ```text
//!   ArenaGive -> Arriving -> Ready -> Leaving -> ArenaReturn
//!                map,        pieces    unregister, unmap
//!                register
//! ```
//! Mapping, registering and above all unregistering (which waits for all work of the GPU) happen on the arena's own
//! thread, ahead of need; nobody who evicts, restores or frees waits for them. A segment is handed out in pieces only
//! when it is ready, and leaves only when it is empty.
//!
//! What a chunk left here when it came back is *kept* ([`crate::kept`]), and gives way to whoever needs the room. What other tasks have as well may lie
//! in segments that they have in common ([`common`]).
//!
//! # Locks
//! `state` may be taken under a device's lock, and the link's outbox and the events under it. No driver call is made
//! under it.

mod common;
mod pinning;
mod ring;
mod rooms;
mod shunned;
mod tier;
mod transfer;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use ebb_alloc::Piece;
use ebb_device::{DeviceError, Fingerprint, HostAddr};
use ebb_protocol::ToDaemon;
use ebb_protocol::wire::{MAX_FDS, SegmentInfo};
use ebb_units::Bytes;

use crate::core::Core;
use crate::fd::{ChildSlot, OurFd};
use crate::kept::{HostCopy, KeptCopies, OnCard, Ticket};
use crate::pace::Pace;
use crate::threads;
pub(crate) use common::{Slots, is_common};
use ring::Ring;
use rooms::Rooms;
pub(crate) use rooms::room_of;
pub(crate) use tier::Readiness;
pub(crate) use transfer::Transfer;

/// How many descriptors a forked child can close: 1,024 segments, which are 256 GiB at the daemon's usual size.
const FDS: usize = 1024;

#[derive(Debug)]
struct Segment {
    bytes: u64,
    /// Shared with declarations that wait to be sent.
    fd: Arc<OurFd>,
    host: HostAddr,
    /// Index of the device that it was registered with.
    registered: Option<usize>,
    leaving: bool,
    /// It is to be registered again, and who copies waits for that.
    pinning: bool,
    /// Chunks that are being copied to or from it.
    flying: u32,
    /// The program closed the descriptor before a new daemon could be told: it knows nothing of this segment, which takes
    /// nothing in any more and leaves when it is empty.
    unknown: bool,
    /// One that others have in common with this process: nobody can write it.
    common: bool,
    /// On disk, or on its way there or back.
    tier: tier::Tier,
}

#[derive(Debug)]
enum Job {
    Arrive {
        id: u64,
        bytes: u64,
        fd: Arc<OurFd>,
    },
    Leave {
        id: u64,
    },
    /// Let go of so much for the disk.
    Part {
        bytes: u64,
    },
    /// Map again.
    TakeBack {
        id: u64,
    },
    /// Read from its file.
    ReadBack {
        id: u64,
    },
    /// Tell of what is at rest.
    Rest,
    /// Something is offered that is in common with others.
    Common(Box<common::Offer>),
}

#[derive(Debug, Default)]
struct State {
    slots: Slots,
    kept: KeptCopies,
    segments: BTreeMap<u64, Segment>,
    jobs: VecDeque<Job>,
    /// Bytes that the daemon wants back, beyond what is leaving.
    recall: u64,
    /// An eviction waits for segments.
    urgent: bool,
    /// And the daemon wants some of them back all the same.
    yields: bool,
    /// Pieces whose copies may still be under way for all that is known: never used again.
    lost: u64,
    /// What the daemon was told last that we want.
    wanted: u64,
    started: bool,
    /// Read from their files by this process; a daemon that has them in its books is to hear of it.
    read_alone: Vec<u64>,
    /// Nothing is to be registered: the process is to be checkpointed, or is.
    unpinned: bool,
    /// Where what is not pinned is copied through, if there is one.
    ring: Option<Arc<Ring>>,
    /// There will be one in a moment, in this segment.
    ring_comes: Option<u64>,
    /// Room for a ring, wanted besides what is for bytes.
    spare: u64,
    /// Some segments were unpinned ahead of a hibernation.
    early: pinning::Early,
    /// The last notice of what is at rest.
    notice: u64,
    /// The driver does not register what can only be read: nothing is offered for.
    common_refused: bool,
    /// What the daemon was told last of bytes in common segments.
    common_told: (u64, u64),
    /// Bytes that came to lie in common segments lately, and how many of such were written since.
    taken: (u64, u64),
}

/// The arena of a process.
#[derive(Debug)]
pub(crate) struct Arena {
    state: Mutex<State>,
    /// Held while segments are registered (shared) or unregistered, driver calls included: taken first, and only by threads of the
    /// arena's own and by a device that leaves, whose context must not be destroyed under such a call.
    registering: RwLock<()>,
    work: Condvar,
    /// Room on other cards, which pieces may name as well.
    pub(crate) rooms: Rooms,
    /// The descriptors once more, for a forked child, which must not take the lock.
    fds: Box<[ChildSlot]>,
}

/// Sums for the report.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    pub(crate) total: u64,
    /// By what is away.
    pub(crate) used: u64,
    /// By copies of what is back.
    pub(crate) kept: u64,
    /// In common segments, beyond those: by what is away, and by copies of what is back.
    pub(crate) common: (u64, u64),
    pub(crate) registered: u64,
    pub(crate) segments: u64,
    pub(crate) lost: u64,
    pub(crate) arriving: u64,
    /// On disk, or on the way there or back.
    pub(crate) away: u64,
}

impl Arena {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::default(),
            registering: RwLock::new(()),
            work: Condvar::new(),
            rooms: Rooms::default(),
            fds: (0..FDS).map(|_| ChildSlot::new()).collect(),
        }
    }

    fn registering(&self) -> RwLockReadGuard<'_, ()> {
        self.registering.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn unregistering(&self) -> RwLockWriteGuard<'_, ()> {
        self.registering.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for a chunk, with host addresses; all of it or nothing. Kept copies give way.
    pub(crate) fn take(&self, len: u64, granule: u64) -> Option<Vec<Piece>> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.room(granule) < len {
            return None;
        }
        loop {
            let taken = state.slots.take(len, granule);
            if taken.is_some() || !state.kept.give_up_oldest(&mut state.slots) {
                return taken;
            }
        }
    }

    /// Keeps the copy of what is back on the card, as long as nobody needs the room. `Err` if it is needed already: the
    /// copy is the caller's to give back. Of a chunk of `len` bytes on a device.
    pub(crate) fn keep(
        &self,
        copy: HostCopy,
        at_most: u64,
        device: usize,
        len: u64,
    ) -> Result<Ticket, HostCopy> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let own = copy.pieces.iter().filter(|piece| !is_common(piece));
        let bytes: u64 = own.map(|piece| piece.len).sum();
        let leaves = |piece: &Piece| {
            let segment = state.segments.get(&piece.segment);
            segment.is_none_or(|s| s.unknown || !s.tier.is_here())
        };
        let of_use = !copy.pieces.is_empty() && !copy.prints.is_empty();
        // What lies in common segments alone is in nobody's way.
        let in_the_way = bytes > 0 && state.recall > 0;
        if !of_use || in_the_way || at_most == 0 || bytes > at_most || copy.pieces.iter().any(leaves) {
            return Err(copy);
        }
        while state.kept.bytes() > at_most - bytes {
            state.kept.give_up_oldest(&mut state.slots);
        }
        Ok(state.kept.add(copy, device, len))
    }

    /// Takes a kept copy back, to be used as the chunk's own. `None` if it had to give way.
    pub(crate) fn claim(&self, ticket: Option<Ticket>) -> Option<HostCopy> {
        self.lock().kept.claim(ticket?)
    }

    /// What a kept copy is a copy of. `None` if it had to give way.
    pub(crate) fn prints_of(&self, ticket: Ticket) -> Option<Vec<Fingerprint>> {
        self.lock().kept.get(ticket).map(|copy| copy.prints.clone())
    }

    /// A chunk is not as its kept copy is.
    pub(crate) fn differs(&self, ticket: Ticket) {
        self.lock().kept.differs(ticket);
    }

    /// What a device has of chunks with kept copies.
    pub(crate) fn on_card(&self, device: usize) -> OnCard {
        self.lock().kept.on_card(device)
    }

    /// Kept copies that are of no use any more.
    pub(crate) fn give_up(&self, tickets: impl IntoIterator<Item = Ticket>) {
        let mut tickets = tickets.into_iter().peekable();
        if tickets.peek().is_none() {
            return;
        }
        let mut guard = self.lock();
        let state = &mut *guard;
        for ticket in tickets {
            state.kept.give_up(ticket, &mut state.slots);
        }
        self.send_off(state);
    }

    /// The engine is dropped: wakes the arena's threads, which end.
    pub(crate) fn close(&self) {
        if let Some(ring) = &self.lock().ring {
            ring.shut();
        }
        self.work.notify_all();
    }

    /// Whether [`Self::take`] would find room.
    pub(crate) fn has_room(&self, len: u64, granule: u64) -> bool {
        self.lock().room(granule) >= len
    }

    /// Pieces that are not needed any more. Segments that ran empty leave if the daemon asked for some.
    pub(crate) fn give_back(&self, pieces: &[Piece]) {
        if pieces.is_empty() {
            return;
        }
        let mut state = self.lock();
        for piece in pieces {
            if rooms::is_room(piece) {
                self.rooms.let_go(piece);
                continue;
            }
            let given = state.slots.give_back(*piece);
            debug_assert!(given.is_ok(), "{piece:?} was not taken");
        }
        self.send_off(&mut state);
    }

    /// Pieces that must never be used again.
    pub(crate) fn lose(&self, pieces: &[Piece]) {
        // Nothing is ever copied to those.
        let (common, pieces): (Vec<Piece>, Vec<Piece>) = pieces.iter().partition(|piece| is_common(piece));
        self.give_back(&common);
        let (rooms, here): (Vec<&Piece>, _) = pieces.iter().partition(|piece| rooms::is_room(piece));
        for room in rooms {
            self.rooms.lose(room);
        }
        self.lock().lost += here.iter().map(|piece: &&Piece| piece.len).sum::<u64>();
    }

    /// Lets empty segments leave, as far as the daemon asked.
    fn send_off(&self, state: &mut State) {
        state.give_way();
        state.leave_common();
        let alone = state.segments.len() == 1 && state.jobs.is_empty();
        for (id, bytes) in state.slots.empty() {
            let ring = state.ring.as_ref().is_some_and(|ring| ring.id == id);
            if state.ring_comes == Some(id) {
                continue;
            }
            let Some(segment) = state.segments.get_mut(&id) else {
                continue;
            };
            // Without a ring what is in the others is copied at a fifth of the rate: it is the last that goes.
            if ring && !alone && !segment.unknown {
                continue;
            }
            // What is on disk with nothing in it any more is of no use to anybody.
            let wanted_here = state.recall == 0 || (state.urgent && !state.yields);
            let stays = wanted_here && !segment.unknown && segment.tier.is_here();
            if segment.leaving || stays {
                continue;
            }
            let asked_for = !segment.unknown && segment.tier.is_here();
            segment.leaving = true;
            state.slots.set_closed(id, true);
            if asked_for {
                state.recall = state.recall.saturating_sub(bytes);
            }
            state.jobs.push_back(Job::Leave { id });
        }
        self.work.notify_all();
    }

    /// The daemon wants so much back.
    pub(crate) fn recall(&self, bytes: u64) {
        let mut state = self.lock();
        state.recall = state.recall.saturating_add(bytes);
        // It knows that an eviction waits here: another one waits, too, and goes first.
        state.yields |= state.urgent;
        self.send_off(&mut state);
    }

    /// Segments arrive.
    pub(crate) fn arrive(&self, core: &Arc<Core>, segments: Vec<SegmentInfo>, fds: Vec<OurFd>) {
        let mut state = self.lock();
        for (segment, fd) in segments.into_iter().zip(fds) {
            arriving_fd(&self.fds, core, &fd);
            state.jobs.push_back(Job::Arrive {
                id: segment.id,
                bytes: segment.bytes.get(),
                fd: Arc::new(fd),
            });
        }
        if !state.started {
            let core = Arc::clone(core);
            let spawned = threads::spawn("ebb-arena", move || core.arena.run(&core));
            state.started = spawned.is_ok();
        }
        drop(state);
        self.work.notify_all();
    }

    fn run(&self, core: &Arc<Core>) {
        let mut pace = Pace::default();
        let mut state = self.lock();
        while !core.is_closed() {
            // Arrivals first: an eviction may wait for one, and nobody waits for a departure.
            let first = |arrives| {
                let which = |job: &Job| matches!(job, Job::Arrive { .. }) == arrives;
                state.jobs.iter().position(which)
            };
            let (arrival, departure) = (first(true), first(false));
            let rest = arrival
                .filter(|_| !state.urgent)
                .and_then(|_| pace.rest(Instant::now(), || core.gate.passages()));
            // Somebody waits for what is on its way back from disk.
            let back = |job: &Job| matches!(job, Job::TakeBack { .. } | Job::ReadBack { .. });
            let back = state.jobs.iter().position(back);
            let next = match rest.filter(|_| back.is_none()) {
                None if back.is_some() => back.unwrap_or(0),
                None => arrival.or(departure).unwrap_or(0),
                Some(rest) => {
                    let Some(departure) = departure else {
                        (state, _) = self
                            .work
                            .wait_timeout(state, rest)
                            .unwrap_or_else(PoisonError::into_inner);
                        continue;
                    };
                    departure
                }
            };
            let Some(job) = state.jobs.remove(next).filter(|_| !core.is_exiting()) else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let at_driver = core.at_driver();
            if core.is_exiting() {
                drop(at_driver);
                state = self.lock();
                continue;
            }
            match job {
                Job::Arrive { id, bytes, fd } => {
                    let began = Instant::now();
                    self.take_in(core, id, bytes, fd);
                    pace.worked(began, Instant::now());
                }
                Job::Leave { id } => self.see_off(core, id),
                Job::Part { bytes } => self.part(core, bytes),
                Job::TakeBack { id } => self.take_back(core, id),
                Job::ReadBack { id } => self.read_back(core, id),
                Job::Rest => self.tell_rest(core),
                Job::Common(offer) => self.take_common(core, *offer),
            }
            // Whoever waits for room looks again.
            core.wake_devices();
            core.link.poke();
            state = self.lock();
            if state.jobs.is_empty() {
                // What came has been taken in, and something may leave by it: time to make ready for that. Done once.
                drop(state);
                let registering = self.registering();
                for device in core.devices() {
                    if !device.lock().stop && !core.is_exiting() {
                        device.memory.expect_fingerprints();
                    }
                }
                drop(registering);
                state = self.lock();
            }
        }
    }

    fn take_in(&self, core: &Arc<Core>, id: u64, bytes: u64, fd: Arc<OurFd>) {
        let host = match map(core, &fd, bytes) {
            Ok(host) => host,
            Err(error) => {
                core.events.note(format!(
                    "arena segment {id} of {} cannot be mapped: {error}",
                    Bytes(bytes)
                ));
                self.forget_fd(&fd);
                drop(fd);
                core.link.send(ToDaemon::ArenaReturn { segments: vec![id] });
                return;
            }
        };
        let registering = self.registering();
        let by_ring = core.link.wants_ring();
        let first = by_ring && self.lock().has_no_ring();
        let registered = (!by_ring || first)
            .then(|| self.register(core, id, host, bytes))
            .flatten();
        let ring = registered
            .filter(|_| first)
            .and_then(|_| Ring::start(core, id, host, bytes));
        let mut state = self.lock();
        state.segments.insert(
            id,
            Segment {
                bytes,
                fd,
                host,
                registered,
                leaving: false,
                pinning: false,
                flying: 0,
                unknown: false,
                common: false,
                tier: tier::Tier::HERE,
            },
        );
        drop(registering);
        let added = state.slots.add(id, bytes);
        debug_assert!(added, "segment ids are not reused");
        if ring.is_some() {
            // It takes room from what is for bytes: as much more is wanted.
            (state.ring, state.spare, state.wanted) = (ring, bytes, 0);
            state.slots.set_closed(id, true);
        }
        self.send_off(&mut state);
    }

    /// Registers memory with a device that is there; which. `registering` is held. Not while the process sleeps: then it is done after.
    fn register(&self, core: &Core, id: u64, host: HostAddr, bytes: u64) -> Option<usize> {
        if self.lock().unpinned {
            return None;
        }
        let device = core.devices().into_iter().find(|device| !device.lock().stop)?;
        match device.memory.register_host(host, bytes) {
            Ok(()) => Some(device.index),
            Err(error) => {
                core.events.note(format!(
                    "arena segment {id} is not pinned, copies will be slower: {error}"
                ));
                None
            }
        }
    }

    fn unregister(&self, core: &Core, id: u64) -> Result<(), DeviceError> {
        // The driver waits for all work here, which is forbidden while a graph is captured.
        core.outside_capture(|| {
            let _unregistering = self.unregistering();
            let (host, bytes, registered) = match self.lock().segments.get(&id) {
                Some(segment) => (segment.host, segment.bytes, segment.registered),
                None => return Ok(()),
            };
            let Some(device) = registered.and_then(|index| core.device(index)) else {
                return Ok(());
            };
            device.memory.unregister_host(host, bytes)?;
            if let Some(segment) = self.lock().segments.get_mut(&id) {
                segment.registered = None;
            }
            Ok(())
        })
    }

    fn see_off(&self, core: &Arc<Core>, id: u64) {
        if !self.may_leave(id) {
            return;
        }
        let ring = self.end_ring(Some(id));
        if ring == Some(true) {
            let mut state = self.lock();
            (state.spare, state.wanted) = (0, 0);
        }
        let gone = if ring == Some(false) {
            Err("the copy engine may use it still".into())
        } else {
            self.unregister(core, id).map_err(|error| error.to_string())
        };
        if let Err(why) = gone {
            core.events
                .note(format!("arena segment {id} stays pinned: {why}"));
            let mut state = self.lock();
            if let Some(segment) = state.segments.get_mut(&id) {
                segment.leaving = false;
            }
            Self::not_left(&mut state, id);
            state.close_as_it_is(id);
            return;
        }
        let segment = {
            let mut state = self.lock();
            state.slots.remove(id);
            state.segments.remove(&id)
        };
        if let Some(segment) = segment {
            if segment.tier.is_here()
                && let Err(error) = core.config.host.unmap(segment.host, segment.bytes)
            {
                core.events
                    .note(format!("arena segment {id} cannot be unmapped: {error}"));
                return;
            }
            self.forget_fd(&segment.fd);
            let known = !segment.unknown;
            drop(segment);
            if known {
                core.link.send(Self::farewell(id));
            }
            // The ring goes when it is the last.
            let mut state = self.lock();
            if state.ring.is_some() {
                self.send_off(&mut state);
            }
        }
    }

    fn forget_fd(&self, fd: &OurFd) {
        if let Some(slot) = self.fds.iter().find(|slot| slot.holds(fd)) {
            slot.clear();
        }
    }

    /// A device goes: what was registered through it is not registered any more. Called before the context is destroyed.
    pub(crate) fn device_leaves(&self, core: &Arc<Core>, index: usize) {
        let _unregistering = self.unregistering();
        let registered: Vec<(u64, HostAddr, u64, bool)> = {
            let mut state = self.lock();
            state
                .segments
                .iter_mut()
                .filter(|(_, segment)| segment.registered == Some(index))
                .map(|(id, segment)| {
                    segment.registered = None;
                    (*id, segment.host, segment.bytes, segment.common)
                })
                .collect()
        };
        let Some(device) = core.device(index) else {
            return;
        };
        for (id, host, bytes, common) in registered {
            if let Err(error) = device.memory.unregister_host(host, bytes) {
                core.events
                    .note(format!("arena segment {id} stays pinned: {error}"));
            }
            let other = core
                .devices()
                .into_iter()
                .find(|other| other.index != index && !other.lock().stop);
            if let Some(other) = other
                && common::register(&other, common, host, bytes).is_ok()
            {
                let mut state = self.lock();
                if let Some(segment) = state.segments.get_mut(&id) {
                    segment.registered = Some(other.index);
                }
            }
        }
    }

    /// What to ask the daemon for, if that changed: room for all allocations, ahead of need.
    pub(crate) fn want(&self, core: &Core, allocated: u64) -> Option<ToDaemon> {
        let away = self.steady_away(core);
        let mut state = self.lock();
        let allocated = if allocated > 0 {
            allocated.saturating_add(state.spare)
        } else {
            0
        };
        if state.urgent {
            return None;
        }
        // What lies in common segments and was not written lately is expected to stay there. For the rest there is room of its own all the same: no
        // release waits for memory because others have the same bytes.
        let steady = away + state.kept.steady_common();
        if steady > 0 && allocated > 0 {
            self.shed(&mut state, allocated.saturating_sub(steady));
        }
        if state.wanted == allocated {
            return None;
        }
        state.wanted = allocated;
        Some(ToDaemon::ArenaWant {
            bytes: Bytes(allocated),
            urgent: false,
        })
    }

    /// An eviction needs room for `more` bytes now, in whole `granule`s: what to tell the daemon.
    ///
    /// What is leaving counts as gone and what is asked back but has not begun to leave stays: to give room away and to
    /// beg for it at once would take both to nobody's good.
    pub(crate) fn want_now(&self, more: u64, granule: u64) -> ToDaemon {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.recall = 0;
        let State {
            jobs,
            segments,
            slots,
            kept,
            ring,
            ..
        } = state;
        jobs.retain(|job| match job {
            Job::Leave { id } => {
                let stays = segments
                    .get_mut(id)
                    .filter(|segment| !segment.unknown && !segment.common && segment.tier.is_here());
                let Some(segment) = stays else { return true };
                segment.leaving = false;
                slots.set_closed(*id, ring.as_ref().is_some_and(|ring| ring.id == *id));
                false
            }
            _ => true,
        });
        let staying: u64 = segments
            .values()
            .filter(|segment| !segment.leaving && !segment.unknown && !segment.common)
            .map(|segment| segment.bytes)
            .sum();
        let arriving = arriving(jobs);
        let room = slots
            .available(granule)
            .saturating_add(kept.room(granule))
            .saturating_add(arriving);
        let needed = staying
            .saturating_add(arriving)
            .saturating_add(more.saturating_sub(room));
        // Only this is urgent: an urgent wish that is never granted in full would keep others from what is empty here.
        state.urgent = true;
        ToDaemon::ArenaWant {
            bytes: Bytes(needed),
            urgent: true,
        }
    }

    /// The eviction goes on, or has given up: what is wanted ahead of need is told again, without urgency.
    pub(crate) fn want_no_more(&self) {
        let mut state = self.lock();
        state.yields = false;
        if std::mem::take(&mut state.urgent) {
            state.wanted = 0;
        }
    }

    /// For a new connection: what is held, with the descriptors, in packets that fit. What has none any more cannot be
    /// told; only the daemon that lent it, if the session goes on (`resumed`), knows of it.
    pub(crate) fn declare(&self, resumed: bool) -> Vec<(ToDaemon, Vec<Arc<OurFd>>)> {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.wanted = 0;
        (state.urgent, state.yields) = (false, false);
        state.recall = 0;
        let mut held: Vec<(SegmentInfo, Arc<OurFd>)> = Vec::new();
        for (id, segment) in &mut state.segments {
            if segment.tier.home == tier::Home::File || segment.common {
                continue;
            }
            if !segment.fd.is_ours() {
                if !resumed {
                    segment.unknown = true;
                    state.slots.set_closed(*id, true);
                    state.kept.leave(*id, &mut state.slots);
                }
                continue;
            }
            let info = SegmentInfo {
                id: *id,
                bytes: Bytes(segment.bytes),
            };
            held.push((info, Arc::clone(&segment.fd)));
        }
        // A segment that was never mapped is gone with its descriptor; a daemon that knows it hears so from the thread.
        state.jobs.retain(|job| match job {
            Job::Arrive { fd, .. } if !resumed && !fd.is_ours() => {
                self.forget_fd(fd);
                false
            }
            _ => true,
        });
        for job in &state.jobs {
            if let Job::Arrive { id, bytes, fd } = job
                && fd.is_ours()
            {
                let info = SegmentInfo {
                    id: *id,
                    bytes: Bytes(*bytes),
                };
                held.push((info, Arc::clone(fd)));
            }
        }
        let files = Self::declare_files(state, resumed);
        let common = Self::declare_common(state, resumed);
        self.send_off(state);
        held.chunks(MAX_FDS)
            .map(|some| {
                let (segments, fds): (Vec<_>, Vec<_>) = some.iter().cloned().unzip();
                (ToDaemon::ArenaDeclare { segments }, fds)
            })
            .chain(files)
            .chain(common)
            .collect()
    }

    pub(crate) fn sums(&self) -> Sums {
        let state = self.lock();
        Sums {
            total: state.slots.total(),
            used: state.slots.used() - state.kept.bytes(),
            kept: state.kept.bytes(),
            common: {
                let kept = state.kept.common();
                (state.slots.in_common().saturating_sub(kept), kept)
            },
            registered: state
                .segments
                .values()
                .filter(|s| s.registered.is_some())
                .map(|s| s.bytes)
                .sum(),
            segments: state.segments.len() as u64,
            lost: state.lost,
            arriving: arriving(&state.jobs),
            away: state
                .segments
                .values()
                .filter(|s| !s.tier.is_here())
                .map(|s| s.bytes)
                .sum(),
        }
    }

    /// In a forked child: the descriptors to close. Takes no lock.
    pub(crate) fn child_fds(&self) -> impl Iterator<Item = &ChildSlot> {
        self.fds.iter()
    }
}

/// Lets a forked child know of a descriptor.
fn arriving_fd(fds: &[ChildSlot], core: &Core, fd: &OurFd) {
    if !fds.iter().any(|slot| slot.set(fd)) {
        core.events
            .note("more arena segments than a forked child can close");
    }
}

impl State {
    fn has_no_ring(&self) -> bool {
        self.ring.is_none() && self.ring_comes.is_none()
    }

    /// A segment takes pieces in, unless something is in the way.
    fn close_as_it_is(&mut self, id: u64) {
        let ring = self.ring.as_ref().is_some_and(|ring| ring.id == id) || self.ring_comes == Some(id);
        let in_the_way = |s: &Segment| s.leaving || s.unknown || !s.tier.is_here();
        let closed = ring || self.segments.get(&id).is_none_or(in_the_way);
        self.slots.set_closed(id, closed);
    }

    /// Bytes that [`Arena::take`] could give.
    fn room(&self, granule: u64) -> u64 {
        self.slots
            .available(granule)
            .saturating_add(self.kept.room(granule))
    }

    /// Kept copies leave segments that hold nothing else, as far as the daemon asked for more than is empty.
    fn give_way(&mut self) {
        if self.recall == 0 || (self.urgent && !self.yields) || self.kept.bytes() == 0 {
            return;
        }
        let stays = |id: &u64| {
            self.segments
                .get(id)
                .is_some_and(|s| !s.leaving && !s.unknown && s.tier.is_here())
        };
        let empty = self.slots.empty();
        let ring = self.ring.as_ref().map(|ring| ring.id);
        let empty: u64 = empty
            .iter()
            .filter(|(id, _)| stays(id) && Some(*id) != ring)
            .map(|(_, bytes)| bytes)
            .sum();
        let mut missing = self.recall.saturating_sub(empty);
        let mut only_kept: Vec<(u64, u64)> = self
            .kept
            .by_segment()
            .into_iter()
            .filter(|(id, kept)| stays(id) && self.slots.used_in(*id) == *kept)
            .map(|(id, kept)| (kept, id))
            .collect();
        only_kept.sort_unstable();
        for (_, id) in only_kept {
            let Some(segment) = self.segments.get(&id).filter(|_| missing > 0) else {
                break;
            };
            missing = missing.saturating_sub(segment.bytes);
            self.kept.leave(id, &mut self.slots);
        }
    }
}

/// Bytes of segments that are given and not mapped yet.
fn arriving(jobs: &VecDeque<Job>) -> u64 {
    jobs.iter()
        .map(|job| match job {
            Job::Arrive { bytes, .. } => *bytes,
            _ => 0,
        })
        .sum()
}

/// Maps a segment, and only that: if its descriptor was lost on the way, the mapping may be of a file of the program.
fn map(core: &Core, fd: &OurFd, bytes: u64) -> io::Result<HostAddr> {
    let lost = || io::Error::other("the program closed its descriptor");
    let host = core.config.host.map(fd.get().ok_or_else(lost)?, bytes)?;
    if !fd.is_ours() {
        core.config.host.unmap(host, bytes)?;
        return Err(lost());
    }
    Ok(host)
}
