//! Changing nodes after they were made, in a graph and in what was instantiated from it.

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::graph::{Action, NodeRef, find, find_exec, graph_of, shape};
use crate::graph_nodes::{self, replace_in_exec, replace_in_graph};
use crate::process::{lock, process};

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
const FAILED: CUresult = CUresult::ERROR_GRAPH_EXEC_UPDATE_FAILURE;

pub(crate) fn cuGraphExecUpdate_v2(
    c: &Caller,
    hGraphExec: CUgraphExec,
    hGraph: CUgraph,
    resultInfo: *mut CUgraphExecUpdateResultInfo,
) -> R {
    let exec = find_exec(hGraphExec)?;
    let fresh = crate::conditional::resolve(&lock(&find(hGraph)?.nodes))?;
    let mut nodes = lock(&exec.nodes);
    let told = |result, node: Option<&NodeRef>| {
        let info = CUgraphExecUpdateResultInfo {
            result,
            errorNode: node.map_or(CUgraphNode::NULL, |node| CUgraphNode(node.0)),
            errorFromNode: CUgraphNode::NULL,
        };
        c.put_optional(resultInfo, info);
    };
    let (before, after) = (shape(&nodes), shape(&fresh));
    let edges = |shape: &[(CUgraphNodeType, Vec<usize>)]| -> Vec<Vec<usize>> {
        shape.iter().map(|(_, after)| after.clone()).collect()
    };
    if edges(&before) != edges(&after) {
        told(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, None);
        return Err(FAILED);
    }
    if let Some(index) = (0..before.len()).find(|index| before[*index].0 != after[*index].0) {
        told(
            CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED,
            fresh.keys().nth(index),
        );
        return Err(FAILED);
    }
    // Memory stays where it is: a node of another allocation cannot take its place.
    let moved = nodes.values().zip(&fresh).find(|(old, (_, new))| {
        let address = |action: &Action| match action {
            Action::Allocate(memory) | Action::Free(memory) => memory.address,
            _ => 0,
        };
        address(&old.action) != address(&new.action)
    });
    if let Some((_, (node, _))) = moved {
        let node = *node;
        told(CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED, Some(&node));
        return Err(FAILED);
    }
    // The nodes keep the names that they were instantiated with.
    for (old, new) in nodes.values_mut().zip(fresh.into_values()) {
        old.action = new.action;
    }
    told(CU_GRAPH_EXEC_UPDATE_SUCCESS, None);
    Ok(())
}

pub(crate) fn cuGraphExecUpdate(
    c: &Caller,
    hGraphExec: CUgraphExec,
    hGraph: CUgraph,
    hErrorNode_out: *mut CUgraphNode,
    updateResult_out: *mut CUgraphExecUpdateResult,
) -> R {
    let mut info = CUgraphExecUpdateResultInfo::default();
    let result = cuGraphExecUpdate_v2(c, hGraphExec, hGraph, &mut info);
    c.put_optional(hErrorNode_out, info.errorNode);
    c.put_optional(updateResult_out, info.result);
    result
}

/// The action that the general form describes. Memory and conditional nodes cannot be changed.
fn action(c: &Caller, place: *mut CUgraphNodeParams) -> Result<Action, CUresult> {
    let kind = c.get(place.cast_const())?.type_;
    graph_nodes::described(c, kind, place.cast::<u8>().wrapping_add(16))
}

pub(crate) fn cuGraphNodeSetParams(c: &Caller, hNode: CUgraphNode, nodeParams: *mut CUgraphNodeParams) -> R {
    replace_in_graph(hNode, action(c, nodeParams)?)
}

pub(crate) fn cuGraphExecNodeSetParams(
    c: &Caller,
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    nodeParams: *mut CUgraphNodeParams,
) -> R {
    replace_in_exec(hGraphExec, hNode, action(c, nodeParams)?)
}

pub(crate) fn cuGraphExecChildGraphNodeSetParams(
    _: &Caller,
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    childGraph: CUgraph,
) -> R {
    let fresh = lock(&find(childGraph)?.nodes).clone();
    let exec = find_exec(hGraphExec)?;
    {
        let nodes = lock(&exec.nodes);
        match nodes.get(&NodeRef(hNode.0)).map(|node| &node.action) {
            Some(Action::Child(old, _)) if shape(old) == shape(&fresh) => {}
            _ => return Err(INVALID),
        }
    }
    replace_in_exec(hGraphExec, hNode, Action::Child(fresh, childGraph.0))
}

fn event(handle: CUevent) -> Result<std::sync::Arc<crate::event::Event>, CUresult> {
    let found = process().events.get(handle.0);
    found.ok_or(CUresult::ERROR_INVALID_HANDLE)
}

pub(crate) fn cuGraphEventRecordNodeSetEvent(_: &Caller, hNode: CUgraphNode, event_: CUevent) -> R {
    replace_in_graph(hNode, Action::Record(event(event_)?))
}

pub(crate) fn cuGraphEventWaitNodeSetEvent(_: &Caller, hNode: CUgraphNode, event_: CUevent) -> R {
    replace_in_graph(hNode, Action::Wait(event(event_)?))
}

pub(crate) fn cuGraphExecEventRecordNodeSetEvent(
    _: &Caller,
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    event_: CUevent,
) -> R {
    replace_in_exec(hGraphExec, hNode, Action::Record(event(event_)?))
}

pub(crate) fn cuGraphExecEventWaitNodeSetEvent(
    _: &Caller,
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    event_: CUevent,
) -> R {
    replace_in_exec(hGraphExec, hNode, Action::Wait(event(event_)?))
}

/// Whether a node can be switched off: kernels, copies and fills can.
fn check_switch(exec: CUgraphExec, node: CUgraphNode) -> R {
    let exec = find_exec(exec)?;
    let nodes = lock(&exec.nodes);
    let kind = nodes.get(&NodeRef(node.0)).ok_or(INVALID)?.action.kind();
    match kind {
        CU_GRAPH_NODE_TYPE_KERNEL | CU_GRAPH_NODE_TYPE_MEMCPY | CU_GRAPH_NODE_TYPE_MEMSET => Ok(()),
        _ => Err(INVALID),
    }
}

pub(crate) fn cuGraphNodeSetEnabled(
    _: &Caller,
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    isEnabled: u32,
) -> R {
    check_switch(hGraphExec, hNode)?;
    let exec = find_exec(hGraphExec)?;
    let mut off = lock(&exec.off);
    if isEnabled == 0 {
        off.insert(NodeRef(hNode.0));
    } else {
        off.remove(&NodeRef(hNode.0));
    }
    Ok(())
}

pub(crate) fn cuGraphNodeGetEnabled(
    c: &Caller,
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    isEnabled: *mut u32,
) -> R {
    check_switch(hGraphExec, hNode)?;
    let exec = find_exec(hGraphExec)?;
    let off = lock(&exec.off).contains(&NodeRef(hNode.0));
    c.put(isEnabled, u32::from(!off))
}

pub(crate) fn cuGraphNodeFindInClone(
    c: &Caller,
    phNode: *mut CUgraphNode,
    hOriginalNode: CUgraphNode,
    hClonedGraph: CUgraph,
) -> R {
    let clone = find(hClonedGraph)?;
    let twin = clone.twins.get(&NodeRef(hOriginalNode.0)).ok_or(INVALID)?;
    // It may have been removed since.
    graph_of(CUgraphNode(twin.0))?;
    c.put(phNode, CUgraphNode(twin.0))
}
