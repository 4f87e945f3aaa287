"""Threads with streams of their own allocate, fill, check and free in stream order, until standard input ends."""

import sys
import threading

from gpu import *

init()
context = retain()
kernel, checker = function("ebb_fill"), function("ebb_check")
turns, bad, stop = [0] * 4, [], threading.Event()
cold = c_uint64()
ok(cuda.cuMemAllocAsync(byref(cold), c_size_t(24 * MIB), None))
fill(cold.value, 6 * MIB, 42)


def work(number):
    ok(cuda.cuCtxSetCurrent(context))
    where, other, event = stream(), stream(), c_void_p()
    ok(cuda.cuEventCreate(byref(event), 2))
    count = c_uint64()
    ok(cuda.cuMemAllocAsync(byref(count), c_size_t(4), where))
    while not stop.is_set():
        blocks = []
        for n in range(4):
            words = (MIB // 4) * (n + 1) + 100 * number
            p = c_uint64()
            ok(cuda.cuMemAllocAsync(byref(p), c_size_t(4 * words), where), "alloc")
            launch_on(where, "ebb_fill", p, c_uint64(words), c_uint(number * 10 + n), c_uint(turns[number]))
            blocks.append((p, words))
        ok(cuda.cuMemsetD8Async(count, 0, c_size_t(4), where))
        for n, (p, words) in enumerate(blocks):
            launch_on(where, "ebb_check", p, c_uint64(words), c_uint(number * 10 + n), c_uint(turns[number]), count)
            if n % 2:
                ok(cuda.cuMemFreeAsync(p, where), "free")
            else:
                # On another stream, which waits for this one.
                ok(cuda.cuEventRecord(event, where))
                ok(cuda.cuStreamWaitEvent(other, event, 0))
                ok(cuda.cuMemFreeAsync(p, other), "free elsewhere")
        data = ctypes.create_string_buffer(4)
        ok(cuda.cuMemcpyDtoHAsync_v2(data, count, c_size_t(4), where))
        ok(cuda.cuStreamSynchronize(where))
        if data.raw != bytes(4):
            bad.append((number, turns[number], int.from_bytes(data.raw, "little")))
        turns[number] += 1
    ok(cuda.cuMemFreeAsync(count, where))


threads = [threading.Thread(target=work, args=(n,)) for n in range(len(turns))]
for thread in threads:
    thread.start()
print("ready", flush=True)
for line in sys.stdin:
    print("turns", min(turns), flush=True)
stop.set()
for thread in threads:
    thread.join()
ok(cuda.cuCtxSynchronize())
print("bad", bad + [wrong(cold.value, 6 * MIB, 42)] * (wrong(cold.value, 6 * MIB, 42) > 0), flush=True)
