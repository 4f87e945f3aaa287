"""One process exports a handle, another imports it by the descriptor, and both use the memory."""

import subprocess
import sys

import vmm
from gpu import *

SIZE = 32 * MIB


def books(who, *names):
    seen = report()
    if seen is not None:
        device = seen["engine"]["devices"][0]
        device["handles"] = device["program_handles"]
        device["pinned"] = sum(p["bytes"] for p in device["pinned"])
        print("books", who, *[word for name in names for word in (name, device[name])], flush=True)


init()
retain()
at = vmm.reserve(SIZE)
if len(sys.argv) > 1:
    handle = vmm.take(int(sys.argv[1]))
    print("child took", handle > 0)
else:
    handle = vmm.create(SIZE)
ok(vmm.map_at(at, SIZE, handle), "map")
ok(vmm.allow(at, SIZE), "access")
if len(sys.argv) > 1:
    print("child sees", wrong(at, SIZE // 4, 11))
    fill(at, SIZE // 4, 12)
    print("child wrong", wrong(at, SIZE // 4, 12), flush=True)
    books("child", "allocated", "handles")
else:
    fill(at, SIZE // 4, 11)
    fd = vmm.export(handle)
    subprocess.run([sys.executable, "-B", __file__, str(fd)], pass_fds=[fd], check=True)
    print("parent wrong", wrong(at, SIZE // 4, 12), flush=True)
    books("parent", "allocated", "pinned")
ok(vmm.unmap(at, SIZE), "unmap")
ok(vmm.release(handle), "release")
