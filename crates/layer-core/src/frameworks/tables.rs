//! The pool's memory: made and mapped as a program does it by itself, so that it leaves the card and comes back with all its mappings,
//! is charged, and waits for room like anything else.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ebb_alloc::front::Driver;
use ebb_alloc::pool::{Call, ChunkId, Mark, Stream};
use ebb_device::{DeviceError, DeviceMemory, Direction, Grant, Location, Props};
use ebb_units::Bytes;

use super::streams::Streams;
use crate::device::Device;
use crate::engine::Engine;
use crate::error::{AllocError, TouchError};
use crate::gate::DeviceSet;
use crate::steps;
use crate::vmm::Mapped;

/// Whose calls these are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caller {
    Anybody,
    /// The owner thread of a device works on it at this moment: nothing of it moves, and the gate is its own.
    Owner,
    /// The owner thread, and the gate is closed: what is unmapped is mapped again as it was, with other memory.
    Mover,
}

thread_local! {
    static CALLER: Cell<Caller> = const { Cell::new(Caller::Anybody) };
}

/// Until it is dropped, calls of this thread pass no gate and wait for nothing.
pub(super) struct AsOwner(());

impl AsOwner {
    pub(super) fn begin() -> Self {
        CALLER.set(Caller::Owner);
        Self(())
    }

    /// Live blocks move, while nothing can touch them.
    pub(super) fn moving() -> Self {
        CALLER.set(Caller::Mover);
        Self(())
    }
}

impl Drop for AsOwner {
    fn drop(&mut self) {
        CALLER.set(Caller::Anybody);
    }
}

#[derive(Debug, Default)]
struct Made {
    /// Handles, as the program would have them.
    chunks: HashMap<ChunkId, u64>,
    /// Mappings: start and length.
    maps: BTreeMap<u64, u64>,
    /// Addresses: start and length.
    ranges: Vec<(u64, u64)>,
    /// What a mover has unmapped: it is mapped again with the same rights and the same number.
    lifted: BTreeMap<u64, Mapped>,
}

/// The driver of one device's pool.
#[derive(Debug)]
pub(super) struct Tables {
    engine: Weak<Engine>,
    device: Arc<Device>,
    /// What memory is made with.
    props: Props,
    pub(super) streams: Streams,
    made: Mutex<Made>,
}

/// Leaves the gate also if something panics on the way.
struct Inside<'a>(Option<&'a Engine>);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if let Some(engine) = self.0 {
            engine.gate().leave();
        }
    }
}

impl Tables {
    pub(super) fn new(engine: Weak<Engine>, device: Arc<Device>, props: Props) -> Self {
        Self {
            engine,
            device,
            props,
            streams: Streams::new(),
            made: Mutex::default(),
        }
    }

    pub(super) fn engine(&self) -> Option<Arc<Engine>> {
        self.engine.upgrade()
    }

