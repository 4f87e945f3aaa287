"""Memory by handles while a stream is captured, in every mode, on the capturing thread and on another one."""

import threading

import vmm
from gpu import *

init()
context = retain()
target = alloc(MIB)
at = vmm.reserve(64 * MIB)


def all_calls(place):
    handle = vmm.create(2 * MIB)
    codes = [handle > 0, vmm.map_at(place, 2 * MIB, handle), vmm.allow(place, 2 * MIB), vmm.access(place)]
    codes += [vmm.retained(place) == handle, vmm.release(handle), vmm.asked(handle)[:2], address_range(place)[1]]
    codes += [vmm.unmap(place, 2 * MIB), vmm.release(handle)]
    return codes


for mode in range(3):
    where = stream()
    ok(cuda.cuStreamBeginCapture_v2(where, mode), "begin")
    launch_on(where, "ebb_fill", c_uint64(target), c_uint64(MIB // 4), c_uint(mode), c_uint(0))
    print("here", all_calls(at))
    other = []

    def elsewhere():
        ok(cuda.cuCtxSetCurrent(context), "current")
        other.append(all_calls(at + 8 * MIB))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    print("there", other)
    graph, run = c_void_p(), c_void_p()
    ok(cuda.cuStreamEndCapture(where, byref(graph)), "end")
    ok(cuda.cuGraphInstantiateWithFlags(byref(run), graph, c_uint64(0)), "instantiate")
    ok(cuda.cuGraphLaunch(run, where), "launch")
    ok(cuda.cuStreamSynchronize(where), "synchronise")
    print("replay", wrong(target, MIB // 4, mode))
