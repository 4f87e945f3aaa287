"""One total and one free, whatever is asked; the limit to the byte; nothing negative ever."""

import sys

from gpu import *

limit = int(sys.argv[1])
init()
early = c_size_t()
ok(cuda.cuDeviceTotalMem_v2(byref(early), 0), "total before a context")
retain()
free_bytes, total = info()
late = c_size_t()
ok(cuda.cuDeviceTotalMem_v2(byref(late), 0), "total")
nvml = ctypes.CDLL("libnvidia-ml.so.1")
ok(nvml.nvmlInit_v2(), "nvml")
handle = c_void_p()
ok(nvml.nvmlDeviceGetHandleByIndex_v2(0, byref(handle)), "handle")


class Memory(ctypes.Structure):
    _fields_ = [("total", c_uint64), ("free", c_uint64), ("used", c_uint64)]


class Memory2(ctypes.Structure):
    _fields_ = [("version", c_uint), ("total", c_uint64), ("reserved", c_uint64), ("free", c_uint64), ("used", c_uint64)]


def surfaces():
    m, m2 = Memory(), Memory2(version=0x02000028)
    ok(nvml.nvmlDeviceGetMemoryInfo(handle, byref(m)), "memory")
    ok(nvml.nvmlDeviceGetMemoryInfo_v2(handle, byref(m2)), "memory 2")
    f, t = info()
    assert m.used == m.total - m.free and m2.used == m2.total - m2.free - m2.reserved, (m.used, m2.used)
    return {(f, t), (m.free, m.total), (m2.free, m2.total)}


print("totals", early.value, late.value, total, "surfaces", len(surfaces()))
print("free", 0 <= free_bytes <= total)
held, granule = [], 2 * MIB
while info()[0] >= granule:
    p = alloc(granule)
    assert p > 0, (p, info())
    held.append(p)
print("after the last granule", len(held) * granule == free_bytes // granule * granule, "next", alloc(granule), "surfaces", len(surfaces()))
for p in held[: len(held) // 2]:
    ok(free(p), "free")
print("again", alloc(granule) > 0 if held else True, "surfaces", len(surfaces()))


# What passes the pool by counts as well.
def passes_by(size):
    pointer = c_uint64()
    code = cuda.cuMemAllocManaged(byref(pointer), c_size_t(size), 1)
    return pointer.value if code == 0 else -code


before = info()[0]
print("managed beyond the limit", passes_by(limit + MIB), "free is as before", info()[0] == before)
if before >= 4 * MIB:
    p = passes_by(2 * MIB)
    took = before - info()[0]
    ok(free(p), "free")
    print("managed counts", took == 2 * MIB, info()[0] == before)