    fn made(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter<'a>(&self, engine: &'a Engine) -> Result<Inside<'a>, AllocError> {
        if CALLER.get() != Caller::Anybody {
            return Ok(Inside(None));
        }
        engine
            .gate()
            .enter_for(|| DeviceSet::one(self.device.index))
            .map_err(|error| match error {
                TouchError::OutOfMemory => AllocError::TimedOut(Bytes::ZERO),
                TouchError::Device(error) => AllocError::Device(error),
            })?;
        Ok(Inside(Some(engine)))
    }

    fn grants(&self) -> Vec<Grant> {
        let memory = &self.device.memory;
        std::iter::once(memory.location())
            .chain(memory.peers())
            .map(|location| Grant {
                location,
                flags: Grant::READ_WRITE,
            })
            .collect()
    }

    fn create(&self, engine: &Engine, chunk: ChunkId, len: u64) -> Result<(), AllocError> {
        let handle = engine.vmm_create(self.device.index, len, self.props)?;
        self.made().chunks.insert(chunk, handle);
        Ok(())
    }

    fn map(&self, engine: &Engine, chunk: ChunkId, at: u64, len: u64) -> Result<(), AllocError> {
        let (handle, stands, before) = {
            let made = self.made();
            let handle = made.chunks.get(&chunk).copied().ok_or(AllocError::Bypass)?;
            let before = made.lifted.get(&at).filter(|_| CALLER.get() == Caller::Mover);
            (handle, made.maps.contains_key(&at), before.cloned())
        };
        let inside = self.enter(engine)?;
        if stands {
            // A mapping that was to be undone and could not be.
            self.take_away(engine, at, len)?;
        }
        let used = engine.vmm_begin_use(handle).ok_or(AllocError::Bypass)?;
        let memory = &self.device.memory;
        let mut result = memory.map_as(at, len, ebb_device::Handle(used.real));
        if result.is_ok() {
            self.made().maps.insert(at, len);
            let grants = match &before {
                Some(before) => {
                    engine.vmm_mapped_as(&used, before);
                    let granted = before.grants.iter().filter(|grant| grant.flags != 0);
                    granted.copied().collect()
                }
                None => {
                    engine.vmm_mapped(&used, at, len);
                    self.grants()
                }
            };
            result = memory.grant(at, len, &grants);
            match result {
                Ok(()) => engine.vmm_granted(at, len, &grants),
                // What the driver does not unmap either stays known here, until it is unmapped or the device goes.
                Err(_) => drop(self.take_away(engine, at, len)),
            }
        }
        engine.vmm_end_use(&used, None);
        drop(inside);
        Ok(result?)
    }

    /// Inside the gate.
    fn take_away(&self, engine: &Engine, at: u64, len: u64) -> Result<(), DeviceError> {
        let taken = engine.vmm_take(at, len);
        let result = self.device.memory.unmap_as(at, len);
        match result {
            Ok(()) => {
                let mut made = self.made();
                made.maps.remove(&at);
                if CALLER.get() == Caller::Mover
                    && let Some(mapping) = taken.first()
                {
                    made.lifted.insert(at, mapping.clone());
                }
                drop(made);
                engine.vmm_unmapped(taken);
            }
            Err(_) => engine.vmm_still_mapped(taken),
        }
        result
    }

    fn unmap(&self, engine: &Engine, at: u64, len: u64) -> Result<(), AllocError> {
        if engine.vmm_unmap_away(at, len) {
            self.made().maps.remove(&at);
            return Ok(());
        }
        let _inside = self.enter(engine)?;
        Ok(self.take_away(engine, at, len)?)
    }

    fn release(&self, engine: &Engine, chunk: ChunkId) -> Result<(), AllocError> {
        let Some(handle) = self.made().chunks.remove(&chunk) else {
            return Ok(());
        };
        let _ = engine.vmm_release(handle);
        Ok(())
    }

    /// Other devices may use the pool's memory, or may not any more.
    pub(super) fn peers(&self, engine: &Engine, peer: Location, flags: u32) {
        let maps: Vec<(u64, u64)> = self.made().maps.iter().map(|(at, len)| (*at, *len)).collect();
        let grants = [Grant {
            location: peer,
            flags,
        }];
        let Ok(_inside) = self.enter(engine) else { return };
        for (at, len) in maps {
            match self.device.memory.grant(at, len, &grants) {
                Ok(()) => engine.vmm_granted(at, len, &grants),
                // It was unmapped meanwhile, or the driver refuses: said once a mapping in the report.
                Err(error) => engine.note(&format!("access to {at:#x} of a framework's pool: {error}")),
            }
        }
    }

    /// Takes everything apart: the device goes.
    pub(super) fn tear_down(&self, engine: &Engine) {
        let made = std::mem::take(&mut *self.made());
        let mut failed = 0;
        // What is away goes where it is. After that nothing of it is to be brought back for the rest.
        let there: Vec<(u64, u64)> = made
            .maps
            .into_iter()
            .filter(|(at, len)| !engine.vmm_unmap_away(*at, *len))
            .collect();
        for handle in made.chunks.into_values() {
            let _ = engine.vmm_release(handle);
        }
        for (at, len) in there {
            failed += u32::from(self.unmap(engine, at, len).is_err());
        }
        for (at, len) in made.ranges {
            failed += u32::from(self.device.memory.free_reservation(at, len).is_err());
        }
        if failed > 0 {
            engine.note(&format!(
                "device {}: {failed} calls to take a framework's pool apart failed",
                self.device.index
            ));
        }
    }

    /// The chunks that are on the card, and that nobody has a hold on but this pool, by handle, pin or a mapping of his own. It stays
    /// like that while the gate is closed.
    pub(super) fn movable(&self, engine: &Engine) -> HashSet<ChunkId> {
        let (chunks, maps): (Vec<(ChunkId, u64)>, HashSet<u64>) = {
            let made = self.made();
            let chunks = made.chunks.iter().map(|(id, handle)| (*id, *handle));
            (chunks.collect(), made.maps.keys().copied().collect())
        };
        let alone = engine.vmm_alone(&self.device, &maps);
        let chunks = chunks.into_iter().filter(|(_, handle)| alone.contains(handle));
        chunks.map(|(id, _)| id).collect()
    }

    /// Nothing is torn, and nothing will be mapped again as it was.
    pub(super) fn settled(&self) {
        self.made().lifted.clear();
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether an address lies in the pool's.
    pub(super) fn contains(&self, at: u64) -> bool {
        self.made()
            .ranges
            .iter()
            .any(|(start, len)| at >= *start && at - start < *len)
    }
}

