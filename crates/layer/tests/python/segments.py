"""An allocator as PyTorch's with expandable segments: 2 and 20 MiB handles that could be exported, mapped one after
another into one large reservation, with access for this device. Does what it is told, line by line."""

import sys

import vmm
from gpu import *


class Segment:
    def __init__(self, unit):
        self.unit = unit
        self.at = vmm.reserve(1 << 30)
        assert self.at > 0
        self.handles = []

    def grow(self, count=1):
        for _ in range(count):
            handle = vmm.create(self.unit)
            if handle < 0:
                return handle
            place = self.at + self.unit * len(self.handles)
            ok(vmm.map_at(place, self.unit, handle), "map")
            ok(vmm.allow(place, self.unit), "access")
            self.handles.append(handle)
        return 0

    def shrink(self, count):
        ok(cuda.cuCtxSynchronize(), "synchronise")
        for _ in range(count):
            handle = self.handles.pop()
            ok(vmm.unmap(self.at + self.unit * len(self.handles), self.unit), "unmap")
            ok(vmm.release(handle), "release")

    def words(self):
        return self.unit * len(self.handles) // 4

    def fill(self, seed):
        fill(self.at, self.words(), seed)

    def wrong(self, seed):
        return wrong(self.at, self.words(), seed)


init()
context = retain()
small, large = Segment(2 * MIB), Segment(20 * MIB)
assert small.grow(5) == 0 and large.grow(2) == 0
# What a program may have beside: a handle in two places, one that is read only, and one that is nowhere.
twice, read, nowhere = vmm.create(4 * MIB), vmm.create(2 * MIB), vmm.create(2 * MIB)
aside = vmm.reserve(64 * MIB)
for place, size, handle in ((0, 4, twice), (8, 4, twice), (16, 2, read)):
    ok(vmm.map_at(aside + place * MIB, size * MIB, handle), "map")
    ok(vmm.allow(aside + place * MIB, size * MIB), "access")
fill(aside, MIB, 3)
fill(aside + 16 * MIB, MIB // 2, 4)
ok(vmm.allow(aside + 16 * MIB, 2 * MIB, 1), "read only")
numbers = [attribute(7, at) for at in (small.at, large.at, aside)]
small.fill(1)
large.fill(2)
print("ready", flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "check":
        bad = small.wrong(1) + large.wrong(2) + wrong(aside + 8 * MIB, MIB, 3) + wrong(aside + 16 * MIB, MIB // 2, 4)
        print("wrong", bad, flush=True)
    elif word == "look":
        rights = [vmm.access(at) for at in (small.at, large.at, aside, aside + 8 * MIB, aside + 17 * MIB)]
        same = numbers == [attribute(7, at) for at in (small.at, large.at, aside)]
        print("rights", rights, same, vmm.asked(nowhere)[0:4], vmm.retained(aside) == twice, vmm.release(twice), flush=True)
    elif word == "grow":
        print("grow", large.grow(), flush=True)
        large.fill(2)
    elif word == "shrink":
        large.shrink(1)
        print("shrink", len(large.handles), flush=True)
    elif word == "fill up":
        taken = 0
        while small.grow() == 0:
            taken += 1
        code = small.grow()
        small.shrink(taken)
        print("full", code, taken > 0, flush=True)
    elif word == "report":
        device = report()["engine"]["devices"][0]
        print("pinned", sum(p["bytes"] for p in device["pinned"]), device["program_handles"], flush=True)
    elif word == "export":
        fd = vmm.export(small.handles[0])
        print("export", fd >= 0, flush=True)
