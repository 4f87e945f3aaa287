//! What frameworks call to have their memory in the pool: C functions, as `include/ebb_pool.h` declares them.
//!
//! They are for a program that has the driver started, and in which this library is preloaded. Where the engine does not run, or will have nothing
//! to do with a device, they pass on to the driver's own allocation, so that the program runs.
//!
//! A stream that is captured gets its blocks from a private pool of the capture ([`private`]). No call here waits for work or records
//! events while any stream is captured, and calls of the driver are made in the relaxed mode, in which they break no capture.

pub(crate) mod private;

use core::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::*;
use ebb_device::Props;
use ebb_layer_core::{FrameworkStats, FrontClass, Order};
use ebb_units::Bytes;

use crate::bridge::{self, Running};
use crate::hooks::{capture, memory, pools, with};
use crate::symbols::real;

/// Blocks that are to be freed when nothing is captured any more: whoever freed them counts on a wait.
static PUT_OFF: Mutex<Vec<u64>> = Mutex::new(Vec::new());

fn put_off() -> MutexGuard<'static, Vec<u64>> {
    PUT_OFF.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In the child of a fork: nothing of the parent's is freed here.
pub(crate) fn forget_in_child() {
    if let Ok(mut put_off) = PUT_OFF.try_lock() {
        put_off.clear();
    }
    private::forget_in_child();
}

/// While it lives, calls of this thread break no capture.
struct Relaxed(Option<CUstreamCaptureMode>);

