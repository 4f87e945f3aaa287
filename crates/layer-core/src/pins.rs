//! Pins: memory that another party may hold is not moved, and the report says who and why.
//!
//! A *pin* lies on whole spans of the pool (an allocation of its own; for a small one, the segment that it shares) or on
//! a handle of the program's own virtual memory, and on nothing else. Pins are counted: several reasons may hold the
//! same memory, and it is movable again when the last of them has gone. While memory is pinned,
//! `Pool::candidates` passes over it.
//!
//! Pinning needs the memory to be on the card: whoever pins stands inside the gate, where no eviction is under way.
//! Memory that is freed while it is pinned is never cached: the other party may still see it.
//!
//! Part of a device's state, under its lock.

use std::collections::BTreeMap;

use ebb_units::Bytes;

use crate::core::Core;
use crate::engine::Engine;

/// Why memory must stay where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PinReason {
    /// Another process has it open by a legacy IPC handle.
    LegacyIpc,
    /// A handle to it was exported: a descriptor or a fabric handle, which may be anywhere.
    Exported,
    /// It was imported from another process.
    Imported,
    /// A dma-buf of it was given out.
    DmaBuf,
    /// Operations on it are to be synchronous, which programs ask for before they hand it to a network card.
    SyncMemops,
    /// It is bound to a multicast object.
    Multicast,
    /// The program holds a handle that it got from an address.
    Retained,
    /// A library or a network card has it registered.
    Registered,
    /// It is mapped in a way in which it could not be mapped again.
    Unrepeatable,
    /// The processor may use it where it is mapped, which no gate sees.
    Processor,
}

impl PinReason {
    /// Its name in the report.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::LegacyIpc => "legacy IPC",
            Self::Exported => "exported handle",
            Self::Imported => "imported from another process",
            Self::DmaBuf => "dma-buf",
            Self::SyncMemops => "synchronous memory operations",
            Self::Multicast => "multicast",
            Self::Retained => "retained handle",
            Self::Registered => "registered",
            Self::Processor => "used by the processor",
            Self::Unrepeatable => "mapped in parts or into an array",
        }
    }
}

/// A pin, to be given to [`Engine::unpin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinId {
    device: usize,
    number: u64,
}

impl PinId {
    pub(crate) const fn new(device: usize, number: u64) -> Self {
        Self { device, number }
    }
}

/// Why nothing was pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// No memory of ours lies there, or the engine does not serve this process any more.
    #[error("it is not memory of ours")]
    NotOurs,
    /// Some of it is in host memory: the caller was not inside the gate.
    #[error("some of it is not on the card")]
    Away,
}

/// What a pin lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Held {
    /// A span of the pool, by its first address.
    Span(u64),
    /// A handle of the program's own virtual memory, by its number.
    Handle(u64),
    /// Memory that was freed here and is still open elsewhere, by a number of its own.
    Lent(u64),
}

#[derive(Clone, Debug)]
struct Pin {
    on: Vec<Held>,
    reason: PinReason,
    /// More about it: who holds it.
    detail: String,
}

/// The pins of one device.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    last: u64,
    pins: BTreeMap<u64, Pin>,
    counts: BTreeMap<Held, u32>,
    /// Bytes of what is lent.
    lent: BTreeMap<u64, u64>,
    /// Spans that other processes opened have a number, by which they know them.
    numbers: BTreeMap<u64, u64>,
}

impl Pins {
    /// Pins all of `on`, and returns the pin's number.
    pub(crate) fn add(&mut self, on: Vec<Held>, reason: PinReason, detail: String) -> u64 {
        for held in &on {
            *self.counts.entry(*held).or_default() += 1;
        }
        self.last += 1;
        self.pins.insert(self.last, Pin { on, reason, detail });
        self.last
    }

