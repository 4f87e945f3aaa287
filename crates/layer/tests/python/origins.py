"""Memory that the pool did not give: freed by the driver, with the driver's code, and the books stay even."""

from gpu import *

init()
retain()
where = stream()


def external():
    engine = (report() or {}).get("engine") or {}
    return engine


pointer = c_uint64()
ok(cuda.cuMemAllocAsync(byref(pointer), c_size_t(3 * MIB), where), "alloc async")
ok(cuda.cuStreamSynchronize(where), "sync")
print("async, freed plainly", free(pointer.value), free(pointer.value))
ok(cuda.cuMemAllocAsync(byref(pointer), c_size_t(3 * MIB), where), "alloc async")
print("async, freed in order", cuda.cuMemFreeAsync(pointer, where))
ok(cuda.cuStreamSynchronize(where), "sync")
ok(cuda.cuMemAllocManaged(byref(pointer), c_size_t(2 * MIB), 1), "managed")
print("managed", free(pointer.value), free(pointer.value))
mine = alloc(5 * MIB)
fill(mine, MIB, 3)
print("ours, freed in order", cuda.cuMemFreeAsync(c_uint64(mine), where))
ok(cuda.cuStreamSynchronize(where), "sync")
print("nobody's", free(0x1234500) != 0, cuda.cuMemFreeAsync(c_uint64(0x1234500), where) != 0)


class Prop(ctypes.Structure):
    _fields_ = [("type", c_uint), ("handles", c_uint), ("where", c_uint), ("id", c_int), ("meta", c_void_p), ("flags", c_uint64)]


prop = Prop(1, 0, 1, 0, None, 0)
handle, at = c_uint64(), c_uint64()
ok(cuda.cuMemCreate(byref(handle), c_size_t(4 * MIB), byref(prop), c_uint64(0)), "create")
ok(cuda.cuMemAddressReserve(byref(at), c_size_t(4 * MIB), c_size_t(0), c_uint64(0), c_uint64(0)), "reserve")
ok(cuda.cuMemMap(at, c_size_t(4 * MIB), c_size_t(0), handle, c_uint64(0)), "map")
ok(cuda.cuMemRelease(handle), "release")
print("virtual memory, freed plainly", free(at.value) != 0)
ok(cuda.cuMemUnmap(at, c_size_t(4 * MIB)), "unmap")
ok(cuda.cuMemAddressFree(at, c_size_t(4 * MIB)), "address free")
print("again", cuda.cuMemUnmap(at, c_size_t(4 * MIB)) != 0)
host = c_void_p()
ok(cuda.cuMemHostAlloc(byref(host), c_size_t(MIB), 0), "host alloc")
print("host", cuda.cuMemFreeHost(host), cuda.cuMemFreeHost(host) != 0)
