//! Graphs beyond launching: changing what was instantiated, conditional nodes, user objects, and what a graph with memory may not.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

mod common;

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use common::*;
use ebb_abi::*;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
const UNSUPPORTED: CUresult = CUresult::ERROR_NOT_SUPPORTED;
const FAILED: CUresult = CUresult::ERROR_GRAPH_EXEC_UPDATE_FAILURE;

fn graph(cuda: &Cuda) -> CUgraph {
    let mut graph = CUgraph::NULL;
    ok(cuda.cuGraphCreate(&mut graph, 0));
    graph
}

fn word(to: CUdeviceptr, value: u32) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS {
        dst: to,
        pitch: 0,
        value,
        elementSize: 4,
        width: 1,
        height: 1,
    }
}

fn fill(cuda: &Cuda, graph: CUgraph, after: &[CUgraphNode], to: CUdeviceptr, value: u32) -> CUgraphNode {
    let mut node = CUgraphNode::NULL;
    let parameters = word(to, value);
    let (list, count) = (after.as_ptr(), after.len());
    ok(cuda.cuGraphAddMemsetNode(&mut node, graph, list, count, &parameters, CUcontext::NULL));
    node
}

fn instantiate(cuda: &Cuda, graph: CUgraph) -> Result<CUgraphExec, CUresult> {
    let mut exec = CUgraphExec::NULL;
    cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0)
        .ok()
        .map(|()| exec)
}

fn run(cuda: &Cuda, exec: CUgraphExec) {
    ok(cuda.cuGraphLaunch(exec, NO_STREAM));
    ok(cuda.cuCtxSynchronize());
}

fn read(cuda: &Cuda, address: CUdeviceptr) -> u32 {
    u32::from_le_bytes(cuda.read(address, 4).try_into().unwrap())
}

#[test]
fn updating_what_was_instantiated() {
    alone("updating_what_was_instantiated", &[], |cuda| {
        let (a, b) = (cuda.alloc(4), cuda.alloc(4));
        let first = graph(cuda);
        let node = fill(cuda, first, &[], a, 1);
        fill(cuda, first, &[node], b, 2);
        let exec = instantiate(cuda, first).unwrap();
        run(cuda, exec);
        assert_eq!((read(cuda, a), read(cuda, b)), (1, 2));
        // Another graph of the same shape gives it new parameters; the nodes keep their names.
        let second = graph(cuda);
        let other = fill(cuda, second, &[], a, 11);
        fill(cuda, second, &[other], b, 12);
        let mut info = CUgraphExecUpdateResultInfo::default();
        ok(cuda.cuGraphExecUpdate_v2(exec, second, &mut info));
        assert_eq!(info.result, CU_GRAPH_EXEC_UPDATE_SUCCESS);
        run(cuda, exec);
        assert_eq!((read(cuda, a), read(cuda, b)), (11, 12));
        ok(cuda.cuGraphExecMemsetNodeSetParams(exec, node, &word(a, 21), CUcontext::NULL));
        assert_eq!(
            cuda.cuGraphExecMemsetNodeSetParams(exec, other, &word(a, 21), CUcontext::NULL),
            INVALID,
            "not one of its nodes"
        );
        run(cuda, exec);
        assert_eq!(read(cuda, a), 21);
        // Another shape, other kinds.
        fill(cuda, second, &[], a, 1);
        assert_eq!(cuda.cuGraphExecUpdate_v2(exec, second, &mut info), FAILED);
        assert_eq!(info.result, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
        let third = graph(cuda);
        let mut empty = CUgraphNode::NULL;
        ok(cuda.cuGraphAddEmptyNode(&mut empty, third, null(), 0));
        fill(cuda, third, &[empty], b, 5);
        let (mut bad, mut result) = (CUgraphNode::NULL, CUgraphExecUpdateResult(99));
        assert_eq!(cuda.cuGraphExecUpdate(exec, third, &mut bad, &mut result), FAILED);
        assert_eq!(
            (bad, result),
            (empty, CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED)
        );
        run(cuda, exec);
        assert_eq!(
            (read(cuda, a), read(cuda, b)),
            (21, 12),
            "a refused update changes nothing"
        );
        // The general form, in the graph and in what was made of it.
        let mut parameters = CUgraphNodeParams {
            type_: CU_GRAPH_NODE_TYPE_MEMSET,
            ..CUgraphNodeParams::default()
        };
        unsafe {
            std::ptr::from_mut(&mut parameters.u)
                .cast::<CUDA_MEMSET_NODE_PARAMS>()
                .write(word(a, 31))
        };
        ok(cuda.cuGraphExecNodeSetParams(exec, node, &mut parameters));
        ok(cuda.cuGraphNodeSetParams(node, &mut parameters));
        run(cuda, exec);
        assert_eq!(read(cuda, a), 31);
        let mut told = CUDA_MEMSET_NODE_PARAMS::default();
        ok(cuda.cuGraphMemsetNodeGetParams(node, &mut told));
        assert_eq!(told.value, 31);
        parameters.type_ = CU_GRAPH_NODE_TYPE_EMPTY;
        assert_eq!(cuda.cuGraphNodeSetParams(node, &mut parameters), INVALID);
        // Switched off and on again.
        let mut enabled = 9;
        ok(cuda.cuGraphNodeSetEnabled(exec, node, 0));
        ok(cuda.cuGraphNodeGetEnabled(exec, node, &mut enabled));
        assert_eq!(enabled, 0);
        cuda.write(a, &[0; 4]);
        run(cuda, exec);
        assert_eq!(read(cuda, a), 0);
        ok(cuda.cuGraphNodeSetEnabled(exec, node, 1));
        run(cuda, exec);
        assert_eq!(read(cuda, a), 31);
        let other = instantiate(cuda, third).unwrap();
        assert_eq!(
            cuda.cuGraphNodeSetEnabled(other, empty, 0),
            INVALID,
            "not of this kind"
        );
        let mut copy = CUgraph::NULL;
        ok(cuda.cuGraphClone(&mut copy, third));
        let mut twin = CUgraphNode::NULL;
        ok(cuda.cuGraphNodeFindInClone(&mut twin, empty, copy));
        assert_ne!(twin, empty);
        assert_eq!(cuda.cuGraphNodeFindInClone(&mut twin, node, copy), INVALID);
    });
}

#[test]
fn instantiating() {
    alone("instantiating", &[], |cuda| {
        let graph = graph(cuda);
        let a = cuda.alloc(4);
        let (first, second) = (fill(cuda, graph, &[], a, 1), fill(cuda, graph, &[], a, 2));
        let with = |flags| {
            let mut exec = CUgraphExec::NULL;
            let mut parameters = CUDA_GRAPH_INSTANTIATE_PARAMS {
                flags,
                ..CUDA_GRAPH_INSTANTIATE_PARAMS::default()
            };
            let result = cuda.cuGraphInstantiateWithParams(&mut exec, graph, &mut parameters);
            (result, parameters.result_out)
        };
        assert_eq!(with(2), (CUresult::SUCCESS, CUDA_GRAPH_INSTANTIATE_SUCCESS));
        assert_eq!(with(1 << 9).0, INVALID);
        let device = u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH.0);
        assert_eq!(with(device), (UNSUPPORTED, CUDA_GRAPH_INSTANTIATE_ERROR));
        ok(cuda.cuGraphAddDependencies(graph, &first, &second, 1));
        ok(cuda.cuGraphAddDependencies(graph, &second, &first, 1));
        assert_eq!(with(0), (INVALID, CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE));
    });
}

