"""What a collective library does when it starts: host memory by handles, from several threads that have no context and
that open the driver for themselves."""

import threading

import vmm
from gpu import *

init()
lines = [None] * 4
together = threading.Barrier(len(lines))


def probe(n):
    own = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_LOCAL)
    together.wait()
    handle, at = c_uint64(), c_uint64()
    asked = vmm.props(3, 0, 0)
    access = vmm.Access(vmm.Location(2, 0), 3)
    codes = [own.cuMemCreate(byref(handle), c_size_t(16 * MIB), byref(asked), c_uint64(0))]
    codes.append(own.cuMemAddressReserve(byref(at), c_size_t(16 * MIB), c_size_t(0), c_uint64(0), c_uint64(0)))
    codes.append(own.cuMemMap(at, c_size_t(16 * MIB), c_size_t(0), handle, c_uint64(0)))
    codes.append(own.cuMemSetAccess(at, c_size_t(16 * MIB), byref(access), c_size_t(1)))
    codes.append(own.cuMemUnmap(at, c_size_t(16 * MIB)))
    codes.append(own.cuMemRelease(handle))
    codes.append(own.cuMemAddressFree(at, c_size_t(16 * MIB)))
    lines[n] = codes


threads = [threading.Thread(target=probe, args=(n,)) for n in range(len(lines))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for line in lines:
    print(line)
seen = report()
if seen is not None:
    print("report", [(d["charged"], d["program_handles"]) for d in seen["engine"]["devices"]])
