//! Making, reading and changing the nodes of graphs.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::context;
use crate::copy::describe_3d;
use crate::graph::{Action, Graph, Node, NodeRef, Nodes, find, find_exec, graph_of};
use crate::graph_memory::GraphMemory;
use crate::kernels::Launch;
use crate::launch::{Request, prepare};
use crate::memory::READ_WRITE;
use crate::process::{lock, process};
use crate::work::{Copy, Fill, HostCall, Side, Work};

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;

fn add(
    c: &Caller,
    out: *mut CUgraphNode,
    graph: &Graph,
    after: *const CUgraphNode,
    count: usize,
    action: Action,
) -> R {
    if out.is_null() {
        return Err(INVALID);
    }
    let after: Vec<NodeRef> = c
        .array(after, count)?
        .into_iter()
        .map(|node| NodeRef(node.0))
        .collect();
    let node = graph.add(action, &after)?;
    c.put(out, CUgraphNode(node.0))
}

/// The node's action, if it is the kind that the call is for.
fn read<T>(node: CUgraphNode, pick: impl FnOnce(&Action) -> Option<T>) -> Result<T, CUresult> {
    let graph = graph_of(node)?;
    let nodes = lock(&graph.nodes);
    nodes
        .get(&NodeRef(node.0))
        .and_then(|node| pick(&node.action))
        .ok_or(INVALID)
}

/// Replaces a node's action by one of the same kind.
fn replace(nodes: &mut Nodes, node: CUgraphNode, action: Action) -> R {
    let entry: &mut Node = nodes.get_mut(&NodeRef(node.0)).ok_or(INVALID)?;
    if entry.action.kind() != action.kind() {
        return Err(INVALID);
    }
    entry.action = action;
    Ok(())
}

pub(crate) fn replace_in_graph(node: CUgraphNode, action: Action) -> R {
    let graph = graph_of(node)?;
    let mut nodes = lock(&graph.nodes);
    replace(&mut nodes, node, action)
}

pub(crate) fn replace_in_exec(exec: CUgraphExec, node: CUgraphNode, action: Action) -> R {
    let exec = find_exec(exec)?;
    let mut nodes = lock(&exec.nodes);
    replace(&mut nodes, node, action)
}

fn kernel(c: &Caller, p: &CUDA_KERNEL_NODE_PARAMS) -> Result<Action, CUresult> {
    let function = if p.func.is_null() { p.kern.0 } else { p.func.0 };
    let launch = prepare(
        c,
        &Request {
            function,
            grid: [p.gridDimX, p.gridDimY, p.gridDimZ],
            block: [p.blockDimX, p.blockDimY, p.blockDimZ],
            shared_bytes: p.sharedMemBytes,
            parameters: p.kernelParams,
            extra: p.extra,
        },
    )?;
    Ok(Action::Work(Work::Kernel(launch)))
}

fn widen(p: &CUDA_KERNEL_NODE_PARAMS_v1) -> CUDA_KERNEL_NODE_PARAMS {
    CUDA_KERNEL_NODE_PARAMS {
        func: p.func,
        gridDimX: p.gridDimX,
        gridDimY: p.gridDimY,
        gridDimZ: p.gridDimZ,
        blockDimX: p.blockDimX,
        blockDimY: p.blockDimY,
        blockDimZ: p.blockDimZ,
        sharedMemBytes: p.sharedMemBytes,
        kernelParams: p.kernelParams,
        extra: p.extra,
        ..CUDA_KERNEL_NODE_PARAMS::default()
    }
}

fn memset(p: &CUDA_MEMSET_NODE_PARAMS) -> Result<Action, CUresult> {
    if !matches!(p.elementSize, 1 | 2 | 4) || p.width == 0 || p.height == 0 || p.dst.is_null() {
        return Err(INVALID);
    }
    Ok(Action::Work(Work::Fill(Fill {
        to: Side {
            address: p.dst.0,
            pitch: p.pitch as u64,
            plane: 0,
        },
        value: p.value,
        element: u64::from(p.elementSize),
        width: p.width as u64,
        height: p.height as u64,
    })))
}

fn host(p: &CUDA_HOST_NODE_PARAMS) -> Result<Action, CUresult> {
    if p.fn_.is_none() {
        return Err(INVALID);
    }
    Ok(Action::Work(Work::Host(HostCall {
        function: p.fn_,
        data: p.userData as usize,
    })))
}