#[test]
fn conditions() {
    alone("conditions", &[], |cuda| {
        let a = cuda.alloc(4);
        let handle = |graph, value, flags| {
            let mut handle = CUgraphConditionalHandle::NULL;
            ok(cuda.cuGraphConditionalHandleCreate(&mut handle, graph, CUcontext::NULL, value, flags));
            handle
        };
        let node = |graph, handle: CUgraphConditionalHandle, kind: u64, size: u64| {
            let mut parameters = CUgraphNodeParams {
                type_: CU_GRAPH_NODE_TYPE_CONDITIONAL,
                ..CUgraphNodeParams::default()
            };
            parameters.u[0] = handle.0;
            parameters.u[1] = kind | size << 32;
            let mut node = CUgraphNode::NULL;
            cuda.cuGraphAddNode_v2(&mut node, graph, null(), null(), 0, &mut parameters)
                .ok()
                .map(|()| {
                    let told = parameters.u[2] as *const CUgraph;
                    (0..size as usize)
                        .map(|index| unsafe { told.add(index).read() })
                        .collect::<Vec<_>>()
                })
        };
        for (value, seen) in [(0, 2), (1, 1)] {
            let whole = graph(cuda);
            let condition = handle(whole, value, 1);
            let bodies = node(whole, condition, 0, 2).unwrap();
            fill(cuda, bodies[0], &[], a, 1);
            fill(cuda, bodies[1], &[], a, 2);
            run(cuda, instantiate(cuda, whole).unwrap());
            assert_eq!(read(cuda, a), seen, "if {value}");
            // Once at a time, and no copies.
            assert_eq!(instantiate(cuda, whole), Err(UNSUPPORTED));
            let mut copy = CUgraph::NULL;
            assert_eq!(cuda.cuGraphClone(&mut copy, whole), UNSUPPORTED);
            ok(cuda.cuGraphDestroy(whole));
        }
        let switch = graph(cuda);
        let bodies = node(switch, handle(switch, 2, 1), 2, 3).unwrap();
        for (body, value) in bodies.iter().zip(10..) {
            fill(cuda, *body, &[], a, value);
        }
        run(cuda, instantiate(cuda, switch).unwrap());
        assert_eq!(read(cuda, a), 12);
        let endless = graph(cuda);
        node(endless, handle(endless, 1, 1), 1, 1).unwrap();
        assert_eq!(
            instantiate(cuda, endless),
            Err(UNSUPPORTED),
            "no kernel here would end it"
        );
        let other = graph(cuda);
        let condition = handle(other, 0, 0);
        assert_eq!(node(other, condition, 1, 2), Err(INVALID), "a loop has one body");
        assert_eq!(node(switch, condition, 0, 1), Err(INVALID), "of another graph");
        assert_eq!(instantiate(cuda, other), Err(INVALID), "a handle without a node");
    });
}

