//! Host copies that this process has in common with others: sealed segments of the daemon's, which nobody can write.
//!
//! ```text
//!   at rest ── told ──> (the daemon compares) ── offered ──> mapped, registered ──> taken ──> used ──> let go of, left
//!      │                                            │                │ cannot be        │ no bytes of ours are the same any more
//!      └─ written again: the notice is void         └── declined <───┴──────────────────┘
//! ```
//! What is off the card, and what is kept of what came back, is *at rest*: nothing writes it until its place is taken anew or a kept copy is
//! brought up to date. The arena's thread tells the daemon of such places, with the number of the notice. An offer names the notice by which the
//! daemon knew the bytes: if the place was taken or written since, the notice is void and the offer is not taken. Otherwise the bytes there are
//! what the daemon compared, and the chunk has them in the common segment from then on: its pieces are changed under the lock of its device
//! (or, of a kept copy, of the arena), so that it has the one or the other at any moment, and its own place is free.
//!
//! What is in common and was written again costs its room twice: so room of its own is wanted for it as before, until it has come back and left
//! unchanged once ([`Arena::want`]); and a process that writes most of what it took is quiet for a while.
//!
//! A piece in a common segment is one with [`COMMON`] in its segment's number. It is never written: an eviction that finds other bytes on the card takes
//! room of its own for those ([`Arena::own`]). A segment in which nothing is used any more is left. The daemon is not needed to have the bytes: this
//! process maps the segment and has its descriptor.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use ebb_alloc::{GiveBackError, HostSlots, Piece};
use ebb_device::fingerprint::BLOCK;
use ebb_device::{DeviceError, HostAddr};
use ebb_protocol::ToDaemon;
use ebb_protocol::wire::{CommonBlock, MAX_FDS, RestingRun, SegmentInfo, feature};
use ebb_units::Bytes;

use super::{Arena, Job, Segment, State, arriving_fd, rooms, tier};
use crate::core::Core;
use crate::device::Device;
use crate::fd::OurFd;

/// In the number of a segment: it is a common one. The daemon's own numbers never get so far.
const COMMON: u64 = 1 << 62;
/// Of every so many bytes that were written after they were taken one is forgotten at each eviction.
const WRITTEN_DECAY: u64 = 8;
/// Runs in one packet.
const RUNS: usize = 1500;

/// Whether bytes lie in a common segment.
pub(crate) fn is_common(piece: &Piece) -> bool {
    piece.segment & COMMON != 0 && !rooms::is_room(piece)
}

/// An offer of the daemon's.
#[derive(Debug)]
pub(super) struct Offer {
    info: SegmentInfo,
    blocks: Vec<CommonBlock>,
    fd: OurFd,
}

/// Where evicted chunks have room: in segments of the process's own, and, to be read only, in common ones.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    own: HostSlots,
    /// Bytes of each common segment that copies lie in; of equal ones each counts.
    common: BTreeMap<u64, u64>,
    /// Nothing lies in these any more.
    unused: Vec<u64>,
    /// Runs at rest that the daemon was told of, by where they begin, with their length and the notice. None touches another's bytes.
    told: BTreeMap<(u64, u64), (u64, u64)>,
}

impl Deref for Slots {
    type Target = HostSlots;

    fn deref(&self) -> &HostSlots {
        &self.own
    }
}

impl DerefMut for Slots {
    fn deref_mut(&mut self) -> &mut HostSlots {
        &mut self.own
    }
}

impl Slots {
    /// As [`HostSlots::take`]. Who takes a place writes it.
    pub(crate) fn take(&mut self, len: u64, unit: u64) -> Option<Vec<Piece>> {
        let pieces = self.own.take(len, unit)?;
        self.written(&pieces);
        Some(pieces)
    }

    /// As [`HostSlots::give_back`].
    pub(crate) fn give_back(&mut self, piece: Piece) -> Result<(), GiveBackError> {
        if !is_common(&piece) {
            return self.own.give_back(piece);
        }
        let wrong = GiveBackError::NotLive(piece.offset);
        let used = self.common.get_mut(&piece.segment).ok_or(wrong)?;
        *used = used.checked_sub(piece.len).ok_or(wrong)?;
        if *used == 0 {
            self.common.remove(&piece.segment);
            self.unused.push(piece.segment);
        }
        Ok(())
    }

