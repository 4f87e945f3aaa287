//! A GPU's memory that is not there: the same promises, kept in vectors, and every lie told on order.
//!
//! * Copies run **as late as allowed**: when their marker is waited for. Code that releases memory before the copy of it
//!   is complete loses it here every time, not once in a thousand runs.
//! * Fresh physical memory holds garbage, and host segments vanish when they are unmapped.
//! * What no correct program does (copying from unmapped memory, unmapping what isn't mapped) is recorded in
//!   [`FakeDevice::violations`], besides the error that the caller gets.
//! * Several devices may share one [`Card`], as processes do.

mod beside;
mod faults;
mod host;
mod lending;
mod state;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::fingerprint::{self, Fingerprint, Keys};
use crate::{DeviceError, DeviceMemory, Direction, Grant, Handle, HostAddr, Location, Marker, Props};
use beside::Beside;
use ebb_units::{Bytes, DeviceUuid};
pub use faults::Call;
use faults::Faults;
pub use host::FakeHost;
use state::{Copy, State};

/// The physical memory that several fake devices (processes on one GPU) share.
#[derive(Clone, Debug)]
pub struct Card(Arc<Mutex<CardState>>);

#[derive(Debug)]
struct CardState {
    capacity: u64,
    used: u64,
    peak: u64,
}

impl Card {
    /// A card with that many bytes.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self(Arc::new(Mutex::new(CardState {
            capacity,
            used: 0,
            peak: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, CardState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes in use.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.lock().used
    }

    /// The most that was ever in use.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.lock().peak
    }

    /// Takes bytes as a stranger does.
    #[must_use]
    pub fn take(&self, bytes: u64) -> bool {
        let mut card = self.lock();
        if card.capacity - card.used < bytes {
            return false;
        }
        card.used += bytes;
        card.peak = card.peak.max(card.used);
        true
    }

    /// Gives bytes back.
    pub fn give(&self, bytes: u64) {
        self.lock().used -= bytes;
    }
}

/// One process's view of a fake card.
#[derive(Debug)]
pub struct FakeDevice {
    granularity: u64,
    card: Card,
    host: Arc<FakeHost>,
    keys: Keys,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    state: State,
    faults: Faults,
    /// Kernels of the program that run.
    work: u32,
    gone: bool,
    no_context: bool,
    lacks: &'static str,
    /// Fingerprints tell nothing: none equals another.
    forgetful: bool,
    fingerprinted: u64,
    queues: [Queue; 2],
    beside: Beside,
    lenders: lending::Lenders,
}

/// What waits in a direction's stream.
#[derive(Debug)]
enum Job {
    Copy(Copy),
    /// Zeros at an address, so many bytes.
    Zero(u64, u64),
    /// To, from, so many bytes.
    Between(u64, u64, u64),
}

/// A direction's stream.
#[derive(Debug, Default)]
struct Queue {
    copies: VecDeque<Job>,
    enqueued: u64,
    complete: u64,
    /// Once a copy failed, every wait fails.
    broken: Option<DeviceError>,
}

const fn index(direction: Direction) -> usize {
    match direction {
        Direction::Out => 0,
        Direction::In => 1,
    }
}

fn invalid(call: Call) -> DeviceError {
    DeviceError::Driver {
        code: 1,
        call: call.name(),
    }
}

