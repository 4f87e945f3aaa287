//! Graphs that are changed, moved, cloned and destroyed: instances with other parameters, conditions, user objects, memory that
//! outlives what took it.

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use ebb_abi::*;

use super::graphs::*;
use crate::behaviour::Behaviour;
use crate::driver::Driver;
use crate::helpers::*;

/// A node that fills memory by the kernel `ebb_fill`: what its parameters are.
struct Fill {
    function: CUfunction,
    values: [u64; 4],
    places: [*mut c_void; 4],
}

impl Fill {
    fn new(function: CUfunction, to: CUdeviceptr, words: u64, seed: u64) -> Box<Self> {
        let mut fill = Box::new(Self {
            function,
            values: [to.0, words, seed, 0],
            places: [null_mut(); 4],
        });
        for at in 0..4 {
            fill.places[at] = (&raw mut fill.values[at]).cast();
        }
        fill
    }

    fn parameters(&mut self) -> CUDA_KERNEL_NODE_PARAMS {
        CUDA_KERNEL_NODE_PARAMS {
            func: self.function,
            gridDimX: 8,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 64,
            blockDimY: 1,
            blockDimZ: 1,
            kernelParams: self.places.as_mut_ptr(),
            ..CUDA_KERNEL_NODE_PARAMS::default()
        }
    }
}

