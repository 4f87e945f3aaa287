//! Memory that graphs own: counted against the limit from the node that takes it until the last graph and the last instance are gone that
//! may launch it. The driver takes the physical memory at a launch, at the latest; the lease is there before, so that no launch fails
//! because it was lent out.
//!
//! ```text
//!            node added, or captured                instantiated
//!   graph ──────────────────────────► share ◄──────────────────── instance
//!     ▲ bodies of conditions, and graphs that were moved into another, are part of that graph
//! ```
//!
//! A *share* is the memory of one graph. Its holders are the graph and its instances: a graph may be destroyed as soon as it is instantiated,
//! and most programs do that. A capture that comes to nothing takes its graph along ([`gone`]).
//!
//! Memory that a graph took and did not free outlives both; the program frees it by address. Such a *leftover* counts until then, or until the
//! driver says that graphs use nothing on its device.
//!
//! # Locks
//! `BOOK` and `LEFT`, one at a time; neither is held across a call of the driver or into the engine.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::*;
use ebb_layer_core::ExternalKind;

use crate::barrier::{self, Passage};
use crate::bridge::{self, Running};
use crate::frameworks::private;
use crate::hooks::external::{self, Piece, reserve, settle};
use crate::hooks::with;
use crate::symbols::real;

/// Who may launch the memory of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Graph(usize),
    Instance(usize),
}

/// The memory of one node, or a private pool of the capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Taken {
    /// The address, or the capture's number.
    address: u64,
    /// `None`: a private pool.
    piece: Option<Piece>,
    /// A node of the same capture or graph frees it.
    freed: bool,
}

/// The memory of one graph, and how many hold it.
#[derive(Debug, Default)]
struct Share {
    taken: Vec<Taken>,
    holders: u32,
}

#[derive(Debug, Default)]
struct Book {
    shares: HashMap<u64, Share>,
    held: HashMap<Holder, Vec<u64>>,
    /// Graphs that are part of another, by the one that is destroyed with them.
    inside: HashMap<usize, usize>,
    last: u64,
}

/// What counts no longer.
type Off = Vec<Taken>;

impl Book {
    /// The graph that a graph is part of, in the end.
    fn root(&self, graph: usize) -> usize {
        self.inside.get(&graph).copied().unwrap_or(graph)
    }

    /// A graph has a node more that takes memory.
    fn add(&mut self, graph: usize, address: u64, piece: Option<Piece>) {
        let holder = Holder::Graph(self.root(graph));
        let number = match self.held.get(&holder).and_then(|shares| shares.first()) {
            Some(number) => *number,
            None => {
                self.last += 1;
                self.shares.entry(self.last).or_default().holders = 1;
                self.held.insert(holder, vec![self.last]);
                self.last
            }
        };
        if let Some(share) = self.shares.get_mut(&number) {
            share.taken.push(Taken {
                address,
                piece,
                freed: false,
            });
        }
    }

    /// A graph is part of another one from now on.
    fn adopt(&mut self, parent: usize, child: usize) {
        let root = self.root(parent);
        if child == root {
            return;
        }
        for graph in self.inside.values_mut().filter(|graph| **graph == child) {
            *graph = root;
        }
        self.inside.insert(child, root);
        if let Some(shares) = self.held.remove(&Holder::Graph(child)) {
            self.held.entry(Holder::Graph(root)).or_default().extend(shares);
        }
    }

    /// A graph was instantiated.
    fn instantiated(&mut self, graph: usize, instance: usize) -> Off {
        // An instance whose end was not seen had the same handle.
        let off = self.drop_holder(Holder::Instance(instance));
        let Some(shares) = self.held.get(&Holder::Graph(self.root(graph))).cloned() else {
            return off;
        };
        for number in &shares {
            if let Some(share) = self.shares.get_mut(number) {
                share.holders += 1;
            }
        }
        self.held.insert(Holder::Instance(instance), shares);
        off
    }

