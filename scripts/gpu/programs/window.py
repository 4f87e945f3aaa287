"""One framework, warm, that does so many steps each time a number arrives on stdin and says how long they took.

    window.py torch|torch-graphs|jax|cupy|cupy-async|numba|triton|driver

Prints {"ready": seconds of one step} first. Knows nothing of ebb.
"""

import json
import sys
import time


def torch_step(graphs=False):
    import torch
    import torch_work as work
    torch.use_deterministic_algorithms(False)
    model = work.seeded(lambda: work.Transformer(width=768, layers=6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=graphs)
    tokens = work.tokens_of(4096, batch=16, length=256)
    total = torch.zeros((), device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = work.loss_of(model, tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total.add_(loss.detach())

    if not graphs:
        return step, torch.cuda.synchronize
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay, torch.cuda.synchronize


def jax_step():
    import jax
    import jax.numpy as jnp
    keys = jax.random.split(jax.random.key(1), 8)
    state = {"w": [jax.random.normal(k, (2048, 2048)) / 45 for k in keys], "x": jax.random.normal(keys[0], (2048, 2048))}

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - 0.5) ** 2)

    @jax.jit
    def train(weights, x):
        return [w - 0.01 * g for w, g in zip(weights, jax.grad(loss)(weights, x))]

    def step():
        state["w"] = train(state["w"], state["x"])

    return step, lambda: jax.block_until_ready(state["w"])


def cupy_step(pool):
    import cupy as cp
    if pool == "async":
        cp.cuda.set_allocator(cp.cuda.MemoryAsyncPool().malloc)
    a = cp.random.RandomState(3).standard_normal((2048, 2048), dtype=cp.float32) / 45
    state = {"x": cp.ones((2048, 2048), dtype=cp.float32)}

    def step():
        y = cp.tanh(a @ state["x"])
        state["x"] = y * 0.5 + cp.sin(y) * cp.float32(0.25) - y.mean(axis=0)

    return step, cp.cuda.get_current_stream().synchronize


def numba_step():
    import numpy_names  # noqa: F401, before numba
    import numpy as np
    from numba import cuda

    @cuda.jit
    def mix(a, b, k):
        i = cuda.grid(1)
        if i < a.size:
            a[i] = a[i] * np.float32(0.5) + b[i] + k

    n = 1 << 24
    a, b = cuda.to_device(np.ones(n, np.float32)), cuda.to_device(np.ones(n, np.float32))

    def step():
        for k in range(10):
            mix[n // 256, 256](a, b, k)
        cuda.device_array(1 << 20, np.float32)

    return step, cuda.synchronize


def triton_step():
    import torch
    import triton
    import triton_work as work
    n = 1 << 24
    a = torch.arange(n, device="cuda", dtype=torch.int32)
    b = torch.arange(n, device="cuda", dtype=torch.int32)

    def step():
        for k in range(10):
            work.mix[(triton.cdiv(n, 1024),)](a, b, n, k, BLOCK=1024)

    return step, torch.cuda.synchronize


def driver_step():
    import driver_work as work
    driver = work.driver
    work.begin()
    kept = work.ok(driver.cuMemAlloc(1 << 20))

    def step():
        for _ in range(20):
            part = work.ok(driver.cuMemAlloc(1 << 16))
            work.ok(driver.cuMemcpyDtoD(part, kept, 1 << 12))
            work.ok(driver.cuMemFree(part))

    return step, lambda: work.ok(driver.cuCtxSynchronize())


KINDS = {
    "driver": driver_step,
    "torch": torch_step, "torch-graphs": lambda: torch_step(True), "jax": jax_step, "cupy": lambda: cupy_step("default"),
    "cupy-async": lambda: cupy_step("async"), "numba": numba_step, "triton": triton_step,
}


def main():
    kind = sys.argv[1]
    step, wait = KINDS[kind]()

    def timed(count):
        wait()
        began = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return time.perf_counter() - began

    timed(20)
    print(json.dumps({"ready": timed(30) / 30}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": timed(int(line))}), flush=True)


main()
