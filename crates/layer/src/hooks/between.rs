//! Copies that use another device's memory than that of the device that makes them, without access to it.
//!
//! With memory of `cuMemAlloc` the driver makes such copies, by way of the host if need be; with mapped memory, which ours is, it
//! refuses them. It takes the form that names a context for each side. Peer access for everybody would let them through too, but then
//! kernels could reach what the program never opened, and every map would cost more.
//!
//! | sides | becomes |
//! | --- | --- |
//! | two of devices | `cuMemcpyPeer*`, `cuMemcpy3DPeer*` with the contexts of the allocations, in the same stream |
//! | one of the host's, synchronous | the same call, in the context of the memory, between two waits |
//! | one of the host's, in a stream | the same call in a stream of ours there, between two events; not in a capture |
//! | of a batch | each by itself, for the order within a batch is open |
//!
//! Whatever the driver's own rules refuse (memory that the program mapped itself) it still refuses: one side has to be ours. Nodes of graphs
//! that are not captured, and `cuMemcpy3DBatchAsync`, are as they are.

use ebb_abi::*;
use ebb_cuda::Scope;

use crate::barrier;
use crate::bridge::Running;
use crate::hooks::{capture, share, with};
use crate::symbols::real;

/// Whose stream a copy is put into.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    /// The default stream: the thread's own, or the context's.
    Now { per_thread: bool },
    /// A stream of the program; a null one is the default.
    Stream { stream: CUstream, per_thread: bool },
}

impl Order {
    pub(crate) const LEGACY: Self = Self::Now { per_thread: false };
    pub(crate) const THREAD: Self = Self::Now { per_thread: true };

    pub(crate) const fn legacy(stream: CUstream) -> Self {
        Self::Stream {
            stream,
            per_thread: false,
        }
    }

    pub(crate) const fn thread(stream: CUstream) -> Self {
        Self::Stream {
            stream,
            per_thread: true,
        }
    }

    /// The stream by a handle that means the same in every call.
    fn stream(self) -> CUstream {
        match self {
            Self::Stream { stream, .. } if !stream.is_null() => stream,
            Self::Now { per_thread } | Self::Stream { per_thread, .. } => {
                if per_thread {
                    CU_STREAM_PER_THREAD
                } else {
                    CU_STREAM_LEGACY
                }
            }
        }
    }
}

/// One side of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    At(u64),
    /// Named as the host's, or nobody's.
    Host,
    /// An array.
    Array,
}

/// How a copy gets there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// With the contexts of both sides.
    Peer { to: CUcontext, from: CUcontext },
    /// In the context of the memory.
    There(CUcontext),
}

/// What is known of a side.
#[derive(Clone, Copy)]
enum Place {
    Ours { device: usize, context: CUcontext },
    Device(CUcontext),
    Host,
}

/// A context on the device of memory of ours: the one that it was made in, if it lives.
fn context_of(running: &Running, device: usize, made_in: u64) -> Option<CUcontext> {
    let contexts = running.contexts_of(device);
    let owner = contexts.iter().find(|context| context.0 as u64 == made_in);
    owner.or(contexts.first()).copied()
}

fn place(running: &Running, side: Side, here: CUcontext) -> Option<Place> {
    let address = match side {
        Side::Host => return Some(Place::Host),
        Side::Array => return Some(Place::Device(here)),
        Side::At(address) => address,
    };
    if let Some(allocation) = running.lookup(address) {
        return Some(Place::Ours {
            device: allocation.device,
            context: context_of(running, allocation.device, allocation.owner)?,
        });
    }
    let (mut kind, mut managed, mut device) = (0_u32, 0_u32, 0_i32);
    let ask = |attribute, to: *mut core::ffi::c_void| {
        // SAFETY: a place for the answer of that attribute's width, which each caller below has.
        unsafe { real::cuPointerGetAttribute(to, attribute, CUdeviceptr(address)) }.is_success()
    };
    let known = ask(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (&raw mut kind).cast());
    if !known || kind != CU_MEMORYTYPE_DEVICE.0 {
        return Some(Place::Host);
    }
    if ask(CU_POINTER_ATTRIBUTE_IS_MANAGED, (&raw mut managed).cast()) && managed & 1 != 0 {
        return Some(Place::Host); // Every device reaches it, and so does the host.
    }
    let mut context = CUcontext::NULL;
    if ask(CU_POINTER_ATTRIBUTE_CONTEXT, (&raw mut context).cast()) && !context.is_null() {
        return Some(Place::Device(context));
    }
    // Memory that belongs to no context: any of its device.
    if !ask(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, (&raw mut device).cast()) {
        return None;
    }
    let index = running.index_of(CUdevice(device))?;
    Some(Place::Device(context_of(running, index, 0)?))
}

