//! The arena's budget follows what the machine and the control group have to give.

use std::time::Duration;

use ebb_policy::Time;
use ebb_units::Bytes;

use super::Driver;
use super::timers::Timer;
use crate::budget::HostMemory;
use crate::say;

/// How often they are looked at while the arena holds anything: a few small files.
const EVERY: Duration = Duration::from_secs(10);
/// At most so often when much happens.
const AT_MOST: Duration = Duration::from_secs(2);

/// What is configured, and when the machine was looked at last.
#[derive(Debug)]
pub(super) struct Following {
    configured: Bytes,
    looked: Option<Time>,
    armed: bool,
}

impl Following {
    pub(super) fn new(configured: Bytes) -> Self {
        Self {
            configured,
            looked: None,
            armed: false,
        }
    }
}

impl Driver {
    /// A new budget was configured.
    pub(super) fn set_arena_budget(&mut self, configured: Bytes) {
        self.memory = Following {
            armed: self.memory.armed,
            ..Following::new(configured)
        };
        self.arena.set_budget(configured);
    }

    /// Looks at the machine, if that was some time ago and there is anything to bound.
    pub(super) fn follow_memory(&mut self, now: Time) {
        if self.arena.is_idle() {
            return;
        }
        if !std::mem::replace(&mut self.memory.armed, true) {
            self.timers.insert((now.after(EVERY), Timer::Memory));
        }
        if self.memory.looked.is_some_and(|at| now < at.after(AT_MOST)) {
            return;
        }
        self.memory.looked = Some(now);
        // Pages of the pool of huge pages are in nobody's account of used memory.
        let counted = if self.config.arena.huge_pages {
            Bytes::ZERO
        } else {
            self.arena.held()
        };
        let budget = self.memory.configured.min(HostMemory::read().bound(counted));
        let before = self.arena.budget();
        if budget == before {
            return;
        }
        if budget < self.memory.configured && before == self.memory.configured {
            say::warning!(
                "the machine has less memory left than the arena may hold: {budget} for the time being"
            );
        }
        self.arena.set_budget(budget);
    }

    pub(super) fn memory_due(&mut self) {
        self.memory.armed = false;
        self.arena_dirty = true;
    }
}
