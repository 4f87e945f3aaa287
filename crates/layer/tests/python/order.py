"""A free that is ordered on a stream happens when the stream gets there, not before, and does not wait for it."""

import time

from gpu import *

init()
retain()
slow, fast = stream(), stream()
first = alloc(24 * MIB)
words = 6 * MIB
function("ebb_fill")
function("ebb_check")
launch_on(slow, "ebb_spin", c_uint64(400_000_000))
launch_on(slow, "ebb_fill", c_uint64(first), c_uint64(words), c_uint(1), c_uint(0))
began = time.monotonic()
print("free", cuda.cuMemFreeAsync(c_uint64(first), slow))
print("busy still", cuda.cuStreamQuery(slow))
others = [alloc(24 * MIB) for _ in range(3)]
for n, p in enumerate(others):
    launch_on(fast, "ebb_fill", c_uint64(p), c_uint64(words), c_uint(10 + n), c_uint(0))
ok(cuda.cuStreamSynchronize(slow), "synchronise")
ok(cuda.cuStreamSynchronize(fast), "synchronise")
print("wrong", [wrong(p, words, 10 + n) for n, p in enumerate(others)])
per_thread = alloc(MIB)
print("per thread", cuda.cuMemFreeAsync_ptsz(c_uint64(per_thread), None))
ok(cuda.cuCtxSynchronize(), "synchronise")
# A free that waits, as every plain one does: the work before it is done when it returns.
last = alloc(24 * MIB)
launch_on(slow, "ebb_spin", c_uint64(100_000_000))
ok(free(last), "free")
print("quiet after a plain free", cuda.cuStreamQuery(slow))
