//! Contexts: a process's state on one device. What lives in one dies with it.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::handles::fresh;
use crate::memory::heap::Heap;
use crate::process::{lock, process};
use crate::stream::Stream;

/// What a context's streams and their threads need of it.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) handle: usize,
    pub(crate) ordinal: i32,
    /// The physical index of its device.
    pub(crate) device: u32,
    /// The first error of its work. It stays: every later call in the context answers it.
    pub(crate) error: AtomicU32,
    dying: AtomicBool,
    pub(crate) legacy_handle: AtomicUsize,
    /// How many of its streams are being captured.
    pub(crate) captures: AtomicU32,
    streams: RwLock<Vec<Arc<Stream>>>,
}

impl Shared {
    /// The sticky error, if there is one.
    pub(crate) fn check(&self) -> R {
        match self.error.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(CUresult(code)),
        }
    }

    /// Sets the sticky error, unless there is one already.
    pub(crate) fn fail(&self, code: CUresult) {
        let _ = self
            .error
            .compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Whether the context is being destroyed: work that waits for something must give up.
    pub(crate) fn is_dying(&self) -> bool {
        self.dying.load(Ordering::Acquire)
    }

    pub(crate) fn streams(&self) -> Vec<Arc<Stream>> {
        self.streams
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(crate) fn legacy(&self) -> Option<Arc<Stream>> {
        self.streams
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .first()
            .cloned()
    }

    /// Adds a stream, and forgets those that are over.
    pub(crate) fn add_stream(&self, stream: Arc<Stream>) {
        let mut streams = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|other| !other.is_over());
        streams.push(stream);
    }

    /// Waits for the streams that keep order with the legacy one.
    pub(crate) fn drain_blocking(&self) {
        for stream in self.streams().iter().filter(|stream| stream.is_blocking()) {
            stream.drain();
        }
    }

    /// The streams that keep order with the legacy one and have work left, with their last tickets.
    pub(crate) fn pending_blocking(&self, except: usize) -> Vec<(Arc<Stream>, u64)> {
        self.streams
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .filter(|stream| stream.is_blocking() && stream.handle != except && !stream.is_idle())
            .map(|stream| (Arc::clone(stream), stream.submitted()))
            .collect()
    }

    pub(crate) fn blocking_idle(&self) -> bool {
        self.streams()
            .iter()
            .filter(|stream| stream.is_blocking())
            .all(|stream| stream.is_idle())
    }

    /// Waits for everything.
    pub(crate) fn drain(&self) {
        for stream in self.streams() {
            stream.drain();
        }
    }
}

/// A context.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) shared: Arc<Shared>,
    legacy: Arc<Stream>,
    flags: AtomicU32,
    primary: bool,
    /// A part of the primary context, with streams of its own.
    green: bool,
    id: u64,
    /// Blocks of small allocations.
    pub(crate) heap: Mutex<Heap>,
    limits: Mutex<Vec<(u32, usize)>>,
    cache_config: AtomicU32,
    shared_memory_config: AtomicU32,
    /// Contexts whose memory this one may access, by handle.
    peers: Mutex<Vec<usize>>,
    /// What it took besides: local memory for its kernels, buffers for printing and for the device's own heap beyond their
    /// defaults, and its modules.
    local_bytes: Mutex<u64>,
    buffers: Mutex<[u64; 2]>,
    pub(crate) module_bytes: AtomicU64,
}

/// What limits are before the program sets them; this much is in a context's own cost.
const DEFAULT_STACK: usize = 1 << 10;
const DEFAULT_PRINTF: usize = 1 << 20;
const DEFAULT_HEAP: usize = 8 << 20;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// This thread's stack of contexts; the last is current.
    static STACK: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

