//! What the hooks call. The driver's calls of the program are theirs; here is what comes before and after each.

use std::collections::HashSet;

use ebb_device::{Grant, Location, Props};
use ebb_units::Bytes;

use super::table::{AwayTaken, Less, Place};
use super::{Gone, Mapped, Remains};
use crate::allocate;
use crate::core::Core;
use crate::device::Device;
use crate::engine::Engine;
use crate::error::AllocError;
use crate::gate::DeviceSet;
use crate::pins::{Held, PinId, PinReason};

/// A call with one of our handles, between its translation and [`Engine::vmm_end_use`].
#[derive(Debug)]
#[must_use = "the memory stays in use until the call has ended"]
pub struct Use {
    handle: u64,
    /// The driver's handle, for this call alone.
    pub real: u64,
    /// The engine's number of its device.
    pub device: usize,
}

/// Mappings that the driver is being asked to remove.
#[derive(Debug, Default)]
#[must_use = "they are neither mapped nor unmapped until the driver has answered"]
pub struct Taken(Vec<Mapped>);

impl Taken {
    /// Whether none of them is of memory of ours.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The lowest of them.
    pub(crate) fn first(&self) -> Option<&Mapped> {
        self.0.first()
    }
}

impl Engine {
    /// Makes memory for the program, as it asked. Waits for room as [`Engine::alloc`] does: no lock held, outside the gate.
    /// Returns the handle that the program is to get.
    ///
    /// # Errors
    /// As [`Engine::alloc`]; nothing is made.
    pub fn vmm_create(&self, device: usize, len: u64, props: Props) -> Result<u64, AllocError> {
        if self.core.is_passthrough() {
            return Err(AllocError::Bypass);
        }
        let device = self.core.device(device).ok_or(AllocError::Bypass)?;
        if len == 0 || !len.is_multiple_of(device.memory.granularity()) {
            return Err(AllocError::Size(Bytes(len)));
        }
        allocate::program(&self.core, &device, len, props)
    }

    /// A call with a handle of ours begins; inside the gate. `None`: the program has no such handle (any more).
    #[must_use]
    pub fn vmm_begin_use(&self, handle: u64) -> Option<Use> {
        let (real, device) = self.core.vmm.with(|table| table.begin_use(handle))?;
        Some(Use {
            handle,
            real: real.0,
            device,
        })
    }

    /// That call has ended. `pin`: it lets somebody else hold the memory, which stays where it is from now on.
    pub fn vmm_end_use(&self, used: &Use, pin: Option<PinReason>) {
        if let Some(reason) = pin {
            self.pin_handles(&[used.handle], reason);
        }
        self.less(|core| core.vmm.with(|table| table.end_use(used.handle)));
    }

    /// Somebody else may hold the memory of a call that has not ended; inside the gate.
    pub fn vmm_pin_use(&self, used: &Use, reason: PinReason) -> Vec<PinId> {
        self.pin_handles(&[used.handle], reason)
    }

    /// The driver has mapped the memory of a call that has not ended.
    pub fn vmm_mapped(&self, used: &Use, at: u64, size: u64) {
        self.core.vmm.with(|table| table.map(used.handle, at, size));
    }

    /// The same where another memory was mapped before: whoever knows that mapping finds it as it was.
    pub(crate) fn vmm_mapped_as(&self, used: &Use, before: &Mapped) {
        self.core.vmm.with(|table| table.map_as(used.handle, before));
    }

    /// The memories of a device that could be exchanged for others with the same bytes: on the card, not pinned, with no
    /// reference but its maker's, and mapped at no other addresses than these. While the device's gate is closed it stays like that.
    pub(crate) fn vmm_alone(&self, device: &Device, maps: &HashSet<u64>) -> HashSet<u64> {
        let state = device.lock();
        self.core
            .vmm
            .with(|table| table.alone(&state.pool, device.index, maps))
    }

