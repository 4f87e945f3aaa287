"""Threads that work without a pause, while somebody takes the memory away and gives it back."""

import sys
import threading

from gpu import *

init()
context = retain()
function("ebb_fill")
function("ebb_check")
stop = threading.Event()
bad = []
turns = [0] * 6


def worker(number):
    try:
        ok(cuda.cuCtxSetCurrent(context), "set current")
        size = (3 << 20) + (number << 18)
        words = size // 4
        kept = alloc(size)
        fill(kept, words, number)
        while not stop.is_set():
            turns[number] += 1
            if wrong(kept, words, number, turns[number] - 1):
                bad.append((number, turns[number]))
            fill(kept, words, number, turns[number])
            other = alloc(100_000 if number % 2 else 5 * MIB)
            put(other, b"abcd" * 100)
            if get(other, 400) != b"abcd" * 100:
                bad.append(("other", number))
            ok(free(other), "free")
    except BaseException as error:
        bad.append(error)


threads = [threading.Thread(target=worker, args=(n,)) for n in range(len(turns))]
[t.start() for t in threads]
print("ready", flush=True)
for line in sys.stdin:
    print("turns", min(turns), flush=True)
stop.set()
[t.join() for t in threads]
print("bad", bad, flush=True)
sys.exit(1 if bad else 0)