    /// Takes a pin off. Whether something may move now that could not before, and how many lent bytes are gone.
    pub(crate) fn remove(&mut self, number: u64) -> (bool, u64) {
        let Some(pin) = self.pins.remove(&number) else {
            return (false, 0);
        };
        let (mut freed, mut back) = (false, 0);
        for held in pin.on {
            if let Some(count) = self.counts.get_mut(&held) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&held);
                    freed = true;
                    if let Held::Lent(number) = held {
                        back += self.lent.remove(&number).unwrap_or(0);
                    }
                }
            }
        }
        (freed, back)
    }

    /// A span of `len` bytes is freed here. If other processes have it open, it is lent from now on: `true`.
    pub(crate) fn lend(&mut self, base: u64, len: u64) -> bool {
        let span = Held::Span(base);
        let open = |pin: &Pin| pin.reason == PinReason::LegacyIpc && pin.on.contains(&span);
        let holders = self.pins.values().filter(|pin| open(pin)).count();
        if holders == 0 {
            return false;
        }
        self.last += 1;
        let lent = Held::Lent(self.last);
        for pin in self.pins.values_mut().filter(|pin| open(pin)) {
            pin.on
                .iter_mut()
                .filter(|held| **held == span)
                .for_each(|held| *held = lent);
        }
        self.counts
            .insert(lent, u32::try_from(holders).unwrap_or(u32::MAX));
        self.lent.insert(self.last, len);
        true
    }

    /// The number of a span: the same as long as it lives, and never another's.
    pub(crate) fn number_of(&mut self, base: u64) -> u64 {
        let last = &mut self.last;
        *self.numbers.entry(base).or_insert_with(|| {
            *last += 1;
            *last
        })
    }

    /// Bytes of what is lent.
    pub(crate) fn lent_bytes(&self, number: u64) -> u64 {
        self.lent.get(&number).copied().unwrap_or(0)
    }

    /// The memory is gone, and with it what lay on it. `true` if something did.
    pub(crate) fn forget(&mut self, held: Held) -> bool {
        if let Held::Span(base) = held {
            self.numbers.remove(&base);
        }
        if self.counts.remove(&held).is_none() {
            return false;
        }
        self.pins.retain(|_, pin| {
            pin.on.retain(|other| *other != held);
            !pin.on.is_empty()
        });
        true
    }

    pub(crate) fn is_held(&self, held: Held) -> bool {
        !self.counts.is_empty() && self.counts.contains_key(&held)
    }

    /// What is pinned for a reason, each once.
    pub(crate) fn held_for(&self, reason: PinReason) -> std::collections::BTreeSet<Held> {
        let pins = self.pins.values().filter(|pin| pin.reason == reason);
        pins.flat_map(|pin| &pin.on).copied().collect()
    }

    /// Says more about a pin.
    pub(crate) fn describe(&mut self, number: u64, detail: String) {
        if let Some(pin) = self.pins.get_mut(&number) {
            pin.detail = detail;
        }
    }

    /// Everything that is pinned.
    pub(crate) fn held(&self) -> impl Iterator<Item = Held> + '_ {
        self.counts.keys().copied()
    }

    /// For the report: bytes by reason. What has several reasons is counted once, under the oldest.
    pub(crate) fn by_reason(&self, bytes_of: impl Fn(Held) -> u64) -> BTreeMap<String, u64> {
        let mut seen = std::collections::BTreeSet::new();
        let mut sums = BTreeMap::new();
        for pin in self.pins.values() {
            let bytes: u64 = pin
                .on
                .iter()
                .filter(|held| seen.insert(**held))
                .map(|held| bytes_of(*held))
                .sum();
            let name = match pin.detail.as_str() {
                "" => pin.reason.name().to_owned(),
                detail => format!("{} ({detail})", pin.reason.name()),
            };
            *sums.entry(name).or_insert(0) += bytes;
        }
        sums.retain(|_, bytes| *bytes > 0);
        sums
    }
}

