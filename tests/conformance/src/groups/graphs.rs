//! Capture and graphs as they meet memory: replay, memory nodes, update, and what is forbidden while a capture is on.

use std::ffi::c_void;

use ebb_abi::*;

use crate::behaviour::Behaviour;
use crate::driver::Driver;
use crate::helpers::*;
use crate::observe::Test;

const GLOBAL: CUstreamCaptureMode = CU_STREAM_CAPTURE_MODE_GLOBAL;
const LOCAL: CUstreamCaptureMode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
pub(super) const RELAXED: CUstreamCaptureMode = CU_STREAM_CAPTURE_MODE_RELAXED;

pub(super) fn end(cu: Driver, stream: CUstream) -> Result<CUgraph, CUresult> {
    let mut graph = CUgraph::NULL;
    match cu.cuStreamEndCapture(stream, &mut graph) {
        CUresult::SUCCESS => Ok(graph),
        code => Err(code),
    }
}

#[track_caller]
pub(super) fn captured(cu: Driver, stream: CUstream, work: impl FnOnce()) -> CUgraph {
    must("begin", cu.cuStreamBeginCapture_v2(stream, RELAXED));
    work();
    end(cu, stream).expect("a graph")
}

#[track_caller]
pub(super) fn instance(cu: Driver, graph: CUgraph) -> CUgraphExec {
    let mut exec = CUgraphExec::NULL;
    must(
        "cuGraphInstantiate",
        cu.cuGraphInstantiateWithFlags(&mut exec, graph, 0),
    );
    exec
}

#[track_caller]
pub(super) fn replay(cu: Driver, exec: CUgraphExec, stream: CUstream) {
    must("cuGraphLaunch", cu.cuGraphLaunch(exec, stream));
    must("cuStreamSynchronize", cu.cuStreamSynchronize(stream));
}

fn status(cu: Driver, stream: CUstream) -> u32 {
    let mut status = CUstreamCaptureStatus(77);
    must("cuStreamIsCapturing", cu.cuStreamIsCapturing(stream, &mut status));
    status.0
}

/// One call while a capture of that mode is on in another stream: its result, the capture's state, and how it ends.
fn during(t: &mut Test, cu: Driver, mode: CUstreamCaptureMode, call: impl FnOnce(Driver) -> CUresult) {
    let stream = cu.stream();
    let address = cu.alloc(4096);
    must("begin", cu.cuStreamBeginCapture_v2(stream, mode));
    must("memset", cu.cuMemsetD8Async(address, 1, 4096, stream));
    t.code("call", call(cu));
    t.see("capture", status(cu, stream));
    t.see("end", either(end(cu, stream).map(|_| "a graph")));
}

pub(super) fn empty_graph(cu: Driver) -> CUgraph {
    let mut graph = CUgraph::NULL;
    must("cuGraphCreate", cu.cuGraphCreate(&mut graph, 0));
    graph
}

/// A node that takes memory of device 0.
pub(super) fn alloc_node(
    cu: Driver,
    graph: CUgraph,
    after: &[CUgraphNode],
    bytes: usize,
) -> Result<(CUgraphNode, CUdeviceptr), CUresult> {
    let mut node = CUgraphNode::NULL;
    let mut parameters = CUDA_MEM_ALLOC_NODE_PARAMS {
        poolProps: CUmemPoolProps {
            allocType: CU_MEM_ALLOCATION_TYPE_PINNED,
            location: CUmemLocation::device(0),
            ..CUmemPoolProps::default()
        },
        bytesize: bytes,
        ..CUDA_MEM_ALLOC_NODE_PARAMS::default()
    };
    match cu.cuGraphAddMemAllocNode(&mut node, graph, after.as_ptr(), after.len(), &mut parameters) {
        CUresult::SUCCESS => Ok((node, parameters.dptr)),
        code => Err(code),
    }
}

pub(super) fn free_node(cu: Driver, graph: CUgraph, after: &[CUgraphNode], address: CUdeviceptr) -> CUresult {
    let mut node = CUgraphNode::NULL;
    cu.cuGraphAddMemFreeNode(&mut node, graph, after.as_ptr(), after.len(), address)
}

