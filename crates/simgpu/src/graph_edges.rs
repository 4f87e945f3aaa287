//! What depends on what in a graph: adding and taking away, and the lists that programs ask for.

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::graph::{NodeRef, find, graph_of};
use crate::process::lock;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;

pub(crate) fn cuGraphAddDependencies(
    c: &Caller,
    hGraph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    numDependencies: usize,
) -> R {
    let graph = find(hGraph)?;
    let (from, to) = (c.array(from, numDependencies)?, c.array(to, numDependencies)?);
    let mut nodes = lock(&graph.nodes);
    for (from, to) in from.into_iter().zip(to) {
        let from = NodeRef(from.0);
        if !nodes.contains_key(&from) || from.0 == to.0 {
            return Err(INVALID);
        }
        let entry = nodes.get_mut(&NodeRef(to.0)).ok_or(INVALID)?;
        if entry.after.contains(&from) {
            return Err(INVALID);
        }
        entry.after.push(from);
    }
    Ok(())
}

pub(crate) fn cuGraphAddDependencies_v2(
    c: &Caller,
    hGraph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    _edgeData: *const CUgraphEdgeData,
    numDependencies: usize,
) -> R {
    cuGraphAddDependencies(c, hGraph, from, to, numDependencies)
}

pub(crate) fn cuGraphRemoveDependencies(
    c: &Caller,
    hGraph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    numDependencies: usize,
) -> R {
    let graph = find(hGraph)?;
    if graph.is_single() {
        return Err(INVALID);
    }
    let (from, to) = (c.array(from, numDependencies)?, c.array(to, numDependencies)?);
    let mut nodes = lock(&graph.nodes);
    for (from, to) in from.into_iter().zip(to) {
        let entry = nodes.get_mut(&NodeRef(to.0)).ok_or(INVALID)?;
        let place = entry
            .after
            .iter()
            .position(|node| node.0 == from.0)
            .ok_or(INVALID)?;
        entry.after.remove(place);
    }
    Ok(())
}

pub(crate) fn cuGraphRemoveDependencies_v2(
    c: &Caller,
    hGraph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    _edgeData: *const CUgraphEdgeData,
    numDependencies: usize,
) -> R {
    cuGraphRemoveDependencies(c, hGraph, from, to, numDependencies)
}

pub(crate) fn cuGraphDestroyNode(_: &Caller, hNode: CUgraphNode) -> R {
    let graph = graph_of(hNode)?;
    // Of a graph with memory nothing is taken away.
    if graph.is_single() {
        return Err(INVALID);
    }
    let mut nodes = lock(&graph.nodes);
    let gone = NodeRef(hNode.0);
    let removed = nodes.remove(&gone);
    for node in nodes.values_mut() {
        node.after.retain(|other| *other != gone);
    }
    drop(nodes);
    drop(removed);
    Ok(())
}

/// Answers a list in the driver's way: a null list asks for the count; a list with more room than needed is filled up with nulls.
fn put_list(c: &Caller, list: *mut CUgraphNode, count: *mut usize, found: &[CUgraphNode]) -> R {
    if list.is_null() {
        return c.put(count, found.len());
    }
    let room = c.get(count.cast_const())?;
    c.put_array(list, room, found)?;
    for index in found.len()..room {
        c.put(list.wrapping_add(index), CUgraphNode::NULL)?;
    }
    c.put(count, found.len().min(room))
}

pub(crate) fn cuGraphGetNodes(
    c: &Caller,
    hGraph: CUgraph,
    nodes: *mut CUgraphNode,
    numNodes: *mut usize,
) -> R {
    let found: Vec<CUgraphNode> = lock(&find(hGraph)?.nodes)
        .keys()
        .map(|node| CUgraphNode(node.0))
        .collect();
    put_list(c, nodes, numNodes, &found)
}