impl FakeDevice {
    /// A device over a card. Copies reach the segments of `host`.
    #[must_use]
    pub fn new(card: Card, host: Arc<FakeHost>, granularity: u64) -> Self {
        assert!(granularity.is_power_of_two());
        Self {
            granularity,
            card,
            host,
            keys: Keys::of_seed(0x5eed),
            inner: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The begin of every call: counted, delayed, blocked, made to fail, as ordered.
    fn begin(&self, call: Call) -> Result<MutexGuard<'_, Inner>, DeviceError> {
        let mut inner = self.lock();
        let (verdict, delay) = inner.faults.count(call);
        if !delay.is_zero() {
            drop(inner);
            std::thread::sleep(delay);
            inner = self.lock();
        }
        while inner.faults.blocked(call) {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        if inner.gone {
            return Err(DeviceError::Gone);
        }
        verdict.map(|()| inner)
    }

    /// The n-th call of that name from now (the next is 1) fails.
    pub fn fail_nth(&self, call: Call, n: u64, error: DeviceError) {
        self.lock().faults.nth(call, n, error);
    }

    /// The k-th call from now, whatever its name, fails (the next is 1).
    pub fn fail_kth(&self, k: u64, error: DeviceError) {
        self.lock().faults.kth(k, error);
    }

    /// From now on the driver is one that refused this.
    pub fn set_lacks(&self, what: &'static str) {
        self.lock().lacks = what;
    }

    /// From now on no fingerprint equals another, or they are as they should be again.
    pub fn forget_fingerprints(&self, forgetful: bool) {
        self.lock().forgetful = forgetful;
    }

    /// Bytes that were fingerprinted.
    #[must_use]
    pub fn fingerprinted(&self) -> u64 {
        self.lock().fingerprinted
    }

    /// Every call of that name fails until [`Self::heal`].
    pub fn fail_always(&self, call: Call, error: DeviceError) {
        self.lock().faults.always(call, error);
    }

    /// Takes all ordered failures, delays and blocks back.
    pub fn heal(&self) {
        self.lock().faults.heal();
        self.changed.notify_all();
    }

    /// Every call of that name takes so long.
    pub fn delay(&self, call: Call, by: Duration) {
        self.lock().faults.delay(call, by);
    }

    /// Calls of that name do not return until [`Self::heal`].
    pub fn block(&self, call: Call) {
        self.lock().faults.block(call);
    }

    /// The context is gone: every call fails from now on.
    pub fn kill(&self) {
        self.lock().gone = true;
    }

    /// The program has no context on this device (any more), or has one again.
    pub fn without_context(&self, without: bool) {
        self.lock().no_context = without;
    }

    /// The mapping at exactly that address: size, what its memory was asked for as, and who was granted what.
    #[must_use]
    pub fn mapping(&self, addr: u64) -> Option<(u64, Props, BTreeMap<Location, u32>)> {
        self.lock().state.mapping(addr)
    }

    /// How often a call was made.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.lock().faults.calls(call)
    }

    /// How many calls were made.
    #[must_use]
    pub fn total_calls(&self) -> u64 {
        self.lock().faults.total()
    }

    /// Whether an ordered failure has not happened yet.
    #[must_use]
    pub fn fault_pending(&self) -> bool {
        self.lock().faults.pending()
    }

    /// A kernel of the program starts; it runs until [`Self::end_work`].
    pub fn begin_work(&self) {
        self.lock().work += 1;
    }

    /// A kernel of the program ends.
    pub fn end_work(&self) {
        let mut inner = self.lock();
        inner.work = inner.work.saturating_sub(1);
        drop(inner);
        self.changed.notify_all();
    }

    /// Handles that were created and not released.
    #[must_use]
    pub fn handles(&self) -> usize {
        self.lock().state.handles()
    }

    /// Bytes mapped.
    #[must_use]
    pub fn mapped(&self) -> u64 {
        self.lock().state.mapped()
    }

    /// Bytes of addresses reserved.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.lock().state.reserved()
    }

    /// Host ranges registered.
    #[must_use]
    pub fn registered(&self) -> usize {
        self.lock().state.registered()
    }

    /// What no correct program does, in words.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.lock().state.violations().to_vec()
    }

    /// A kernel writes.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] 700 if any byte isn't mapped with access.
    pub fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.lock().state.write(addr, bytes)
    }

    /// A kernel reads.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn read(&self, addr: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.lock().state.read(addr, bytes)
    }

    /// Runs what is enqueued in a direction, up to a place.
    fn run(&self, inner: &mut Inner, direction: Direction, upto: u64) {
        let queue = &mut inner.queues[index(direction)];
        while queue.complete < upto {
            let Some(copy) = queue.copies.pop_front() else {
                break;
            };
            queue.complete += 1;
            let done = match copy {
                Job::Copy(copy) => inner.state.copy(&copy, &self.host),
                Job::Zero(dev, len) => inner.state.zero(dev, len),
                Job::Between(to, from, len) => inner.state.between(to, from, len),
            };
            if let Err(error) = done {
                queue.broken.get_or_insert(error);
            }
        }
    }

    fn run_all(&self, inner: &mut Inner) {
        for direction in [Direction::Out, Direction::In] {
            let all = inner.queues[index(direction)].enqueued;
            self.run(inner, direction, all);
        }
    }

    fn enqueue(&self, call: Call, direction: Direction, job: Job) -> Result<(), DeviceError> {
        let mut inner = self.begin(call)?;
        let places = match &job {
            Job::Copy(copy) => vec![(copy.dev, copy.len)],
            Job::Zero(dev, len) => vec![(*dev, *len)],
            Job::Between(to, from, len) => vec![(*to, *len), (*from, *len)],
        };
        for (dev, len) in places {
            if !inner.state.accessible(dev, len) {
                inner.state.violation(format!(
                    "{} of {dev:#x}+{len:#x}: not mapped with access",
                    call.name()
                ));
                return Err(invalid(call));
            }
        }
        let queue = &mut inner.queues[index(direction)];
        queue.copies.push_back(job);
        queue.enqueued += 1;
        Ok(())
    }
}

