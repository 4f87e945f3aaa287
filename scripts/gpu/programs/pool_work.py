"""One piece of work, warm, with PyTorch's or CuPy's own allocator or with ebb's pool; does what it is told on stdin.

    pool_work.py train|shapes|graphs|cupy  own|pool

`N`: that many steps; prints {"seconds"}. `figures`: {"peak", "map_calls", ...}. `value`: {"value"}, a sum that depends on all that was computed.
Prints {"ready": seconds of one step} first.
"""

import ctypes
import hashlib
import json
import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

NAMES = (
    "requested allocated cached active reserved reserved_peak allocated_peak mapped idle internal_fragmentation external_fragmentation "
    "largest_free blocks blocks_total chunks views map_calls unmap_calls created_total released_total refused records"
    " shadows meshed_total copied_total"
).split()


class Figures(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in NAMES]


def pool_figures():
    ebb = ctypes.CDLL("libebb.so")
    ebb.ebb_pool_stats.restype = ctypes.c_size_t
    figures = Figures()
    known = ebb.ebb_pool_stats(0, ctypes.byref(figures), ctypes.c_size_t(ctypes.sizeof(figures)))
    return {name: getattr(figures, name) for name in NAMES} if known else {}


def use_pool_in_torch():
    import torch
    from torch.cuda.memory import CUDAPluggableAllocator, change_current_allocator
    change_current_allocator(CUDAPluggableAllocator("libebb.so", "ebb_pool_alloc", "ebb_pool_free"))


def digest(tensors):
    import torch
    torch.cuda.synchronize()
    hash = hashlib.sha256()
    for tensor in tensors:
        hash.update(tensor.detach().float().cpu().numpy().tobytes())
    return hash.hexdigest()[:24]


def torch_peak():
    import torch
    return {"peak": torch.cuda.max_memory_reserved(), "live": torch.cuda.max_memory_allocated()}


def train():
    import torch
    import torch_work as work
    model = work.seeded(lambda: work.Transformer(width=1024, layers=8, heads=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = work.tokens_of(4096, batch=16, length=384)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = work.loss_of(model, tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step, torch.cuda.synchronize, lambda: digest(model.parameters()), torch_peak


def shapes():
    """Inference on inputs of ever other sizes, in an order that is the same each time."""
    import random

    import torch
    import torch_work as work
    model = work.seeded(lambda: work.Transformer(width=1024, layers=8, heads=16, length=1024)).eval()
    rand = random.Random(11)
    sizes = [(rand.randrange(1, 33), rand.randrange(16, 1025)) for _ in range(64)]
    inputs = [work.tokens_of(4096, batch=batch, length=length) for batch, length in sizes]
    state = {"at": 0, "sum": torch.zeros((), device="cuda", dtype=torch.float64), "kept": []}

    def step():
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            out = model(inputs[state["at"] % len(inputs)])
        # Some results live for a while, as answers do that are not yet sent.
        state["kept"].append(out[:, -1].clone())
        if len(state["kept"]) > 13:
            state["sum"] += state["kept"].pop(0).double().sum()
        state["at"] += 1

    return step, torch.cuda.synchronize, lambda: digest([state["sum"], *state["kept"]]), torch_peak


def graphs():
    """A captured forward pass that is replayed while other memory comes and goes. Says in which phase it fails."""
    import torch
    import torch_work as work
    phase = "model"
    try:
        model = work.seeded(lambda: work.Transformer(width=512, layers=4)).eval()
        tokens = work.tokens_of(4096, batch=8, length=256)
        phase = "warm-up on a side stream"
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(3):
                warm = model(tokens)
        torch.cuda.synchronize()
        phase = "capture"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            out = model(tokens)
        phase = "first replay"
        graph.replay()
        torch.cuda.synchronize()
        phase = "eager pass"
        with torch.no_grad():
            eager = model(tokens)
        phase = "comparing"
        for name, other in (("warm-up", warm), ("eager pass", eager)):
            wrong = int((out != other).sum())
            assert not wrong, f"{wrong} of {out.numel()} values of the graph differ from the {name}"
        del warm, eager
    except BaseException as error:
        error.add_note(f"the pool: {pool_figures() if sys.argv[2] == 'pool' else 'not used'}; phase: {phase}")
        raise
    # The graph reads the model and the tokens each time: they have to live as long.
    state = {"sum": torch.zeros((), device="cuda", dtype=torch.float64), "n": 0, "read": (model, tokens)}

    def step():
        more = [torch.full((1 << (12 + i % 9),), float(i), device="cuda") for i in range(24)]
        graph.replay()
        state["sum"] += out.double().sum() + sum(t[0] for t in more).double()
        state["n"] += 1

    def value():
        return f"{digest([out])} and {state['sum'].item()!r} in {state['n']} steps"

    return step, torch.cuda.synchronize, value, lambda: {"peak": 0, "live": 0}


def cupy(pool):
    import cupy as cp
    if pool:
        ebb = ctypes.CDLL("libebb.so")
        ebb.ebb_pool_alloc.restype = ctypes.c_void_p

        def now():
            return ctypes.c_void_p(cp.cuda.get_current_stream().ptr)

        cp.cuda.set_allocator(cp.cuda.PythonFunctionAllocator(
            lambda size, device: ebb.ebb_pool_alloc(ctypes.c_ssize_t(size), device, now()) or 0,
            lambda ptr, device: ebb.ebb_pool_free(ctypes.c_void_p(ptr), ctypes.c_ssize_t(0), device, now())).malloc)
    a = cp.random.RandomState(3).standard_normal((2048, 2048), dtype=cp.float32) / 45
    state = {"x": cp.ones((2048, 2048), dtype=cp.float32)}

    def step():
        y = cp.tanh(a @ state["x"])
        state["x"] = y * 0.5 + cp.sin(y) * cp.float32(0.25) - y.mean(axis=0)

    def value():
        return hashlib.sha256(cp.asnumpy(state["x"]).tobytes()).hexdigest()[:24]

    return step, cp.cuda.get_current_stream().synchronize, value, lambda: {"peak": cp.get_default_memory_pool().total_bytes(), "live": 0}


def main():
    kind, whose = sys.argv[1:3]
    pool = whose == "pool"
    if pool and kind != "cupy":
        use_pool_in_torch()
    step, wait, value, peak = cupy(pool) if kind == "cupy" else {"train": train, "shapes": shapes, "graphs": graphs}[kind]()
    warm = 64 if kind == "shapes" else 5
    for _ in range(warm):
        step()
    wait()
    began = time.perf_counter()
    for _ in range(warm):
        step()
    wait()
    print(json.dumps({"ready": (time.perf_counter() - began) / warm}), flush=True)
    for line in sys.stdin:
        word = line.strip()
        if word == "figures":
            found = pool_figures() if pool else peak()
            if pool:
                found |= {"peak": found.get("reserved_peak", 0)}
            print(json.dumps({"figures": found}), flush=True)
        elif word == "value":
            print(json.dumps({"value": value()}), flush=True)
        else:
            began = time.perf_counter()
            for _ in range(int(word)):
                step()
            wait()
            print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


main()