    /// As [`HostSlots::remove`].
    pub(crate) fn remove(&mut self, id: u64) -> Option<u64> {
        self.told.retain(|(segment, _), _| *segment != id);
        self.own.remove(id)
    }

    /// What was said of these places holds no longer.
    fn written(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            let (id, end) = (piece.segment, piece.offset.saturating_add(piece.len));
            while let Some((from, to, notice)) = self.run_before(id, end).filter(|run| run.1 > piece.offset) {
                self.told.remove(&(id, from));
                if from < piece.offset {
                    self.told.insert((id, from), (piece.offset - from, notice));
                }
                if to > end {
                    self.told.insert((id, end), (to - end, notice));
                }
            }
        }
    }

    /// The last run of a segment that begins before `end`: from, to, and its notice.
    fn run_before(&self, id: u64, end: u64) -> Option<(u64, u64, u64)> {
        let ((_, from), (len, notice)) = self.told.range((id, 0)..(id, end)).next_back()?;
        Some((*from, from + len, *notice))
    }

    /// Whether the daemon knows these bytes by this notice, and they are as they were.
    fn holds(&self, id: u64, offset: u64, len: u64, notice: u64) -> bool {
        let end = offset.saturating_add(len);
        let run = self.run_before(id, offset.saturating_add(1));
        run.is_some_and(|(_, to, known)| to >= end && known == notice)
    }

    /// Notes by this notice what of a piece is not known by an earlier one: those runs.
    fn tell(&mut self, piece: &Piece, notice: u64) -> Vec<Piece> {
        let (segment, end) = (piece.segment, piece.offset + piece.len);
        let (mut at, mut fresh) = (piece.offset, Vec::new());
        while at < end {
            if let Some((_, to, _)) = self.run_before(segment, at + 1).filter(|run| run.1 > at) {
                at = to;
                continue;
            }
            let next = self.told.range((segment, at)..(segment, end)).next();
            let stop = next.map_or(end, |((_, from), _)| *from);
            let (offset, len) = (at, stop - at);
            self.told.insert((segment, offset), (len, notice));
            fresh.push(Piece { segment, offset, len });
            at = stop;
        }
        fresh
    }

    /// A block of a copy lies in a common segment from now on.
    fn use_common(&mut self, piece: &Piece) {
        *self.common.entry(piece.segment).or_default() += piece.len;
    }

    /// Bytes of copies in common segments.
    pub(super) fn in_common(&self) -> u64 {
        self.common.values().sum()
    }

    fn is_used(&self, id: u64) -> bool {
        self.common.contains_key(&id)
    }
}

/// The blocks that a piece is compared by: where, and how long.
fn blocks(piece: &Piece) -> impl Iterator<Item = (u64, u64)> {
    let (at, len) = (piece.offset, piece.len);
    (0..len)
        .step_by(BLOCK as usize)
        .map(move |from| (at + from, BLOCK.min(len - from)))
}

fn push(pieces: &mut Vec<Piece>, piece: Piece) {
    match pieces.last_mut() {
        Some(last) if last.segment == piece.segment && last.offset + last.len == piece.offset => {
            last.len += piece.len;
        }
        _ => pieces.push(piece),
    }
}

/// Offers by the place of this process's that they are for, those whose notice holds.
type Valid = BTreeMap<(u64, u64), CommonBlock>;

/// What a copy in these pieces is with what is offered, and the pieces that it has no more. `None`: nothing of it is offered.
fn with_offers(pieces: &[Piece], id: u64, offers: &Valid) -> Option<(Vec<Piece>, Vec<Piece>)> {
    let (mut now, mut freed) = (Vec::new(), Vec::new());
    for piece in pieces {
        if is_common(piece) || rooms::is_room(piece) {
            push(&mut now, *piece);
            continue;
        }
        for (offset, len) in blocks(piece) {
            let own = Piece {
                segment: piece.segment,
                offset,
                len,
            };
            match offers.get(&(piece.segment, offset)) {
                Some(offer) if offer.bytes.get() == len => {
                    push(
                        &mut now,
                        Piece {
                            segment: id,
                            offset: offer.at,
                            len,
                        },
                    );
                    push(&mut freed, own);
                }
                _ => push(&mut now, own),
            }
        }
    }
    (!freed.is_empty()).then_some((now, freed))
}

