//! The simulated driver behaves as the real one was seen to behave, seen from a program: streams, kernels, graphs, capture.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

mod common;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};

use common::*;
use ebb_abi::*;

const GLOBAL: CUstreamCaptureMode = CU_STREAM_CAPTURE_MODE_GLOBAL;
const RELAXED: CUstreamCaptureMode = CU_STREAM_CAPTURE_MODE_RELAXED;

#[test]
fn streams_run_later_and_in_order() {
    alone("streams_run_later_and_in_order", &[], |cuda| {
        let flag = cuda.alloc(4);
        ok(cuda.cuMemsetD8_v2(flag, 0, 4));
        ok(cuda.cuCtxSynchronize());
        let until = cuda.kernel("ebb_spin_until");
        let (s, other) = (
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
        );
        let data = cuda.alloc(4);
        ok(cuda.launch(until, s, &[flag.0]));
        ok(cuda.cuMemsetD32Async(data, 5, 1, s));
        let event = cuda.event();
        ok(cuda.cuEventRecord(event, s));
        assert_eq!(cuda.cuStreamQuery(s), CUresult::ERROR_NOT_READY);
        assert_eq!(cuda.cuEventQuery(event), CUresult::ERROR_NOT_READY);
        // Another stream that waits for the event does not run ahead.
        ok(cuda.cuStreamWaitEvent(other, event, 0));
        ok(cuda.cuMemsetD32Async(data, 6, 1, other));
        assert_eq!(cuda.cuStreamQuery(other), CUresult::ERROR_NOT_READY);
        // A non-blocking stream goes its own way: the legacy stream is free.
        ok(cuda.cuMemsetD32_v2(flag, 1, 1));
        ok(cuda.cuStreamSynchronize(other));
        ok(cuda.cuEventSynchronize(event));
        assert_eq!(cuda.read(data, 4), [6, 0, 0, 0]);
        ok(cuda.cuStreamQuery(s));
        let end = cuda.event();
        ok(cuda.cuEventRecord(end, other));
        ok(cuda.cuEventSynchronize(end));
        let mut time = -1.0;
        ok(cuda.cuEventElapsedTime(&mut time, event, end));
        assert!(time >= 0.0);
    });
}

#[test]
fn the_legacy_stream_keeps_order_with_blocking_ones() {
    alone("the_legacy_stream_keeps_order_with_blocking_ones", &[], |cuda| {
        let (flag, data) = (cuda.alloc(4), cuda.alloc(4));
        ok(cuda.cuMemsetD8_v2(flag, 0, 4));
        ok(cuda.cuCtxSynchronize());
        let until = cuda.kernel("ebb_spin_until");
        let (blocking, free) = (cuda.stream(0), cuda.stream(CU_STREAM_NON_BLOCKING.0));
        ok(cuda.launch(until, blocking, &[flag.0]));
        ok(cuda.cuMemsetD32Async(data, 1, 1, NO_STREAM));
        assert_eq!(cuda.cuStreamQuery(NO_STREAM), CUresult::ERROR_NOT_READY);
        // And what comes after on a blocking stream waits for the legacy one in turn.
        let second = cuda.stream(0);
        ok(cuda.cuMemsetD32Async(data, 2, 1, second));
        assert_eq!(cuda.cuStreamQuery(second), CUresult::ERROR_NOT_READY);
        ok(cuda.cuMemsetD32Async(flag, 1, 1, free));
        ok(cuda.cuCtxSynchronize());
        assert_eq!(cuda.read(data, 4), [2, 0, 0, 0]);
    });
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    alone("a_destroyed_stream_finishes_its_work", &[], |cuda| {
        let (flag, data) = (cuda.alloc(4), cuda.alloc(4));
        ok(cuda.cuMemsetD8_v2(flag, 0, 4));
        ok(cuda.cuMemsetD8_v2(data, 0, 4));
        ok(cuda.cuCtxSynchronize());
        let (s, other) = (
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
        );
        ok(cuda.launch(cuda.kernel("ebb_spin_until"), s, &[flag.0]));
        ok(cuda.cuMemsetD32Async(data, 8, 1, s));
        ok(cuda.cuStreamDestroy_v2(s));
        assert_eq!(cuda.cuStreamSynchronize(s), CUresult::ERROR_INVALID_HANDLE);
        ok(cuda.cuMemsetD32Async(flag, 1, 1, other));
        // Waiting for the context waits for it.
        ok(cuda.cuCtxSynchronize());
        assert_eq!(cuda.read(data, 4), [8, 0, 0, 0]);
    });
}

