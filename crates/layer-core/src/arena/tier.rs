//! Segments that this process lets go of, because the daemon writes them to disk, and that come back.
//!
//! ```text
//!          Part            Stored                Fetch, Back
//!   Here ────────> Parted ────────> File ──────────────────────> Here (new memory)
//!    ^               │ Stay,          │ no daemon, or it cannot
//!    │               │ no daemon      v
//!    └───────────────┘              read by this process, into memory of its own
//! ```
//! A segment goes only with all its bytes at rest: nothing copies from or to it, and while it is away no copy begins. Its
//! bytes are in the memory until this process has the file, and in the file until this process has new memory; it holds
//! the one or the other itself, so the daemon may die at any moment.
//!
//! That nothing copies is made sure of in two steps, since copies begin under the lock of a device and segments go under
//! that of the arena: first the segment is marked, then all its used bytes are looked for at rest. Who begins a copy
//! takes the chunk first (so that it is not at rest) and then looks at the mark.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ebb_alloc::Piece;
use ebb_device::HostAddr;
use ebb_protocol::ToDaemon;
use ebb_protocol::wire::{MAX_FDS, SegmentInfo};
use ebb_units::Bytes;
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::{Arena, Job, State, arriving_fd, map};
use crate::core::Core;
use crate::fd::OurFd;

/// Where the bytes of a segment are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// Mapped, and registered if that was to be had.
    Here,
    /// In the memory of the descriptor, which nothing here maps.
    Parted,
    /// In the file of the descriptor.
    File,
}

/// A segment's part in this.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tier {
    pub(super) home: Home,
    /// The daemon was asked for it, or this process is about to read it.
    asked: bool,
    /// The last try to read it failed.
    failed: bool,
}

impl Tier {
    pub(super) const HERE: Self = Self {
        home: Home::Here,
        asked: false,
        failed: false,
    };

    pub(super) fn is_here(self) -> bool {
        self.home == Home::Here
    }
}

/// Whether pieces can be copied from now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Ready,
    /// Asked for, or to be asked for.
    Away,
    /// It could not be read, and was not tried again yet.
    Unreadable,
}

impl Arena {
    /// Whether all of these pieces are in memory.
    pub(crate) fn readiness(&self, pieces: &[Piece]) -> Readiness {
        let state = self.lock();
        let mut found = Readiness::Ready;
        for piece in pieces {
            match state.segments.get(&piece.segment).map(|segment| segment.tier) {
                Some(tier) if !tier.is_here() && tier.failed => return Readiness::Unreadable,
                Some(tier) if !tier.is_here() => found = Readiness::Away,
                _ => {}
            }
        }
        found
    }

