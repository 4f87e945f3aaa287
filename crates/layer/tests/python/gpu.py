"""The driver by ctypes, as a program that knows nothing of the layer."""

import ctypes
import os
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

cuda = ctypes.CDLL("libcuda.so.1")
MIB = 1 << 20


def ok(code, what=""):
    assert code == 0, f"{what} failed with driver error {code}"


def init():
    ok(cuda.cuInit(0), "cuInit")


def retain(device=0):
    """Makes a device's primary context current."""
    context = c_void_p()
    ok(cuda.cuDevicePrimaryCtxRetain(byref(context), device), "retain")
    ok(cuda.cuCtxSetCurrent(context), "set current")
    return context


def alloc(size):
    """Address, or the driver's code as a negative number."""
    pointer = c_uint64()
    code = cuda.cuMemAlloc_v2(byref(pointer), c_size_t(size))
    return pointer.value if code == 0 else -code


def free(pointer):
    return cuda.cuMemFree_v2(c_uint64(pointer))


def info():
    free_bytes, total = c_size_t(), c_size_t()
    ok(cuda.cuMemGetInfo_v2(byref(free_bytes), byref(total)), "mem info")
    return free_bytes.value, total.value


def put(pointer, data):
    ok(cuda.cuMemcpyHtoD_v2(c_uint64(pointer), data, c_size_t(len(data))), "copy in")


def get(pointer, size):
    data = ctypes.create_string_buffer(size)
    ok(cuda.cuMemcpyDtoH_v2(data, c_uint64(pointer), c_size_t(size)), "copy out")
    return data.raw


def stream(flags=1):
    handle = c_void_p()
    ok(cuda.cuStreamCreate(byref(handle), flags), "stream")
    return handle


def attribute(which, pointer, kind=c_uint64):
    value = kind()
    code = cuda.cuPointerGetAttribute(byref(value), which, c_uint64(pointer))
    return value.value if code == 0 else -code


def address_range(pointer):
    base, size = c_uint64(), c_size_t()
    code = cuda.cuMemGetAddressRange_v2(byref(base), byref(size), c_uint64(pointer))
    return (base.value, size.value) if code == 0 else -code


def report():
    """What the layer says about this process; None without it."""
    import json

    try:
        ebb = ctypes.CDLL(None).ebb_report
    except AttributeError:
        return None
    ebb.restype = c_size_t
    size = ebb(None, c_size_t(0)) + 4096
    text = ctypes.create_string_buffer(size)
    ebb(text, c_size_t(size))
    return json.loads(text.value)


def owner(address):
    """File name of the library that an address lies in."""

    class Info(ctypes.Structure):
        _fields_ = [("fname", c_char_p), ("fbase", c_void_p), ("sname", c_char_p), ("saddr", c_void_p)]

    found = Info()
    assert ctypes.CDLL(None).dladdr(c_void_p(address), byref(found))
    return os.path.basename(found.fname.decode()), (found.sname or b"").decode()


def is_ours(pointer):
    """Memory of the pool: the real driver would give it no context, so the layer's answer shows a range of its own."""
    engine = (report() or {}).get("engine")
    return engine is not None


def launch(name, *arguments):
    """Runs a built-in kernel on the default stream and waits for it."""
    launch_on(None, name, *arguments)
    ok(cuda.cuCtxSynchronize(), "synchronise")


_functions = {}


def function(name):
    if name not in _functions:
        with open(os.environ["EBB_TEST_KERNELS"], "rb") as text:
            module = c_void_p()
            ok(cuda.cuModuleLoadData(byref(module), text.read() + b"\0"), "module")
        handle = c_void_p()
        ok(cuda.cuModuleGetFunction(byref(handle), module, name.encode()), "function")
        _functions[name] = handle
    return _functions[name]


def launch_on(where, name, *arguments):
    places = (c_void_p * len(arguments))(*[ctypes.cast(byref(a), c_void_p) for a in arguments])
    ok(cuda.cuLaunchKernel(function(name), 64, 1, 1, 128, 1, 1, 0, where, places, None), f"launch of {name}")


def fill(pointer, words, seed, step=0):
    launch("ebb_fill", c_uint64(pointer), c_uint64(words), c_uint(seed), c_uint(step))


def wrong(pointer, words, seed, step=0):
    count = alloc(4)
    put(count, bytes(4))
    launch("ebb_check", c_uint64(pointer), c_uint64(words), c_uint(seed), c_uint(step), c_uint64(count))
    answer = int.from_bytes(get(count, 4), "little")
    ok(free(count), "free")
    return answer


__all__ = [name for name in dir() if not name.startswith("_")]
_ = (c_int, c_char_p)