impl State {
    /// Common segments in which nothing is used any more are left.
    pub(super) fn leave_common(&mut self) {
        for id in std::mem::take(&mut self.slots.unused) {
            if self.slots.is_used(id) {
                continue;
            }
            if let Some(segment) = self.segments.get_mut(&id).filter(|segment| !segment.leaving) {
                segment.leaving = true;
                self.jobs.push_back(Job::Leave { id });
            }
        }
    }

    /// Offers that are still good.
    fn valid(&self, offer: &Offer) -> Valid {
        let good = |block: &&CommonBlock| {
            let segment = self.segments.get(&block.segment);
            let here = segment.is_some_and(|s| s.tier.is_here() && !s.common && !s.leaving && !s.unknown);
            let end = block.at.checked_add(block.bytes.get());
            let inside = end.is_some_and(|end| end <= offer.info.bytes.get());
            let (len, notice) = (block.bytes.get(), block.notice);
            here && inside && self.slots.holds(block.segment, block.offset, len, notice)
        };
        let good = offer.blocks.iter().filter(good);
        good.map(|block| ((block.segment, block.offset), *block))
            .collect()
    }

    /// A copy lies there now, and not where it lay.
    fn moved_to_common(&mut self, id: u64, now: &[Piece], before: &[Piece], freed: &[Piece]) {
        let sum = |pieces: &[Piece]| {
            let there = pieces.iter().filter(|piece| piece.segment == id);
            there.map(|piece| piece.len).sum::<u64>()
        };
        let len = sum(now) - sum(before);
        self.taken.0 += len;
        self.slots.use_common(&Piece {
            segment: id,
            offset: 0,
            len,
        });
        for piece in freed {
            self.slots.written(std::slice::from_ref(piece));
            let given = self.slots.give_back(*piece);
            debug_assert!(given.is_ok(), "{piece:?} was not taken");
        }
    }
}

impl Arena {
    /// Something came to rest: the daemon is to hear of it, by the arena's thread.
    pub(crate) fn rest(&self, core: &Core) {
        if !core.link.can(feature::COMMON) {
            return;
        }
        let mut state = self.lock();
        let queued = state.jobs.iter().any(|job| matches!(job, Job::Rest));
        if state.started && !queued && !state.common_refused {
            state.jobs.push_back(Job::Rest);
        }
        drop(state);
        self.work.notify_all();
    }

    /// Tells of what is at rest and was not told of.
    pub(super) fn tell_rest(&self, core: &Core) {
        let notice = {
            let mut state = self.lock();
            let (taken, written) = state.taken;
            if written > taken / 2 {
                // It is worth another try now and then.
                state.taken.1 -= (written / WRITTEN_DECAY).max(1);
                return;
            }
            state.taken = (taken / 2, written / 2);
            state.notice += 1;
            state.notice
        };
        let mut runs = Vec::new();
        // Told under the lock by which a chunk is at rest: nobody can take its place meanwhile.
        for device in core.devices() {
            let device_state = device.lock();
            let program = core.vmm.away(device.index);
            let pool = device_state.pool.evicted_chunks().map(|(pieces, _)| pieces);
            let program = program.iter().map(|(pieces, _)| pieces.as_slice());
            let mut state = self.lock();
            for pieces in pool.chain(program) {
                state.tell(pieces.iter(), notice, &mut runs);
            }
        }
        let mut guard = self.lock();
        let state = &mut *guard;
        let kept: Vec<Piece> = state.kept.pieces().copied().collect();
        state.tell(kept.iter(), notice, &mut runs);
        drop(guard);
        for some in runs.chunks(RUNS) {
            let runs = some.to_vec();
            core.link.send(ToDaemon::ArenaRest { notice, runs });
        }
    }

    /// The daemon offers what it found to be the same.
    pub(crate) fn offered(
        &self,
        core: &Core,
        info: SegmentInfo,
        blocks: Vec<CommonBlock>,
        fd: Option<OurFd>,
    ) {
        let mut state = self.lock();
        let fd = fd.filter(|fd| fd.is_ours() && state.started && info.id & (COMMON | COMMON << 1) == 0);
        let Some(fd) = fd else {
            drop(state);
            core.link.send(ToDaemon::ArenaCommonHeld {
                segment: info.id,
                held: false,
            });
            return;
        };
        state
            .jobs
            .push_back(Job::Common(Box::new(Offer { info, blocks, fd })));
        drop(state);
        self.work.notify_all();
    }

