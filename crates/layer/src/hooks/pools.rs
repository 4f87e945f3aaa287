//! Stream-ordered allocation, and the pools that it comes from.
//!
//! A pool of the program is the driver's object, and stays empty: what is allocated from it is the engine's. So handles, access,
//! switches and errors are the driver's own. Figures are the sum of both.
//!
//! The driver's own memory is given where ours cannot stand in: from pools that can be exported, are imported, or lie elsewhere than on a device
//! (counted by what they reserve), and while the stream is captured (counted with the graph).
//!
//! Streams that the program waits for shrink pools to their thresholds. A stream that it destroys is marked before.
//!
//! # Locks
//! `MADE`, `STREAMS`, `FOREIGN`: each held for a look, under no other and no call of the driver.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError, RwLock};

use ebb_abi::*;
use ebb_layer_core::{AllocError, ExternalKind, PoolError, PoolFacts, StreamKey, Waited, WhichPool};

use crate::bridge::{self, Running};
use crate::hooks::{capture, external, graphs, with};
use crate::symbols::real;

/// Pools never grow by less, and their largest size is rounded to it.
const GRANULE: u64 = 2 << 20;

/// Pools that the program made and that are ours: the device, and the largest size.
static MADE: Mutex<Option<HashMap<usize, (CUdevice, u64)>>> = Mutex::new(None);
/// Streams by their handle, learned when first used.
static STREAMS: LazyLock<RwLock<HashMap<usize, StreamKey>>> = LazyLock::new(RwLock::default);
/// The driver's own pools that the program uses: device and bytes that are counted.
static FOREIGN: Mutex<Option<HashMap<usize, (usize, u64)>>> = Mutex::new(None);
static FOREIGN_COUNT: AtomicUsize = AtomicUsize::new(0);

fn held<T>(mutex: &'static Mutex<Option<T>>) -> MutexGuard<'static, Option<T>> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number of the calling thread, which no other thread ever has.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static MINE: Cell<u64> = const { Cell::new(0) };
        static END: Ending = const { Ending };
    }
    MINE.with(|mine| {
        if mine.get() == 0 {
            mine.set(NEXT.fetch_add(1, Ordering::Relaxed));
            // Where it comes too late, because the thread ends already, its place in the tables stays.
            let _ = END.try_with(|_| ());
        }
        mine.get()
    })
}

/// Forgets the streams of a thread when it ends.
struct Ending;

impl Drop for Ending {
    fn drop(&mut self) {
        let thread = this_thread();
        with(|running| {
            running.engine.streams_of_thread_gone(thread);
            Some(())
        });
    }
}

/// Which stream a handle means. `None`: the driver does not know it either, or its device is not ours.
pub(crate) fn stream_key(running: &Running, stream: CUstream, per_thread: bool) -> Option<StreamKey> {
    let own_default = stream == CU_STREAM_PER_THREAD || per_thread && stream.is_null();
    if own_default || stream.is_null() || stream == CU_STREAM_LEGACY {
        let (device, context) = running.here()?;
        return Some(StreamKey {
            handle: if own_default {
                CU_STREAM_PER_THREAD
            } else {
                CU_STREAM_LEGACY
            }
            .0 as u64,
            context: context.0 as u64,
            thread: if own_default { this_thread() } else { 0 },
            device,
        });
    }
    let known = STREAMS
        .read()
        .unwrap_or_else(PoisonError::into_inner)
        .get(&stream.0)
        .copied();
    known.or_else(|| learn(running, stream))
}

#[cold]
fn learn(running: &Running, stream: CUstream) -> Option<StreamKey> {
    let mut context = CUcontext::NULL;
    // SAFETY: a valid place for the answer; the driver checks the stream.
    let found = unsafe { running.table.cuStreamGetCtx(stream, &raw mut context) };
    if !found.is_success() {
        return None;
    }
    let key = StreamKey {
        handle: stream.0 as u64,
        context: context.0 as u64,
        thread: 0,
        device: running.index_of(running.device_of(context)?)?,
    };
    STREAMS
        .write()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(stream.0, key);
    Some(key)
}

