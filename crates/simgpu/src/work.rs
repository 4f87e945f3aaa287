//! Pieces of work that a stream does, one after the other, on its own thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ebb_abi::{CUhostFn, CUresult, CUstream, CUstreamCallback};
use ebb_simdev::{Direction, now_ns};

use crate::context::Shared;
use crate::event::Record;
use crate::kernels::Launch;
use crate::memory::{PIECE, Place, managed};
use crate::process::process;
use crate::stream::Stream;

/// One side of a copy: where rows start and how far apart they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Side {
    pub(crate) address: u64,
    /// Bytes from row to row.
    pub(crate) pitch: u64,
    /// Bytes from plane to plane.
    pub(crate) plane: u64,
}

impl Side {
    /// One row.
    pub(crate) fn line(address: u64) -> Self {
        Self {
            address,
            pitch: 0,
            plane: 0,
        }
    }
}

/// A copy of `depth` planes of `height` rows of `width` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Copy {
    pub(crate) to: Side,
    pub(crate) from: Side,
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
}

/// Filling `height` rows of `width` elements of `element` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fill {
    pub(crate) to: Side,
    pub(crate) value: u32,
    pub(crate) element: u64,
    pub(crate) width: u64,
    pub(crate) height: u64,
}

/// A function of the program with its argument.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostCall {
    pub(crate) function: CUhostFn,
    pub(crate) data: usize,
}

/// A function that is also told the stream and its state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostCallback {
    pub(crate) function: CUstreamCallback,
    pub(crate) stream: CUstream,
    pub(crate) data: usize,
}

/// How a stream compares memory with a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Comparison {
    GreaterOrEqual,
    Equal,
    And,
    Nor,
}

/// A piece of work.
#[derive(Debug, Clone)]
pub(crate) enum Work {
    /// Nothing: a join in a graph.
    Empty,
    /// Everything up to a ticket of another stream is done first.
    Wait(Arc<Stream>, u64),
    Kernel(Launch),
    Copy(Copy),
    /// A copy between devices: needs no access of one to the other's memory.
    PeerCopy(Copy),
    Fill(Fill),
    Host(HostCall),
    Callback(HostCallback),
    Record(Arc<Record>),
    /// Wait for an event that another process records.
    WaitShared(crate::ipc::SharedPoint),
    WriteValue {
        address: u64,
        value: u64,
        bytes: u64,
    },
    WaitValue {
        address: u64,
        value: u64,
        bytes: u64,
        comparison: Comparison,
    },
    /// A graph's memory node comes to life, or ends.
    Attach(Arc<crate::graph_memory::GraphMemory>),
    Detach(Arc<crate::graph_memory::GraphMemory>),
    /// Managed memory becomes resident on a device, or with the host.
    Prefetch {
        device: Option<u32>,
        address: u64,
        bytes: u64,
    },
    /// Keeps what was launched until here.
    Hold(#[expect(dead_code, reason = "kept and not read")] Arc<crate::graph::Exec>),
    /// Memory of `cuMemAlloc` that was freed in stream order.
    Release(u64),
}

/// Does one piece of work. An error is the context's from then on.
pub(crate) fn run(work: &Work, context: &Shared) -> Result<(), CUresult> {
    match work {
        Work::Empty | Work::Hold(_) => Ok(()),
        Work::Wait(stream, ticket) => {
            stream.wait_done(*ticket);
            Ok(())
        }
        Work::Kernel(launch) => timed(context, || launch.run(context)),
        Work::Copy(copy) => timed(context, || run_copy(copy, context)),
        Work::PeerCopy(copy) => timed(context, || run_peer_copy(copy)),
        Work::Fill(fill) => timed(context, || run_fill(fill, context)),
        Work::Host(call) => {
            if let Some(function) = call.function {
                // SAFETY: the program gave the function and its argument for this call, once, on a thread of ours.
                unsafe { function(call.data as *mut libc::c_void) };
            }
            Ok(())
        }
        Work::Callback(call) => {
            if let Some(function) = call.function {
                let status = CUresult(context.error.load(Ordering::Acquire));
                // SAFETY: as above.
                unsafe { function(call.stream, status, call.data as *mut libc::c_void) };
            }
            Ok(())
        }
        Work::Record(record) => {
            record.complete(now_ns());
            Ok(())
        }
        Work::WaitShared(point) => {
            while !point.is_reached() && !context.is_dying() {
                std::thread::sleep(Duration::from_micros(50));
            }
            Ok(())
        }
        Work::WriteValue {
            address,
            value,
            bytes,
        } => write_value(context, *address, *value, *bytes),
        Work::WaitValue {
            address,
            value,
            bytes,
            comparison,
        } => loop {
            if compare(
                read_value(context, *address, *bytes)?,
                *value,
                *bytes,
                *comparison,
            ) || context.is_dying()
            {
                return Ok(());
            }
            std::thread::sleep(Duration::from_micros(20));
        },
        Work::Attach(memory) => memory.attach(),
        Work::Detach(memory) => {
            memory.detach();
            Ok(())
        }
        Work::Prefetch {
            device,
            address,
            bytes,
        } => timed(context, || {
            managed::prefetch_now(*device, *address, *bytes);
            Ok(())
        }),
        // An address that was freed twice is the program's fault, found out too late to tell.
        Work::Release(address) => crate::memory::alloc::free_now(*address).or(Ok(())),
    }
}

fn timed<T>(context: &Shared, work: impl FnOnce() -> T) -> T {
    let begin = now_ns();
    let result = work();
    process().machine.add_busy(context.device, now_ns() - begin);
    result
}

/// The pieces of a span: at most [`PIECE`] bytes each.
pub(crate) fn pieces(length: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..length.div_ceil(PIECE)).map(move |index| (index * PIECE, PIECE.min(length - index * PIECE)))
}

