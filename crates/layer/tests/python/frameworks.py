"""A framework whose memory comes from the pool, by the C functions that the library exports. Does what it is told, line by line."""

import random
import sys
import threading

from gpu import *


class Figures(ctypes.Structure):
    _fields_ = [
        (name, c_uint64)
        for name in (
            "requested allocated cached active reserved reserved_peak allocated_peak mapped idle internal_fragmentation "
            "external_fragmentation largest_free blocks blocks_total chunks views map_calls unmap_calls created_total "
            "released_total refused records shadows meshed_total copied_total"
        ).split()
    ]


pool = ctypes.CDLL("libebb.so" if len(sys.argv) < 2 else sys.argv[1])
pool.ebb_pool_alloc.restype = pool.ebb_pool_try_alloc.restype = pool.ebb_pool_malloc.restype = c_void_p
pool.ebb_pool_alloc.argtypes = pool.ebb_pool_try_alloc.argtypes = [ctypes.c_ssize_t, c_int, c_void_p]
pool.ebb_pool_free.argtypes = [c_void_p, ctypes.c_ssize_t, c_int, c_void_p]
pool.ebb_pool_malloc.argtypes = [c_void_p, c_size_t, c_int]
pool.ebb_pool_mfree.argtypes = [c_void_p, c_void_p, c_int]
pool.ebb_pool_record.argtypes = [c_void_p, c_void_p]
pool.ebb_pool_trim.restype = c_uint64
pool.ebb_pool_stats.argtypes = [c_int, c_void_p, c_size_t]
pool.ebb_pool_stats.restype = c_size_t
pool.ebb_pool_begin.argtypes = pool.ebb_pool_end.argtypes = pool.ebb_pool_forget.argtypes = [c_int, c_uint64]


def take(size, where=None):
    return pool.ebb_pool_alloc(size, 0, where) or 0


def give(at, size, where=None):
    pool.ebb_pool_free(at, size, 0, where)


def figures():
    out = Figures()
    known = pool.ebb_pool_stats(0, byref(out), ctypes.sizeof(out))
    assert known in (0, ctypes.sizeof(out)), known
    return out


init()
context = retain()
held = {}
count = 0


