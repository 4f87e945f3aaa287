"""PyTorch tensors that go between processes: both ways through queues, with events, and DataLoader workers with pinned memory."""

import torch
import torch.multiprocessing as mp

import works


def child(inbox, outbox):
    """Changes what comes in its place, and sends something of its own with it."""
    kept = []
    while (got := inbox.get()) is not None:
        number, tensor = got
        tensor.mul_(3).add_(number)
        own = torch.arange(tensor.numel(), device="cuda", dtype=tensor.dtype) + number
        torch.cuda.synchronize()
        kept = [*kept[-3:], own]  # what is sent has to live until it was used
        outbox.put((number, own, int(tensor.sum(dtype=torch.int64).item())))
        del tensor, got
    outbox.close()


def queues(steps):
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(inbox, outbox))
    process.start()
    try:
        sums = torch.zeros(16, dtype=torch.int64, device="cuda")
        base = torch.arange(1 << 24, device="cuda", dtype=torch.int64)  # 128 MiB, of which parts are sent
        inbox.put((0, torch.zeros(1, device="cuda", dtype=torch.int64)))
        outbox.get(timeout=120)  # the other one has started
        for i in steps:
            if i % 3 == 0:
                tensor = base[(i % 8) << 18 :][: 1 << 18]
            else:
                tensor = torch.arange(1 << (10 + i % 12), device="cuda", dtype=torch.int64)
            torch.cuda.synchronize()
            inbox.put((i, tensor))
            number, theirs, their_sum = outbox.get(timeout=60)
            if number != i:
                raise RuntimeError(f"asked {i}, got {number}")
            mine = int(tensor.sum(dtype=torch.int64).item())
            if mine != their_sum:
                raise RuntimeError(f"round {i}: they saw {their_sum}, here it is {mine}")
            sums[i % 16] += theirs.sum() + mine
            del theirs, tensor
        inbox.put(None)
        process.join(30)
        return [sums.cpu().numpy(), base[:: 1 << 10].cpu().numpy()]
    finally:
        if process.is_alive():
            process.kill()


def event_child(handle, device, flag, done):
    event = torch.cuda.Event.from_ipc_handle(device, handle)
    flag.wait(30)
    event.synchronize()
    done.set()


def events(steps):
    """An event of one process that another one waits for."""
    context = mp.get_context("spawn")
    event = torch.cuda.Event(enable_timing=False, interprocess=True)
    flag, done = context.Event(), context.Event()
    process = context.Process(target=event_child, args=(event.ipc_handle(), torch.device("cuda", torch.cuda.current_device()), flag, done))
    process.start()
    a = torch.ones(1024, 1024, device="cuda")
    for _ in steps:
        a = (a @ a) / 1024
    event.record()
    flag.set()
    ended = done.wait(60)
    process.join(20)
    if process.is_alive():
        process.kill()
    if not ended:
        raise RuntimeError("the other process did not see the event")
    return [a.cpu().numpy()]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 30

    def __getitem__(self, at):
        generator = torch.Generator().manual_seed(at)
        return torch.randn(3, 64, 64, generator=generator), at


def loader(steps):
    """Workers that are forked, before and after the parent uses the GPU; pinned memory; copies that do not block."""
    total = torch.zeros(3, 64, 64, device="cuda")
    seen = torch.zeros((), dtype=torch.int64, device="cuda")
    rows = iter(torch.utils.data.DataLoader(Rows(), batch_size=32, num_workers=4, pin_memory=True, prefetch_factor=4))
    next(rows)
    for _ in steps:
        batch, numbers = next(rows)
        if not batch.is_pinned():
            raise RuntimeError("the batch is not pinned")
        total += batch.to("cuda", non_blocking=True).sum(0)
        seen += numbers.to("cuda", non_blocking=True).sum()
    torch.cuda.synchronize()
    del rows
    return [total.cpu().numpy(), seen.cpu().numpy()]


if __name__ == "__main__":
    works.run_all({"queues": queues, "events": events, "loader": loader}, works.options())
