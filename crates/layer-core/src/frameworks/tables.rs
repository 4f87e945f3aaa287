//! The pool's memory: made and mapped as a program does it by itself, so that it leaves the card and comes back with all its mappings,
//! is charged, and waits for room like anything else.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ebb_alloc::front::Driver;
use ebb_alloc::pool::{Call, ChunkId, Mark, Stream};
use ebb_device::{DeviceError, DeviceMemory, Grant, Location, Props};
use ebb_units::Bytes;

use super::streams::Streams;
use crate::device::Device;
use crate::engine::Engine;
use crate::error::{AllocError, TouchError};
use crate::gate::DeviceSet;

thread_local! {
    /// The owner thread of a device works on it at this moment: nothing of it moves, and the gate is its own.
    static OWNER: Cell<bool> = const { Cell::new(false) };
}

/// Until it is dropped, calls of this thread pass no gate and wait for nothing.
pub(super) struct AsOwner(());

impl AsOwner {
    pub(super) fn begin() -> Self {
        OWNER.set(true);
        Self(())
    }
}

impl Drop for AsOwner {
    fn drop(&mut self) {
        OWNER.set(false);
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

    fn made(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter<'a>(&self, engine: &'a Engine) -> Result<Inside<'a>, AllocError> {
        if OWNER.get() {
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
        let handle = self
            .made()
            .chunks
            .get(&chunk)
            .copied()
            .ok_or(AllocError::Bypass)?;
        let inside = self.enter(engine)?;
        let used = engine.vmm_begin_use(handle).ok_or(AllocError::Bypass)?;
        let memory = &self.device.memory;
        let mut result = memory.map_as(at, len, ebb_device::Handle(used.real));
        if result.is_ok() {
            engine.vmm_mapped(&used, at, len);
            self.made().maps.insert(at, len);
            let grants = self.grants();
            result = memory.grant(at, len, &grants);
            match result {
                Ok(()) => engine.vmm_granted(at, len, &grants),
                // What the driver does not unmap either stays known here, until the device goes.
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
                self.made().maps.remove(&at);
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
                let now = OWNER.get();
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
            // Of exclusive plans alone, which nobody asks this pool for.
            Call::Copy { .. } => Err(AllocError::Bypass),
        }
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
