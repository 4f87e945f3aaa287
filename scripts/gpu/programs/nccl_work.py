"""torch.distributed over NCCL, one process a card: all-reduces whose sums are known. Knows nothing of ebb.

    nccl_work.py ROUNDS
"""

import json
import os
import sys
import time

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BALLAST = 1 << 28  # 1 GiB of float32 a card that NCCL does not know, so that there is something to release


def rank_main(rank, size, rounds, port, answers):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    ballast = torch.arange(BALLAST, device="cuda", dtype=torch.float32)
    want_ballast = ballast.sum(dtype=torch.float64).item()
    wrong, began = 0, time.monotonic()
    steady = began
    for i in range(rounds):
        if i == rounds // 5:
            torch.cuda.synchronize()
            steady = time.monotonic()
        n = 1 << (8 + i % 15)
        base = torch.arange(n, device="cuda", dtype=torch.int64)
        x = base * (rank + 1) + i
        dist.all_reduce(x)
        want = base * (size * (size + 1) // 2) + size * i
        wrong += int((x != want).sum().item())
        if i % 50 == 0:
            wrong += ballast.sum(dtype=torch.float64).item() != want_ballast
            if rank == 0:
                print(f"round {i} after {time.monotonic() - began:.3f} s", file=sys.stderr, flush=True)
    torch.cuda.synchronize()
    steady = time.monotonic() - steady
    # Other collectives, once.
    parts = [torch.zeros(1024, device="cuda") for _ in range(size)]
    dist.all_gather(parts, torch.full((1024,), float(rank), device="cuda"))
    wrong += sum(int((p != r).sum().item()) for r, p in enumerate(parts))
    if size > 1:
        other = torch.zeros(1 << 20, device="cuda")
        ops = [dist.P2POp(dist.isend, torch.full((1 << 20,), float(rank), device="cuda"), (rank + 1) % size),
               dist.P2POp(dist.irecv, other, (rank - 1) % size)]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        wrong += int((other != (rank - 1) % size).sum().item())
    torch.cuda.synchronize()
    answers.put((rank, wrong, time.monotonic() - began, steady))
    dist.barrier()
    dist.destroy_process_group()


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    size = torch.cuda.device_count()
    context = mp.get_context("spawn")
    answers = context.Queue()
    port = 20000 + os.getpid() % 20000
    ranks = [context.Process(target=rank_main, args=(rank, size, rounds, port, answers)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    got = [answers.get(timeout=600) for _ in ranks]
    for rank in ranks:
        rank.join(60)
    print(json.dumps({"ranks": size, "rounds": rounds, "wrong": sum(g[1] for g in got), "seconds": round(max(g[2] for g in got), 2), "steady": round(max(g[3] for g in got), 3),
                      "status": [rank.exitcode for rank in ranks]}), flush=True)


if __name__ == "__main__":
    main()