#[test]
fn cuMemFree_waits_and_unmap_does_not() {
    alone("cuMemFree_waits_and_unmap_does_not", &[], |cuda| {
        let flag = cuda.alloc(4);
        ok(cuda.cuMemsetD8_v2(flag, 0, 4));
        let other = cuda.reserve(2 * MIB);
        let handle = cuda.create(2 * MIB);
        cuda.map(other, 2 * MIB, handle);
        ok(cuda.cuCtxSynchronize());
        let s = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        ok(cuda.launch(cuda.kernel("ebb_spin_until"), s, &[flag.0]));
        // None of these waits for the kernel; if one did, the test would hang here.
        ok(cuda.cuMemUnmap(other, 2 * MIB));
        ok(cuda.cuMemRelease(handle));
        let fresh = cuda.alloc(2 * MIB);
        assert_eq!(cuda.cuStreamQuery(s), CUresult::ERROR_NOT_READY);
        let setter = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        static RELEASED: AtomicU32 = AtomicU32::new(0);
        unsafe extern "C" fn released(_: *mut c_void) {
            RELEASED.store(1, Ordering::SeqCst);
        }
        ok(cuda.cuLaunchHostFunc(setter, Some(released), null_mut()));
        ok(cuda.cuMemsetD32Async(flag, 1, 1, setter));
        ok(cuda.cuMemFree_v2(fresh));
        assert_eq!(RELEASED.load(Ordering::SeqCst), 1);
        ok(cuda.cuStreamQuery(s));
    });
}

#[test]
fn kernels_compute() {
    alone("kernels_compute", &[], |cuda| {
        let words = 700_000_u64;
        let (data, result) = (cuda.alloc(words as usize * 4), cuda.alloc(8));
        ok(cuda.cuMemsetD8_v2(result, 0, 8));
        let (fill, check, touch, sum) = (
            cuda.kernel("ebb_fill"),
            cuda.kernel("ebb_check"),
            cuda.kernel("ebb_touch"),
            cuda.kernel("ebb_sum"),
        );
        let wrong = || u64::from_le_bytes(cuda.read(result, 8).try_into().unwrap());
        ok(cuda.launch(fill, NO_STREAM, &[data.0, words, 3, 4]));
        ok(cuda.launch(check, NO_STREAM, &[data.0, words, 3, 4, result.0]));
        assert_eq!(wrong(), 0);
        ok(cuda.launch(touch, NO_STREAM, &[data.0, words, 1000]));
        ok(cuda.launch(check, NO_STREAM, &[data.0, words, 3, 4, result.0]));
        assert_eq!(wrong(), 700);
        ok(cuda.cuMemsetD8_v2(result, 0, 8));
        ok(cuda.cuMemsetD32_v2(data, 2, words as usize));
        ok(cuda.launch(sum, NO_STREAM, &[data.0, words, result.0]));
        assert_eq!(wrong(), 2 * words);
        let saxpy = cuda.kernel("ebb_saxpy");
        let (x, y) = (cuda.alloc(8), cuda.alloc(8));
        let floats = |values: [f32; 2]| {
            values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect::<Vec<_>>()
        };
        cuda.write(x, &floats([1.5, -2.0]));
        cuda.write(y, &floats([10.0, 20.0]));
        ok(cuda.launch(saxpy, NO_STREAM, &[y.0, x.0, u64::from(2.0_f32.to_bits()), 2]));
        assert_eq!(cuda.read(y, 8), floats([13.0, 16.0]));
        // Kernels see page-locked host memory, and nothing else of the host.
        let mut pinned = null_mut();
        ok(cuda.cuMemHostAlloc(&mut pinned, 4096, 0));
        ok(cuda.launch(fill, NO_STREAM, &[pinned as u64, 1024, 1, 1]));
        ok(cuda.cuCtxSynchronize());
        let mut plain = vec![0_u32; 1024];
        ok(cuda.launch(fill, NO_STREAM, &[plain.as_mut_ptr() as u64, 1024, 1, 1]));
        assert_eq!(cuda.cuCtxSynchronize(), CUresult::ERROR_ILLEGAL_ADDRESS);
    });
}

