//! Marks in the program's streams, by which stream-ordered pools learn how far these have come: events of our own.
//!
//! An event belongs to the context of the stream that it is recorded in, and dies with it. They are made when first needed and used
//! again. None is recorded, asked about or waited for while a stream is captured: a capture that wants to begin waits
//! until a call of ours is over, which is a matter of microseconds.
//!
//! # Locks
//! `events` is held for a look only, under no call of the driver.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_abi::*;
use ebb_cuda::{DriverTable, Scope};
use ebb_layer_core::{Fence, FenceState, Fences, StreamKey};

use crate::hooks::{capture, memory};

#[derive(Debug, Default)]
struct Events {
    /// Those that are not in use, by context.
    idle: HashMap<u64, Vec<u64>>,
    /// The context of each.
    context: HashMap<u64, u64>,
}

/// Events of our own.
#[derive(Debug)]
pub(crate) struct EventFences {
    table: Arc<DriverTable>,
    events: Mutex<Events>,
}

/// Without a time: such events are cheaper.
const FLAGS: u32 = CU_EVENT_DISABLE_TIMING.0;

const fn handle(event: u64) -> CUevent {
    // A handle of 64 bits on the systems that there are.
    #[allow(clippy::cast_possible_truncation, reason = "it came from a handle")]
    CUevent(event as usize)
}

fn stream(key: &StreamKey) -> CUstream {
    CUstream(usize::try_from(key.handle).unwrap_or(0))
}

impl EventFences {
    pub(crate) fn new(table: Arc<DriverTable>) -> Self {
        Self {
            table,
            events: Mutex::default(),
        }
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A context goes: its events are no handles any more.
    pub(crate) fn forget_context(&self, context: u64) {
        let mut events = self.events();
        events.idle.remove(&context);
        events.context.retain(|_, known| *known != context);
    }

    fn scope(&self, context: u64) -> Option<Scope<'_>> {
        Scope::enter(&self.table, CUcontext(usize::try_from(context).ok()?)).ok()
    }

    fn event(&self, context: u64) -> Option<u64> {
        if let Some(event) = self.events().idle.get_mut(&context).and_then(Vec::pop) {
            return Some(event);
        }
        let mut event = CUevent::NULL;
        // SAFETY: a valid place for the answer; the context is current.
        let made = unsafe { self.table.cuEventCreate(&raw mut event, FLAGS) };
        if !made.is_success() {
            return None;
        }
        let event = event.0 as u64;
        self.events().context.insert(event, context);
        Some(event)
    }

    fn record_now(&self, key: &StreamKey) -> Option<Fence> {
        let _scope = self.scope(key.context)?;
        let event = self.event(key.context)?;
        // SAFETY: an event of our own, and a stream that the program has not destroyed: the engine was told of none, and one that is
        // being destroyed waits for this call.
        let recorded = unsafe { self.table.cuEventRecord(handle(event), stream(key)) };
        if recorded.is_success() {
            Some(Fence(event))
        } else {
            self.recycle(Fence(event));
            None
        }
    }
}

impl Fences for EventFences {
    fn allowed(&self) -> bool {
        !capture::any() && !memory::is_exiting()
    }

    fn record(&self, key: &StreamKey) -> Option<Fence> {
        capture::without_captures(|| self.record_now(key)).flatten()
    }

    fn state(&self, fence: Fence) -> FenceState {
        let Some(context) = self.events().context.get(&fence.0).copied() else {
            return FenceState::Lost;
        };
        let asked = capture::without_captures(|| {
            let _scope = self.scope(context)?;
            // SAFETY: an event of our own, whose context lives.
            Some(unsafe { self.table.cuEventQuery(handle(fence.0)) })
        });
        match asked {
            None => FenceState::Pending,
            Some(Some(CUresult::SUCCESS)) => FenceState::Passed,
            Some(Some(CUresult::ERROR_NOT_READY)) => FenceState::Pending,
            Some(_) => FenceState::Lost,
        }
    }

    fn hold(&self, key: &StreamKey, fence: Fence) -> bool {
        let held = capture::without_captures(|| {
            let _scope = self.scope(key.context)?;
            // SAFETY: an event of our own and the stream that the program has just named.
            Some(unsafe { self.table.cuStreamWaitEvent(stream(key), handle(fence.0), 0) })
        });
        matches!(held, Some(Some(CUresult::SUCCESS)))
    }

    fn recycle(&self, fence: Fence) {
        let mut events = self.events();
        if let Some(context) = events.context.get(&fence.0).copied() {
            events.idle.entry(context).or_default().push(fence.0);
        }
    }
}
