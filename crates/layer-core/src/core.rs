//! What all parts of the engine share.
//!
//! # Lock order
//! `devices` (held for a look only) → a device's `state` → the table of the program's own memory (`vmm`) → the arena's `state` → the link's `outbox` → events, gate.
//! `streamed` is taken under none of them, and none is taken under it; `frameworks` and its pools' locks may be taken under a device's `state`, and nothing but
//! `vmm`, `events` is taken under them.
//! No driver call is made under any of them, and no lock is held while waiting for a message.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};
use std::time::{Duration, Instant};

use ebb_units::DeviceUuid;

use crate::arena::Arena;
use crate::config::Config;
use crate::device::Device;
use crate::events::Events;
use crate::frameworks::Frameworks;
use crate::gate::Gate;
use crate::link::Link;
use crate::reach::Reach;
use crate::share::Share;
use crate::sleep::Sleep;
use crate::streamed::Streamed;
use crate::vmm::Vmm;

/// More cards than one machine has.
pub(crate) const MAX_DEVICES: usize = 64;

/// How long things may take; the daemon's word replaces the configured one.
#[derive(Debug)]
pub(crate) struct Waits {
    alloc: AtomicU64,
    alloc_max: AtomicU64,
    busy: AtomicU64,
}

impl Waits {
    fn new(config: &Config) -> Self {
        let waits = Self {
            alloc: AtomicU64::new(0),
            alloc_max: AtomicU64::new(0),
            busy: AtomicU64::new(0),
        };
        waits.set(config.alloc_wait, config.alloc_wait_max, config.busy_wait);
        waits
    }

    pub(crate) fn set(&self, alloc: Duration, alloc_max: Duration, busy: Duration) {
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        self.alloc.store(ms(alloc), Ordering::Relaxed);
        self.alloc_max.store(ms(alloc_max), Ordering::Relaxed);
        self.busy.store(ms(busy), Ordering::Relaxed);
    }

    pub(crate) fn alloc(&self) -> Duration {
        Duration::from_millis(self.alloc.load(Ordering::Relaxed))
    }

    pub(crate) fn alloc_max(&self) -> Duration {
        Duration::from_millis(self.alloc_max.load(Ordering::Relaxed))
    }

    pub(crate) fn busy(&self) -> Duration {
        Duration::from_millis(self.busy.load(Ordering::Relaxed))
    }
}

