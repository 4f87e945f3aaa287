"""Memory by handles, as a program may use it and as it may not. Run with and without the layer: the same lines."""

from gpu import *


class Location(ctypes.Structure):
    _fields_ = [("type", c_uint), ("id", c_int)]


class Props(ctypes.Structure):
    _fields_ = [
        ("type", c_uint),
        ("handles", c_uint),
        ("location", Location),
        ("windows", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_uint)]


def props(kind=1, number=0, handles=1, rdma=0):
    asked = Props(1, handles, Location(kind, number), None)
    asked.flags[1] = rdma
    return asked


def create(size, asked=None):
    """Handle, or the driver's code as a negative number."""
    handle = c_uint64()
    code = cuda.cuMemCreate(byref(handle), c_size_t(size), byref(asked or props()), c_uint64(0))
    return handle.value if code == 0 else -code


def reserve(size, hint=0):
    at = c_uint64()
    code = cuda.cuMemAddressReserve(byref(at), c_size_t(size), c_size_t(0), c_uint64(hint), c_uint64(0))
    return at.value if code == 0 else -code


def map_at(at, size, handle, offset=0):
    return cuda.cuMemMap(c_uint64(at), c_size_t(size), c_size_t(offset), c_uint64(handle), c_uint64(0))


def unmap(at, size):
    return cuda.cuMemUnmap(c_uint64(at), c_size_t(size))


def allow(at, size, flags=3, device=0):
    access = Access(Location(1, device), flags)
    return cuda.cuMemSetAccess(c_uint64(at), c_size_t(size), byref(access), c_size_t(1))


def access(at, device=0):
    flags = c_uint64()
    code = cuda.cuMemGetAccess(byref(flags), byref(Location(1, device)), c_uint64(at))
    return flags.value if code == 0 else -code


def release(handle):
    return cuda.cuMemRelease(c_uint64(handle))


def give_back(at, size):
    return cuda.cuMemAddressFree(c_uint64(at), c_size_t(size))


def retained(at):
    handle = c_uint64()
    code = cuda.cuMemRetainAllocationHandle(byref(handle), c_void_p(at))
    return handle.value if code == 0 else -code


def asked(handle):
    answer = Props()
    code = cuda.cuMemGetAllocationPropertiesFromHandle(byref(answer), c_uint64(handle))
    if code:
        return -code
    return answer.type, answer.handles, answer.location.type, answer.location.id, bytes(answer.flags)


def export(handle):
    fd = c_int(-1)
    code = cuda.cuMemExportToShareableHandle(byref(fd), c_uint64(handle), 1, c_uint64(0))
    return fd.value if code == 0 else -code


def take(fd):
    handle = c_uint64()
    code = cuda.cuMemImportFromShareableHandle(byref(handle), c_void_p(fd), 1)
    return handle.value if code == 0 else -code