/// The calling thread's context.
///
/// # Errors
/// INVALID_CONTEXT if there is none, CONTEXT_IS_DESTROYED if it was destroyed under the thread.
pub(crate) fn current() -> Result<Arc<Context>, CUresult> {
    let context = STACK
        .try_with(|stack| stack.borrow().last().cloned())
        .map_err(|_| CUresult::ERROR_DEINITIALIZED)?
        .ok_or(CUresult::ERROR_INVALID_CONTEXT)?;
    if context.shared.is_dying() {
        return Err(CUresult::ERROR_CONTEXT_IS_DESTROYED);
    }
    Ok(context)
}

/// The context of a handle.
pub(crate) fn by_handle(handle: CUcontext) -> Result<Arc<Context>, CUresult> {
    process()
        .contexts
        .get(handle.0)
        .ok_or(CUresult::ERROR_INVALID_CONTEXT)
}

impl Context {
    pub(crate) fn legacy_stream(&self) -> Arc<Stream> {
        Arc::clone(&self.legacy)
    }

    /// Makes a context and charges for it.
    fn new(ordinal: i32, flags: u32, primary: bool, handle: usize) -> Result<Arc<Self>, CUresult> {
        let process = process();
        let device = process.physical(ordinal)?;
        if !process
            .machine
            .charge_context(device, process.machine.config().context_cost())
        {
            return Err(CUresult::ERROR_OUT_OF_MEMORY);
        }
        Ok(Self::make(ordinal, device, flags, [primary, false], handle))
    }

    /// Makes a part of a device's primary context.
    pub(crate) fn green(ordinal: i32, handle: usize) -> Result<Arc<Self>, CUresult> {
        let device = process().physical(ordinal)?;
        Ok(Self::make(ordinal, device, 0, [false, true], handle))
    }

    fn make(ordinal: i32, device: u32, flags: u32, [primary, green]: [bool; 2], handle: usize) -> Arc<Self> {
        let process = process();
        let shared = Arc::new(Shared {
            handle,
            ordinal,
            device,
            error: AtomicU32::new(0),
            dying: AtomicBool::new(false),
            legacy_handle: AtomicUsize::new(0),
            captures: AtomicU32::new(0),
            streams: RwLock::default(),
        });
        let legacy = Stream::new(Arc::clone(&shared), 0, 0);
        shared.legacy_handle.store(legacy.handle, Ordering::Release);
        shared.add_stream(Arc::clone(&legacy));
        let context = Arc::new(Self {
            shared,
            legacy,
            flags: AtomicU32::new(flags),
            primary,
            green,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            heap: Mutex::default(),
            limits: Mutex::default(),
            cache_config: AtomicU32::new(0),
            shared_memory_config: AtomicU32::new(0),
            peers: Mutex::default(),
            local_bytes: Mutex::default(),
            buffers: Mutex::default(),
            module_bytes: AtomicU64::new(0),
        });
        process.contexts.insert(handle, Arc::clone(&context));
        context
    }

    /// Ends it, and takes it off the calling thread.
    pub(crate) fn end(self: &Arc<Self>) {
        let _ = STACK.try_with(|stack| {
            let mut stack = stack.borrow_mut();
            if stack.last().is_some_and(|top| Arc::ptr_eq(top, self)) {
                stack.pop();
            }
        });
        self.destroy();
    }

    /// What it costs its device, without what was allocated in it.
    pub(crate) fn held_bytes(&self) -> u64 {
        let own = if self.green {
            0
        } else {
            process().machine.config().context_cost()
        };
        let buffers: u64 = lock(&self.buffers).iter().sum();
        own + buffers + *lock(&self.local_bytes) + self.module_bytes.load(Ordering::Acquire)
    }

