//! Graphs: work with dependencies, made node by node or captured, instantiated, and launched into streams.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::conditional::{Conditional, Conditions};
use crate::context;
use crate::event::Event;
use crate::graph_memory::GraphMemory;
use crate::handles::fresh;
use crate::process::{lock, process};
use crate::stream::{Stream, submit, submit_now};
use crate::user_object::Held;
use crate::work::Work;

/// A node, by its handle. Handles grow, so their order is the order of making.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeRef(pub(crate) usize);

/// What a node does.
#[derive(Debug, Clone)]
pub(crate) enum Action {
    Work(Work),
    Record(Arc<Event>),
    Wait(Arc<Event>),
    /// A graph inside, as it was when the node was made.
    Child(Nodes, usize),
    Allocate(Arc<GraphMemory>),
    Free(Arc<GraphMemory>),
    Conditional(Arc<Conditional>),
}

impl Action {
    pub(crate) fn kind(&self) -> CUgraphNodeType {
        match self {
            Self::Work(Work::Kernel(_)) => CU_GRAPH_NODE_TYPE_KERNEL,
            Self::Work(Work::Copy(_) | Work::PeerCopy(_)) => CU_GRAPH_NODE_TYPE_MEMCPY,
            Self::Work(Work::Fill(_)) => CU_GRAPH_NODE_TYPE_MEMSET,
            Self::Work(Work::Host(_) | Work::Callback(_)) => CU_GRAPH_NODE_TYPE_HOST,
            Self::Work(Work::WriteValue { .. } | Work::WaitValue { .. }) => CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
            Self::Work(_) => CU_GRAPH_NODE_TYPE_EMPTY,
            Self::Record(_) => CU_GRAPH_NODE_TYPE_EVENT_RECORD,
            Self::Wait(_) => CU_GRAPH_NODE_TYPE_WAIT_EVENT,
            Self::Child(..) => CU_GRAPH_NODE_TYPE_GRAPH,
            Self::Allocate(_) => CU_GRAPH_NODE_TYPE_MEM_ALLOC,
            Self::Free(_) => CU_GRAPH_NODE_TYPE_MEM_FREE,
            Self::Conditional(_) => CU_GRAPH_NODE_TYPE_CONDITIONAL,
        }
    }
}

/// A node with what it depends on.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) action: Action,
    pub(crate) after: Vec<NodeRef>,
}

pub(crate) type Nodes = BTreeMap<NodeRef, Node>;

/// A graph.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) handle: usize,
    pub(crate) nodes: Mutex<Nodes>,
    /// Of a clone: its nodes by those that they were made from.
    pub(crate) twins: BTreeMap<NodeRef, NodeRef>,
    pub(crate) conditions: Conditions,
    /// What it was last instantiated as, by handle.
    instance: AtomicUsize,
    pub(crate) held: Held,
    /// It was moved into another graph, whose part it is from then on.
    pub(crate) moved: AtomicBool,
    /// Graphs that were moved into this one.
    owned: Mutex<Vec<Arc<Graph>>>,
}

impl Graph {
    /// A new graph that the program can find by its handle.
    pub(crate) fn new() -> Arc<Self> {
        Self::with(Nodes::new(), BTreeMap::new(), Held::default())
    }

    fn with(nodes: Nodes, twins: BTreeMap<NodeRef, NodeRef>, held: Held) -> Arc<Self> {
        let graph = Arc::new(Self {
            handle: fresh(),
            nodes: Mutex::new(nodes),
            twins,
            conditions: Conditions::default(),
            instance: AtomicUsize::new(0),
            held,
            moved: AtomicBool::new(false),
            owned: Mutex::default(),
        });
        process().graphs.insert(graph.handle, Arc::clone(&graph));
        graph
    }

    /// Whether it has nodes for which a graph exists only once: it is not cloned, not put into another, and instantiated once at a time.
    pub(crate) fn is_single(&self) -> bool {
        is_single(&lock(&self.nodes))
    }

    /// Makes a graph part of this one.
    pub(crate) fn own(&self, child: Arc<Self>) {
        child.moved.store(true, Ordering::Release);
        lock(&self.owned).push(child);
    }

    /// Takes back the handles of what is part of it.
    fn forget_owned(&self) {
        for child in lock(&self.owned).drain(..) {
            child.forget();
            child.forget_owned();
        }
    }

