"""Figures: the link, release and restore, the cost of single calls, a training step."""

import json
import statistics
import subprocess
import time

import kit
from kit import GIB, MIB, RESULTS, last_json, python, row, run, start, totals, under

m = statistics.median


def doctor():
    print(kit.ebb("doctor"))
    row("ebb", kit.ebb("version").split("\n")[0])


def figures():
    link()
    release_and_restore()
    probe, quick = kit.WORK / "probe", kit.args.quick
    plain, ours = in_turn([probe, "launch", 200], "launch_ns", 3 if quick else 10)
    more = m([b - a for a, b in zip(plain, ours)])
    row("empty launch, plain / ebb", f"{m(plain):.0f} / {m(ours):.0f} ns, {more:+.0f}", "<= +30 ns", more <= 30)
    plain, ours = in_turn([probe, "alloc", 64 * MIB, 400], "alloc_free_us", 2 if quick else 5)
    row("cuMemAlloc+Free 64 MiB, plain / ebb", f"{m(plain):.1f} / {m(ours):.2f} us", "<= 5 us", m(ours) <= 5)
    limit = last_json(run(under([probe, "limit"], "--limit", "8Gi"), kit.UNDER))
    RESULTS["limit"] = limit
    exact = limit["last_granule"] == 0 and limit["one_more"] == 2
    row("limit 8Gi: last granule / one more", f"{limit['last_granule']} / {limit['one_more']}", "0 / 2", exact)


def in_turn(command, key, pairs, flags=()):
    """A figure of a program, plain and under ebb, taking turns."""
    plain, ours = [], []
    for i in range(pairs):
        for mine in (False, True) if i % 2 == 0 else (True, False):
            text = run(under(command, *flags), kit.UNDER) if mine else run(command)
            (ours if mine else plain).append(last_json(text)[key])
    RESULTS[key] = {"plain": plain, "ebb": ours}
    return plain, ours


def link():
    found = last_json(run([kit.WORK / "probe", "link", 4 * GIB]))
    RESULTS["link"] = found
    row("pinned copy out / in / both ways", f"{found['out_gb_s']:.1f} / {found['in_gb_s']:.1f} / {found['both_gb_s']:.1f} GB/s")


def release_and_restore():
    """Of a held block, several times: the daemon's own counters and the wall clock."""
    size = (2 if kit.args.quick else 16) * GIB
    child = start(under([kit.WORK / "probe", "hold", size], "--name", "hold"), kit.UNDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    line = child.stdout.readline().strip()
    if line != "ready":
        raise RuntimeError(f"the probe said {line!r}")
    out, back, outw, backw, wrong = [], [], [], [], 0
    time.sleep(8 if kit.args.quick else 20)  # the arena is faulted in and registered ahead of need
    for _ in range(4 if kit.args.quick else 6):
        before = totals()
        t = time.monotonic()
        kit.ebb("pause", "hold", "--wait", "30s")
        outw.append(size / (time.monotonic() - t) / 1e9)
        kit.ebb("resume", "hold")
        t = time.monotonic()
        child.stdin.write("touch\n")
        child.stdin.flush()
        child.stdout.readline()
        backw.append(size / (time.monotonic() - t) / 1e9)
        child.stdin.write("check\n")
        child.stdin.flush()
        wrong += json.loads(child.stdout.readline())["wrong_words"]
        time.sleep(0.3)
        after = totals()
        if after["out_nanos"] > before["out_nanos"]:
            out.append((after["out_bytes"] - before["out_bytes"]) / (after["out_nanos"] - before["out_nanos"]))
        if after["in_nanos"] > before["in_nanos"]:
            back.append((after["in_bytes"] - before["in_bytes"]) / (after["in_nanos"] - before["in_nanos"]))
    child.communicate("quit\n", timeout=kit.bounded(60))
    RESULTS["release"] = {"bytes": size, "out_gb_s": out, "in_gb_s": back, "out_wall": outw, "in_wall": backw, "wrong": wrong}
    row("release", f"{m(out):.1f} GB/s copying, {m(outw):.1f} by the clock of `ebb pause`", ">= 45", m(out) >= 45)
    row("restore", f"{m(back):.1f} GB/s copying, {m(backw):.1f} by the clock of the first touch", ">= 45", m(back) >= 45)
    row("wrong words after every round", wrong, "0", wrong == 0)


def alloc_async():
    """cuMemAllocAsync and cuMemFreeAsync from a warm pool."""
    calls = kit.WORK / "calls"
    for size, name in ((64 << 10, "64 KiB"), (64 * MIB, "64 MiB")):
        seen = {False: [], True: []}
        for i in range(2 if kit.args.quick else 8):
            for ours in (False, True) if i % 2 == 0 else (True, False):
                command = [calls, "async", size, 2000]
                seen[ours].append(last_json(run(under(command) if ours else command, kit.UNDER if ours else None, 30)))
        RESULTS[f"alloc_async_{size}"] = {"plain": seen[False], "ebb": seen[True]}
        for call, what in (("alloc_ns", "cuMemAllocAsync"), ("free_ns", "cuMemFreeAsync")):
            plain, ours = (m(one[call] for one in seen[which]) for which in (False, True))
            row(f"{what} {name}, warm, plain / ebb", f"{plain:.0f} / {ours:.0f} ns", "<= 1000 ns", ours <= max(1000, plain))


def step():
    """A training step that fits: plain against ebb, in pairs."""
    command = python("train.py", "--gib", "8", "--steps", "150", "--no-hash", "--batch", "2048")
    pairs = []
    for i in range(1 if kit.args.quick else 4):
        order = (False, True) if i % 2 else (True, False)
        got = {}
        for ours in order:
            got[ours] = last_json(run(under(command) if ours else command, kit.UNDER if ours else None, 180))
        if got[True]["losses"] != got[False]["losses"]:
            raise RuntimeError("the losses differ")
        pairs.append((got[False]["step_ms"], got[True]["step_ms"]))
        RESULTS["step"] = pairs
        kit.say(f"{pairs[-1][0]:.3f} and {pairs[-1][1]:.3f} ms a step")
    ratio = m(b / a for a, b in pairs)
    row("training step, ebb / plain", f"{ratio:.4f} ({pairs[0][0]:.2f} ms plain)", "<= 1.01", ratio <= 1.01)
