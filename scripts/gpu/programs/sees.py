"""What a program is told of the card by the driver, NVML, nvidia-smi and nvitop, while it holds 1 GiB. One line of JSON."""

import json
import os
import shutil
import subprocess
import sys

try:
    from cuda.bindings import driver
except ImportError:
    from cuda import cuda as driver


def ok(answer):
    if int(answer[0]) != 0:
        raise RuntimeError(str(answer[0]))
    return answer[1] if len(answer) == 2 else answer[1:]


hold = int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 30
ok(driver.cuInit(0))
device = ok(driver.cuDeviceGet(0))
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(device))))
pointer = ok(driver.cuMemAlloc(hold))
ok(driver.cuMemsetD8(pointer, 1, hold))
ok(driver.cuCtxSynchronize())
free, total = ok(driver.cuMemGetInfo())
line = {"pid": os.getpid(), "hold": hold, "driver": {"free": int(free), "total": int(total), "device": int(ok(driver.cuDeviceTotalMem(device)))}}

try:
    import pynvml
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    one = pynvml.nvmlDeviceGetMemoryInfo(handle)
    line["nvml"] = {"total": one.total, "used": one.used, "free": one.free}
    two = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    line["nvml_v2"] = {"total": two.total, "used": two.used, "free": two.free, "reserved": two.reserved}
    line["nvml_processes"] = [[p.pid, p.usedGpuMemory] for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
except Exception as error:
    line["nvml_error"] = f"{type(error).__name__}: {error}"[:200]

smi = shutil.which("nvidia-smi")
if smi:
    def ask(*words):
        done = subprocess.run([smi, *words], capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else f"status {done.returncode}: {done.stderr.strip()[:200]}"
    line["smi"] = ask("--query-gpu=memory.total,memory.used,memory.free", "--format=csv,noheader,nounits", "-i", "0")
    line["smi_processes"] = ask("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", "-i", "0")
    line["smi_table"] = ask()[-1800:]

try:
    import nvitop
    first = nvitop.Device.all()[0]
    line["nvitop"] = {"total": int(first.memory_total()), "used": int(first.memory_used()), "processes": sorted(first.processes())}
except ImportError:
    pass
except Exception as error:
    line["nvitop_error"] = f"{type(error).__name__}: {error}"[:200]
print(json.dumps(line), flush=True)