    /// Takes the handle back.
    pub(crate) fn forget(&self) {
        process().graphs.remove(self.handle);
    }

    /// Adds a node.
    pub(crate) fn add(&self, action: Action, after: &[NodeRef]) -> Result<NodeRef, CUresult> {
        let mut nodes = lock(&self.nodes);
        let unique: BTreeSet<NodeRef> = after.iter().copied().collect();
        if unique.len() != after.len() || !unique.iter().all(|node| nodes.contains_key(node)) {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let node = NodeRef(fresh());
        nodes.insert(
            node,
            Node {
                action,
                after: after.to_vec(),
            },
        );
        Ok(node)
    }

    /// These nodes and everything that they depend on.
    pub(crate) fn ancestors(&self, of: &[NodeRef]) -> BTreeSet<NodeRef> {
        let nodes = lock(&self.nodes);
        let mut found = BTreeSet::new();
        let mut open = of.to_vec();
        while let Some(node) = open.pop() {
            if found.insert(node)
                && let Some(entry) = nodes.get(&node)
            {
                open.extend(&entry.after);
            }
        }
        found
    }
}

fn is_single(nodes: &Nodes) -> bool {
    nodes.values().any(|node| match &node.action {
        Action::Allocate(_) | Action::Free(_) | Action::Conditional(_) => true,
        Action::Child(inner, _) => is_single(inner),
        _ => false,
    })
}

/// The order in which nodes can run, or `None` if they form a circle. Of what is ready, the oldest comes first.
pub(crate) fn order(nodes: &Nodes) -> Option<Vec<NodeRef>> {
    let mut done = BTreeSet::new();
    let mut sequence = Vec::new();
    let mut left: Vec<NodeRef> = nodes.keys().copied().collect();
    while !left.is_empty() {
        let before = left.len();
        left.retain(|node| {
            let ready = nodes[node].after.iter().all(|other| done.contains(other));
            if ready {
                done.insert(*node);
                sequence.push(*node);
            }
            !ready
        });
        if left.len() == before {
            return None;
        }
    }
    Some(sequence)
}

/// A graph made ready to launch.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) nodes: Mutex<Nodes>,
    /// Nodes that are switched off.
    pub(crate) off: Mutex<BTreeSet<NodeRef>>,
    pub(crate) flags: u64,
    _held: Held,
}

pub(crate) fn find(handle: CUgraph) -> Result<Arc<Graph>, CUresult> {
    process()
        .graphs
        .get(handle.0)
        .ok_or(CUresult::ERROR_INVALID_VALUE)
}

pub(crate) fn find_exec(handle: CUgraphExec) -> Result<Arc<Exec>, CUresult> {
    process().execs.get(handle.0).ok_or(CUresult::ERROR_INVALID_VALUE)
}

/// The graph that a node is in.
pub(crate) fn graph_of(node: CUgraphNode) -> Result<Arc<Graph>, CUresult> {
    let node = NodeRef(node.0);
    process()
        .graphs
        .all()
        .into_iter()
        .find(|graph| lock(&graph.nodes).contains_key(&node))
        .ok_or(CUresult::ERROR_INVALID_VALUE)
}

pub(crate) fn cuGraphCreate(c: &Caller, phGraph: *mut CUgraph, flags: u32) -> R {
    if flags != 0 || phGraph.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    c.put(phGraph, CUgraph(Graph::new().handle))
}