    /// A node frees what is at this address.
    fn freed(&mut self, address: u64) {
        for taken in self.shares.values_mut().flat_map(|share| &mut share.taken) {
            taken.freed |= taken.address == address && taken.piece.is_some();
        }
    }

    fn graph_gone(&mut self, graph: usize) -> Off {
        self.inside.retain(|_, root| *root != graph);
        self.drop_holder(Holder::Graph(graph))
    }

    fn drop_holder(&mut self, holder: Holder) -> Off {
        let mut off = Off::new();
        for number in self.held.remove(&holder).unwrap_or_default() {
            if let Some(share) = self.shares.get_mut(&number) {
                share.holders -= 1;
                if share.holders == 0
                    && let Some(share) = self.shares.remove(&number)
                {
                    off.extend(share.taken);
                }
            }
        }
        off
    }
}

static BOOK: Mutex<Option<Book>> = Mutex::new(None);
/// Shares and graphs that are part of others: most programs have none.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Leftovers: device and address.
static LEFT: Mutex<Vec<(usize, u64)>> = Mutex::new(Vec::new());
static LEFT_COUNT: AtomicUsize = AtomicUsize::new(0);

fn left() -> MutexGuard<'static, Vec<(usize, u64)>> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Changes the book; what came off it is given back to the engine outside the lock.
fn change(running: &Running, change: impl FnOnce(&mut Book) -> Off) {
    let mut guard = BOOK.lock().unwrap_or_else(PoisonError::into_inner);
    let book = guard.get_or_insert_default();
    let off = change(book);
    COUNT.store(book.shares.len() + book.inside.len(), Ordering::Release);
    drop(guard);
    if off.is_empty() && LEFT_COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    let before = core::mem::take(&mut *left());
    let (mut stay, over): (Vec<_>, Vec<_>) = before
        .into_iter()
        .partition(|(device, _)| in_use(running, *device));
    for (_, address) in over {
        external::gone(external::Id::Pointer(address));
    }
    for taken in off {
        let Some(piece) = taken.piece else {
            private::capture_over(running, taken.address);
            continue;
        };
        let stays = !taken.freed && in_use(running, piece.device);
        if stays {
            stay.push((piece.device, taken.address));
        }
        settle(Some(piece), stays.then_some(external::Id::Pointer(taken.address)));
    }
    let mut left = left();
    left.extend(stay);
    LEFT_COUNT.store(left.len(), Ordering::Release);
}

/// Whether the driver has memory of graphs in use on a device.
fn in_use(running: &Running, device: usize) -> bool {
    let Some(device) = running.by_index(device) else {
        return false;
    };
    let mut bytes = 0u64;
    // SAFETY: a place for the figure, which has 64 bits.
    let known = unsafe {
        real::cuDeviceGetGraphMemAttribute(
            device.ordinal,
            CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT,
            (&raw mut bytes).cast(),
        )
    };
    known.is_success() && bytes > 0
}

/// The same if there is anything in the book.
fn change_if_any(what: impl FnOnce(&mut Book) -> Off) {
    let any = COUNT.load(Ordering::Acquire) != 0 || LEFT_COUNT.load(Ordering::Acquire) != 0;
    if any && bridge::is_running() {
        with(|running| {
            change(running, what);
            Some(())
        });
    }
}

/// The driver took on a node that takes memory, which was counted before.
pub(crate) fn took(graph: CUgraph, address: u64, piece: Piece) {
    with(|running| {
        change(running, |book| {
            book.add(graph.0, address, Some(piece));
            Off::new()
        });
        Some(())
    });
}

/// What is captured for this graph has a private pool, until the graph and its instances are gone.
pub(crate) fn has_private(graph: CUgraph, capture: u64) {
    with(|running| {
        change(running, |book| {
            book.add(graph.0, capture, None);
            Off::new()
        });
        Some(())
    });
}