/// The context that a copy is made in.
fn making(running: &Running, order: Order) -> Option<CUcontext> {
    let stream = order.stream();
    if stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD {
        return running.current_context();
    }
    let mut context = CUcontext::NULL;
    // SAFETY: the program's stream, and a valid place for the answer.
    let known = unsafe { real::cuStreamGetCtx(stream, &raw mut context) };
    (known.is_success() && !context.is_null()).then_some(context)
}

/// How this copy has to be made; `None`: as it is.
fn way(running: &Running, to: Side, from: Side, order: Order) -> Option<Way> {
    let ours = |side| match side {
        Side::At(address) => running.lookup(address),
        Side::Host | Side::Array => None,
    };
    let sides = [ours(to), ours(from)];
    if sides.iter().all(Option::is_none) {
        return None;
    }
    let here = making(running, order)?;
    let device = running.index_of_context(here)?;
    let shut = |other: usize| other != device && !share::reaches(running, device, other);
    if !sides.iter().flatten().any(|side| shut(side.device)) {
        return None;
    }
    match (place(running, to, here)?, place(running, from, here)?) {
        (Place::Host, Place::Host) => None,
        (Place::Host, Place::Ours { context, device }) | (Place::Ours { context, device }, Place::Host)
            if shut(device) =>
        {
            Some(Way::There(context))
        }
        (Place::Host, _) | (_, Place::Host) => None,
        (
            Place::Ours { context: to, .. } | Place::Device(to),
            Place::Ours { context: from, .. } | Place::Device(from),
        ) => Some(Way::Peer { to, from }),
    }
}

/// A copy of so many bytes from one address to another; `None`: to be made as it is. `again` makes it with another stream.
pub(crate) fn line(
    to: u64,
    from: u64,
    bytes: usize,
    order: Order,
    again: impl Fn(CUstream) -> CUresult,
) -> Option<CUresult> {
    if bytes == 0 {
        return None;
    }
    match with(|running| way(running, Side::At(to), Side::At(from), order))? {
        Way::There(context) => there(context, order, again),
        Way::Peer {
            to: to_context,
            from: from_context,
        } => {
            let (to, from) = (CUdeviceptr(to), CUdeviceptr(from));
            // SAFETY: the program's own copy, with contexts that were alive just now.
            Some(unsafe {
                match order {
                    Order::Now { per_thread: false } => {
                        real::cuMemcpyPeer(to, to_context, from, from_context, bytes)
                    }
                    Order::Now { per_thread: true } => {
                        real::cuMemcpyPeer_ptds(to, to_context, from, from_context, bytes)
                    }
                    Order::Stream { .. } => {
                        let stream = order.stream();
                        real::cuMemcpyPeerAsync(to, to_context, from, from_context, bytes, stream)
                    }
                }
            })
        }
    }
}

const fn side(kind: CUmemorytype, device: CUdeviceptr) -> Side {
    match kind {
        CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED => Side::At(device.0),
        CU_MEMORYTYPE_ARRAY => Side::Array,
        _ => Side::Host,
    }
}

/// A copy of a box.
pub(crate) fn shape(
    copy: &CUDA_MEMCPY3D,
    order: Order,
    again: impl Fn(CUstream) -> CUresult,
) -> Option<CUresult> {
    if copy.WidthInBytes == 0 || copy.Height == 0 || copy.Depth == 0 {
        return None;
    }
    let to = side(copy.dstMemoryType, copy.dstDevice);
    let from = side(copy.srcMemoryType, copy.srcDevice);
    match with(|running| way(running, to, from, order))? {
        Way::There(context) => there(context, order, again),
        Way::Peer { to, from } => {
            let copy = with_contexts(copy, to, from);
            // SAFETY: the program's own copy, with contexts that were alive just now.
            Some(unsafe {
                match order {
                    Order::Now { per_thread: false } => real::cuMemcpy3DPeer(&raw const copy),
                    Order::Now { per_thread: true } => real::cuMemcpy3DPeer_ptds(&raw const copy),
                    Order::Stream { .. } => real::cuMemcpy3DPeerAsync(&raw const copy, order.stream()),
                }
            })
        }
    }
}