#[test]
fn launches_are_checked() {
    alone("launches_are_checked", &[], |cuda| {
        let empty = cuda.kernel("ebb_empty");
        let launch = |grid: u32, block: u32| {
            cuda.cuLaunchKernel(
                empty,
                grid,
                1,
                1,
                block,
                1,
                1,
                0,
                NO_STREAM,
                null_mut(),
                null_mut(),
            )
        };
        ok(launch(1, 1024));
        assert_eq!(launch(0, 1), CUresult::ERROR_INVALID_VALUE);
        assert_eq!(launch(1, 1025), CUresult::ERROR_INVALID_VALUE);
        assert_eq!(
            cuda.launch(CUfunction(77), NO_STREAM, &[]),
            CUresult::ERROR_INVALID_HANDLE
        );
        assert_eq!(
            cuda.launch(empty, CUstream(77), &[]),
            CUresult::ERROR_INVALID_HANDLE
        );
        // A parameter buffer instead of pointers.
        let (data, fill) = (cuda.alloc(16), cuda.kernel("ebb_fill"));
        let buffer = [data.0, 4, 1 | 2 << 32];
        let mut size = 24_usize;
        let mut extra = [
            CU_LAUNCH_PARAM_BUFFER_POINTER as *mut c_void,
            buffer.as_ptr().cast_mut().cast(),
            CU_LAUNCH_PARAM_BUFFER_SIZE as *mut c_void,
            std::ptr::from_mut(&mut size).cast(),
            null_mut(),
        ];
        ok(cuda.cuLaunchKernel(
            fill,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            NO_STREAM,
            null_mut(),
            extra.as_mut_ptr(),
        ));
        let seen = cuda.read(data, 16);
        ok(cuda.launch(fill, NO_STREAM, &[data.0, 4, 1, 2]));
        assert_eq!(cuda.read(data, 16), seen);
        let mut module = CUmodule::NULL;
        assert_eq!(
            cuda.cuModuleLoadData(&mut module, c"hello".as_ptr().cast()),
            CUresult::ERROR_INVALID_PTX
        );
    });
}

