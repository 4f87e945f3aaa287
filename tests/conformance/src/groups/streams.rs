//! Streams and events as they meet memory: order, waiting, host functions, values in memory.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use ebb_abi::*;

use crate::behaviour::Behaviour;
use crate::helpers::*;

/// What a host function saw.
static SEEN: AtomicU32 = AtomicU32::new(0);

/// Reads the byte behind its argument, which is page-locked memory.
unsafe extern "C" fn look(at: *mut c_void) {
    // SAFETY: the behaviour passes page-locked memory that lives until the stream is done.
    SEEN.store(
        u32::from(unsafe { at.cast::<u8>().read_volatile() }),
        Ordering::Release,
    );
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "stream.work_is_pending_until_it_is_done",
        "A stream and its event are not ready before their work is",
        |t, cu| {
            let (stream, event) = (cu.stream(), cu.event());
            let address = cu.alloc(4096);
            block(cu, stream);
            must("memset", cu.cuMemsetD8Async(address, 6, 4096, stream));
            must("record", cu.cuEventRecord(event, stream));
            t.code("stream", cu.cuStreamQuery(stream));
            t.code("event", cu.cuEventQuery(event));
            unblock();
            t.code("wait", cu.cuEventSynchronize(event));
            t.code("stream", cu.cuStreamQuery(stream));
            t.see("bytes", cu.read(address, 1)[0]);
        },
    )
    .fact(&[
        "stream: NOT_READY",
        "event: NOT_READY",
        "wait: SUCCESS",
        "stream: SUCCESS",
        "bytes: 6",
    ]),
    Behaviour::new(
        "stream.host_function_sees_earlier_copies",
        "A host function runs after the copies before it",
        |t, cu| {
            let (stream, address) = (cu.stream(), cu.alloc(4096));
            let mut host = std::ptr::null_mut();
            must("cuMemHostAlloc", cu.cuMemHostAlloc(&mut host, 4096, 0));
            must("memset", cu.cuMemsetD8Async(address, 0x2a, 4096, stream));
            must("copy", cu.cuMemcpyDtoHAsync_v2(host, address, 4096, stream));
            t.code("function", cu.cuLaunchHostFunc(stream, Some(look), host));
            t.code("wait", cu.cuStreamSynchronize(stream));
            t.see("seen", SEEN.load(Ordering::Acquire));
        },
    )
    .fact(&["function: SUCCESS", "wait: SUCCESS", "seen: 42"]),
    Behaviour::new(
        "stream.legacy_waits_for_the_others",
        "The legacy stream runs after blocking streams' earlier work",
        |t, cu| {
            let mut stream = CUstream::NULL;
            must(
                "cuStreamCreate",
                cu.cuStreamCreate(&mut stream, CU_STREAM_DEFAULT.0),
            );
            let (a, b) = (cu.alloc(MIB), cu.alloc(MIB));
            let spin = cu.kernel("ebb_spin");
            must("launch", cu.launch(spin, stream, &[30_000_000]));
            must("memset", cu.cuMemsetD8Async(a, 5, MIB, stream));
            t.code("copy", cu.cuMemcpyDtoD_v2(b, a, MIB));
            t.see("bytes", compare(&cu.read(b, MIB), &vec![5; MIB]));
        },
    )
    .fact(&["copy: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "stream.events_order_two_streams",
        "A stream that waits for an event sees what came before it",
        |t, cu| {
            let (a, b, event) = (cu.stream(), cu.stream(), cu.event());
            let (x, y) = (cu.alloc(4 * MIB), cu.alloc(4 * MIB));
            let spin = cu.kernel("ebb_spin");
            must("memset", cu.cuMemsetD8_v2(x, 0, 4 * MIB));
            cu.sync();
            must("launch", cu.launch(spin, a, &[20_000_000]));
            must("memset", cu.cuMemsetD8Async(x, 8, 4 * MIB, a));
            t.code("record", cu.cuEventRecord(event, a));
            t.code("wait", cu.cuStreamWaitEvent(b, event, 0));
            must("copy", cu.cuMemcpyDtoDAsync_v2(y, x, 4 * MIB, b));
            must("sync", cu.cuStreamSynchronize(b));
            t.see("bytes", compare(&cu.read(y, 4 * MIB), &vec![8; 4 * MIB]));
        },
    )
    .fact(&["record: SUCCESS", "wait: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "stream.destroyed_with_work",
        "Work of a destroyed stream is still done",
        |t, cu| {
            let (stream, address) = (cu.stream(), cu.alloc(MIB));
            let spin = cu.kernel("ebb_spin");
            must("launch", cu.launch(spin, stream, &[20_000_000]));
            must("memset", cu.cuMemsetD8Async(address, 3, MIB, stream));
            t.code("destroy", cu.cuStreamDestroy_v2(stream));
            cu.sync();
            t.see("bytes", compare(&cu.read(address, MIB), &vec![3; MIB]));
        },
    )
    .fact(&["destroy: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "stream.kernels_in_order",
        "A kernel sees what the kernel before it wrote",
        |t, cu| {
            let (stream, address, result) = (cu.stream(), cu.alloc(4 * MIB), cu.alloc(8));
            let (fill, check) = (cu.kernel("ebb_fill"), cu.kernel("ebb_check"));
            must("memset", cu.cuMemsetD8_v2(result, 0, 8));
            cu.sync();
            let words = MIB as u64;
            for step in 0..3 {
                t.code("fill", cu.launch(fill, stream, &[address.0, words, 1, step]));
                t.code(
                    "check",
                    cu.launch(check, stream, &[address.0, words, 1, step, result.0]),
                );
            }
            must("sync", cu.cuStreamSynchronize(stream));
            t.see("wrong words", cu.read(result, 1)[0]);
        },
    )
    .fact(&[
        "fill: SUCCESS",
        "check: SUCCESS",
        "fill: SUCCESS",
        "check: SUCCESS",
        "fill: SUCCESS",
        "check: SUCCESS",
        "wrong words: 0",
    ]),
    Behaviour::new(
        "stream.write_value",
        "A stream writes words into memory",
        |t, cu| {
            let (stream, address) = (cu.stream(), cu.alloc(64));
            must("memset", cu.cuMemsetD8_v2(address, 0, 64));
            cu.sync();
            t.code("32", cu.cuStreamWriteValue32_v2(stream, address, 0x0102_0304, 0));
            t.code(
                "64",
                cu.cuStreamWriteValue64_v2(stream, plus(address, 8), 0x0506, 0),
            );
            must("sync", cu.cuStreamSynchronize(stream));
            t.see("bytes", format!("{:?}", cu.read(address, 12)));
        },
    )
    .fact(&[
        "32: SUCCESS",
        "64: SUCCESS",
        "bytes: [4, 3, 2, 1, 0, 0, 0, 0, 6, 5, 0, 0]",
    ]),
    Behaviour::new(
        "stream.wait_value",
        "A stream waits for a word that another stream writes",
        |t, cu| {
            let (a, b, address, data) = (cu.stream(), cu.stream(), cu.alloc(64), cu.alloc(64));
            must("memset", cu.cuMemsetD8_v2(address, 0, 64));
            must("memset", cu.cuMemsetD8_v2(data, 0, 64));
            cu.sync();
            t.code("write", cu.cuStreamWriteValue32_v2(b, address, 7, 0));
            t.code(
                "wait",
                cu.cuStreamWaitValue32_v2(a, address, 7, CU_STREAM_WAIT_VALUE_EQ.0),
            );
            must("memset", cu.cuMemsetD8Async(data, 1, 64, a));
            must("sync", cu.cuStreamSynchronize(a));
            t.see("bytes", cu.read(data, 1)[0]);
        },
    )
    .fact(&["write: SUCCESS", "wait: SUCCESS", "bytes: 1"]),
    Behaviour::new(
        "stream.no_such_stream",
        "What the driver says to a destroyed stream's handle is not looked at; null events are refused",
        |t, cu| {
            t.code("record", cu.cuEventRecord(CUevent::NULL, NO_STREAM));
            t.code("wait", cu.cuStreamWaitEvent(NO_STREAM, CUevent::NULL, 0));
        },
    ),
    Behaviour::new(
        "stream.event_times_go_forward",
        "The time between two events around a kernel is not negative",
        |t, cu| {
            let (mut start, mut end) = (CUevent::NULL, CUevent::NULL);
            must("event", cu.cuEventCreate(&mut start, 0));
            must("event", cu.cuEventCreate(&mut end, 0));
            let spin = cu.kernel("ebb_spin");
            must("record", cu.cuEventRecord(start, NO_STREAM));
            must("launch", cu.launch(spin, NO_STREAM, &[5_000_000]));
            must("record", cu.cuEventRecord(end, NO_STREAM));
            cu.sync();
            let mut ms = -1.0;
            t.code("ask", cu.cuEventElapsedTime(&mut ms, start, end));
            t.see("forward", ms >= 4.9);
        },
    )
    .fact(&["ask: SUCCESS", "forward: true"]),
    Behaviour::new(
        "stream.launch_of_a_freed_address_elsewhere",
        "A kernel on live memory runs after other memory was freed",
        |t, cu| {
            let (a, b) = (cu.alloc(8 * MIB), cu.alloc(8 * MIB));
            let fill = cu.kernel("ebb_fill");
            cu.free(a);
            t.code("launch", cu.launch(fill, NO_STREAM, &[b.0, 2 * MIB as u64, 1, 1]));
            t.code("wait", cu.cuCtxSynchronize());
        },
    )
    .fact(&["launch: SUCCESS", "wait: SUCCESS"]),
    Behaviour::new(
        "stream.illegal_address_stays",
        "A kernel on an address that nobody has breaks the context for good",
        |t, cu| {
            let fill = cu.kernel("ebb_fill");
            let good = cu.alloc(4096);
            // Reserved, and never mapped: other addresses may be anybody's.
            let nobodys = cu.reserve(GRANULE);
            t.code("launch", cu.launch(fill, NO_STREAM, &[nobodys.0, 1024, 1, 1]));
            t.code("wait", cu.cuCtxSynchronize());
            let mut host = [0_u8; 4];
            t.code("copy", cu.cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), good, 4));
            let mut address = CUdeviceptr::NULL;
            t.code("alloc", cu.cuMemAlloc_v2(&mut address, 64));
            t.code("free", cu.cuMemFree_v2(good));
        },
    ),
    Behaviour::new(
        "stream.synchronize_waits",
        "cuCtxSynchronize waits for all streams",
        |t, cu| {
            let (a, b, ea, eb) = (cu.stream(), cu.stream(), cu.event(), cu.event());
            let spin = cu.kernel("ebb_spin");
            for (stream, event) in [(a, ea), (b, eb)] {
                must("launch", cu.launch(spin, stream, &[20_000_000]));
                must("record", cu.cuEventRecord(event, stream));
            }
            t.code("wait", cu.cuCtxSynchronize());
            t.code("a", cu.cuEventQuery(ea));
            t.code("b", cu.cuEventQuery(eb));
        },
    )
    .fact(&["wait: SUCCESS", "a: SUCCESS", "b: SUCCESS"]),
];
