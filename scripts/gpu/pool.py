"""ebb's own pool under frameworks: PyTorch and CuPy with it, beside their own allocators, both under ebb so that only the allocator differs.

Two warm processes a piece of work take turns, as in `throughput`. Each check is alone: what fails says so in its row, and the others go on.
"""

import json
import statistics
import subprocess

import kit
from kit import MIB, RESULTS, installed, last_json, python, row, run, say, start, under
from throughput import spread

WORKS = {
    # work: (module that it needs, what a pair's ratio may be, whether maps in the steady state have to be none)
    "train": ("torch", 1.01, True),
    "shapes": ("torch", 1.02, True),
    "graphs": ("torch", 1.05, False),
    "cupy": ("cupy", 1.10, True),
}


WARM_SECONDS = 10


class Side:
    """A warm process that computes when told to."""

    def __init__(self, work, whose):
        self.errors = open(kit.WORK / f"pool-{work}-{whose}.err", "w+")
        command = under(python("pool_work.py", work, whose), "--name", f"pool-{work}-{whose}", "--idle-release", "off")
        self.child = start(command, kit.UNDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)

    def line(self, key):
        while line := self.child.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)[key]
        self.errors.seek(0)
        text = self.errors.read()
        kit.note(f"--- pool_work ended\n{text[-6000:]}")
        raise RuntimeError(f"ended with {self.child.wait(10)}: {text.strip()[-400:]}")

    def say(self, what, key):
        self.child.stdin.write(f"{what}\n")
        self.child.stdin.flush()
        return self.line(key)


def guarded(what, check):
    """One check, whose failure is a row."""
    try:
        check()
    except kit.OutOfTime:
        raise
    except Exception as error:  # whatever it was, the other checks go on
        row(what, f"FAILED: {type(error).__name__} {error}"[:500], "", False)


def pairs_of(work, most, no_maps):
    own, pool = Side(work, "own"), Side(work, "pool")
    try:
        for side in (own, pool):
            side.step = side.line("ready")
        # Both have done the same number of steps: the same bits.
        values = [side.say("value", "value") for side in (own, pool)]
        row(f"{work}: results, own allocator / pool", "equal" if values[0] == values[1] else f"{values[0]} / {values[1]}", "equal",
            values[0] == values[1])
        steps = max(1, round(kit.args.window / own.step))
        if work == "shapes":
            steps = max(64, steps // 64 * 64)
        own.say(max(1, steps // 2), "seconds")
        # Mappings and physical bytes, second by second: a pool that maps on and on grows a little, step by step.
        warming, last = [], 0
        for _ in range(WARM_SECONDS):
            pool.say(max(1, round(1 / own.step)), "seconds")
            before = pool.say("figures", "figures")
            warming.append((before["map_calls"] - last, before["reserved"] // MIB))
            last = before["map_calls"]
        ratios, times = [], []
        for i in range(2 if kit.args.quick else max(10, kit.args.pairs)):
            order = (own, pool) if i % 2 == 0 else (pool, own)
            took = {side: side.say(steps, "seconds") for side in order}
            ratios.append(took[pool] / took[own])
            times.append((took[own], took[pool]))
        after, theirs = pool.say("figures", "figures"), own.say("figures", "figures")
        RESULTS.setdefault("pool", {})[work] = {"steps": steps, "warming": warming, "pairs": times, "ratios": ratios, "pool": after, "own": theirs}
        middle, low, high = spread(ratios)
        row(f"{work}: step time, pool / own allocator", f"x {middle:.4f} (middle half {low:.4f} to {high:.4f}, {len(ratios)} pairs of {steps} steps, "
            f"{1e3 * statistics.median(t[0] for t in times) / steps:.3f} ms own)", f"<= {most}", middle <= most)
        if theirs.get("peak"):
            row(f"{work}: most reserved, pool / own allocator", f"{after['peak'] / MIB:.0f} / {theirs['peak'] / MIB:.0f} MiB "
                f"(live at most {theirs.get('live', 0) / MIB:.0f})", "<= own", after["peak"] <= theirs["peak"])
        maps = after["map_calls"] - before["map_calls"]
        row(f"{work}: map calls in the steady state", f"{maps}", "0" if no_maps else "", maps == 0 if no_maps else None)
    finally:
        kit.end(own.child)
        kit.end(pool.child)


def aliases():
    for name, command in (("plain", python("pool_alias.py")), ("under ebb, and the pool's", under(python("pool_alias.py", "pool")))):
        def check(command=command, name=name):
            found = last_json(run(command, kit.BASE if name == "plain" else kit.UNDER, 60))["alias"]
            RESULTS.setdefault("pool", {})[f"alias, {name}"] = found
            row(f"two mappings of one memory, {name}", "right" if not found else "; ".join(found)[:300], "right", not found)

        guarded(f"two mappings of one memory, {name}", check)


def bench_alloc():
    words = ["bench", "alloc", "--json", *(["--gpu", "sim"] if kit.args.sim else [])]
    figures = last_json(kit.ebb(*words, timeout=120))["figures"]
    RESULTS.setdefault("pool", {})["bench alloc"] = figures
    for figure in figures:
        seconds = figure.get("unit") == "seconds"
        shown = f"{1e9 * figure['ebb']:.0f} ns" if seconds else f"{figure['ebb']:.3g}"
        ratio = figure.get("ratio")
        row(f"bench alloc: {figure['what']} {figure.get('bytes') or ''}".strip(), f"{shown}, {figure.get('against', '')}: x {ratio:.3f}"
            if ratio else shown, "<= 1 µs at 64 MiB" if seconds else "", None)


def trim():
    """A program that keeps a pool of memory that it does not use gives it back when asked."""
    side = Side("train", "pool")
    try:
        side.line("ready")
        answer = json.loads(kit.ebb("trim", "pool-train-pool", "--json").strip().splitlines()[-1])
        given = answer["tasks"][0]
        row("ebb trim of a program that trains", f"{given['bytes'] / MIB:.0f} MiB given back, {given['silent']} silent", "answers",
            given["silent"] == 0)
        side.say(3, "seconds")
    finally:
        kit.end(side.child)


def pool():
    guarded("two mappings of one memory", aliases)
    guarded("bench alloc", bench_alloc)
    if kit.args.sim:  # whose cards run no framework's kernels
        return
    for work, (module, most, no_maps) in WORKS.items():
        if not installed(module):
            row(f"{work} with the pool", f"{module} is not here")
            continue
        if kit.left() < 25:
            row(f"{work} with the pool", f"not run: {kit.left():.0f} s are left")
            continue
        say(work)
        guarded(f"{work} with the pool", lambda work=work, most=most, no_maps=no_maps: pairs_of(work, most, no_maps))
    if installed("torch") and kit.left() > 25:
        guarded("ebb trim", trim)