#[test]
fn graphs_by_hand() {
    alone("graphs_by_hand", &[], |cuda| {
        let data = cuda.alloc(64);
        let mut graph = CUgraph::NULL;
        ok(cuda.cuGraphCreate(&mut graph, 0));
        let set = |value: u32| CUDA_MEMSET_NODE_PARAMS {
            dst: data,
            value,
            elementSize: 4,
            width: 16,
            height: 1,
            ..CUDA_MEMSET_NODE_PARAMS::default()
        };
        let (mut first, mut second) = (CUgraphNode::NULL, CUgraphNode::NULL);
        let null = CUcontext::NULL;
        ok(cuda.cuGraphAddMemsetNode(&mut second, graph, std::ptr::null(), 0, &set(2), null));
        ok(cuda.cuGraphAddMemsetNode(&mut first, graph, std::ptr::null(), 0, &set(1), null));
        // Made later, runs earlier.
        ok(cuda.cuGraphAddDependencies(graph, &first, &second, 1));
        let mut count = 0;
        ok(cuda.cuGraphGetNodes(graph, null_mut(), &mut count));
        assert_eq!(count, 2);
        let mut exec = CUgraphExec::NULL;
        ok(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        ok(cuda.cuGraphLaunch(exec, NO_STREAM));
        assert_eq!(cuda.read(data, 4), [2, 0, 0, 0]);
        ok(cuda.cuGraphExecMemsetNodeSetParams(exec, second, &set(9), null));
        ok(cuda.cuGraphLaunch(exec, NO_STREAM));
        assert_eq!(cuda.read(data, 4), [9, 0, 0, 0]);
        // The graph itself did not change.
        let mut back = CUDA_MEMSET_NODE_PARAMS::default();
        ok(cuda.cuGraphMemsetNodeGetParams(second, &mut back));
        assert_eq!(back.value, 2);
        ok(cuda.cuGraphAddDependencies(graph, &second, &first, 1));
        let mut circle = CUgraphExec::NULL;
        assert_eq!(
            cuda.cuGraphInstantiateWithFlags(&mut circle, graph, 0),
            CUresult::ERROR_INVALID_VALUE
        );
        ok(cuda.cuGraphExecDestroy(exec));
        ok(cuda.cuGraphDestroy(graph));
        assert_eq!(cuda.cuGraphLaunch(exec, NO_STREAM), CUresult::ERROR_INVALID_VALUE);
    });
}

#[test]
fn graph_memory_nodes() {
    alone(
        "graph_memory_nodes",
        &[("EBB_SIM_MEMORY", "64Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")],
        |cuda| {
            let s = cuda.stream(CU_STREAM_NON_BLOCKING.0);
            ok(cuda.cuStreamBeginCapture_v2(s, GLOBAL));
            let mut address = CUdeviceptr::NULL;
            ok(cuda.cuMemAllocAsync(&mut address, 8 * MIB, s));
            ok(cuda.cuMemsetD8Async(address, 7, 8 * MIB, s));
            ok(cuda.cuMemFreeAsync(address, s));
            let mut graph = CUgraph::NULL;
            ok(cuda.cuStreamEndCapture(s, &mut graph));
            assert_eq!(cuda.free_bytes(), 64 * MIB);
            let mut exec = CUgraphExec::NULL;
            ok(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            for _ in 0..3 {
                ok(cuda.cuGraphLaunch(exec, s));
            }
            ok(cuda.cuStreamSynchronize(s));
            // The device keeps it for the next launch.
            assert_eq!(cuda.free_bytes(), 56 * MIB);
            // What it keeps makes room for others, and without room the launch says so.
            let all = cuda.alloc(60 * MIB);
            assert_eq!(cuda.cuGraphLaunch(exec, s), CUresult::ERROR_OUT_OF_MEMORY);
            ok(cuda.cuMemFree_v2(all));
            ok(cuda.cuGraphLaunch(exec, s));
            ok(cuda.cuStreamSynchronize(s));
        },
    );
}

#[test]
fn capture_records_and_joins() {
    alone("capture_records_and_joins", &[], |cuda| {
        let data = cuda.alloc(8);
        ok(cuda.cuMemsetD8_v2(data, 0, 8));
        let (a, b) = (cuda.stream(0), cuda.stream(0));
        let (fork, join) = (cuda.event(), cuda.event());
        ok(cuda.cuStreamBeginCapture_v2(a, RELAXED));
        let mut status = CUstreamCaptureStatus(9);
        ok(cuda.cuStreamIsCapturing(a, &mut status));
        assert_eq!(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
        ok(cuda.cuMemsetD32Async(data, 1, 1, a));
        ok(cuda.cuEventRecord(fork, a));
        ok(cuda.cuStreamWaitEvent(b, fork, 0));
        ok(cuda.cuMemsetD32Async(plus(data, 4), 2, 1, b));
        ok(cuda.cuEventRecord(join, b));
        ok(cuda.cuStreamWaitEvent(a, join, 0));
        ok(cuda.cuMemcpyDtoDAsync_v2(data, plus(data, 4), 4, a));
        let mut graph = CUgraph::NULL;
        assert_eq!(
            cuda.cuStreamEndCapture(b, &mut graph),
            CUresult::ERROR_STREAM_CAPTURE_UNMATCHED
        );
        assert_eq!(
            cuda.cuStreamEndCapture(a, &mut graph),
            CUresult::ERROR_STREAM_CAPTURE_INVALIDATED
        );
        // The same again, ended well.
        ok(cuda.cuStreamBeginCapture_v2(a, RELAXED));
        ok(cuda.cuMemsetD32Async(data, 1, 1, a));
        ok(cuda.cuEventRecord(fork, a));
        ok(cuda.cuStreamWaitEvent(b, fork, 0));
        ok(cuda.cuMemsetD32Async(plus(data, 4), 2, 1, b));
        ok(cuda.cuEventRecord(join, b));
        ok(cuda.cuStreamWaitEvent(a, join, 0));
        ok(cuda.cuMemcpyDtoDAsync_v2(data, plus(data, 4), 4, a));
        ok(cuda.cuStreamEndCapture(a, &mut graph));
        assert_eq!(cuda.read(data, 8), [0; 8], "captured work must not run");
        let mut exec = CUgraphExec::NULL;
        ok(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        ok(cuda.cuGraphLaunch(exec, a));
        assert_eq!(cuda.read(data, 8), [2, 0, 0, 0, 2, 0, 0, 0]);
    });
}

#[test]
fn capture_forbids() {
    alone("capture_forbids", &[], |cuda| {
        let unsupported = CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED;
        let (s, other) = (
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
        );
        let mut graph = CUgraph(5);
        let ends_invalid = |graph: &mut CUgraph| {
            assert_eq!(
                cuda.cuStreamEndCapture(s, graph),
                CUresult::ERROR_STREAM_CAPTURE_INVALIDATED
            );
            assert!(graph.is_null());
        };
        // Allocating in the global mode.
        ok(cuda.cuStreamBeginCapture_v2(s, GLOBAL));
        assert_eq!(cuda.try_alloc(8), Err(unsupported));
        ends_invalid(&mut graph);
        // In a thread that is relaxed, it is fine, and so is what virtual memory needs and waiting for another stream.
        let mut mode = RELAXED;
        ok(cuda.cuThreadExchangeStreamCaptureMode(&mut mode));
        assert_eq!(mode, GLOBAL);
        ok(cuda.cuStreamBeginCapture_v2(s, GLOBAL));
        let address = cuda.alloc(8);
        let reserved = cuda.reserve(2 * MIB);
        cuda.map(reserved, 2 * MIB, cuda.create(2 * MIB));
        ok(cuda.cuMemUnmap(reserved, 2 * MIB));
        ok(cuda.cuStreamSynchronize(other));
        ok(cuda.cuMemsetD8Async(address, 0, 8, s));
        ok(cuda.cuStreamEndCapture(s, &mut graph));
        // Waiting for the context is not, whatever the mode, and it spoils the capture.
        ok(cuda.cuStreamBeginCapture_v2(s, RELAXED));
        assert_eq!(cuda.cuCtxSynchronize(), unsupported);
        ends_invalid(&mut graph);
        // Neither is waiting for the stream itself.
        ok(cuda.cuStreamBeginCapture_v2(s, RELAXED));
        assert_eq!(cuda.cuStreamSynchronize(s), unsupported);
        ends_invalid(&mut graph);
        // The legacy stream, while a stream that keeps order with it is captured.
        let blocking = cuda.stream(0);
        ok(cuda.cuStreamBeginCapture_v2(blocking, RELAXED));
        assert_eq!(
            cuda.cuMemsetD8Async(address, 0, 8, NO_STREAM),
            CUresult::ERROR_STREAM_CAPTURE_IMPLICIT
        );
        assert_eq!(
            cuda.cuStreamEndCapture(blocking, &mut graph),
            CUresult::ERROR_STREAM_CAPTURE_INVALIDATED
        );
        assert_eq!(cuda.cuStreamBeginCapture_v2(NO_STREAM, RELAXED), unsupported);
        // A stream that joined and was not joined back.
        let event = cuda.event();
        ok(cuda.cuStreamBeginCapture_v2(s, RELAXED));
        ok(cuda.cuEventRecord(event, s));
        ok(cuda.cuStreamWaitEvent(other, event, 0));
        ok(cuda.cuMemsetD8Async(address, 0, 8, other));
        assert_eq!(
            cuda.cuStreamEndCapture(s, &mut graph),
            CUresult::ERROR_STREAM_CAPTURE_UNJOINED
        );
        ok(cuda.cuStreamSynchronize(other));
        ok(cuda.cuCtxSynchronize());
    });
}

#[test]
fn the_link_takes_time() {
    let variables = [
        ("EBB_SIM_LINK_BYTES_PER_S", "1Gi"),
        ("EBB_SIM_LINK_LATENCY_US", "1000"),
    ];
    alone("the_link_takes_time", &variables, |cuda| {
        let data = cuda.alloc(32 * MIB);
        let mut pinned = null_mut();
        ok(cuda.cuMemHostAlloc(&mut pinned, 32 * MIB, 0));
        let (s, begin, end) = (cuda.stream(0), cuda.event(), cuda.event());
        ok(cuda.cuEventRecord(begin, s));
        ok(cuda.cuMemcpyHtoDAsync_v2(data, pinned, 32 * MIB, s));
        ok(cuda.cuEventRecord(end, s));
        ok(cuda.cuEventSynchronize(end));
        let mut time = 0.0;
        ok(cuda.cuEventElapsedTime(&mut time, begin, end));
        // 31.25 ms and 1 ms: never less, however loaded the machine is.
        assert!(time >= 32.0, "{time}");
    });
}

#[test]
fn per_thread_streams_are_apart() {
    alone("per_thread_streams_are_apart", &[], |cuda| {
        let (mut mine, mut legacy, mut named) = (0, 0, 0);
        ok(cuda.cuStreamGetId_ptsz(NO_STREAM, &mut mine));
        ok(cuda.cuStreamGetId(NO_STREAM, &mut legacy));
        ok(cuda.cuStreamGetId(CU_STREAM_PER_THREAD, &mut named));
        assert_ne!(mine, legacy);
        assert_eq!(mine, named);
        let mut context = CUcontext::NULL;
        ok(cuda.cuCtxGetCurrent(&mut context));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                ok(cuda.cuCtxSetCurrent(context));
                let mut other = 0;
                ok(cuda.cuStreamGetId(CU_STREAM_PER_THREAD, &mut other));
                assert_ne!(other, mine);
            });
        });
    });
}

#[test]
fn stream_memory_operations() {
    alone("stream_memory_operations", &[], |cuda| {
        let word = cuda.alloc(8);
        ok(cuda.cuMemsetD8_v2(word, 0, 8));
        ok(cuda.cuCtxSynchronize());
        let (a, b) = (
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
        );
        ok(cuda.cuStreamWaitValue32_v2(a, word, 3, CU_STREAM_WAIT_VALUE_GEQ.0));
        assert_eq!(cuda.cuStreamQuery(a), CUresult::ERROR_NOT_READY);
        ok(cuda.cuStreamWriteValue32_v2(b, word, 4, 0));
        ok(cuda.cuStreamSynchronize(a));
        assert_eq!(cuda.read(word, 4), [4, 0, 0, 0]);
    });
}
