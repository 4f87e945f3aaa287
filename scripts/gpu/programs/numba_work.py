"""Numba kernels over device arrays, pinned arrays and streams. Knows nothing of ebb."""

import numpy_names  # noqa: F401, before numba
import numpy as np
from numba import cuda

import works

args = works.options()


@cuda.jit
def mix(a, b, k):
    i = cuda.grid(1)
    if i < a.size:
        a[i] = a[i] * 1664525 + b[(i + k) % b.size] + k


@cuda.jit
def partial_sums(a, out):
    shared = cuda.shared.array(256, dtype=np.uint32)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    shared[t] = a[i] if i < a.size else 0
    cuda.syncthreads()
    half = 128
    while half > 0:
        if t < half:
            shared[t] += shared[t + half]
        cuda.syncthreads()
        half //= 2
    if t == 0:
        out[cuda.blockIdx.x] = shared[0]


def kernels(steps):
    n = 1 << 24
    host = np.arange(n, dtype=np.uint32)
    a, b = cuda.to_device(host), cuda.to_device(host[::-1].copy())
    stream = cuda.stream()
    pinned = cuda.pinned_array(n // 256, dtype=np.uint32)
    total = np.zeros(n // 256, dtype=np.uint32)
    for i in steps:
        mix[n // 256, 256, stream](a, b, i)
        out = cuda.device_array(n // 256, dtype=np.uint32, stream=stream)
        partial_sums[n // 256, 256, stream](b if i % 2 else a, out)
        out.copy_to_host(pinned, stream=stream)
        stream.synchronize()
        total += pinned
        if i % 5 == 0:
            a, b = b, a
    return [a.copy_to_host(), b.copy_to_host(), total]


works.run_all({"kernels": kernels}, args)