#[test]
fn memory_makes_a_graph_single() {
    alone("memory_makes_a_graph_single", &[], |cuda| {
        let whole = graph(cuda);
        let mut parameters = CUDA_MEM_ALLOC_NODE_PARAMS {
            poolProps: CUmemPoolProps {
                allocType: CU_MEM_ALLOCATION_TYPE_PINNED,
                location: CUmemLocation::device(0),
                ..CUmemPoolProps::default()
            },
            bytesize: 2 * MIB,
            ..CUDA_MEM_ALLOC_NODE_PARAMS::default()
        };
        let (mut made, mut freed) = (CUgraphNode::NULL, CUgraphNode::NULL);
        ok(cuda.cuGraphAddMemAllocNode(&mut made, whole, null(), 0, &mut parameters));
        let address = parameters.dptr;
        ok(cuda.cuGraphAddMemFreeNode(&mut freed, whole, &made, 1, address));
        let mut again = CUgraphNode::NULL;
        assert_eq!(
            cuda.cuGraphAddMemFreeNode(&mut again, whole, &made, 1, address),
            INVALID,
            "freed twice"
        );
        assert_eq!(cuda.cuGraphDestroyNode(freed), INVALID);
        assert_eq!(cuda.cuGraphRemoveDependencies(whole, &made, &freed, 1), INVALID);
        let outer = graph(cuda);
        assert_eq!(
            cuda.cuGraphAddChildGraphNode(&mut again, outer, null(), 0, whole),
            UNSUPPORTED
        );
        let exec = instantiate(cuda, whole).unwrap();
        assert_eq!(instantiate(cuda, whole), Err(UNSUPPORTED));
        run(cuda, exec);
        ok(cuda.cuGraphExecDestroy(exec));
        let exec = instantiate(cuda, whole).unwrap();
        run(cuda, exec);
        // The memory of another graph does not take its place.
        let other = graph(cuda);
        ok(cuda.cuGraphAddMemAllocNode(&mut made, other, null(), 0, &mut parameters));
        ok(cuda.cuGraphAddMemFreeNode(&mut freed, other, &made, 1, parameters.dptr));
        let mut info = CUgraphExecUpdateResultInfo::default();
        assert_eq!(cuda.cuGraphExecUpdate_v2(exec, other, &mut info), FAILED);
        assert_eq!(
            (info.result, info.errorNode),
            (CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED, made)
        );
    });
}

static GONE: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn gone(by: *mut c_void) {
    GONE.fetch_add(by as usize as u32, Ordering::SeqCst);
}