    /// Makes room for the local memory of a kernel: as much as all threads that can run at once need. It only grows.
    ///
    /// # Errors
    /// OUT_OF_MEMORY if the device has no room for it.
    pub(crate) fn ensure_local(&self, bytes_per_thread: u64) -> R {
        let stack = lock(&self.limits)
            .iter()
            .find(|(name, _)| *name == CU_LIMIT_STACK_SIZE.0)
            .map_or(0, |(_, value)| *value as u64);
        // The default stack is in the context's own cost.
        let beyond = bytes_per_thread.max(stack).saturating_sub(DEFAULT_STACK as u64);
        let needed = beyond.next_multiple_of(16) * crate::device::RESIDENT_THREADS;
        if needed == 0 {
            return Ok(());
        }
        let mut held = lock(&self.local_bytes);
        if needed > *held {
            let more = needed - *held;
            let machine = process().machine;
            let device = self.shared.device;
            let got = machine.charge_context(device, more)
                || (crate::pool::give_back_kept(Some(device)) && machine.charge_context(device, more));
            if !got {
                return Err(CUresult::ERROR_OUT_OF_MEMORY);
            }
            *held = needed;
        }
        Ok(())
    }

    /// Gives a buffer the size that the program wants beyond its default.
    fn resize(&self, which: usize, bytes: u64) -> R {
        let mut buffers = lock(&self.buffers);
        let (machine, device, held) = (process().machine, self.shared.device, buffers[which]);
        if bytes > held && !machine.charge_context(device, bytes - held) {
            return Err(CUresult::ERROR_OUT_OF_MEMORY);
        }
        if bytes < held {
            machine.credit_context(device, held - bytes);
        }
        buffers[which] = bytes;
        Ok(())
    }

    /// Takes what a module costs.
    pub(crate) fn charge_module(&self, bytes: u64) -> R {
        if bytes == 0 {
            return Ok(());
        }
        if !process().machine.charge_context(self.shared.device, bytes) {
            return Err(CUresult::ERROR_OUT_OF_MEMORY);
        }
        self.module_bytes.fetch_add(bytes, Ordering::AcqRel);
        Ok(())
    }

    /// Gives back what a module cost.
    pub(crate) fn credit_module(&self, bytes: u64) {
        if bytes > 0 {
            self.module_bytes.fetch_sub(bytes, Ordering::AcqRel);
            process().machine.credit_context(self.shared.device, bytes);
        }
    }

    /// Ends a context: its work stops, and everything inside is freed.
    fn destroy(&self) {
        let process = process();
        self.shared.dying.store(true, Ordering::Release);
        self.shared.drain();
        for stream in self.shared.streams() {
            stream.close();
        }
        self.shared
            .streams
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        let handle = self.shared.handle;
        process
            .streams
            .remove_where(|stream| stream.context.handle == handle);
        process.events.remove_where(|event| event.context == handle);
        process.modules.remove_where(|module| module.context == handle);
        process
            .functions
            .remove_where(|function| function.context == handle);
        // Memory belongs to the primary context.
        if !self.green {
            crate::ipc::free_context(handle);
            crate::memory::alloc::free_context(self);
            crate::memory::array::free_context(handle);
            crate::memory::host::free_context(handle);
        }
        process.contexts.remove(handle);
        process
            .machine
            .credit_context(self.shared.device, self.held_bytes());
    }
}

fn push(context: Arc<Context>) {
    let _ = STACK.try_with(|stack| stack.borrow_mut().push(context));
}

fn pop() -> Option<Arc<Context>> {
    STACK.try_with(|stack| stack.borrow_mut().pop()).ok().flatten()
}

pub(crate) fn cuCtxCreate_v2(c: &Caller, pctx: *mut CUcontext, flags: u32, dev: CUdevice) -> R {
    if pctx.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let context = Context::new(dev.0, flags, false, fresh())?;
    c.put(pctx, CUcontext(context.shared.handle))?;
    push(context);
    Ok(())
}

pub(crate) fn cuCtxCreate_v3(
    c: &Caller,
    pctx: *mut CUcontext,
    _paramsArray: *mut CUexecAffinityParam,
    numParams: i32,
    flags: u32,
    dev: CUdevice,
) -> R {
    if numParams != 0 {
        return Err(CUresult::ERROR_UNSUPPORTED_EXEC_AFFINITY);
    }
    cuCtxCreate_v2(c, pctx, flags, dev)
}