    /// Takes what is still good of an offer.
    pub(super) fn take_common(&self, core: &Arc<Core>, offer: Offer) {
        let id = offer.info.id | COMMON;
        let any = !self.lock().valid(&offer).is_empty();
        if any && self.has_common(core, id, &offer) {
            self.change_over(core, id, &offer);
        }
        let mut state = self.lock();
        // Whose chunk moves at this moment is not found. The daemon has done with these places: it hears of them anew when they are at rest again.
        for ((segment, offset), block) in state.valid(&offer) {
            let len = block.bytes.get();
            state.slots.written(&[Piece { segment, offset, len }]);
        }
        let held = state.slots.is_used(id);
        if !held && state.segments.contains_key(&id) {
            state.slots.unused.push(id);
        }
        self.send_off(&mut state);
        drop(state);
        core.link.send(ToDaemon::ArenaCommonHeld {
            segment: offer.info.id,
            held,
        });
    }

    /// Maps and registers a common segment, if it is not here already. `false`: it cannot be had.
    fn has_common(&self, core: &Arc<Core>, id: u64, offer: &Offer) -> bool {
        let bytes = offer.info.bytes.get();
        if let Some(known) = self.lock().segments.get_mut(&id) {
            return known.bytes == bytes && !known.leaving;
        }
        let refused = |why: &dyn std::fmt::Display| {
            core.events
                .note(format!("common segment {} is not taken: {why}", offer.info.id));
            false
        };
        let Some(fd) = offer.fd.get() else {
            return refused(&"the program closed its descriptor");
        };
        let host = match core.config.host.map_read_only(fd, bytes) {
            Ok(host) => host,
            Err(error) => return refused(&error),
        };
        if !offer.fd.is_ours() {
            // The mapping may be of a file of the program.
            let _ = core.config.host.unmap(host, bytes);
            return refused(&"the program closed its descriptor");
        }
        let registering = self.registering();
        // Copies from memory that is not pinned are slow: then a copy of its own is better. Where nothing is pinned, or nothing for now, it is
        // as the others are.
        let pinned = !core.link.wants_ring() && !self.lock().unpinned;
        let device = core.devices().into_iter().find(|device| !device.lock().stop);
        let registered = match device.filter(|_| pinned) {
            Some(device) => match device.memory.register_read_only(host, bytes) {
                Ok(()) => Some(device.index),
                Err(error) => {
                    drop(registering);
                    let _ = core.config.host.unmap(host, bytes);
                    self.lock().common_refused = true;
                    return refused(&error);
                }
            },
            None => None,
        };
        let Ok(fd) = fd.try_clone_to_owned() else {
            return self.undo_common(core, host, bytes, registered);
        };
        let fd = OurFd::new(fd);
        arriving_fd(&self.fds, core, &fd);
        self.lock().segments.insert(
            id,
            Segment {
                bytes,
                fd: Arc::new(fd),
                host,
                registered,
                leaving: false,
                pinning: false,
                flying: 0,
                unknown: false,
                common: true,
                tier: tier::Tier::HERE,
            },
        );
        drop(registering);
        true
    }

    fn undo_common(&self, core: &Core, host: HostAddr, bytes: u64, registered: Option<usize>) -> bool {
        let device = registered.and_then(|index| core.device(index));
        // What stays registered stays mapped.
        if device.is_none_or(|device| device.memory.unregister_host(host, bytes).is_ok()) {
            let _ = core.config.host.unmap(host, bytes);
        }
        false
    }

    /// Copies have their bytes in the common segment from now on.
    fn change_over(&self, core: &Core, id: u64, offer: &Offer) {
        for device in core.devices() {
            self.change_over_away(core, &device, id, offer);
        }
        let mut guard = self.lock();
        let state = &mut *guard;
        let valid = state.valid(offer);
        let mut kept = std::mem::take(&mut state.kept);
        kept.rehome(|pieces| {
            if let Some((now, freed)) = with_offers(pieces, id, &valid) {
                state.moved_to_common(id, &now, pieces, &freed);
                *pieces = now;
            }
        });
        state.kept = kept;
    }

