//! Events that several processes use: two counters in the machine file.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::file::{EventRow, MAX_EVENTS};
use crate::machine::{Machine, Slot};

/// One process's hold on an interprocess event.
#[derive(Debug)]
pub struct EventCell {
    machine: &'static Machine,
    index: usize,
    generation: u32,
    /// This process made it: it ends with this value.
    owned: bool,
}

impl Machine {
    /// Makes an event; `None` if there are too many.
    #[must_use]
    pub fn create_event(&'static self) -> Option<Arc<EventCell>> {
        let own = self.own_slot()?;
        let _ledger = self.ledger();
        let index = self.file().event.iter().position(|row| {
            let owner = row.owner.load(Ordering::Acquire);
            owner == 0 || !self.is_alive(Slot(owner as usize - 1))
        })?;
        let row = &self.file().event[index];
        row.recorded.store(0, Ordering::Release);
        row.completed.store(0, Ordering::Release);
        let generation = row.generation.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        row.owner.store(own.0 as u32 + 1, Ordering::Release);
        Some(Arc::new(EventCell {
            machine: self,
            index,
            generation,
            owned: true,
        }))
    }

    /// Opens an event that another process made; `None` if it is gone.
    #[must_use]
    pub fn open_event(&'static self, index: u32, generation: u32) -> Option<Arc<EventCell>> {
        let index = usize::try_from(index).ok().filter(|index| *index < MAX_EVENTS)?;
        let cell = EventCell {
            machine: self,
            index,
            generation,
            owned: false,
        };
        cell.is_current().then(|| Arc::new(cell))
    }
}

impl EventCell {
    fn row(&self) -> &'static EventRow {
        &self.machine.file().event[self.index]
    }

    /// What another process needs to open it.
    #[must_use]
    pub fn name(&self) -> (u32, u32) {
        (self.index as u32, self.generation)
    }

    fn is_current(&self) -> bool {
        let row = self.row();
        let owner = row.owner.load(Ordering::Acquire);
        row.generation.load(Ordering::Acquire) == self.generation
            && owner != 0
            && self.machine.is_alive(Slot(owner as usize - 1))
    }

    /// A record was submitted. Returns its number.
    #[must_use]
    pub fn begin(&self) -> u64 {
        self.row().recorded.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// A record was reached.
    pub fn complete(&self, number: u64) {
        if self.is_current() {
            self.row().completed.fetch_max(number, Ordering::AcqRel);
        }
    }

    /// The number of the latest record.
    #[must_use]
    pub fn latest(&self) -> u64 {
        self.row().recorded.load(Ordering::Acquire)
    }

    /// Whether a record was reached, or can never be because the event is gone.
    #[must_use]
    pub fn is_reached(&self, number: u64) -> bool {
        self.row().completed.load(Ordering::Acquire) >= number || !self.is_current()
    }
}

impl Drop for EventCell {
    fn drop(&mut self) {
        if self.owned && self.is_current() {
            self.row().owner.store(0, Ordering::Release);
        }
    }
}