#[test]
fn user_objects() {
    alone("user_objects", &[], |cuda| {
        let mut object = CUuserObject::NULL;
        let by = 1000 as *mut c_void;
        assert_eq!(
            cuda.cuUserObjectCreate(&mut object, by, Some(gone), 1, 0),
            INVALID,
            "the flag"
        );
        assert_eq!(cuda.cuUserObjectCreate(&mut object, by, None, 1, 1), INVALID);
        assert_eq!(
            cuda.cuUserObjectCreate(&mut object, by, Some(gone), 0, 1),
            INVALID
        );
        ok(cuda.cuUserObjectCreate(&mut object, by, Some(gone), 1, 1));
        ok(cuda.cuUserObjectRetain(object, 2));
        ok(cuda.cuUserObjectRelease(object, 2));
        assert_eq!(
            cuda.cuUserObjectRelease(object, 9),
            INVALID,
            "more than there are"
        );
        let holder = graph(cuda);
        let a = cuda.alloc(4);
        fill(cuda, holder, &[], a, 1);
        ok(cuda.cuGraphRetainUserObject(holder, object, 1, 1));
        assert_eq!(cuda.cuGraphReleaseUserObject(holder, object, 2), INVALID);
        // What was instantiated holds it on its own, and a launch under way as well.
        let flag = cuda.alloc(4);
        cuda.write(flag, &[0; 4]);
        let s = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        let exec = instantiate(cuda, holder).unwrap();
        ok(cuda.cuGraphDestroy(holder));
        ok(cuda.launch(cuda.kernel("ebb_spin_until"), s, &[flag.0]));
        ok(cuda.cuGraphLaunch(exec, s));
        ok(cuda.cuGraphExecDestroy(exec));
        assert_eq!(GONE.load(Ordering::SeqCst), 0);
        let side = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        ok(cuda.cuMemsetD32Async(flag, 1, 1, side));
        ok(cuda.cuStreamSynchronize(s));
        eventually("it is destroyed", || GONE.load(Ordering::SeqCst) == 1000);
        assert_eq!(cuda.cuUserObjectRelease(object, 1), INVALID);
        assert_eq!(cuda.cuUserObjectCreate(null_mut(), by, Some(gone), 1, 1), INVALID);
    });
}

/// A graph whose one node takes memory that no node frees, and where that is.
fn taking(cuda: &Cuda) -> (CUgraph, CUdeviceptr) {
    let (graph, mut node) = (graph(cuda), CUgraphNode::NULL);
    let mut parameters = CUDA_MEM_ALLOC_NODE_PARAMS {
        poolProps: CUmemPoolProps {
            allocType: CU_MEM_ALLOCATION_TYPE_PINNED,
            location: CUmemLocation::device(0),
            ..CUmemPoolProps::default()
        },
        bytesize: 4096,
        ..CUDA_MEM_ALLOC_NODE_PARAMS::default()
    };
    ok(cuda.cuGraphAddMemAllocNode(&mut node, graph, null(), 0, &mut parameters));
    fill(cuda, graph, &[node], parameters.dptr, 77);
    (graph, parameters.dptr)
}

#[test]
fn memory_that_was_not_freed_outlives_its_graph() {
    alone("memory_that_was_not_freed_outlives_its_graph", &[], |cuda| {
        let (graph, at) = taking(cuda);
        let exec = instantiate(cuda, graph).unwrap();
        run(cuda, exec);
        ok(cuda.cuGraphExecDestroy(exec));
        ok(cuda.cuGraphDestroy(graph));
        assert_eq!(read(cuda, at), 77);
        ok(cuda.cuMemFree_v2(at));
        assert_eq!(cuda.cuMemFree_v2(at), INVALID, "once");
        // What was never launched is nowhere.
        let (graph, at) = taking(cuda);
        ok(cuda.cuGraphDestroy(graph));
        assert_eq!(cuda.cuMemFree_v2(at), INVALID);
    });
}

#[test]
fn a_graph_that_is_moved_into_another_is_part_of_it() {
    alone("a_graph_that_is_moved_into_another_is_part_of_it", &[], |cuda| {
        let moving = |parent, child: CUgraph, ownership: u64| {
            let mut parameters = CUgraphNodeParams {
                type_: CU_GRAPH_NODE_TYPE_GRAPH,
                ..CUgraphNodeParams::default()
            };
            (parameters.u[0], parameters.u[1]) = (child.0 as u64, ownership);
            cuda.cuGraphAddNode_v2(
                &mut { CUgraphNode::NULL },
                parent,
                null(),
                null(),
                0,
                &mut parameters,
            )
        };
        let (child, at) = taking(cuda);
        let (parent, other) = (graph(cuda), graph(cuda));
        assert_eq!(moving(parent, child, 0), UNSUPPORTED, "a copy takes no memory");
        assert_eq!(moving(parent, child, 9), INVALID);
        assert_eq!(moving(child, child, 1), INVALID);
        ok(moving(parent, child, 1));
        assert_eq!(moving(other, child, 1), INVALID, "it is part of one already");
        assert_eq!(cuda.cuGraphDestroy(child), INVALID);
        assert_eq!(instantiate(cuda, child), Err(INVALID));
        let exec = instantiate(cuda, parent).unwrap();
        assert_eq!(
            instantiate(cuda, parent),
            Err(UNSUPPORTED),
            "memory inside: one instance"
        );
        run(cuda, exec);
        assert_eq!(read(cuda, at), 77);
        ok(cuda.cuMemFree_v2(at));
        ok(cuda.cuGraphExecDestroy(exec));
        ok(cuda.cuGraphDestroy(parent));
        let (mut nodes, place) = (0, null_mut());
        assert_eq!(cuda.cuGraphGetNodes(child, place, &mut nodes), INVALID);
    });
}
