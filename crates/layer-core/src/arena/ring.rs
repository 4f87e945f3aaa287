//! The ring: a bounded piece of pinned memory, through which threads copy to and from memory that is not pinned.
//!
//! ```text
//!   out:  card --copy engine--> slot --thread--> segment          in:  segment --thread--> slot --copy engine--> card
//! ```
//! The copy engine reaches memory that is not pinned at a fifth of the link's rate. Each thread of the ring has two slots of it: while the engine
//! works on one, the thread copies the other. So the engine always has something to do, and what is pinned is the ring and nothing else.
//! It is used where segments are not to be pinned at all (`arena.pinned = "ring"`), and after a hibernation until they are pinned again.
//!
//! The memory is a segment of the arena like all others, so that it is counted, and lives as long as its [`Ring`]: nothing is put into it
//! meanwhile.
//!
//! # Locks
//! The ring's queue and a job's state: taken under nothing but the arena's `state`, and nothing is taken under them. No driver call is made under
//! either.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use ebb_device::{DeviceError, DeviceMemory, Direction, HostAddr, Marker};
use ebb_units::Bytes;

use crate::core::Core;
use crate::{steps, threads};

/// Threads at most. One copies some 4 GB/s.
const THREADS: u64 = 12;
/// A slot's size at most: the link's full rate, and what all threads have under way fits into a processor's cache.
const SLOT: u64 = 4 << 20;
/// Smaller slots are not worth it.
const SLOT_MIN: u64 = 4096;

/// A copy by way of the ring.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) memory: Arc<dyn DeviceMemory>,
    pub(super) direction: Direction,
    pub(super) dev: u64,
    pub(super) host: HostAddr,
    /// At most [`Ring::slot`].
    pub(super) len: u64,
    pub(super) share: Share,
}

/// A part's share of its job. Who waits for the job hears of it whatever becomes of the part.
#[derive(Debug)]
pub(super) struct Share(Option<Arc<Job>>);

impl Share {
    pub(super) fn of(job: &Arc<Job>) -> Self {
        Self(Some(Arc::clone(job)))
    }