/// A context goes, and its streams with it.
pub(crate) fn context_gone(running: &Running, context: CUcontext) {
    let context = context.0 as u64;
    STREAMS
        .write()
        .unwrap_or_else(PoisonError::into_inner)
        .retain(|_, key| key.context != context);
    running.fences.forget_context(context);
    running.engine.streams_of_context_gone(context);
}

/// Whether a stream is captured, and into which graph.
fn captured(running: &Running, stream: CUstream) -> Option<CUgraph> {
    if !capture::any() {
        return None;
    }
    let (mut status, mut graph) = (CU_STREAM_CAPTURE_STATUS_NONE, CUgraph::NULL);
    // SAFETY: valid places, or null for what is not wanted; the driver checks the stream.
    let known = unsafe {
        running.table.cuStreamGetCaptureInfo_v2(
            stream,
            &raw mut status,
            core::ptr::null_mut(),
            &raw mut graph,
            core::ptr::null_mut(),
            core::ptr::null_mut(),
        )
    };
    // One that must not be used during somebody else's capture: the driver has the right answer.
    (!known.is_success() || status != CU_STREAM_CAPTURE_STATUS_NONE).then_some(graph)
}

/// Reads a figure or a switch of the driver's object.
fn own_figure(running: &Running, pool: CUmemoryPool, attribute: CUmemPool_attribute) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: a place as large as the largest attribute.
    let read = unsafe {
        running
            .table
            .cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast())
    };
    read.is_success().then_some(value)
}

/// Tells the engine of a pool, with what the program has said about it so far.
fn register(running: &Running, pool: CUmemoryPool, index: usize, max_size: u64) {
    // Switches are words of 32 bits.
    let switch =
        |attribute| own_figure(running, pool, attribute).is_none_or(|value| value & u64::from(u32::MAX) != 0);
    let facts = PoolFacts {
        max_size,
        release_threshold: own_figure(running, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD).unwrap_or(0),
        opportunistic: switch(CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC),
        dependencies: switch(CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES),
    };
    running.engine.pool_register(pool.0 as u64, index, facts);
}

/// A pool that the engine does not know: makes it known if it is one of ours. Else gives the driver's handle.
fn meet(running: &Running, which: WhichPool) -> Result<(), Option<CUmemoryPool>> {
    let (pool, current) = match which {
        WhichPool::Current(index) => {
            let ordinal = running.by_index(index).ok_or(None)?.ordinal;
            let mut pool = CUmemoryPool::NULL;
            // SAFETY: a valid place for the answer.
            let found = unsafe { running.table.cuDeviceGetMemPool(&raw mut pool, ordinal) };
            if !found.is_success() {
                return Err(None);
            }
            (pool, Some((index, ordinal)))
        }
        WhichPool::Handle(handle) => (CUmemoryPool(usize::try_from(handle).map_err(|_| None)?), None),
    };
    let made = held(&MADE).as_ref().and_then(|made| made.get(&pool.0).copied());
    let (device, max_size) = match made {
        Some(made) => made,
        None => (
            default_of(running, pool, current.map(|(_, ordinal)| ordinal)).ok_or(Some(pool))?,
            0,
        ),
    };
    let index = running
        .index_of(device)
        .or_else(|| running.attach(device, None))
        .ok_or(Some(pool))?;
    register(running, pool, index, max_size);
    if let Some((current, _)) = current {
        running.engine.pool_set_current(current, Some(pool.0 as u64));
    }
    Ok(())
}

/// The device whose default pool it is, of those that have contexts.
fn default_of(running: &Running, pool: CUmemoryPool, hint: Option<CUdevice>) -> Option<CUdevice> {
    let devices = hint.map_or_else(|| running.ordinals(), |device| vec![device]);
    devices.into_iter().find(|&device| {
        let mut default = CUmemoryPool::NULL;
        // SAFETY: a valid place for the answer.
        let found = unsafe { running.table.cuDeviceGetDefaultMemPool(&raw mut default, device) };
        found.is_success() && default == pool
    })
}

/// Who serves an allocation.
enum Served {
    Ours(u64),
    Code(CUresult),
    /// The driver, and how it is counted.
    Driver(Counted),
}