/// Tries until the deadline: for who may not wait for a lock.
pub(crate) fn before<T>(deadline: Instant, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    loop {
        let done = attempt();
        if done.is_some() || Instant::now() >= deadline {
            return done;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What all parts share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) gate: &'static Gate,
    pub(crate) config: Config,
    pub(crate) waits: Waits,
    devices: RwLock<Vec<Option<Arc<Device>>>>,
    /// Every device that was ever attached, in the order of its number.
    uuids: Mutex<Vec<DeviceUuid>>,
    pub(crate) arena: Arena,
    /// Which devices use the memory of which.
    pub(crate) reach: Reach,
    pub(crate) vmm: Vmm,
    pub(crate) link: Link,
    pub(crate) streamed: Streamed,
    pub(crate) frameworks: Frameworks,
    pub(crate) share: Share,
    pub(crate) sleep: Sleep,
    pub(crate) events: Events,
    captures: Mutex<u32>,
    captures_changed: Condvar,
    passthrough: AtomicBool,
    child: AtomicBool,
    closed: AtomicBool,
    exiting: AtomicBool,
    /// Threads of ours at the driver.
    at_driver: AtomicU32,
}

impl Core {
    pub(crate) fn new(config: Config, gate: &'static Gate) -> Self {
        Self {
            gate,
            waits: Waits::new(&config),
            devices: RwLock::new(Vec::new()),
            uuids: Mutex::new(Vec::new()),
            arena: Arena::new(),
            reach: Reach::new(),
            vmm: Vmm::default(),
            link: Link::new(),
            streamed: Streamed::default(),
            frameworks: Frameworks::default(),
            share: Share::default(),
            sleep: Sleep::default(),
            events: Events::new(config.log.clone()),
            captures: Mutex::new(0),
            captures_changed: Condvar::new(),
            passthrough: AtomicBool::new(false),
            child: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            exiting: AtomicBool::new(false),
            at_driver: AtomicU32::new(0),
            config,
        }
    }

    /// The attached devices.
    pub(crate) fn devices(&self) -> Vec<Arc<Device>> {
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        devices.iter().flatten().cloned().collect()
    }

    /// The attached devices, if their table is free before the deadline: for `exit`, which may have interrupted who changes it.
    pub(crate) fn devices_before(&self, deadline: Instant) -> Option<Vec<Arc<Device>>> {
        let devices = before(deadline, || match self.devices.try_read() {
            Ok(devices) => Some(devices),
            Err(TryLockError::Poisoned(devices)) => Some(devices.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        })?;
        Some(devices.iter().flatten().cloned().collect())
    }

    pub(crate) fn device(&self, index: usize) -> Option<Arc<Device>> {
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        devices.get(index)?.clone()
    }

    /// The device in whose range an address lies.
    pub(crate) fn device_of(&self, ptr: u64) -> Option<Arc<Device>> {
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        devices
            .iter()
            .flatten()
            .find(|device| device.contains(ptr))
            .cloned()
    }

    /// The first answer of an attached device. No device is locked outside `look`, which does not call into the engine.
    pub(crate) fn find_device<T>(&self, look: impl FnMut(&Device) -> Option<T>) -> Option<T> {
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        devices.iter().flatten().map(|device| &**device).find_map(look)
    }

    /// Whether any device's ranges have an address in `[ptr, ptr + size)`.
    pub(crate) fn overlaps(&self, ptr: u64, size: u64) -> bool {
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        devices.iter().flatten().any(|device| device.overlaps(ptr, size))
    }

    /// The numbers of devices: taken inside [`Self::change_devices`] only.
    pub(crate) fn uuids(&self) -> MutexGuard<'_, Vec<DeviceUuid>> {
        self.uuids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the table of devices. No device is locked in `with`.
    pub(crate) fn change_devices<T>(&self, with: impl FnOnce(&mut Vec<Option<Arc<Device>>>) -> T) -> T {
        with(&mut self.devices.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Everybody who waits on a device looks again.
    pub(crate) fn wake_devices(&self) {
        for device in self.devices() {
            device.wake();
        }
    }

    pub(crate) fn is_passthrough(&self) -> bool {
        self.passthrough.load(Ordering::Acquire)
    }

    pub(crate) fn pass_through(&self) {
        self.passthrough.store(true, Ordering::Release);
    }

    /// Whether this is a forked child: it must take no lock.
    pub(crate) fn is_child(&self) -> bool {
        self.child.load(Ordering::Acquire)
    }

    pub(crate) fn become_child(&self) {
        self.child.store(true, Ordering::Release);
        self.pass_through();
    }

    pub(crate) fn is_exiting(&self) -> bool {
        self.exiting.load(Ordering::SeqCst)
    }

    pub(crate) fn exit(&self) {
        self.exiting.store(true, Ordering::SeqCst);
        self.captures_changed.notify_all();
    }

    /// A thread of ours goes to the driver by itself, until the answer is dropped. Who then sees [`Self::is_exiting`] and can do without, turns
    /// back: the driver must not be taken down while it works for us, and `exit` waits for those who did not see it.
    pub(crate) fn at_driver(&self) -> AtDriver<'_> {
        self.at_driver.fetch_add(1, Ordering::SeqCst);
        AtDriver(&self.at_driver)
    }

    /// Whether any does.
    #[cfg(test)]
    pub(crate) fn is_at_driver(&self) -> bool {
        self.at_driver.load(Ordering::SeqCst) > 0
    }

    /// Waits until no thread of ours works at the driver, or the deadline.
    pub(crate) fn await_driver(&self, deadline: Instant) {
        // No lock: `exit` may have interrupted whoever holds any.
        while self.at_driver.load(Ordering::SeqCst) > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The engine is dropped: every thread ends as soon as it can.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.exit();
        self.link.ring();
        self.arena.close();
        self.share.ring();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn captures(&self) -> u32 {
        *self.captures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn capture_begins(&self) {
        *self.captures.lock().unwrap_or_else(PoisonError::into_inner) += 1;
    }

    pub(crate) fn capture_ends(&self) {
        let mut captures = self.captures.lock().unwrap_or_else(PoisonError::into_inner);
        *captures = captures.saturating_sub(1);
        drop(captures);
        self.captures_changed.notify_all();
    }

    /// Runs something that waits for the GPU at a moment when nobody captures. This one call is made under a lock, and
    /// has to be: a capture that begins waits until it is over, instead of being broken by it.
    pub(crate) fn outside_capture<T>(&self, run: impl FnOnce() -> T) -> T {
        let mut captures = self.captures.lock().unwrap_or_else(PoisonError::into_inner);
        while *captures > 0 && !self.is_exiting() {
            captures = self
                .captures_changed
                .wait(captures)
                .unwrap_or_else(PoisonError::into_inner);
        }
        run()
    }
}

/// See [`Core::at_driver`].
#[derive(Debug)]
pub(crate) struct AtDriver<'a>(&'a AtomicU32);

impl Drop for AtDriver<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