    /// Asks for what these pieces lie in, in this order, if it is not on its way. With a failure behind it a segment is
    /// tried anew.
    pub(crate) fn fetch<'a>(&self, core: &Core, pieces: impl IntoIterator<Item = &'a Piece>) {
        let connected = core.link.epoch() != 0;
        let mut guard = self.lock();
        let state = &mut *guard;
        let mut ask = Vec::new();
        for piece in pieces {
            let Some(segment) = state.segments.get_mut(&piece.segment) else {
                continue;
            };
            let tier = &mut segment.tier;
            if tier.is_here() || tier.asked {
                continue;
            }
            (tier.asked, tier.failed) = (true, false);
            if connected && !segment.unknown {
                ask.push(piece.segment);
                continue;
            }
            let id = piece.segment;
            state.jobs.push_back(match segment.tier.home {
                Home::File => Job::ReadBack { id },
                _ => Job::TakeBack { id },
            });
        }
        drop(guard);
        self.work.notify_all();
        if !ask.is_empty() {
            core.link.send(ToDaemon::ArenaFetch { segments: ask });
        }
    }

    /// Somebody needs what is away: what could not be read before is tried again before he hears of it.
    pub(crate) fn forgive(&self) {
        for segment in self.lock().segments.values_mut() {
            segment.tier.failed = false;
        }
    }

    /// The daemon wants so many bytes of segments let go of.
    pub(crate) fn part_with(&self, core: &Core, bytes: u64) {
        let mut state = self.lock();
        let works = state.started;
        if works {
            state.jobs.push_back(Job::Part { bytes });
        }
        drop(state);
        self.work.notify_all();
        if !works {
            core.link.send(ToDaemon::ArenaParted { segments: Vec::new() });
        }
    }

    /// Segments are in these files.
    pub(crate) fn stored(&self, core: &Core, ids: &[u64], files: Vec<OurFd>) {
        let mut state = self.lock();
        let mut kept = Vec::new();
        for (id, file) in ids.iter().zip(files) {
            let Some(segment) = state.segments.get_mut(id) else {
                continue;
            };
            // Wanted back meanwhile: the daemon hears of that, and says that it stays.
            if segment.tier.home != Home::Parted || segment.tier.asked || !file.is_ours() {
                continue;
            }
            self.forget_fd(&segment.fd);
            arriving_fd(&self.fds, core, &file);
            segment.fd = Arc::new(file);
            segment.tier.home = Home::File;
            kept.push(*id);
        }
        drop(state);
        if !kept.is_empty() {
            core.link.send(ToDaemon::ArenaKept { segments: kept });
        }
    }

    /// Segments stay in the memory that they were in.
    pub(crate) fn stay(&self, ids: &[u64]) {
        let mut state = self.lock();
        for id in ids {
            let parted = |segment: &super::Segment| segment.tier.home == Home::Parted;
            if state.segments.get(id).is_some_and(parted) {
                state.jobs.push_back(Job::TakeBack { id: *id });
            }
        }
        drop(state);
        self.work.notify_all();
    }

    /// Segments are in new memory.
    pub(crate) fn back(&self, core: &Core, segments: &[SegmentInfo], fds: Vec<OurFd>) {
        let mut state = self.lock();
        for (info, fd) in segments.iter().zip(fds) {
            let Some(segment) = state.segments.get_mut(&info.id) else {
                continue;
            };
            if segment.tier.home != Home::File || segment.bytes != info.bytes.get() || !fd.is_ours() {
                continue;
            }
            self.forget_fd(&segment.fd);
            arriving_fd(&self.fds, core, &fd);
            segment.fd = Arc::new(fd);
            segment.tier.home = Home::Parted;
            state.jobs.push_back(Job::TakeBack { id: info.id });
        }
        drop(state);
        self.work.notify_all();
    }

    /// The daemon has done with these and could not read them: this process tries by itself.
    pub(crate) fn broken(&self, ids: &[u64]) {
        let mut state = self.lock();
        for id in ids {
            let Some(segment) = state.segments.get_mut(id) else {
                continue;
            };
            if segment.tier.home == Home::File {
                segment.tier.asked = true;
                segment.unknown = true;
                state.jobs.push_back(Job::ReadBack { id: *id });
            }
        }
        drop(state);
        self.work.notify_all();
    }

    /// The daemon is gone. What was let go of and is in no file comes back; what is in a file is read here when it is
    /// needed.
    pub(crate) fn alone(&self) {
        let mut guard = self.lock();
        let state = &mut *guard;
        // Nobody is left to answer.
        state.jobs.retain(|job| !matches!(job, Job::Part { .. }));
        for (id, segment) in &mut state.segments {
            match segment.tier.home {
                Home::Here => {}
                Home::Parted => {
                    segment.tier.asked = true;
                    state.jobs.push_back(Job::TakeBack { id: *id });
                }
                // Who waits for it asks again.
                Home::File => segment.tier.asked = false,
            }
        }
        drop(guard);
        self.work.notify_all();
    }

    /// For a new daemon: the files, in packets that fit. Those that were read by this process belong to nobody else;
    /// a daemon that knows them (`resumed`) is told so.
    pub(super) fn declare_files(state: &mut State, resumed: bool) -> Vec<(ToDaemon, Vec<Arc<OurFd>>)> {
        let to_tell = |segment: &super::Segment| {
            segment.tier.home == Home::File && !segment.unknown && segment.fd.is_ours()
        };
        let files: Vec<(SegmentInfo, Arc<OurFd>)> = state
            .segments
            .iter()
            .filter(|(_, segment)| to_tell(segment))
            .map(|(id, segment)| {
                let bytes = Bytes(segment.bytes);
                (SegmentInfo { id: *id, bytes }, Arc::clone(&segment.fd))
            })
            .collect();
        let mut messages: Vec<_> = files
            .chunks(MAX_FDS)
            .map(|some| {
                let (segments, fds): (Vec<_>, Vec<_>) = some.iter().cloned().unzip();
                (ToDaemon::ArenaDeclareStored { segments }, fds)
            })
            .collect();
        let segments = std::mem::take(&mut state.read_alone);
        if resumed && !segments.is_empty() {
            messages.push((ToDaemon::ArenaReturn { segments }, Vec::new()));
        }
        messages
    }

    /// Lets go of segments with bytes in them, the oldest first, and says which.
    pub(super) fn part(&self, core: &Arc<Core>, bytes: u64) {
        let candidates: Vec<(u64, u64)> = {
            let state = self.lock();
            let can_go = |id: u64, segment: &super::Segment| {
                let ours = segment.tier.is_here() && !segment.leaving && !segment.unknown;
                ours && segment.fd.is_ours() && state.slots.used_in(id) > 0
            };
            let segments = state.segments.iter();
            segments
                .filter(|(id, segment)| can_go(**id, segment))
                .map(|(id, segment)| (*id, segment.bytes))
                .collect()
        };
        let (mut gone, mut sum) = (Vec::new(), 0);
        for (id, len) in candidates {
            if sum >= bytes || core.captures() > 0 || core.is_exiting() {
                break;
            }
            if self.let_go(core, id) {
                gone.push(id);
                sum += len;
            }
        }
        core.link.send(ToDaemon::ArenaParted { segments: gone });
    }

    /// Nothing of this process uses the memory of a segment any more; its bytes stay in it. `false`: all is as it was.
    fn let_go(&self, core: &Arc<Core>, id: u64) -> bool {
        let (host, bytes, used) = {
            let mut guard = self.lock();
            let state = &mut *guard;
            // What is only kept goes first, and is not worth a place on disk.
            state.kept.leave(id, &mut state.slots);
            let used = state.slots.used_in(id);
            if used == 0 {
                self.send_off(state);
                return false;
            }
            let Some(segment) = state.segments.get_mut(&id) else {
                return false;
            };
            segment.tier = Tier {
                home: Home::Parted,
                ..Tier::HERE
            };
            let found = (segment.host, segment.bytes, used);
            state.slots.set_closed(id, true);
            found
        };
        let undo = |why: Option<String>| {
            if let Some(why) = why {
                core.events.note(format!("arena segment {id} stays: {why}"));
            }
            self.is_here(id);
            core.wake_devices();
            false
        };
        if at_rest(core, id) != used {
            return undo(None);
        }
        if let Err(error) = self.unregister(core, id) {
            return undo(Some(error.to_string()));
        }
        if let Err(error) = core.config.host.unmap(host, bytes) {
            return undo(Some(error.to_string()));
        }
        if let Some(segment) = self.lock().segments.get_mut(&id) {
            segment.host = HostAddr(0);
        }
        true
    }

    /// Maps a segment again that was let go of, or came back in new memory.
    pub(super) fn take_back(&self, core: &Arc<Core>, id: u64) {
        let Some((fd, bytes)) = self.away(id, Home::Parted) else {
            return;
        };
        match map(core, &fd, bytes) {
            Ok(host) => self.here(core, id, host),
            Err(error) => self.not_here(core, id, &format!("cannot be mapped: {error}")),
        }
    }

    /// Reads a segment from its file into memory of this process's own.
    pub(super) fn read_back(&self, core: &Arc<Core>, id: u64) {
        let Some((file, bytes)) = self.away(id, Home::File) else {
            return;
        };
        let memory = match read_file(&file, bytes) {
            Ok(memory) => OurFd::new(memory),
            Err(why) => return self.not_here(core, id, &why),
        };
        match map(core, &memory, bytes) {
            Ok(host) => {
                let mut state = self.lock();
                state.read_alone.push(id);
                if let Some(segment) = state.segments.get_mut(&id) {
                    self.forget_fd(&segment.fd);
                    // The mapping keeps the memory, which is told to no daemon and leaves when it is empty.
                    segment.fd = Arc::new(OurFd::none());
                    segment.unknown = true;
                }
                drop(state);
                self.here(core, id, host);
            }
            Err(error) => self.not_here(core, id, &format!("cannot be mapped: {error}")),
        }
    }

    fn away(&self, id: u64, home: Home) -> Option<(Arc<OurFd>, u64)> {
        let state = self.lock();
        let segment = state
            .segments
            .get(&id)
            .filter(|segment| segment.tier.home == home)?;
        Some((Arc::clone(&segment.fd), segment.bytes))
    }

    fn is_here(&self, id: u64) {
        let mut state = self.lock();
        if let Some(segment) = state.segments.get_mut(&id) {
            segment.tier = Tier::HERE;
        }
        state.close_as_it_is(id);
        self.send_off(&mut state);
    }

    fn here(&self, core: &Arc<Core>, id: u64, host: HostAddr) {
        let bytes = self.lock().segments.get(&id).map_or(0, |segment| segment.bytes);
        let registering = self.registering();
        // Nothing but the ring is to be pinned, or everything.
        let pinned = !core.link.wants_ring();
        let registered = pinned.then(|| self.register(core, id, host, bytes)).flatten();
        if let Some(segment) = self.lock().segments.get_mut(&id) {
            segment.host = host;
            segment.registered = registered;
        }
        drop(registering);
        self.is_here(id);
    }

    fn not_here(&self, core: &Core, id: u64, why: &str) {
        core.events.note(format!("arena segment {id} {why}"));
        if let Some(segment) = self.lock().segments.get_mut(&id) {
            segment.tier.asked = false;
            segment.tier.failed = true;
        }
    }
}