pub(crate) fn cuGraphDestroy(_: &Caller, hGraph: CUgraph) -> R {
    if find(hGraph)?.moved.load(Ordering::Acquire) {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let graph = process()
        .graphs
        .remove(hGraph.0)
        .ok_or(CUresult::ERROR_INVALID_VALUE)?;
    graph.forget_owned();
    Ok(())
}

pub(crate) fn cuGraphClone(c: &Caller, phGraphClone: *mut CUgraph, originalGraph: CUgraph) -> R {
    let graph = find(originalGraph)?;
    if graph.is_single() {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    let original = lock(&graph.nodes).clone();
    let names: BTreeMap<NodeRef, NodeRef> = original.keys().map(|node| (*node, NodeRef(fresh()))).collect();
    let nodes = original
        .into_iter()
        .map(|(node, entry)| {
            let after = entry
                .after
                .iter()
                .filter_map(|other| names.get(other).copied())
                .collect();
            (
                names[&node],
                Node {
                    action: entry.action,
                    after,
                },
            )
        })
        .collect();
    c.put(
        phGraphClone,
        CUgraph(Graph::with(nodes, names, graph.held.again()).handle),
    )
}

/// Instantiates, and says as what kind of failure it failed.
fn instantiate(
    c: &Caller,
    out: *mut CUgraphExec,
    graph: CUgraph,
    flags: u64,
) -> Result<(), (CUresult, CUgraphInstantiateResult)> {
    let plain = |code| (code, CUDA_GRAPH_INSTANTIATE_ERROR);
    let invalid = CUresult::ERROR_INVALID_VALUE;
    let check = context::current().and_then(|context| context.shared.check());
    check.map_err(plain)?;
    let known = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH.0
        | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD.0
        | CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH.0
        | CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY.0;
    if out.is_null() || flags & !u64::from(known) != 0 {
        return Err(plain(invalid));
    }
    // No built-in kernel launches graphs from the device.
    if flags & u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH.0) != 0 {
        return Err(plain(CUresult::ERROR_NOT_SUPPORTED));
    }
    let graph = find(graph).map_err(plain)?;
    if graph.moved.load(Ordering::Acquire) {
        return Err(plain(invalid));
    }
    if crate::conditional::has_unused(&graph) {
        return Err((invalid, CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED));
    }
    let instance = graph.instance.load(Ordering::Acquire);
    if graph.is_single() && process().execs.get(instance).is_some() {
        return Err(plain(CUresult::ERROR_NOT_SUPPORTED));
    }
    let nodes = crate::conditional::resolve(&lock(&graph.nodes)).map_err(plain)?;
    order(&nodes).ok_or((invalid, CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE))?;
    let handle = fresh();
    process().execs.insert(
        handle,
        Arc::new(Exec {
            nodes: Mutex::new(nodes),
            off: Mutex::default(),
            flags,
            _held: graph.held.again(),
        }),
    );
    graph.instance.store(handle, Ordering::Release);
    c.put(out, CUgraphExec(handle)).map_err(plain)
}

pub(crate) fn cuGraphInstantiateWithFlags(
    c: &Caller,
    phGraphExec: *mut CUgraphExec,
    hGraph: CUgraph,
    flags: u64,
) -> R {
    instantiate(c, phGraphExec, hGraph, flags).map_err(|(code, _)| code)
}

pub(crate) fn cuGraphInstantiate_v2(
    c: &Caller,
    phGraphExec: *mut CUgraphExec,
    hGraph: CUgraph,
    phErrorNode: *mut CUgraphNode,
    _logBuffer: *mut c_char,
    _bufferSize: usize,
) -> R {
    c.put_optional(phErrorNode, CUgraphNode::NULL);
    cuGraphInstantiateWithFlags(c, phGraphExec, hGraph, 0)
}

pub(crate) fn cuGraphInstantiateWithParams(
    c: &Caller,
    phGraphExec: *mut CUgraphExec,
    hGraph: CUgraph,
    instantiateParams: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
) -> R {
    let mut parameters = c.get(instantiateParams.cast_const())?;
    let result = instantiate(c, phGraphExec, hGraph, parameters.flags);
    parameters.hErrNode_out = CUgraphNode::NULL;
    parameters.result_out = match result {
        Ok(()) => CUDA_GRAPH_INSTANTIATE_SUCCESS,
        Err((_, kind)) => kind,
    };
    c.put(instantiateParams, parameters)?;
    result.map_err(|(code, _)| code)
}

pub(crate) fn cuGraphExecDestroy(_: &Caller, hGraphExec: CUgraphExec) -> R {
    process()
        .execs
        .remove(hGraphExec.0)
        .map(drop)
        .ok_or(CUresult::ERROR_INVALID_VALUE)
}

pub(crate) fn cuGraphExecGetFlags(c: &Caller, hGraphExec: CUgraphExec, flags: *mut u64) -> R {
    c.put(flags, find_exec(hGraphExec)?.flags)
}

pub(crate) fn cuGraphUpload(c: &Caller, hGraphExec: CUgraphExec, hStream: CUstream) -> R {
    find_exec(hGraphExec)?;
    c.stream(hStream).map(drop)
}

pub(crate) fn cuGraphLaunch(c: &Caller, hGraphExec: CUgraphExec, hStream: CUstream) -> R {
    let exec = find_exec(hGraphExec)?;
    let stream = c.stream(hStream)?;
    stream.context.check()?;
    let nodes = lock(&exec.nodes).clone();
    if stream.capturing.load(Ordering::Acquire) {
        return crate::capture::record_action(&stream, Action::Child(nodes, 0)).map(drop);
    }
    crate::capture::check_implicit(&stream)?;
    take_memory(&nodes, &stream, exec.flags)?;
    // One node of nothing first: it takes its place behind what the stream must wait for.
    submit(&stream, Work::Empty)?;
    let off = lock(&exec.off).clone();
    run(&nodes, &off, &stream);
    // What it holds stays until the stream has come to the end of it.
    submit_now(&stream, [Work::Hold(exec)]);
    Ok(())
}

/// Physical memory is taken when a graph is launched, so that the launch can say that there is none.
fn take_memory(nodes: &Nodes, stream: &Arc<Stream>, flags: u64) -> R {
    let auto_free = flags & u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH.0) != 0;
    for node in nodes.values() {
        match &node.action {
            Action::Allocate(memory) => {
                if memory.is_attached() {
                    stream.drain();
                }
                if memory.is_attached() {
                    if !auto_free {
                        return Err(CUresult::ERROR_INVALID_VALUE);
                    }
                    memory.detach();
                }
                memory.attach()?;
            }
            Action::Work(Work::Kernel(launch)) => crate::launch::make_local_room(stream, launch)?,
            Action::Child(inner, _) => take_memory(inner, stream, flags)?,
            _ => {}
        }
    }
    Ok(())
}

