"""Memory goes with its context: created, primary and reset ones; the next context starts with all of the card."""

import sys

from gpu import *

init()
for turn in range(3):
    context = c_void_p()
    ok(cuda.cuCtxCreate_v2(byref(context), 0, 0), "context")
    everything = info()[0]
    held = [alloc(8 * MIB) for _ in range(3)] + [alloc(1000)]
    fill(held[0], MIB, turn)
    other = c_void_p()
    ok(cuda.cuCtxCreate_v2(byref(other), 0, 0), "second context")
    mine = alloc(4 * MIB)
    print("owners", attribute(1, held[0]) == context.value, attribute(1, mine) == other.value)
    ok(cuda.cuCtxDestroy_v2(context), "destroy")
    print("first gone", attribute(1, held[0]) < 0, attribute(1, mine) == other.value, free(mine))
    ok(cuda.cuCtxDestroy_v2(other), "destroy")
    from gpu import _functions
    _functions.clear()
for turn in range(3):
    context = retain()
    again = c_void_p()
    ok(cuda.cuDevicePrimaryCtxRetain(byref(again), 0), "retain again")
    print("the same", again.value == context.value)
    p = alloc(16 * MIB)
    fill(p, MIB, 5)
    ok(cuda.cuDevicePrimaryCtxRelease_v2(0), "release")
    print("one hold left", wrong(p, MIB, 5))
    ok(cuda.cuDevicePrimaryCtxReset_v2(0) if turn == 1 else cuda.cuDevicePrimaryCtxRelease_v2(0), "release")
    _functions.clear()
    context = retain()
    print("after", info()[0] >= 200 * MIB, attribute(1, p) < 0)
    ok(cuda.cuDevicePrimaryCtxRelease_v2(0), "release")
sys.stdout.flush()
