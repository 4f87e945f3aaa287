//! The pool that frameworks allocate from by the functions that the library exports: each tensor in a block of
//! [`ebb_alloc::front::Front`], one front a device, made with the first allocation.
//!
//! ```text
//!   ebb_pool_alloc ─► Engine::framework_alloc ─► Front ─► a block                   (hot: no call, no message)
//!                                                  └────► Tables: handles and mappings as a program makes them itself (`vmm`)
//! ```
//!
//! * `tables`: the driver of a front. `streams`: what is known of streams. `mesh`: small blocks are brought together.
//!
//! Idle chunks go without a copy before anything is evicted, and before an allocation fails.
//!
//! # Locks
//! `pools` for a look; then the front's own, one at a time; then `tables`' and `streams`' own. No call of the driver is made under any
//! but `streams::recording`.

mod mesh;
mod streams;
mod tables;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use ebb_alloc::front::{AllocateError, Front, FrontClass, FrontStats, Keep};
use ebb_alloc::pool::{Config, Stream, pickle};
use ebb_device::{Location, Props};
use ebb_units::Bytes;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::core::Core;
use crate::engine::Engine;
use crate::error::{AllocError, FreeError};
use crate::streamed::StreamKey;
pub(crate) use mesh::{changes, mend, mesh_as_owner, scattered, would_mesh};
use tables::{AsOwner, Tables};

/// What a program used in the last two of these is what it needs: longer than an iteration of a training loop.
const PERIOD: Duration = Duration::from_secs(5);

/// See [`ebb_alloc::pool::Pool::second`].
const SECOND: Duration = Duration::from_secs(1);

/// So many numbers of streams, and those that have ended are forgotten.
const MANY: usize = 64;

/// How long a trim waits for streams that have nothing to do.
const MOMENT: Duration = Duration::from_millis(20);

/// In whose order a block is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// A stream's.
    Stream(StreamKey),
    /// Nobody's: who frees has waited for the device.
    Waited,
    /// It is not known whose. Free again when the device has been quiet.
    Unknown,
    /// A private pool's: nobody else gets the block before [`Engine::framework_private_over`].
    Private(u64),
}

/// What is known of a block beside its stream.
#[derive(Clone, Debug, Default)]
struct Extra {
    private: Option<Stream>,
    others: Vec<Stream>,
}

/// One device's.
#[derive(Debug)]
struct One {
    front: Front<Tables>,
    /// Of few blocks: used on other streams, or private.
    extras: Mutex<FxHashMap<u64, Extra>>,
    marked: AtomicUsize,
    refused: AtomicU64,
    /// When a period ended last, and a second.
    ticked: Mutex<(Instant, Instant)>,
}

/// All devices'.
#[derive(Debug, Default)]
pub(crate) struct Frameworks {
    pools: RwLock<Vec<Option<Arc<One>>>>,
    used: AtomicUsize,
}

/// A pool's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct FrameworkStats {
    /// The pool's own.
    pub front: FrontStats,
    /// Allocations that found no room.
    pub refused: u64,
}

impl One {
    fn streams(&self) -> &streams::Streams {
        &self.front.driver().streams
    }

    fn extras(&self) -> MutexGuard<'_, FxHashMap<u64, Extra>> {
        self.extras.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn number(&self, order: &Order) -> Stream {
        match order {
            Order::Stream(key) => self.streams().number(key),
            Order::Waited => streams::WAITED,
            Order::Unknown => streams::UNKNOWN,
            Order::Private(number) => Stream(*number),
        }
    }

    fn mark(&self, at: u64, change: impl FnOnce(&mut Extra)) {
        let mut extras = self.extras();
        change(extras.entry(at).or_default());
        self.marked.store(extras.len(), Ordering::Release);
    }

    fn unmark(&self, at: u64) -> Extra {
        if self.marked.load(Ordering::Acquire) == 0 {
            return Extra::default();
        }
        let mut extras = self.extras();
        let extra = extras.remove(&at).unwrap_or_default();
        self.marked.store(extras.len(), Ordering::Release);
        extra
    }

