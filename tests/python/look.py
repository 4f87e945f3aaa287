"""What a program sees of its cards through NVML and the driver, told line by line what to do. Answers are one JSON object a line."""

import ctypes
import json
import os
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

MIB = 1 << 20
NONE = 0xFFFFFFFF


def struct(name, **fields):
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


Memory = struct("Memory", total=c_uint64, free=c_uint64, used=c_uint64)
Memory2 = struct("Memory2", version=c_uint, total=c_uint64, reserved=c_uint64, free=c_uint64, used=c_uint64)
Bar1 = struct("Bar1", total=c_uint64, free=c_uint64, used=c_uint64)
Process1 = struct("Process1", pid=c_uint, used=c_uint64)
Process2 = struct("Process2", pid=c_uint, used=c_uint64, gpu=c_uint, compute=c_uint)
Detail = struct("Detail", pid=c_uint, used=c_uint64, gpu=c_uint, compute=c_uint, protected=c_uint64)
DetailList = struct("DetailList", version=c_uint, mode=c_uint, count=c_uint, array=POINTER(Detail))
Sample = struct("Sample", pid=c_uint, time=c_uint64, sm=c_uint, mem=c_uint, enc=c_uint, dec=c_uint)
Info = struct("Info", time=c_uint64, pid=c_uint, sm=c_uint, mem=c_uint, enc=c_uint, dec=c_uint, jpg=c_uint, ofa=c_uint)
Infos = struct("Infos", version=c_uint, count=c_uint, since=c_uint64, array=POINTER(Info))
Account = struct("Account", gpu=c_uint, mem=c_uint, most=c_uint64, time=c_uint64, start=c_uint64, running=c_uint, reserved=c_uint * 5)
Account2 = struct(
    "Account2", pid=c_uint, running=c_uint, gpu=c_uint, mem=c_uint, most=c_uint64, samples=c_uint, a=c_uint64, b=c_uint64, time=c_uint64, start=c_uint64
)
Uuid = struct("Uuid", version=c_uint, type=c_uint, value=ctypes.c_ubyte * 41)


def version(kind, number):
    return ctypes.sizeof(kind) | number << 24


nvml = None


def start():
    global nvml
    if nvml is None:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        assert nvml.nvmlInit_v2() == 0


def text(call, handle, size=96):
    place = ctypes.create_string_buffer(size)
    assert call(handle, place, c_uint(size)) == 0
    return place.value.decode()


def listed(call, kind, handle):
    """A list as programs ask for it: first how many, then the entries."""
    count = c_uint(0)
    code = call(handle, byref(count), None)
    if code == 0:
        assert count.value == 0, count.value
        return []
    if code != 7:
        return -code
    entries = (kind * (count.value + 2))()
    count = c_uint(len(entries))
    code = call(handle, byref(count), entries)
    return [entries[i] for i in range(count.value)] if code == 0 else -code


def processes(handle, slice=(NONE, NONE)):
    found = {}
    for what in ("Compute", "Graphics", "MPSCompute"):
        for form, kind in (("", Process1), ("_v2", Process2), ("_v3", Process2)):
            entries = listed(getattr(nvml, f"nvmlDeviceGet{what}RunningProcesses{form}"), kind, handle)
            assert form == "" or all((e.gpu, e.compute) == slice for e in entries)
            found[what + form] = sorted([e.pid, e.used] for e in entries)
    return found


class Private(ctypes.Structure):
    """An entry of the lists that nvidia-smi reads through a private table."""

    _fields_ = [("pid", c_uint), ("used", c_uint64), ("gpu", c_uint), ("compute", c_uint), ("secret", c_uint64), ("name", ctypes.c_char * 4096)]


def private_processes(handle):
    table = ctypes.POINTER(c_void_p)()
    identity = bytes.fromhex("c4fe3e6cc98f6c4ea327ee696e12f7c4")
    assert nvml.nvmlInternalGetExportTable(byref(table), identity) == 0
    assert nvml.nvmlInternalGetExportTable(byref(ctypes.POINTER(c_void_p)()), bytes(16)) != 0
    found = []
    for index in (213, 214, 215):
        call = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_void_p, c_void_p)(table[index])
        entries, count = (Private * 16)(), c_uint(16)
        assert call(handle, byref(count), entries) == 0
        found.append(sorted([entries[i].pid, entries[i].used, "python" in entries[i].name.decode()] for i in range(count.value)))
    return found


def details(handle, mode):
    question = DetailList(version=version(DetailList, 1), mode=mode)
    code = nvml.nvmlDeviceGetRunningProcessDetailList(handle, byref(question))
    if code == 0:
        return []
    assert code == 7, code
    array = (Detail * question.count)()
    question.array = array
    assert nvml.nvmlDeviceGetRunningProcessDetailList(handle, byref(question)) == 0
    return sorted([array[i].pid, array[i].used] for i in range(question.count))