fn run(nodes: &Nodes, off: &BTreeSet<NodeRef>, stream: &Arc<Stream>) {
    for node in order(nodes).unwrap_or_default() {
        if off.contains(&node) {
            continue;
        }
        match &nodes[&node].action {
            Action::Work(work) => {
                submit_now(stream, [work.clone()]);
            }
            Action::Record(event) => crate::event::record_in_graph(stream, event),
            Action::Wait(event) => crate::event::wait_in_graph(stream, event),
            Action::Child(inner, _) => run(inner, &BTreeSet::new(), stream),
            // Resolved when it was instantiated.
            Action::Conditional(_) => {}
            Action::Allocate(memory) => {
                submit_now(stream, [Work::Attach(Arc::clone(memory))]);
            }
            Action::Free(memory) => {
                submit_now(stream, [Work::Detach(Arc::clone(memory))]);
            }
        }
    }
}

/// Kinds and dependencies by position: what must be the same for an update.
pub(crate) fn shape(nodes: &Nodes) -> Vec<(CUgraphNodeType, Vec<usize>)> {
    let position: BTreeMap<NodeRef, usize> = nodes
        .keys()
        .enumerate()
        .map(|(index, node)| (*node, index))
        .collect();
    nodes
        .values()
        .map(|node| {
            let mut after: Vec<usize> = node
                .after
                .iter()
                .filter_map(|other| position.get(other).copied())
                .collect();
            after.sort_unstable();
            (node.action.kind(), after)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(edges: &[(usize, &[usize])]) -> Nodes {
        edges
            .iter()
            .map(|(node, after)| {
                let after = after.iter().map(|other| NodeRef(*other)).collect();
                (
                    NodeRef(*node),
                    Node {
                        action: Action::Work(Work::Empty),
                        after,
                    },
                )
            })
            .collect()
    }

    #[test]
    fn order_respects_edges_and_finds_circles() {
        let graph = nodes(&[(1, &[3]), (2, &[]), (3, &[2])]);
        assert_eq!(order(&graph), Some(vec![NodeRef(2), NodeRef(3), NodeRef(1)]));
        assert_eq!(order(&nodes(&[(1, &[2]), (2, &[1])])), None);
    }

    #[test]
    fn shapes_compare_by_position() {
        assert_eq!(
            shape(&nodes(&[(1, &[]), (2, &[1])])),
            shape(&nodes(&[(7, &[]), (9, &[7])]))
        );
        assert_ne!(
            shape(&nodes(&[(1, &[]), (2, &[1])])),
            shape(&nodes(&[(7, &[]), (9, &[])]))
        );
    }
}