pub(crate) fn cuCtxCreate_v4(
    c: &Caller,
    pctx: *mut CUcontext,
    ctxCreateParams: *mut CUctxCreateParams,
    flags: u32,
    dev: CUdevice,
) -> R {
    if !ctxCreateParams.is_null() && c.get(ctxCreateParams.cast_const())?.numExecAffinityParams != 0 {
        return Err(CUresult::ERROR_UNSUPPORTED_EXEC_AFFINITY);
    }
    cuCtxCreate_v2(c, pctx, flags, dev)
}

pub(crate) fn cuCtxDestroy_v2(_: &Caller, ctx: CUcontext) -> R {
    let context = by_handle(ctx)?;
    if context.primary || context.green {
        return Err(CUresult::ERROR_INVALID_CONTEXT);
    }
    context.end();
    Ok(())
}

pub(crate) fn cuCtxPushCurrent_v2(_: &Caller, ctx: CUcontext) -> R {
    push(by_handle(ctx)?);
    Ok(())
}

pub(crate) fn cuCtxPopCurrent_v2(c: &Caller, pctx: *mut CUcontext) -> R {
    let context = pop().ok_or(CUresult::ERROR_INVALID_CONTEXT)?;
    c.put_optional(pctx, CUcontext(context.shared.handle));
    Ok(())
}

pub(crate) fn cuCtxSetCurrent(_: &Caller, ctx: CUcontext) -> R {
    if ctx.is_null() {
        pop();
        return Ok(());
    }
    let context = by_handle(ctx)?;
    pop();
    push(context);
    Ok(())
}

pub(crate) fn cuCtxGetCurrent(c: &Caller, pctx: *mut CUcontext) -> R {
    let top = STACK
        .try_with(|stack| stack.borrow().last().cloned())
        .ok()
        .flatten();
    c.put(
        pctx,
        top.map_or(CUcontext::NULL, |context| CUcontext(context.shared.handle)),
    )
}

pub(crate) fn cuCtxGetDevice(c: &Caller, device: *mut CUdevice) -> R {
    c.put(device, CUdevice(current()?.shared.ordinal))
}

fn given_or_current(ctx: CUcontext) -> Result<Arc<Context>, CUresult> {
    if ctx.is_null() { current() } else { by_handle(ctx) }
}

pub(crate) fn cuCtxGetDevice_v2(c: &Caller, device: *mut CUdevice, ctx: CUcontext) -> R {
    c.put(device, CUdevice(given_or_current(ctx)?.shared.ordinal))
}

pub(crate) fn cuCtxGetFlags(c: &Caller, flags: *mut u32) -> R {
    c.put(flags, current()?.flags.load(Ordering::Relaxed))
}

pub(crate) fn cuCtxSetFlags(_: &Caller, flags: u32) -> R {
    current()?.flags.store(flags, Ordering::Relaxed);
    Ok(())
}

pub(crate) fn cuCtxGetId(c: &Caller, ctx: CUcontext, ctxId: *mut u64) -> R {
    c.put(ctxId, given_or_current(ctx)?.id)
}

pub(crate) fn cuCtxGetApiVersion(c: &Caller, ctx: CUcontext, version: *mut u32) -> R {
    given_or_current(ctx)?;
    c.put(version, 3020)
}

pub(crate) fn cuCtxSynchronize(_: &Caller) -> R {
    synchronise(&*current()?)
}

pub(crate) fn cuCtxSynchronize_v2(_: &Caller, ctx: CUcontext) -> R {
    synchronise(&*given_or_current(ctx)?)
}

fn synchronise(context: &Context) -> R {
    crate::capture::refuse_any(&context.shared)?;
    context.shared.drain();
    if context.primary {
        let parts = process().contexts.all().into_iter();
        for part in parts.filter(|part| part.green && part.shared.device == context.shared.device) {
            part.shared.drain();
        }
    }
    crate::pool::after_synchronise(&context.shared);
    context.shared.check()
}