def utilisation(handle):
    samples, count = (Sample * 64)(), c_uint(64)
    code = nvml.nvmlDeviceGetProcessUtilization(handle, samples, byref(count), c_uint64(0))
    infos = (Info * 64)()
    question = Infos(version=version(Infos, 1), count=64, array=infos)
    newer = nvml.nvmlDeviceGetProcessesUtilizationInfo(handle, byref(question))
    return [
        sorted(samples[i].pid for i in range(count.value)) if code == 0 else -code,
        sorted(infos[i].pid for i in range(question.count)) if newer == 0 else -newer,
    ]


def accounts(handle):
    pids = listed(nvml.nvmlDeviceGetAccountingPids, c_uint, handle)
    return sorted(pids) if isinstance(pids, list) else pids


def account(pid):
    start()
    first, second = Account(), Account2(pid=pid)
    one = nvml.nvmlDeviceGetAccountingStats(by_index(0), c_uint(pid), byref(first))
    two = nvml.nvmlDeviceGetAccountingStats_v2(by_index(0), byref(second))
    assert second.pid == pid
    return [one, first.most, two, second.most]


def by_index(index):
    handle = c_void_p()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(c_uint(index), byref(handle)) == 0
    return handle


def forms(index):
    """The same card by every way to a handle."""
    first = by_index(index)
    uuid, serial = text(nvml.nvmlDeviceGetUUID, first), text(nvml.nvmlDeviceGetSerial, first)
    pci = ctypes.create_string_buffer(68)
    assert nvml.nvmlDeviceGetPciInfo_v3(first, pci) == 0
    bus = pci.raw[36:68].split(b"\0")[0]
    ascii, binary = Uuid(version=version(Uuid, 1), type=1), Uuid(version=version(Uuid, 1), type=2)
    ascii.value[: len(uuid)] = uuid.encode()
    binary.value[:16] = bytes.fromhex(uuid[4:].replace("-", ""))
    yield "index", first
    for name, call, argument in (
        ("uuid", nvml.nvmlDeviceGetHandleByUUID, c_char_p(uuid.encode())),
        ("uuidv text", nvml.nvmlDeviceGetHandleByUUIDV, byref(ascii)),
        ("uuidv bytes", nvml.nvmlDeviceGetHandleByUUIDV, byref(binary)),
        ("serial", nvml.nvmlDeviceGetHandleBySerial, c_char_p(serial.encode())),
        ("pci", nvml.nvmlDeviceGetHandleByPciBusId_v2, c_char_p(bus)),
    ):
        handle = c_void_p()
        assert call(argument, byref(handle)) == 0, name
        yield name, handle


def card(handle, slice=(NONE, NONE)):
    memory, memory2, bar1 = Memory(), Memory2(version=version(Memory2, 2)), Bar1()
    assert nvml.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0
    assert nvml.nvmlDeviceGetMemoryInfo_v2(handle, byref(memory2)) == 0
    assert nvml.nvmlDeviceGetBAR1MemoryInfo(handle, byref(bar1)) == 0
    assert memory2.total == memory2.reserved + memory2.free + memory2.used
    assert bar1.total == bar1.free + bar1.used
    return {
        "uuid": text(nvml.nvmlDeviceGetUUID, handle),
        "memory": [memory.total, memory.free, memory.used],
        "memory 2": [memory2.total, memory2.free, memory2.used],
        "bar1_used": bar1.used,
        "processes": processes(handle, slice),
        "details": [details(handle, mode) for mode in range(4)],
        "utilisation": utilisation(handle),
        "accounts": accounts(handle),
        "private": private_processes(handle),
    }


def slice_forms(parent, index):
    """The same slice of a card by every way to a handle."""
    first, back, number = c_void_p(), c_void_p(), c_uint()
    assert nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, c_uint(index), byref(first)) == 0
    uuid = text(nvml.nvmlDeviceGetUUID, first)
    assert uuid.startswith("MIG-"), uuid
    assert nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(first, byref(back)) == 0 and back.value == parent.value
    assert nvml.nvmlDeviceIsMigDeviceHandle(first, byref(number)) == 0 and number.value == 1
    ascii, binary = Uuid(version=version(Uuid, 1), type=1), Uuid(version=version(Uuid, 1), type=2)
    ascii.value[: len(uuid)] = uuid.encode()
    binary.value[:16] = bytes.fromhex(uuid[4:].replace("-", ""))
    yield "index", first
    for name, call, argument in (
        ("uuid", nvml.nvmlDeviceGetHandleByUUID, c_char_p(uuid.encode())),
        ("uuidv text", nvml.nvmlDeviceGetHandleByUUIDV, byref(ascii)),
        ("uuidv bytes", nvml.nvmlDeviceGetHandleByUUIDV, byref(binary)),
    ):
        handle = c_void_p()
        assert call(argument, byref(handle)) == 0, name
        yield name, handle


