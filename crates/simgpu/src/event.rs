//! Events: marks in streams.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::capture;
use crate::context;
use crate::graph::NodeRef;
use crate::handles::fresh;
use crate::ipc::SharedEvent;
use crate::process::{lock, process};
use crate::stream::{Stream, submit, submit_now};
use crate::work::Work;

/// One recording of an event: the mark itself.
#[derive(Debug)]
pub(crate) struct Record {
    stream: Arc<Stream>,
    /// Zero until the record's place in the stream is known.
    ticket: AtomicU64,
    /// When the stream got there, on the monotonic clock; zero before.
    time_ns: AtomicU64,
    /// Whom to tell in other processes, and what number.
    shared: Option<(Arc<SharedEvent>, u64)>,
}

impl Record {
    pub(crate) fn complete(&self, now: u64) {
        if let Some((event, number)) = &self.shared {
            event.complete(*number);
        }
        self.time_ns.store(now, Ordering::Release);
    }

    fn is_complete(&self) -> bool {
        self.time_ns.load(Ordering::Acquire) != 0
    }
}

/// What an event was last recorded in.
#[derive(Debug, Clone, Default)]
enum State {
    #[default]
    Fresh,
    Recorded(Arc<Record>),
    /// In a capture: the nodes that a waiter depends on.
    Captured(u64, Vec<NodeRef>),
}

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: usize,
    flags: u32,
    state: Mutex<State>,
    /// Set for events that other processes use.
    pub(crate) shared: Option<Arc<SharedEvent>>,
}

impl Event {
    pub(crate) fn new(context: usize, flags: u32, shared: Option<Arc<SharedEvent>>) -> Arc<Self> {
        Arc::new(Self {
            context,
            flags,
            state: Mutex::default(),
            shared,
        })
    }

    fn state(&self) -> State {
        lock(&self.state).clone()
    }

    /// Marks the event as recorded in a capture.
    pub(crate) fn set_captured(&self, capture: u64, nodes: Vec<NodeRef>) {
        *lock(&self.state) = State::Captured(capture, nodes);
    }
}

/// Records an event in a stream.
pub(crate) fn record(stream: &Arc<Stream>, event: &Arc<Event>) -> R {
    if stream.capturing.load(Ordering::Acquire) {
        return capture::record_event(stream, event);
    }
    let record = new_record(stream, event);
    let ticket = submit(stream, Work::Record(Arc::clone(&record)))?;
    record.ticket.store(ticket, Ordering::Release);
    *lock(&event.state) = State::Recorded(record);
    Ok(())
}

fn new_record(stream: &Arc<Stream>, event: &Event) -> Arc<Record> {
    let shared = event
        .shared
        .as_ref()
        .map(|shared| (Arc::clone(shared), shared.begin()));
    Arc::new(Record {
        stream: Arc::clone(stream),
        ticket: AtomicU64::new(0),
        time_ns: AtomicU64::new(0),
        shared,
    })
}

/// Makes a record for an event-record node of a graph.
pub(crate) fn record_in_graph(stream: &Arc<Stream>, event: &Arc<Event>) {
    let record = new_record(stream, event);
    let ticket = submit_now(stream, [Work::Record(Arc::clone(&record))]);
    record.ticket.store(ticket, Ordering::Release);
    *lock(&event.state) = State::Recorded(record);
}

/// Makes a stream wait for an event.
pub(crate) fn wait(stream: &Arc<Stream>, event: &Arc<Event>) -> R {
    match event.state() {
        State::Captured(capture, nodes) => capture::join(stream, capture, nodes),
        State::Recorded(record) => {
            if stream.capturing.load(Ordering::Acquire) {
                // Work outside the capture cannot be depended on from inside.
                capture::invalidate_of(stream);
                return Err(CUresult::ERROR_STREAM_CAPTURE_ISOLATION);
            }
            if record.is_complete() || Arc::ptr_eq(&record.stream, stream) {
                return stream.context.check();
            }
            submit(
                stream,
                Work::Wait(Arc::clone(&record.stream), record.ticket.load(Ordering::Acquire)),
            )
            .map(drop)
        }
        State::Fresh => match &event.shared {
            Some(shared) => submit(stream, Work::WaitShared(shared.point())).map(drop),
            None => Ok(()),
        },
    }
}