    fn change_over_away(&self, core: &Core, device: &Device, id: u64, offer: &Offer) {
        let mut state = device.lock();
        let program = core.vmm.away(device.index);
        // A notice of a place that belongs to a chunk of this device can be made void only by who holds this lock.
        let valid = self.lock().valid(offer);
        let pool: Vec<_> = state
            .pool
            .evicted_chunks()
            .filter_map(|(pieces, chunk)| Some((chunk, with_offers(pieces, id, &valid)?)))
            .collect();
        for (chunk, (now, freed)) in pool {
            let Some((_, mut copy)) = state.pool.begin_rehome(chunk) else {
                continue;
            };
            self.lock().moved_to_common(id, &now, &copy.pieces, &freed);
            copy.pieces = now;
            state.pool.rehomed(chunk, copy);
        }
        for (pieces, handle) in program {
            let Some((now, freed)) = with_offers(&pieces, id, &valid) else {
                continue;
            };
            let Some((_, mut copy)) = core.vmm.begin_rehome(handle) else {
                continue;
            };
            if copy.pieces == pieces {
                self.lock().moved_to_common(id, &now, &copy.pieces, &freed);
                copy.pieces = now;
            }
            core.vmm.rehomed(handle, copy);
        }
        drop(state);
        device.wake();
    }

    /// These runs of a chunk are about to be written to its copy, in these pieces, which are the caller's. The pieces to write to: what of them
    /// is in common goes, with room of the process's own for it. `None` if there is no such room; then all of them are given back.
    pub(crate) fn own(&self, pieces: Vec<Piece>, runs: &[(u64, u64)], granule: u64) -> Option<Vec<Piece>> {
        if runs.is_empty() {
            return Some(pieces);
        }
        let (mut parts, mut missing, mut at) = (Vec::new(), 0, 0);
        for piece in &pieces {
            let end = at + piece.len;
            if is_common(piece) {
                let mut from = at;
                for (start, len) in runs {
                    let (start, stop) = ((*start).clamp(from, end), (start + len).clamp(from, end));
                    if stop > start {
                        parts.push((part(piece, at, from, start), false));
                        parts.push((part(piece, at, start, stop), true));
                        missing += stop - start;
                        from = stop;
                    }
                }
                parts.push((part(piece, at, from, end), false));
            } else {
                parts.push((*piece, false));
            }
            at = end;
        }
        let mut room = Vec::new();
        if missing > 0 {
            match self.take(missing, granule) {
                Some(taken) => room = taken,
                None => {
                    self.give_back(&pieces);
                    return None;
                }
            }
        }
        {
            let mut state = self.lock();
            state.slots.written(&pieces);
            state.taken.1 += missing;
        }
        room.reverse();
        let (mut now, mut freed) = (Vec::new(), Vec::new());
        for (piece, goes) in parts.into_iter().filter(|(piece, _)| piece.len > 0) {
            if !goes {
                push(&mut now, piece);
                continue;
            }
            freed.push(piece);
            let mut rest = piece.len;
            while rest > 0 {
                let Some(mut own) = room.pop() else { break };
                let len = own.len.min(rest);
                push(&mut now, Piece { len, ..own });
                (own.offset, own.len) = (own.offset + len, own.len - len);
                rest -= len;
                if own.len > 0 {
                    room.push(own);
                }
            }
        }
        self.give_back(&freed);
        Some(now)
    }

    /// The daemon needs the room of these: what is only kept there is given up.
    pub(crate) fn unkeep(&self, ids: &[u64]) {
        let mut guard = self.lock();
        let state = &mut *guard;
        for id in ids {
            state.kept.leave(id | COMMON, &mut state.slots);
        }
        self.send_off(state);
    }

    /// Bytes of kept copies of a device's chunks in common segments. If those chunks are unchanged they need no room to leave.
    pub(crate) fn kept_common(&self, device: usize) -> u64 {
        self.lock().kept.common_of_device(device)
    }

    /// What the daemon should know of bytes in common segments, if that changed.
    pub(crate) fn common_news(&self) -> Option<ToDaemon> {
        let mut state = self.lock();
        let (all, kept) = (state.slots.in_common(), state.kept.common());
        let now = (all.saturating_sub(kept), kept);
        if state.common_told == now {
            return None;
        }
        state.common_told = now;
        Some(ToDaemon::ArenaCommonUse {
            away: Bytes(now.0),
            kept: Bytes(now.1),
        })
    }