def slices():
    """Every card that is cut: what it shows as a whole, and each of its slices."""
    start()
    count = c_uint()
    assert nvml.nvmlDeviceGetCount_v2(byref(count)) == 0
    cards = []
    for number in range(count.value):
        parent, mode, most = by_index(number), c_uint(), c_uint()
        assert nvml.nvmlDeviceGetMigMode(parent, byref(mode), byref(c_uint())) == 0 and mode.value == 1
        assert nvml.nvmlDeviceGetMaxMigDeviceCount(parent, byref(most)) == 0
        parts = []
        for index in range(most.value):
            for again in reversed(range(100)):
                answers = {}
                for name, handle in slice_forms(parent, index):
                    ids = c_uint(), c_uint()
                    assert nvml.nvmlDeviceGetGpuInstanceId(handle, byref(ids[0])) == 0
                    assert nvml.nvmlDeviceGetComputeInstanceId(handle, byref(ids[1])) == 0
                    answers[name] = card(handle, tuple(n.value for n in ids))
                first = answers["index"]
                if all(answer == first for answer in answers.values()) and first["memory"] == first["memory 2"]:
                    break
                assert again, answers
            parts.append(first)
        memory = Memory()
        assert nvml.nvmlDeviceGetMemoryInfo(parent, byref(memory)) == 0
        listed_here = listed(nvml.nvmlDeviceGetComputeRunningProcesses_v3, Process2, parent)
        cards.append(
            {
                "uuid": text(nvml.nvmlDeviceGetUUID, parent),
                "used": memory.used,
                "total": memory.total,
                "processes": sorted([e.pid, e.used, e.gpu] for e in listed_here),
                "slices": parts,
            }
        )
    return cards


def look():
    start()
    count = c_uint()
    assert nvml.nvmlDeviceGetCount_v2(byref(count)) == 0
    cards = []
    for index in range(count.value):
        # Others go on meanwhile, and their use is told a moment later: a look that falls into a change is made again.
        for again in reversed(range(100)):
            answers = {name: card(handle) for name, handle in forms(index)}
            first = answers["index"]
            if all(answer == first for answer in answers.values()) and first["memory"] == first.pop("memory 2"):
                break
            assert again, answers
        total, free, used = first.pop("memory")
        cards.append({"total": total, "free": free, "used": used, **first})
    return cards


def name(pid):
    start()
    place = ctypes.create_string_buffer(64)
    code = nvml.nvmlSystemGetProcessName(c_uint(pid), place, c_uint(64))
    return place.value.decode() if code == 0 else -code


cuda, held = None, []


def open_card(device):
    global cuda
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuInit(0) == 0
    context = c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(byref(context), c_int(device)) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    return info()


def info():
    free, total = c_size_t(), c_size_t()
    assert cuda.cuMemGetInfo_v2(byref(free), byref(total)) == 0
    return [free.value, total.value]


def alloc(size):
    pointer = c_uint64()
    code = cuda.cuMemAlloc_v2(byref(pointer), c_size_t(size))
    if code == 0:
        held.append(pointer.value)
    return code


def free():
    while held:
        assert cuda.cuMemFree_v2(c_uint64(held.pop())) == 0
    return 0


def total(device):
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuInit(0) == 0
    value = c_size_t()
    assert driver.cuDeviceTotalMem_v2(byref(value), c_int(device)) == 0
    return value.value


_fill = None


def launch():
    """Runs a small kernel on nothing."""
    global _fill
    if _fill is None:
        with open(os.environ["EBB_TEST_KERNELS"], "rb") as kernels:
            module, _fill = c_void_p(), c_void_p()
            assert cuda.cuModuleLoadData(byref(module), kernels.read() + b"\0") == 0
            assert cuda.cuModuleGetFunction(byref(_fill), module, b"ebb_fill") == 0
    arguments = [c_uint64(0), c_uint64(0), c_uint(0), c_uint(0)]
    places = (c_void_p * 4)(*[ctypes.cast(byref(a), c_void_p) for a in arguments])
    code = cuda.cuLaunchKernel(_fill, 1, 1, 1, 32, 1, 1, 0, None, places, None)
    return code or cuda.cuCtxSynchronize()


def limit(which, value):
    return cuda.cuCtxSetLimit(c_int(which), c_size_t(value))


def deepbind(library, size):
    """Has a library take memory that was loaded so that it finds the driver before any preloaded library."""
    return ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_DEEPBIND).take(c_size_t(size))


COMMANDS = {
    "deepbind": lambda library, size: deepbind(library, int(size)),
    "launch": launch,
    "limit": lambda which, value: limit(int(which), int(value)),
    "look": look,
    "slices": slices,
    "name": lambda pid: name(int(pid)),
    "account": lambda pid: account(int(pid)),
    "pid": os.getpid,
    "open": lambda device: open_card(int(device)),
    "info": info,
    "alloc": lambda size: alloc(int(size)),
    "free": free,
    "total": lambda device: total(int(device)),
}

for line in sys.stdin:
    word, *arguments = line.split()
    print(json.dumps(COMMANDS[word](*arguments)), flush=True)