    fn alloc(&self, size: u64, order: &Order, patient: bool) -> Result<u64, AllocError> {
        let stream = self.number(order);
        let mut result = self.front.allocate(size, stream);
        if patient && result.as_ref().is_err_and(may_pass) {
            // What work still uses may be all that there is; and whoever asked the daemon once and got nothing waits longer the next time.
            self.front.settle();
            result = self.front.allocate(size, stream);
        }
        match result {
            Ok(at) => {
                if matches!(order, Order::Private(_)) {
                    self.mark(at, |extra| extra.private = Some(stream));
                }
                Ok(at)
            }
            Err(error) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                Err(match error {
                    AllocateError::Driver(error) => error,
                    AllocateError::NoRoom(_) => AllocError::NeverFits(Bytes(size)),
                })
            }
        }
    }

    fn free(&self, at: u64, order: &Order) -> Result<(), FreeError> {
        if self.front.size(at).is_none() {
            return Err(FreeError::Invalid);
        }
        let mut extra = self.unmark(at);
        let stream = extra.private.unwrap_or_else(|| self.number(order));
        if stream == streams::UNKNOWN {
            extra.others.push(streams::ANY);
        }
        self.front
            .free(at, stream, &extra.others)
            .map_err(|_| FreeError::Invalid)
    }

    /// Forgets streams that have ended.
    fn sweep(&self) {
        let ended = self.streams().ended();
        if ended.is_empty() {
            return;
        }
        let named: FxHashSet<Stream> = {
            let extras = self.extras();
            let of = |extra: &Extra| {
                extra
                    .others
                    .iter()
                    .copied()
                    .chain(extra.private)
                    .collect::<Vec<_>>()
            };
            extras.values().flat_map(of).collect()
        };
        for stream in ended {
            if !named.contains(&stream) {
                self.front.end(stream);
                self.streams().forget(stream);
            }
        }
    }

    /// Gives back idle memory, so many bytes if there are; how much went. Waits for nothing.
    fn release(&self, bytes: u64) -> u64 {
        let before = self.front.stats().pool.released_total;
        let _ = self.front.release(bytes);
        self.front.stats().pool.released_total - before
    }
}

fn may_pass(error: &AllocateError<AllocError>) -> bool {
    !matches!(
        error,
        AllocateError::Driver(AllocError::Bypass | AllocError::Size(_) | AllocError::NeverFits(_))
    )
}

impl Frameworks {
    fn get(&self, device: usize) -> Option<Arc<One>> {
        if self.used.load(Ordering::Acquire) == 0 {
            return None;
        }
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        pools.get(device)?.clone()
    }

    fn all(&self) -> Vec<(usize, Arc<One>)> {
        if self.used.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        let of = pools.iter().enumerate();
        of.filter_map(|(index, one)| Some((index, one.clone()?)))
            .collect()
    }

    fn take(&self, device: usize) -> Option<Arc<One>> {
        let mut pools = self.pools.write().unwrap_or_else(PoisonError::into_inner);
        let before = pools.get_mut(device)?.take();
        let used = pools.iter().flatten().count();
        self.used.store(used, Ordering::Release);
        before
    }

    /// Enters the first one of a device; another thread's, if that was first.
    fn put_first(&self, device: usize, one: &Arc<One>) -> Option<Arc<One>> {
        let mut pools = self.pools.write().unwrap_or_else(PoisonError::into_inner);
        if pools.len() <= device {
            pools.resize(device + 1, None);
        }
        if let Some(other) = &pools[device] {
            return Some(Arc::clone(other));
        }
        pools[device] = Some(Arc::clone(one));
        let used = pools.iter().flatten().count();
        self.used.store(used, Ordering::Release);
        None
    }
}

/// Room for somebody else on a device: so many bytes of what nothing lives in. Waits for nothing; how much went.
pub(crate) fn make_room(core: &Core, device: usize, bytes: u64) -> u64 {
    core.frameworks.get(device).map_or(0, |one| one.release(bytes))
}

/// The same on the device's owner thread, which moves nothing at this moment.
pub(crate) fn make_room_as_owner(core: &Core, device: usize, bytes: u64) -> u64 {
    let _owner = AsOwner::begin();
    make_room(core, device, bytes)
}

/// Everything that nothing lives in, on the device's owner thread. An event that was recorded a moment ago needs a moment to
/// pass, however idle its stream is: that is waited for, and no work.
pub(crate) fn trim_as_owner(core: &Core, device: usize) {
    let Some(one) = core.frameworks.get(device) else {
        return;
    };
    let _owner = AsOwner::begin();
    let deadline = Instant::now() + MOMENT;
    loop {
        one.release(u64::MAX);
        if one.front.stats().pool.idle == 0 || Instant::now() >= deadline {
            return;
        }
        std::thread::sleep(MOMENT / 100);
    }
}