impl Relaxed {
    fn begin() -> Self {
        if !capture::any() {
            return Self(None);
        }
        let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a place that holds a mode, and gets the one before.
        let changed = unsafe { real::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        Self(changed.is_success().then_some(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        if let Some(mut before) = self.0 {
            // SAFETY: as above.
            let _ = unsafe { real::cuThreadExchangeStreamCaptureMode(&raw mut before) };
        }
    }
}

/// The engine's number of a device by the runtime's; `None` if it is not managed.
fn index(running: &Running, device: c_int) -> Option<usize> {
    if device < 0 {
        return running.here().map(|(index, _)| index);
    }
    let ordinal = CUdevice(device);
    running
        .index_of(ordinal)
        .or_else(|| running.attach(ordinal, None))
}

/// What the memory of a device's pool is made with.
fn props(running: &Running, index: usize) -> Props {
    let known = running.cuda(index).and_then(|cuda| cuda.own_props().ok());
    known.unwrap_or_default()
}

/// In whose order an allocation is used.
fn order(running: &Running, index: usize, stream: CUstream) -> Order {
    let key = pools::stream_key(running, stream, false);
    if let Some(number) = private::of(running, index, stream, key.as_ref()) {
        return Order::Private(number);
    }
    key.map_or(Order::Unknown, Order::Stream)
}

fn allocate(
    size: u64,
    device: c_int,
    patient: bool,
    order: impl FnOnce(&Running, usize) -> Order,
) -> *mut c_void {
    if size == 0 {
        return core::ptr::null_mut();
    }
    let relaxed = Relaxed::begin();
    let answer = with(|running| {
        let index = index(running, device)?;
        let order = order(running, index);
        let made = running
            .engine
            .framework_alloc(index, size, &order, patient, || props(running, index));
        match made {
            Ok(at) => Some(at),
            // Zero is no address: no room, which the driver would not have either.
            Err(error) => (bridge::alloc_code(error) == Some(CUresult::ERROR_OUT_OF_MEMORY)).then(|| {
                // A program that does not look at the answer fails much later, and elsewhere.
                let during = if capture::any() {
                    ", while a graph is captured"
                } else {
                    ""
                };
                running
                    .engine
                    .note(&format!("ebb_pool: no {}{during}: {error}", Bytes(size)));
                0
            }),
        }
    });
    let at = answer.unwrap_or_else(|| plainly(size));
    drop(relaxed);
    core::ptr::without_provenance_mut(usize::try_from(at).unwrap_or(0))
}

/// From the driver, or from what stands for it.
fn plainly(size: u64) -> u64 {
    let Ok(size) = usize::try_from(size) else { return 0 };
    let mut ptr = CUdeviceptr::NULL;
    // SAFETY: a valid place for the answer.
    let result = unsafe { memory::cuMemAlloc_v2(&raw mut ptr, size) };
    if result.is_success() { ptr.0 } else { 0 }
}

fn free(ptr: *mut c_void, device: c_int, order: impl FnOnce(&Running) -> Order) {
    let at = ptr.addr() as u64;
    if at == 0 {
        return;
    }
    let freed = with(|running| {
        let index = running.index_of(CUdevice(device)).unwrap_or(usize::MAX);
        let freed = running.engine.framework_free(index, at, &order(running))?;
        if freed.is_err() {
            running
                .engine
                .note(&format!("ebb_pool: {at:#x} was freed, where no block begins"));
        }
        Some(())
    });
    if freed.is_none() {
        let relaxed = Relaxed::begin();
        // SAFETY: by the contract of these functions, an address that one of them gave: then the plain allocation did.
        let _ = unsafe { memory::cuMemFree_v2(CUdeviceptr(at)) };
        drop(relaxed);
    }
}

/// Allocates for work of a stream: what PyTorch's `CUDAPluggableAllocator` takes. Null if there is no room, after having waited for some.
///
/// # Safety
/// The stream is one of the driver, or null for the default stream.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ebb_pool_alloc(
    size: isize,
    device: c_int,
    stream: CUstream,
) -> *mut c_void {
    let size = u64::try_from(size).unwrap_or(0);
    allocate(size, device, true, |running, index| order(running, index, stream))
}

/// The same for who frees its own caches when there is no room, and tries again: null after a short wait.
///
/// # Safety
/// As [`ebb_pool_alloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ebb_pool_try_alloc(
    size: isize,
    device: c_int,
    stream: CUstream,
) -> *mut c_void {
    let size = u64::try_from(size).unwrap_or(0);
    allocate(size, device, false, |running, index| {
        order(running, index, stream)
    })
}

/// Frees in the order of a stream: what PyTorch's `CUDAPluggableAllocator` takes. The size is not needed.
///
/// # Safety
/// The address came from one of these functions and was not freed; the stream as in [`ebb_pool_alloc`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ebb_pool_free(
    ptr: *mut c_void,
    _size: isize,
    device: c_int,
    stream: CUstream,
) {
    free(ptr, device, |running| {
        pools::stream_key(running, stream, false).map_or(Order::Unknown, Order::Stream)
    });
}

/// Allocates for who knows no streams: what `CuPy`'s `CFunctionAllocator` takes.
#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn ebb_pool_malloc(
    _param: *mut c_void,
    size: usize,
    device: c_int,
) -> *mut c_void {
    free_what_was_put_off();
    allocate(size as u64, device, true, |_, _| Order::Waited)
}

/// Frees that, after waiting for the device as the driver's own free does; while a stream is captured it is put off.
///
/// # Safety
/// The address came from [`ebb_pool_malloc`] and was not freed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ebb_pool_mfree(_param: *mut c_void, ptr: *mut c_void, _device: c_int) {
    free_what_was_put_off();
    free_waiting(ptr.addr() as u64);
}

fn free_what_was_put_off() {
    if capture::any() || put_off().is_empty() {
        return;
    }
    let all = core::mem::take(&mut *put_off());
    for at in all {
        free_waiting(at);
    }
}