    /// Whether an address lies in a mapping of the program's own memory.
    #[must_use]
    pub fn vmm_contains(&self, ptr: u64) -> bool {
        !self.core.vmm.is_unmapped() && self.core.vmm.with(|table| table.at(ptr).is_some())
    }

    /// Whether a range touches such a mapping.
    #[must_use]
    pub fn vmm_overlaps(&self, at: u64, size: u64) -> bool {
        !self.core.vmm.is_unmapped()
            && self
                .core
                .vmm
                .with(|table| table.within(at, size).next().is_some())
    }

    /// A number for the mapping at an address that no other ever had.
    #[must_use]
    pub fn vmm_serial(&self, ptr: u64) -> Option<u64> {
        if self.core.vmm.is_unmapped() {
            return None;
        }
        self.core.vmm.with(|table| Some(table.at(ptr)?.serial))
    }

    /// Before the driver removes the mappings of a range; inside the gate.
    pub fn vmm_take(&self, at: u64, size: u64) -> Taken {
        if self.core.vmm.is_unmapped() {
            return Taken::default();
        }
        Taken(self.core.vmm.with(|table| table.take(at, size)))
    }

    /// The driver refused.
    pub fn vmm_still_mapped(&self, taken: Taken) {
        self.core.vmm.with(|table| table.still_mapped(taken.0));
    }

    /// The driver has removed them.
    pub fn vmm_unmapped(&self, taken: Taken) {
        for mapping in taken.0 {
            self.less(|core| core.vmm.with(|table| table.end_use(mapping.handle)));
        }
    }

    /// Removes the mappings of a range of which something is away, without bringing it back: the driver knows nothing of
    /// what is not on the card. `false` if that is not the case, or if the range is not made of whole mappings of ours
    /// alone: then go through the gate and let the driver answer.
    #[must_use]
    pub fn vmm_unmap_away(&self, at: u64, size: u64) -> bool {
        let core = &self.core;
        if core.vmm.is_unmapped() || size == 0 || core.is_child() {
            return false;
        }
        loop {
            let index = core
                .vmm
                .with(|table| table.device_of_memory(table.at(at)?.handle));
            let Some(device) = index.and_then(|index| core.device(index)) else {
                return false;
            };
            let state = device.lock();
            if !state.closed {
                return false;
            }
            match core.vmm.with(|table| table.take_away(device.index, at, size)) {
                AwayTaken::No => return false,
                AwayTaken::Wait => drop(device.wait(state)),
                AwayTaken::Yes(taken) => {
                    drop(state);
                    self.vmm_unmapped(Taken(taken));
                    return true;
                }
            }
        }
    }

    /// The driver has set access on a range; inside the gate.
    pub fn vmm_granted(&self, at: u64, size: u64, grants: &[Grant]) {
        if self.core.vmm.is_unmapped() {
            return;
        }
        // The table knows locations by the driver's numbers; which of them are devices of ours the layer tells by `gain_access`.
        if !self.core.vmm.with(|table| table.granted(at, size, grants)) {
            // A mapping whose parts differ could not be put back: its memory stays where it is.
            self.vmm_pin_range(at, size, PinReason::Unrepeatable);
        }
        if grants
            .iter()
            .any(|grant| grant.flags != 0 && grant.location.kind != Location::DEVICE)
        {
            self.vmm_pin_range(at, size, PinReason::Processor);
        }
    }

    /// What a location may do at an address, if it is one of ours and something was said about that location.
    #[must_use]
    pub fn vmm_access(&self, ptr: u64, location: Location) -> Option<u32> {
        if self.core.vmm.is_unmapped() {
            return None;
        }
        self.core.vmm.with(|table| table.access(ptr, location))
    }

    /// The program gives a reference back. `false`: it has no such handle.
    #[must_use]
    pub fn vmm_release(&self, handle: u64) -> bool {
        self.less(|core| core.vmm.with(|table| table.release(handle)))
    }