fn with_contexts(copy: &CUDA_MEMCPY3D, to: CUcontext, from: CUcontext) -> CUDA_MEMCPY3D_PEER {
    let plain = |kind| match kind {
        CU_MEMORYTYPE_UNIFIED => CU_MEMORYTYPE_DEVICE,
        other => other,
    };
    CUDA_MEMCPY3D_PEER {
        srcXInBytes: copy.srcXInBytes,
        srcY: copy.srcY,
        srcZ: copy.srcZ,
        srcLOD: copy.srcLOD,
        srcMemoryType: plain(copy.srcMemoryType),
        srcDevice: copy.srcDevice,
        srcArray: copy.srcArray,
        srcContext: from,
        srcPitch: copy.srcPitch,
        srcHeight: copy.srcHeight,
        dstXInBytes: copy.dstXInBytes,
        dstY: copy.dstY,
        dstZ: copy.dstZ,
        dstLOD: copy.dstLOD,
        dstMemoryType: plain(copy.dstMemoryType),
        dstDevice: copy.dstDevice,
        dstArray: copy.dstArray,
        dstContext: to,
        dstPitch: copy.dstPitch,
        dstHeight: copy.dstHeight,
        WidthInBytes: copy.WidthInBytes,
        Height: copy.Height,
        Depth: copy.Depth,
        ..CUDA_MEMCPY3D_PEER::default()
    }
}

/// A copy of rows, as a box.
pub(crate) fn rows(copy: &CUDA_MEMCPY2D) -> CUDA_MEMCPY3D {
    CUDA_MEMCPY3D {
        srcXInBytes: copy.srcXInBytes,
        srcY: copy.srcY,
        srcMemoryType: copy.srcMemoryType,
        srcDevice: copy.srcDevice,
        srcArray: copy.srcArray,
        srcPitch: copy.srcPitch,
        srcHeight: copy.Height,
        dstXInBytes: copy.dstXInBytes,
        dstY: copy.dstY,
        dstMemoryType: copy.dstMemoryType,
        dstDevice: copy.dstDevice,
        dstArray: copy.dstArray,
        dstPitch: copy.dstPitch,
        dstHeight: copy.Height,
        WidthInBytes: copy.WidthInBytes,
        Height: copy.Height,
        Depth: 1,
        ..CUDA_MEMCPY3D::default()
    }
}

/// Makes a copy in another context than the current one, where it stands in the order of calls.
fn there(context: CUcontext, order: Order, again: impl Fn(CUstream) -> CUresult) -> Option<CUresult> {
    barrier::uncancelled(|| {
        let now = matches!(order, Order::Now { .. });
        if now {
            // What was put into the default stream before comes first. In a capture this is refused, as the copy would be.
            // SAFETY: no pointers; a stream of the current context.
            let waited = unsafe { real::cuStreamSynchronize(order.stream()) };
            if !waited.is_success() {
                return Some(waited);
            }
            return with(|running| Scope::enter(&running.table, context).ok()).map(|_scope| {
                let copied = again(CUstream::NULL);
                if !copied.is_success() {
                    return copied;
                }
                // What follows in the program's own default stream does not wait for this one.
                // SAFETY: no pointers; a stream of the context that is current now.
                unsafe { real::cuStreamSynchronize(order.stream()) }
            });
        }
        capture::without_captures(|| beside(context, order.stream(), again)).flatten()
    })
}

