"""An ordinary deterministic PyTorch training run: prints its losses and a SHA-256 over all final weights.

    train.py --gib 90 --steps 60 --seed 1

Knows nothing of ebb. Weights, gradients and both Adam moments take --gib together (16 bytes a parameter).
"""

import argparse
import hashlib
import json
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch

args = argparse.ArgumentParser()
args.add_argument("--gib", type=float, default=90)
args.add_argument("--steps", type=int, default=60)
args.add_argument("--seed", type=int, default=1)
args.add_argument("--width", type=int, default=8192)
args.add_argument("--batch", type=int, default=256)
args.add_argument("--no-hash", action="store_true")
args = args.parse_args()

torch.manual_seed(args.seed)
torch.use_deterministic_algorithms(True)
torch.backends.cuda.matmul.allow_tf32 = True
layers = max(1, round(args.gib * 2**30 / (16 * args.width * args.width)))
began = time.monotonic()
with torch.device("cuda"):
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(args.width, args.width, bias=False), torch.nn.Tanh()) for _ in range(layers)]
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    losses, times = [], []
    for step in range(args.steps):
        start = time.monotonic()
        x = torch.randn(args.batch, args.width)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
        times.append(time.monotonic() - start)
digest = hashlib.sha256()
if not args.no_hash:
    for p in model.parameters():
        digest.update(p.detach().cpu().numpy().data)
times.sort()
print(
    json.dumps(
        {
            "layers": layers,
            "seconds": round(time.monotonic() - began, 2),
            "step_ms": round(1e3 * times[len(times) // 2], 3),
            "peak_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
            "losses": [float.hex(v) for v in losses],
            "sha256": digest.hexdigest(),
        }
    ),
    flush=True,
)
