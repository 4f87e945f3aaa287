//! The engine: everything that the hooks of the layer need.
//!
//! # Who may call what where
//! No method may be called with a lock held that another of the program's threads needs to make progress. [`Engine::alloc`]
//! and [`Engine::external_reserve`] may wait for the daemon: call them outside the gate. The others take microseconds,
//! or milliseconds if a chunk of the memory in question is being copied at that moment.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_device::DeviceMemory;
use ebb_protocol::ToDaemon;
use ebb_units::{Bytes, DeviceUuid};

use crate::allocate;
use crate::config::Config;
use crate::core::{Core, MAX_DEVICES};
use crate::device::{Device, Mode, Phase};
use crate::error::{AllocError, FreeError};
use crate::gate::{DeviceSet, Gate, GateOwner};
use crate::pool::{Freed, Pool};
use crate::report;
use crate::residency;
use crate::{sleep, streamed, threads};

/// How long detaching and exiting wait for a step of the owner thread.
const STEP: Duration = Duration::from_secs(2);

/// How long exiting waits for calls of the driver that threads of ours made. With a hundred programs starting at once each may take seconds; one that
/// `exit` itself holds up, in a signal handler, never ends.
const DRIVER: Duration = Duration::from_secs(10);

/// How long exiting tries to get a lock. They are held for microseconds, if not by the very thread that exits.
const LOCKS: Duration = Duration::from_millis(500);

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
    /// Never reused on a device.
    pub id: u64,
    /// The stream-ordered pool that it comes from, by the driver's handle; 0 if from none.
    pub pool: u64,
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
    /// As [`MemInfo::Own`], but no more is free than the driver says and the pool has cached.
    Strict {
        /// The limit, or the card.
        total: Bytes,
        /// What the task may still get.
        free: Bytes,
        /// To be added to the driver's free.
        cached: Bytes,
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
    /// Stream-ordered pools.
    AsyncPool,
    /// Managed memory.
    Managed,
    /// Arrays and mipmapped arrays.
    Array,
    /// Opened legacy IPC handles: another process is charged for it.
    Ipc,
    /// Memory imported by a handle, a pool or from another interface: whoever made it is charged for it.
    Imported,
    /// Memory nodes of graphs.
    Graph,
    /// Modules and libraries.
    Module,
    /// Contexts.
    Context,
    /// Pinned host memory of the program: not on the card.
    PinnedHost,
    /// Anything else on the card.
    Other,
}

/// How a kind is counted.
enum Counted {
    /// Needs lease, and is charged.
    Lease,
    /// Charged; the driver sees to its place.
    Charged,
    /// As the driver's own overhead.
    Overhead,
    /// Named only.
    Named,
}

impl ExternalKind {
    /// Its name in the report.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AsyncPool => "stream-ordered pool",
            Self::Managed => "managed memory",
            Self::Array => "array",
            Self::Ipc => "opened from another process",
            Self::Imported => "imported from another process or interface",
            Self::Graph => "memory node of a graph",
            Self::Module => "module",
            Self::Context => "context",
            Self::PinnedHost => "pinned host memory",
            Self::Other => "other",
        }
    }

    const fn counted(self) -> Counted {
        match self {
            Self::AsyncPool | Self::Array | Self::Graph | Self::Other => Counted::Lease,
            Self::Managed => Counted::Charged,
            Self::Module | Self::Context => Counted::Overhead,
            Self::Ipc | Self::Imported | Self::PinnedHost => Counted::Named,
        }
    }
}

/// The engine of a process.
#[derive(Debug)]
pub struct Engine {
    pub(crate) core: Arc<Core>,
}

impl Drop for Engine {
    /// Programs never drop it. Tests do, and are left with no thread.
    fn drop(&mut self) {
        self.core.close();
        for device in self.core.devices() {
            device.lock().stop = true;
            device.wake();
        }
    }
}

/// Passes on what happens at the gate.
struct Doorman(Arc<Core>);