pub(crate) fn cuCtxGetStreamPriorityRange(
    c: &Caller,
    leastPriority: *mut i32,
    greatestPriority: *mut i32,
) -> R {
    current()?;
    c.put_optional(leastPriority, 0);
    c.put_optional(greatestPriority, -5);
    Ok(())
}

pub(crate) fn cuCtxGetLimit(c: &Caller, pvalue: *mut usize, limit: CUlimit) -> R {
    let context = current()?;
    let set = lock(&context.limits)
        .iter()
        .find(|(name, _)| *name == limit.0)
        .map(|(_, value)| *value);
    let value = set.unwrap_or(match limit {
        CU_LIMIT_STACK_SIZE => DEFAULT_STACK,
        CU_LIMIT_PRINTF_FIFO_SIZE => DEFAULT_PRINTF,
        CU_LIMIT_MALLOC_HEAP_SIZE => DEFAULT_HEAP,
        CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH => 2,
        CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT => 2048,
        CU_LIMIT_MAX_L2_FETCH_GRANULARITY => 64,
        CU_LIMIT_PERSISTING_L2_CACHE_SIZE => 0,
        _ => return Err(CUresult::ERROR_UNSUPPORTED_LIMIT),
    });
    c.put(pvalue, value)
}

pub(crate) fn cuCtxSetLimit(_: &Caller, limit: CUlimit, value: usize) -> R {
    let context = current()?;
    match limit {
        CU_LIMIT_PRINTF_FIFO_SIZE => context.resize(0, value.saturating_sub(DEFAULT_PRINTF) as u64)?,
        CU_LIMIT_MALLOC_HEAP_SIZE => context.resize(1, value.saturating_sub(DEFAULT_HEAP) as u64)?,
        _ => {}
    }
    let mut limits = lock(&context.limits);
    limits.retain(|(name, _)| *name != limit.0);
    limits.push((limit.0, value));
    Ok(())
}

pub(crate) fn cuCtxGetCacheConfig(c: &Caller, pconfig: *mut CUfunc_cache) -> R {
    c.put(
        pconfig,
        CUfunc_cache(current()?.cache_config.load(Ordering::Relaxed)),
    )
}

pub(crate) fn cuCtxSetCacheConfig(_: &Caller, config: CUfunc_cache) -> R {
    current()?.cache_config.store(config.0, Ordering::Relaxed);
    Ok(())
}

pub(crate) fn cuCtxGetSharedMemConfig(c: &Caller, pConfig: *mut CUsharedconfig) -> R {
    c.put(
        pConfig,
        CUsharedconfig(current()?.shared_memory_config.load(Ordering::Relaxed)),
    )
}

pub(crate) fn cuCtxSetSharedMemConfig(_: &Caller, config: CUsharedconfig) -> R {
    current()?.shared_memory_config.store(config.0, Ordering::Relaxed);
    Ok(())
}

pub(crate) fn cuCtxResetPersistingL2Cache(_: &Caller) -> R {
    current().map(drop)
}

pub(crate) fn cuCtxEnablePeerAccess(_: &Caller, peerContext: CUcontext, Flags: u32) -> R {
    let context = current()?;
    let peer = by_handle(peerContext)?;
    if Flags != 0 || peer.shared.device == context.shared.device {
        return Err(if Flags != 0 {
            CUresult::ERROR_INVALID_VALUE
        } else {
            CUresult::ERROR_INVALID_DEVICE
        });
    }
    {
        let mut peers = lock(&context.peers);
        if peers.contains(&peerContext.0) {
            return Err(CUresult::ERROR_PEER_ACCESS_ALREADY_ENABLED);
        }
        peers.push(peerContext.0);
    }
    crate::memory::alloc::grant_peer(&peer, context.shared.device, true)
}

