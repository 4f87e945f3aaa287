//! All segments are unpinned, before the driver checkpoints the process, and pinned again after it.
//!
//! Pinning walks every page of a segment, and so does unpinning; several threads do that faster than one. What is asleep makes no copies, so
//! that nobody waits for the first; after the second whoever copies waits for the segments that it needs ([`Arena::addresses`]).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ebb_device::{DeviceError, HostAddr};

use super::Arena;
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
}

impl Arena {
    /// Unpins every segment; none is pinned from here on until [`Self::pin_again`], which has to follow, also after a failure.
    /// Not while a graph is captured.
    ///
    /// # Errors
    /// The driver's. Some segments may be unpinned.
    pub(crate) fn unpin_all(&self, core: &Arc<Core>) -> Result<(), DeviceError> {
        let _unregistering = self.unregistering();
        let all: Vec<One> = {
            let mut state = self.lock();
            state.unpinned = true;
            let one = |(id, segment): (&u64, &super::Segment)| {
                let (host, bytes, device) = (segment.host, segment.bytes, segment.registered?);
                let id = *id;
                Some(One {
                    id,
                    host,
                    bytes,
                    device,
                })
            };
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

    /// Has every segment that is not pinned pinned again, by threads of its own. Makes no driver call itself and waits for nothing.
    pub(crate) fn pin_again(&self, core: &Arc<Core>) {
        let device = core.devices().into_iter().find(|device| !device.lock().stop);
        let all: Vec<One> = {
            let mut state = self.lock();
            if !std::mem::take(&mut state.unpinned) {
                return;
            }
            let Some(device) = device else { return };
            let away = state.segments.iter_mut().filter(|(_, segment)| {
                let stays = segment.tier.is_here() && !segment.leaving && !segment.unknown;
                segment.registered.is_none() && stays
            });
            away.map(|(id, segment)| {
                segment.pinning = true;
                One {
                    id: *id,
                    host: segment.host,
                    bytes: segment.bytes,
                    device: device.index,
                }
            })
            .collect()
        };
        let pin = {
            let core = Arc::clone(core);
            move |one: One| pin_one(&core, one)
        };
        // They end by themselves.
        drop(share_out(all, pin));
    }
}

fn pin_one(core: &Core, one: One) {
    let arena = &core.arena;
    let registering = arena.registering();
    let wanted = arena
        .lock()
        .segments
        .get(&one.id)
        .is_some_and(|segment| segment.pinning && segment.tier.is_here());
    let device = core.device(one.device).filter(|device| !device.lock().stop);
    let mut registered = None;
    if let Some(device) = device.filter(|_| wanted) {
        match device.memory.register_host(one.host, one.bytes) {
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