def hold(size, where=None):
    global count
    at = take(size, where)
    if at:
        count += 1
        fill(at, size // 4, count)
        held[at] = (size, count)
    return at


def drop(at, where=None):
    size, _ = held.pop(at)
    give(at, size, where)


def bad():
    return sum(wrong(at, size // 4, seed) for at, (size, seed) in held.items())


def wide():
    """Three blocks in a row, of which the outer two go: what comes then lies in both holes."""
    before = figures().reserved
    left, _, right = hold(6 * MIB), hold(6 * MIB), hold(6 * MIB)
    drop(left)
    drop(right)
    at = hold(12 * MIB)
    return figures().reserved - before, figures().views


def capture():
    where = stream()
    outside = take(4 * MIB, where)
    ok(cuda.cuStreamBeginCapture_v2(where, 0), "begin")
    first = take(4 * MIB, where)
    launch_on(where, "ebb_fill", c_uint64(first), c_uint64(MIB), c_uint(71), c_uint(0))
    second = take(3 * MIB, where)
    launch_on(where, "ebb_fill", c_uint64(second), c_uint64(3 * MIB // 4), c_uint(72), c_uint(0))
    give(second, 3 * MIB, where)
    third = take(3 * MIB, where)
    launch_on(where, "ebb_fill", c_uint64(third), c_uint64(3 * MIB // 4), c_uint(73), c_uint(0))
    # What is not captured, on this thread and on another, goes on meanwhile.
    beside = take(2 * MIB)
    give(outside, 4 * MIB, where)
    streamless = pool.ebb_pool_malloc(None, 2 * MIB, 0)
    pool.ebb_pool_mfree(None, streamless, 0)
    pool.ebb_pool_trim(0)
    others = []
    thread = threading.Thread(target=lambda: (cuda.cuCtxSetCurrent(context), others.append(take(MIB))))
    thread.start()
    thread.join()
    graph, run = c_void_p(), c_void_p()
    ok(cuda.cuStreamEndCapture(where, byref(graph)), "end")
    ok(cuda.cuGraphInstantiateWithFlags(byref(run), graph, c_uint64(0)), "instantiate")
    ok(cuda.cuGraphDestroy(graph), "destroy")
    give(third, 3 * MIB, where)
    return where, run, first, third, [beside, others[0]]


print("ready", flush=True)
graphs = []
for line in sys.stdin:
    word, *arguments = line.split()
    answer = ""
    if word == "hold":
        answer = hold(int(arguments[0]) * MIB) > 0
    elif word == "drop":
        for at in list(held)[: int(arguments[0])]:
            drop(at)
    elif word == "check":
        answer = bad()
    elif word == "wide":
        grown, views = wide()
        answer = f"{grown // MIB} {views > 0}"
    elif word == "trim":
        ok(cuda.cuCtxSynchronize(), "synchronise")
        answer = pool.ebb_pool_trim(0) // MIB
    elif word == "fill":
        taken = []
        while at := pool.ebb_pool_try_alloc(8 * MIB, 0, None):
            taken.append(at)
        refused = figures().refused
        for at in taken:
            give(at, 8 * MIB)
        answer = f"{len(taken)} {refused > 0}"
    elif word == "churn":
        # A random life of blocks on two streams.
        rand = random.Random(int(arguments[0]))
        streams = [stream(), stream()]
        mine = []
        for _ in range(60):
            if mine and rand.random() < 0.45:
                at, size, seed, where = mine.pop(rand.randrange(len(mine)))
                assert wrong(at, size // 4, seed) == 0, "lost"
                give(at, size, where)
            else:
                where = rand.choice(streams)
                size = rand.choice([512, 4096, MIB, 3 * MIB, 2 * MIB + 512, rand.randrange(4, 6 * MIB)]) // 4 * 4
                at, seed = take(size, where), rand.randrange(1 << 20)
                assert at, "no room"
                launch_on(where, "ebb_fill", c_uint64(at), c_uint64(size // 4), c_uint(seed), c_uint(0))
                ok(cuda.cuStreamSynchronize(where), "synchronise")
                mine.append((at, size, seed, where))
        for at, size, seed, where in mine:
            assert wrong(at, size // 4, seed) == 0, "lost"
            give(at, size, where)
        for where in streams:
            ok(cuda.cuStreamDestroy_v2(where), "destroy")
    elif word == "loop":
        # A training loop: from the third round on nothing is mapped.
        for round in range(int(arguments[0])):
            if round == 2:
                before = figures().map_calls
            blocks = [take((3 + 5 * (i % 7)) * MIB // 4) for i in range(24)]
            for at in blocks[::2] + blocks[1::2]:
                give(at, 0)
        answer = figures().map_calls - before
    elif word == "capture":
        graphs.append(capture())
        answer = len(graphs)
    elif word == "replay":
        lost = 0
        for where, run, first, third, beside in graphs:
            # Whatever was allocated since has its own place.
            more = [take(4 * MIB, where), take(3 * MIB, where)]
            for at in more:
                fill(at, MIB // 2, 5)
            ok(cuda.cuGraphLaunch(run, where), "launch")
            ok(cuda.cuStreamSynchronize(where), "synchronise")
            lost += wrong(first, MIB, 71) + wrong(third, 3 * MIB // 4, 73)
            lost += sum(wrong(at, MIB // 2, 5) for at in more)
            give(more[0], 0, where)
            give(more[1], 0, where)
        answer = lost
    elif word == "end":
        for where, run, first, third, beside in graphs:
            ok(cuda.cuGraphExecDestroy(run), "destroy")
            give(first, 0, where)
            for at in beside:
                give(at, 0)
        graphs.clear()
    elif word == "private":
        ok(pool.ebb_pool_begin(0, 9), "begin")
        mine = take(4 * MIB)
        give(mine, 4 * MIB)
        again = take(4 * MIB)
        pool.ebb_pool_end(0, 9)
        give(again, 4 * MIB)
        other = take(4 * MIB)
        pool.ebb_pool_forget(0, 9)
        give(other, 4 * MIB)
        answer = f"{mine == again} {other != mine}"
    elif word == "streamless":
        at = pool.ebb_pool_malloc(None, 4 * MIB, 0)
        fill(at, MIB, 6)
        lost = wrong(at, MIB, 6)
        pool.ebb_pool_mfree(None, at, 0)
        answer = lost
    elif word == "record":
        where = stream()
        at = take(MIB)
        answer = f"{pool.ebb_pool_record(at, where)} {pool.ebb_pool_record(at + 512, where)}"
        give(at, MIB)
        ok(cuda.cuStreamDestroy_v2(where), "destroy")
    elif word == "snapshot":
        import pickle

        path = arguments[0]
        ok(pool.ebb_pool_snapshot(0, path.encode()), "snapshot")
        with open(path, "rb") as file:
            segments = pickle.load(file)["segments"]
        size = sum(s["total_size"] for s in segments if not s.get("is_view"))
        answer = f"{len(segments) > 0} {size >= figures().reserved}"
    elif word == "stats":
        now = figures()
        answer = f"{now.requested // MIB} {now.allocated // MIB} {now.reserved // MIB}"
    elif word == "peaks":
        now = figures()
        answer = f"{now.reserved_peak // MIB} {now.allocated_peak // MIB}"
    elif word == "anew":
        pool.ebb_pool_reset_peaks(0)
    elif word == "report":
        answer = [event["text"] for event in report()["engine"]["events"] if "EBB_POOL" in event["text"]]
    print(word, answer, flush=True)