/// How memory of the driver is counted.
#[derive(Clone, Copy)]
enum Counted {
    Not,
    /// By its address.
    Piece(usize),
    /// With the graph that is captured.
    Graph(usize, CUgraph),
    /// With its pool, by what that reserves.
    Pool(usize, CUmemoryPool),
}

fn allocate(
    running: &Running,
    pool: Option<CUmemoryPool>,
    stream: CUstream,
    per_thread: bool,
    size: usize,
) -> Option<Served> {
    let key = stream_key(running, stream, per_thread)?;
    let stream = if key.thread != 0 {
        CU_STREAM_PER_THREAD
    } else {
        stream
    };
    if let Some(graph) = captured(running, stream) {
        return Some(Served::Driver(Counted::Graph(key.device, graph)));
    }
    let which = pool.map_or(WhichPool::Current(key.device), |pool| {
        WhichPool::Handle(pool.0 as u64)
    });
    let mut result = running.engine.pool_alloc(which, &key, size as u64);
    if result == Err(PoolError::Unknown) {
        match meet(running, which) {
            Ok(()) => result = running.engine.pool_alloc(which, &key, size as u64),
            Err(Some(foreign)) => return Some(Served::Driver(Counted::Pool(key.device, foreign))),
            Err(None) => {}
        }
    }
    Some(match result {
        Ok(ptr) => Served::Ours(ptr),
        Err(PoolError::Full) => Served::Code(CUresult::ERROR_OUT_OF_MEMORY),
        // More than there are addresses: the driver says that there is no room.
        Err(PoolError::Alloc(AllocError::Size(_))) => Served::Code(CUresult::ERROR_OUT_OF_MEMORY),
        Err(PoolError::Alloc(error)) => match bridge::alloc_code(error) {
            Some(code) => Served::Code(code),
            None => Served::Driver(Counted::Piece(key.device)),
        },
        Err(PoolError::Unknown) => Served::Driver(Counted::Piece(key.device)),
    })
}

/// Counts memory before the driver is asked for it.
fn before(counted: Counted, size: usize) -> Result<Option<external::Piece>, CUresult> {
    let (device, kind) = match counted {
        Counted::Not => return Ok(None),
        Counted::Graph(device, _) => (device, ExternalKind::Graph),
        Counted::Piece(device) | Counted::Pool(device, _) => (device, ExternalKind::AsyncPool),
    };
    external::reserve(kind, Some(size as u64), |_| Some(device))
}

/// After the driver was asked.
fn after(counted: Counted, piece: Option<external::Piece>, ptr: Option<u64>) {
    let id = match (counted, ptr) {
        (Counted::Piece(_), Some(ptr)) => Some(external::Id::Pointer(ptr)),
        _ => None,
    };
    match (counted, ptr, piece) {
        (Counted::Graph(_, graph), Some(ptr), Some(piece)) => graphs::took(graph, ptr, piece),
        _ => external::settle(piece, id),
    }
    if let (Counted::Pool(device, pool), Some(_)) = (counted, ptr) {
        with(|running| {
            held(&FOREIGN)
                .get_or_insert_default()
                .entry(pool.0)
                .or_insert((device, 0));
            FOREIGN_COUNT.fetch_add(1, Ordering::AcqRel);
            recount(running, Some(pool));
            Some(())
        });
    }
}

/// Counts the driver's own pools anew, by what they reserve.
fn recount(running: &Running, only: Option<CUmemoryPool>) {
    let pools: Vec<(usize, usize)> = held(&FOREIGN)
        .iter()
        .flatten()
        .filter(|(pool, _)| only.is_none_or(|only| only.0 == **pool))
        .map(|(pool, (device, _))| (*pool, *device))
        .collect();
    for (pool, device) in pools {
        let now = own_figure(running, CUmemoryPool(pool), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT).unwrap_or(0);
        let before = match held(&FOREIGN).as_mut().and_then(|pools| pools.get_mut(&pool)) {
            Some((_, counted)) => core::mem::replace(counted, now),
            None => continue,
        };
        if now < before {
            running.release(device, ExternalKind::AsyncPool, before - now);
        } else if now > before
            && running
                .reserve(device, ExternalKind::AsyncPool, now - before)
                .is_err()
            && let Some((_, counted)) = held(&FOREIGN).as_mut().and_then(|pools| pools.get_mut(&pool))
        {
            // The driver took more than the limit allows, and it is there: what cannot be counted is not given back later either.
            *counted = before;
        }
    }
}