    /// Of what is away: bytes in common segments that were not written lately.
    pub(super) fn steady_away(&self, core: &Core) -> u64 {
        if self.lock().slots.in_common() == 0 {
            return 0;
        }
        let of = |device: &Arc<Device>| {
            let state = device.lock();
            state.pool.steady_common() + core.vmm.steady_common(device.index)
        };
        core.devices().iter().map(of).sum()
    }

    /// Segments that are empty because what was in them is in common now go back, beyond what is wanted.
    pub(super) fn shed(&self, state: &mut State, wanted: u64) {
        let staying = state
            .segments
            .values()
            .filter(|s| !s.leaving && !s.unknown && !s.common);
        let mut surplus = staying.map(|s| s.bytes).sum::<u64>().saturating_sub(wanted);
        for (id, bytes) in state.slots.empty() {
            let ring = state.ring.as_ref().is_some_and(|ring| ring.id == id) || state.ring_comes == Some(id);
            let segment = state.segments.get_mut(&id);
            let goes = |s: &&mut Segment| !s.leaving && !s.unknown && s.tier.is_here();
            let Some(segment) = segment.filter(goes).filter(|_| !ring && bytes <= surplus) else {
                continue;
            };
            surplus -= bytes;
            segment.leaving = true;
            state.slots.set_closed(id, true);
            state.jobs.push_back(Job::Leave { id });
        }
        self.work.notify_all();
    }

    /// For a new connection: the common segments that are held. What was said of places is said again.
    pub(super) fn declare_common(state: &mut State, resumed: bool) -> Vec<(ToDaemon, Vec<Arc<OurFd>>)> {
        state.slots.told.clear();
        state.common_told = (0, 0);
        let mut held: Vec<(SegmentInfo, Arc<OurFd>)> = Vec::new();
        for (id, segment) in state.segments.iter_mut().filter(|(_, segment)| segment.common) {
            if !segment.fd.is_ours() {
                // It cannot be told. The mapping keeps the bytes.
                segment.unknown = true;
                continue;
            }
            let info = SegmentInfo {
                id: id & !COMMON,
                bytes: Bytes(segment.bytes),
            };
            held.push((info, Arc::clone(&segment.fd)));
        }
        if held.is_empty() && !resumed {
            return Vec::new();
        }
        let mut packets: Vec<(ToDaemon, Vec<Arc<OurFd>>)> = Vec::new();
        for some in held
            .chunks(MAX_FDS)
            .map(<[_]>::to_vec)
            .chain(held.is_empty().then(Vec::new))
        {
            let (segments, fds): (Vec<_>, Vec<_>) = some.into_iter().unzip();
            let first = packets.is_empty();
            packets.push((ToDaemon::ArenaCommonDeclare { segments, first }, fds));
        }
        packets
    }

    /// Nothing may be used any more of a common segment that is to be left. `false`: it is used again.
    pub(super) fn may_leave(&self, id: u64) -> bool {
        let mut state = self.lock();
        if !state.slots.is_used(id) {
            return true;
        }
        if let Some(segment) = state.segments.get_mut(&id) {
            segment.leaving = false;
        }
        false
    }

    /// A segment could not be left, and it is tried again when something else leaves.
    pub(super) fn not_left(state: &mut State, id: u64) {
        if state.segments.get(&id).is_some_and(|segment| segment.common) {
            state.slots.unused.push(id);
        }
    }

    /// What the daemon hears when a segment is gone from here.
    pub(super) fn farewell(id: u64) -> ToDaemon {
        if id & COMMON == 0 {
            return ToDaemon::ArenaReturn { segments: vec![id] };
        }
        ToDaemon::ArenaCommonLeft {
            segments: vec![id & !COMMON],
        }
    }
}

impl State {
    /// Notes places at rest that were not told of, and what to say of them.
    fn tell<'a>(&mut self, pieces: impl Iterator<Item = &'a Piece>, notice: u64, runs: &mut Vec<RestingRun>) {
        for piece in pieces {
            let segment = self.segments.get(&piece.segment);
            if segment.is_none_or(|s| s.common || s.unknown || s.leaving || !s.tier.is_here()) {
                continue;
            }
            let fresh = self.slots.tell(piece, notice);
            runs.extend(fresh.iter().map(|run| RestingRun {
                segment: run.segment,
                offset: run.offset,
                bytes: Bytes(run.len),
            }));
        }
    }
}

