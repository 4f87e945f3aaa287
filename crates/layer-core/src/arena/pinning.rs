//! All segments are unpinned, before the driver checkpoints the process, and pinned again after it.
//!
//! ```text
//!   a hibernation is to come: each segment that is full is unpinned while the next ones are copied to     (Early)
//!   all is quiet: the rest is unpinned                                                                    (unpinned)
//!   awake: an empty segment is pinned first, for the ring; then those that are needed last. What is needed first goes through the ring
//!   all are pinned: the ring is closed
//! ```
//! Pinning walks every page of a segment, and so does unpinning; several threads do that faster than one. Pinning 16 GiB takes twice as long as copying
//! them, so that nobody waits for it who need not: what is pinned is copied straight, and what is not goes through the ring, until the two meet.
//! Without an empty segment there is no ring, and whoever copies waits for the segments that it needs ([`Arena::transfer`]).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ebb_device::{DeviceError, HostAddr};

use super::ring::Ring;
use super::{Arena, State, common};
use crate::core::Core;
use crate::threads;

/// Threads at most.
const THREADS: usize = 4;

/// A segment to be pinned or unpinned.
#[derive(Clone, Copy, Debug)]
struct One {
    id: u64,
    host: HostAddr,
    bytes: u64,
    /// The device that it is registered with.
    device: usize,
    /// It can only be read.
    common: bool,
}

impl One {
    fn of(id: u64, segment: &super::Segment, device: usize) -> Self {
        Self {
            id,
            host: segment.host,
            bytes: segment.bytes,
            device,
            common: segment.common,
        }
    }
}

/// Unpinning ahead of a hibernation.
#[derive(Debug, Default)]
pub(super) struct Early {
    /// It is to come.
    on: bool,
    /// Copies run: nobody may capture, and what is unpinned costs no time.
    copying: bool,
    threads: usize,
    /// There is something to be pinned again.
    any: bool,
    /// Chunks that have got room, and whose copies may not be queued yet: a segment may be full with them.
    placing: u32,
}

/// Until it is dropped, no segment is unpinned ahead.
#[derive(Debug)]
pub(crate) struct Placing<'a>(&'a Arena);

impl Drop for Placing<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.early.placing = state.early.placing.saturating_sub(1);
    }
}

impl State {
    /// The next segment that is full, copied and pinned: whoever has it unpins it.
    fn take_early(&mut self) -> Option<One> {
        if !self.early.on || !self.early.copying || self.early.placing > 0 {
            return None;
        }
        let slots = &self.slots;
        let full = |id: u64, bytes: u64| slots.used_in(id) == bytes;
        let mut segments = self.segments.iter_mut();
        let found = segments.find_map(|(id, segment)| {
            let busy = segment.flying > 0 || segment.leaving || segment.pinning || !segment.tier.is_here();
            let one = One::of(*id, segment, segment.registered?);
            if busy || !full(*id, segment.bytes) {
                return None;
            }
            segment.registered = None;
            Some(one)
        });
        self.early.any |= found.is_some();
        found
    }
}

impl Arena {
    /// A hibernation is to come. What is copied from now on is unpinned as soon as its segment is full, and room for a ring is asked for.
    pub(crate) fn sleep_comes(&self) {
        let mut state = self.lock();
        state.early.on = true;
        if state.ring.is_none() {
            state.spare = state
                .segments
                .values()
                .map(|segment| segment.bytes)
                .max()
                .unwrap_or(0);
            state.wanted = 0;
        }
    }

    /// It does not come, or is over: nothing is unpinned ahead any more, and all is pinned again.
    pub(crate) fn sleep_does_not_come(&self, core: &Arc<Core>) {
        self.lock().early.on = false;
        self.pin_again(core);
    }

