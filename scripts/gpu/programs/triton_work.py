"""Triton kernels over PyTorch's memory. Knows nothing of ebb."""

import torch
import triton
import triton.language as tl

import works


@triton.jit
def mix(a, b, n, k, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(a + at, inside)
    y = tl.load(b + at, inside)
    tl.store(a + at, x * 3 + y + k, inside)


@triton.jit
def product(a, b, c, n, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, n, BLOCK):
        inner = k + tl.arange(0, BLOCK)
        total += tl.dot(tl.load(a + rows[:, None] * n + inner[None, :]), tl.load(b + inner[:, None] * n + columns[None, :]))
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.float16))


def kernels(steps):
    n = 1 << 24
    a = torch.arange(n, device="cuda", dtype=torch.int32)
    b = a.flip(0).contiguous()
    torch.manual_seed(2)
    m = 1024
    x = torch.randn(m, m, device="cuda", dtype=torch.float16) / 32
    y = torch.randn(m, m, device="cuda", dtype=torch.float16)
    for i in steps:
        mix[(triton.cdiv(n, 1024),)](a, b, n, i, BLOCK=1024)
        z = torch.empty_like(y)
        product[(m // 64, m // 64)](x, y, z, m, BLOCK=64)
        y = z / z.abs().max()
        if i % 7 == 0:
            a, b = b, a
    return [a.cpu().numpy(), b.cpu().numpy(), y.cpu().numpy()]


if __name__ == "__main__":
    works.run_all({"kernels": kernels}, works.options())
