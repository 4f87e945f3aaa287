"""Which device is which, under every visibility mask: one identity for adding and for asking."""

import sys

from gpu import *

init()
count = c_int()
ok(cuda.cuDeviceGetCount(byref(count)), "count")
for device in range(count.value):
    context = c_void_p()
    ok(cuda.cuCtxCreate_v2(byref(context), 0, device), "context")
    before, total = info()
    p = alloc(8 * MIB)
    after = info()[0]
    whole = c_size_t()
    ok(cuda.cuDeviceTotalMem_v2(byref(whole), device), "total")
    print(device, "took", (before - after) // MIB, "ordinal", attribute(9, p, c_int), "same total", whole.value == total)
    ok(cuda.cuCtxDestroy_v2(context), "destroy")
    again = c_void_p()
    ok(cuda.cuCtxCreate_v2(byref(again), 0, device), "context")
    print(device, "freed with its context", info()[0] == before)
    ok(cuda.cuCtxDestroy_v2(again), "destroy")
sys.stdout.flush()
