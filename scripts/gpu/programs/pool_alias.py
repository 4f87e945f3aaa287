"""Two mappings of one piece of memory, by the driver's own calls and through the stitched blocks of ebb's pool. Prints {"alias": [...]}:
what was wrong, nothing if all was right."""

import ctypes
import json
import os
import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

MIB = 1 << 20
cuda = ctypes.CDLL("libcuda.so.1")
wrong = []


def ok(code, what):
    if code != 0:
        raise RuntimeError(f"{what}: driver error {code}")


class Location(ctypes.Structure):
    _fields_ = [("kind", c_int), ("id", c_int)]


class Props(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", Location), ("windows", c_void_p), ("flags", ctypes.c_ubyte * 8)]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]


def pattern(size, seed):
    return (bytes((i * 7 + seed) % 251 for i in range(4096)) * (size // 4096 + 1))[:size]


def put(at, data):
    ok(cuda.cuMemcpyHtoD_v2(c_uint64(at), data, c_size_t(len(data))), "copy in")


def get(at, size):
    data = ctypes.create_string_buffer(size)
    ok(cuda.cuMemcpyDtoH_v2(data, c_uint64(at), c_size_t(size)), "copy out")
    return data.raw


def by_the_driver():
    size = 4 * MIB
    props, handle, at = Props(type=1, location=Location(1, 0)), c_uint64(), c_uint64()
    ok(cuda.cuMemCreate(byref(handle), c_size_t(size), byref(props), c_uint64(0)), "create")
    ok(cuda.cuMemAddressReserve(byref(at), c_size_t(4 * size), c_size_t(0), c_uint64(0), c_uint64(0)), "reserve")
    first, second = at.value, at.value + 2 * size
    access = Access(Location(1, 0), 3)
    for place in (first, second):
        ok(cuda.cuMemMap(c_uint64(place), c_size_t(size), c_size_t(0), handle, c_uint64(0)), "map")
        ok(cuda.cuMemSetAccess(c_uint64(place), c_size_t(size), byref(access), c_size_t(1)), "access")
    for turn in range(20):
        source, target = (first, second) if turn % 2 else (second, first)
        put(source, pattern(size, turn))
        if get(target, size) != pattern(size, turn):
            wrong.append(f"turn {turn}: written through one mapping, read differently through the other")
        # By the GPU's own writes: half through each, one after the other in a stream.
        ok(cuda.cuMemsetD32Async(c_uint64(source), c_uint(turn + 1), c_size_t(size // 8), None), "set")
        ok(cuda.cuMemsetD32Async(c_uint64(target + size // 2), c_uint(turn + 2), c_size_t(size // 8), None), "set")
        seen = get(source, size)
        want = (turn + 1).to_bytes(4, "little") * (size // 8) + (turn + 2).to_bytes(4, "little") * (size // 8)
        if seen != want:
            wrong.append(f"turn {turn}: the GPU's writes through two mappings do not meet")


def by_the_pool():
    ebb = ctypes.CDLL("libebb.so")
    ebb.ebb_pool_alloc.restype = c_void_p
    take = lambda size: ebb.ebb_pool_alloc(ctypes.c_ssize_t(size), 0, None)
    give = lambda at: ebb.ebb_pool_free(c_void_p(at), ctypes.c_ssize_t(0), 0, None)
    for turn in range(8):
        blocks = [take((3 + turn % 3) * 2 * MIB) for _ in range(5)]
        for i, at in enumerate(blocks):
            put(at, pattern(MIB, i))
        give(blocks[1])
        give(blocks[3])
        wide = take((6 + 2 * (turn % 3)) * 2 * MIB + 512)
        size = (6 + 2 * (turn % 3)) * 2 * MIB + 512
        put(wide, pattern(size, 90 + turn))
        if get(wide, size) != pattern(size, 90 + turn):
            wrong.append(f"pool, turn {turn}: a stitched block does not hold what was written")
        for i in (0, 2, 4):
            if get(blocks[i], MIB) != pattern(MIB, i):
                wrong.append(f"pool, turn {turn}: a neighbour was overwritten")
        for at in (wide, blocks[0], blocks[2], blocks[4]):
            give(at)


ok(cuda.cuInit(0), "init")
context = c_void_p()
ok(cuda.cuDevicePrimaryCtxRetain(byref(context), 0), "retain")
ok(cuda.cuCtxSetCurrent(context), "set current")
by_the_driver()
if len(sys.argv) > 1 and sys.argv[1] == "pool":
    by_the_pool()
print(json.dumps({"alias": wrong}), flush=True)
os._exit(0)