/// Something of the driver's own pools was freed, perhaps.
fn foreign_shrank() {
    if FOREIGN_COUNT.load(Ordering::Acquire) != 0 {
        with(|running| {
            recount(running, None);
            Some(())
        });
    }
}

macro_rules! allocate {
    ($($name:ident $per_thread:literal ($($pool:ident)?);)*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            dptr: *mut CUdeviceptr, bytesize: usize $(, $pool: CUmemoryPool)?, hStream: CUstream
        ) -> CUresult {
            let mut counted = Counted::Not;
            if !dptr.is_null() {
                let pool = None::<CUmemoryPool>;
                $( let pool = pool.or(Some($pool)); )?
                // No bytes are given a place by the driver, like one byte; unlike `cuMemAlloc`.
                match with(|running| allocate(running, pool, hStream, $per_thread, bytesize.max(1))) {
                    Some(Served::Ours(ptr)) => {
                        // SAFETY: not null, and the program's place for the answer.
                        unsafe { dptr.write(CUdeviceptr(ptr)) };
                        return CUresult::SUCCESS;
                    }
                    Some(Served::Code(code)) => return code,
                    Some(Served::Driver(how)) => counted = how,
                    None => {}
                }
            }
            let piece = match before(counted, bytesize) {
                Ok(piece) => piece,
                Err(code) => return code,
            };
            // SAFETY: the program's own call.
            let result = unsafe { real::$name(dptr, bytesize $(, $pool)?, hStream) };
            if !matches!(counted, Counted::Not) {
                // SAFETY: the driver succeeded, so that it has written this place.
                let ptr = result.is_success().then(|| unsafe { dptr.read() }.0);
                after(counted, piece, ptr);
            }
            result
        }
    )*};
}
allocate! {
    cuMemAllocAsync false ();
    cuMemAllocAsync_ptsz true ();
    cuMemAllocFromPoolAsync false (pool);
    cuMemAllocFromPoolAsync_ptsz true (pool);
}

/// Frees memory of a pool of ours in the order of a stream; `None` if it is not.
pub(crate) fn free_async(running: &Running, ptr: u64, stream: CUstream) -> Option<CUresult> {
    let Some(key) = stream_key(running, stream, false) else {
        // No stream that could be used, so nothing is freed. Memory of others is the driver's to refuse.
        return running
            .lookup(ptr)
            .filter(|found| found.pool != 0)
            .map(|_| CUresult::ERROR_INVALID_HANDLE);
    };
    if captured(running, stream).is_some() {
        // Only what the same capture allocated can be freed in it, and that is the driver's.
        return running
            .lookup(ptr)
            .filter(|found| found.pool != 0)
            .map(|_| CUresult::ERROR_INVALID_VALUE);
    }
    let freed = running.engine.pool_free(ptr, Some(&key))?;
    Some(match freed {
        Ok(()) => CUresult::SUCCESS,
        Err(_) => CUresult::ERROR_INVALID_VALUE,
    })
}

/// Frees memory of a pool of ours by the plain call, which for such memory waits for nothing; `None` if it is not.
pub(crate) fn free_plainly(running: &Running, ptr: u64) -> Option<CUresult> {
    Some(match running.engine.pool_free(ptr, None)? {
        Ok(()) => CUresult::SUCCESS,
        Err(_) => CUresult::ERROR_INVALID_VALUE,
    })
}

