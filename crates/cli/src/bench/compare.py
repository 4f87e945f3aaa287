"""Bytes off the card and back, by a Python package that is made for it. One line of JSON on the standard output, the last."""
import importlib.util
import json
import sys
import time

package, size, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def answer(**what):
    print("\n" + json.dumps(what), flush=True)
    sys.exit(0)


for needed in (package, "torch"):
    if importlib.util.find_spec(needed) is None:
        answer(missing=needed)

try:
    import torch

    block = 1 << 30

    def blocks():
        whole, rest = divmod(size, block)
        sizes = [block] * whole + ([rest] if rest else [])
        return [torch.empty(n, dtype=torch.uint8, device="cuda") for n in sizes]

    if package == "torch_memory_saver":
        from torch_memory_saver import torch_memory_saver as saver

        if hasattr(saver, "hook_mode"):
            saver.hook_mode = "torch"  # needs no preloading
        with saver.region(enable_cpu_backup=True):
            held = blocks()
        down, up = saver.pause, saver.resume
    else:
        from vllm.device_allocator.cumem import CuMemAllocator

        allocator = CuMemAllocator.get_instance()
        with allocator.use_memory_pool(tag="weights"):
            held = blocks()

        def down():
            allocator.sleep(offload_tags="weights")

        up = allocator.wake_up

    def timed(call):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    out, back = [], []
    for turn in range(rounds + 1):
        for one in held:
            one.fill_(turn + 1)
        took = timed(down), timed(up)
        if any(int(one[0]) != turn + 1 or int(one[-1]) != turn + 1 for one in held):
            answer(failed="what came back is not what was written")
        if turn:
            out.append(took[0])
            back.append(took[1])
except Exception as error:  # whatever it was is for the person who reads the table
    answer(failed=f"{type(error).__name__}: {error}"[:300])
answer(out=out, **{"in": back})