/// The same in a stream: a stream of ours begins behind the program's, and the program's goes on behind ours.
fn beside(context: CUcontext, stream: CUstream, again: impl Fn(CUstream) -> CUresult) -> Option<CUresult> {
    const FLAGS: u32 = CU_EVENT_DISABLE_TIMING.0;
    let running = crate::bridge::running()?;
    let here = making(running, Order::legacy(stream))?;
    let (mut before, mut after, mut ours) = (CUevent::NULL, CUevent::NULL, CUstream::NULL);
    let table = &running.table;
    let ready = {
        let _here = Scope::enter(table, here).ok()?;
        // SAFETY: a valid place for the answer, and the program's stream, whose context is current.
        unsafe {
            table.cuEventCreate(&raw mut before, FLAGS).is_success()
                && table.cuEventRecord(before, stream).is_success()
        }
    };
    let result = Scope::enter(table, context)
        .ok()
        .filter(|_| ready)
        .and_then(|_there| {
            // SAFETY: valid places for the answers, handles of ours, and the program's copy, which reads and writes what it named.
            unsafe {
                let made = real::cuStreamCreate(&raw mut ours, CU_STREAM_NON_BLOCKING.0).is_success()
                    && table.cuEventCreate(&raw mut after, FLAGS).is_success()
                    && table.cuStreamWaitEvent(ours, before, 0).is_success();
                if !made {
                    return None;
                }
                let copied = again(ours);
                if !copied.is_success() {
                    return Some(copied);
                }
                let recorded = table.cuEventRecord(after, ours);
                Some(recorded)
            }
        });
    let result = result.map(|result| {
        if !result.is_success() {
            return result;
        }
        let _here = Scope::enter(table, here);
        // SAFETY: the program's stream and an event of ours.
        unsafe { table.cuStreamWaitEvent(stream, after, 0) }
    });
    // What is destroyed ends when its work has.
    // SAFETY: handles of ours, null where they were not made, used no more.
    unsafe {
        if !ours.is_null() {
            let _ = real::cuStreamDestroy_v2(ours);
        }
        for event in [before, after] {
            if !event.is_null() {
                let _ = table.cuEventDestroy_v2(event);
            }
        }
    }
    result
}

/// A batch: if one of its copies has to be made otherwise, all are made one by one. `one` makes the copy of that number
/// alone, in that stream. The number of the one that failed comes back with the code.
///
/// # Safety
/// The lists have so many elements.
pub(crate) unsafe fn batch(
    to: *const CUdeviceptr,
    from: *const CUdeviceptr,
    sizes: *const usize,
    count: usize,
    order: Order,
    one: impl Fn(usize, CUstream) -> CUresult,
) -> Option<(usize, CUresult)> {
    let stream = order.stream();
    if stream == CU_STREAM_LEGACY || count == 0 || to.is_null() || from.is_null() || sizes.is_null() {
        return None; // The driver refuses it.
    }
    // SAFETY: this function's contract.
    let copy = |at: usize| unsafe { (to.add(at).read().0, from.add(at).read().0, sizes.add(at).read()) };
    with(|running| {
        (0..count)
            .map(copy)
            .any(|(to, from, _)| way(running, Side::At(to), Side::At(from), order).is_some())
            .then_some(())
    })?;
    for at in 0..count {
        let (to, from, bytes) = copy(at);
        let result =
            line(to, from, bytes, order, |stream| one(at, stream)).unwrap_or_else(|| one(at, stream));
        if !result.is_success() {
            return Some((at, result));
        }
    }
    Some((0, CUresult::SUCCESS))
}

/// Which of a batch's attributes is that of its `at`-th copy: the last that begins at or before it. Null if there is none.
///
/// # Safety
/// `firsts` has `count` elements, and so has `attributes`.
pub(crate) unsafe fn attribute_of(
    attributes: *mut CUmemcpyAttributes,
    firsts: *const usize,
    count: usize,
    at: usize,
) -> *mut CUmemcpyAttributes {
    if attributes.is_null() || firsts.is_null() {
        return core::ptr::null_mut();
    }
    // SAFETY: this function's contract.
    let found = (0..count).rev().find(|&n| unsafe { firsts.add(n).read() } <= at);
    // SAFETY: as above.
    found.map_or(core::ptr::null_mut(), |n| unsafe { attributes.add(n) })
}

