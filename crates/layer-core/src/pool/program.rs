//! The sums of memory that the program makes by itself: charged as allocations are, moved as they are, and never cached.

use super::{Plan, Pool};
use crate::vmm::Remains;

impl Pool {
    /// The next step for such memory: `Ready` means that it is counted.
    pub(crate) fn plan_program(&mut self, len: u64) -> Plan {
        let plan = self.plan_external(len);
        if matches!(plan, Plan::Ready(_)) {
            self.books.external -= len;
            self.books.allocated += len;
        }
        plan
    }

    /// Such memory is gone from the card, or was never made.
    pub(crate) fn program_gone(&mut self, len: u64) {
        self.books.allocated = self.books.allocated.saturating_sub(len);
        self.books.give(len);
    }

    /// Such memory is gone while its bytes were away.
    pub(crate) fn program_gone_away(&mut self, len: u64) {
        self.books.allocated = self.books.allocated.saturating_sub(len);
        self.books.evicted = self.books.evicted.saturating_sub(len);
    }

    /// What the device has of it already when it is attached.
    pub(crate) fn program_was_there(&mut self, card: u64, away: u64) {
        self.books.take(card);
        self.books.allocated += card + away;
        self.books.evicted += away;
    }

    /// What the driver would not take back, to be tried again.
    pub(crate) fn keep_remains(&mut self, remains: Option<Remains>) {
        if let Some(remains) = remains {
            if remains.holds_memory() {
                self.books.take(remains.len);
                self.books.stuck += remains.len;
            }
            self.remains.push(remains);
        }
    }

    /// All of that; each goes to [`Self::tried_remains`] after it was tried.
    pub(crate) fn take_remains(&mut self) -> Vec<Remains> {
        std::mem::take(&mut self.remains)
    }

    /// What came of one: `len` bytes that it held before, if it held any, and what is left.
    pub(crate) fn tried_remains(&mut self, held: Option<u64>, after: Option<Remains>) {
        if let Some(len) = held
            && !after.as_ref().is_some_and(Remains::holds_memory)
        {
            self.books.stuck = self.books.stuck.saturating_sub(len);
            self.books.give(len);
        }
        self.remains.extend(after);
    }
}