fn free_waiting(at: u64) {
    let ptr = core::ptr::without_provenance_mut(usize::try_from(at).unwrap_or(0));
    let ours = with(|running| {
        let (index, _) = running.engine.framework_block(at)?;
        match capture::without_captures(|| running.quiesce(index)) {
            Some(Ok(())) => Some(Order::Waited),
            // The context is lost: nothing uses it any more that anybody could wait for.
            Some(Err(_)) => Some(Order::Unknown),
            None => {
                put_off().push(at);
                None
            }
        }
    });
    match ours {
        Some(order) => free(ptr, -1, |_| order),
        None if put_off().contains(&at) => {}
        None => free(ptr, -1, |_| Order::Waited),
    }
}

/// Another stream uses a block, too (`record_stream`): its free waits for that stream. 0, or -1 if no block begins there.
///
/// # Safety
/// As [`ebb_pool_free`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ebb_pool_record(ptr: *mut c_void, stream: CUstream) -> c_int {
    let known = with(|running| {
        let key = pools::stream_key(running, stream, false)?;
        running
            .engine
            .framework_record(ptr.addr() as u64, &key)
            .then_some(())
    });
    if known.is_some() { 0 } else { -1 }
}

fn indices(running: &Running, device: c_int) -> Vec<usize> {
    if device >= 0 {
        return running.index_of(CUdevice(device)).into_iter().collect();
    }
    let all = running.ordinals().into_iter();
    all.filter_map(|ordinal| running.index_of(ordinal)).collect()
}

/// Gives back what nothing lives in (`empty_cache`), of one device or, with -1, of all: how many bytes.
#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn ebb_pool_trim(device: c_int) -> u64 {
    free_what_was_put_off();
    let relaxed = Relaxed::begin();
    let bytes = with(|running| {
        let of = indices(running, device).into_iter();
        Some(of.map(|index| running.engine.framework_trim(index)).sum())
    });
    drop(relaxed);
    bytes.unwrap_or(0)
}

/// A device's figures, in bytes unless the header says otherwise. It only ever grows, at its end.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Figures {
    requested: u64,
    allocated: u64,
    cached: u64,
    active: u64,
    reserved: u64,
    reserved_peak: u64,
    allocated_peak: u64,
    mapped: u64,
    idle: u64,
    internal_fragmentation: u64,
    external_fragmentation: u64,
    largest_free: u64,
    blocks: u64,
    blocks_total: u64,
    chunks: u64,
    views: u64,
    map_calls: u64,
    unmap_calls: u64,
    created_total: u64,
    released_total: u64,
    refused: u64,
    records: u64,
    shadows: u64,
    meshed_total: u64,
    copied_total: u64,
}

impl From<FrameworkStats> for Figures {
    fn from(stats: FrameworkStats) -> Self {
        let (front, pool) = (stats.front, stats.front.pool);
        Self {
            requested: front.requested,
            allocated: front.allocated,
            cached: front.cached,
            active: pool.active,
            reserved: pool.reserved,
            reserved_peak: pool.reserved_peak,
            allocated_peak: pool.allocated_peak,
            mapped: pool.mapped,
            idle: pool.idle,
            // A block that was kept is asked for with another size the next time, and what is kept was asked for by nobody.
            internal_fragmentation: front.allocated.saturating_sub(front.requested),
            external_fragmentation: pool.external_fragmentation,
            largest_free: pool.largest_free,
            blocks: pool.blocks,
            blocks_total: pool.blocks_total,
            chunks: pool.chunks,
            views: pool.views,
            map_calls: pool.map_calls,
            unmap_calls: pool.unmap_calls,
            created_total: pool.created_total,
            released_total: pool.released_total,
            refused: stats.refused,
            records: pool.records,
            shadows: pool.shadows,
            meshed_total: pool.meshed_total,
            copied_total: pool.copied_total,
        }
    }
}

