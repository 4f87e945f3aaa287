"""Stream-ordered allocation in all its forms. Run with and without the layer: the same lines."""

import threading

from gpu import *

OPPORTUNISTIC, DEPENDENCIES, THRESHOLD = 2, 3, 4
RESERVED, RESERVED_HIGH, USED, USED_HIGH = 5, 6, 7, 8


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Props(ctypes.Structure):
    _fields_ = [
        ("kind", c_int), ("handles", c_int), ("location", Location), ("security", c_void_p),
        ("max_size", c_size_t), ("rest", ctypes.c_ubyte * 56),
    ]


def take(size, where=None, pool=None, form=""):
    pointer = c_uint64()
    if pool is None:
        code = getattr(cuda, "cuMemAllocAsync" + form)(byref(pointer), c_size_t(size), where)
    else:
        code = getattr(cuda, "cuMemAllocFromPoolAsync" + form)(byref(pointer), c_size_t(size), pool, where)
    return pointer.value if code == 0 else -code


def give(pointer, where=None, form=""):
    return getattr(cuda, "cuMemFreeAsync" + form)(c_uint64(pointer), where)


def figure(pool, which):
    value = c_uint64()
    code = cuda.cuMemPoolGetAttribute(pool, which, byref(value))
    return value.value if code == 0 else -code


def say(pool, which, value):
    return cuda.cuMemPoolSetAttribute(pool, which, byref(c_uint64(value)))


def make(max_size=0, handles=0, kind=1, where=1):
    pool = c_void_p()
    props = Props(kind, handles, Location(where, 0), None, max_size)
    code = cuda.cuMemPoolCreate(byref(pool), byref(props))
    return pool if code == 0 else -code


init()
print("no context", take(64), cuda.cuMemAllocAsync(None, c_size_t(64), None))
context = retain()
default, current = c_void_p(), c_void_p()
ok(cuda.cuDeviceGetDefaultMemPool(byref(default), 0))
ok(cuda.cuDeviceGetMemPool(byref(current), 0))
print("default is current", default.value == current.value)
print("nothing", give(take(0)), "null place", cuda.cuMemAllocAsync(None, c_size_t(64), None), "too much", take(1 << 45))
print("free null", give(0), "unknown", give(0x7000), "no stream", take(64, c_void_p(0x1234)))

first, second = stream(), stream()
a = take(3 * MIB, first)
print("figures", figure(default, USED), figure(default, RESERVED), "high", figure(default, USED_HIGH))
print("attributes", attribute(1, a), attribute(2, a, c_uint), attribute(17, a) == default.value,
      attribute(8, a, c_uint), attribute(11, a + 5) == a, attribute(12, a), attribute(14, a))