/// A node frees memory: of a graph, or captured.
pub(crate) fn freed(address: u64) {
    change_if_any(|book| {
        book.freed(address);
        Off::new()
    });
}

/// A graph is destroyed, by the program or with the capture that made it.
pub(crate) fn gone(graph: CUgraph) {
    change_if_any(|book| book.graph_gone(graph.0));
}

/// After the driver was asked for a node: it is there, or what was counted for it is not needed.
fn after(piece: Option<Piece>, graph: CUgraph, result: CUresult, address: impl FnOnce() -> u64) {
    match piece {
        Some(piece) if result.is_success() => took(graph, address(), piece),
        piece => settle(piece, None),
    }
}

/// The device of a node's memory; `None` if it is not on a device that can be managed.
fn device_of(running: &Running, node: &CUDA_MEM_ALLOC_NODE_PARAMS) -> Option<usize> {
    let location = node.poolProps.location;
    if location.type_ != CU_MEM_LOCATION_TYPE_DEVICE {
        return None;
    }
    let ordinal = CUdevice(location.u.cast_signed());
    running
        .index_of(ordinal)
        .or_else(|| running.attach(ordinal, None))
}

/// Counts a node's memory before the driver is asked.
fn count(node: Option<&CUDA_MEM_ALLOC_NODE_PARAMS>) -> Result<Option<Piece>, CUresult> {
    let Some(node) = node else { return Ok(None) };
    reserve(ExternalKind::Graph, Some(node.bytesize as u64), |running| {
        device_of(running, node)
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGraphAddMemAllocNode(
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    nodeParams: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
) -> CUresult {
    // SAFETY: the program's parameters, or null, which the driver will refuse.
    let piece = match count(unsafe { nodeParams.as_ref() }) {
        Ok(piece) => piece,
        Err(code) => return code,
    };
    // SAFETY: the program's own call.
    let result = unsafe {
        real::cuGraphAddMemAllocNode(phGraphNode, hGraph, dependencies, numDependencies, nodeParams)
    };
    // SAFETY: the driver accepted the parameters and has written the address there.
    after(piece, hGraph, result, || unsafe { (*nodeParams).dptr }.0);
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGraphAddMemFreeNode(
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    dptr: CUdeviceptr,
) -> CUresult {
    // SAFETY: the program's own call.
    let result =
        unsafe { real::cuGraphAddMemFreeNode(phGraphNode, hGraph, dependencies, numDependencies, dptr) };
    if result.is_success() {
        freed(dptr.0);
    }
    result
}

/// The parameters of one kind of node, in the general form.
///
/// # Safety
/// `T` is the kind's own structure.
unsafe fn kind<T>(node: &CUgraphNodeParams, kind: CUgraphNodeType) -> Option<&T> {
    const { assert!(size_of::<T>() <= size_of::<[u64; 29]>() && align_of::<T>() <= align_of::<u64>()) };
    // SAFETY: words that hold a `T`, by this function's contract, and are large enough for one.
    (node.type_ == kind).then(|| unsafe { &*node.u.as_ptr().cast() })
}

/// A node that has graphs inside, as the general form has it.
#[derive(Clone, Copy)]
#[repr(C)]
struct ConditionalParams {
    handle: u64,
    kind: u32,
    size: u32,
    bodies: *const CUgraph,
    context: CUcontext,
}

/// A node that is a graph.
#[derive(Clone, Copy)]
#[repr(C)]
struct ChildParams {
    graph: CUgraph,
    ownership: u32,
}

/// `CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE`.
const MOVE: u32 = 1;

/// Remembers the graphs that a new node brought along and that are destroyed with the graph that it is in, and what it frees.
///
/// # Safety
/// The driver has just accepted these parameters.
unsafe fn inner(node: &CUgraphNodeParams, graph: CUgraph) {
    // SAFETY: the structure of that kind.
    let conditional: Option<&ConditionalParams> = unsafe { kind(node, CU_GRAPH_NODE_TYPE_CONDITIONAL) };
    // SAFETY: as above.
    let child: Option<&ChildParams> = unsafe { kind(node, CU_GRAPH_NODE_TYPE_GRAPH) };
    // SAFETY: as above.
    let free: Option<&CUDA_MEM_FREE_NODE_PARAMS> = unsafe { kind(node, CU_GRAPH_NODE_TYPE_MEM_FREE) };
    if let Some(node) = free {
        freed(node.dptr.0);
    }
    let mut children = Vec::new();
    if let Some(node) = conditional
        && !node.bodies.is_null()
    {
        for index in 0..node.size as usize {
            // SAFETY: the driver has told so many graphs there.
            children.push(unsafe { node.bodies.add(index).read() }.0);
        }
    }
    children.extend(
        child
            .filter(|node| node.ownership == MOVE)
            .map(|node| node.graph.0),
    );
    if !children.is_empty() {
        with(|running| {
            change(running, |book| {
                children.iter().for_each(|child| book.adopt(graph.0, *child));
                Off::new()
            });
            Some(())
        });
    }
}

/// Nodes of any kind: those that allocate are counted, and the driver looks at the addresses of others.
macro_rules! add_node {
    ($($name:ident($($parameter:ident: $ty:ty),*);)*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph $(, $parameter: $ty)*, nodeParams: *mut CUgraphNodeParams,
        ) -> CUresult {
            // SAFETY: the program's parameters, or null, which the driver will refuse.
            let memory = unsafe { nodeParams.as_ref() }.and_then(|node| {
                // SAFETY: the structure of that kind.
                unsafe { kind(node, CU_GRAPH_NODE_TYPE_MEM_ALLOC) }
            });
            let piece = match count(memory) {
                Ok(piece) => piece,
                Err(code) => return code,
            };
            let passage = barrier::enter();
            if let Passage::Refused(code) = passage {
                settle(piece, None);
                return code;
            }
            // SAFETY: the program's own call.
            let result = unsafe { real::$name(phGraphNode, hGraph $(, $parameter)*, nodeParams) };
            barrier::leave(passage);
            after(piece, hGraph, result, || {
                // SAFETY: the driver accepted the parameters, of the kind that was counted, and has written the address there.
                unsafe { kind::<CUDA_MEM_ALLOC_NODE_PARAMS>(&*nodeParams, CU_GRAPH_NODE_TYPE_MEM_ALLOC) }
                    .map_or(0, |node| node.dptr.0)
            });
            if result.is_success() && bridge::is_running() {
                // SAFETY: the driver accepted the parameters, so that they are there.
                unsafe { inner(&*nodeParams, hGraph) };
            }
            result
        }
    )*};
}
add_node! {
    cuGraphAddNode(dependencies: *const CUgraphNode, numDependencies: usize);
    cuGraphAddNode_v2(dependencies: *const CUgraphNode, dependencyData: *const CUgraphEdgeData, numDependencies: usize);
    cuGraphAddNode_v3(dependencies: *const CUgraphNode, dependencyData: *const CUgraphEdgeData, numDependencies: usize);
}

/// Instantiation: the driver looks at the addresses of all nodes, and the instance holds the graph's memory.
macro_rules! instantiate {
    ($($name:ident($($parameter:ident: $ty:ty),*);)*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            phGraphExec: *mut CUgraphExec, hGraph: CUgraph $(, $parameter: $ty)*
        ) -> CUresult {
            let passage = barrier::enter();
            if let Passage::Refused(code) = passage {
                return code;
            }
            // SAFETY: the program's own call.
            let result = unsafe { real::$name(phGraphExec, hGraph $(, $parameter)*) };
            barrier::leave(passage);
            if result.is_success() {
                change_if_any(|book| {
                    // SAFETY: the driver has just written it.
                    book.instantiated(hGraph.0, unsafe { phGraphExec.read() }.0)
                });
            }
            result
        }
    )*};
}
instantiate! {
    cuGraphInstantiate(phErrorNode: *mut CUgraphNode, logBuffer: *mut c_char, bufferSize: usize);
    cuGraphInstantiate_v2(phErrorNode: *mut CUgraphNode, logBuffer: *mut c_char, bufferSize: usize);
    cuGraphInstantiateWithFlags(flags: u64);
    cuGraphInstantiateWithParams(instantiateParams: *mut CUDA_GRAPH_INSTANTIATE_PARAMS);
    cuGraphInstantiateWithParams_ptsz(instantiateParams: *mut CUDA_GRAPH_INSTANTIATE_PARAMS);
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGraphDestroy(hGraph: CUgraph) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuGraphDestroy(hGraph) };
    if result.is_success() {
        gone(hGraph);
    }
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGraphExecDestroy(hGraphExec: CUgraphExec) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuGraphExecDestroy(hGraphExec) };
    if result.is_success() {
        change_if_any(|book| book.drop_holder(Holder::Instance(hGraphExec.0)));
    }
    result
}