fn run_copy(copy: &Copy, context: &Shared) -> Result<(), CUresult> {
    let bytes = copy.width * copy.height * copy.depth;
    if bytes == 0 {
        return Ok(());
    }
    let end = {
        let tables = process().memory.read();
        let from = tables.place_for_copy(copy.from.address, 1, context.device, false);
        let to = tables.place_for_copy(copy.to.address, 1, context.device, true);
        drop(tables);
        match (from, to) {
            (Place::Device(device), Place::Pinned | Place::Pageable) => {
                process().machine.take_link(device, Direction::ToHost, bytes)
            }
            (Place::Pinned | Place::Pageable, Place::Device(device)) => {
                process().machine.take_link(device, Direction::ToDevice, bytes)
            }
            _ => None,
        }
    };
    let rows = copy.height * copy.depth;
    let whole = rows == 1
        || (copy.from.pitch == copy.width
            && copy.to.pitch == copy.width
            && (copy.depth == 1
                || (copy.from.plane == copy.width * copy.height
                    && copy.to.plane == copy.width * copy.height)));
    if whole {
        copy_line(copy.to.address, copy.from.address, bytes, context)?;
    } else {
        for row in 0..rows {
            let (y, z) = (row % copy.height, row / copy.height);
            let at = |side: &Side| side.address + y * side.pitch + z * side.plane;
            copy_line(at(&copy.to), at(&copy.from), copy.width, context)?;
        }
    }
    process().machine.wait_link(end);
    Ok(())
}

/// Copies one contiguous span, piece by piece. The spans may overlap within a piece.
fn copy_line(to: u64, from: u64, bytes: u64, context: &Shared) -> Result<(), CUresult> {
    for (offset, length) in pieces(bytes) {
        let tables = process().memory.read();
        let readable = tables.place_for_copy(from + offset, length, context.device, false);
        let writable = tables.place_for_copy(to + offset, length, context.device, true);
        if readable == Place::Fault || writable == Place::Fault {
            return Err(CUresult::ERROR_ILLEGAL_ADDRESS);
        }
        // SAFETY: a device side was found mapped with the needed access, and stays so while the tables are held; a host side
        // is the program's promise, as with the real driver.
        unsafe {
            std::ptr::copy(
                (from + offset) as *const u8,
                (to + offset) as *mut u8,
                length as usize,
            );
        }
    }
    Ok(())
}

/// Copies between devices, looking at each side with the eyes of the device that it is on.
fn run_peer_copy(copy: &Copy) -> Result<(), CUresult> {
    for row in 0..copy.height * copy.depth {
        let (y, z) = (row % copy.height, row / copy.height);
        let at = |side: &Side| side.address + y * side.pitch + z * side.plane;
        peer_line(at(&copy.to), at(&copy.from), copy.width)?;
    }
    Ok(())
}

fn peer_line(to: u64, from: u64, bytes: u64) -> Result<(), CUresult> {
    for (offset, length) in pieces(bytes) {
        let (from, to) = (from + offset, to + offset);
        let tables = process().memory.read();
        let owner = |address: u64| {
            tables
                .mapping_at(address)
                .and_then(|(_, mapping)| mapping.phys.device)
                .unwrap_or(0)
        };
        let readable = tables.place(from, length, owner(from), false);
        let writable = tables.place(to, length, owner(to), true);
        if readable == Place::Fault || writable == Place::Fault {
            return Err(CUresult::ERROR_ILLEGAL_ADDRESS);
        }
        // SAFETY: both sides were found accessible and stay so while the tables are held.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, length as usize) };
    }
    Ok(())
}

