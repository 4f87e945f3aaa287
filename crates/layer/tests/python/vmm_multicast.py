"""Memory that is bound to a multicast object of two devices, by its handle and by its address, and unbound again."""

import sys

import vmm
from gpu import *


class Object(ctypes.Structure):
    _fields_ = [("devices", c_uint), ("size", c_size_t), ("handles", c_uint64), ("flags", c_uint64)]


init()
first, second = retain(0), retain(1)
ok(cuda.cuCtxSetCurrent(first), "current")
at = vmm.reserve(64 * MIB)
memory = vmm.create(8 * MIB)
ok(vmm.map_at(at, 8 * MIB, memory), "map")
ok(vmm.allow(at, 8 * MIB), "access")
fill(at, 2 * MIB, 5)
team = c_uint64()
ok(cuda.cuMulticastCreate(byref(team), byref(Object(2, 16 * MIB, 0, 0))), "multicast")
print("ready", flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "check":
        print("wrong", wrong(at, 2 * MIB, 5), flush=True)
    elif word == "devices":
        print("added", [cuda.cuMulticastAddDevice(team, n) for n in range(2)], flush=True)
    elif word == "bind":
        codes = [cuda.cuMulticastBindMem(team, c_size_t(0), c_uint64(memory), c_size_t(0), c_size_t(4 * MIB), c_uint64(0))]
        codes.append(cuda.cuMulticastBindAddr(team, c_size_t(8 * MIB), c_uint64(at), c_size_t(2 * MIB), c_uint64(0)))
        # Too large: refused, and nothing of it stays behind.
        codes.append(cuda.cuMulticastBindMem(team, c_size_t(0), c_uint64(memory), c_size_t(0), c_size_t(64 * MIB), c_uint64(0)))
        print("bound", codes[:2], codes[2] != 0, flush=True)
    elif word == "unbind":
        codes = [cuda.cuMulticastUnbind(team, 0, c_size_t(0), c_size_t(4 * MIB))]
        codes.append(cuda.cuMulticastUnbind(team, 0, c_size_t(8 * MIB), c_size_t(2 * MIB)))
        print("unbound", codes, flush=True)