/// In the child of a fork: the parent's graphs are not ours.
pub(crate) fn forget_in_child() {
    if let Ok(mut book) = BOOK.try_lock() {
        *book = None;
        COUNT.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names memory by its address, of so many MiB.
    fn add(book: &mut Book, graph: usize, address: u64) {
        book.add(
            graph,
            address,
            Some(Piece::new(0, ExternalKind::Graph, address << 20)),
        );
    }

    fn addresses(off: Off) -> Vec<u64> {
        let mut all: Vec<u64> = off.iter().map(|taken| taken.address).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn memory_counts_until_its_last_holder_has_gone() {
        let mut book = Book::default();
        add(&mut book, 1, 10);
        add(&mut book, 1, 5);
        book.freed(5);
        assert_eq!(book.instantiated(1, 100), []);
        assert_eq!(book.graph_gone(1), [], "the instance may be launched");
        let off = book.drop_holder(Holder::Instance(100));
        assert_eq!(
            off.iter()
                .map(|taken| (taken.address, taken.freed))
                .collect::<Vec<_>>(),
            [(10, false), (5, true)]
        );
        assert!(book.shares.is_empty() && book.held.is_empty());
        // A graph without memory has instances that hold nothing.
        assert_eq!(book.instantiated(2, 100), []);
        assert_eq!(book.drop_holder(Holder::Instance(100)), []);
        assert!(book.held.is_empty());
    }

    #[test]
    fn an_instance_holds_what_was_there_and_handles_come_again() {
        let mut book = Book::default();
        add(&mut book, 1, 10);
        assert_eq!(book.instantiated(1, 100), []);
        assert_eq!(book.graph_gone(1), []);
        add(&mut book, 1, 3);
        assert_eq!(
            addresses(book.graph_gone(1)),
            [3],
            "another graph with the same handle"
        );
        add(&mut book, 2, 4);
        let off = book.instantiated(2, 100);
        assert_eq!(addresses(off), [10], "another instance with the same handle");
        assert_eq!(book.drop_holder(Holder::Instance(100)), []);
        assert_eq!(addresses(book.graph_gone(2)), [4]);
    }

    #[test]
    fn what_is_inside_another_graph_goes_with_it() {
        let mut book = Book::default();
        book.adopt(1, 2);
        add(&mut book, 2, 10);
        add(&mut book, 3, 1);
        book.adopt(2, 3);
        book.adopt(5, 4);
        add(&mut book, 4, 7);
        book.adopt(1, 5);
        book.adopt(1, 1);
        assert_eq!(book.root(4), 1);
        assert_eq!(addresses(book.graph_gone(1)), [1, 7, 10]);
        assert!(book.inside.is_empty(), "their handles may be other graphs");
        add(&mut book, 2, 1);
        assert_eq!(addresses(book.graph_gone(2)), [1]);
    }
}