print("range", address_range(a + 77) == (a, 3 * MIB), "inner free", give(a + 512, first), free(a + 512))
launch_on(first, "ebb_fill", c_uint64(a), c_uint64(3 * MIB // 4), c_uint(5), c_uint(0))
print("freed", give(a, first), "again", give(a, first), free(a))
b = take(3 * MIB, first)
print("its own stream has it at once", b == a)
print("used", figure(default, USED), "reserved", figure(default, RESERVED))
give(b, first)
ok(cuda.cuStreamSynchronize(first))
print("after a wait", figure(default, USED), figure(default, RESERVED), figure(default, RESERVED_HIGH))
print("reset", say(default, RESERVED_HIGH, 0), say(default, USED_HIGH, 0), say(default, USED_HIGH, 7),
      figure(default, RESERVED_HIGH), figure(default, USED_HIGH))
print("no setting", say(default, RESERVED, 0), say(default, USED, 0), figure(default, 77))

print("threshold", say(default, THRESHOLD, 1 << 40), figure(default, THRESHOLD))
c = take(10 * MIB, first)
give(c, first)
ok(cuda.cuCtxSynchronize())
print("kept", figure(default, RESERVED))
print("trim", cuda.cuMemPoolTrimTo(default, c_size_t(4 * MIB)), figure(default, RESERVED) >= 4 * MIB,
      cuda.cuMemPoolTrimTo(default, c_size_t(0)), figure(default, RESERVED))
say(default, THRESHOLD, 0)

mine = make(max_size=8 * MIB)
d = take(8 * MIB, first, mine)
print("mine", d > 0, attribute(17, d) == mine.value, "full", take(1, first, mine), figure(mine, USED))
print("order", give(d, first), take(8 * MIB, second, mine) == d, free(d), figure(mine, USED))
print("switch", say(mine, OPPORTUNISTIC, 0), say(mine, DEPENDENCIES, 0))
e = take(MIB, second, mine)
print("destroyed", cuda.cuMemPoolDestroy(mine), take(1, first, mine), figure(mine, USED))
fill(e, MIB // 4, 9)
print("lives on", wrong(e, MIB // 4, 9), attribute(2, e, c_uint), give(e, second))
ok(cuda.cuCtxSynchronize())
print("default stays", cuda.cuMemPoolDestroy(default), cuda.cuMemPoolDestroy(c_void_p(0x99)))

other = make()
print("current", cuda.cuDeviceSetMemPool(0, other), attribute(17, take(64)) == other.value, figure(other, USED))
ok(cuda.cuDeviceSetMemPool(0, default))
print("back", attribute(17, take(64)) == default.value)
location, where = Location(1, 0), c_void_p()
print("newer form", cuda.cuMemSetMemPool(byref(location), 1, other), attribute(17, take(64)) == other.value)
print(cuda.cuMemGetMemPool(byref(where), byref(location), 1), where.value == other.value)
print(cuda.cuMemPoolDestroy(other), attribute(17, take(64)) == default.value)

h = take(MIB, None, None, "_ptsz")
fill(h, MIB // 4, 3)
print("own stream", h > 0, wrong(h, MIB // 4, 3), give(h, None, "_ptsz"))
print("again", take(MIB, None, None, "_ptsz") == h, free(h))
plain = alloc(5 * MIB)
print("plain memory", give(plain, first), cuda.cuStreamSynchronize(first))

handles = []


def work(number):
    ok(cuda.cuCtxSetCurrent(context))
    where = stream()
    for round in range(30):
        words = 1000 * (number + 1) + round
        own = round % 2 == 0
        pointer = take(words * 4, None if own else where, None, "_ptsz" if own else "")
        ok(cuda.cuMemsetD32Async_ptsz(c_uint64(pointer), c_uint(number), c_size_t(words), None if own else where))
        data = ctypes.create_string_buffer(words * 4)
        ok(cuda.cuMemcpyDtoHAsync_v2_ptsz(data, c_uint64(pointer), c_size_t(words * 4), None if own else where))
        ok(cuda.cuStreamSynchronize_ptsz(None if own else where))
        if data.raw != number.to_bytes(4, "little") * words:
            handles.append((number, round))
        ok(give(pointer, None if own else where, "_ptsz" if own else ""))
    ok(cuda.cuStreamDestroy_v2(where))


threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("threads", handles)
ok(cuda.cuCtxSynchronize())

graph, execution = c_void_p(), c_void_p()
before = take(64, second)
ok(cuda.cuStreamBeginCapture_v2(first, 2))
g = take(2 * MIB, first)
ok(cuda.cuMemsetD8Async(c_uint64(g), 4, c_size_t(2 * MIB), first))
print("outside", take(64, second) > 0, give(before, second))
print("not the captures own", give(take(64, second), first))
print("free in it", give(g, first))
ok(cuda.cuStreamEndCapture(first, byref(graph)))
ok(cuda.cuGraphInstantiateWithFlags(byref(execution), graph, c_uint64(0)))
for _ in range(3):
    ok(cuda.cuGraphLaunch(execution, first))
ok(cuda.cuStreamSynchronize(first))
ok(cuda.cuGraphExecDestroy(execution))
ok(cuda.cuGraphDestroy(graph))
print("done", cuda.cuStreamDestroy_v2(first), cuda.cuStreamDestroy_v2(second))

i = take(20 * MIB)
print("reset", i > 0, cuda.cuDevicePrimaryCtxReset_v2(0))
retain()
# With the layer its memory goes with the last context of its device; the driver leaves it.
print("of before", report() is None or attribute(2, i, c_uint) == -1 and figure(default, RESERVED) == 0)
j = take(20 * MIB)
print("after", j > 0, give(j), cuda.cuCtxSynchronize())