impl GateOwner for Doorman {
    fn wanted(&self) {
        sleep::wanted(&self.0);
        self.0.wake_devices();
    }
    fn active(&self) {
        self.0.link.poke();
    }
}

impl Engine {
    /// Starts it: arms the gate and tries to find a daemon, on a thread of its own.
    #[must_use]
    pub fn start(config: Config, gate: &'static Gate) -> Arc<Self> {
        let core = Arc::new(Core::new(config, gate));
        gate.arm(Arc::new(Doorman(Arc::clone(&core))));
        core.link.start(&core);
        Arc::new(Self { core })
    }

    /// The gate that it was started with.
    #[must_use]
    pub fn gate(&self) -> &'static Gate {
        self.core.gate
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
        memory: Arc<dyn DeviceMemory>,
        total: Bytes,
        overhead: Bytes,
    ) -> Result<usize, AllocError> {
        let core = &self.core;
        if core.is_passthrough() {
            return Err(AllocError::Bypass);
        }
        if let Some(known) = core.devices().into_iter().find(|device| device.uuid == uuid) {
            return Ok(known.index);
        }
        let cache_max = core.config.cache_max.get();
        let granule = memory.granularity();
        let index = core.change_devices(|devices| {
            let mut known = core.uuids();
            let index = known.iter().position(|other| *other == uuid).unwrap_or_else(|| {
                known.push(uuid);
                known.len() - 1
            });
            if devices.len() <= index {
                devices.resize(index + 1, None);
            }
            index
        });
        if index >= MAX_DEVICES {
            return Err(AllocError::Bypass);
        }
        let device = Arc::new(Device::new(
            index,
            uuid,
            total,
            memory,
            Pool::new(granule, cache_max, core.config.chunk_max.get()),
        ));
        {
            let mut state = device.lock();
            state.pool.books.overhead = overhead.get();
            // Memory that the program made by handles outlives the contexts that it is used in.
            let (card, away) = core.vmm.held_on(index);
            state.pool.program_was_there(card, away);
        }
        // Twice the card: live, evicted and cached spans never need more than that, unless they are cut badly.
        allocate::more_addresses(&device, total.get().saturating_mul(2).next_multiple_of(granule))?;
        // Known before the daemon can be told of the device.
        core.arena.rooms.attach(&device);
        let raced = core.change_devices(|devices| match &devices[index] {
            Some(_) => true,
            None => {
                devices[index] = Some(Arc::clone(&device));
                false
            }
        });
        if raced {
            self.free_ranges(&device);
            return Ok(index);
        }
        let owner = {
            let (core, device) = (Arc::clone(core), Arc::clone(&device));
            threads::spawn("ebb-owner", move || residency::own(&core, &device))
        };
        if let Err(error) = owner {
            core.events
                .note(format!("device {index}: no owner thread: {error}"));
            core.change_devices(|devices| devices[index] = None);
            self.free_ranges(&device);
            return Err(AllocError::Bypass);
        }
        // The first answer of the daemon brings the limit: without it the first queries would tell a wrong world.
        core.link.wait_started(core.config.connect_wait);
        core.link.attach(core, &device);
        let deadline = Instant::now() + core.config.connect_wait;
        let mut state = device.lock();
        while state.mode == Mode::Attaching {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = device.wait_for(state, left);
        }
        drop(state);
        core.link.poke();
        Ok(index)
    }

    fn free_ranges(&self, device: &Device) {
        let ranges = device.lock().pool.ranges();
        for (base, len) in ranges {
            if let Err(error) = device.memory.free_reservation(base, len) {
                self.core.events.note(format!(
                    "device {}: addresses stay reserved: {error}",
                    device.index
                ));
            }
        }
    }

    /// The last context of a device goes: call it *before* the driver destroys it. Frees everything on it.
    pub fn detach_device(&self, device: usize) {
        if self.core.is_child() {
            return;
        }
        let core = &self.core;
        let Some(device) = core.device(device) else {
            return;
        };
        self.framework_detach(device.index);
        // What the program made by handles does not go with its contexts: it comes back while it can be copied.
        self.vmm_bring_back(device.index);
        {
            let mut state = device.lock();
            state.stop = true;
            drop(state);
            device.wake();
            let deadline = Instant::now() + STEP;
            let mut state = device.lock();
            while !state.owner_ended {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    core.events.note(format!(
                        "device {}: the owner thread did not end in time",
                        device.index
                    ));
                    break;
                }
                state = device.wait_for(state, left);
            }
        }
        core.streamed.drop_device(device.index);
        core.arena.device_leaves(core, device.index);
        let live: Vec<u64> = device.lock().pool.live().map(|live| live.base).collect();
        for base in live {
            let _ = free_on(core, &device, base);
        }
        let cached = device.lock().pool.drop_cached(u64::MAX);
        device.take_apart(core, &cached);
        device.retry_stuck();
        core.arena.rooms.detach(core, device.index);
        self.free_ranges(&device);
        core.change_devices(|devices| {
            if let Some(slot) = devices.get_mut(device.index) {
                *slot = None;
            }
        });
        let mut state = device.lock();
        if let Some(slot) = state.slot.take() {
            core.link.send(ToDaemon::Detach { device: slot });
        }
        state.mode = Mode::Alone;
        state.epoch = 0;
        drop(state);
        device.wake();
        core.link.poke();
    }

    /// What contexts, modules and the like take on a device, as far as the layer saw it. Charged against the limit.
    pub fn set_overhead(&self, device: usize, bytes: Bytes) {
        if self.core.is_child() {
            return;
        }
        if let Some(device) = self.core.device(device) {
            device.lock().pool.books.overhead = bytes.get();
            self.core.link.poke();
        }
    }

    /// Allocates. Waits for room as the design says; call it with no lock held and outside the gate.
    ///
    /// # Errors
    /// [`AllocError`] names whose fault it is and the driver's code for it.
    pub fn alloc(&self, device: usize, size: u64, owner: u64) -> Result<u64, AllocError> {
        if self.core.is_passthrough() {
            return Err(AllocError::Bypass);
        }
        let device = self.core.device(device).ok_or(AllocError::Bypass)?;
        allocate::own(&self.core, &device, size, owner)
    }

    /// Frees. The caller has waited for the work that may use it: freeing is a fence in the driver, and here it isn't.
    ///
    /// # Errors
    /// [`FreeError`]; nothing was freed.
    pub fn free(&self, ptr: u64) -> Result<(), FreeError> {
        if self.core.is_child() {
            return Err(FreeError::Bypass);
        }
        if self.core.streamed.contains(ptr) {
            // A slab is nobody's to free; what lies in it is freed by `pool_free`.
            return Err(FreeError::Invalid);
        }
        let device = self.core.device_of(ptr).ok_or(FreeError::Bypass)?;
        free_on(&self.core, &device, ptr)
    }

    /// Frees what [`Self::lookup`] has found, and which is of no pool. The caller has waited as for [`Self::free`].
    ///
    /// # Errors
    /// As [`Self::free`], also if somebody else has freed it meanwhile.
    pub fn free_of(&self, allocation: &Allocation) -> Result<(), FreeError> {
        if self.core.is_child() {
            return Err(FreeError::Bypass);
        }
        let device = self.core.device(allocation.device).ok_or(FreeError::Bypass)?;
        free_on(&self.core, &device, allocation.base)
    }

    /// Frees all allocations of an owner (a context that is destroyed). Returns how many there were.
    pub fn free_owner(&self, device: usize, owner: u64) -> usize {
        if self.core.is_child() {
            return 0;
        }
        let Some(device) = self.core.device(device) else {
            return 0;
        };
        let all: Vec<u64> = device
            .lock()
            .pool
            .live()
            .filter(|live| live.tag.owner == owner)
            .map(|live| live.base)
            .collect();
        all.into_iter()
            .filter(|base| free_on(&self.core, &device, *base).is_ok())
            .count()
    }

    /// The live allocation that contains an address.
    #[must_use]
    pub fn lookup(&self, ptr: u64) -> Option<Allocation> {
        if self.core.is_child() {
            return None;
        }
        if let Some(streamed) = self.core.streamed.lookup(ptr) {
            return Some(streamed);
        }
        let (device, live) = self.core.find_device(|device| {
            let live = device.lock().pool.lookup(ptr)?;
            Some((device.index, live))
        })?;
        (live.tag.owner != streamed::OWNER).then_some(Allocation {
            base: live.base,
            size: live.size,
            device,
            owner: live.tag.owner,
            id: live.tag.id,
            pool: 0,
        })
    }

    /// All live allocations, by device and id.
    #[must_use]
    pub fn live_ids(&self) -> std::collections::HashSet<(usize, u64)> {
        if self.core.is_child() {
            return std::collections::HashSet::new();
        }
        let devices = self.core.devices();
        devices
            .iter()
            .flat_map(|device| {
                let ids: Vec<u64> = device.lock().pool.live().map(|live| live.tag.id).collect();
                ids.into_iter().map(|id| (device.index, id))
            })
            .collect()
    }

    /// Whether an address lies in a range of ours, allocated or not.
    #[must_use]
    pub fn contains(&self, ptr: u64) -> bool {
        !self.core.is_child() && self.core.device_of(ptr).is_some()
    }

    /// Whether `[ptr, ptr + size)` has an address in a range of ours, allocated or not.
    #[must_use]
    pub fn overlaps(&self, ptr: u64, size: u64) -> bool {
        !self.core.is_child() && self.core.overlaps(ptr, size)
    }

    /// What the program is told about a device's memory.
    #[must_use]
    pub fn mem_info(&self, device: usize) -> MemInfo {
        if self.core.is_child() {
            return MemInfo::Driver { cached: Bytes::ZERO };
        }
        let Some(device) = self.core.device(device) else {
            return MemInfo::Driver { cached: Bytes::ZERO };
        };
        let state = device.lock();
        let books = &state.pool.books;
        if books.alone && books.limit == u64::MAX {
            return MemInfo::Driver {
                cached: Bytes(books.cached),
            };
        }
        let total = books.limit.min(device.total.get());
        if self.core.config.strict {
            return MemInfo::Strict {
                total: Bytes(total),
                free: Bytes(total.saturating_sub(books.charged())),
                cached: Bytes(books.cached),
            };
        }
        MemInfo::Own {
            total: Bytes(total),
            free: Bytes(total.saturating_sub(books.charged())),
        }
    }

    /// What this process alone is charged with on a device.
    #[must_use]
    pub fn own_charge(&self, device: usize) -> Option<Bytes> {
        if self.core.is_child() {
            return None;
        }
        let device = self.core.device(device)?;
        let books = device.lock().pool.books;
        Some(Bytes(books.charged().saturating_sub(books.elsewhere)))
    }

    /// The task's limit on a device.
    #[must_use]
    pub fn limit(&self, device: usize) -> Option<Bytes> {
        if self.core.is_child() {
            return None;
        }
        let device = self.core.device(device)?;
        let limit = device.lock().pool.books.limit;
        (limit != u64::MAX).then_some(Bytes(limit))
    }

    /// A capture begins on some thread: no eviction from here on. Passes the gate, so that none is under way.
    pub fn capture_begin(&self) {
        if self.core.is_child() {
            return;
        }
        // A restore that fails for good does not stop a capture: recording touches no memory.
        let inside = self.core.gate.enter().is_ok();
        self.core.capture_begins();
        if inside {
            self.core.gate.leave();
        }
    }

    /// A capture ended, or failed to begin.
    pub fn capture_end(&self) {
        if !self.core.is_child() {
            self.core.capture_ends();
        }
    }

    /// The devices whose movable memory may lie in a range that begins at the address of an allocation or a mapping.
    #[must_use]
    pub fn devices_in(&self, at: u64, len: u64) -> DeviceSet {
        if self.core.is_child() {
            return DeviceSet::NONE;
        }
        if let Some(device) = self.core.device_of(at) {
            return DeviceSet::one(device.index);
        }
        if self.core.vmm.is_unmapped() {
            return DeviceSet::NONE;
        }
        self.core.vmm.with(|table| {
            table
                .within(at, len.max(1))
                .filter_map(|mapping| table.device_of_memory(mapping.handle))
                .fold(DeviceSet::NONE, |all, device| all.with(DeviceSet::one(device)))
        })
    }

    /// Devices whose memory kernels of these devices may use.
    #[must_use]
    pub fn reach_of(&self, users: DeviceSet) -> DeviceSet {
        self.core.reach.of(users)
    }

    /// Kernels of a device may use memory of others from here on. Call it inside the gate, for all devices, before the first such kernel.
    pub fn gain_access(&self, user: usize, owners: DeviceSet) {
        self.core.reach.gain(user, owners);
    }

    /// Work in streams of `users` uses memory of `owners`. Call it inside the gate, before the work is submitted.
    pub fn copies(&self, users: DeviceSet, owners: DeviceSet) {
        for user in users.iter().take(MAX_DEVICES) {
            self.core.reach.copies(user, owners);
        }
    }

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
        if self.core.is_passthrough() {
            return Ok(());
        }
        let Some(device) = self.core.device(device) else {
            return Ok(());
        };
        match kind.counted() {
            Counted::Lease => allocate::external(&self.core, &device, bytes.get())?,
            Counted::Charged => {
                let mut state = device.lock();
                let books = &mut state.pool.books;
                let charged = books.charged();
                if charged.saturating_add(bytes.get()) > books.limit {
                    return Err(AllocError::OverLimit {
                        asked: bytes,
                        charged: Bytes(charged),
                        limit: Bytes(books.limit),
                    });
                }
                books.managed += bytes.get();
            }
            Counted::Overhead => device.lock().pool.books.overhead += bytes.get(),
            Counted::Named => {}
        }
        *device.lock().external.entry(kind).or_default() += bytes.get();
        self.core.link.poke();
        Ok(())
    }

    /// Memory of that kind is gone. More than there is counts as all of it.
    pub fn external_release(&self, device: usize, kind: ExternalKind, bytes: Bytes) {
        if self.core.is_child() {
            return;
        }
        let Some(device) = self.core.device(device) else {
            return;
        };
        let mut state = device.lock();
        let known = state.external.entry(kind).or_default();
        let bytes = bytes.get().min(*known);
        *known -= bytes;
        let pool = &mut state.pool;
        match kind.counted() {
            Counted::Lease => pool.external_gone(bytes),
            Counted::Charged => pool.books.managed = pool.books.managed.saturating_sub(bytes),
            Counted::Overhead => pool.books.overhead = pool.books.overhead.saturating_sub(bytes),
            Counted::Named => {}
        }
        if kind == ExternalKind::Graph {
            state.beside.graph_gone(bytes);
        }
        drop(state);
        device.wake();
        self.core.link.poke();
    }

    /// An address in one of the driver's own pools was given to another process, who may keep its memory alive.
    pub fn pools_are_shared(&self, device: usize) {
        if !self.core.is_child()
            && let Some(device) = self.core.device(device)
        {
            device.lock().pools_shared = true;
            self.core.link.poke();
        }
    }

    /// Managed memory is there, counted before by [`Self::external_reserve`]: a release pushes it to the host.
    pub fn managed_made(&self, device: usize, base: u64, bytes: u64) {
        if !self.core.is_child()
            && let Some(device) = self.core.device(device)
        {
            device.lock().beside.made(base, bytes);
        }
    }

    /// That managed memory is gone.
    pub fn managed_gone(&self, device: usize, base: u64) {
        if !self.core.is_child()
            && let Some(device) = self.core.device(device)
        {
            device.lock().beside.gone(base);
        }
    }

    /// Remembers an event for `ebb doctor`.
    pub fn note(&self, text: &str) {
        if !self.core.is_child() {
            self.core.events.note(text);
        }
    }

    /// Whether room that a daemon may make is worth waiting for.
    #[must_use]
    pub fn may_wait(&self) -> bool {
        !self.core.config.strict && self.may_be_served()
    }

    /// Whether the daemon that serves this process sees what processes have on cards.
    #[must_use]
    pub fn daemon_sees_processes(&self) -> bool {
        !self.core.is_child() && self.core.link.can(ebb_protocol::wire::feature::HELD)
    }

    /// Whether a daemon serves this process, or may do so in a moment.
    #[must_use]
    pub fn may_be_served(&self) -> bool {
        use crate::link::Status;
        !self.core.is_child()
            && matches!(
                self.core.link.status(),
                Status::Starting | Status::Connected { .. }
            )
    }

    /// Everything that `ebb doctor` shows, as a JSON object.
    #[must_use]
    pub fn report_json(&self) -> String {
        if self.core.is_child() {
            return String::from("{}");
        }
        report::json(&self.core, usize::MAX)
    }

    /// Something of ours is broken: nothing new is managed from here on. What is ours already is freed, found and
    /// brought back as before.
    pub fn give_up(&self, why: &str) {
        self.core
            .events
            .note(format!("passing everything through: {why}"));
        self.core.pass_through();
    }

    /// In the parent, before `fork`. Nothing needs to be held: the child takes no lock of ours and frees nothing of ours,
    /// and segments are mapped so that it does not inherit them.
    pub fn before_fork(&self) {}

    /// In the parent, after `fork`.
    pub fn parent_after_fork(&self) {}

    /// In the child, after `fork`: takes no lock, closes what it inherited; everything answers `Bypass` from here on.
    pub fn child_after_fork(&self) {
        self.core.become_child();
        self.core.gate.reset_in_child();
        self.core.sleep.forget_in_child();
        for slot in self.core.link.child_fds().chain(self.core.arena.child_fds()) {
            slot.close_in_child();
        }
    }

    /// `exit` has begun: no new eviction starts, and this waits (bounded) for the one that is under way.
    ///
    /// It waits for no lock without a bound: programs call `exit` in signal handlers, which run on a thread that may hold any of them.
    pub fn shutdown(&self) {
        if self.core.is_child() {
            return;
        }
        self.core.exit();
        self.core.await_driver(Instant::now() + DRIVER);
        let (locks, deadline) = (Instant::now() + LOCKS, Instant::now() + STEP);
        for device in self.core.devices_before(locks).unwrap_or_default() {
            let Some(mut state) = device.lock_before(locks) else {
                continue;
            };
            state.version += 1;
            device.notify();
            while matches!(state.phase, Phase::Closing | Phase::CopyingOut | Phase::Meshing) {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                state = device.wait_for(state, left.min(Duration::from_millis(50)));
            }
        }
    }

    /// Whether every call should go to the driver unseen (a child, an error of our own).
    #[must_use]
    pub fn is_passthrough(&self) -> bool {
        self.core.is_passthrough()
    }
}

/// Frees on a device.
pub(crate) fn free_on(core: &Core, device: &Device, ptr: u64) -> Result<(), FreeError> {
    let mut state = device.lock();
    let mut freed = state.pool.free(ptr)?;
    while let Freed::Wait(span) = freed {
        // The owner thread copies chunks of it at this moment; it starts no other one, and wakes us.
        state = device.wait(state);
        freed = state.pool.free_span(span);
    }
    let awaited = state.closed || !state.asks.is_empty();
    let outdated = state.pool.take_outdated();
    drop(state);
    core.arena.give_up(outdated);
    if let Freed::Apart(apart, pieces) = freed {
        core.arena.give_back(&pieces);
        device.take_apart(core, &apart);
    }
    if awaited {
        // An allocation may wait for just this, and the owner opens the gate when nothing is evicted any more.
        device.wake();
    }
    core.link.poke();
    Ok(())
}
