//! The program's own virtual memory management: physical memory that it makes by handles and maps where it likes.
//!
//! It gets a handle of ours; behind it is a real one, which comes and goes as the memory leaves the card and comes back.
//! What the driver would know is kept here: which references the program holds, where the memory is mapped and who may
//! use each mapping.
//!
//! ```text
//!              make                    last reference, last mapping and last use gone
//!   (nothing) -----> on the card -------------------------------------------> (released)
//!                      |     ^  out: copy, unmap everywhere, release                ^
//!                      v     |  in:  make, map everywhere, grant, copy              |
//!                    away (bytes in the arena, or none that anybody wrote) ---------+
//! ```
//!
//! # Rules
//! * The program's calls that need a real handle or change what is mapped are made inside the gate: there everything is
//!   on the card, the driver itself checks every argument, and the table follows what it accepted.
//! * A mapping is taken out of the table before the driver unmaps it and entered after the driver mapped it. So addresses
//!   that are mapped anew by another thread are never taken for the old mapping.
//! * While a thread is between translating a handle and entering what came of it, it holds a *use*: the memory outlives it.
//! * The real handle lives as long as the memory is on the card, also when the program has released its own and only
//!   mappings are left: an address can give a handle out again.
//! * What is mapped belongs to the process and not to a device: one table for all, whose lock comes after a device's.

mod calls;
mod moves;
mod place;
mod table;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use calls::{Taken, Use};
pub(crate) use moves::{Away, Leaving};
pub(crate) use place::{Down, Remains, Seat, discard, put_up, take_down};
pub(crate) use table::{Gone, Mapped, Table};

/// The upper bits of every handle of ours. The driver's are addresses of the processor, which cannot look like this, or
/// small numbers.
const TAG: u64 = 0xEBB5;
const TAG_SHIFT: u32 = 48;

/// Whether a handle is one that we gave out, alive or not.
#[must_use]
pub const fn is_ours(handle: u64) -> bool {
    handle >> TAG_SHIFT == TAG
}

/// The program's memory of all devices.
#[derive(Debug, Default)]
pub(crate) struct Vmm {
    table: Mutex<Table>,
    /// Mappings in the table: most programs have none, and then no question needs the lock.
    mapped: AtomicUsize,
}

impl Vmm {
    /// Looks at the table, or changes it. Nothing is called under it.
    pub(crate) fn with<T>(&self, run: impl FnOnce(&mut Table) -> T) -> T {
        let mut table = self.lock();
        let result = run(&mut table);
        self.mapped.store(table.mapped(), Ordering::Release);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nothing is mapped at all.
    pub(crate) fn is_unmapped(&self) -> bool {
        self.mapped.load(Ordering::Acquire) == 0
    }
}
