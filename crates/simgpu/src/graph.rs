//! Graphs: work with dependencies, made node by node or captured, instantiated, and launched into streams.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::context;
use crate::event::Event;
use crate::graph_memory::GraphMemory;
use crate::handles::fresh;
use crate::process::{lock, process};
use crate::stream::{Stream, submit, submit_now};
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
}

impl Graph {
    /// A new graph that the program can find by its handle.
    pub(crate) fn new() -> Arc<Self> {
        Self::with(Nodes::new())
    }

    fn with(nodes: Nodes) -> Arc<Self> {
        let graph = Arc::new(Self {
            handle: fresh(),
            nodes: Mutex::new(nodes),
        });
        process().graphs.insert(graph.handle, Arc::clone(&graph));
        graph
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
    pub(crate) flags: u64,
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
    process()
        .graphs
        .remove(hGraph.0)
        .map(drop)
        .ok_or(CUresult::ERROR_INVALID_VALUE)
}

pub(crate) fn cuGraphClone(c: &Caller, phGraphClone: *mut CUgraph, originalGraph: CUgraph) -> R {
    let original = lock(&find(originalGraph)?.nodes).clone();
    if original
        .values()
        .any(|node| matches!(node.action, Action::Allocate(_) | Action::Free(_)))
    {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
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
    c.put(phGraphClone, CUgraph(Graph::with(nodes).handle))
}

fn instantiate(c: &Caller, out: *mut CUgraphExec, graph: CUgraph, flags: u64) -> R {
    context::current()?.shared.check()?;
    if out.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let nodes = lock(&find(graph)?.nodes).clone();
    order(&nodes).ok_or(CUresult::ERROR_INVALID_VALUE)?;
    let handle = fresh();
    process().execs.insert(
        handle,
        Arc::new(Exec {
            nodes: Mutex::new(nodes),
            flags,
        }),
    );
    c.put(out, CUgraphExec(handle))
}

pub(crate) fn cuGraphInstantiateWithFlags(
    c: &Caller,
    phGraphExec: *mut CUgraphExec,
    hGraph: CUgraph,
    flags: u64,
) -> R {
    instantiate(c, phGraphExec, hGraph, flags)
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
    instantiate(c, phGraphExec, hGraph, 0)
}

pub(crate) fn cuGraphInstantiateWithParams(
    c: &Caller,
    phGraphExec: *mut CUgraphExec,
    hGraph: CUgraph,
    instantiateParams: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
) -> R {
    let mut parameters = c.get(instantiateParams.cast_const())?;
    instantiate(c, phGraphExec, hGraph, parameters.flags)?;
    parameters.hErrNode_out = CUgraphNode::NULL;
    parameters.result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
    c.put(instantiateParams, parameters)
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
    if stream.capturing.load(std::sync::atomic::Ordering::Acquire) {
        return crate::capture::record_action(&stream, Action::Child(nodes, 0)).map(drop);
    }
    crate::capture::check_implicit(&stream)?;
    take_memory(&nodes, &stream, exec.flags)?;
    // One node of nothing first: it takes its place behind what the stream must wait for.
    submit(&stream, Work::Empty)?;
    run(&nodes, &stream);
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

fn run(nodes: &Nodes, stream: &Arc<Stream>) {
    for node in order(nodes).unwrap_or_default() {
        match &nodes[&node].action {
            Action::Work(work) => {
                submit_now(stream, [work.clone()]);
            }
            Action::Record(event) => crate::event::record_in_graph(stream, event),
            Action::Wait(event) => crate::event::wait_in_graph(stream, event),
            Action::Child(inner, _) => run(inner, stream),
            Action::Allocate(memory) => {
                submit_now(stream, [Work::Attach(Arc::clone(memory))]);
            }
            Action::Free(memory) => {
                submit_now(stream, [Work::Detach(Arc::clone(memory))]);
            }
        }
    }
}

pub(crate) fn cuGraphExecUpdate_v2(
    c: &Caller,
    hGraphExec: CUgraphExec,
    hGraph: CUgraph,
    resultInfo: *mut CUgraphExecUpdateResultInfo,
) -> R {
    let exec = find_exec(hGraphExec)?;
    let fresh_nodes = lock(&find(hGraph)?.nodes).clone();
    let mut nodes = lock(&exec.nodes);
    let same_shape = shape(&nodes) == shape(&fresh_nodes);
    let mut info = CUgraphExecUpdateResultInfo::default();
    if !same_shape {
        info.result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        c.put_optional(resultInfo, info);
        return Err(CUresult::ERROR_GRAPH_EXEC_UPDATE_FAILURE);
    }
    *nodes = fresh_nodes;
    c.put_optional(resultInfo, info);
    Ok(())
}

/// Kinds and dependencies by position: what must be the same for an update.
fn shape(nodes: &Nodes) -> Vec<(CUgraphNodeType, Vec<usize>)> {
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
