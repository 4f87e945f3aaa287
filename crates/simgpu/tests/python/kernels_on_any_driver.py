"""Runs the kernels of `ptx/kernels.ptx` on whatever libcuda.so.1 is found, real or simulated, and checks every result against
the same arithmetic done here. Needs nothing but Python: run it on a real card after every change of the PTX text.
"""

import ctypes as C
import pathlib

PTX = pathlib.Path(__file__).resolve().parents[2] / "ptx" / "kernels.ptx"
LIB = C.CDLL("libcuda.so.1")
M32 = 0xFFFFFFFF


def call(name, *arguments):
    code = getattr(LIB, name)(*arguments)
    assert code == 0, f"{name}: error {code}"


def mix(index, seed, step):
    x = ((index * 0x9E3779B1) & M32) ^ seed
    x = (x + step * 0x85EBCA6B) & M32
    x ^= x >> 15
    x = (x * 0x2C1B3C6D) & M32
    x ^= x >> 12
    x = (x * 0x297A2D39) & M32
    return x ^ (x >> 15)


def main():
    call("cuInit", 0)
    device, context, module = C.c_int(), C.c_void_p(), C.c_void_p()
    call("cuDeviceGet", C.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", C.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", C.byref(module), PTX.read_bytes() + b"\0")

    def alloc(size):
        address = C.c_uint64()
        call("cuMemAlloc_v2", C.byref(address), C.c_size_t(size))
        call("cuMemsetD8_v2", address, 0, C.c_size_t(size))
        return address

    def launch(name, *parameters, grid=7, block=96):
        function = C.c_void_p()
        call("cuModuleGetFunction", C.byref(function), module, name)
        pointers = (C.c_void_p * max(1, len(parameters)))(
            *[C.cast(C.pointer(parameter), C.c_void_p) for parameter in parameters]
        )
        call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, None, pointers, None)

    def read(address, kind, count):
        values = (kind * count)()
        call("cuMemcpyDtoH_v2", values, address, C.c_size_t(C.sizeof(values)))
        return list(values)

    count = 100_003
    n = C.c_uint64(count)
    data, result = alloc(count * 4), alloc(8)
    seed, step = C.c_uint32(0xDEADBEEF), C.c_uint32(0x80000007)
    launch(b"ebb_fill", data, n, seed, step)
    words = read(data, C.c_uint32, count)
    assert words == [mix(index, seed.value, step.value) for index in range(count)], "ebb_fill"
    launch(b"ebb_check", data, n, seed, step, result)
    assert read(result, C.c_uint64, 1) == [0], "ebb_check of right words"
    launch(b"ebb_touch", data, n, C.c_uint64(1000))
    launch(b"ebb_check", data, n, seed, step, result)
    assert read(result, C.c_uint64, 1) == [101], "ebb_check of 101 wrong words"
    sums = alloc(8)
    launch(b"ebb_sum", data, n, sums)
    touched = [(word + 1) & M32 if index % 1000 == 0 else word for index, word in enumerate(words)]
    assert read(data, C.c_uint32, count) == touched, "ebb_touch"
    assert read(sums, C.c_uint64, 1) == [sum(touched)], "ebb_sum"
    x, y = alloc(8), alloc(8)
    call("cuMemcpyHtoD_v2", x, (C.c_float * 2)(1.5, -2.0), C.c_size_t(8))
    call("cuMemcpyHtoD_v2", y, (C.c_float * 2)(10.0, 20.0), C.c_size_t(8))
    launch(b"ebb_saxpy", y, x, C.c_float(2.0), C.c_uint64(2))
    assert read(y, C.c_float, 2) == [13.0, 16.0], "ebb_saxpy"
    launch(b"ebb_spin", C.c_uint64(1_000_000), grid=1, block=1)
    launch(b"ebb_empty", grid=1, block=1)
    launch(b"ebb_spin_until", data, grid=1, block=1)
    call("cuCtxSynchronize")
    name = C.create_string_buffer(64)
    call("cuDeviceGetName", name, 64, device)
    print("ok: all kernels are right on", name.value.decode())


main()