impl DeviceMemory for FakeDevice {
    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn lacks(&self) -> &'static str {
        self.lock().lacks
    }

    fn reserve(&self, size: u64, align: u64) -> Result<u64, DeviceError> {
        let mut inner = self.begin(Call::Reserve)?;
        if size == 0 || !size.is_multiple_of(self.granularity) || !(align == 0 || align.is_power_of_two()) {
            return Err(invalid(Call::Reserve));
        }
        Ok(inner.state.reserve(size, align.max(self.granularity)))
    }

    fn free_reservation(&self, addr: u64, size: u64) -> Result<(), DeviceError> {
        let mut inner = self.begin(Call::FreeReservation)?;
        inner
            .state
            .unreserve(addr, size)
            .map_err(|()| invalid(Call::FreeReservation))
    }

    fn create(&self, size: u64) -> Result<Handle, DeviceError> {
        let mut inner = self.begin(Call::Create)?;
        if size == 0 || !size.is_multiple_of(self.granularity) {
            inner.state.violation(format!(
                "create of {size:#x} bytes: no multiple of the granularity"
            ));
            return Err(invalid(Call::Create));
        }
        if !self.card.take(size) {
            return Err(DeviceError::OutOfMemory);
        }
        Ok(inner.state.create(size, Props::default()))
    }

    fn release(&self, handle: Handle) -> Result<(), DeviceError> {
        let mut inner = self.begin(Call::Release)?;
        inner.state.release(handle).map_err(|()| invalid(Call::Release))?;
        self.give_back(&mut inner);
        Ok(())
    }

    fn map(&self, addr: u64, size: u64, handle: Handle) -> Result<(), DeviceError> {
        let mut inner = self.begin(Call::Map)?;
        inner
            .state
            .map(addr, size, handle, false)
            .map_err(|()| invalid(Call::Map))
    }

    fn unmap(&self, addr: u64, size: u64) -> Result<(), DeviceError> {
        let mut inner = self.begin(Call::Unmap)?;
        inner.state.unmap(addr, size).map_err(|()| invalid(Call::Unmap))?;
        self.give_back(&mut inner);
        Ok(())
    }

    fn set_access(&self, addr: u64, size: u64) -> Result<(), DeviceError> {
        let mut inner = self.begin(Call::SetAccess)?;
        inner
            .state
            .set_access(addr, size)
            .map_err(|()| invalid(Call::SetAccess))
    }

    fn copy_out(&self, host: HostAddr, dev: u64, len: u64) -> Result<(), DeviceError> {
        self.enqueue(
            Call::CopyOut,
            Direction::Out,
            Job::Copy(Copy {
                direction: Direction::Out,
                host,
                dev,
                len,
            }),
        )
    }

    fn copy_in(&self, dev: u64, host: HostAddr, len: u64) -> Result<(), DeviceError> {
        self.enqueue(
            Call::CopyIn,
            Direction::In,
            Job::Copy(Copy {
                direction: Direction::In,
                host,
                dev,
                len,
            }),
        )
    }

    fn zero(&self, dev: u64, len: u64) -> Result<(), DeviceError> {
        self.enqueue(Call::Zero, Direction::In, Job::Zero(dev, len))
    }

    fn fingerprint(&self, ranges: &[(u64, u64)]) -> Result<Vec<Fingerprint>, DeviceError> {
        let mut inner = self.begin(Call::Fingerprint)?;
        if inner.work > 0 {
            inner.state.violation("fingerprints while work runs".into());
        }
        let mut prints = Vec::new();
        for (at, len) in ranges {
            for (at, len) in fingerprint::blocks(*at, *len) {
                let mut bytes = vec![0; Bytes(len).to_usize()];
                if inner.state.read(at, &mut bytes).is_err() {
                    inner
                        .state
                        .violation(format!("fingerprint of {at:#x}+{len:#x}: not mapped with access"));
                    return Err(invalid(Call::Fingerprint));
                }
                let mut print = self.keys.of(&bytes);
                inner.fingerprinted += len;
                if inner.forgetful {
                    print.sums[0] = inner.fingerprinted;
                }
                prints.push(print);
            }
        }
        Ok(prints)
    }

    fn mark(&self, direction: Direction) -> Result<Marker, DeviceError> {
        let inner = self.begin(Call::Mark)?;
        let at = inner.queues[index(direction)].enqueued;
        Ok(Marker(at << 1 | index(direction) as u64))
    }

    fn wait(&self, marker: Marker) -> Result<(), DeviceError> {
        let mut inner = self.begin(Call::Wait)?;
        let direction = if marker.0 & 1 == 0 {
            Direction::Out
        } else {
            Direction::In
        };
        self.run(&mut inner, direction, marker.0 >> 1);
        // A failure is of the copies that the caller waits for; the next ones start afresh.
        inner.queues[index(direction)].broken.take().map_or(Ok(()), Err)
    }

    fn done(&self, marker: &Marker) -> Result<bool, DeviceError> {
        let mut inner = self.begin(Call::Done)?;
        let direction = if marker.0 & 1 == 0 {
            Direction::Out
        } else {
            Direction::In
        };
        let at = index(direction);
        if inner.queues[at].complete < marker.0 >> 1 {
            // Asking is what lets time pass here: one copy further each time.
            let next = inner.queues[at].complete + 1;
            self.run(&mut inner, direction, next);
            return Ok(false);
        }
        Ok(true)
    }

    fn register_host(&self, host: HostAddr, len: u64) -> Result<(), DeviceError> {
        let mut inner = self.begin(Call::RegisterHost)?;
        inner
            .state
            .register(host, len)
            .map_err(|()| invalid(Call::RegisterHost))
    }

    fn register_read_only(&self, host: HostAddr, len: u64) -> Result<(), DeviceError> {
        self.register_host(host, len)
    }

    fn unregister_host(&self, host: HostAddr, len: u64) -> Result<(), DeviceError> {
        let mut inner = self.begin(Call::UnregisterHost)?;
        while inner.work > 0 {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        self.run_all(&mut inner);
        inner
            .state
            .unregister(host, len)
            .map_err(|()| invalid(Call::UnregisterHost))
    }

    fn quiesce(&self) -> Result<(), DeviceError> {
        let mut inner = self.begin(Call::Quiesce)?;
        while inner.work > 0 {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        self.run_all(&mut inner);
        Ok(())
    }

    fn create_as(&self, size: u64, props: &Props) -> Result<Handle, DeviceError> {
        let mut inner = self.begin(Call::CreateAs)?;
        if size == 0 || !size.is_multiple_of(self.granularity) {
            return Err(invalid(Call::CreateAs));
        }
        if !inner.lenders.card(props).unwrap_or(&self.card).take(size) {
            return Err(DeviceError::OutOfMemory);
        }
        Ok(inner.state.create(size, *props))
    }

    fn map_as(&self, addr: u64, size: u64, handle: Handle) -> Result<(), DeviceError> {
        let mut inner = self.begin(Call::MapAs)?;
        inner
            .state
            .map(addr, size, handle, true)
            .map_err(|()| invalid(Call::MapAs))
    }

    fn unmap_as(&self, addr: u64, size: u64) -> Result<(), DeviceError> {
        let mut inner = self.begin(Call::UnmapAs)?;
        inner
            .state
            .unmap(addr, size)
            .map_err(|()| invalid(Call::UnmapAs))?;
        self.give_back(&mut inner);
        Ok(())
    }

    fn grant(&self, addr: u64, size: u64, grants: &[Grant]) -> Result<(), DeviceError> {
        let mut inner = self.begin(Call::GrantAs)?;
        inner
            .state
            .grant(addr, size, grants)
            .map_err(|()| invalid(Call::GrantAs))
    }

    fn lenders(&self) -> Vec<(DeviceUuid, Props)> {
        self.lock().lenders.list()
    }

    fn copy_between(&self, direction: Direction, to: u64, from: u64, len: u64) -> Result<(), DeviceError> {
        self.enqueue(Call::CopyBetween, direction, Job::Between(to, from, len))
    }

    fn push_to_host(&self, addr: u64, len: u64) -> Result<(), DeviceError> {
        self.push_managed(addr, len)
    }

    fn trim_graphs(&self) -> Result<u64, DeviceError> {
        self.trim_kept()
    }

    fn occupied(&self) -> Result<u64, DeviceError> {
        Ok(self.card.used())
    }

    fn location(&self) -> Location {
        state::SELF
    }

    fn can_copy(&self) -> bool {
        !self.lock().no_context
    }
}

impl Drop for FakeDevice {
    /// A process that ends gives its memory back.
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (props, bytes) in inner.state.physical() {
            inner.lenders.card(&props).unwrap_or(&self.card).give(bytes);
        }
        let beside = self.beside_bytes();
        self.card.give(beside);
    }
}