pub(super) fn memset_node(
    cu: Driver,
    graph: CUgraph,
    after: &[CUgraphNode],
    address: CUdeviceptr,
    value: u32,
    bytes: usize,
) -> CUgraphNode {
    let (mut node, mut context) = (CUgraphNode::NULL, CUcontext::NULL);
    must("cuCtxGetCurrent", cu.cuCtxGetCurrent(&mut context));
    let parameters = CUDA_MEMSET_NODE_PARAMS {
        dst: address,
        value,
        elementSize: 1,
        width: bytes,
        height: 1,
        ..CUDA_MEMSET_NODE_PARAMS::default()
    };
    must(
        "cuGraphAddMemsetNode",
        cu.cuGraphAddMemsetNode(
            &mut node,
            graph,
            after.as_ptr(),
            after.len(),
            &parameters,
            context,
        ),
    );
    node
}

pub(super) fn graph_memory(cu: Driver, attribute: CUgraphMem_attribute) -> u64 {
    let mut value = 77_u64;
    must(
        "cuDeviceGetGraphMemAttribute",
        cu.cuDeviceGetGraphMemAttribute(CUdevice(0), attribute, (&raw mut value).cast()),
    );
    value
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "capture.work_is_recorded_not_done",
        "Captured work happens at the launch of the graph and not before",
        |t, cu| {
            let (stream, address) = (cu.stream(), cu.alloc(MIB));
            must("memset", cu.cuMemsetD8_v2(address, 1, MIB));
            cu.sync();
            let graph = captured(cu, stream, || {
                must("memset", cu.cuMemsetD8Async(address, 2, MIB, stream));
            });
            t.see("before", cu.read(address, 1)[0]);
            let exec = instance(cu, graph);
            replay(cu, exec, stream);
            t.see("after", compare(&cu.read(address, MIB), &vec![2; MIB]));
        },
    )
    .fact(&["before: 1", "after: right"]),
    Behaviour::new(
        "capture.status",
        "The state of a stream before, in and after a capture",
        |t, cu| {
            let stream = cu.stream();
            t.see("before", status(cu, stream));
            must("begin", cu.cuStreamBeginCapture_v2(stream, GLOBAL));
            t.see("in", status(cu, stream));
            t.see("end", either(end(cu, stream).map(|graph| !graph.is_null())));
            t.see("after", status(cu, stream));
        },
    )
    .fact(&["before: 0", "in: 1", "end: true", "after: 0"]),
    Behaviour::new(
        "capture.misuse",
        "Twice, without begin, of the legacy stream",
        |t, cu| {
            let stream = cu.stream();
            t.see("end without begin", either(end(cu, stream).map(|_| "a graph")));
            must("begin", cu.cuStreamBeginCapture_v2(stream, RELAXED));
            t.code("twice", cu.cuStreamBeginCapture_v2(stream, RELAXED));
            t.code("legacy", cu.cuStreamBeginCapture_v2(NO_STREAM, RELAXED));
            t.see("end", either(end(cu, stream).map(|_| "a graph")));
        },
    ),
    Behaviour::new(
        "capture.alloc_in_relaxed_mode",
        "cuMemAlloc in a relaxed capture succeeds and leaves the capture alone",
        |t, cu| {
            during(t, cu, RELAXED, |cu| {
                let mut address = CUdeviceptr::NULL;
                cu.cuMemAlloc_v2(&mut address, MIB)
            });
        },
    )
    .fact(&["call: SUCCESS", "capture: 1", "end: \"a graph\""]),
    Behaviour::new(
        "capture.alloc_in_global_mode",
        "cuMemAlloc in a global capture",
        |t, cu| {
            during(t, cu, GLOBAL, |cu| {
                let mut address = CUdeviceptr::NULL;
                cu.cuMemAlloc_v2(&mut address, MIB)
            });
        },
    ),
    Behaviour::new(
        "capture.alloc_in_thread_local_mode",
        "cuMemAlloc in a thread-local capture of this thread",
        |t, cu| {
            during(t, cu, LOCAL, |cu| {
                let mut address = CUdeviceptr::NULL;
                cu.cuMemAlloc_v2(&mut address, MIB)
            });
        },
    ),
    Behaviour::new(
        "capture.free_in_relaxed_mode",
        "cuMemFree in a relaxed capture",
        |t, cu| {
            let address = cu.alloc(MIB);
            during(t, cu, RELAXED, |cu| cu.cuMemFree_v2(address));
        },
    ),
    Behaviour::new(
        "capture.vmm_calls_in_relaxed_mode",
        "Mapping, access and unmapping are allowed",
        |t, cu| {
            let (address, handle) = (cu.reserve(GRANULE), cu.create(GRANULE));
            let stream = cu.stream();
            must("begin", cu.cuStreamBeginCapture_v2(stream, GLOBAL));
            let mut relaxed = RELAXED;
            must("mode", cu.cuThreadExchangeStreamCaptureMode(&mut relaxed));
            t.code("map", cu.cuMemMap(address, GRANULE, 0, handle, 0));
            t.code(
                "access",
                cu.access(address, GRANULE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
            );
            t.code("unmap", cu.cuMemUnmap(address, GRANULE));
            t.see("capture", status(cu, stream));
            t.see("end", either(end(cu, stream).map(|_| "a graph")));
        },
    )
    .fact(&[
        "map: SUCCESS",
        "access: SUCCESS",
        "unmap: SUCCESS",
        "capture: 1",
        "end: \"a graph\"",
    ]),
    Behaviour::new(
        "capture.context_synchronisation_breaks_it",
        "cuCtxSynchronize fails and invalidates the capture",
        |t, cu| during(t, cu, RELAXED, |cu| cu.cuCtxSynchronize()),
    )
    .fact(&[
        "call: STREAM_CAPTURE_UNSUPPORTED",
        "capture: 2",
        "end: STREAM_CAPTURE_INVALIDATED",
    ]),
    Behaviour::new(
        "capture.another_stream_may_be_waited_for",
        "cuStreamSynchronize of an uncaptured stream is allowed in relaxed mode",
        |t, cu| {
            let other = cu.stream();
            during(t, cu, RELAXED, |cu| cu.cuStreamSynchronize(other));
        },
    )
    .fact(&["call: SUCCESS", "capture: 1", "end: \"a graph\""]),
    Behaviour::new(
        "capture.waiting_for_itself_breaks_it",
        "Synchronising or querying the captured stream",
        |t, cu| {
            let stream = cu.stream();
            must("begin", cu.cuStreamBeginCapture_v2(stream, RELAXED));
            t.code("synchronise", cu.cuStreamSynchronize(stream));
            t.see("capture", status(cu, stream));
            t.see("end", either(end(cu, stream).map(|_| "a graph")));
        },
    ),
    Behaviour::new(
        "capture.synchronous_copy",
        "A synchronous copy while a relaxed capture is on in a non-blocking stream",
        |t, cu| {
            let address = cu.alloc(4096);
            during(t, cu, RELAXED, |cu| {
                let mut host = [0_u8; 4];
                cu.cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), address, 4)
            });
        },
    ),
    Behaviour::new(
        "capture.memory_questions",
        "cuMemGetInfo and pointer attributes are allowed",
        |t, cu| {
            let address = cu.alloc(4096);
            during(t, cu, RELAXED, |cu| {
                let (mut free, mut total) = (0, 0);
                must(
                    "range",
                    cu.cuMemGetAddressRange_v2(&mut { CUdeviceptr::NULL }, &mut 0, address),
                );
                cu.cuMemGetInfo_v2(&mut free, &mut total)
            });
        },
    ),
    Behaviour::new(
        "capture.host_memory_in_relaxed_mode",
        "cuMemHostAlloc while a relaxed capture is on",
        |t, cu| {
            during(t, cu, RELAXED, |cu| {
                let mut host = std::ptr::null_mut();
                cu.cuMemHostAlloc(&mut host, 4096, 0)
            });
        },
    ),
    Behaviour::new(
        "capture.stream_ordered_memory_becomes_nodes",
        "cuMemAllocAsync and cuMemFreeAsync are recorded as memory nodes",
        |t, cu| {
            let stream = cu.stream();
            let kept = cu.alloc(MIB);
            let mut address = CUdeviceptr::NULL;
            must("begin", cu.cuStreamBeginCapture_v2(stream, RELAXED));
            t.code("alloc", cu.cuMemAllocAsync(&mut address, MIB, stream));
            must("memset", cu.cuMemsetD8Async(address, 9, MIB, stream));
            must("copy", cu.cuMemcpyDtoDAsync_v2(kept, address, MIB, stream));
            t.code("free", cu.cuMemFreeAsync(address, stream));
            let graph = end(cu, stream).expect("a graph");
            let mut count = 0;
            must(
                "nodes",
                cu.cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count),
            );
            t.see("nodes", count);
            let exec = instance(cu, graph);
            replay(cu, exec, stream);
            t.see("bytes", compare(&cu.read(kept, MIB), &vec![9; MIB]));
            must("memset", cu.cuMemsetD8_v2(kept, 0, MIB));
            cu.sync();
            replay(cu, exec, stream);
            t.see("again", compare(&cu.read(kept, MIB), &vec![9; MIB]));
        },
    )
    .fact(&[
        "alloc: SUCCESS",
        "free: SUCCESS",
        "nodes: 4",
        "bytes: right",
        "again: right",
    ]),
    Behaviour::new(
        "capture.plain_memory_freed_in_the_stream",
        "cuMemFreeAsync of cuMemAlloc memory in a capture",
        |t, cu| {
            let (stream, address) = (cu.stream(), cu.alloc(MIB));
            must("begin", cu.cuStreamBeginCapture_v2(stream, RELAXED));
            t.code("free", cu.cuMemFreeAsync(address, stream));
            t.see("end", either(end(cu, stream).map(|_| "a graph")));
        },
    ),
    Behaviour::new(
        "capture.fork_and_join",
        "A second stream joins by events and its work is in the graph",
        |t, cu| {
            let (a, b, fork, join) = (cu.stream(), cu.stream(), cu.event(), cu.event());
            let (x, y) = (cu.alloc(4096), cu.alloc(4096));
            let graph = captured(cu, a, || {
                must("memset", cu.cuMemsetD8Async(x, 1, 4096, a));
                must("record", cu.cuEventRecord(fork, a));
                must("wait", cu.cuStreamWaitEvent(b, fork, 0));
                must("copy", cu.cuMemcpyDtoDAsync_v2(y, x, 4096, b));
                must("record", cu.cuEventRecord(join, b));
                must("wait", cu.cuStreamWaitEvent(a, join, 0));
            });
            must("memset", cu.cuMemsetD8_v2(y, 0, 4096));
            cu.sync();
            let exec = instance(cu, graph);
            replay(cu, exec, a);
            t.see("bytes", compare(&cu.read(y, 4096), &vec![1; 4096]));
        },
    )
    .fact(&["bytes: right"]),
    Behaviour::new(
        "capture.not_joined",
        "A second stream that does not join spoils the capture",
        |t, cu| {
            let (a, b, fork) = (cu.stream(), cu.stream(), cu.event());
            let x = cu.alloc(4096);
            must("begin", cu.cuStreamBeginCapture_v2(a, RELAXED));
            must("record", cu.cuEventRecord(fork, a));
            must("wait", cu.cuStreamWaitEvent(b, fork, 0));
            must("memset", cu.cuMemsetD8Async(x, 1, 4096, b));
            t.see("end", either(end(cu, a).map(|_| "a graph")));
        },
    )
    .fact(&["end: STREAM_CAPTURE_UNJOINED"]),
    Behaviour::new(
        "graph.many_replays",
        "A graph replayed many times does its work each time",
        |t, cu| {
            let (stream, address) = (cu.stream(), cu.alloc(MIB));
            let touch = cu.kernel("ebb_touch");
            must("memset", cu.cuMemsetD8_v2(address, 0, MIB));
            cu.sync();
            let graph = captured(cu, stream, || {
                must(
                    "launch",
                    cu.launch(touch, stream, &[address.0, (MIB / 4) as u64, 1]),
                );
            });
            let exec = instance(cu, graph);
            for _ in 0..10 {
                replay(cu, exec, stream);
            }
            let wanted: Vec<u8> = [10, 0, 0, 0].repeat(MIB / 4);
            t.see("bytes", compare(&cu.read(address, MIB), &wanted));
            t.code("destroy", cu.cuGraphExecDestroy(exec));
            t.code("destroy", cu.cuGraphDestroy(graph));
        },
    )
    .fact(&["bytes: right", "destroy: SUCCESS", "destroy: SUCCESS"]),
    Behaviour::new(
        "graph.kernel_then_check",
        "A graph of a filling and a checking kernel over several chunks",
        |t, cu| {
            let (stream, address, result) = (cu.stream(), cu.alloc(12 * MIB), cu.alloc(8));
            let (fill, check) = (cu.kernel("ebb_fill"), cu.kernel("ebb_check"));
            let words = 3 * MIB as u64;
            let graph = captured(cu, stream, || {
                must("memset", cu.cuMemsetD8Async(result, 0, 8, stream));
                must("fill", cu.launch(fill, stream, &[address.0, words, 4, 2]));
                must(
                    "check",
                    cu.launch(check, stream, &[address.0, words, 4, 2, result.0]),
                );
            });
            let exec = instance(cu, graph);
            t.code("upload", cu.cuGraphUpload(exec, stream));
            replay(cu, exec, stream);
            t.see("wrong words", format!("{:?}", cu.read(result, 4)));
        },
    )
    .fact(&["upload: SUCCESS", "wrong words: [0, 0, 0, 0]"]),
    Behaviour::new(
        "graph.outlives_its_template",
        "An instance works after its graph is destroyed",
        |t, cu| {
            let (stream, address) = (cu.stream(), cu.alloc(4096));
            let graph = captured(cu, stream, || {
                must("memset", cu.cuMemsetD8Async(address, 7, 4096, stream));
            });
            let exec = instance(cu, graph);
            t.code("destroy", cu.cuGraphDestroy(graph));
            replay(cu, exec, stream);
            t.see("byte", cu.read(address, 1)[0]);
        },
    )
    .fact(&["destroy: SUCCESS", "byte: 7"]),
    Behaviour::new(
        "graph.update_changes_addresses",
        "An updated instance writes to the new address",
        |t, cu| {
            let (stream, a, b) = (cu.stream(), cu.alloc(4096), cu.alloc(4096));
            let fill_with = |address, value| {
                captured(cu, stream, || {
                    must("memset", cu.cuMemsetD8Async(address, value, 4096, stream));
                })
            };
            let (first, second) = (fill_with(a, 1), fill_with(b, 2));
            must("memset", cu.cuMemsetD8_v2(a, 0, 4096));
            must("memset", cu.cuMemsetD8_v2(b, 0, 4096));
            cu.sync();
            let exec = instance(cu, first);
            let mut info = CUgraphExecUpdateResultInfo::default();
            t.code("update", cu.cuGraphExecUpdate_v2(exec, second, &mut info));
            t.see("result", info.result.0);
            replay(cu, exec, stream);
            t.see("a and b", format!("{} {}", cu.read(a, 1)[0], cu.read(b, 1)[0]));
        },
    )
    .fact(&["update: SUCCESS", "result: 0", "a and b: 0 2"]),
    Behaviour::new(
        "graph.update_of_another_shape",
        "An update with another topology is refused and changes nothing",
        |t, cu| {
            let (stream, a) = (cu.stream(), cu.alloc(4096));
            let one = captured(cu, stream, || {
                must("memset", cu.cuMemsetD8Async(a, 1, 4096, stream));
            });
            let two = captured(cu, stream, || {
                must("memset", cu.cuMemsetD8Async(a, 2, 4096, stream));
                must("memset", cu.cuMemsetD8Async(a, 3, 4096, stream));
            });
            let exec = instance(cu, one);
            let mut info = CUgraphExecUpdateResultInfo::default();
            t.code("update", cu.cuGraphExecUpdate_v2(exec, two, &mut info));
            replay(cu, exec, stream);
            t.see("byte", cu.read(a, 1)[0]);
        },
    )
    .fact(&["update: GRAPH_EXEC_UPDATE_FAILURE", "byte: 1"]),
    Behaviour::new(
        "graph.memset_node_parameters",
        "A memset node's address and value can be changed in the instance",
        |t, cu| {
            let (stream, a, b) = (cu.stream(), cu.alloc(4096), cu.alloc(4096));
            let graph = empty_graph(cu);
            let node = memset_node(cu, graph, &[], a, 1, 4096);
            let exec = instance(cu, graph);
            let mut context = CUcontext::NULL;
            must("cuCtxGetCurrent", cu.cuCtxGetCurrent(&mut context));
            let changed = CUDA_MEMSET_NODE_PARAMS {
                dst: b,
                value: 6,
                elementSize: 1,
                width: 4096,
                height: 1,
                ..CUDA_MEMSET_NODE_PARAMS::default()
            };
            t.code(
                "set",
                cu.cuGraphExecMemsetNodeSetParams(exec, node, &changed, context),
            );
            replay(cu, exec, stream);
            t.see("byte", cu.read(b, 1)[0]);
        },
    )
    .fact(&["set: SUCCESS", "byte: 6"]),
    Behaviour::new(
        "graph.instance_with_freed_memory",
        "A graph with an address that was freed can still be instantiated",
        |t, cu| {
            let (stream, a, keep) = (cu.stream(), cu.alloc(8 * MIB), cu.alloc(8 * MIB));
            let graph = captured(cu, stream, || {
                must("memset", cu.cuMemsetD8Async(a, 1, MIB, stream));
            });
            cu.free(a);
            let mut exec = CUgraphExec::NULL;
            let code = cu.cuGraphInstantiateWithFlags(&mut exec, graph, 0);
            t.code("instantiate", code);
            cu.free(keep);
        },
    ),
    Behaviour::new(
        "graph.memory_nodes",
        "A graph takes memory, fills it, copies it out and frees it",
        |t, cu| {
            let (stream, kept, graph) = (cu.stream(), cu.alloc(MIB), empty_graph(cu));
            let taken = alloc_node(cu, graph, &[], MIB);
            t.see("alloc node", either(taken.map(|_| "a node")));
            let Ok((node, address)) = taken else { return };
            t.see("has an address", !address.is_null());
            let filled = memset_node(cu, graph, &[node], address, 5, MIB);
            let mut context = CUcontext::NULL;
            must("cuCtxGetCurrent", cu.cuCtxGetCurrent(&mut context));
            let copy = CUDA_MEMCPY3D {
                srcMemoryType: CU_MEMORYTYPE_DEVICE,
                srcDevice: address,
                dstMemoryType: CU_MEMORYTYPE_DEVICE,
                dstDevice: kept,
                WidthInBytes: MIB,
                Height: 1,
                Depth: 1,
                ..CUDA_MEMCPY3D::default()
            };
            let mut copied = CUgraphNode::NULL;
            t.code(
                "copy node",
                cu.cuGraphAddMemcpyNode(&mut copied, graph, &filled, 1, &copy, context),
            );
            t.code("free node", free_node(cu, graph, &[copied], address));
            let exec = instance(cu, graph);
            for _ in 0..3 {
                must("memset", cu.cuMemsetD8_v2(kept, 0, MIB));
                cu.sync();
                replay(cu, exec, stream);
                t.see("bytes", compare(&cu.read(kept, MIB), &vec![5; MIB]));
            }
        },
    )
    .fact(&[
        "alloc node: \"a node\"",
        "has an address: true",
        "copy node: SUCCESS",
        "free node: SUCCESS",
        "bytes: right",
        "bytes: right",
        "bytes: right",
    ]),
    Behaviour::new(
        "graph.memory_node_misuse",
        "No bytes, a free of unknown memory, twice",
        |t, cu| {
            let graph = empty_graph(cu);
            t.see(
                "no bytes",
                either(alloc_node(cu, graph, &[], 0).map(|_| "a node")),
            );
            t.see(
                "freeing nothing is refused",
                free_node(cu, graph, &[], CUdeviceptr::NULL) != CUresult::SUCCESS,
            );
            let (node, address) = alloc_node(cu, graph, &[], MIB).expect("a node");
            t.code("free", free_node(cu, graph, &[node], address));
            t.code("twice", free_node(cu, graph, &[node], address));
        },
    ),
    Behaviour::new(
        "graph.memory_freed_outside",
        "Memory that a graph took can be freed by the stream, and the graph launched again",
        |t, cu| {
            let (stream, graph) = (cu.stream(), empty_graph(cu));
            let (node, address) = alloc_node(cu, graph, &[], MIB).expect("a node");
            memset_node(cu, graph, &[node], address, 4, MIB);
            let exec = instance(cu, graph);
            replay(cu, exec, stream);
            t.see("bytes", compare(&cu.read(address, MIB), &vec![4; MIB]));
            t.code("launch while held", cu.cuGraphLaunch(exec, stream));
            t.code("free", cu.cuMemFreeAsync(address, stream));
            must("sync", cu.cuStreamSynchronize(stream));
            t.code("launch", cu.cuGraphLaunch(exec, stream));
            must("sync", cu.cuStreamSynchronize(stream));
            t.code("free", cu.cuMemFreeAsync(address, stream));
            must("sync", cu.cuStreamSynchronize(stream));
        },
    ),
    Behaviour::new(
        "graph.memory_figures",
        "USED of graph memory follows launches, and trimming gives RESERVED back",
        |t, cu| {
            let (stream, graph) = (cu.stream(), empty_graph(cu));
            t.see(
                "used at first",
                graph_memory(cu, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT),
            );
            let (node, address) = alloc_node(cu, graph, &[], 4 * MIB).expect("a node");
            t.code("free node", free_node(cu, graph, &[node], address));
            let exec = instance(cu, graph);
            replay(cu, exec, stream);
            t.see("used after", graph_memory(cu, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT));
            t.see(
                "reserved",
                graph_memory(cu, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT) >= 4 * MIB as u64,
            );
            must("destroy", cu.cuGraphExecDestroy(exec));
            must("destroy", cu.cuGraphDestroy(graph));
            t.code("trim", cu.cuDeviceGraphMemTrim(CUdevice(0)));
            t.see(
                "reserved then",
                graph_memory(cu, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT),
            );
        },
    ),
    Behaviour::new(
        "graph.clone_with_memory_nodes",
        "A graph with memory nodes cannot be cloned",
        |t, cu| {
            let graph = empty_graph(cu);
            let (node, address) = alloc_node(cu, graph, &[], MIB).expect("a node");
            must("free node", free_node(cu, graph, &[node], address));
            let mut copy = CUgraph::NULL;
            t.see(
                "clone is refused",
                cu.cuGraphClone(&mut copy, graph) != CUresult::SUCCESS,
            );
        },
    ),
    Behaviour::new(
        "graph.two_instances_with_memory_nodes",
        "A graph with memory nodes has one instance at a time",
        |t, cu| {
            let graph = empty_graph(cu);
            let (node, address) = alloc_node(cu, graph, &[], MIB).expect("a node");
            must("free node", free_node(cu, graph, &[node], address));
            let _first = instance(cu, graph);
            let mut second = CUgraphExec::NULL;
            t.see(
                "second is refused",
                cu.cuGraphInstantiateWithFlags(&mut second, graph, 0) != CUresult::SUCCESS,
            );
        },
    ),
    Behaviour::new(
        "graph.host_node_sees_memory",
        "A host node runs after the copy before it",
        |t, cu| {
            unsafe extern "C" fn double(at: *mut c_void) {
                // SAFETY: page-locked memory of the behaviour, which waits for the graph before it frees it.
                unsafe { *at.cast::<u8>() *= 2 };
            }
            let (stream, address) = (cu.stream(), cu.alloc(64));
            let mut host = std::ptr::null_mut();
            must("cuMemHostAlloc", cu.cuMemHostAlloc(&mut host, 64, 0));
            let graph = captured(cu, stream, || {
                must("memset", cu.cuMemsetD8Async(address, 21, 64, stream));
                must("copy", cu.cuMemcpyDtoHAsync_v2(host, address, 64, stream));
                must("function", cu.cuLaunchHostFunc(stream, Some(double), host));
                must("copy", cu.cuMemcpyHtoDAsync_v2(address, host, 64, stream));
            });
            let exec = instance(cu, graph);
            replay(cu, exec, stream);
            t.see("bytes", format!("{:?}", cu.read(address, 2)));
        },
    )
    .fact(&["bytes: [42, 21]"]),
    Behaviour::new(
        "graph.child_graph",
        "A graph inside a graph does its work",
        |t, cu| {
            let (stream, address) = (cu.stream(), cu.alloc(4096));
            let inner = captured(cu, stream, || {
                must("memset", cu.cuMemsetD8Async(address, 13, 4096, stream));
            });
            let outer = empty_graph(cu);
            let mut node = CUgraphNode::NULL;
            t.code(
                "add",
                cu.cuGraphAddChildGraphNode(&mut node, outer, std::ptr::null(), 0, inner),
            );
            let exec = instance(cu, outer);
            replay(cu, exec, stream);
            t.see("byte", cu.read(address, 1)[0]);
        },
    )
    .fact(&["add: SUCCESS", "byte: 13"]),
];