    /// Brings back what is away on a device, if there is anything; outside the gate.
    pub fn vmm_bring_back(&self, device: usize) {
        if self.core.is_child() || self.core.vmm.held_on(device).1 == 0 {
            return;
        }
        if self.core.gate.enter_for(|| DeviceSet::one(device)).is_ok() {
            self.core.gate.leave();
        }
    }

    /// The program takes a reference by an address that is mapped: its handle. Outside the gate.
    #[must_use]
    pub fn vmm_retain(&self, ptr: u64) -> Option<u64> {
        let Some(device) = self.framework_device_at(ptr) else {
            return self.core.vmm.with(|table| table.retain(ptr));
        };
        // The pool may be bringing blocks together: then another memory is at this address in a moment.
        self.core.gate.enter_for(|| DeviceSet::one(device)).ok()?;
        let handle = self.core.vmm.with(|table| table.retain(ptr));
        self.core.gate.leave();
        handle
    }

    /// The engine's number of the device whose memory the program has mapped at an address.
    #[must_use]
    pub fn vmm_device_at(&self, ptr: u64) -> Option<usize> {
        self.core
            .vmm
            .with(|table| table.device_of_memory(table.at(ptr)?.handle))
    }

    /// Somebody else may hold what is mapped in a range; inside the gate. The pins, none if nothing of ours is there.
    pub fn vmm_pin_range(&self, at: u64, size: u64, reason: PinReason) -> Vec<PinId> {
        let handles: Vec<u64> = self
            .core
            .vmm
            .with(|table| table.within(at, size).map(|mapping| mapping.handle).collect());
        self.pin_handles(&handles, reason)
    }

    fn pin_handles(&self, handles: &[u64], reason: PinReason) -> Vec<PinId> {
        let mut pins = Vec::with_capacity(handles.len());
        for handle in handles {
            let index = self.core.vmm.with(|table| table.device_of_memory(*handle));
            if let Some(device) = index.and_then(|index| self.core.device(index)) {
                let mut state = device.lock();
                let number = state
                    .pool
                    .pins
                    .add(vec![Held::Handle(*handle)], reason, String::new());
                pins.push(PinId::new(device.index, number));
            }
        }
        self.core.link.poke();
        pins
    }

    /// Gives something back, waiting for the owner thread while it moves that very memory. `false`: there was none.
    fn less(&self, give: impl Fn(&Core) -> Less) -> bool {
        let core = &self.core;
        let mut less = give(core);
        while let Less::Wait(index) = less {
            let Some(device) = core.device(index) else {
                return true;
            };
            // Looked at again under the device's lock: it moves, and ends to move, under that.
            let state = device.lock();
            less = give(core);
            if matches!(less, Less::Wait(_)) {
                drop(device.wait(state));
            }
        }
        match less {
            Less::Dead => false,
            Less::Gone(gone) => {
                end(core, gone);
                true
            }
            Less::Kept | Less::Wait(_) => true,
        }
    }
}

/// A memory is out of the table: gives back what it is made of.
fn end(core: &Core, gone: Gone) {
    let device = core.device(gone.device);
    core.arena.give_up(gone.kept);
    match gone.place {
        Place::Host(copy) => {
            core.arena.give_back(&copy.pieces);
            if let Some(device) = &device {
                device.lock().pool.program_gone_away(gone.len);
            }
        }
        Place::Card(real) => {
            let remains = Remains {
                handle: Some(real),
                len: gone.len,
                ..Remains::default()
            };
            let remains = remains.clear(&*gone.maker);
            if let Some(device) = &device {
                let mut state = device.lock();
                state.pool.program_gone(gone.len);
                state.pool.keep_remains(remains);
            }
        }
        Place::Moving => debug_assert!(false, "what moves stays in the table"),
    }
    if let Some(device) = device {
        device.lock().pool.pins.forget(Held::Handle(gone.handle));
        // An allocation may wait for just this, and the owner opens the gate when nothing is evicted any more.
        device.wake();
    }
    core.link.poke();
}