/// Makes a stream wait for an event's last record now: an event-wait node of a graph.
pub(crate) fn wait_in_graph(stream: &Arc<Stream>, event: &Arc<Event>) {
    if let State::Recorded(record) = event.state()
        && !record.is_complete()
    {
        submit_now(
            stream,
            [Work::Wait(
                Arc::clone(&record.stream),
                record.ticket.load(Ordering::Acquire),
            )],
        );
    }
}

fn find(handle: CUevent) -> Result<Arc<Event>, CUresult> {
    process()
        .events
        .get(handle.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)
}

pub(crate) fn cuEventCreate(c: &Caller, phEvent: *mut CUevent, flags: u32) -> R {
    let all = CU_EVENT_BLOCKING_SYNC.0 | CU_EVENT_DISABLE_TIMING.0 | CU_EVENT_INTERPROCESS.0;
    let interprocess = flags & CU_EVENT_INTERPROCESS.0 != 0;
    if flags & !all != 0 || phEvent.is_null() || (interprocess && flags & CU_EVENT_DISABLE_TIMING.0 == 0) {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let context = context::current()?;
    let shared = if interprocess {
        Some(SharedEvent::create()?)
    } else {
        None
    };
    let handle = fresh();
    process()
        .events
        .insert(handle, Event::new(context.shared.handle, flags, shared));
    c.put(phEvent, CUevent(handle))
}

pub(crate) fn cuEventDestroy_v2(_: &Caller, hEvent: CUevent) -> R {
    process()
        .events
        .remove(hEvent.0)
        .map(drop)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)
}

pub(crate) fn cuEventRecord(c: &Caller, hEvent: CUevent, hStream: CUstream) -> R {
    record(&c.stream(hStream)?, &find(hEvent)?)
}

pub(crate) fn cuEventRecordWithFlags(c: &Caller, hEvent: CUevent, hStream: CUstream, _flags: u32) -> R {
    cuEventRecord(c, hEvent, hStream)
}

pub(crate) fn cuEventQuery(_: &Caller, hEvent: CUevent) -> R {
    let event = find(hEvent)?;
    match event.state() {
        State::Captured(capture, _) => {
            capture::invalidate(capture);
            Err(CUresult::ERROR_CAPTURED_EVENT)
        }
        State::Recorded(record) => {
            capture::check_unsafe_call()?;
            record.stream.context.check()?;
            if record.is_complete() {
                record.stream.observe(record.ticket.load(Ordering::Acquire));
                Ok(())
            } else {
                Err(CUresult::ERROR_NOT_READY)
            }
        }
        State::Fresh => match &event.shared {
            Some(shared) if !shared.point().is_reached() => Err(CUresult::ERROR_NOT_READY),
            _ => Ok(()),
        },
    }
}

pub(crate) fn cuEventSynchronize(_: &Caller, hEvent: CUevent) -> R {
    let event = find(hEvent)?;
    match event.state() {
        State::Captured(capture, _) => {
            capture::invalidate(capture);
            Err(CUresult::ERROR_CAPTURED_EVENT)
        }
        State::Recorded(record) => {
            capture::check_unsafe_call()?;
            record.stream.wait_for(record.ticket.load(Ordering::Acquire));
            crate::pool::after_synchronise(&record.stream.context);
            record.stream.context.check()
        }
        State::Fresh => {
            if let Some(shared) = &event.shared {
                shared.point().wait();
            }
            Ok(())
        }
    }
}

pub(crate) fn cuEventElapsedTime(c: &Caller, pMilliseconds: *mut f32, hStart: CUevent, hEnd: CUevent) -> R {
    let (start, end) = (find(hStart)?, find(hEnd)?);
    if (start.flags | end.flags) & CU_EVENT_DISABLE_TIMING.0 != 0 {
        return Err(CUresult::ERROR_INVALID_HANDLE);
    }
    let (State::Recorded(start), State::Recorded(end)) = (start.state(), end.state()) else {
        return Err(CUresult::ERROR_INVALID_HANDLE);
    };
    if !start.is_complete() || !end.is_complete() {
        return Err(CUresult::ERROR_NOT_READY);
    }
    let time = |record: &Record| record.time_ns.load(Ordering::Acquire) as f64;
    c.put(pMilliseconds, ((time(&end) - time(&start)) / 1e6) as f32)
}