impl Driver for Tables {
    type Error = AllocError;

    fn call(&self, call: &Call) -> Result<(), AllocError> {
        let engine = self.engine.upgrade().ok_or(AllocError::Bypass)?;
        match *call {
            Call::Wait { stream, mark } => {
                let now = CALLER.get() != Caller::Anybody;
                if self.streams.wait(&engine.core, &self.device, stream, mark, now) {
                    Ok(())
                } else {
                    Err(AllocError::TimedOut(Bytes::ZERO))
                }
            }
            Call::Create { chunk, len } => self.create(&engine, chunk, len),
            Call::Map { chunk, at, len } => self.map(&engine, chunk, at, len),
            Call::Unmap { at, len, .. } => self.unmap(&engine, at, len),
            Call::Release { chunk, .. } => self.release(&engine, chunk),
            Call::Copy { .. } => self.copy(std::slice::from_ref(call)),
        }
    }

    /// Made by the owner alone, on the stream of copies to the device, which has nothing else to do while the gate is closed for this.
    fn copy(&self, copies: &[Call]) -> Result<(), AllocError> {
        let memory = &*self.device.memory;
        let enqueued = copies.iter().try_for_each(|copy| match *copy {
            Call::Copy {
                source, target, len, ..
            } => memory.copy_between(Direction::In, target, source, len),
            _ => Ok(()),
        });
        let copied = enqueued
            .and_then(|()| memory.mark(Direction::In))
            .and_then(|marker| memory.wait(marker));
        if copied.is_err() && !steps::settle(memory, Direction::In) {
            // Copies may be under way into bytes that others would get: nothing is to be done here any more.
            self.device.lock().dead = true;
        }
        Ok(copied?)
    }

    fn mark(&self, stream: Stream) -> Mark {
        self.streams.mark(stream)
    }

    fn done(&self, stream: Stream) -> Mark {
        self.engine
            .upgrade()
            .map_or(Mark(0), |engine| self.streams.done(&engine.core, stream))
    }

    /// Twice the card the first time: homes, and as much for views.
    fn reserve(&self, bytes: u64) -> Result<(u64, u64), AllocError> {
        let memory: &dyn DeviceMemory = &*self.device.memory;
        let granule = memory.granularity();
        let least = bytes.next_multiple_of(granule);
        let wish = self.device.total.get().saturating_mul(2) / granule * granule;
        let mut size = wish.max(least);
        loop {
            match memory.reserve(size, granule) {
                Ok(at) => {
                    self.made().ranges.push((at, size));
                    return Ok((at, size));
                }
                Err(error) if size <= least => return Err(error.into()),
                Err(_) => size = (size / 2 / granule * granule).max(least),
            }
        }
    }
}
