"""How much later a program starts under ebb: one alone, and a hundred at once."""

import json
import statistics
import subprocess
import time

import kit
from kit import RESULTS, installed, python, row, say, start, under


def timed(command, ours):
    """Milliseconds from the start of a program to its end."""
    began = time.monotonic()
    kit.run(under(command) if ours else command, kit.UNDER if ours else None, 60)
    return 1e3 * (time.monotonic() - began)


def crowd(command, ours, count):
    """So many at once: seconds until the last has ended, milliseconds of the median one, how many failed."""
    log = open(kit.WORK / "crowd.err", "w+")
    began = time.monotonic()
    words = under(command) if ours else command
    running = {start(words, kit.UNDER if ours else None, stdout=subprocess.DEVNULL, stderr=log): None for _ in range(count)}
    while any(took is None for took in running.values()):
        kit.bounded(1)
        for child, took in running.items():
            if took is None and child.poll() is not None:
                running[child] = 1e3 * (time.monotonic() - began)
        time.sleep(0.002)
    codes = [child.returncode for child in running if child.returncode != 0]
    failed = len(codes)
    if failed:
        log.seek(0)
        kit.note(f"--- crowd: {failed} failed, with {codes}\n{log.read()[-4000:]}")
    return time.monotonic() - began, statistics.median(running.values()), failed


def start_of(name, command):
    pairs = 3 if kit.args.quick else 12
    plain, ours = [], []
    timed(command, False), timed(command, True)  # the files are read once
    for i in range(pairs):
        for mine in (False, True) if i % 2 == 0 else (True, False):
            (ours if mine else plain).append(timed(command, mine))
    more = statistics.median(b - a for a, b in zip(plain, ours))
    RESULTS.setdefault("start", {})[name] = {"plain_ms": plain, "ebb_ms": ours}
    row(f"start, {name}", f"{statistics.median(plain):.0f} ms plain, {statistics.median(ours):.0f} under ebb, {more:+.0f}", "<= +50 ms", more <= 50)


def crowd_of(name, command, count):
    figures = {False: [], True: []}
    for i in range(1 if kit.args.quick else 2):
        for mine in (False, True) if i == 0 else (True, False):
            figures[mine].append(crowd(command, mine, count))
            say(f"{name}, {count} at once, {'ebb' if mine else 'plain'}: all in {figures[mine][-1][0]:.2f} s, "
                f"median {figures[mine][-1][1]:.0f} ms, {figures[mine][-1][2]} failed")
            RESULTS.setdefault("crowd", {})[name] = {"plain": figures[False], "ebb": figures[True]}
    plain, ours = (min(figures[mine]) for mine in (False, True))
    failed = sum(f[2] for f in figures[True])
    later = statistics.median(f[1] for f in figures[True]) - statistics.median(f[1] for f in figures[False])
    row(f"start of {count} at once, {name}", f"all in {plain[0]:.2f} s plain, {ours[0]:.2f} under ebb; the median one {later:+.0f} ms "
        f"({later / count:+.2f} for each of them), {failed} failed under ebb", "<= +50 ms, 0 failed", later <= 50 and failed == 0)


def bench_of(count):
    """The same by `ebb bench`, whose program does a kernel as well."""
    rounds = 1 if kit.args.quick else 2
    command = [kit.EBB, "bench", "start", "--at-once", count, "--rounds", rounds, "--json"]
    done = subprocess.run([str(word) for word in command], env=kit.UNDER, capture_output=True, text=True, timeout=kit.bounded(240))
    if done.returncode != 0:
        row(f"bench start --at-once {count}", f"FAILED: {done.stderr.strip()[-400:]}", "", False)
        return
    report = json.loads(done.stdout)
    RESULTS.setdefault("crowd", {})["bench"] = report
    for figure in report["figures"]:
        later = 1e3 * (figure["ebb"] - figure["limit"])
        row(f"{figure['what']}, {count} at once", f"{figure['limit']:.2f} s plain, {figure['ebb']:.2f} under ebb, {later:+.0f} ms "
            f"({later / count:+.2f} for each), ratio {figure['ratio']:.3f}", "<= +50 ms" if figure["what"] == "start of each" else "",
            later <= 50 if figure["what"] == "start of each" else None)


def start_section():
    programs = {}
    if (kit.WORK / "calls").exists():
        programs["native"] = [kit.WORK / "calls", "start"]
    if installed("cuda.bindings") or installed("cuda"):
        programs["Python"] = python("start.py")
    if not programs:
        raise RuntimeError("neither g++ nor cuda-bindings are here")
    for name, command in programs.items():
        start_of(name, command)
    count = 12 if kit.args.quick else 100
    for name, command in programs.items():
        crowd_of(name, command, count)
    bench_of(count)