pub(crate) fn cuCtxDisablePeerAccess(_: &Caller, peerContext: CUcontext) -> R {
    let context = current()?;
    let peer = by_handle(peerContext)?;
    {
        let mut peers = lock(&context.peers);
        if !peers.contains(&peerContext.0) {
            return Err(CUresult::ERROR_PEER_ACCESS_NOT_ENABLED);
        }
        peers.retain(|handle| *handle != peerContext.0);
    }
    crate::memory::alloc::grant_peer(&peer, context.shared.device, false)
}

/// The devices that may access memory that a context allocates: its own, and those whose contexts enabled it as a peer.
pub(crate) fn devices_with_access(owner: &Context) -> Vec<u32> {
    let mut devices = vec![owner.shared.device];
    for other in process().contexts.all() {
        if lock(&other.peers).contains(&owner.shared.handle) && !devices.contains(&other.shared.device) {
            devices.push(other.shared.device);
        }
    }
    devices
}

pub(crate) fn cuDevicePrimaryCtxRetain(c: &Caller, pctx: *mut CUcontext, dev: CUdevice) -> R {
    let process = process();
    process.physical(dev.0)?;
    if pctx.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let mut primary = lock(&process.primaries[dev.0 as usize]);
    let context = match &primary.context {
        Some(context) => Arc::clone(context),
        None => {
            // The program may keep the handle over a reset, as with the real driver: it is always the same one.
            let handle = primary_handle(dev.0);
            let context = Context::new(dev.0, primary.flags, true, handle)?;
            primary.context = Some(Arc::clone(&context));
            context
        }
    };
    primary.retained += 1;
    c.put(pctx, CUcontext(context.shared.handle))
}

fn primary_handle(ordinal: i32) -> usize {
    0x5eb0_0000_0010 + ordinal as usize * 16
}

pub(crate) fn cuDevicePrimaryCtxRelease_v2(_: &Caller, dev: CUdevice) -> R {
    let process = process();
    process.physical(dev.0)?;
    let mut primary = lock(&process.primaries[dev.0 as usize]);
    if primary.retained == 0 {
        return Err(CUresult::ERROR_INVALID_CONTEXT);
    }
    primary.retained -= 1;
    if primary.retained == 0
        && let Some(context) = primary.context.take()
    {
        context.destroy();
    }
    Ok(())
}

pub(crate) fn cuDevicePrimaryCtxReset_v2(_: &Caller, dev: CUdevice) -> R {
    let process = process();
    process.physical(dev.0)?;
    let mut primary = lock(&process.primaries[dev.0 as usize]);
    primary.retained = 0;
    if let Some(context) = primary.context.take() {
        context.destroy();
    }
    Ok(())
}

pub(crate) fn cuDevicePrimaryCtxGetState(c: &Caller, dev: CUdevice, flags: *mut u32, active: *mut i32) -> R {
    process().physical(dev.0)?;
    let primary = lock(&process().primaries[dev.0 as usize]);
    c.put(flags, primary.flags)?;
    c.put(active, i32::from(primary.context.is_some()))
}

pub(crate) fn cuDevicePrimaryCtxSetFlags_v2(_: &Caller, dev: CUdevice, flags: u32) -> R {
    process().physical(dev.0)?;
    let mut primary = lock(&process().primaries[dev.0 as usize]);
    primary.flags = flags;
    if let Some(context) = &primary.context {
        context.flags.store(flags, Ordering::Relaxed);
    }
    Ok(())
}

pub(crate) fn cuCtxRecordEvent(_: &Caller, hCtx: CUcontext, hEvent: CUevent) -> R {
    let context = by_handle(hCtx)?;
    let event = process()
        .events
        .get(hEvent.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    crate::event::record(&context.legacy_stream(), &event)
}

pub(crate) fn cuCtxWaitEvent(_: &Caller, hCtx: CUcontext, hEvent: CUevent) -> R {
    let context = by_handle(hCtx)?;
    let event = process()
        .events
        .get(hEvent.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    for stream in context.shared.streams() {
        crate::event::wait(&stream, &event)?;
    }
    Ok(())
}
