//! Copies between the card and pieces of the arena: straight where a segment is pinned, by way of the ring where it is not; and between
//! cards where they are in a room of another one.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};

use ebb_alloc::Piece;
use ebb_device::{DeviceError, DeviceMemory, Direction, HostAddr, Marker};

use super::ring::{Job, Part, Ring, Share};
use super::rooms::room_of;
use super::{Arena, State};
use crate::device::Device;
use crate::steps::{self, Run};

/// Copies that are under way. To be waited for, always.
#[derive(Debug)]
#[must_use = "copies are complete only when they were waited for"]
pub(crate) struct Transfer {
    marker: Option<Marker>,
    job: Option<Arc<Job>>,
    segments: BTreeSet<u64>,
}

impl Transfer {
    /// Waits until nothing of it is under way by the ring. Only `Ok` means that the bytes are there; after an error what went straight may be
    /// under way still ([`steps::settle`]).
    pub(crate) fn wait(self, arena: &Arena, memory: &dyn DeviceMemory) -> Result<(), DeviceError> {
        let straight = self.marker.map_or(Ok(()), |marker| memory.wait(marker));
        let by_ring = self.job.map_or(Ok(()), |job| job.wait());
        if straight.is_ok() {
            let mut state = arena.lock();
            for id in &self.segments {
                if let Some(segment) = state.segments.get_mut(id) {
                    segment.flying = segment.flying.saturating_sub(1);
                }
            }
        }
        straight.and(by_ring)
    }

    /// Whether [`Self::wait`] would return at once.
    pub(crate) fn is_done(&self, memory: &dyn DeviceMemory) -> bool {
        let straight = self
            .marker
            .as_ref()
            .is_none_or(|marker| memory.done(marker).unwrap_or(true));
        straight && self.job.as_ref().is_none_or(|job| job.is_done())
    }

    /// Whether it goes by way of the ring.
    pub(crate) fn is_by_ring(&self) -> bool {
        self.job.is_some()
    }
}

/// How the bytes of a chunk get to the card, at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Straight,
    Ring,
    /// Whoever begins waits until it is pinned.
    Pinning,
}

/// Where pieces are, and the ring if any of them needs it.
struct Places {
    hosts: Vec<(HostAddr, bool)>,
    ring: Option<Arc<Ring>>,
}

impl State {
    /// The way of what lies in a segment.
    fn way(&self, id: u64) -> Way {
        match self.segments.get(&id) {
            Some(segment) if segment.registered.is_some() => Way::Straight,
            Some(_) if self.ring.is_some() => Way::Ring,
            Some(segment) if segment.pinning || self.ring_comes.is_some() => Way::Pinning,
            // Nothing will pin it: the driver copies it as it is.
            _ => Way::Straight,
        }
    }
}

impl Arena {
    /// Of these segments the first that can be copied from at once: with nothing to wait for (`straight`), or by way of the ring (`ring`).
    pub(crate) fn first_ready(
        &self,
        segments: impl Iterator<Item = u64>,
        straight: bool,
        ring: bool,
    ) -> Option<usize> {
        let state = self.lock();
        let mut by_ring = None;
        for (at, id) in segments.enumerate() {
            match state.way(id) {
                Way::Straight if straight => return Some(at),
                Way::Ring if ring && by_ring.is_none() => by_ring = Some(at),
                _ => {}
            }
        }
        by_ring
    }

