"""Drives the simulated driver through NVIDIA's own Python package `cuda-bindings`: a client that we did not write.

Run with the simulated libcuda.so.1 in LD_LIBRARY_PATH. Exits with status 77 and says why when the package is not installed.
"""

import ctypes
import os
import pathlib
import sys

try:
    from cuda.bindings import driver
except ImportError as error:
    print(f"skipped: cuda-bindings is not installed ({error})")
    sys.exit(77)

PTX = pathlib.Path(__file__).resolve().parents[2] / "ptx" / "kernels.ptx"
MIB = 1 << 20


def ok(answer):
    """The values of an answer whose error must be success."""
    error, *values = answer
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return values[0] if len(values) == 1 else values


def fails(answer, code):
    assert answer[0] == code, (answer[0], code)


def main():
    ok(driver.cuInit(0))
    assert ok(driver.cuDriverGetVersion()) >= 12000
    device = ok(driver.cuDeviceGet(0))
    name = ok(driver.cuDeviceGetName(64, device)).split(b"\0")[0]
    assert name == b"ebb simulated GPU", name
    context = ok(driver.cuDevicePrimaryCtxRetain(device))
    ok(driver.cuCtxSetCurrent(context))
    free, total = ok(driver.cuMemGetInfo())
    assert 0 < free < total

    # A kernel of the built-in set over plain memory.
    module = ok(driver.cuModuleLoadData(PTX.read_bytes() + b"\0"))
    fill = ok(driver.cuModuleGetFunction(module, b"ebb_fill"))
    check = ok(driver.cuModuleGetFunction(module, b"ebb_check"))
    words = 1 << 20
    data = ok(driver.cuMemAlloc(words * 4))
    result = ok(driver.cuMemAlloc(8))
    ok(driver.cuMemsetD8(result, 0, 8))
    stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    ok(driver.cuCtxSynchronize())

    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    def launch(function, values, types, on):
        ok(driver.cuLaunchKernel(function, 4, 1, 1, 128, 1, 1, 0, on, (values, types), 0))

    launch(fill, (int(data), words, 7, 1), (u64, u64, u32, u32), stream)
    launch(check, (int(data), words, 7, 1, int(result)), (u64, u64, u32, u32, u64), stream)
    ok(driver.cuStreamSynchronize(stream))
    wrong = ctypes.c_uint64(99)
    ok(driver.cuMemcpyDtoH(ctypes.addressof(wrong), result, 8))
    assert wrong.value == 0, wrong.value

    # The program's own virtual memory.
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = 0
    flags = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = ok(driver.cuMemGetAllocationGranularity(prop, flags))
    before = ok(driver.cuMemGetInfo())[0]
    handle = ok(driver.cuMemCreate(size, prop, 0))
    address = ok(driver.cuMemAddressReserve(size, 0, 0, 0))
    ok(driver.cuMemMap(address, size, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location = prop.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(driver.cuMemSetAccess(address, size, [access], 1))
    ok(driver.cuMemsetD32(address, 0x01020304, 4))
    back = (ctypes.c_uint32 * 4)()
    ok(driver.cuMemcpyDtoH(ctypes.addressof(back), address, 16))
    assert list(back) == [0x01020304] * 4
    ok(driver.cuMemUnmap(address, size))
    ok(driver.cuMemRelease(handle))
    ok(driver.cuMemAddressFree(address, size))
    assert ok(driver.cuMemGetInfo())[0] == before

    # A captured graph with memory of a pool.
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    piece = ok(driver.cuMemAllocAsync(4 * MIB, stream))
    ok(driver.cuMemsetD8Async(piece, 1, 4 * MIB, stream))
    ok(driver.cuMemFreeAsync(piece, stream))
    graph = ok(driver.cuStreamEndCapture(stream))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    for _ in range(3):
        ok(driver.cuGraphLaunch(executable, stream))
    event = ok(driver.cuEventCreate(0))
    ok(driver.cuEventRecord(event, stream))
    ok(driver.cuEventSynchronize(event))

    # Errors are the driver's own.
    oom = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    fails(driver.cuMemAlloc(total + 1), oom)
    fails(driver.cuMemAlloc(0), driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    assert ok(driver.cuGetErrorName(oom)) == b"CUDA_ERROR_OUT_OF_MEMORY"
    ok(driver.cuMemFree(data))
    ok(driver.cuMemFree(result))
    ok(driver.cuDevicePrimaryCtxRelease(device))
    print(f"ok: cuda-bindings drove the simulated driver in process {os.getpid()}")


main()
