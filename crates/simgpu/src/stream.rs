//! Streams: queues whose work is done later, in order, by a thread of their own.
//!
//! Every piece of work has a *ticket*: its number in its stream. A stream says how far it is by the last ticket that is done, so
//! that events and other streams depend on nothing but a stream and a number. A dependency always points to work that was
//! submitted earlier, so there are no cycles.
//!
//! # Note \[Naps\]
//!
//! A thread that runs dry naps a few times before it goes to sleep for good, and work that is submitted meanwhile needs no wake-up
//! call: launching many small kernels costs no system calls. Whoever waits for the stream wakes it.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::capture;
use crate::context::{self, Context, Shared};
use crate::handles::fresh;
use crate::process::{lock, process};
use crate::work::{self, Comparison, HostCall, HostCallback, Work};

const NAP: Duration = Duration::from_micros(60);

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<(u64, Work)>,
    /// The thread exists.
    started: bool,
    /// The thread waits for a wake-up call.
    asleep: bool,
    /// No more work comes: the thread ends when the queue is empty.
    closed: bool,
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) handle: usize,
    pub(crate) context: Arc<Shared>,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    /// The number that the program can ask for.
    pub(crate) id: u64,
    queue: Mutex<Queue>,
    wake: Condvar,
    /// The last ticket that was given out, the last that is done, and the last whose end the program has waited for or asked about.
    submitted: AtomicU64,
    done: AtomicU64,
    observed: AtomicU64,
    /// What its work waits for: the last ticket of each other stream, by handle.
    follows: Mutex<Vec<(usize, u64)>>,
    done_signal: Condvar,
    waiters: AtomicU32,
    closed: AtomicBool,
    /// Set while work is recorded instead of done; what into says the capture registry.
    pub(crate) capturing: AtomicBool,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Stream {
    pub(crate) fn new(context: Arc<Shared>, flags: u32, priority: i32) -> Arc<Self> {
        Arc::new(Self {
            handle: fresh(),
            context,
            flags,
            priority,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            queue: Mutex::default(),
            wake: Condvar::new(),
            submitted: AtomicU64::new(0),
            done: AtomicU64::new(0),
            observed: AtomicU64::new(0),
            follows: Mutex::default(),
            done_signal: Condvar::new(),
            waiters: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            capturing: AtomicBool::new(false),
        })
    }

    /// Whether it keeps order with the legacy default stream.
    pub(crate) fn is_blocking(&self) -> bool {
        self.flags & CU_STREAM_NON_BLOCKING.0 == 0
    }

    pub(crate) fn is_legacy(&self) -> bool {
        self.context.legacy_handle.load(Ordering::Relaxed) == self.handle
    }

    /// The last ticket that was given out.
    pub(crate) fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    /// Whether everything up to a ticket is done.
    pub(crate) fn is_done(&self, ticket: u64) -> bool {
        self.done.load(Ordering::Acquire) >= ticket
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.is_done(self.submitted())
    }

    /// Puts work behind everything that is in the queue, and says its ticket.
    pub(crate) fn push(self: &Arc<Self>, work: impl IntoIterator<Item = Work>) -> u64 {
        let mut queue = lock(&self.queue);
        let mut ticket = self.submitted.load(Ordering::Relaxed);
        for work in work {
            ticket += 1;
            if let Work::Wait(other, theirs) = &work {
                self.follow(other.handle, *theirs);
            }
            queue.jobs.push_back((ticket, work));
        }
        self.submitted.store(ticket, Ordering::Release);
        if !queue.started {
            queue.started = true;
            let stream = Arc::clone(self);
            // A process without room for a thread is beyond help: the work is then done here, which is early but in order.
            let spawned = spawn("ebb-sim-stream", move || stream.work_off());
            if spawned.is_err() {
                queue.started = false;
                let jobs = std::mem::take(&mut queue.jobs);
                drop(queue);
                for (ticket, work) in jobs {
                    self.do_one(ticket, &work);
                }
                return ticket;
            }
        } else if queue.asleep {
            queue.asleep = false;
            self.wake.notify_one();
        }
        ticket
    }

    fn work_off(&self) {
        let mut batch = VecDeque::new();
        let mut queue = lock(&self.queue);
        let mut naps = 0;
        loop {
            if !queue.jobs.is_empty() {
                // All at once: the program's thread and this one meet at the lock once a batch and not once a job.
                std::mem::swap(&mut batch, &mut queue.jobs);
                drop(queue);
                for (ticket, work) in batch.drain(..) {
                    self.do_one(ticket, &work);
                }
                queue = lock(&self.queue);
                naps = 0;
            } else if queue.closed {
                return;
            } else if naps < 4 {
                naps += 1;
                queue = self
                    .wake
                    .wait_timeout(queue, NAP)
                    .map_or_else(|poison| poison.into_inner().0, |pair| pair.0);
            } else {
                queue.asleep = true;
                queue = self
                    .wake
                    .wait(queue)
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                queue.asleep = false;
            }
        }
    }

    fn do_one(&self, ticket: u64, work: &Work) {
        // After an error nothing runs any more, but waits still keep order and records and callbacks still complete.
        let broken = self.context.error.load(Ordering::Acquire) != 0 || self.context.is_dying();
        let touches = matches!(
            work,
            Work::Kernel(_) | Work::Copy(_) | Work::PeerCopy(_) | Work::Fill(_) | Work::WaitValue { .. }
        );
        if !(broken && touches) {
            let result =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work::run(work, &self.context)));
            if let Err(code) = result.unwrap_or(Err(CUresult::ERROR_LAUNCH_FAILED)) {
                self.context.fail(code);
            }
        }
        self.done.store(ticket, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            let _queue = lock(&self.queue);
            self.done_signal.notify_all();
        }
    }

    fn follow(&self, other: usize, ticket: u64) {
        let mut follows = lock(&self.follows);
        match follows.iter_mut().find(|(handle, _)| *handle == other) {
            Some((_, known)) => *known = ticket.max(*known),
            None => follows.push((other, ticket)),
        }
    }

    /// Whether what is submitted from now on runs after a ticket of another stream, because the program made it wait.
    pub(crate) fn runs_after(&self, other: usize, ticket: u64) -> bool {
        lock(&self.follows)
            .iter()
            .any(|(handle, known)| *handle == other && *known >= ticket)
    }

    /// The program knows that everything up to a ticket is done.
    pub(crate) fn observe(&self, ticket: u64) {
        self.observed.fetch_max(ticket, Ordering::AcqRel);
    }

    /// Whether the program knows that a ticket is done.
    pub(crate) fn is_observed(&self, ticket: u64) -> bool {
        self.observed.load(Ordering::Acquire) >= ticket
    }

    /// Makes the program wait until everything up to a ticket is done.
    pub(crate) fn wait_for(&self, ticket: u64) {
        self.wait_done(ticket);
        self.observe(ticket);
    }

    /// Waits until everything up to a ticket is done.
    pub(crate) fn wait_done(&self, ticket: u64) {
        if self.is_done(ticket) {
            return;
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let mut queue = lock(&self.queue);
        // Out of a nap, see Note [Naps].
        self.wake.notify_one();
        while self.done.load(Ordering::SeqCst) < ticket {
            queue = self
                .done_signal
                .wait(queue)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        drop(queue);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    /// Waits until everything that was submitted is done.
    pub(crate) fn drain(&self) {
        self.wait_for(self.submitted());
    }

    /// Whether the program destroyed it and its last work is done.
    pub(crate) fn is_over(&self) -> bool {
        self.closed.load(Ordering::Acquire) && self.is_idle()
    }

    /// Lets the thread end when its work is done.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        lock(&self.queue).closed = true;
        self.wake.notify_one();
    }
}

/// Starts a thread that takes no signals, not even in its first moment: they are for the program's threads.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    // SAFETY: the sets are plain data, initialised by `sigfillset` and `pthread_sigmask` before they are read; only the calling thread's
    // mask changes, which its new thread begins with.
    let before = unsafe {
        let mut all = std::mem::zeroed::<libc::sigset_t>();
        let mut before = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    let spawned = std::thread::Builder::new().name(name.into()).spawn(work);
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    spawned.map(drop)
}

/// Submits work to a stream, or records it if the stream is being captured. Returns the ticket (0 when recorded).
pub(crate) fn submit(stream: &Arc<Stream>, work: Work) -> Result<u64, CUresult> {
    stream.context.check()?;
    if stream.capturing.load(Ordering::Acquire) {
        capture::record(stream, work)?;
        return Ok(0);
    }
    capture::check_implicit(stream)?;
    Ok(submit_now(stream, [work]))
}

/// Submits work although captures are on: what capture rules do not concern.
pub(crate) fn submit_now<const N: usize>(stream: &Arc<Stream>, work: [Work; N]) -> u64 {
    if stream.is_legacy() {
        let before: Vec<Work> = stream
            .context
            .pending_blocking(stream.handle)
            .into_iter()
            .map(|(other, ticket)| Work::Wait(other, ticket))
            .collect();
        return stream.push(before.into_iter().chain(work));
    }
    if stream.is_blocking()
        && let Some(legacy) = stream.context.legacy()
    {
        let ticket = legacy.submitted();
        if !legacy.is_done(ticket) {
            return stream.push(std::iter::once(Work::Wait(legacy, ticket)).chain(work));
        }
    }
    stream.push(work)
}

thread_local! {
    /// This thread's own default stream in each context that it used one in.
    static OWN: RefCell<Vec<Arc<Stream>>> = const { RefCell::new(Vec::new()) };
}

fn own_stream(context: &Arc<Context>) -> Arc<Stream> {
    OWN.with(|own| {
        let mut own = own.borrow_mut();
        own.retain(|stream| !stream.context.is_dying());
        if let Some(stream) = own
            .iter()
            .find(|stream| Arc::ptr_eq(&stream.context, &context.shared))
        {
            return Arc::clone(stream);
        }
        let stream = Stream::new(Arc::clone(&context.shared), 0, 0);
        context.shared.add_stream(Arc::clone(&stream));
        process().streams.insert(stream.handle, Arc::clone(&stream));
        own.push(Arc::clone(&stream));
        stream
    })
}

impl Caller {
    /// The stream that a handle means in this call: null, 1 and 2 are the default ones of the current context.
    pub(crate) fn stream(&self, handle: CUstream) -> Result<Arc<Stream>, CUresult> {
        let current = context::current;
        match handle.0 {
            0 if !self.per_thread => Ok(current()?.legacy_stream()),
            1 => Ok(current()?.legacy_stream()),
            0 | 2 => Ok(own_stream(&current()?)),
            other => process().streams.get(other).ok_or(CUresult::ERROR_INVALID_HANDLE),
        }
    }
}

pub(crate) fn cuStreamCreate(c: &Caller, phStream: *mut CUstream, Flags: u32) -> R {
    cuStreamCreateWithPriority(c, phStream, Flags, 0)
}

pub(crate) fn cuStreamCreateWithPriority(
    c: &Caller,
    phStream: *mut CUstream,
    flags: u32,
    priority: i32,
) -> R {
    if flags & !CU_STREAM_NON_BLOCKING.0 != 0 || phStream.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let context = context::current()?;
    let stream = Stream::new(Arc::clone(&context.shared), flags, priority.clamp(-5, 0));
    context.shared.add_stream(Arc::clone(&stream));
    process().streams.insert(stream.handle, Arc::clone(&stream));
    c.put(phStream, CUstream(stream.handle))
}

pub(crate) fn cuStreamDestroy_v2(_: &Caller, hStream: CUstream) -> R {
    if hStream.0 <= 2 {
        return Err(CUresult::ERROR_INVALID_HANDLE);
    }
    let stream = process()
        .streams
        .remove(hStream.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    if stream.capturing.load(Ordering::Acquire) {
        capture::abandon(&stream);
    }
    // Its work goes on, and whoever waits for the context waits for it too.
    stream.close();
    Ok(())
}

pub(crate) fn cuStreamQuery(c: &Caller, hStream: CUstream) -> R {
    let stream = c.stream(hStream)?;
    capture::refuse_captured(&stream)?;
    if stream.is_legacy() {
        capture::check_implicit(&stream)?;
    }
    stream.context.check()?;
    let submitted = stream.submitted();
    let idle = if stream.is_legacy() {
        stream.context.blocking_idle()
    } else {
        stream.is_done(submitted)
    };
    if idle {
        stream.observe(submitted);
        stream.context.check()
    } else {
        Err(CUresult::ERROR_NOT_READY)
    }
}

pub(crate) fn cuStreamSynchronize(c: &Caller, hStream: CUstream) -> R {
    let stream = c.stream(hStream)?;
    capture::refuse_captured(&stream)?;
    if stream.is_legacy() {
        capture::check_implicit(&stream)?;
        // The legacy stream stands for all that it keeps order with.
        stream.context.drain_blocking();
    }
    stream.drain();
    crate::pool::after_synchronise(&stream.context);
    stream.context.check()
}

pub(crate) fn cuStreamWaitEvent(c: &Caller, hStream: CUstream, hEvent: CUevent, _Flags: u32) -> R {
    let stream = c.stream(hStream)?;
    let event = process()
        .events
        .get(hEvent.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    crate::event::wait(&stream, &event)
}

pub(crate) fn cuStreamGetFlags(c: &Caller, hStream: CUstream, flags: *mut u32) -> R {
    c.put(flags, c.stream(hStream)?.flags)
}

pub(crate) fn cuStreamGetPriority(c: &Caller, hStream: CUstream, priority: *mut i32) -> R {
    c.put(priority, c.stream(hStream)?.priority)
}

pub(crate) fn cuStreamGetId(c: &Caller, hStream: CUstream, streamId: *mut u64) -> R {
    c.put(streamId, c.stream(hStream)?.id)
}

pub(crate) fn cuStreamGetDevice(c: &Caller, hStream: CUstream, device: *mut CUdevice) -> R {
    c.put(device, CUdevice(c.stream(hStream)?.context.ordinal))
}

pub(crate) fn cuStreamGetCtx(c: &Caller, hStream: CUstream, pctx: *mut CUcontext) -> R {
    c.put(pctx, CUcontext(c.stream(hStream)?.context.handle))
}

pub(crate) fn cuStreamGetCtx_v2(
    c: &Caller,
    hStream: CUstream,
    pCtx: *mut CUcontext,
    pGreenCtx: *mut CUgreenCtx,
) -> R {
    c.put_optional(pGreenCtx, CUgreenCtx::NULL);
    cuStreamGetCtx(c, hStream, pCtx)
}

pub(crate) fn cuStreamAddCallback(
    c: &Caller,
    hStream: CUstream,
    callback: CUstreamCallback,
    userData: *mut c_void,
    flags: u32,
) -> R {
    if flags != 0 || callback.is_none() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let stream = c.stream(hStream)?;
    capture::refuse_captured(&stream)?;
    let call = HostCallback {
        function: callback,
        stream: hStream,
        data: userData as usize,
    };
    submit(&stream, Work::Callback(call)).map(drop)
}

pub(crate) fn cuLaunchHostFunc(c: &Caller, hStream: CUstream, fn_: CUhostFn, userData: *mut c_void) -> R {
    if fn_.is_none() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let stream = c.stream(hStream)?;
    submit(
        &stream,
        Work::Host(HostCall {
            function: fn_,
            data: userData as usize,
        }),
    )
    .map(drop)
}

pub(crate) fn cuLaunchHostFunc_v2(
    c: &Caller,
    hStream: CUstream,
    fn_: CUhostFn,
    userData: *mut c_void,
    _syncMode: u32,
) -> R {
    cuLaunchHostFunc(c, hStream, fn_, userData)
}

fn write_value(c: &Caller, stream: CUstream, addr: CUdeviceptr, value: u64, bytes: u64) -> R {
    if !addr.0.is_multiple_of(bytes) || addr.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    submit(
        &c.stream(stream)?,
        Work::WriteValue {
            address: addr.0,
            value,
            bytes,
        },
    )
    .map(drop)
}

fn wait_value(c: &Caller, stream: CUstream, addr: CUdeviceptr, value: u64, flags: u32, bytes: u64) -> R {
    if !addr.0.is_multiple_of(bytes) || addr.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let comparison = match CUstreamWaitValue_flags(flags & 3) {
        CU_STREAM_WAIT_VALUE_GEQ => Comparison::GreaterOrEqual,
        CU_STREAM_WAIT_VALUE_EQ => Comparison::Equal,
        CU_STREAM_WAIT_VALUE_AND => Comparison::And,
        _ => Comparison::Nor,
    };
    submit(
        &c.stream(stream)?,
        Work::WaitValue {
            address: addr.0,
            value,
            bytes,
            comparison,
        },
    )
    .map(drop)
}

pub(crate) fn cuStreamWriteValue32_v2(
    c: &Caller,
    s: CUstream,
    addr: CUdeviceptr,
    value: u32,
    _flags: u32,
) -> R {
    write_value(c, s, addr, u64::from(value), 4)
}

pub(crate) fn cuStreamWriteValue64_v2(
    c: &Caller,
    s: CUstream,
    addr: CUdeviceptr,
    value: u64,
    _flags: u32,
) -> R {
    write_value(c, s, addr, value, 8)
}

pub(crate) fn cuStreamWaitValue32_v2(
    c: &Caller,
    s: CUstream,
    addr: CUdeviceptr,
    value: u32,
    flags: u32,
) -> R {
    wait_value(c, s, addr, u64::from(value), flags, 4)
}

pub(crate) fn cuStreamWaitValue64_v2(
    c: &Caller,
    s: CUstream,
    addr: CUdeviceptr,
    value: u64,
    flags: u32,
) -> R {
    wait_value(c, s, addr, value, flags, 8)
}

pub(crate) fn cuStreamBatchMemOp_v2(
    c: &Caller,
    stream: CUstream,
    count: u32,
    paramArray: *mut CUstreamBatchMemOpParams,
    _flags: u32,
) -> R {
    for operation in c.array(paramArray.cast_const(), count as usize)? {
        // Each member of the union starts with: operation (4), padding, address (8), value (8), flags (4).
        let [head, address, value, flags, ..] = operation.words;
        let address = CUdeviceptr(address);
        match CUstreamBatchMemOpType(head as u32) {
            CU_STREAM_MEM_OP_WAIT_VALUE_32 => {
                wait_value(c, stream, address, value & 0xffff_ffff, flags as u32, 4)?
            }
            CU_STREAM_MEM_OP_WAIT_VALUE_64 => wait_value(c, stream, address, value, flags as u32, 8)?,
            CU_STREAM_MEM_OP_WRITE_VALUE_32 => write_value(c, stream, address, value & 0xffff_ffff, 4)?,
            CU_STREAM_MEM_OP_WRITE_VALUE_64 => write_value(c, stream, address, value, 8)?,
            CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES | CU_STREAM_MEM_OP_BARRIER => {}
            _ => return Err(CUresult::ERROR_NOT_SUPPORTED),
        }
    }
    Ok(())
}

pub(crate) fn cuStreamCopyAttributes(c: &Caller, dst: CUstream, src: CUstream) -> R {
    c.stream(dst)?;
    c.stream(src).map(drop)
}

pub(crate) fn cuStreamGetAttribute(
    c: &Caller,
    hStream: CUstream,
    attr: CUstreamAttrID,
    value_out: *mut CUstreamAttrValue,
) -> R {
    let stream = c.stream(hStream)?;
    let mut value = CUlaunchAttributeValue::default();
    if attr == CU_LAUNCH_ATTRIBUTE_PRIORITY {
        value.words[0] = u64::from(stream.priority as u32);
    }
    c.put(value_out, value)
}

pub(crate) fn cuStreamSetAttribute(
    c: &Caller,
    hStream: CUstream,
    _attr: CUstreamAttrID,
    value: *const CUstreamAttrValue,
) -> R {
    c.stream(hStream)?;
    c.get(value).map(drop)
}
