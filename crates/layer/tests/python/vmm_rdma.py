"""Whether a network card may reach memory: asked for, not asked for, and of the synchronous allocator."""

import vmm
from gpu import *

init()
retain()
at = vmm.reserve(8 * MIB)
for place, rdma in ((0, 1), (2, 0)):
    handle = vmm.create(2 * MIB, vmm.props(rdma=rdma))
    ok(vmm.map_at(at + place * MIB, 2 * MIB, handle), "map")
    print(vmm.asked(handle)[4][1], attribute(15, at + place * MIB, c_uint))
print("pool", attribute(15, alloc(4 * MIB), c_uint), attribute(15, alloc(40), c_uint))