/// How many words are not what `ebb_fill` writes with that seed.
#[track_caller]
fn wrong(cu: Driver, at: CUdeviceptr, words: u64, seed: u64) -> u32 {
    let (check, count) = (cu.kernel("ebb_check"), cu.alloc(4));
    must("memset", cu.cuMemsetD8_v2(count, 0, 4));
    must(
        "check",
        cu.launch(check, NO_STREAM, &[at.0, words, seed, 0, count.0]),
    );
    let bytes = cu.read(count, 4);
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn copy(from: CUdeviceptr, to: CUdeviceptr, bytes: usize) -> CUDA_MEMCPY3D {
    CUDA_MEMCPY3D {
        srcMemoryType: CU_MEMORYTYPE_DEVICE,
        srcDevice: from,
        dstMemoryType: CU_MEMORYTYPE_DEVICE,
        dstDevice: to,
        WidthInBytes: bytes,
        Height: 1,
        Depth: 1,
        ..CUDA_MEMCPY3D::default()
    }
}

fn current(cu: Driver) -> CUcontext {
    let mut context = CUcontext::NULL;
    must("cuCtxGetCurrent", cu.cuCtxGetCurrent(&mut context));
    context
}

/// A node of the general form, whose union begins with these words.
fn general(kind: CUgraphNodeType, words: &[u64]) -> CUgraphNodeParams {
    let mut parameters = CUgraphNodeParams {
        type_: kind,
        ..CUgraphNodeParams::default()
    };
    parameters.u[..words.len()].copy_from_slice(words);
    parameters
}

/// `CU_GRAPH_COND_TYPE_IF` and one graph, as the general form has both in one word.
const IF_WITH_ONE_GRAPH: u64 = 1 << 32;
/// `CU_GRAPH_COND_ASSIGN_DEFAULT`.
const ASSIGN_DEFAULT: u32 = 1;
/// `CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE`.
const MOVE: u64 = 1;
/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, and `CU_GRAPH_USER_OBJECT_MOVE`.
const NO_DESTRUCTOR_SYNC: u32 = 1;
const OBJECT_MOVE: u32 = 1;

/// A graph that fills memory if its condition is true at the beginning.
fn conditional(cu: Driver, to: CUdeviceptr, value: u32, condition: u32) -> Result<CUgraph, CUresult> {
    let (graph, mut handle) = (empty_graph(cu), CUgraphConditionalHandle(0));
    match cu.cuGraphConditionalHandleCreate(&mut handle, graph, current(cu), condition, ASSIGN_DEFAULT) {
        CUresult::SUCCESS => {}
        code => return Err(code),
    }
    let mut parameters = general(
        CU_GRAPH_NODE_TYPE_CONDITIONAL,
        &[handle.0, IF_WITH_ONE_GRAPH, 0, current(cu).0 as u64],
    );
    let mut node = CUgraphNode::NULL;
    match cu.cuGraphAddNode_v2(&mut node, graph, null(), null(), 0, &mut parameters) {
        CUresult::SUCCESS => {}
        code => return Err(code),
    }
    // SAFETY: the driver has told where the body's handle is, which lives as long as the node.
    let body = unsafe { std::ptr::with_exposed_provenance::<CUgraph>(parameters.u[2] as usize).read() };
    memset_node(cu, body, &[], to, value, 4096);
    Ok(graph)
}

static DESTROYED: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn destroyed(_: *mut c_void) {
    DESTROYED.fetch_add(1, Ordering::SeqCst);
}

/// The driver may call the destructor a little later, from a thread of its own.
fn wait_until_destroyed() -> u32 {
    while DESTROYED.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    DESTROYED.load(Ordering::SeqCst)
}

fn user_object(cu: Driver, count: u32) -> CUuserObject {
    DESTROYED.store(0, Ordering::SeqCst);
    let mut object = CUuserObject::NULL;
    must(
        "cuUserObjectCreate",
        cu.cuUserObjectCreate(
            &mut object,
            null_mut(),
            Some(destroyed),
            count,
            NO_DESTRUCTOR_SYNC,
        ),
    );
    object
}

/// A graph that takes memory, fills it and copies it out, without freeing it. The memory's address.
fn taking(cu: Driver, kept: CUdeviceptr, value: u32) -> (CUgraph, CUdeviceptr) {
    let graph = empty_graph(cu);
    let (node, address) = alloc_node(cu, graph, &[], MIB).expect("a node");
    let filled = memset_node(cu, graph, &[node], address, value, MIB);
    let mut copied = CUgraphNode::NULL;
    must(
        "copy node",
        cu.cuGraphAddMemcpyNode(
            &mut copied,
            graph,
            &filled,
            1,
            &copy(address, kept, MIB),
            current(cu),
        ),
    );
    (graph, address)
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "graph.kernel_node_parameters",
        "A kernel node of an instance gets another address",
        |t, cu| {
            let (stream, a, b) = (cu.stream(), cu.alloc(MIB), cu.alloc(MIB));
            must("memset", cu.cuMemsetD8_v2(a, 0, MIB));
            cu.sync();
            let (function, words) = (cu.kernel("ebb_fill"), MIB as u64 / 4);
            let (graph, mut node) = (empty_graph(cu), CUgraphNode::NULL);
            let mut first = Fill::new(function, a, words, 5);
            t.code(
                "add",
                cu.cuGraphAddKernelNode_v2(&mut node, graph, null(), 0, &first.parameters()),
            );
            let exec = instance(cu, graph);
            let mut second = Fill::new(function, b, words, 6);
            t.code(
                "set",
                cu.cuGraphExecKernelNodeSetParams_v2(exec, node, &second.parameters()),
            );
            replay(cu, exec, stream);
            t.see("a", compare(&cu.read(a, MIB), &vec![0; MIB]));
            t.see("wrong in b", wrong(cu, b, words, 6));
        },
    )
    .fact(&["add: SUCCESS", "set: SUCCESS", "a: right", "wrong in b: 0"]),
    Behaviour::new(
        "graph.copy_node_parameters",
        "A copy node of an instance gets other addresses",
        |t, cu| {
            let (stream, a, b, c) = (cu.stream(), cu.alloc(MIB), cu.alloc(MIB), cu.alloc(MIB));
            cu.write(a, &pattern(MIB, 1));
            cu.write(b, &pattern(MIB, 2));
            must("memset", cu.cuMemsetD8_v2(c, 0, MIB));
            cu.sync();
            let (graph, mut node) = (empty_graph(cu), CUgraphNode::NULL);
            t.code(
                "add",
                cu.cuGraphAddMemcpyNode(&mut node, graph, null(), 0, &copy(a, c, MIB), current(cu)),
            );
            let exec = instance(cu, graph);
            replay(cu, exec, stream);
            t.see("first", compare(&cu.read(c, MIB), &pattern(MIB, 1)));
            t.code(
                "set",
                cu.cuGraphExecMemcpyNodeSetParams(exec, node, &copy(b, c, MIB), current(cu)),
            );
            replay(cu, exec, stream);
            t.see("second", compare(&cu.read(c, MIB), &pattern(MIB, 2)));
        },
    )
    .fact(&["add: SUCCESS", "first: right", "set: SUCCESS", "second: right"]),
    Behaviour::new(
        "graph.child_graph_parameters",
        "A graph inside an instance is replaced by another one of its shape",
        |t, cu| {
            let (stream, a, b) = (cu.stream(), cu.alloc(4096), cu.alloc(4096));
            must("memset", cu.cuMemsetD8_v2(a, 0, 4096));
            cu.sync();
            let (inner, other, outer) = (empty_graph(cu), empty_graph(cu), empty_graph(cu));
            memset_node(cu, inner, &[], a, 1, 4096);
            memset_node(cu, other, &[], b, 2, 4096);
            let mut node = CUgraphNode::NULL;
            must(
                "add",
                cu.cuGraphAddChildGraphNode(&mut node, outer, null(), 0, inner),
            );
            let exec = instance(cu, outer);
            t.code("set", cu.cuGraphExecChildGraphNodeSetParams(exec, node, other));
            replay(cu, exec, stream);
            t.see("a and b", format!("{} {}", cu.read(a, 1)[0], cu.read(b, 1)[0]));
        },
    )
    .fact(&["set: SUCCESS", "a and b: 0 2"]),
    Behaviour::new(
        "graph.clone_is_apart",
        "A clone keeps the addresses that it was made with when the original gets others",
        |t, cu| {
            let (stream, a, b) = (cu.stream(), cu.alloc(4096), cu.alloc(4096));
            must("memset", cu.cuMemsetD8_v2(b, 0, 4096));
            cu.sync();
            let graph = empty_graph(cu);
            let node = memset_node(cu, graph, &[], a, 1, 4096);
            let (mut twin, mut twin_node) = (CUgraph::NULL, CUgraphNode::NULL);
            t.code("clone", cu.cuGraphClone(&mut twin, graph));
            t.code("find", cu.cuGraphNodeFindInClone(&mut twin_node, node, twin));
            let changed = CUDA_MEMSET_NODE_PARAMS {
                dst: b,
                value: 3,
                elementSize: 1,
                width: 4096,
                height: 1,
                ..CUDA_MEMSET_NODE_PARAMS::default()
            };
            t.code("set", cu.cuGraphMemsetNodeSetParams(node, &changed));
            t.code("destroy", cu.cuGraphDestroy(graph));
            let exec = instance(cu, twin);
            replay(cu, exec, stream);
            t.see("a and b", format!("{} {}", cu.read(a, 1)[0], cu.read(b, 1)[0]));
        },
    )
    .fact(&[
        "clone: SUCCESS",
        "find: SUCCESS",
        "set: SUCCESS",
        "destroy: SUCCESS",
        "a and b: 1 0",
    ]),
    Behaviour::new(
        "graph.node_switched_off",
        "A node that is switched off in an instance does nothing until it is on again",
        |t, cu| {
            let (stream, a) = (cu.stream(), cu.alloc(4096));
            must("memset", cu.cuMemsetD8_v2(a, 9, 4096));
            cu.sync();
            let graph = empty_graph(cu);
            let node = memset_node(cu, graph, &[], a, 1, 4096);
            let exec = instance(cu, graph);
            t.code("off", cu.cuGraphNodeSetEnabled(exec, node, 0));
            replay(cu, exec, stream);
            t.see("byte", cu.read(a, 1)[0]);
            t.code("on", cu.cuGraphNodeSetEnabled(exec, node, 1));
            replay(cu, exec, stream);
            t.see("byte", cu.read(a, 1)[0]);
        },
    )
    .fact(&["off: SUCCESS", "byte: 9", "on: SUCCESS", "byte: 1"]),
    Behaviour::new(
        "graph.conditional_node",
        "A graph inside a condition runs if the condition's default is true",
        |t, cu| {
            let (stream, a, b) = (cu.stream(), cu.alloc(4096), cu.alloc(4096));
            must("memset", cu.cuMemsetD8_v2(a, 0, 4096));
            must("memset", cu.cuMemsetD8_v2(b, 0, 4096));
            cu.sync();
            for (at, condition) in [(a, 1), (b, 0)] {
                let graph = match conditional(cu, at, 4, condition) {
                    Ok(graph) => graph,
                    Err(code) => return t.code("graph", code),
                };
                let exec = instance(cu, graph);
                t.code("destroy", cu.cuGraphDestroy(graph));
                for _ in 0..2 {
                    replay(cu, exec, stream);
                }
                t.code("destroy", cu.cuGraphExecDestroy(exec));
            }
            t.see("a and b", format!("{} {}", cu.read(a, 1)[0], cu.read(b, 1)[0]));
        },
    ),
    Behaviour::new(
        "graph.condition_without_a_node",
        "A condition that no node uses spoils the instance",
        |t, cu| {
            let (graph, mut handle) = (empty_graph(cu), CUgraphConditionalHandle(0));
            t.code(
                "handle",
                cu.cuGraphConditionalHandleCreate(&mut handle, graph, current(cu), 1, ASSIGN_DEFAULT),
            );
            let (mut exec, mut parameters) = (CUgraphExec::NULL, CUDA_GRAPH_INSTANTIATE_PARAMS::default());
            t.code(
                "instantiate",
                cu.cuGraphInstantiateWithParams(&mut exec, graph, &mut parameters),
            );
            t.see("result", parameters.result_out.0);
        },
    ),
    Behaviour::new(
        "graph.user_object_of_a_graph",
        "What a graph holds lives until its graph and its instance are gone",
        |t, cu| {
            let (stream, a, object) = (cu.stream(), cu.alloc(4096), user_object(cu, 1));
            let graph = empty_graph(cu);
            memset_node(cu, graph, &[], a, 1, 4096);
            t.code("give", cu.cuGraphRetainUserObject(graph, object, 1, OBJECT_MOVE));
            let exec = instance(cu, graph);
            t.code("destroy", cu.cuGraphDestroy(graph));
            replay(cu, exec, stream);
            t.see("destroyed", DESTROYED.load(Ordering::SeqCst));
            t.code("destroy", cu.cuGraphExecDestroy(exec));
            cu.sync();
            t.see("destroyed", wait_until_destroyed());
        },
    )
    .fact(&[
        "give: SUCCESS",
        "destroy: SUCCESS",
        "destroyed: 0",
        "destroy: SUCCESS",
        "destroyed: 1",
    ]),
    Behaviour::new(
        "graph.user_object_references",
        "A user object goes with the last reference, whoever has it",
        |t, cu| {
            let (object, graph) = (user_object(cu, 2), empty_graph(cu));
            t.code("retain", cu.cuUserObjectRetain(object, 1));
            t.code("hold", cu.cuGraphRetainUserObject(graph, object, 1, 0));
            t.code("release", cu.cuUserObjectRelease(object, 3));
            t.see("destroyed", DESTROYED.load(Ordering::SeqCst));
            t.code("let go", cu.cuGraphReleaseUserObject(graph, object, 1));
            t.see("destroyed", wait_until_destroyed());
        },
    )
    .fact(&[
        "retain: SUCCESS",
        "hold: SUCCESS",
        "release: SUCCESS",
        "destroyed: 0",
        "let go: SUCCESS",
        "destroyed: 1",
    ]),
    Behaviour::new(
        "graph.device_launch",
        "A graph of kernels is instantiated for launches by the device, and the host launches it",
        |t, cu| {
            let (stream, a, words) = (cu.stream(), cu.alloc(MIB), MIB as u64 / 4);
            let mut fill = Fill::new(cu.kernel("ebb_fill"), a, words, 7);
            let (graph, mut node, mut exec) = (empty_graph(cu), CUgraphNode::NULL, CUgraphExec::NULL);
            must(
                "add",
                cu.cuGraphAddKernelNode_v2(&mut node, graph, null(), 0, &fill.parameters()),
            );
            let flag = u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH.0);
            let code = cu.cuGraphInstantiateWithFlags(&mut exec, graph, flag);
            t.code("instantiate", code);
            if code == CUresult::SUCCESS {
                t.code("upload", cu.cuGraphUpload(exec, stream));
                replay(cu, exec, stream);
                t.see("wrong", wrong(cu, a, words, 7));
            }
        },
    ),
    Behaviour::new(
        "graph.instance_outlives_its_template_with_memory",
        "An instance takes memory at each launch after its graph was destroyed",
        |t, cu| {
            let (stream, kept) = (cu.stream(), cu.alloc(MIB));
            let mut address = CUdeviceptr::NULL;
            let graph = captured(cu, stream, || {
                must("alloc", cu.cuMemAllocAsync(&mut address, MIB, stream));
                must("memset", cu.cuMemsetD8Async(address, 8, MIB, stream));
                must("copy", cu.cuMemcpyDtoDAsync_v2(kept, address, MIB, stream));
                must("free", cu.cuMemFreeAsync(address, stream));
            });
            let exec = instance(cu, graph);
            t.code("destroy", cu.cuGraphDestroy(graph));
            for _ in 0..3 {
                must("memset", cu.cuMemsetD8_v2(kept, 0, MIB));
                cu.sync();
                replay(cu, exec, stream);
                t.see("bytes", compare(&cu.read(kept, MIB), &vec![8; MIB]));
            }
            t.code("destroy", cu.cuGraphExecDestroy(exec));
        },
    )
    .fact(&[
        "destroy: SUCCESS",
        "bytes: right",
        "bytes: right",
        "bytes: right",
        "destroy: SUCCESS",
    ]),
    Behaviour::new(
        "graph.memory_freed_by_the_next_launch",
        "With AUTO_FREE_ON_LAUNCH a graph that does not free its memory can be launched again",
        |t, cu| {
            let (stream, kept) = (cu.stream(), cu.alloc(MIB));
            let (graph, address) = taking(cu, kept, 6);
            let mut exec = CUgraphExec::NULL;
            let flag = u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH.0);
            t.code(
                "instantiate",
                cu.cuGraphInstantiateWithFlags(&mut exec, graph, flag),
            );
            for _ in 0..3 {
                must("memset", cu.cuMemsetD8_v2(kept, 0, MIB));
                cu.sync();
                replay(cu, exec, stream);
                t.see("bytes", compare(&cu.read(kept, MIB), &vec![6; MIB]));
            }
            t.see("still there", compare(&cu.read(address, MIB), &vec![6; MIB]));
            t.code("free", cu.cuMemFreeAsync(address, stream));
            must("sync", cu.cuStreamSynchronize(stream));
        },
    )
    .fact(&[
        "instantiate: SUCCESS",
        "bytes: right",
        "bytes: right",
        "bytes: right",
        "still there: right",
        "free: SUCCESS",
    ]),
    Behaviour::new(
        "graph.memory_outlives_its_graph",
        "Memory that a graph took and did not free is there after graph and instance are gone",
        |t, cu| {
            let (stream, kept) = (cu.stream(), cu.alloc(MIB));
            let (graph, address) = taking(cu, kept, 5);
            let exec = instance(cu, graph);
            replay(cu, exec, stream);
            t.code("destroy", cu.cuGraphExecDestroy(exec));
            t.code("destroy", cu.cuGraphDestroy(graph));
            let mut seen = vec![0_u8; MIB];
            t.code("read", cu.cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), address, MIB));
            t.see("bytes", compare(&seen, &vec![5; MIB]));
            t.code("free", cu.cuMemFree_v2(address));
        },
    ),
    Behaviour::new(
        "graph.moved_child_with_memory",
        "A graph with memory nodes is moved into another, and goes with it",
        |t, cu| {
            let (stream, kept) = (cu.stream(), cu.alloc(MIB));
            let (inner, address) = taking(cu, kept, 3);
            let (outer, mut node) = (empty_graph(cu), CUgraphNode::NULL);
            let mut parameters = general(CU_GRAPH_NODE_TYPE_GRAPH, &[inner.0 as u64, MOVE]);
            t.code(
                "move",
                cu.cuGraphAddNode_v2(&mut node, outer, null(), null(), 0, &mut parameters),
            );
            let mut alone = CUgraphExec::NULL;
            t.see(
                "it has no instance of its own",
                cu.cuGraphInstantiateWithFlags(&mut alone, inner, 0) != CUresult::SUCCESS,
            );
            let exec = instance(cu, outer);
            t.code("destroy", cu.cuGraphDestroy(outer));
            replay(cu, exec, stream);
            t.see("bytes", compare(&cu.read(kept, MIB), &vec![3; MIB]));
            t.code("free", cu.cuMemFreeAsync(address, stream));
            must("sync", cu.cuStreamSynchronize(stream));
            t.code("destroy", cu.cuGraphExecDestroy(exec));
        },
    ),
    Behaviour::new(
        "graph.memory_marks",
        "The high marks of graph memory can be set back, to zero only, and the others not at all",
        |t, cu| {
            let (stream, kept) = (cu.stream(), cu.alloc(MIB));
            let (graph, address) = taking(cu, kept, 1);
            let exec = instance(cu, graph);
            replay(cu, exec, stream);
            let at_least = |attribute| graph_memory(cu, attribute) >= MIB as u64;
            t.see("used", at_least(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT));
            t.see("used high", at_least(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH));
            t.see("reserved high", at_least(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH));
            t.code("free", cu.cuMemFreeAsync(address, stream));
            must("sync", cu.cuStreamSynchronize(stream));
            t.see("used then", graph_memory(cu, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT));
            t.see("used high then", at_least(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH));
            let set = |attribute, mut value: u64| {
                cu.cuDeviceSetGraphMemAttribute(CUdevice(0), attribute, (&raw mut value).cast())
            };
            t.code("to zero", set(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, 0));
            t.see(
                "to one is refused",
                set(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, 1) != CUresult::SUCCESS,
            );
            t.see(
                "what is used is refused",
                set(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, 0) != CUresult::SUCCESS,
            );
            t.see(
                "used high at last",
                graph_memory(cu, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH),
            );
        },
    ),
];
