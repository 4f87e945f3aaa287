"""A small Python program that uses the GPU through cuda-bindings: a context, an allocation, and the end."""

try:
    from cuda.bindings import driver
except ImportError:
    from cuda import cuda as driver


def ok(answer):
    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"{answer[0]}")
    return answer[1] if len(answer) > 1 else None


ok(driver.cuInit(0))
context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))
ok(driver.cuCtxSetCurrent(context))
pointer = ok(driver.cuMemAlloc(2 << 20))
ok(driver.cuMemsetD8(pointer, 1, 2 << 20))
ok(driver.cuCtxSynchronize())
ok(driver.cuMemFree(pointer))
