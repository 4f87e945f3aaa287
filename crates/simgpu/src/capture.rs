//! Stream capture: recording work into a graph instead of doing it, and the rules about what is forbidden meanwhile.
//!
//! ```text
//!            begin                      end (joined, not invalid)
//! stream ───────────> capture Active ───────────────────────────> graph
//!                        │ a forbidden call              end
//!                        └──────────────> Invalidated ──────────> error 901, no graph
//! ```
//! One capture has one origin stream; other streams join by waiting for an event that was recorded in it. The capture knows for each of
//! its streams the nodes that the next piece of work depends on.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::context::Shared;
use crate::event::Event;
use crate::graph::{Action, Graph, NodeRef};
use crate::process::{lock, process};
use crate::stream::Stream;
use crate::work::Work;

struct Member {
    stream: Arc<Stream>,
    last: Vec<NodeRef>,
}

struct Capture {
    id: u64,
    graph: Arc<Graph>,
    /// The program's own graph, which stays the program's when the capture fails.
    to_graph: bool,
    mode: CUstreamCaptureMode,
    thread: ThreadId,
    invalid: bool,
    /// The first is the origin.
    members: Vec<Member>,
}

static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Vec::new());
/// How many captures are on: calls that a capture could forbid look here first.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(0) };
}

impl Capture {
    fn member(&mut self, stream: &Stream) -> Option<&mut Member> {
        self.members
            .iter_mut()
            .find(|member| member.stream.handle == stream.handle)
    }

    fn release(&self) {
        for member in &self.members {
            member.stream.capturing.store(false, Ordering::Release);
            member.stream.context.captures.fetch_sub(1, Ordering::AcqRel);
        }
        ACTIVE.fetch_sub(1, Ordering::AcqRel);
    }

    fn add(&mut self, stream: &Arc<Stream>, last: Vec<NodeRef>) {
        stream.capturing.store(true, Ordering::Release);
        stream.context.captures.fetch_add(1, Ordering::AcqRel);
        self.members.push(Member {
            stream: Arc::clone(stream),
            last,
        });
    }
}

/// Runs `body` on the capture that a stream is in.
fn with_capture<T>(
    stream: &Stream,
    body: impl FnOnce(&mut Capture) -> Result<T, CUresult>,
) -> Result<T, CUresult> {
    let mut captures = lock(&CAPTURES);
    let capture = captures
        .iter_mut()
        .find(|capture| {
            capture
                .members
                .iter()
                .any(|member| member.stream.handle == stream.handle)
        })
        .ok_or(CUresult::ERROR_ILLEGAL_STATE)?;
    body(capture)
}

/// Records work of a capturing stream as a node.
pub(crate) fn record(stream: &Arc<Stream>, work: Work) -> R {
    record_action(stream, Action::Work(work)).map(drop)
}

