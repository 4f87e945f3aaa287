"""Allocation as on cuMemAlloc memory, whoever serves it. Run with and without the layer: the same lines."""

from gpu import *

pointer = c_uint64()
print("before init", cuda.cuMemAlloc_v2(byref(pointer), c_size_t(4096)))
init()
print("no context", cuda.cuMemAlloc_v2(byref(pointer), c_size_t(4096)))
context = retain()
print("nothing", alloc(0), "null place", cuda.cuMemAlloc_v2(None, c_size_t(64)), "free null", free(0))
print("too much", alloc(1 << 45))
small = [alloc(100) for _ in range(3)]
print("small apart", all(p % 512 == 0 for p in small), len(set(small)))
big = alloc(10 * MIB + 1)
print("range", address_range(big + 5)[0] == big, address_range(big + 5)[1] >= 10 * MIB + 1)
print("inner free", free(big + 512), "unknown free", free(0x7000))
print("context", attribute(1, big) == context.value, "type", attribute(2, big, c_uint), "ordinal", attribute(9, big, c_int))
print("pointer", attribute(3, big + 8) == big + 8, "host", attribute(4, big), "managed", attribute(8, big, c_uint))
print("start", attribute(11, big + 99) == big, "mapped", attribute(13, big, c_uint), "pool", attribute(17, big))
print("handle types", attribute(14, big, c_uint64), "access", attribute(16, big, c_uint))
which = (c_uint * 5)(1, 2, 9, 11, 4)
values = [c_uint64(), c_uint(), c_int(), c_uint64(), c_uint64(7)]
places = (c_void_p * 5)(*[ctypes.cast(byref(v), c_void_p) for v in values])
ok(cuda.cuPointerGetAttributes(5, which, places, c_uint64(big + 16)), "attributes")
print("list", values[0].value == context.value, values[1].value, values[2].value, values[3].value == big, values[4].value)
ok(cuda.cuMemsetD8_v2(c_uint64(big), 7, c_size_t(10 * MIB)), "memset")
print("bytes", get(big + 3 * MIB, 4))
put(big + 100, b"hello")
print("bytes", get(big + 99, 7))
fill(big, 2 * MIB, 5)
print("wrong", wrong(big, 2 * MIB, 5), wrong(big, 2 * MIB, 6) > MIB)
pitch, flat = c_size_t(), c_uint64()
ok(cuda.cuMemAllocPitch_v2(byref(flat), byref(pitch), c_size_t(100), c_size_t(10), 4), "pitch")
print("pitch", pitch.value, flat.value % 512, free(flat.value))
print("bad element", cuda.cuMemAllocPitch_v2(byref(flat), byref(pitch), c_size_t(100), c_size_t(10), 5))
retained = c_uint64()
print("retain", cuda.cuMemRetainAllocationHandle(byref(retained), c_void_p(big)) != 0)
before = info()[0]
ok(free(big), "free")
print("free grows", info()[0] >= before + 10 * MIB, "double free", free(big))
for p in small:
    ok(free(p), "free")
print("double free", free(small[0]))
print("of what was freed", address_range(big + 5), attribute(1, big), attribute(9, big + 77, c_int), attribute(11, small[0]))
for v in values:
    v.value = 3
ok(cuda.cuPointerGetAttributes(5, which, places, c_uint64(big)), "attributes")
print("list", [v.value for v in values][:2])