pub(crate) fn cuGraphAddEmptyNode(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
) -> R {
    add(
        c,
        phGraphNode,
        &*find(hGraph)?,
        dependencies,
        numDependencies,
        Action::Work(Work::Empty),
    )
}

pub(crate) fn cuGraphAddKernelNode_v2(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    nodeParams: *const CUDA_KERNEL_NODE_PARAMS,
) -> R {
    let action = kernel(c, &c.get(nodeParams)?)?;
    add(
        c,
        phGraphNode,
        &*find(hGraph)?,
        dependencies,
        numDependencies,
        action,
    )
}

pub(crate) fn cuGraphAddKernelNode(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    nodeParams: *const CUDA_KERNEL_NODE_PARAMS_v1,
) -> R {
    let action = kernel(c, &widen(&c.get(nodeParams)?))?;
    add(
        c,
        phGraphNode,
        &*find(hGraph)?,
        dependencies,
        numDependencies,
        action,
    )
}

pub(crate) fn cuGraphAddMemcpyNode(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    copyParams: *const CUDA_MEMCPY3D,
    _ctx: CUcontext,
) -> R {
    let action = Action::Work(Work::Copy(describe_3d(&c.get(copyParams)?)?));
    add(
        c,
        phGraphNode,
        &*find(hGraph)?,
        dependencies,
        numDependencies,
        action,
    )
}

pub(crate) fn cuGraphAddMemsetNode(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    memsetParams: *const CUDA_MEMSET_NODE_PARAMS,
    _ctx: CUcontext,
) -> R {
    let action = memset(&c.get(memsetParams)?)?;
    add(
        c,
        phGraphNode,
        &*find(hGraph)?,
        dependencies,
        numDependencies,
        action,
    )
}

pub(crate) fn cuGraphAddHostNode(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    nodeParams: *const CUDA_HOST_NODE_PARAMS,
) -> R {
    let action = host(&c.get(nodeParams)?)?;
    add(
        c,
        phGraphNode,
        &*find(hGraph)?,
        dependencies,
        numDependencies,
        action,
    )
}