/// Records anything that a node can be.
pub(crate) fn record_action(stream: &Arc<Stream>, action: Action) -> Result<NodeRef, CUresult> {
    with_capture(stream, |capture| {
        if capture.invalid {
            return Err(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        let graph = Arc::clone(&capture.graph);
        let Some(member) = capture.member(stream) else {
            return Err(CUresult::ERROR_ILLEGAL_STATE);
        };
        let node = graph.add(action, &member.last)?;
        member.last = vec![node];
        Ok(node)
    })
}

/// Looks at the graph that a stream is being captured into.
pub(crate) fn with_graph<T>(stream: &Stream, body: impl FnOnce(&Graph) -> T) -> Result<T, CUresult> {
    with_capture(stream, |capture| Ok(body(&capture.graph)))
}

/// Records an event in a capturing stream.
pub(crate) fn record_event(stream: &Arc<Stream>, event: &Arc<Event>) -> R {
    with_capture(stream, |capture| {
        if capture.invalid {
            return Err(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        let id = capture.id;
        let Some(member) = capture.member(stream) else {
            return Err(CUresult::ERROR_ILLEGAL_STATE);
        };
        event.set_captured(id, member.last.clone());
        Ok(())
    })
}

/// Makes a stream wait for an event that was recorded in a capture: it joins.
pub(crate) fn join(stream: &Arc<Stream>, id: u64, nodes: Vec<NodeRef>) -> R {
    if stream.is_legacy() {
        invalidate(id);
        return Err(CUresult::ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    let mut captures = lock(&CAPTURES);
    let other = captures.iter().position(|capture| {
        capture
            .members
            .iter()
            .any(|member| member.stream.handle == stream.handle)
    });
    let Some(index) = captures.iter().position(|capture| capture.id == id) else {
        return Err(CUresult::ERROR_CAPTURED_EVENT);
    };
    if let Some(other) = other.filter(|other| *other != index) {
        captures[index].invalid = true;
        captures[other].invalid = true;
        return Err(CUresult::ERROR_STREAM_CAPTURE_MERGE);
    }
    let capture = &mut captures[index];
    if capture.invalid {
        return Err(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    match capture.member(stream) {
        Some(member) => {
            for node in nodes {
                if !member.last.contains(&node) {
                    member.last.push(node);
                }
            }
        }
        None => capture.add(stream, nodes),
    }
    Ok(())
}

/// Invalidates a capture.
pub(crate) fn invalidate(id: u64) {
    for capture in lock(&CAPTURES).iter_mut().filter(|capture| capture.id == id) {
        capture.invalid = true;
    }
}

/// Invalidates the capture that a stream is in.
pub(crate) fn invalidate_of(stream: &Stream) {
    let _ = with_capture(stream, |capture| {
        capture.invalid = true;
        Ok(())
    });
}

/// A capturing stream is destroyed: its capture cannot end well.
pub(crate) fn abandon(stream: &Stream) {
    let mut captures = lock(&CAPTURES);
    let Some(index) = captures.iter().position(|capture| {
        capture
            .members
            .iter()
            .any(|member| member.stream.handle == stream.handle)
    }) else {
        return;
    };
    captures[index].invalid = true;
    if captures[index].members[0].stream.handle == stream.handle {
        captures.remove(index).release();
    }
}

/// Turns away a call that makes no sense on a capturing stream, and invalidates the capture.
pub(crate) fn refuse_captured(stream: &Stream) -> R {
    if !stream.capturing.load(Ordering::Acquire) {
        return Ok(());
    }
    invalidate_of(stream);
    Err(CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

/// Turns away a use of the legacy stream while a stream that keeps order with it is being captured.
pub(crate) fn check_implicit(stream: &Stream) -> R {
    if stream.context.captures.load(Ordering::Acquire) == 0 || !stream.is_legacy() {
        return Ok(());
    }
    let mut hit = false;
    for capture in lock(&CAPTURES).iter_mut() {
        let concerned = |member: &Member| {
            member.stream.is_blocking() && member.stream.context.handle == stream.context.handle
        };
        if capture.members.iter().any(concerned) {
            capture.invalid = true;
            hit = true;
        }
    }
    if hit {
        Err(CUresult::ERROR_STREAM_CAPTURE_IMPLICIT)
    } else {
        Ok(())
    }
}

/// Turns away waiting for a whole context while anything in it is being captured, whatever the mode.
pub(crate) fn refuse_any(context: &Shared) -> R {
    if context.captures.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    for capture in lock(&CAPTURES).iter_mut() {
        if capture
            .members
            .iter()
            .any(|member| member.stream.context.handle == context.handle)
        {
            capture.invalid = true;
        }
    }
    Err(CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

/// Turns away calls that could wait for, or disturb, what is being captured: allocating, freeing, asking events.
///
/// In the global mode (the default) a thread may not make them while it captures itself in a mode other than relaxed, or any other
/// thread captures in the global mode; in the thread-local mode only its own captures count; in the relaxed mode nothing does.
pub(crate) fn check_unsafe_call() -> R {
    if ACTIVE.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let mode = CUstreamCaptureMode(MODE.with(Cell::get));
    let here = std::thread::current().id();
    let mut hit = false;
    for capture in lock(&CAPTURES).iter_mut() {
        let own = capture.thread == here && capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        let forbidden = match mode {
            CU_STREAM_CAPTURE_MODE_GLOBAL => own || capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL,
            CU_STREAM_CAPTURE_MODE_THREAD_LOCAL => own,
            _ => false,
        };
        if forbidden {
            capture.invalid = true;
            hit = true;
        }
    }
    if hit {
        Err(CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED)
    } else {
        Ok(())
    }
}

fn begin(stream: &Arc<Stream>, mode: CUstreamCaptureMode, graph: Option<(Arc<Graph>, Vec<NodeRef>)>) -> R {
    if mode.0 > CU_STREAM_CAPTURE_MODE_RELAXED.0 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    if stream.is_legacy() {
        return Err(CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    stream.context.check()?;
    let mut captures = lock(&CAPTURES);
    if stream.capturing.load(Ordering::Acquire) {
        return Err(CUresult::ERROR_ILLEGAL_STATE);
    }
    let to_graph = graph.is_some();
    let (graph, last) = graph.unwrap_or_else(|| (Graph::new(), Vec::new()));
    let mut capture = Capture {
        id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        graph,
        to_graph,
        mode,
        thread: std::thread::current().id(),
        invalid: false,
        members: Vec::new(),
    };
    capture.add(stream, last);
    captures.push(capture);
    ACTIVE.fetch_add(1, Ordering::AcqRel);
    Ok(())
}

pub(crate) fn cuStreamBeginCapture_v2(c: &Caller, hStream: CUstream, mode: CUstreamCaptureMode) -> R {
    begin(&c.stream(hStream)?, mode, None)
}

pub(crate) fn cuStreamBeginCapture(c: &Caller, hStream: CUstream) -> R {
    begin(&c.stream(hStream)?, CU_STREAM_CAPTURE_MODE_GLOBAL, None)
}

pub(crate) fn cuStreamBeginCaptureToGraph(
    c: &Caller,
    hStream: CUstream,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    _dependencyData: *const CUgraphEdgeData,
    numDependencies: usize,
    mode: CUstreamCaptureMode,
) -> R {
    let graph = process()
        .graphs
        .get(hGraph.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    let last = c
        .array(dependencies, numDependencies)?
        .into_iter()
        .map(|node| NodeRef(node.0))
        .collect();
    begin(&c.stream(hStream)?, mode, Some((graph, last)))
}

pub(crate) fn cuStreamEndCapture(c: &Caller, hStream: CUstream, phGraph: *mut CUgraph) -> R {
    let stream = c.stream(hStream)?;
    let capture = {
        let mut captures = lock(&CAPTURES);
        let index = captures
            .iter()
            .position(|capture| {
                capture
                    .members
                    .iter()
                    .any(|member| member.stream.handle == stream.handle)
            })
            .ok_or(CUresult::ERROR_ILLEGAL_STATE)?;
        let capture = &mut captures[index];
        if capture.members[0].stream.handle != stream.handle {
            capture.invalid = true;
            return Err(CUresult::ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture.thread != std::thread::current().id() {
            return Err(CUresult::ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        captures.remove(index)
    };
    capture.release();
    c.put_optional(phGraph, CUgraph::NULL);
    let failed = if capture.invalid {
        Some(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED)
    } else {
        let joined = capture.graph.ancestors(&capture.members[0].last);
        let stray = capture.members[1..]
            .iter()
            .flat_map(|member| &member.last)
            .any(|node| !joined.contains(node));
        stray.then_some(CUresult::ERROR_STREAM_CAPTURE_UNJOINED)
    };
    match failed {
        Some(code) => {
            if !capture.to_graph {
                capture.graph.forget();
            }
            Err(code)
        }
        None => {
            c.put_optional(phGraph, CUgraph(capture.graph.handle));
            Ok(())
        }
    }
}

fn status(stream: &Stream) -> Result<CUstreamCaptureStatus, CUresult> {
    check_implicit(stream)?;
    if !stream.capturing.load(Ordering::Acquire) {
        return Ok(CU_STREAM_CAPTURE_STATUS_NONE);
    }
    with_capture(stream, |capture| {
        Ok(if capture.invalid {
            CU_STREAM_CAPTURE_STATUS_INVALIDATED
        } else {
            CU_STREAM_CAPTURE_STATUS_ACTIVE
        })
    })
}

pub(crate) fn cuStreamIsCapturing(
    c: &Caller,
    hStream: CUstream,
    captureStatus: *mut CUstreamCaptureStatus,
) -> R {
    c.put(captureStatus, status(&*c.stream(hStream)?)?)
}

pub(crate) fn cuStreamGetCaptureInfo(
    c: &Caller,
    hStream: CUstream,
    captureStatus_out: *mut CUstreamCaptureStatus,
    id_out: *mut u64,
) -> R {
    let (graph, list, count) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    info(c, hStream, captureStatus_out, id_out, graph, list, count)
}

pub(crate) fn cuStreamGetCaptureInfo_v2(
    c: &Caller,
    hStream: CUstream,
    captureStatus_out: *mut CUstreamCaptureStatus,
    id_out: *mut u64,
    graph_out: *mut CUgraph,
    dependencies_out: *mut *const CUgraphNode,
    numDependencies_out: *mut usize,
) -> R {
    info(
        c,
        hStream,
        captureStatus_out,
        id_out,
        graph_out,
        dependencies_out,
        numDependencies_out,
    )
}

pub(crate) fn cuStreamGetCaptureInfo_v3(
    c: &Caller,
    hStream: CUstream,
    captureStatus_out: *mut CUstreamCaptureStatus,
    id_out: *mut u64,
    graph_out: *mut CUgraph,
    dependencies_out: *mut *const CUgraphNode,
    edgeData_out: *mut *const CUgraphEdgeData,
    numDependencies_out: *mut usize,
) -> R {
    c.put_optional(edgeData_out, std::ptr::null());
    info(
        c,
        hStream,
        captureStatus_out,
        id_out,
        graph_out,
        dependencies_out,
        numDependencies_out,
    )
}

thread_local! {
    /// The list that the last query of this thread pointed at: the driver keeps it valid until the next call on the stream.
    static LIST: std::cell::RefCell<Vec<CUgraphNode>> = const { std::cell::RefCell::new(Vec::new()) };
}

fn info(
    c: &Caller,
    stream: CUstream,
    status_out: *mut CUstreamCaptureStatus,
    id_out: *mut u64,
    graph_out: *mut CUgraph,
    dependencies_out: *mut *const CUgraphNode,
    count_out: *mut usize,
) -> R {
    let stream = c.stream(stream)?;
    let status = status(&stream)?;
    c.put(status_out, status)?;
    if status != CU_STREAM_CAPTURE_STATUS_ACTIVE {
        return Ok(());
    }
    with_capture(&stream, |capture| {
        c.put_optional(id_out, capture.id);
        c.put_optional(graph_out, CUgraph(capture.graph.handle));
        if let Some(member) = capture.member(&stream) {
            c.put_optional(count_out, member.last.len());
            LIST.with(|list| {
                let mut list = list.borrow_mut();
                *list = member.last.iter().map(|node| CUgraphNode(node.0)).collect();
                c.put_optional(dependencies_out, list.as_ptr());
            });
        }
        Ok(())
    })
}

pub(crate) fn cuStreamUpdateCaptureDependencies(
    c: &Caller,
    hStream: CUstream,
    dependencies: *mut CUgraphNode,
    numDependencies: usize,
    flags: u32,
) -> R {
    let stream = c.stream(hStream)?;
    let nodes = c.array(dependencies.cast_const(), numDependencies)?;
    with_capture(&stream, |capture| {
        if capture.invalid {
            return Err(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        if let Some(member) = capture.member(&stream) {
            if flags & CU_STREAM_SET_CAPTURE_DEPENDENCIES.0 != 0 {
                member.last.clear();
            }
            for node in nodes {
                if !member.last.contains(&NodeRef(node.0)) {
                    member.last.push(NodeRef(node.0));
                }
            }
        }
        Ok(())
    })
}

pub(crate) fn cuStreamUpdateCaptureDependencies_v2(
    c: &Caller,
    hStream: CUstream,
    dependencies: *mut CUgraphNode,
    _dependencyData: *const CUgraphEdgeData,
    numDependencies: usize,
    flags: u32,
) -> R {
    cuStreamUpdateCaptureDependencies(c, hStream, dependencies, numDependencies, flags)
}

pub(crate) fn cuThreadExchangeStreamCaptureMode(c: &Caller, mode: *mut CUstreamCaptureMode) -> R {
    let wanted = c.get(mode.cast_const())?;
    if wanted.0 > CU_STREAM_CAPTURE_MODE_RELAXED.0 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let old = MODE.with(|cell| cell.replace(wanted.0));
    c.put(mode, CUstreamCaptureMode(old))
}
