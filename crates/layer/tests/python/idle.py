"""Fills memory, then does what it is told, line by line, on standard input."""

import sys

from gpu import *

init()
context = retain()
where = stream()
event = c_void_p()
ok(cuda.cuEventCreate(byref(event), 0), "event")
big, words = alloc(40 * MIB), 10 * MIB
small = [alloc(3000) for _ in range(20)]
fill(big, words, 77)
for n, p in enumerate(small):
    fill(p, 700, n)
print("ready", flush=True)
for line in sys.stdin:
    if line.startswith("health"):
        # What a health check does: nothing of it needs the memory.
        ok(cuda.cuCtxSynchronize(), "synchronise")
        ok(cuda.cuStreamSynchronize(where), "synchronise")
        ok(cuda.cuStreamQuery(where), "query")
        ok(cuda.cuEventRecord(event, where), "record")
        ok(cuda.cuEventSynchronize(event), "event")
        ok(cuda.cuEventQuery(event), "event")
        value = c_int()
        ok(cuda.cuDeviceGetAttribute(byref(value), 75, 0), "attribute")
        print("healthy", address_range(big + 9) == (big, 40 * MIB), attribute(9, big, c_int), info()[0] > 0, flush=True)
    if line.startswith("check"):
        bad = wrong(big, words, 77) + sum(wrong(p, 700, n) for n, p in enumerate(small))
        print("wrong", bad, flush=True)
    if line.startswith("free"):
        ok(free(small.pop()), "free")
        print("freed", flush=True)
    if line.startswith("alloc"):
        p = alloc(5 * MIB)
        fill(p, MIB, 4)
        print("alloc", wrong(p, MIB, 4), free(p), flush=True)
