//! One pair of cache lines per thread that ever passed the gate.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// How many slots come at once: a page of them.
const BLOCK: usize = 32;

/// A thread's place at one gate. 128 bytes: two lines, because processors fetch lines in pairs.
#[repr(align(128))]
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// Which gate it belongs to: an address that is only compared. Set once.
    pub(super) gate: AtomicUsize,
    /// How deep its thread is inside. Written by that thread alone.
    pub(super) depth: AtomicU32,
    taken: AtomicBool,
    /// How often a thread with this slot went in. Never goes back, also when the slot changes hands.
    pub(super) passages: AtomicU64,
    /// The same thread's slot at another gate (a program has one gate; tests have many).
    next: Mutex<Option<&'static Self>>,
}

impl Slot {
    /// Links a slot in front of a thread's other ones.
    pub(super) fn link(&self, others: Option<&'static Self>) {
        *self.next.lock().unwrap_or_else(PoisonError::into_inner) = others;
    }

    /// The slot of `gate` among a thread's slots.
    pub(super) fn find(mut head: Option<&'static Self>, gate: usize) -> Option<&'static Self> {
        while let Some(slot) = head {
            if slot.gate.load(Ordering::Relaxed) == gate {
                return Some(slot);
            }
            head = *slot.next.lock().unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Gives all slots of a thread that ends back, also if it ended inside.
    pub(super) fn release_all(mut head: Option<&'static Self>) {
        while let Some(slot) = head {
            head = slot.next.lock().unwrap_or_else(PoisonError::into_inner).take();
            slot.depth.store(0, Ordering::Release);
            slot.taken.store(false, Ordering::Release);
        }
    }
}

/// A gate's slots: blocks in a chain that only grows.
#[derive(Debug, Default)]
pub(super) struct Slots {
    first: OnceLock<Box<Block>>,
}

#[derive(Debug, Default)]
struct Block {
    slots: [Slot; BLOCK],
    next: OnceLock<Box<Self>>,
}

impl Slots {
    pub(super) const fn new() -> Self {
        Self {
            first: OnceLock::new(),
        }
    }

    /// Takes a free slot, or a new one.
    pub(super) fn take(&'static self, gate: usize) -> &'static Slot {
        let mut at = &self.first;
        loop {
            let block = at.get_or_init(Box::default);
            for slot in &block.slots {
                let free = !slot.taken.load(Ordering::Relaxed)
                    && slot
                        .taken
                        .compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed)
                        .is_ok();
                if free {
                    slot.gate.store(gate, Ordering::Relaxed);
                    return slot;
                }
            }
            at = &block.next;
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Slot> {
        std::iter::successors(self.first.get(), |block| block.next.get()).flat_map(|block| &block.slots)
    }
}