fn run_fill(fill: &Fill, context: &Shared) -> Result<(), CUresult> {
    let row_bytes = fill.width * fill.element;
    for row in 0..fill.height {
        let start = fill.to.address + row * fill.to.pitch;
        for (offset, length) in pieces(row_bytes) {
            with_span(context, start + offset, length, true, |at| {
                // SAFETY: `with_span` found the span accessible and keeps it so; the element size divides the piece size.
                unsafe { fill_span(at, length, fill.element, fill.value) };
            })?;
        }
    }
    Ok(())
}

/// # Safety
/// `[at, at + bytes)` may be written, and `element` (1, 2 or 4) divides `bytes` and the address.
unsafe fn fill_span(at: u64, bytes: u64, element: u64, value: u32) {
    let count = (bytes / element) as usize;
    // SAFETY: the caller's promise; each write stays inside.
    unsafe {
        match element {
            1 => std::ptr::write_bytes(at as *mut u8, value as u8, count),
            2 => {
                for index in 0..count {
                    (at as *mut u16).add(index).write(value as u16);
                }
            }
            _ => {
                for index in 0..count {
                    (at as *mut u32).add(index).write(value);
                }
            }
        }
    }
}

/// Gives a span of memory that a kernel accesses to `body`, or says that the access is illegal.
///
/// Kernels reach device memory with access and page-locked host memory, nothing else. The span must not be longer than a
/// piece: the tables are held meanwhile.
pub(crate) fn with_span<T>(
    context: &Shared,
    address: u64,
    bytes: u64,
    write: bool,
    body: impl FnOnce(u64) -> T,
) -> Result<T, CUresult> {
    managed::touch(context.device, address, bytes);
    let tables = process().memory.read();
    match tables.place(address, bytes, context.device, write) {
        Place::Device(_) | Place::Pinned => Ok(body(address)),
        Place::Fault | Place::Pageable => Err(CUresult::ERROR_ILLEGAL_ADDRESS),
    }
}

fn read_value(context: &Shared, address: u64, bytes: u64) -> Result<u64, CUresult> {
    with_span(context, address, bytes, false, |at| {
        // SAFETY: the span is accessible while the tables are held; alignment was checked when the work was submitted.
        unsafe {
            match bytes {
                4 => u64::from((*(at as *const std::sync::atomic::AtomicU32)).load(Ordering::Acquire)),
                _ => (*(at as *const AtomicU64)).load(Ordering::Acquire),
            }
        }
    })
}

fn write_value(context: &Shared, address: u64, value: u64, bytes: u64) -> Result<(), CUresult> {
    with_span(context, address, bytes, true, |at| {
        // SAFETY: the span is accessible while the tables are held; alignment was checked when the work was submitted.
        unsafe {
            match bytes {
                4 => (*(at as *const std::sync::atomic::AtomicU32)).store(value as u32, Ordering::Release),
                _ => (*(at as *const AtomicU64)).store(value, Ordering::Release),
            }
        }
    })
}

fn compare(seen: u64, wanted: u64, bytes: u64, comparison: Comparison) -> bool {
    match comparison {
        // Cyclic, as the driver compares: a counter may wrap.
        Comparison::GreaterOrEqual if bytes == 4 => (seen as u32).wrapping_sub(wanted as u32) as i32 >= 0,
        Comparison::GreaterOrEqual => seen.wrapping_sub(wanted) as i64 >= 0,
        Comparison::Equal => seen == wanted,
        Comparison::And => seen & wanted != 0,
        Comparison::Nor if bytes == 4 => !(seen as u32 | wanted as u32) != 0,
        Comparison::Nor => !(seen | wanted) != 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_span() {
        assert_eq!(pieces(0).count(), 0);
        let all: Vec<_> = pieces(PIECE * 2 + 5).collect();
        assert_eq!(all, [(0, PIECE), (PIECE, PIECE), (2 * PIECE, 5)]);
    }

    #[test]
    fn comparisons_are_cyclic() {
        assert!(compare(2, u64::from(u32::MAX), 4, Comparison::GreaterOrEqual));
        assert!(!compare(1, 2, 8, Comparison::GreaterOrEqual));
        assert!(compare(6, 2, 4, Comparison::And) && !compare(4, 2, 4, Comparison::And));
        assert!(!compare(u64::from(u32::MAX), 0, 4, Comparison::Nor));
    }
}