/// Makes a call of that name otherwise if it has to be: `Some` with its result. Names that are not here: never.
macro_rules! instead {
    (@lines $order:expr, $to:expr, $from:expr, $bytes:expr, |$stream:pat_param| $call:ident ($($argument:ident),*)) => {
        $crate::hooks::between::line($to, $from, $bytes, $order, |$stream| {
            // SAFETY: the program's own copy.
            unsafe { $crate::symbols::real::$call($($argument),*) }
        })
    };
    (cuMemcpy ($to:ident, $from:ident, $n:ident)) => {
        $crate::hooks::between::instead!(@now LEGACY cuMemcpy ($to, $from, $n) $to.0, $from.0)
    };
    (cuMemcpy_ptds ($to:ident, $from:ident, $n:ident)) => {
        $crate::hooks::between::instead!(@now THREAD cuMemcpy_ptds ($to, $from, $n) $to.0, $from.0)
    };
    (cuMemcpyDtoD_v2 ($to:ident, $from:ident, $n:ident)) => {
        $crate::hooks::between::instead!(@now LEGACY cuMemcpyDtoD_v2 ($to, $from, $n) $to.0, $from.0)
    };
    (cuMemcpyDtoD_v2_ptds ($to:ident, $from:ident, $n:ident)) => {
        $crate::hooks::between::instead!(@now THREAD cuMemcpyDtoD_v2_ptds ($to, $from, $n) $to.0, $from.0)
    };
    (cuMemcpyHtoD_v2 ($to:ident, $from:ident, $n:ident)) => {
        $crate::hooks::between::instead!(@now LEGACY cuMemcpyHtoD_v2 ($to, $from, $n) $to.0, $from.addr() as u64)
    };
    (cuMemcpyHtoD_v2_ptds ($to:ident, $from:ident, $n:ident)) => {
        $crate::hooks::between::instead!(@now THREAD cuMemcpyHtoD_v2_ptds ($to, $from, $n) $to.0, $from.addr() as u64)
    };
    (cuMemcpyDtoH_v2 ($to:ident, $from:ident, $n:ident)) => {
        $crate::hooks::between::instead!(@now LEGACY cuMemcpyDtoH_v2 ($to, $from, $n) $to.addr() as u64, $from.0)
    };
    (cuMemcpyDtoH_v2_ptds ($to:ident, $from:ident, $n:ident)) => {
        $crate::hooks::between::instead!(@now THREAD cuMemcpyDtoH_v2_ptds ($to, $from, $n) $to.addr() as u64, $from.0)
    };
    (@now $order:ident $name:ident ($to:ident, $from:ident, $n:ident) $target:expr, $source:expr) => {
        $crate::hooks::between::instead!(
            @lines $crate::hooks::between::Order::$order, $target, $source, $n, |_| $name($to, $from, $n)
        )
    };
    (cuMemcpyAsync ($to:ident, $from:ident, $n:ident, $s:ident)) => {
        $crate::hooks::between::instead!(@later legacy cuMemcpyAsync ($to, $from, $n, $s) $to.0, $from.0)
    };
    (cuMemcpyAsync_ptsz ($to:ident, $from:ident, $n:ident, $s:ident)) => {
        $crate::hooks::between::instead!(@later thread cuMemcpyAsync_ptsz ($to, $from, $n, $s) $to.0, $from.0)
    };
    (cuMemcpyDtoDAsync_v2 ($to:ident, $from:ident, $n:ident, $s:ident)) => {
        $crate::hooks::between::instead!(@later legacy cuMemcpyDtoDAsync_v2 ($to, $from, $n, $s) $to.0, $from.0)
    };
    (cuMemcpyDtoDAsync_v2_ptsz ($to:ident, $from:ident, $n:ident, $s:ident)) => {
        $crate::hooks::between::instead!(@later thread cuMemcpyDtoDAsync_v2_ptsz ($to, $from, $n, $s) $to.0, $from.0)
    };
    (cuMemcpyHtoDAsync_v2 ($to:ident, $from:ident, $n:ident, $s:ident)) => {
        $crate::hooks::between::instead!(
            @later legacy cuMemcpyHtoDAsync_v2 ($to, $from, $n, $s) $to.0, $from.addr() as u64
        )
    };
    (cuMemcpyHtoDAsync_v2_ptsz ($to:ident, $from:ident, $n:ident, $s:ident)) => {
        $crate::hooks::between::instead!(
            @later thread cuMemcpyHtoDAsync_v2_ptsz ($to, $from, $n, $s) $to.0, $from.addr() as u64
        )
    };
    (cuMemcpyDtoHAsync_v2 ($to:ident, $from:ident, $n:ident, $s:ident)) => {
        $crate::hooks::between::instead!(
            @later legacy cuMemcpyDtoHAsync_v2 ($to, $from, $n, $s) $to.addr() as u64, $from.0
        )
    };
    (cuMemcpyDtoHAsync_v2_ptsz ($to:ident, $from:ident, $n:ident, $s:ident)) => {
        $crate::hooks::between::instead!(
            @later thread cuMemcpyDtoHAsync_v2_ptsz ($to, $from, $n, $s) $to.addr() as u64, $from.0
        )
    };
    (@later $order:ident $name:ident ($to:ident, $from:ident, $n:ident, $s:ident) $target:expr, $source:expr) => {
        $crate::hooks::between::instead!(
            @lines $crate::hooks::between::Order::$order($s), $target, $source, $n, |stream| $name($to, $from, $n, stream)
        )
    };
    (cuMemcpyWithAttributesAsync ($to:ident, $from:ident, $n:ident, $a:ident, $s:ident)) => {
        $crate::hooks::between::instead!(
            @lines $crate::hooks::between::Order::legacy($s), $to.0, $from.0, $n,
            |stream| cuMemcpyWithAttributesAsync($to, $from, $n, $a, stream)
        )
    };
    (cuMemcpyWithAttributesAsync_ptsz ($to:ident, $from:ident, $n:ident, $a:ident, $s:ident)) => {
        $crate::hooks::between::instead!(
            @lines $crate::hooks::between::Order::thread($s), $to.0, $from.0, $n,
            |stream| cuMemcpyWithAttributesAsync_ptsz($to, $from, $n, $a, stream)
        )
    };
    (@box $copy:ident, $as_box:expr, $order:expr, |$stream:pat_param| $call:ident ($($argument:ident),*)) => {{
        // SAFETY: null or the program's description of a copy.
        unsafe { $copy.as_ref() }.and_then(|copy| {
            $crate::hooks::between::shape(&$as_box(copy), $order, |$stream| {
                // SAFETY: the program's own copy.
                unsafe { $crate::symbols::real::$call($($argument),*) }
            })
        })
    }};
    (cuMemcpy2D_v2 ($copy:ident)) => { $crate::hooks::between::instead!(@rows LEGACY cuMemcpy2D_v2 $copy) };
    (cuMemcpy2D_v2_ptds ($copy:ident)) => { $crate::hooks::between::instead!(@rows THREAD cuMemcpy2D_v2_ptds $copy) };
    (cuMemcpy2DUnaligned_v2 ($copy:ident)) => {
        $crate::hooks::between::instead!(@rows LEGACY cuMemcpy2DUnaligned_v2 $copy)
    };
    (cuMemcpy2DUnaligned_v2_ptds ($copy:ident)) => {
        $crate::hooks::between::instead!(@rows THREAD cuMemcpy2DUnaligned_v2_ptds $copy)
    };
    (@rows $order:ident $name:ident $copy:ident) => {
        $crate::hooks::between::instead!(
            @box $copy, $crate::hooks::between::rows, $crate::hooks::between::Order::$order, |_| $name($copy)
        )
    };
    (cuMemcpy2DAsync_v2 ($copy:ident, $s:ident)) => {
        $crate::hooks::between::instead!(
            @box $copy, $crate::hooks::between::rows, $crate::hooks::between::Order::legacy($s),
            |stream| cuMemcpy2DAsync_v2($copy, stream)
        )
    };
    (cuMemcpy2DAsync_v2_ptsz ($copy:ident, $s:ident)) => {
        $crate::hooks::between::instead!(
            @box $copy, $crate::hooks::between::rows, $crate::hooks::between::Order::thread($s),
            |stream| cuMemcpy2DAsync_v2_ptsz($copy, stream)
        )
    };
    (cuMemcpy3D_v2 ($copy:ident)) => {
        $crate::hooks::between::instead!(
            @box $copy, Clone::clone, $crate::hooks::between::Order::LEGACY, |_| cuMemcpy3D_v2($copy)
        )
    };
    (cuMemcpy3D_v2_ptds ($copy:ident)) => {
        $crate::hooks::between::instead!(
            @box $copy, Clone::clone, $crate::hooks::between::Order::THREAD, |_| cuMemcpy3D_v2_ptds($copy)
        )
    };
    (cuMemcpy3DAsync_v2 ($copy:ident, $s:ident)) => {
        $crate::hooks::between::instead!(
            @box $copy, Clone::clone, $crate::hooks::between::Order::legacy($s),
            |stream| cuMemcpy3DAsync_v2($copy, stream)
        )
    };
    (cuMemcpy3DAsync_v2_ptsz ($copy:ident, $s:ident)) => {
        $crate::hooks::between::instead!(
            @box $copy, Clone::clone, $crate::hooks::between::Order::thread($s),
            |stream| cuMemcpy3DAsync_v2_ptsz($copy, stream)
        )
    };
    (cuMemcpyBatchAsync_v2 ($t:ident, $f:ident, $z:ident, $c:ident, $a:ident, $i:ident, $k:ident, $s:ident)) => {
        $crate::hooks::between::instead!(@batch legacy cuMemcpyBatchAsync_v2 ($t, $f, $z, $c, $a, $i, $k, $s))
            .map(|(_, code)| code)
    };
    (cuMemcpyBatchAsync_v2_ptsz ($t:ident, $f:ident, $z:ident, $c:ident, $a:ident, $i:ident, $k:ident, $s:ident)) => {
        $crate::hooks::between::instead!(@batch thread cuMemcpyBatchAsync_v2_ptsz ($t, $f, $z, $c, $a, $i, $k, $s))
            .map(|(_, code)| code)
    };
    (cuMemcpyBatchAsync ($t:ident, $f:ident, $z:ident, $c:ident, $a:ident, $i:ident, $k:ident, $fail:ident, $s:ident)) => {
        $crate::hooks::between::failed_at(
            $fail,
            $crate::hooks::between::instead!(
                @batch legacy cuMemcpyBatchAsync ($t, $f, $z, $c, $a, $i, $k, $s) core::ptr::null_mut()
            ),
        )
    };
    (cuMemcpyBatchAsync_ptsz ($t:ident, $f:ident, $z:ident, $c:ident, $a:ident, $i:ident, $k:ident, $fail:ident, $s:ident)) => {
        $crate::hooks::between::failed_at(
            $fail,
            $crate::hooks::between::instead!(
                @batch thread cuMemcpyBatchAsync_ptsz ($t, $f, $z, $c, $a, $i, $k, $s) core::ptr::null_mut()
            ),
        )
    };
    (@batch $order:ident $name:ident
        ($t:ident, $f:ident, $z:ident, $c:ident, $a:ident, $i:ident, $k:ident, $s:ident) $($fail:expr)?) => {{
        let one = |at: usize, stream: CUstream| {
            let mut first = 0_usize;
            // SAFETY: the program's own lists, and a copy that is in them.
            unsafe {
                let attribute = $crate::hooks::between::attribute_of($a, $i, $k, at);
                $crate::symbols::real::$name(
                    $t.add(at), $f.add(at), $z.add(at), 1, attribute, &raw mut first,
                    usize::from(!attribute.is_null()), $($fail,)? stream,
                )
            }
        };
        // SAFETY: the program's own lists, of the length that it says.
        unsafe { $crate::hooks::between::batch($t, $f, $z, $c, $crate::hooks::between::Order::$order($s), one) }
    }};
    ($name:ident $parameters:tt) => { None::<CUresult> };
}
pub(crate) use instead;

/// Tells which copy of a batch failed, as the first version of that call does.
pub(crate) fn failed_at(place: *mut usize, result: Option<(usize, CUresult)>) -> Option<CUresult> {
    let (at, code) = result?;
    if !code.is_success() && !place.is_null() {
        // SAFETY: the program's place for that number.
        unsafe { place.write(at) };
    }
    Some(code)
}
