"""One process on both cards: memory on each, checked when a line arrives on stdin; then copies from card to card.

    two_cards.py GIB        on each card

`check` checks all; `peer` copies between the cards in every way that PyTorch and CuPy have; `quit` ends.
"""

import json
import sys

import torch

gib = float(sys.argv[1])
count = 1 << 26  # a quarter of a GiB of int32
held = {card: [torch.arange(count, dtype=torch.int32, device=f"cuda:{card}") * 3 + (17 * i + card) for i in range(int(gib * 4))]
        for card in range(torch.cuda.device_count())}


def check():
    wrong = {}
    for card, blocks in held.items():
        want = torch.arange(count, dtype=torch.int32, device=f"cuda:{card}") * 3
        wrong[card] = sum(int((b - (17 * i + card) != want).sum().item()) for i, b in enumerate(blocks))
    return wrong


def peer():
    cards = list(held)
    wrong = 0
    for a in cards:
        for b in cards:
            if a == b:
                continue
            there = held[a][0].to(f"cuda:{b}")
            wrong += int((there.cpu() != held[a][0].cpu()).sum().item())
            target = torch.empty_like(there)
            target.copy_(held[a][-1], non_blocking=True)
            torch.cuda.synchronize(a)
            torch.cuda.synchronize(b)
            wrong += int((target.cpu() != held[a][-1].cpu()).sum().item())
    access = torch.cuda.can_device_access_peer(0, 1) if len(cards) > 1 else None
    return {"peer_wrong": wrong, "can_access": access}


def direct():
    """A kernel on one card that reads the other's memory."""
    import cupy as cp
    if not cp.cuda.runtime.deviceCanAccessPeer(0, 1):
        return {"direct": "no peer access"}
    with cp.cuda.Device(1):
        far = cp.arange(1 << 22, dtype=cp.int32)
        cp.cuda.Device(1).synchronize()
    with cp.cuda.Device(0):
        try:
            cp.cuda.runtime.deviceEnablePeerAccess(1)
        except cp.cuda.runtime.CUDARuntimeError as error:
            if "AlreadyEnabled" not in str(error):  # PyTorch's copies enable it
                raise
        near = cp.ElementwiseKernel("raw int32 x", "int32 y", "y = x[i] * 5", "reads_far")(far, size=1 << 22)
        wrong = int((near != cp.arange(1 << 22, dtype=cp.int32) * 5).sum())
    return {"direct_wrong": wrong}


torch.cuda.synchronize()
print(json.dumps({"ready": {card: len(blocks) / 4 for card, blocks in held.items()}}), flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "quit":
        break
    try:
        answer = {"check": lambda: {"wrong": check()}, "peer": peer, "direct": direct}[word]()
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(answer), flush=True)