/// The driver freed memory that is not ours.
pub(crate) fn freed_by_driver() {
    foreign_shrank();
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemPoolCreate(
    pool: *mut CUmemoryPool,
    poolProps: *const CUmemPoolProps,
) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMemPoolCreate(pool, poolProps) };
    if result.is_success() {
        with(|_| {
            // SAFETY: the driver accepted both.
            let (pool, props) = unsafe { (pool.read(), poolProps.read()) };
            let ours = props.allocType == CU_MEM_ALLOCATION_TYPE_PINNED
                && props.handleTypes == CU_MEM_HANDLE_TYPE_NONE
                && props.location.type_ == CU_MEM_LOCATION_TYPE_DEVICE;
            if ours {
                let device = CUdevice(props.location.u.cast_signed());
                let max_size = (props.maxSize as u64)
                    .checked_next_multiple_of(GRANULE)
                    .unwrap_or(0);
                held(&MADE)
                    .get_or_insert_default()
                    .insert(pool.0, (device, max_size));
            }
            Some(())
        });
    }
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemPoolDestroy(pool: CUmemoryPool) -> CUresult {
    // Before the driver may give the handle to another pool. One that it refuses is met again.
    let known = with(|running| {
        let made = held(&MADE).as_mut().and_then(|made| made.remove(&pool.0));
        if made.is_some() {
            running.engine.pool_destroy(pool.0 as u64);
        }
        made
    });
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMemPoolDestroy(pool) };
    if !result.is_success()
        && let Some(known) = known
    {
        held(&MADE).get_or_insert_default().insert(pool.0, known);
    }
    if result.is_success() && FOREIGN_COUNT.load(Ordering::Acquire) != 0 {
        with(|running| {
            let (device, counted) = held(&FOREIGN).as_mut()?.remove(&pool.0)?;
            running.release(device, ExternalKind::AsyncPool, counted);
            Some(())
        });
    }
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemPoolTrimTo(
    pool: CUmemoryPool,
    minBytesToKeep: usize,
) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMemPoolTrimTo(pool, minBytesToKeep) };
    if result.is_success() {
        with(|running| Some(running.engine.pool_trim(pool.0 as u64, minBytesToKeep as u64)));
        foreign_shrank();
    }
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemPoolSetAttribute(
    pool: CUmemoryPool,
    attr: CUmemPool_attribute,
    value: *mut c_void,
) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMemPoolSetAttribute(pool, attr, value) };
    if result.is_success() {
        with(|running| {
            let (engine, handle) = (&running.engine, pool.0 as u64);
            // SAFETY: the driver accepted the place for this attribute.
            let switch = || unsafe { value.cast::<i32>().read_unaligned() } != 0;
            match attr {
                CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => {
                    // SAFETY: as above.
                    let bytes = unsafe { value.cast::<u64>().read_unaligned() };
                    engine.pool_change(handle, |facts| facts.release_threshold = bytes);
                }
                CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC => {
                    let on = switch();
                    engine.pool_change(handle, |facts| facts.opportunistic = on);
                }
                CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
                    let on = switch();
                    engine.pool_change(handle, |facts| facts.dependencies = on);
                }
                CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => {
                    engine.pool_reset_high(handle, true);
                }
                CU_MEMPOOL_ATTR_USED_MEM_HIGH => {
                    engine.pool_reset_high(handle, false);
                }
                _ => {}
            }
            Some(())
        });
    }
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemPoolGetAttribute(
    pool: CUmemoryPool,
    attr: CUmemPool_attribute,
    value: *mut c_void,
) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMemPoolGetAttribute(pool, attr, value) };
    if result.is_success() {
        with(|running| {
            let figures = running.engine.pool_figures(pool.0 as u64)?;
            let ours = match attr {
                CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT => figures.reserved,
                CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => figures.reserved_high,
                CU_MEMPOOL_ATTR_USED_MEM_CURRENT => figures.used,
                CU_MEMPOOL_ATTR_USED_MEM_HIGH => figures.used_high,
                _ => return None,
            };
            let place = value.cast::<u64>();
            // SAFETY: the driver has just written this place. What it has itself in that pool is from before or besides us.
            unsafe { place.write_unaligned(place.read_unaligned().saturating_add(ours)) };
            Some(())
        });
    }
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemPoolSetAccess(
    pool: CUmemoryPool,
    map: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    // Through the gate: access to memory that is on its way out would be set on nothing.
    let passage = crate::barrier::enter();
    if let crate::barrier::Passage::Refused(code) = passage {
        return code;
    }
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMemPoolSetAccess(pool, map, count) };
    if result.is_success() {
        with(|running| {
            let figures = running.engine.pool_figures(pool.0 as u64);
            if figures.is_none() {
                let _ = meet(running, WhichPool::Handle(pool.0 as u64));
            }
            let owner = running
                .engine
                .pool_device(pool.0 as u64)
                .and_then(|index| running.by_index(index))?
                .ordinal;
            for index in 0..count {
                // SAFETY: the driver has read this many entries.
                let one = unsafe { map.add(index).read() };
                // A device that may use one pool may use all of that device's memory of ours: nothing is ever taken from it.
                if one.location.type_ == CU_MEM_LOCATION_TYPE_DEVICE
                    && one.flags != CU_MEM_ACCESS_FLAGS_PROT_NONE
                {
                    running.peers(owner, CUdevice(one.location.u.cast_signed()));
                }
            }
            Some(())
        });
    }
    crate::barrier::leave(passage);
    result
}