/// A device's gate is closed and nothing runs on it: what nothing lives in needs no copy.
pub(crate) fn after_quiet(core: &Core, device: usize, bytes: u64) {
    if let Some(one) = core.frameworks.get(device) {
        one.streams().all_past();
        let _owner = AsOwner::begin();
        one.release(bytes);
    }
}

/// Of what [`make_room`] may give, what the pool has not needed in the last two periods; and how much more it would like to have than the
/// `room` that it can have without anybody's losing it.
pub(crate) fn spare(core: &Core, device: usize, room: u64) -> (u64, u64) {
    let Some(one) = core.frameworks.get(device) else {
        return (0, 0);
    };
    let mut ticked = one.ticked.lock().unwrap_or_else(PoisonError::into_inner);
    if ticked.0.elapsed() >= PERIOD {
        ticked.0 = Instant::now();
        one.front.tick();
    }
    let mut wish = 0;
    if ticked.1.elapsed() >= SECOND {
        ticked.1 = Instant::now();
        wish = one.front.second(room).saturating_sub(room);
    }
    (one.front.spare(), wish)
}

/// A device's figures; `None` if nothing was allocated there.
pub(crate) fn figures(core: &Core, device: usize) -> Option<FrameworkStats> {
    let one = core.frameworks.get(device)?;
    Some(FrameworkStats {
        front: one.front.stats(),
        refused: one.refused.load(Ordering::Relaxed),
    })
}

/// Streams are about to go. `over`: their work is done.
pub(crate) fn streams_go(core: &Core, which: impl Fn(&StreamKey) -> bool + Copy, over: bool) {
    for (_, one) in core.frameworks.all() {
        if one.streams().knows(which) {
            // What threads keep of it belongs before its last mark.
            one.front.flush(0);
            one.streams().goes(core.streamed.fences().as_ref(), which, over);
            if one.streams().len() > MANY {
                one.front.ask();
                one.sweep();
            }
        }
    }
}

impl Engine {
    fn framework(
        self: &Arc<Self>,
        device: usize,
        props: impl FnOnce() -> Props,
    ) -> Result<Arc<One>, AllocError> {
        let core = &self.core;
        if core.is_passthrough() {
            return Err(AllocError::Bypass);
        }
        if let Some(known) = core.frameworks.get(device) {
            return Ok(known);
        }
        let Some(owner) = core.device(device) else {
            return Err(AllocError::Bypass);
        };
        let mut config = Config::for_granule(owner.memory.granularity());
        if let Err(error) = config.set(&core.config.pool) {
            core.events.note(format!("EBB_POOL is not used: {error}"));
        }
        let tables = Tables::new(Arc::downgrade(self), owner, props());
        let one = Arc::new(One {
            front: Front::new(config, Keep::default(), tables),
            extras: Mutex::default(),
            marked: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
            ticked: Mutex::new((Instant::now(), Instant::now())),
        });
        if let Some(other) = core.frameworks.put_first(device, &one) {
            return Ok(other);
        }
        // From now on the device's owner looks at what lies in it when nothing happens.
        one.front.driver().device().wake();
        Ok(one)
    }

    /// Allocates from a device's pool, in somebody's order. `props`: what its memory is made with, asked for once. Call it with no lock held and
    /// outside the gate. Without `patient` it waits no longer than for a program that frees its caches and tries again.
    ///
    /// # Errors
    /// As [`Engine::alloc`].
    pub fn framework_alloc(
        self: &Arc<Self>,
        device: usize,
        size: u64,
        order: &Order,
        patient: bool,
        props: impl FnOnce() -> Props,
    ) -> Result<u64, AllocError> {
        self.framework(device, props)?.alloc(size, order, patient)
    }

    /// Frees a block in somebody's order, on the device that is named, or wherever it is. `None` if no pool has it.
    pub fn framework_free(&self, device: usize, at: u64, order: &Order) -> Option<Result<(), FreeError>> {
        let one = self.framework_of(device, at)?;
        Some(one.free(at, order))
    }

    fn framework_of(&self, device: usize, at: u64) -> Option<Arc<One>> {
        if self.core.is_child() {
            return None;
        }
        let named = self.core.frameworks.get(device);
        if let Some(one) = named.filter(|one| one.front.driver().contains(at)) {
            return Some(one);
        }
        let mut all = self.core.frameworks.all().into_iter();
        all.find(|(_, one)| one.front.driver().contains(at))
            .map(|(_, one)| one)
    }

