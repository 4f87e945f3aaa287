"""Allocation and free while a stream is captured, on the same thread and on another, in all three modes; then the graph
is replayed and its bytes are checked. Extra driver calls of the layer must not break the capture."""

import threading

from gpu import *

init()
context = retain()
function("ebb_fill")
function("ebb_check")
function("ebb_touch")
target = alloc(4 * MIB)
doomed = [alloc(3 * MIB) for _ in range(4)]
where = stream()


def work():
    """Frees and allocates: none of it may touch the capture."""
    ok(cuda.cuCtxSetCurrent(context), "set current")
    mode = c_uint(2)
    ok(cuda.cuThreadExchangeStreamCaptureMode(byref(mode)), "exchange")
    new = alloc(6 * MIB)
    assert new > 0, new
    ok(free(doomed.pop()), "free during a capture")
    ok(free(new), "free of what was just allocated")
    info()
    ok(cuda.cuThreadExchangeStreamCaptureMode(byref(mode)), "exchange")


for mode in (0, 1, 2):
    ok(cuda.cuStreamBeginCapture_v2(where, mode), "begin")
    launch_on(where, "ebb_fill", c_uint64(target), c_uint64(MIB), c_uint(40 + mode), c_uint(0))
    work()
    other = threading.Thread(target=work) if mode == 0 else None
    if other:
        other.start()
        other.join()
    graph, instance = c_void_p(), c_void_p()
    ok(cuda.cuStreamEndCapture(where, byref(graph)), f"end of a capture in mode {mode}")
    ok(cuda.cuGraphInstantiateWithFlags(byref(instance), graph, c_uint64(0)), "instantiate")
    ok(cuda.cuGraphLaunch(instance, where), "launch")
    ok(cuda.cuStreamSynchronize(where), "synchronise")
    print("mode", mode, "wrong", wrong(target, MIB, 40 + mode))
    ok(cuda.cuGraphExecDestroy(instance), "destroy")
    ok(cuda.cuGraphDestroy(graph), "destroy")
print("left", len(doomed))
print("begin twice", cuda.cuStreamBeginCapture_v2(where, 2), cuda.cuStreamBeginCapture_v2(where, 2) != 0)
ok(cuda.cuStreamDestroy_v2(where), "destroy of a captured stream")
ok(free(target), "free")