/// The pool of a device is another one now, perhaps: it is asked about when it is needed.
fn changed(device: CUdevice) {
    with(|running| {
        running.engine.pool_set_current(running.index_of(device)?, None);
        Some(())
    });
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuDeviceSetMemPool(dev: CUdevice, pool: CUmemoryPool) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuDeviceSetMemPool(dev, pool) };
    changed(dev);
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemSetMemPool(
    location: *mut CUmemLocation,
    type_: CUmemAllocationType,
    pool: CUmemoryPool,
) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMemSetMemPool(location, type_, pool) };
    if result.is_success() {
        // SAFETY: the driver accepted the place.
        let location = unsafe { location.read() };
        if location.type_ == CU_MEM_LOCATION_TYPE_DEVICE {
            changed(CUdevice(location.u.cast_signed()));
        }
    }
    result
}

/// Before the program waits: what was freed so far, if that is of interest.
#[inline]
fn mark() -> Option<u64> {
    bridge::running()?.engine.pool_mark()
}

/// The program has waited.
#[cold]
fn waited(mark: u64, what: impl FnOnce(&Running) -> Option<Waited>) {
    with(|running| {
        running.engine.pool_waited(mark, &what(running)?);
        Some(())
    });
    foreign_shrank();
}

macro_rules! wait {
    ($($name:ident($($parameter:ident: $ty:ty)?) |$running:ident| $what:expr;)*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name($($parameter: $ty)?) -> CUresult {
            let mark = mark();
            // SAFETY: the program's own call.
            let result = unsafe { real::$name($($parameter)?) };
            if let Some(mark) = mark && result.is_success() {
                waited(mark, |$running| Some($what));
            }
            result
        }
    )*};
}
wait! {
    cuCtxSynchronize() |running| Waited::Context(running.current_context()?.0 as u64);
    cuCtxSynchronize_v2(ctx: CUcontext) |running| match ctx {
        CUcontext::NULL => Waited::Context(running.current_context()?.0 as u64),
        ctx => Waited::Context(ctx.0 as u64),
    };
    cuStreamSynchronize(hStream: CUstream) |running| Waited::Stream(stream_key(running, hStream, false)?);
    cuStreamSynchronize_ptsz(hStream: CUstream) |running| Waited::Stream(stream_key(running, hStream, true)?);
    cuEventSynchronize(hEvent: CUevent) |_running| Waited::Event;
}

/// Before a stream is destroyed: the last moment at which it can be marked.
fn goes(stream: CUstream) {
    if stream.is_null() || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD {
        return;
    }
    with(|running| {
        let known = STREAMS
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&stream.0);
        if known.is_some() {
            running.engine.stream_goes(stream.0 as u64);
        }
        Some(())
    });
}

macro_rules! destroy_stream {
    ($($name:ident)*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(hStream: CUstream) -> CUresult {
            goes(hStream);
            // SAFETY: the program's own call.
            let result = unsafe { real::$name(hStream) };
            capture::stream_destroyed(hStream, result);
            result
        }
    )*};
}
destroy_stream! { cuStreamDestroy cuStreamDestroy_v2 }