#[cfg(test)]
impl Arena {
    /// Where a segment is.
    pub(crate) fn host_of(&self, id: u64) -> Option<HostAddr> {
        self.lock().segments.get(&id).map(|segment| segment.host)
    }
}

/// From here to there, in the chunk, of a piece that begins at `at` of it.
fn part(piece: &Piece, at: u64, from: u64, to: u64) -> Piece {
    Piece {
        segment: piece.segment,
        offset: piece.offset + (from - at),
        len: to - from,
    }
}

/// Registers a segment, as it can be.
pub(super) fn register(device: &Device, common: bool, host: HostAddr, bytes: u64) -> Result<(), DeviceError> {
    if common {
        device.memory.register_read_only(host, bytes)
    } else {
        device.memory.register_host(host, bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn piece(offset: u64, len: u64) -> Piece {
        Piece {
            segment: 1,
            offset,
            len,
        }
    }

    #[test]
    fn a_notice_holds_until_its_place_is_written() {
        let mut slots = Slots::default();
        assert_eq!(slots.tell(&piece(0, 80), 1), [piece(0, 80)]);
        assert_eq!(slots.tell(&piece(0, 80), 2), []);
        slots.written(&[piece(20, 20)]);
        assert!(slots.holds(1, 0, 20, 1) && slots.holds(1, 40, 40, 1));
        assert!(!slots.holds(1, 0, 21, 1) && !slots.holds(1, 30, 20, 1) && !slots.holds(1, 0, 20, 2));
        assert_eq!(slots.tell(&piece(0, 100), 3), [piece(20, 20), piece(80, 20)]);
        assert!(slots.holds(1, 20, 20, 3) && !slots.holds(1, 0, 40, 3));
        assert!(!slots.holds(2, 0, 20, 1));
    }

    #[test]
    fn offers_change_pieces_and_free_the_others() {
        let common = 9 | COMMON;
        let offer = |offset: u64, at: u64| {
            let block = CommonBlock {
                segment: 1,
                offset,
                bytes: Bytes(BLOCK),
                notice: 1,
                at,
            };
            ((1, offset), block)
        };
        let offers: Valid = [offer(0, 5 * BLOCK), offer(BLOCK, 6 * BLOCK), offer(3 * BLOCK, 0)].into();
        let (now, freed) = with_offers(&[piece(0, 4 * BLOCK)], common, &offers).unwrap();
        let there = |offset, len| Piece {
            segment: common,
            offset,
            len,
        };
        assert_eq!(
            now,
            [
                there(5 * BLOCK, 2 * BLOCK),
                piece(2 * BLOCK, BLOCK),
                there(0, BLOCK)
            ]
        );
        assert_eq!(freed, [piece(0, 2 * BLOCK), piece(3 * BLOCK, BLOCK)]);
        assert_eq!(with_offers(&[piece(2 * BLOCK, BLOCK)], common, &offers), None);
        assert_eq!(
            with_offers(&now[..1], common, &offers),
            None,
            "it is there already"
        );
    }

    proptest! {
        #[test]
        fn told_and_written_in_any_order(ops in prop::collection::vec((any::<bool>(), 0u64..40, 1u64..12), 1..60)) {
            let mut slots = Slots::default();
            // By byte: the notice that holds.
            let mut model = [0; 64];
            for (notice, (tell, offset, len)) in (1..).zip(ops) {
                let place = usize::try_from(offset).unwrap()..usize::try_from(offset + len).unwrap();
                if tell {
                    let mut fresh = 0;
                    for known in model[place].iter_mut().filter(|known| **known == 0) {
                        *known = notice;
                        fresh += 1;
                    }
                    let runs = slots.tell(&piece(offset, len), notice);
                    prop_assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), fresh);
                } else {
                    slots.written(&[piece(offset, len)]);
                    model[place].fill(0);
                }
                for (at, known) in model.iter().enumerate() {
                    prop_assert!(*known == 0 || slots.holds(1, at as u64, 1, *known));
                    prop_assert!(*known == notice || !slots.holds(1, at as u64, 1, notice));
                }
            }
        }
    }
}