def main():
    print("before init", create(2 * MIB))
    init()
    print("no context", create(2 * MIB) > 0)
    retain()
    unit = c_size_t()
    ok(cuda.cuMemGetAllocationGranularity(byref(unit), byref(props()), 0), "granularity")
    print("granularity", unit.value)
    print("sizes", create(0), create(1), create(3 * MIB), create(1 << 45))
    print("places", create(2 * MIB, props(1, 77)), create(2 * MIB, props(9, 0)), create(2 * MIB, props(0, 0)))
    print("null", cuda.cuMemCreate(None, c_size_t(2 * MIB), byref(props()), c_uint64(0)))
    host = create(2 * MIB, props(3, 0, 0))
    print("host", host > 0, asked(host)[2:4], release(host), release(host) != 0)

    at = reserve(64 * MIB)
    a, b = create(4 * MIB, props(rdma=1)), create(2 * MIB)
    print("properties", asked(a), asked(b))
    print("map", map_at(at, 4 * MIB, a), map_at(at, 4 * MIB, b), map_at(at + 4 * MIB, 4 * MIB, b))
    print("map", map_at(at + 4 * MIB, 2 * MIB, b), map_at(at + 6 * MIB, 2 * MIB, b, 4096), map_at(at + 1, 2 * MIB, b))
    print("twice", map_at(at + 32 * MIB, 4 * MIB, a), map_at(at + 40 * MIB, 4 * MIB, a))
    print("access before", access(at), access(at + 20 * MIB))
    print("allow", allow(at, 6 * MIB), allow(at + 32 * MIB, 4 * MIB), allow(at + 40 * MIB, 4 * MIB, 1), allow(at + 20 * MIB, 2 * MIB))
    print("access", access(at), access(at + 5 * MIB), access(at + 40 * MIB), access(at + 41 * MIB))
    fill(at, 6 * MIB // 4, 9)
    print("wrong", wrong(at, 6 * MIB // 4, 9), get(at + 32 * MIB, 64) == get(at, 64), get(at + 40 * MIB, 64) == get(at, 64))
    print("attributes", [attribute(n, at + 5 * MIB, c_uint) for n in (2, 8, 9, 10, 13, 16)], attribute(1, at))
    print("attributes", attribute(11, at + 5 * MIB) - at, attribute(12, at), attribute(15, at, c_uint), attribute(15, at + 4 * MIB, c_uint))
    base, size = address_range(at + 5 * MIB)
    print("range", base - at, size)
    numbers = [attribute(7, place) for place in (at, at + 4 * MIB, at + 3 * MIB)]
    print("numbers", numbers[0] != numbers[1], numbers[0] == numbers[2])
    print("sync memops", cuda.cuPointerSetAttribute(byref(c_uint(1)), 6, c_uint64(at)))
    print("retain", retained(at + 3 * MIB) == a, retained(at + 20 * MIB), retained(at + 33 * MIB) == a)
    print("release", [release(a) for _ in range(4)], [release(b) for _ in range(2)])
    print("by address", retained(at) == a, release(a), release(a))
    print("part", unmap(at, 2 * MIB), unmap(at + 2 * MIB, 4 * MIB), "busy", give_back(at, 64 * MIB))
    print("free", free(at) != 0)
    print("unmap", unmap(at, 6 * MIB), unmap(at + 32 * MIB, 4 * MIB), unmap(at + 40 * MIB, 4 * MIB))
    print("gone", address_range(at), attribute(9, at, c_int), access(at), retained(at))
    print("addresses", give_back(at, 32 * MIB), give_back(at, 64 * MIB), give_back(at, 64 * MIB))

    plain = alloc(4 * MIB)
    c = create(2 * MIB)
    print("not the program's", map_at(plain, 2 * MIB, c) != 0, unmap(plain, 4 * MIB) != 0, allow(plain, 4 * MIB) != 0)
    fill(plain, MIB, 3)
    print("wrong", wrong(plain, MIB, 3), release(c), free(plain))

    # A descriptor of one's own handle, taken again in the same process.
    d = create(2 * MIB)
    where = reserve(4 * MIB)
    fd = export(d)
    again = take(fd)
    print("export", fd >= 0, again > 0, export(create(2 * MIB, props(handles=0))), take(0) < 0)
    print("map", map_at(where, 2 * MIB, d), map_at(where + 2 * MIB, 2 * MIB, again), allow(where, 4 * MIB))
    # A list that is as long as a mistake says: the driver refuses it, and nobody reads it before.
    endless = cuda.cuMemSetAccess(c_uint64(where), c_size_t(4 * MIB), byref(Access(Location(1, 0), 3)), c_size_t(2**64 - 1))
    print("endless list", endless != 0)
    fill(where, MIB // 2, 8)
    print("one memory", wrong(where + 2 * MIB, MIB // 2, 8))
    print("end", unmap(where, 4 * MIB), release(d), release(again), release(again) != 0, give_back(where, 4 * MIB))
    os.close(fd)
    print("before", info()[0] == info()[0])


if __name__ == "__main__":
    main()