    /// Starts the copies of the given runs of one chunk (where in it, and how long; in order), which lies at `at` on the card and in these
    /// pieces here. On an error some may be under way: see [`steps::settle`].
    pub(crate) fn transfer(
        &self,
        device: &Device,
        direction: Direction,
        at: u64,
        pieces: &[Piece],
        runs: &[(u64, u64)],
    ) -> Result<Transfer, DeviceError> {
        let memory = &device.memory;
        if let Some(room) = room_of(pieces) {
            let marker = self.rooms.enqueue(&**memory, direction, at, room, runs)?;
            return Ok(Transfer {
                marker: Some(marker),
                job: None,
                segments: BTreeSet::new(),
            });
        }
        let Places { hosts, ring } = self.places(pieces);
        let runs = steps::runs(pieces, runs);
        let (mut straight, mut by_ring) = (Vec::new(), Vec::new());
        for run in runs {
            match hosts.get(run.piece) {
                Some((host, true)) if ring.is_some() => by_ring.push((host.offset(run.from), run)),
                Some((host, _)) => straight.push((host.offset(run.from), run)),
                None => {}
            }
        }
        let mut job = None;
        if let Some(ring) = ring.filter(|_| !by_ring.is_empty()) {
            let (begun, parts) = cut(memory, direction, at, &by_ring, ring.slot());
            match ring.push(parts) {
                Ok(()) => job = Some(begun),
                // It was closed at this moment: slower, but it goes on.
                Err(_) => straight.append(&mut by_ring),
            }
        }
        let enqueued = || {
            for (host, run) in &straight {
                match direction {
                    Direction::Out => memory.copy_out(*host, at + run.at, run.len)?,
                    Direction::In => memory.copy_in(at + run.at, *host, run.len)?,
                }
            }
            // What was enqueued before (zeros) is waited for with this; parts have markers of their own behind it.
            if straight.is_empty() && job.is_some() {
                return Ok(None);
            }
            memory.mark(direction).map(Some)
        };
        match enqueued() {
            Ok(marker) => Ok(Transfer {
                marker,
                job,
                segments: pieces.iter().map(|piece| piece.segment).collect(),
            }),
            Err(error) => {
                if let Some(job) = job {
                    let _ = job.wait();
                }
                Err(error)
            }
        }
    }

    /// Where pieces are, and whether each needs the ring. Waits for what is being pinned, if there is no other way.
    fn places(&self, pieces: &[Piece]) -> Places {
        let pinning = |state: &mut State| {
            pieces
                .iter()
                .any(|piece| state.way(piece.segment) == Way::Pinning)
        };
        let mut state = self
            .work
            .wait_while(self.lock(), pinning)
            .unwrap_or_else(PoisonError::into_inner);
        let mut any = false;
        let hosts = pieces
            .iter()
            .filter_map(|piece| {
                let by_ring = state.way(piece.segment) == Way::Ring;
                any |= by_ring;
                let segment = state.segments.get(&piece.segment)?;
                // It may be marked to go at this moment; then it is seen that this is not at rest, and it stays.
                debug_assert!(segment.host != HostAddr(0), "copies begin with what is here");
                Some((segment.host.offset(piece.offset), by_ring))
            })
            .collect();
        for id in pieces.iter().map(|piece| piece.segment).collect::<BTreeSet<_>>() {
            if let Some(segment) = state.segments.get_mut(&id) {
                segment.flying += 1;
            }
        }
        let ring = state.ring.clone().filter(|_| any);
        Places { hosts, ring }
    }
}

/// Parts of a slot at most.
fn cut(
    memory: &Arc<dyn DeviceMemory>,
    direction: Direction,
    at: u64,
    runs: &[(HostAddr, Run)],
    slot: u64,
) -> (Arc<Job>, Vec<Part>) {
    let count: u64 = runs.iter().map(|(_, run)| run.len.div_ceil(slot)).sum();
    let job = Job::new(usize::try_from(count).unwrap_or(usize::MAX));
    let mut parts = Vec::new();
    for (host, run) in runs {
        let mut from = 0;
        while from < run.len {
            let len = slot.min(run.len - from);
            parts.push(Part {
                memory: Arc::clone(memory),
                direction,
                dev: at + run.at + from,
                host: host.offset(from),
                len,
                share: Share::of(&job),
            });
            from += len;
        }
    }
    (job, parts)
}
