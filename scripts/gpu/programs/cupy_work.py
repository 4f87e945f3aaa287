"""CuPy with its pool, its stream-ordered pool, or none. Knows nothing of ebb."""

import cupy as cp

import works

args = works.options(pool="default")
if args.pool == "async":
    cp.cuda.set_allocator(cp.cuda.MemoryAsyncPool().malloc)
elif args.pool == "none":
    cp.cuda.set_allocator(None)


def arrays(steps):
    """Temporaries of many sizes, on two streams, copied out and in."""
    kept = cp.arange(1 << 24, dtype=cp.uint32)
    other = cp.cuda.Stream(non_blocking=True)
    sums = cp.zeros(64, dtype=cp.uint64)
    for i in steps:
        n = 1 << (14 + i % 10)
        part = kept[:n] * 3 + i
        kept[:n] ^= part[::-1]
        sums[i % 64] += part.sum(dtype=cp.uint64)
        if i % 16 == 0:
            cp.cuda.get_current_stream().synchronize()
            with other:
                here = cp.sort(kept[: 1 << 16])
                host = cp.asnumpy(here, stream=other)
                kept[1 << 20 : (1 << 20) + len(host)] = cp.asarray(host)
            other.synchronize()
    return [cp.asnumpy(kept), cp.asnumpy(sums)]


def linear(steps):
    """Libraries: products, transforms, solving."""
    random = cp.random.RandomState(11)
    a = random.standard_normal((1024, 1024), dtype=cp.float32)
    x = cp.ones((1024, 256), dtype=cp.float32)
    for i in steps:
        x = a @ x
        x /= cp.abs(x).max()
        if i % 8 == 0:
            x += cp.fft.irfft(cp.fft.rfft(x, axis=0), n=1024, axis=0).astype(cp.float32) * cp.float32(0.25)
        if i % 64 == 0:
            x[:64, :64] += cp.linalg.solve(a[:64, :64] + 10 * cp.eye(64, dtype=cp.float32), x[:64, :64])
    return [cp.asnumpy(x)]


works.run_all({"arrays": arrays, "linear": linear}, args)
