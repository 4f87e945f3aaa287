//! Asking another process of the machine to do something: what the checkpoint calls on other processes are made of.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::file::SlotRow;
use crate::machine::{Machine, Slot};

/// A request that another process made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    sequence: u32,
    /// What to do; the driver's business.
    pub code: u32,
    /// With what.
    pub argument: u64,
}

fn futex(word: &AtomicU32, operation: i32, value: u32, timeout: Option<Duration>) {
    let time = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word lives in the machine file's mapping, which is never undone; the time is null or valid.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, time) };
}

impl Machine {
    fn row(&self, slot: Slot) -> &'static SlotRow {
        &self.file().slot[slot.0]
    }

    /// The state of a process's checkpoint interface.
    #[must_use]
    pub fn checkpoint_state(&self, slot: Slot) -> u32 {
        self.row(slot).checkpoint_state.load(Ordering::Acquire)
    }

    /// Sets this process's own.
    pub fn set_checkpoint_state(&self, state: u32) {
        if let Some(slot) = self.own_slot() {
            self.row(slot).checkpoint_state.store(state, Ordering::Release);
        }
    }

    /// Waits for a request of another process. Only one thread of a process does this.
    #[must_use]
    pub fn next_request(&self) -> Option<Request> {
        let row = self.row(self.own_slot()?);
        loop {
            let sequence = row.request_sequence.load(Ordering::Acquire);
            if sequence != row.answer_sequence.load(Ordering::Acquire) {
                return Some(Request {
                    sequence,
                    code: row.request_code.load(Ordering::Acquire),
                    argument: row.request_argument.load(Ordering::Acquire),
                });
            }
            futex(&row.request_sequence, libc::FUTEX_WAIT, sequence, None);
        }
    }

    /// Answers a request.
    pub fn answer(&self, request: Request, code: u32) {
        let Some(slot) = self.own_slot() else { return };
        let row = self.row(slot);
        row.answer_code.store(code, Ordering::Release);
        row.answer_sequence.store(request.sequence, Ordering::Release);
        futex(&row.answer_sequence, libc::FUTEX_WAKE, u32::MAX >> 1, None);
    }

    /// Asks another process and waits for its answer; `None` if it died or did not answer in time. One after the other: what somebody
    /// asked before, even if that process is dead, is done first.
    #[must_use]
    pub fn ask(&self, slot: Slot, code: u32, argument: u64, timeout: Duration) -> Option<u32> {
        let row = self.row(slot);
        let give_up = Instant::now() + timeout;
        let sequence = loop {
            let answered = {
                let _ledger = self.ledger();
                let open = row.request_sequence.load(Ordering::Acquire);
                let answered = row.answer_sequence.load(Ordering::Acquire);
                if open == answered {
                    row.request_code.store(code, Ordering::Release);
                    row.request_argument.store(argument, Ordering::Release);
                    row.request_sequence
                        .store(open.wrapping_add(1), Ordering::Release);
                    break open.wrapping_add(1);
                }
                answered
            };
            if !self.wait_for_answer(slot, answered, give_up) {
                return None;
            }
        };
        futex(&row.request_sequence, libc::FUTEX_WAKE, u32::MAX >> 1, None);
        loop {
            let answered = row.answer_sequence.load(Ordering::Acquire);
            if answered == sequence {
                return Some(row.answer_code.load(Ordering::Acquire));
            }
            if answered.wrapping_sub(sequence).cast_signed() > 0 {
                // Somebody else's came after it, and took its place.
                return None;
            }
            if !self.wait_for_answer(slot, answered, give_up) {
                return None;
            }
        }
    }

    /// Waits until there may be an answer beyond the one that was seen. `false`: there will be none, or not in time.
    fn wait_for_answer(&self, slot: Slot, seen: u32, give_up: Instant) -> bool {
        if !self.is_alive(slot) || Instant::now() >= give_up {
            return false;
        }
        // Wakes up now and then to see whether the other one still lives.
        let look = Some(Duration::from_millis(50));
        futex(&self.row(slot).answer_sequence, libc::FUTEX_WAIT, seen, look);
        true
    }
}