impl Engine {
    /// Pins the allocations that lie in a range, until [`Self::unpin`] or until they are freed. Call it inside the gate:
    /// there everything is on the card and stays there.
    ///
    /// # Errors
    /// [`PinError`]; nothing was pinned.
    pub fn pin(&self, ptr: u64, len: Bytes, reason: PinReason) -> Result<PinId, PinError> {
        if self.core.is_child() {
            return Err(PinError::NotOurs);
        }
        let device = self.core.device_of(ptr).ok_or(PinError::NotOurs)?;
        let mut state = device.lock();
        let on = state.pool.pinnable(ptr, len.get())?;
        let number = state.pool.pins.add(on, reason, String::new());
        drop(state);
        self.core.link.poke();
        Ok(PinId::new(device.index, number))
    }

    /// Takes a pin off. One whose memory was freed is gone already.
    pub fn unpin(&self, pin: PinId) {
        if self.core.is_child() {
            return;
        }
        unpin(&self.core, pin);
    }

    /// Says more about a pin in the report: who holds it.
    pub fn describe_pin(&self, pin: PinId, detail: &str) {
        if self.core.is_child() {
            return;
        }
        if let Some(device) = self.core.device(pin.device) {
            device.lock().pool.pins.describe(pin.number, detail.to_owned());
        }
    }
}

/// Takes a pin off.
pub(crate) fn unpin(core: &Core, pin: PinId) {
    let Some(device) = core.device(pin.device) else {
        return;
    };
    let freed = device.lock().pool.unpin(pin.number);
    if freed {
        // What was lent is free: an allocation may wait for just this.
        device.wake();
        core.link.poke();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_moves_again_when_its_last_reason_has_gone() {
        let mut pins = Pins::default();
        let (a, b) = (Held::Span(1), Held::Handle(1));
        let ipc = pins.add(vec![a], PinReason::LegacyIpc, "opened by pid 7".into());
        let both = pins.add(vec![a, b], PinReason::DmaBuf, String::new());
        assert!(pins.is_held(a) && pins.is_held(b) && !pins.is_held(Held::Span(2)));
        let sums = pins.by_reason(|_| 10);
        assert_eq!(sums["legacy IPC (opened by pid 7)"], 10);
        assert_eq!(sums["dma-buf"], 10, "what has two reasons counts once");
        assert_eq!(pins.remove(ipc), (false, 0), "another reason is left");
        assert!(pins.is_held(a));
        assert_eq!((pins.remove(both), pins.remove(both)), ((true, 0), (false, 0)));
        assert_eq!(pins.held().count(), 0);
    }

    #[test]
    fn freed_memory_takes_its_pins_along_and_no_others() {
        let mut pins = Pins::default();
        let (a, b) = (Held::Span(1), Held::Span(2));
        let one = pins.add(vec![a, b], PinReason::Multicast, String::new());
        assert!(pins.forget(a) && !pins.forget(a));
        assert!(!pins.is_held(a) && pins.is_held(b));
        assert!(pins.remove(one).0 && !pins.is_held(b));
    }

    #[test]
    fn what_others_have_open_is_lent_until_the_last_has_closed_it() {
        let mut pins = Pins::default();
        let number = pins.number_of(4096);
        assert_eq!(pins.number_of(4096), number);
        let open = |pins: &mut Pins| pins.add(vec![Held::Span(4096)], PinReason::LegacyIpc, String::new());
        let (one, two) = (open(&mut pins), open(&mut pins));
        pins.add(vec![Held::Span(4096)], PinReason::DmaBuf, String::new());
        assert!(pins.lend(4096, 100) && pins.forget(Held::Span(4096)));
        assert!(!pins.is_held(Held::Span(4096)));
        assert_eq!(
            pins.by_reason(|_| 7).len(),
            1,
            "who had it otherwise has nothing any more"
        );
        assert_ne!(pins.number_of(4096), number, "another span");
        assert_eq!(pins.remove(one), (false, 0));
        assert_eq!(pins.remove(two), (true, 100));
        assert!(!pins.lend(4096, 100));
    }
}