pub(crate) fn cuGraphAddChildGraphNode(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    childGraph: CUgraph,
) -> R {
    let child = find(childGraph)?;
    if child.is_single() {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    if child.moved.load(Ordering::Acquire) {
        return Err(INVALID);
    }
    let child = lock(&child.nodes).clone();
    add(
        c,
        phGraphNode,
        &*find(hGraph)?,
        dependencies,
        numDependencies,
        Action::Child(child, childGraph.0),
    )
}

/// A node that is a graph, in the general form.
#[repr(C)]
#[derive(Clone, Copy)]
struct ChildParameters {
    graph: CUgraph,
    ownership: u32,
}

/// `CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE`: the graph itself becomes part of the other one, memory nodes included.
fn add_child(
    c: &Caller,
    out: *mut CUgraphNode,
    hGraph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    p: ChildParameters,
) -> R {
    match p.ownership {
        0 => cuGraphAddChildGraphNode(c, out, hGraph, after, count, p.graph),
        1 => {
            let (graph, child) = (find(hGraph)?, find(p.graph)?);
            let nodes = lock(&child.nodes).clone();
            let conditional = |node: &Node| matches!(node.action, Action::Conditional(_));
            if nodes.values().any(conditional) {
                return Err(CUresult::ERROR_NOT_SUPPORTED);
            }
            if graph.handle == child.handle || child.moved.load(Ordering::Acquire) {
                return Err(INVALID);
            }
            add(c, out, &graph, after, count, Action::Child(nodes, p.graph.0))?;
            graph.own(child);
            Ok(())
        }
        _ => Err(INVALID),
    }
}

fn event(handle: CUevent) -> Result<Arc<crate::event::Event>, CUresult> {
    process()
        .events
        .get(handle.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)
}

pub(crate) fn cuGraphAddEventRecordNode(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    event_: CUevent,
) -> R {
    let action = Action::Record(event(event_)?);
    add(
        c,
        phGraphNode,
        &*find(hGraph)?,
        dependencies,
        numDependencies,
        action,
    )
}

pub(crate) fn cuGraphAddEventWaitNode(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    event_: CUevent,
) -> R {
    let action = Action::Wait(event(event_)?);
    add(
        c,
        phGraphNode,
        &*find(hGraph)?,
        dependencies,
        numDependencies,
        action,
    )
}

pub(crate) fn cuGraphAddMemAllocNode(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    nodeParams: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
) -> R {
    let mut parameters = c.get(nodeParams.cast_const())?;
    if parameters.poolProps.location.type_ != CU_MEM_LOCATION_TYPE_DEVICE || parameters.bytesize == 0 {
        return Err(INVALID);
    }
    let device = process().physical(parameters.poolProps.location.id())?;
    let mut access = vec![(device, READ_WRITE)];
    for description in c.array(parameters.accessDescs, parameters.accessDescCount)? {
        let peer = process().physical(description.location.id())?;
        if description.location.type_ != CU_MEM_LOCATION_TYPE_DEVICE || description.flags.0 != READ_WRITE {
            return Err(INVALID);
        }
        if peer != device {
            access.push((peer, READ_WRITE));
        }
    }
    let memory = GraphMemory::new(device, parameters.bytesize as u64, access)?;
    parameters.dptr = CUdeviceptr(memory.address);
    add(
        c,
        phGraphNode,
        &*find(hGraph)?,
        dependencies,
        numDependencies,
        Action::Allocate(memory),
    )?;
    c.put(nodeParams, parameters)
}

pub(crate) fn cuGraphAddMemFreeNode(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    dptr: CUdeviceptr,
) -> R {
    let graph = find(hGraph)?;
    let memory = {
        let nodes = lock(&graph.nodes);
        let freed = nodes
            .values()
            .any(|node| matches!(&node.action, Action::Free(memory) if memory.address == dptr.0));
        memory_at(&nodes, dptr.0).filter(|_| !freed).ok_or(INVALID)?
    };
    add(
        c,
        phGraphNode,
        &graph,
        dependencies,
        numDependencies,
        Action::Free(memory),
    )
}

/// The memory that a graph's allocation node has at an address.
pub(crate) fn memory_at(nodes: &Nodes, address: u64) -> Option<Arc<GraphMemory>> {
    nodes.values().find_map(|node| match &node.action {
        Action::Allocate(memory) if memory.address == address => Some(Arc::clone(memory)),
        _ => None,
    })
}

pub(crate) fn cuGraphNodeGetType(c: &Caller, hNode: CUgraphNode, type_: *mut CUgraphNodeType) -> R {
    c.put(type_, read(hNode, |action| Some(action.kind()))?)
}

pub(crate) fn cuGraphNodeGetContainingGraph(c: &Caller, hNode: CUgraphNode, phGraph: *mut CUgraph) -> R {
    c.put(phGraph, CUgraph(graph_of(hNode)?.handle))
}

pub(crate) fn cuGraphChildGraphNodeGetGraph(c: &Caller, hNode: CUgraphNode, phGraph: *mut CUgraph) -> R {
    let graph = read(hNode, |action| match action {
        Action::Child(_, graph) => Some(*graph),
        _ => None,
    })?;
    c.put(phGraph, CUgraph(graph))
}

fn read_kernel(node: CUgraphNode) -> Result<Launch, CUresult> {
    read(node, |action| match action {
        Action::Work(Work::Kernel(launch)) => Some(*launch),
        _ => None,
    })
}

pub(crate) fn cuGraphKernelNodeGetParams_v2(
    c: &Caller,
    hNode: CUgraphNode,
    nodeParams: *mut CUDA_KERNEL_NODE_PARAMS,
) -> R {
    let launch = read_kernel(hNode)?;
    let mut context = CUcontext::NULL;
    if let Ok(current) = context::current() {
        context = CUcontext(current.shared.handle);
    }
    c.put(
        nodeParams,
        CUDA_KERNEL_NODE_PARAMS {
            func: CUfunction(launch.function),
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.shared_bytes,
            ctx: context,
            ..CUDA_KERNEL_NODE_PARAMS::default()
        },
    )
}

pub(crate) fn cuGraphKernelNodeSetParams_v2(
    c: &Caller,
    hNode: CUgraphNode,
    nodeParams: *const CUDA_KERNEL_NODE_PARAMS,
) -> R {
    replace_in_graph(hNode, kernel(c, &c.get(nodeParams)?)?)
}

pub(crate) fn cuGraphExecKernelNodeSetParams_v2(
    c: &Caller,
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    nodeParams: *const CUDA_KERNEL_NODE_PARAMS,
) -> R {
    replace_in_exec(hGraphExec, hNode, kernel(c, &c.get(nodeParams)?)?)
}

fn read_fill(node: CUgraphNode) -> Result<Fill, CUresult> {
    read(node, |action| match action {
        Action::Work(Work::Fill(fill)) => Some(*fill),
        _ => None,
    })
}

pub(crate) fn cuGraphMemsetNodeGetParams(
    c: &Caller,
    hNode: CUgraphNode,
    nodeParams: *mut CUDA_MEMSET_NODE_PARAMS,
) -> R {
    let fill = read_fill(hNode)?;
    c.put(
        nodeParams,
        CUDA_MEMSET_NODE_PARAMS {
            dst: CUdeviceptr(fill.to.address),
            pitch: fill.to.pitch as usize,
            value: fill.value,
            elementSize: fill.element as u32,
            width: fill.width as usize,
            height: fill.height as usize,
        },
    )
}

pub(crate) fn cuGraphMemsetNodeSetParams(
    c: &Caller,
    hNode: CUgraphNode,
    nodeParams: *const CUDA_MEMSET_NODE_PARAMS,
) -> R {
    replace_in_graph(hNode, memset(&c.get(nodeParams)?)?)
}

pub(crate) fn cuGraphExecMemsetNodeSetParams(
    c: &Caller,
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    memsetParams: *const CUDA_MEMSET_NODE_PARAMS,
    _ctx: CUcontext,
) -> R {
    replace_in_exec(hGraphExec, hNode, memset(&c.get(memsetParams)?)?)
}

pub(crate) fn cuGraphMemcpyNodeGetParams(
    c: &Caller,
    hNode: CUgraphNode,
    nodeParams: *mut CUDA_MEMCPY3D,
) -> R {
    let copy: Copy = read(hNode, |action| match action {
        Action::Work(Work::Copy(copy) | Work::PeerCopy(copy)) => Some(*copy),
        _ => None,
    })?;
    let rows = |side: &Side| side.plane.checked_div(side.pitch).unwrap_or(0) as usize;
    c.put(
        nodeParams,
        CUDA_MEMCPY3D {
            srcMemoryType: CU_MEMORYTYPE_UNIFIED,
            srcDevice: CUdeviceptr(copy.from.address),
            srcPitch: copy.from.pitch as usize,
            srcHeight: rows(&copy.from),
            dstMemoryType: CU_MEMORYTYPE_UNIFIED,
            dstDevice: CUdeviceptr(copy.to.address),
            dstPitch: copy.to.pitch as usize,
            dstHeight: rows(&copy.to),
            WidthInBytes: copy.width as usize,
            Height: copy.height as usize,
            Depth: copy.depth as usize,
            ..CUDA_MEMCPY3D::default()
        },
    )
}

pub(crate) fn cuGraphMemcpyNodeSetParams(
    c: &Caller,
    hNode: CUgraphNode,
    nodeParams: *const CUDA_MEMCPY3D,
) -> R {
    replace_in_graph(hNode, Action::Work(Work::Copy(describe_3d(&c.get(nodeParams)?)?)))
}

pub(crate) fn cuGraphExecMemcpyNodeSetParams(
    c: &Caller,
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    copyParams: *const CUDA_MEMCPY3D,
    _ctx: CUcontext,
) -> R {
    replace_in_exec(
        hGraphExec,
        hNode,
        Action::Work(Work::Copy(describe_3d(&c.get(copyParams)?)?)),
    )
}

pub(crate) fn cuGraphHostNodeGetParams(
    c: &Caller,
    hNode: CUgraphNode,
    nodeParams: *mut CUDA_HOST_NODE_PARAMS,
) -> R {
    let call = read(hNode, |action| match action {
        Action::Work(Work::Host(call)) => Some(*call),
        _ => None,
    })?;
    c.put(
        nodeParams,
        CUDA_HOST_NODE_PARAMS {
            fn_: call.function,
            userData: call.data as *mut c_void,
        },
    )
}

pub(crate) fn cuGraphHostNodeSetParams(
    c: &Caller,
    hNode: CUgraphNode,
    nodeParams: *const CUDA_HOST_NODE_PARAMS,
) -> R {
    replace_in_graph(hNode, host(&c.get(nodeParams)?)?)
}

pub(crate) fn cuGraphExecHostNodeSetParams(
    c: &Caller,
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    nodeParams: *const CUDA_HOST_NODE_PARAMS,
) -> R {
    replace_in_exec(hGraphExec, hNode, host(&c.get(nodeParams)?)?)
}

pub(crate) fn cuGraphMemAllocNodeGetParams(
    c: &Caller,
    hNode: CUgraphNode,
    params_out: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
) -> R {
    let memory = read(hNode, |action| match action {
        Action::Allocate(memory) => Some(Arc::clone(memory)),
        _ => None,
    })?;
    let id = process().ordinal(memory.device).unwrap_or(0);
    c.put(
        params_out,
        CUDA_MEM_ALLOC_NODE_PARAMS {
            poolProps: CUmemPoolProps {
                allocType: CU_MEM_ALLOCATION_TYPE_PINNED,
                location: CUmemLocation::device(id),
                ..CUmemPoolProps::default()
            },
            bytesize: memory.bytes as usize,
            dptr: CUdeviceptr(memory.address),
            ..CUDA_MEM_ALLOC_NODE_PARAMS::default()
        },
    )
}

pub(crate) fn cuGraphMemFreeNodeGetParams(c: &Caller, hNode: CUgraphNode, dptr_out: *mut CUdeviceptr) -> R {
    let address = read(hNode, |action| match action {
        Action::Free(memory) => Some(memory.address),
        _ => None,
    })?;
    c.put(dptr_out, CUdeviceptr(address))
}

/// The general form: a kind, and a union that starts 16 bytes in.
pub(crate) fn cuGraphAddNode_v2(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    _dependencyData: *const CUgraphEdgeData,
    numDependencies: usize,
    nodeParams: *mut CUgraphNodeParams,
) -> R {
    let kind = c.get(nodeParams.cast_const())?.type_;
    let inside = nodeParams.cast::<u8>().wrapping_add(16);
    let (out, graph, after, count) = (phGraphNode, hGraph, dependencies, numDependencies);
    match kind {
        CU_GRAPH_NODE_TYPE_EMPTY => cuGraphAddEmptyNode(c, out, graph, after, count),
        CU_GRAPH_NODE_TYPE_KERNEL => {
            // The third version begins like the second.
            cuGraphAddKernelNode_v2(c, out, graph, after, count, inside.cast())
        }
        CU_GRAPH_NODE_TYPE_MEMCPY => {
            let p = c.get(inside.cast::<CUDA_MEMCPY_NODE_PARAMS>())?;
            let action = Action::Work(Work::Copy(describe_3d(&p.copyParams)?));
            add(c, out, &*find(graph)?, after, count, action)
        }
        CU_GRAPH_NODE_TYPE_MEMSET => {
            cuGraphAddMemsetNode(c, out, graph, after, count, inside.cast(), CUcontext::NULL)
        }
        CU_GRAPH_NODE_TYPE_HOST => cuGraphAddHostNode(c, out, graph, after, count, inside.cast()),
        CU_GRAPH_NODE_TYPE_GRAPH => add_child(
            c,
            out,
            graph,
            after,
            count,
            c.get(inside.cast::<ChildParameters>())?,
        ),
        CU_GRAPH_NODE_TYPE_EVENT_RECORD => {
            cuGraphAddEventRecordNode(c, out, graph, after, count, c.get(inside.cast::<CUevent>())?)
        }
        CU_GRAPH_NODE_TYPE_WAIT_EVENT => {
            cuGraphAddEventWaitNode(c, out, graph, after, count, c.get(inside.cast::<CUevent>())?)
        }
        CU_GRAPH_NODE_TYPE_MEM_ALLOC => cuGraphAddMemAllocNode(c, out, graph, after, count, inside.cast()),
        CU_GRAPH_NODE_TYPE_MEM_FREE => {
            cuGraphAddMemFreeNode(c, out, graph, after, count, c.get(inside.cast::<CUdeviceptr>())?)
        }
        CU_GRAPH_NODE_TYPE_CONDITIONAL => {
            let graph = find(graph)?;
            let after = c.array(after, count)?;
            let after: Vec<NodeRef> = after.into_iter().map(|node| NodeRef(node.0)).collect();
            let node = crate::conditional::add(c, &graph, &after, inside)?;
            c.put(out, CUgraphNode(node.0))
        }
        _ => Err(CUresult::ERROR_NOT_SUPPORTED),
    }
}

/// What parameters of a kind describe, for nodes that can be changed.
pub(crate) fn described(c: &Caller, kind: CUgraphNodeType, place: *mut u8) -> Result<Action, CUresult> {
    let event_of = || event(c.get(place.cast::<CUevent>().cast_const())?);
    Ok(match kind {
        CU_GRAPH_NODE_TYPE_KERNEL => kernel(c, &c.get(place.cast_const().cast())?)?,
        CU_GRAPH_NODE_TYPE_MEMCPY => {
            let p = c.get(place.cast_const().cast::<CUDA_MEMCPY_NODE_PARAMS>())?;
            Action::Work(Work::Copy(describe_3d(&p.copyParams)?))
        }
        CU_GRAPH_NODE_TYPE_MEMSET => memset(&c.get(place.cast_const().cast())?)?,
        CU_GRAPH_NODE_TYPE_HOST => host(&c.get(place.cast_const().cast())?)?,
        CU_GRAPH_NODE_TYPE_EVENT_RECORD => Action::Record(event_of()?),
        CU_GRAPH_NODE_TYPE_WAIT_EVENT => Action::Wait(event_of()?),
        CU_GRAPH_NODE_TYPE_MEM_ALLOC | CU_GRAPH_NODE_TYPE_MEM_FREE | CU_GRAPH_NODE_TYPE_CONDITIONAL => {
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        _ => return Err(INVALID),
    })
}

pub(crate) fn cuGraphAddNode(
    c: &Caller,
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    nodeParams: *mut CUgraphNodeParams,
) -> R {
    cuGraphAddNode_v2(
        c,
        phGraphNode,
        hGraph,
        dependencies,
        std::ptr::null(),
        numDependencies,
        nodeParams,
    )
}

pub(crate) fn cuGraphKernelNodeGetParams(
    c: &Caller,
    hNode: CUgraphNode,
    nodeParams: *mut CUDA_KERNEL_NODE_PARAMS_v1,
) -> R {
    let launch = read_kernel(hNode)?;
    c.put(
        nodeParams,
        CUDA_KERNEL_NODE_PARAMS_v1 {
            func: CUfunction(launch.function),
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.shared_bytes,
            ..CUDA_KERNEL_NODE_PARAMS_v1::default()
        },
    )
}

pub(crate) fn cuGraphKernelNodeSetParams(
    c: &Caller,
    hNode: CUgraphNode,
    nodeParams: *const CUDA_KERNEL_NODE_PARAMS_v1,
) -> R {
    replace_in_graph(hNode, kernel(c, &widen(&c.get(nodeParams)?))?)
}

pub(crate) fn cuGraphExecKernelNodeSetParams(
    c: &Caller,
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    nodeParams: *const CUDA_KERNEL_NODE_PARAMS_v1,
) -> R {
    replace_in_exec(hGraphExec, hNode, kernel(c, &widen(&c.get(nodeParams)?))?)
}

fn event_in(node: CUgraphNode, pick: impl FnOnce(&Action) -> Option<usize>) -> Result<CUevent, CUresult> {
    let wanted = read(node, pick)?;
    let all = process()
        .events
        .handles_where(|event| std::ptr::from_ref(event) as usize == wanted);
    all.first().map(|handle| CUevent(*handle)).ok_or(INVALID)
}

pub(crate) fn cuGraphEventRecordNodeGetEvent(c: &Caller, hNode: CUgraphNode, event_out: *mut CUevent) -> R {
    let event = event_in(hNode, |action| match action {
        Action::Record(event) => Some(Arc::as_ptr(event) as usize),
        _ => None,
    })?;
    c.put(event_out, event)
}

pub(crate) fn cuGraphEventWaitNodeGetEvent(c: &Caller, hNode: CUgraphNode, event_out: *mut CUevent) -> R {
    let event = event_in(hNode, |action| match action {
        Action::Wait(event) => Some(Arc::as_ptr(event) as usize),
        _ => None,
    })?;
    c.put(event_out, event)
}