pub(crate) fn cuGraphGetRootNodes(
    c: &Caller,
    hGraph: CUgraph,
    rootNodes: *mut CUgraphNode,
    numRootNodes: *mut usize,
) -> R {
    let graph = find(hGraph)?;
    let found: Vec<CUgraphNode> = lock(&graph.nodes)
        .iter()
        .filter(|(_, node)| node.after.is_empty())
        .map(|(node, _)| CUgraphNode(node.0))
        .collect();
    put_list(c, rootNodes, numRootNodes, &found)
}

pub(crate) fn cuGraphGetEdges(
    c: &Caller,
    hGraph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    numEdges: *mut usize,
) -> R {
    let graph = find(hGraph)?;
    let edges: Vec<(CUgraphNode, CUgraphNode)> = lock(&graph.nodes)
        .iter()
        .flat_map(|(node, entry)| {
            entry
                .after
                .iter()
                .map(|other| (CUgraphNode(other.0), CUgraphNode(node.0)))
        })
        .collect();
    if from.is_null() && to.is_null() {
        return c.put(numEdges, edges.len());
    }
    let room = c.get(numEdges.cast_const())?;
    let (begin, end): (Vec<_>, Vec<_>) = edges.into_iter().unzip();
    c.put_array(from, room, &begin)?;
    c.put_array(to, room, &end)?;
    c.put(numEdges, begin.len().min(room))
}

pub(crate) fn cuGraphGetEdges_v2(
    c: &Caller,
    hGraph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    edgeData: *mut CUgraphEdgeData,
    numEdges: *mut usize,
) -> R {
    cuGraphGetEdges(c, hGraph, from, to, numEdges)?;
    zero_edges(c, edgeData, numEdges)
}

fn zero_edges(c: &Caller, edges: *mut CUgraphEdgeData, count: *mut usize) -> R {
    if edges.is_null() {
        return Ok(());
    }
    let count = c.get(count.cast_const())?;
    c.put_array(edges, count, &vec![CUgraphEdgeData::default(); count])
}

pub(crate) fn cuGraphNodeGetDependencies(
    c: &Caller,
    hNode: CUgraphNode,
    dependencies: *mut CUgraphNode,
    numDependencies: *mut usize,
) -> R {
    let graph = graph_of(hNode)?;
    let found: Vec<CUgraphNode> = lock(&graph.nodes)
        .get(&NodeRef(hNode.0))
        .map(|node| node.after.iter().map(|other| CUgraphNode(other.0)).collect())
        .unwrap_or_default();
    put_list(c, dependencies, numDependencies, &found)
}

pub(crate) fn cuGraphNodeGetDependencies_v2(
    c: &Caller,
    hNode: CUgraphNode,
    dependencies: *mut CUgraphNode,
    edgeData: *mut CUgraphEdgeData,
    numDependencies: *mut usize,
) -> R {
    cuGraphNodeGetDependencies(c, hNode, dependencies, numDependencies)?;
    zero_edges(c, edgeData, numDependencies)
}

pub(crate) fn cuGraphNodeGetDependentNodes(
    c: &Caller,
    hNode: CUgraphNode,
    dependentNodes: *mut CUgraphNode,
    numDependentNodes: *mut usize,
) -> R {
    let graph = graph_of(hNode)?;
    let found: Vec<CUgraphNode> = lock(&graph.nodes)
        .iter()
        .filter(|(_, node)| node.after.contains(&NodeRef(hNode.0)))
        .map(|(node, _)| CUgraphNode(node.0))
        .collect();
    put_list(c, dependentNodes, numDependentNodes, &found)
}

pub(crate) fn cuGraphNodeGetDependentNodes_v2(
    c: &Caller,
    hNode: CUgraphNode,
    dependentNodes: *mut CUgraphNode,
    edgeData: *mut CUgraphEdgeData,
    numDependentNodes: *mut usize,
) -> R {
    cuGraphNodeGetDependentNodes(c, hNode, dependentNodes, numDependentNodes)?;
    zero_edges(c, edgeData, numDependentNodes)
}
