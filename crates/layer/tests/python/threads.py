"""64 threads allocate, fill, check and free; the books are even afterwards."""

import threading

from gpu import *

init()
context = retain()
function("ebb_fill")
function("ebb_check")
failures = []


def worker(number):
    try:
        ok(cuda.cuCtxSetCurrent(context), "set current")
        for turn in range(6):
            p = alloc(300_000 + 4096 * number)
            if p < 0:
                failures.append(("alloc", p))
                return
            fill(p, 50_000, number, turn)
            if wrong(p, 50_000, number, turn):
                failures.append(("wrong", number, turn))
            ok(free(p), "free")
    except Exception as error:
        failures.append(error)


before = info()[0]
threads = [threading.Thread(target=worker, args=(n,)) for n in range(64)]
[t.start() for t in threads]
[t.join() for t in threads]
after = info()[0]
print("failures", failures, "even", after == before or (before, after, report()))