    fn end(mut self, result: Result<(), DeviceError>) {
        if let Some(job) = self.0.take() {
            job.part_ended(result);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if let Some(job) = self.0.take() {
            job.part_ended(Err(DeviceError::Gone));
        }
    }
}

/// Parts that somebody waits for together.
#[derive(Debug)]
pub(crate) struct Job {
    state: Mutex<(usize, Option<DeviceError>)>,
    ended: Condvar,
}

impl Job {
    pub(super) fn new(parts: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new((parts, None)),
            ended: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, (usize, Option<DeviceError>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn part_ended(&self, result: Result<(), DeviceError>) {
        let mut state = self.lock();
        state.0 = state.0.saturating_sub(1);
        state.1 = state.1.or(result.err());
        if state.0 == 0 {
            self.ended.notify_all();
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.lock().0 == 0
    }

    /// Waits until no part is under way. Only `Ok` means that all bytes are there.
    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        let state = self.ended.wait_while(self.lock(), |state| state.0 > 0);
        state
            .unwrap_or_else(PoisonError::into_inner)
            .1
            .map_or(Ok(()), Err)
    }
}

#[derive(Debug, Default)]
struct Queue {
    parts: VecDeque<Part>,
    /// Threads that live.
    threads: usize,
    /// No part is taken any more.
    closed: bool,
    /// The engine may use a slot for ever, for all that is known.
    spoiled: bool,
}

/// The ring and its threads.
#[derive(Debug)]
pub(super) struct Ring {
    /// The segment that it lies in.
    pub(super) id: u64,
    slot: u64,
    queue: Mutex<Queue>,
    work: Condvar,
    ended: Condvar,
}

/// A part of which the copy engine has its share.
struct Pending {
    part: Part,
    slot: usize,
    marker: Marker,
}

impl Ring {
    /// Starts it in a segment that is pinned and has nothing in it. `None` if it is too small, or there are no threads to be had.
    pub(super) fn start(core: &Arc<Core>, id: u64, host: HostAddr, bytes: u64) -> Option<Arc<Self>> {
        // Not `available_parallelism`: the standard library asks by a function that is not in the list of what old systems have.
        let cores = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count());
        let count = u64::from(cores).clamp(2, THREADS);
        let slot = (bytes / (2 * count)).min(SLOT) / SLOT_MIN * SLOT_MIN;
        if slot == 0 {
            return None;
        }
        let ring = Arc::new(Self {
            id,
            slot,
            queue: Mutex::default(),
            work: Condvar::new(),
            ended: Condvar::new(),
        });
        for thread in 0..count {
            let slots = [0, 1].map(|which| host.offset((2 * thread + which) * slot));
            let (with, core) = (Arc::clone(&ring), Arc::clone(core));
            ring.lock().threads += 1;
            if threads::spawn("ebb-ring", move || with.run(&core, slots)).is_err() {
                ring.lock().threads -= 1;
                break;
            }
        }
        let threads = ring.lock().threads;
        (threads > 0).then_some(ring)
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The longest part.
    pub(super) fn slot(&self) -> u64 {
        self.slot
    }

    /// Takes parts on, in order. `Err` if it takes none any more.
    pub(super) fn push(&self, parts: Vec<Part>) -> Result<(), Vec<Part>> {
        let mut queue = self.lock();
        if queue.closed {
            return Err(parts);
        }
        queue.parts.extend(parts);
        drop(queue);
        self.work.notify_all();
        Ok(())
    }

    /// Takes no more, and waits until all that was taken on is done. `false`: the memory must not be used for anything else all the same.
    pub(super) fn close(&self) -> bool {
        let mut queue = self.lock();
        queue.closed = true;
        self.work.notify_all();
        while queue.threads > 0 {
            queue = self.ended.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        !queue.spoiled
    }

    /// Has its threads end, without waiting.
    pub(super) fn shut(&self) {
        self.lock().closed = true;
        self.work.notify_all();
    }

    /// The next part. Without `wait`, only one that is there.
    fn next(&self, wait: bool) -> Option<Part> {
        let mut queue = self.lock();
        loop {
            let part = queue.parts.pop_front();
            if part.is_some() || !wait || queue.closed {
                return part;
            }
            queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn run(&self, core: &Arc<Core>, slots: [HostAddr; 2]) {
        let mut pending: Option<Pending> = None;
        let mut end = End {
            ring: self,
            broken: None,
        };
        while end.broken.is_none() {
            let next = self.next(pending.is_none());
            if next.is_none() && pending.is_none() {
                break;
            }
            // A restore may be what the program's end waits for: no turning back here.
            let _at_driver = core.at_driver();
            let free = pending.as_ref().map_or(0, |pending| 1 - pending.slot);
            let begun = next.and_then(|part| {
                let begun = begin(core, part, free, slots[free]);
                begun.unwrap_or_else(|error| {
                    end.broken = Some(error);
                    None
                })
            });
            if let Some(before) = std::mem::replace(&mut pending, begun)
                && let Err(error) = finish(core, before, slots)
            {
                end.broken = Some(error);
            }
        }
        if let Some(pending) = pending
            && let Err(error) = finish(core, pending, slots)
        {
            end.broken = Some(error);
        }
    }
}

/// The end of a thread, also by a panic: whoever waits for the ring or for a part hears of it.
struct End<'a> {
    ring: &'a Ring,
    broken: Option<DeviceError>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        let mut queue = self.ring.lock();
        queue.threads -= 1;
        if self.broken.is_some() || std::thread::panicking() {
            (queue.closed, queue.spoiled) = (true, true);
        }
        let left = if queue.threads == 0 {
            std::mem::take(&mut queue.parts)
        } else {
            VecDeque::new()
        };
        drop(queue);
        for part in left {
            part.share.end(Err(self.broken.unwrap_or(DeviceError::Gone)));
        }
        self.ring.work.notify_all();
        self.ring.ended.notify_all();
    }
}

/// The first half of a part. `Err`: the engine may use the slot for ever.
fn begin(core: &Core, part: Part, slot: usize, at: HostAddr) -> Result<Option<Pending>, DeviceError> {
    let memory = &*part.memory;
    let copied = match part.direction {
        Direction::Out => memory.copy_out(at, part.dev, part.len),
        Direction::In => {
            core.config.host.copy(at, part.host, Bytes(part.len));
            memory.copy_in(part.dev, at, part.len)
        }
    };
    if let Err(error) = copied {
        part.share.end(Err(error));
        return Ok(None);
    }
    match memory.mark(part.direction) {
        Ok(marker) => Ok(Some(Pending { part, slot, marker })),
        Err(error) => {
            let settled = steps::settle(memory, part.direction);
            part.share.end(Err(error));
            if settled { Ok(None) } else { Err(error) }
        }
    }
}

/// The second half.
fn finish(core: &Core, pending: Pending, slots: [HostAddr; 2]) -> Result<(), DeviceError> {
    let Pending { part, slot, marker } = pending;
    let memory = &*part.memory;
    match memory.wait(marker) {
        Ok(()) => {
            if part.direction == Direction::Out {
                core.config.host.copy(part.host, slots[slot], Bytes(part.len));
            }
            part.share.end(Ok(()));
            Ok(())
        }
        Err(error) => {
            let settled = steps::settle(memory, part.direction);
            part.share.end(Err(error));
            if settled { Ok(()) } else { Err(error) }
        }
    }
}
