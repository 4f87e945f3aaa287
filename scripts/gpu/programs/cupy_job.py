"""An ordinary CuPy job: fills --gib of arrays, works on them for --steps rounds, prints a SHA-256 over all of them."""

import argparse
import hashlib
import json
import time

import cupy as cp

args = argparse.ArgumentParser()
args.add_argument("--gib", type=float, default=90)
args.add_argument("--steps", type=int, default=60)
args = args.parse_args()

began = time.monotonic()
n = 1 << 28  # 1 GiB of int32
arrays = [cp.arange(n, dtype=cp.int32) * (i + 1) for i in range(max(1, int(args.gib)))]
for step in range(args.steps):
    for i, a in enumerate(arrays):
        a *= 3
        a ^= step + i
    cp.cuda.Device().synchronize()
digest = hashlib.sha256()
for a in arrays:
    digest.update(cp.asnumpy(a[:: 1 << 6]).data)
total = [int(a.sum(dtype=cp.int64)) for a in arrays]
print(json.dumps({"gib": len(arrays), "seconds": round(time.monotonic() - began, 2), "sums": total, "sha256": digest.hexdigest()}), flush=True)
