//! One pair of cache lines per thread that ever passed the gate.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::DeviceSet;

/// How many slots come at once: two pages of them.
const BLOCK: usize = 32;

/// In a slot's word: the thread is inside for the devices of `mask` only. Without it, for all of them.
pub(super) const NARROW: u32 = 1 << 31;
/// The rest of the word: how deep the thread is inside.
pub(super) const DEPTH: u32 = NARROW - 1;

/// Counters of passages in a slot: one for threads whose device is not known, the others for devices in turn.
pub(super) const LANES: usize = 16;

/// A thread's place at one gate. The first two lines are what a passage uses; processors fetch lines in pairs.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// Which gate it belongs to: an address that is only compared. Set once.
    pub(super) gate: AtomicUsize,
    /// How deep its thread is inside, and [`NARROW`]. Written by that thread alone.
    pub(super) word: AtomicU32,
    /// Which of `passages` its thread counts in. Written by that thread alone.
    pub(super) lane: AtomicU32,
    /// The devices for which a thread that went in narrowly is inside. Written by that thread alone, before the word.
    pub(super) mask: AtomicU64,
    /// How often a thread with this slot went in. Never goes back, also when the slot changes hands.
    pub(super) passages: [AtomicU64; LANES],
    taken: AtomicBool,
    /// The same thread's slot at another gate (a program has one gate; tests have many).
    next: Mutex<Option<&'static Self>>,
}

impl Slot {
    /// Counts a passage of the slot's thread.
    #[inline(always)]
    pub(super) fn count(&self) {
        let lane = self.lane.load(Ordering::Relaxed) as usize % LANES;
        let count = &self.passages[lane];
        count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Whether its thread may be inside for a device.
    pub(super) fn is_inside(&self, device: DeviceSet) -> bool {
        let word = self.word.load(Ordering::Acquire);
        word & DEPTH != 0
            && (word & NARROW == 0 || DeviceSet(self.mask.load(Ordering::Acquire)).meets(device))
    }

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
            slot.word.store(0, Ordering::Release);
            slot.lane.store(0, Ordering::Relaxed);
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
