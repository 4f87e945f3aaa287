"""Like a notebook: one cell takes --gib, then the kernel idles until a line arrives on stdin, then the next cell runs."""

import argparse
import json
import sys
import time

import torch

args = argparse.ArgumentParser()
args.add_argument("--gib", type=float, default=60)
args = args.parse_args()

blocks = [torch.arange(1 << 28, dtype=torch.int32, device="cuda") + i for i in range(int(args.gib))]
torch.cuda.synchronize()
print("idle", flush=True)
sys.stdin.readline()
start = time.monotonic()
first = int(blocks[0][-1].item())
woke = time.monotonic() - start
want = torch.arange(1 << 28, dtype=torch.int32, device="cuda")
wrong = sum(int((b - i != want).sum().item()) for i, b in enumerate(blocks))
print(json.dumps({"wake_s": round(woke, 3), "first": first, "wrong": wrong}), flush=True)
