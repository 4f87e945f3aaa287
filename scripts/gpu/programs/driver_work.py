"""The driver's calls through cuda-bindings: many allocations, fills and copies. Knows nothing of ebb; runs on any GPU."""

import numpy as np
from cuda.bindings import driver

import works


def ok(answer):
    if int(answer[0]) != 0:
        raise RuntimeError(str(answer[0]))
    return answer[1] if len(answer) == 2 else answer[1:]


def begin():
    ok(driver.cuInit(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))))


def copies(steps):
    begin()
    size = 32 << 20
    blocks = [ok(driver.cuMemAlloc(size)) for _ in range(4)]
    for i, block in enumerate(blocks):
        ok(driver.cuMemsetD32(block, i * 77, size // 4))
    host = np.zeros(1 << 16, dtype=np.uint32)
    for i in steps:
        part = ok(driver.cuMemAlloc(1 << (12 + i % 10)))
        ok(driver.cuMemsetD8(part, i % 251, 1 << 12))
        to = int(blocks[i % 4]) + (i * 4096) % (size - 4096)
        ok(driver.cuMemcpyDtoD(to, part, 4096))
        ok(driver.cuMemcpyDtoD(int(blocks[(i + 1) % 4]), int(blocks[i % 4]) + (1 << 20), 1 << 20))
        if i % 8 == 0:
            ok(driver.cuMemcpyDtoH(host, blocks[i % 4], host.nbytes))
            host += 3
            ok(driver.cuMemcpyHtoD(int(blocks[(i + 2) % 4]) + (2 << 20), host, host.nbytes))
        ok(driver.cuMemFree(part))
    found = np.zeros(size // 4, dtype=np.uint32)
    results = []
    for block in blocks:
        ok(driver.cuMemcpyDtoH(found, block, size))
        results.append(found.copy())
    return results


def fails(_steps):
    raise ValueError("a piece of work that always fails")


if __name__ == "__main__":
    works.run_all({"copies": copies, "fails": fails}, works.options())