/// Bytes of a segment that belong to chunks that are away, with nothing under way.
fn at_rest(core: &Core, id: u64) -> u64 {
    let mut sum = 0;
    let mut count = |pieces: &[Piece]| {
        let here = pieces.iter().filter(|piece| piece.segment == id);
        sum += here.map(|piece| piece.len).sum::<u64>();
    };
    for device in core.devices() {
        let state = device.lock();
        for (pieces, _) in state.pool.evicted_chunks() {
            count(pieces);
        }
        for (pieces, _) in core.vmm.away(device.index) {
            count(&pieces);
        }
    }
    sum
}

fn read_file(file: &OurFd, bytes: u64) -> Result<OwnedFd, String> {
    let text = |e: Errno| format!("cannot be read back: {e}");
    let memory = rustix::fs::memfd_create("ebb-arena", MemfdFlags::CLOEXEC).map_err(text)?;
    rustix::fs::ftruncate(&memory, bytes).map_err(text)?;
    let read = &mut |buffer: &mut [u8], at| {
        let lost = || std::io::Error::other("the program closed the file");
        Ok(rustix::io::pread(file.get().ok_or_else(lost)?, buffer, at)?)
    };
    let write = &mut |part: &[u8], at| {
        let (mut part, mut at) = (part, at);
        while !part.is_empty() {
            let n = rustix::io::pwrite(&memory, part, at)?;
            part = part.get(n..).unwrap_or_default();
            at += n as u64;
        }
        Ok(())
    };
    ebb_disk::load(bytes, read, write).map_err(|error| format!("cannot be read back: {error}"))?;
    Ok(memory)
}