    /// Copies to the arena begin, or are over. In between nothing captures. Waits for what is being unpinned.
    pub(crate) fn copies(&self, run: bool) {
        let mut state = self.lock();
        state.early.copying = run;
        while !run && state.early.threads > 0 {
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A chunk gets room, and its copy is queued: from before the one until after the other. What was full in between would be unpinned under
    /// the copy.
    pub(crate) fn placing(&self) -> Placing<'_> {
        self.lock().early.placing += 1;
        Placing(self)
    }

    /// A copy is over: its segment may be full.
    pub(crate) fn copied(&self, core: &Arc<Core>) {
        let one = {
            let mut state = self.lock();
            if state.early.threads >= THREADS {
                return;
            }
            let Some(one) = state.take_early() else { return };
            state.early.threads += 1;
            one
        };
        let with = Arc::clone(core);
        if threads::spawn("ebb-unpin", move || with.arena.unpin_early(&with, one)).is_err() {
            let mut state = self.lock();
            state.early.threads -= 1;
            if let Some(segment) = state.segments.get_mut(&one.id) {
                segment.registered = Some(one.device);
            }
            self.work.notify_all();
        }
    }

    fn unpin_early(&self, core: &Core, first: One) {
        let _at_driver = core.at_driver();
        let registering = self.registering();
        let mut next = Some(first);
        while let Some(one) = next {
            let device = core.device(one.device);
            let failed =
                device.is_none_or(|device| device.memory.unregister_host(one.host, one.bytes).is_err());
            let mut state = self.lock();
            if failed {
                if let Some(segment) = state.segments.get_mut(&one.id) {
                    segment.registered = Some(one.device);
                }
                // The rest is not tried: `unpin_all` does, and says why it cannot.
                state.early.on = false;
            }
            next = if core.is_exiting() {
                None
            } else {
                state.take_early()
            };
        }
        self.lock().early.threads -= 1;
        drop(registering);
        self.work.notify_all();
    }

    /// Unpins every segment; none is pinned from here on until [`Self::pin_again`], which has to follow, also after a failure.
    /// Not while a graph is captured.
    ///
    /// # Errors
    /// The driver's. Some segments may be unpinned.
    pub(crate) fn unpin_all(&self, core: &Arc<Core>) -> Result<(), DeviceError> {
        {
            let mut state = self.lock();
            state.unpinned = true;
            state.early.on = false;
            for segment in state.segments.values_mut() {
                segment.pinning = false;
            }
        }
        self.work.notify_all();
        self.end_ring(None);
        let _unregistering = self.unregistering();
        let all: Vec<One> = {
            let state = self.lock();
            let one =
                |(id, segment): (&u64, &super::Segment)| Some(One::of(*id, segment, segment.registered?));
            state.segments.iter().filter_map(one).collect()
        };
        let failed = Arc::new(Mutex::new(None));
        let unpin = {
            let (core, failed) = (Arc::clone(core), Arc::clone(&failed));
            move |one: One| {
                let Some(device) = core.device(one.device) else {
                    return;
                };
                match device.memory.unregister_host(one.host, one.bytes) {
                    Ok(()) => {
                        if let Some(segment) = core.arena.lock().segments.get_mut(&one.id) {
                            segment.registered = None;
                        }
                    }
                    Err(error) => *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error),
                }
            }
        };
        for helper in share_out(all, unpin) {
            let _ = helper.join();
        }
        let failed = *failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.map_or(Ok(()), Err)
    }

    /// Has every segment that is to be pinned and is not pinned again, by threads of its own. Makes no driver call itself and waits for nothing.
    pub(crate) fn pin_again(&self, core: &Arc<Core>) {
        let device = core.devices().into_iter().find(|device| !device.lock().stop);
        let only_ring = core.link.wants_ring();
        let (ring, rest) = {
            let mut guard = self.lock();
            let state = &mut *guard;
            let early = std::mem::take(&mut state.early.any);
            let nothing = !std::mem::take(&mut state.unpinned) & !early;
            let Some(device) = device.filter(|_| !nothing) else {
                // Room for a ring is not needed.
                if !only_ring {
                    state.spare = 0;
                }
                return;
            };
            let ring = state.place_for_ring();
            let mut rest = Vec::new();
            for (id, segment) in &mut state.segments {
                let stays = segment.tier.is_here() && !segment.leaving && !segment.unknown;
                if segment.registered.is_some() || !stays {
                    continue;
                }
                let one = One::of(*id, segment, device.index);
                if !only_ring && Some(one.id) != ring {
                    segment.pinning = true;
                    rest.push(one);
                }
            }
            // Restores begin with what has least in its segment; see `residency::chunks::away`.
            let need = |one: &One| (state.slots.used_in(one.id), one.id);
            rest.sort_unstable_by_key(need);
            if ring.is_some() {
                rest.reverse();
            }
            let ring = ring.and_then(|id| {
                let segment = state.segments.get_mut(&id)?;
                segment.pinning = true;
                let one = One::of(id, segment, device.index);
                state.ring_comes = Some(id);
                state.slots.set_closed(id, true);
                Some(one)
            });
            (ring, rest)
        };
        let began = Instant::now();
        let sum: u64 = rest.iter().map(|one| one.bytes).sum();
        let ring_id = ring.map(|one| one.id);
        let all: Vec<One> = ring.into_iter().chain(rest).collect();
        if all.is_empty() {
            return self.all_pinned(core, ring_id, only_ring, began, sum);
        }
        let left = AtomicUsize::new(all.len());
        let pin = {
            let core = Arc::clone(core);
            move |one: One| {
                pin_one(&core, one);
                if Some(one.id) == ring_id {
                    core.arena.begin_ring(&core, one);
                }
                if left.fetch_sub(1, Ordering::AcqRel) == 1 {
                    core.arena.all_pinned(&core, ring_id, only_ring, began, sum);
                }
            }
        };
        // They end by themselves.
        drop(share_out(all, pin));
    }

