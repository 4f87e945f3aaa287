"""Stream-ordered memory under a limit: refused there and no earlier, without drift, and credited however it goes."""

from gpu import *


class Props(ctypes.Structure):
    _fields_ = [("kind", c_int), ("handles", c_int), ("where", c_int), ("id", c_int), ("rest", ctypes.c_ubyte * 72)]


def take(size, where=None, pool=None):
    pointer = c_uint64()
    code = (cuda.cuMemAllocAsync(byref(pointer), c_size_t(size), where) if pool is None
            else cuda.cuMemAllocFromPoolAsync(byref(pointer), c_size_t(size), pool, where))
    return pointer.value if code == 0 else -code


def give(pointer, where=None):
    ok(cuda.cuMemFreeAsync(c_uint64(pointer), where), "free")


def make():
    pool, props = c_void_p(), Props(1, 0, 1, 0)
    ok(cuda.cuMemPoolCreate(byref(pool), byref(props)), "pool")
    return pool


init()
context = retain()
default, where = c_void_p(), stream()
ok(cuda.cuDeviceGetDefaultMemPool(byref(default), 0))
start = info()[0]
pool = make()
held = []
while (p := take(32 * MIB, where, pool)) > 0:
    held.append(p)
print("limit", -p, len(held) == start // (32 * MIB), info()[0] == start - len(held) * 32 * MIB)
for p in held:
    give(p, where)
print("round and round", sum(give(take(32 * MIB, where, pool), where) is None for _ in range(200)))
plain = alloc(start // (2 * MIB) * 2 * MIB)
print("all of it for somebody else", plain > 0, info()[0] < 2 * MIB)
ok(free(plain))
print("credited", info()[0] == start)

# The same from the default pool, with and without a threshold.
for threshold in (0, 1 << 60):
    ok(cuda.cuMemPoolSetAttribute(default, 4, byref(c_uint64(threshold))))
    for _ in range(300):
        give(take(start // 3, where), where)
    ok(cuda.cuStreamSynchronize(where))
    kept = start - info()[0]
    ok(cuda.cuMemPoolTrimTo(default, c_size_t(0)))
    print("kept", kept > 0, "trimmed", info()[0] == start)
ok(cuda.cuMemPoolSetAttribute(default, 4, byref(c_uint64(0))))

# A pool that another process may open is the driver's own: counted by what it reserves.
shared, props, s = c_void_p(), Props(1, 1, 1, 0), c_uint64()
ok(cuda.cuMemPoolCreate(byref(shared), byref(props)), "exportable pool")
s = take(3 * MIB, where, shared)
print("exportable", s > 0, start - info()[0] == 4 * MIB, attribute(17, s) == shared.value,
      "full", take(start, where, shared), start - info()[0] == 4 * MIB)
fill(s, MIB // 2, 8)
print("used", wrong(s, MIB // 2, 8))
give(s, where)
ok(cuda.cuStreamSynchronize(where))
ok(cuda.cuMemPoolTrimTo(shared, c_size_t(0)))
print("given back", info()[0] == start)
ok(cuda.cuMemPoolDestroy(shared))

# Every way in which much goes at once.
a = take(20 * MIB, where, pool)
ok(cuda.cuMemPoolDestroy(pool))
give(a, where)
ok(cuda.cuStreamSynchronize(where))
print("destroyed pool", info()[0] == start)
b = take(20 * MIB, where)
ok(cuda.cuStreamDestroy_v2(where))
give(b)
ok(cuda.cuCtxSynchronize())
print("destroyed stream", info()[0] == start)
c = take(40 * MIB)
fill(c, MIB, 1)
ok(cuda.cuDevicePrimaryCtxReset_v2(0))
retain()
print("reset", info()[0] == start, attribute(2, c, c_uint), take(40 * MIB) > 0)