    /// The device of a pool that has an address.
    pub(crate) fn framework_device_at(&self, at: u64) -> Option<usize> {
        Some(self.framework_of(usize::MAX, at)?.front.driver().device().index)
    }

    /// What was asked for at an address, if a block of a pool begins there, and its device.
    #[must_use]
    pub fn framework_block(&self, at: u64) -> Option<(usize, u64)> {
        let one = self.framework_of(usize::MAX, at)?;
        Some((one.front.driver().device().index, one.front.size(at)?))
    }

    /// A stream uses a block, too: whoever frees it later frees it for all when that stream has come so far. `false` if no block is there.
    pub fn framework_record(&self, at: u64, key: &StreamKey) -> bool {
        let Some(one) = self.framework_of(usize::MAX, at) else {
            return false;
        };
        if one.front.size(at).is_none() {
            return false;
        }
        let stream = one.streams().number(key);
        one.mark(at, |extra| {
            if !extra.others.contains(&stream) {
                extra.others.push(stream);
            }
        });
        true
    }

    /// A private pool on a device: a number for [`Order::Private`].
    ///
    /// # Errors
    /// As [`Engine::framework_alloc`].
    pub fn framework_private(
        self: &Arc<Self>,
        device: usize,
        props: impl FnOnce() -> Props,
    ) -> Result<u64, AllocError> {
        let one = self.framework(device, props)?;
        let stream = one.streams().private();
        one.front.keep(stream);
        Ok(stream.0)
    }

    /// A private pool's memory may be everybody's when the device has been quiet.
    pub fn framework_private_over(&self, device: usize, number: u64) {
        if self.core.is_child() {
            return;
        }
        if let Some(one) = self.core.frameworks.get(device)
            && one.streams().over(Stream(number))
        {
            one.front.keep_no_more(Stream(number));
        }
    }

    /// Gives back what nothing lives in, waiting for the work that may use it: how many bytes went. During a capture without
    /// waiting.
    pub fn framework_trim(&self, device: usize) -> u64 {
        if self.core.is_child() {
            return 0;
        }
        let Some(one) = self.core.frameworks.get(device) else {
            return 0;
        };
        let before = one.front.stats().pool.released_total;
        one.front.settle();
        let _ = one.front.trim();
        one.sweep();
        one.front.stats().pool.released_total - before
    }

    /// A device's figures; `None` if nothing was allocated there.
    #[must_use]
    pub fn framework_stats(&self, device: usize) -> Option<FrameworkStats> {
        if self.core.is_child() {
            return None;
        }
        figures(&self.core, device)
    }

    /// A device's figures by the size of blocks; nothing if nothing was allocated there.
    #[must_use]
    pub fn framework_classes(&self, device: usize) -> Option<Vec<FrontClass>> {
        if self.core.is_child() {
            return None;
        }
        Some(self.core.frameworks.get(device)?.front.classes())
    }

    /// What lies where on a device, as `torch.cuda.memory._snapshot()` would have it, pickled; `None` if nothing was allocated there.
    /// `number`: the device's, as the program counts them.
    #[must_use]
    pub fn framework_snapshot(&self, device: usize, number: u32) -> Option<Vec<u8>> {
        if self.core.is_child() {
            return None;
        }
        let segments = self.core.frameworks.get(device)?.front.segments();
        Some(pickle(&segments, number))
    }

    /// Peaks begin anew.
    pub fn framework_reset_peaks(&self, device: usize) {
        if !self.core.is_child()
            && let Some(one) = self.core.frameworks.get(device)
        {
            one.front.reset_peaks();
        }
    }

    /// Another device may use a device's memory, with these rights; 0 for none any more. Outside the gate.
    pub fn framework_peer(&self, device: usize, peer: Location, flags: u32) {
        if self.core.is_child() {
            return;
        }
        if let Some(one) = self.core.frameworks.get(device) {
            one.front.driver().peers(self, peer, flags);
        }
    }

    /// The device goes, and all that was allocated from its pool. Its memory is taken apart wherever it is.
    pub(crate) fn framework_detach(&self, device: usize) {
        if let Some(one) = self.core.frameworks.take(device) {
            one.front.driver().tear_down(self);
        }
    }
}