    /// The ring's segment is pinned, or could not be.
    fn begin_ring(&self, core: &Arc<Core>, one: One) {
        let pinned = {
            let state = self.lock();
            let segment = state.segments.get(&one.id);
            !state.unpinned && segment.is_some_and(|segment| segment.registered.is_some())
        };
        let ring = if pinned {
            Ring::start(core, one.id, one.host, one.bytes)
        } else {
            None
        };
        let mut state = self.lock();
        state.ring_comes = None;
        if state.unpinned {
            // It sleeps again.
            drop(state);
            let spoiled = ring.filter(|ring| !ring.close());
            state = self.lock();
            state.ring = spoiled;
        } else {
            state.ring = ring;
        }
        state.close_as_it_is(one.id);
        // What was asked back meanwhile passed this segment by.
        self.send_off(&mut state);
        drop(state);
        core.wake_devices();
    }

    /// The ring is not needed any more, unless it is `for_good`.
    fn all_pinned(&self, core: &Core, ring: Option<u64>, for_good: bool, began: Instant, bytes: u64) {
        core.events.note(format!(
            "{} of host memory pinned again in {} ms",
            ebb_units::Bytes(bytes),
            began.elapsed().as_millis()
        ));
        if for_good {
            return;
        }
        self.lock().spare = 0;
        if ring.is_some() {
            self.end_ring(ring);
        }
        core.link.poke();
    }

    /// The ring ends, if there is one and (with an id) it is that segment's; `None` if not. Its segment takes bytes again, unless something else is in the
    /// way. `Some(false)`: its memory must not be used for anything else, and it stays the ring's, which takes nothing on.
    pub(super) fn end_ring(&self, id: Option<u64>) -> Option<bool> {
        let ring = self.lock().ring.clone();
        let ring = ring.filter(|ring| id.is_none_or(|id| ring.id == id))?;
        let free = ring.close();
        let mut state = self.lock();
        if free {
            state.ring.take_if(|known| known.id == ring.id);
        }
        state.close_as_it_is(ring.id);
        // What was asked back meanwhile passed this segment by.
        self.send_off(&mut state);
        Some(free)
    }
}

impl State {
    fn takes_a_ring(&self, id: u64) -> bool {
        let good = |s: &super::Segment| s.tier.is_here() && !s.leaving && !s.unknown && s.flying == 0;
        self.segments.get(&id).is_some_and(good)
    }

    /// A segment with nothing in it.
    fn place_for_ring(&self) -> Option<u64> {
        if !self.has_no_ring() {
            return None;
        }
        let empty = self.slots.empty();
        empty
            .into_iter()
            .map(|(id, _)| id)
            .find(|id| self.takes_a_ring(*id))
    }
}

fn pin_one(core: &Core, one: One) {
    let arena = &core.arena;
    let registering = arena.registering();
    let wanted = {
        let state = arena.lock();
        let segment = state.segments.get(&one.id);
        // An empty one that the ring gets may be pinned still.
        let lacks = |s: &super::Segment| s.pinning && s.registered.is_none() && s.tier.is_here();
        !state.unpinned && segment.is_some_and(lacks)
    };
    let device = core.device(one.device).filter(|device| !device.lock().stop);
    let mut registered = None;
    if let Some(device) = device.filter(|_| wanted) {
        match common::register(&device, one.common, one.host, one.bytes) {
            Ok(()) => registered = Some(one.device),
            Err(error) => core.events.note(format!(
                "arena segment {} is not pinned again, copies will be slower: {error}",
                one.id
            )),
        }
    }
    if let Some(segment) = arena.lock().segments.get_mut(&one.id) {
        segment.pinning = false;
        segment.registered = segment.registered.or(registered);
    }
    drop(registering);
    arena.work.notify_all();
    // Who restores waits for the next one to be ready, by its own lock.
    core.wake_devices();
}

/// Does the same with all, on a few threads; on the calling one if there are none to be had.
fn share_out(all: Vec<One>, work: impl Fn(One) + Send + Sync + 'static) -> Vec<std::thread::JoinHandle<()>> {
    let count = all.len().min(THREADS);
    let (all, work, next) = (Arc::new(all), Arc::new(work), Arc::new(AtomicUsize::new(0)));
    let run = {
        move || {
            while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                work(*one);
            }
        }
    };
    let helpers: Vec<_> = (0..count)
        .map_while(|_| threads::spawn("ebb-pin", run.clone()).ok())
        .collect();
    if helpers.is_empty() {
        run();
    }
    helpers
}
