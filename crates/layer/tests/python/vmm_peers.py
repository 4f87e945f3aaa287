"""Memory of one device that another one may use. Does what it is told, line by line."""

import sys

import vmm
from gpu import *
from gpu import _functions

init()
first = retain(0)
at = vmm.reserve(64 * MIB)
ours, own = vmm.create(8 * MIB), vmm.create(4 * MIB)
ok(vmm.map_at(at, 8 * MIB, ours), "map")
ok(vmm.map_at(at + 8 * MIB, 4 * MIB, own), "map")
both = (vmm.Access * 2)(vmm.Access(vmm.Location(1, 0), 3), vmm.Access(vmm.Location(1, 1), 3))
ok(cuda.cuMemSetAccess(c_uint64(at), c_size_t(8 * MIB), both, c_size_t(2)), "access")
ok(vmm.allow(at + 8 * MIB, 4 * MIB), "access")
# Only now is there anything on the device that may use it.
second = retain(1)
ok(cuda.cuCtxSetCurrent(first), "current")
fill(at, 2 * MIB, 21)
fill(at + 8 * MIB, MIB, 22)
print("ready", flush=True)
for line in sys.stdin:
    if line.startswith("kernel"):
        ok(cuda.cuCtxSetCurrent(second), "current")
        _functions.clear()
        bad = wrong(at, 2 * MIB, 21)
        _functions.clear()
        ok(cuda.cuCtxSetCurrent(first), "current")
        print("wrong", bad, flush=True)
        continue
    rights = [vmm.access(at), vmm.access(at, 1), vmm.access(at + 8 * MIB), vmm.access(at + 8 * MIB, 1)]
    ok(cuda.cuCtxSetCurrent(second), "current")
    data = get(at + 4 * MIB, 4096)
    ok(cuda.cuCtxSetCurrent(first), "current")
    bad = 0 if data == get(at + 4 * MIB, 4096) else 1
    print("rights", rights, "wrong", bad + wrong(at, 2 * MIB, 21), wrong(at + 8 * MIB, MIB, 22), flush=True)