/// Writes a device's figures, `size` bytes of them at most. How large they are, or 0 if nothing was allocated there.
///
/// # Safety
/// `out` is valid for `size` bytes, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ebb_pool_stats(device: c_int, out: *mut c_void, size: usize) -> usize {
    let stats = with(|running| {
        let index = running.index_of(CUdevice(device))?;
        running.engine.framework_stats(index)
    });
    let Some(stats) = stats else { return 0 };
    let figures = Figures::from(stats);
    let known = size_of::<Figures>();
    if !out.is_null() {
        // SAFETY: not more than either has; plain numbers, in a place that is the caller's.
        unsafe {
            core::ptr::copy_nonoverlapping((&raw const figures).cast::<u8>(), out.cast(), known.min(size))
        };
    }
    known
}

/// Figures of blocks of sizes from one power of two to the next. It only ever grows, at its end: callers say how large theirs are.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct ClassFigures {
    from: u64,
    blocks: u64,
    requested: u64,
    allocated: u64,
    cached: u64,
    made_total: u64,
}

impl From<FrontClass> for ClassFigures {
    fn from(class: FrontClass) -> Self {
        Self {
            from: class.from,
            blocks: class.blocks,
            requested: class.requested,
            allocated: class.allocated,
            cached: class.cached,
            made_total: class.made_total,
        }
    }
}

/// Writes `count` classes of a device at most, the smallest first, `each` bytes apart. How many there are; 0 if nothing was allocated there.
///
/// # Safety
/// `out` is valid for `count` times `each` bytes, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ebb_pool_class_stats(
    device: c_int,
    out: *mut c_void,
    count: usize,
    each: usize,
) -> usize {
    let classes = with(|running| {
        let index = running.index_of(CUdevice(device))?;
        running.engine.framework_classes(index)
    });
    let classes = classes.unwrap_or_default();
    if !out.is_null() {
        let known = size_of::<ClassFigures>().min(each);
        for (number, class) in classes.iter().take(count).enumerate() {
            let figures = ClassFigures::from(*class);
            // SAFETY: number < count, so that these are `known` <= `each` bytes inside what is the caller's; plain numbers.
            unsafe {
                let to = out.cast::<u8>().add(number * each);
                core::ptr::copy_nonoverlapping((&raw const figures).cast::<u8>(), to, known);
            }
        }
    }
    classes.len()
}

/// Peaks begin anew.
#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn ebb_pool_reset_peaks(device: c_int) {
    with(|running| {
        running
            .engine
            .framework_reset_peaks(running.index_of(CUdevice(device))?);
        Some(())
    });
}

/// Writes what lies where into a file, in the form that PyTorch's memory tools read. 0, or -1 if that failed.
///
/// # Safety
/// `path` ends with a zero byte.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ebb_pool_snapshot(device: c_int, path: *const c_char) -> c_int {
    if path.is_null() {
        return -1;
    }
    // SAFETY: by this function's contract.
    let path = unsafe { CStr::from_ptr(path) };
    let written = with(|running| {
        let index = running.index_of(CUdevice(device))?;
        let number = u32::try_from(device).ok()?;
        let bytes = running.engine.framework_snapshot(index, number)?;
        let path = std::path::Path::new(path.to_str().ok()?);
        std::fs::write(path, bytes).ok()
    });
    if written.is_some() { 0 } else { -1 }
}

/// This thread's allocations on a device come from a private pool of that number from here on: nobody else gets its blocks before
/// [`ebb_pool_forget`]. For graphs that are captured with a pool of their own. 0, or -1 if the device is not managed.
#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn ebb_pool_begin(device: c_int, pool: u64) -> c_int {
    let begun = with(|running| {
        private::begin(index(running, device)?, pool);
        Some(())
    });
    if begun.is_some() { 0 } else { -1 }
}

/// They come from the device's pool again.
#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn ebb_pool_end(_device: c_int, _pool: u64) {
    private::end();
}

/// No graph uses that private pool any more: what is free in it is everybody's as soon as the device has been quiet.
#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn ebb_pool_forget(device: c_int, pool: u64) {
    with(|running| {
        private::forget(running, index(running, device)?, pool);
        Some(())
    });
}
