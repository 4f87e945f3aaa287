"""Threads that make, map, fill, check, unmap and release until they are told to stop."""

import sys
import threading

import vmm
from gpu import *

init()
context = retain()
function("ebb_fill"), function("ebb_check")
turns, errors, bad = [0] * 3, [], [0] * 3
stop = threading.Event()
kept = vmm.reserve(64 * MIB)
whole = vmm.create(8 * MIB)
ok(vmm.map_at(kept, 8 * MIB, whole), "map")
ok(vmm.allow(kept, 8 * MIB), "access")
fill(kept, 2 * MIB, 99)


def work(n):
    try:
        ok(cuda.cuCtxSetCurrent(context), "current")
        at = vmm.reserve(64 * MIB)
        while not stop.is_set():
            seed = n * 1000 + turns[n] % 1000
            one, two = vmm.create(4 * MIB), vmm.create(2 * MIB)
            ok(vmm.map_at(at, 4 * MIB, one), "map")
            ok(vmm.map_at(at + 4 * MIB, 2 * MIB, two), "map")
            ok(vmm.allow(at, 6 * MIB), "access")
            fill(at, 6 * MIB // 4, seed)
            ok(vmm.map_at(at + 16 * MIB, 4 * MIB, one), "map")
            ok(vmm.release(one), "release")
            ok(vmm.allow(at + 16 * MIB, 4 * MIB), "access")
            bad[n] += wrong(at, 6 * MIB // 4, seed)
            ok(vmm.unmap(at, 6 * MIB), "unmap")
            bad[n] += wrong(at + 16 * MIB, MIB, seed)
            ok(vmm.unmap(at + 16 * MIB, 4 * MIB), "unmap")
            ok(vmm.release(two), "release")
            turns[n] += 1
    except AssertionError as error:
        errors.append(str(error))


threads = [threading.Thread(target=work, args=(n,)) for n in range(len(turns))]
for thread in threads:
    thread.start()
print("ready", flush=True)
for line in sys.stdin:
    if line.startswith("turns"):
        print("turns", sum(turns), flush=True)
    if line.startswith("stop"):
        stop.set()
        for thread in threads:
            thread.join()
        print("wrong", sum(bad) + wrong(kept, 2 * MIB, 99), "errors", errors, flush=True)
