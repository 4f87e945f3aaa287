"""A buffer that grows in place: more addresses right behind the old ones if they are free, else somewhere else."""

import vmm
from gpu import *

init()
retain()
old = vmm.reserve(4 * MIB)
handle = vmm.create(4 * MIB)
ok(vmm.map_at(old, 4 * MIB, handle), "map")
ok(vmm.allow(old, 4 * MIB), "access")
fill(old, MIB, 6)
# Behind it is taken: the driver gives other addresses, which have to go back before a new place is looked for.
taken = vmm.reserve(4 * MIB, old + 4 * MIB)
behind = vmm.reserve(4 * MIB, old + 4 * MIB)
print("hint taken", behind != old + 4 * MIB and behind > 0)
# No room for addresses: an error that is told, with nothing to free for it.
failed = vmm.reserve(1 << 60)
print("failed", failed, "then", vmm.give_back(behind, 4 * MIB))
print("wrong", wrong(old, MIB, 6))
ok(vmm.unmap(old, 4 * MIB), "unmap")
ok(vmm.release(handle), "release")
print("freed", vmm.give_back(old, 4 * MIB), vmm.give_back(taken, 4 * MIB), vmm.give_back(taken, 4 * MIB))
