//! The engine: everything that the hooks of the layer need.

use std::sync::Arc;

use ebb_device::DeviceMemory;
use ebb_units::{Bytes, DeviceUuid};

use crate::config::Config;
use crate::error::{AllocError, FreeError};
use crate::gate::Gate;

/// A live allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Its first address.
    pub base: u64,
    /// The size that the program asked for.
    pub size: u64,
    /// Which device, as [`Engine::attach_device`] numbered it.
    pub device: usize,
    /// What the layer passed to [`Engine::alloc`]: the context.
    pub owner: u64,
    /// Never reused in a process.
    pub id: u64,
}

/// What a program is told about a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemInfo {
    /// The task's own world.
    Own {
        /// The limit, or the card.
        total: Bytes,
        /// What the task could still get.
        free: Bytes,
    },
    /// No daemon and no limit: the driver's answer, with this many free bytes more (cached by the pool).
    Driver {
        /// To be added to the driver's free.
        cached: Bytes,
    },
}

/// Memory that passes the pool by: counted and named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExternalKind {
    /// `cuMemCreate` of the program.
    Vmm,
    /// Stream-ordered pools.
    AsyncPool,
    /// Managed memory.
    Managed,
    /// Arrays and mipmapped arrays.
    Array,
    /// Opened IPC handles and imported memory.
    Ipc,
    /// Memory nodes of graphs.
    Graph,
    /// Modules and libraries.
    Module,
    /// Contexts.
    Context,
    /// Pinned host memory of the program: not on the card.
    PinnedHost,
    /// Anything else.
    Other,
}

/// The engine of a process.
#[derive(Debug)]
pub struct Engine {
    gate: &'static Gate,
}

impl Engine {
    /// Starts it: arms the gate and tries to find a daemon, on a thread of its own.
    #[must_use]
    pub fn start(config: Config, gate: &'static Gate) -> Arc<Self> {
        let _ = config;
        Arc::new(Self { gate })
    }

    /// The gate that it was started with.
    #[must_use]
    pub fn gate(&self) -> &'static Gate {
        self.gate
    }

    /// A first context on a device: from here on its memory is managed. Returns the number by which this engine knows
    /// it; the same device has the same number for ever. Attaching an attached device changes nothing.
    ///
    /// `total`: what the driver says the card has. `overhead`: what the context takes.
    ///
    /// # Errors
    /// [`AllocError`] if no addresses could be reserved: let the driver serve this device.
    pub fn attach_device(
        &self,
        uuid: DeviceUuid,
        device: Arc<dyn DeviceMemory>,
        total: Bytes,
        overhead: Bytes,
    ) -> Result<usize, AllocError> {
        let _ = (uuid, device, total, overhead);
        Err(AllocError::Bypass)
    }

    /// The last context of a device goes: call it *before* the driver destroys it. Frees everything on it.
    pub fn detach_device(&self, device: usize) {
        let _ = device;
    }

    /// What contexts, modules and the like take on a device, as far as the layer saw it. Charged against the limit.
    pub fn set_overhead(&self, device: usize, bytes: Bytes) {
        let _ = (device, bytes);
    }

    /// Allocates. Waits for room as the design says; call it with no lock held and outside the gate.
    ///
    /// # Errors
    /// [`AllocError`] names whose fault it is and the driver's code for it.
    pub fn alloc(&self, device: usize, size: u64, owner: u64) -> Result<u64, AllocError> {
        let _ = (device, size, owner);
        Err(AllocError::Bypass)
    }

    /// Frees. The caller has waited for the work that may use it: freeing is a fence in the driver, and here it isn't.
    ///
    /// # Errors
    /// [`FreeError`]; nothing was freed.
    pub fn free(&self, ptr: u64) -> Result<(), FreeError> {
        let _ = ptr;
        Err(FreeError::Bypass)
    }

    /// Frees all allocations of an owner (a context that is destroyed). Returns how many there were.
    pub fn free_owner(&self, device: usize, owner: u64) -> usize {
        let _ = (device, owner);
        0
    }

    /// The live allocation that contains an address.
    #[must_use]
    pub fn lookup(&self, ptr: u64) -> Option<Allocation> {
        let _ = ptr;
        None
    }

    /// Whether an address lies in a range of ours, allocated or not.
    #[must_use]
    pub fn contains(&self, ptr: u64) -> bool {
        let _ = ptr;
        false
    }

    /// What the program is told about a device's memory.
    #[must_use]
    pub fn mem_info(&self, device: usize) -> MemInfo {
        let _ = device;
        MemInfo::Driver { cached: Bytes::ZERO }
    }

    /// The task's limit on a device.
    #[must_use]
    pub fn limit(&self, device: usize) -> Option<Bytes> {
        let _ = device;
        None
    }

    /// A capture begins on some thread: no eviction from here on. Passes the gate, so that none is under way.
    pub fn capture_begin(&self) {}

    /// A capture ended, or failed to begin.
    pub fn capture_end(&self) {}

    /// Before the program takes memory on a device past the pool: checks the limit and, for memory on the card, gets
    /// lease for it as [`Self::alloc`] does. Undo with [`Self::external_release`] if the driver's call fails.
    ///
    /// # Errors
    /// As [`Self::alloc`]; nothing is counted.
    pub fn external_reserve(
        &self,
        device: usize,
        kind: ExternalKind,
        bytes: Bytes,
    ) -> Result<(), AllocError> {
        let _ = (device, kind, bytes);
        Ok(())
    }

    /// Memory of that kind is gone.
    pub fn external_release(&self, device: usize, kind: ExternalKind, bytes: Bytes) {
        let _ = (device, kind, bytes);
    }

    /// Remembers an event for `ebb doctor`.
    pub fn note(&self, text: &str) {
        let _ = text;
    }

    /// Everything that `ebb doctor` shows, as a JSON object.
    #[must_use]
    pub fn report_json(&self) -> String {
        String::from("{}")
    }

    /// In the parent, before `fork`.
    pub fn before_fork(&self) {}

    /// In the parent, after `fork`.
    pub fn parent_after_fork(&self) {}

    /// In the child, after `fork`: takes no lock, closes what it inherited; everything answers `Bypass` from here on.
    pub fn child_after_fork(&self) {}

    /// `exit` has begun: no new eviction starts, and this waits (bounded) for the step that is under way.
    pub fn shutdown(&self) {}

    /// Whether every call should go to the driver unseen (a child, a refused process, an error of our own).
    #[must_use]
    pub fn is_passthrough(&self) -> bool {
        false
    }
}
