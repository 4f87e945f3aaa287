#!/usr/bin/env python3
"""Checks and measures ebb on a real GPU, all in one call; prints a short table last.

    python3 scripts/gpu/run.py --dist target/dist [--out DIR] [--only demo,figures,...] [--budget SECONDS] [--quick]

`--dist` is a folder that `cargo xtask dist` made (bin/ebb, lib/ebb/<version>/libebb.so, ...). Needs nvcc for the probes.
Each section has a limit of its own; one that fails is reported and the rest goes on. Writes results.json to --out after
every row, and log.txt, daemon.log and autopsy.txt beside it.
"""

import contextlib
import shutil
import signal
import subprocess
import sys
import time
import traceback

import conformance
import figures
import frameworks
import kit
import jobs
import mix
import mps
import pool
import several
import sharing
import startup
import suites
import throughput
import tiers

# name: (what it does, seconds that it takes, seconds after which it is ended)
SECTIONS = {
    "doctor": (figures.doctor, 3, 30),
    "figures": (figures.figures, 75, 180),
    "alloc_async": (figures.alloc_async, 8, 60),
    "tiers": (tiers.tiers, 240, 480),
    "demo": (jobs.demo, 185, 330),
    "torch": (jobs.torch, 150, 320),
    "mixed": (jobs.mixed, 140, 320),
    "notebook": (jobs.notebook, 90, 200),
    "step": (figures.step, 110, 300),
    "frameworks": (frameworks.frameworks, 240, 480),
    "share": (sharing.share, 80, 200),
    "suites": (suites.suites, 150, 480),
    "throughput": (throughput.throughput, 150, 480),
    "pool": (pool.pool, 150, 420),
    "start": (startup.start_section, 130, 260),
    "conformance": (conformance.conformance, 150, 400),
    "mix": (mix.mix, 420, 540),
}
# These are run only if asked for: they need two cards, or start a service of the driver's.
SEVERAL = {
    "mps": (mps.mps, 60, 150),
    "nccl2": (several.nccl2, 120, 300),
    "two_cards": (several.two_cards, 120, 240),
    "peer": (tiers.peer, 60, 180),
}


def build_probes():
    """The two programs that are no Python. What needs them says so where they could not be built."""
    calls, probe = kit.PROGRAMS / "calls.cpp", kit.PROGRAMS / "probe.cu"
    include = f"-I{kit.BASE.get('CUDA_HOME', '/usr/local/cuda')}/include"
    ways = {
        "probe": [["nvcc", "-O2", "-arch=sm_90", "-o", kit.WORK / "probe", probe, "-lcuda"]],
        # Without kernels: any compiler that finds cuda.h.
        "calls": [["nvcc", "-O2", "-std=c++17", "-o", kit.WORK / "calls", calls, "-ldl"],
                  ["g++", "-O2", "-std=c++17", include, "-o", kit.WORK / "calls", calls, "-ldl"]],
    }
    for name, commands in ways.items():
        why = []
        for command in commands:
            try:
                kit.run(command, timeout=120)
                break
            except (OSError, RuntimeError) as error:
                why.append(str(error))
        else:
            kit.say(f"{name} was not built: {' / '.join(why)[:600]}")


def one(name, failed):
    function, _, limit = {**SECTIONS, **SEVERAL}[name]
    if kit.args.budget:
        limit = max(5, min(limit, kit.args.budget - (time.monotonic() - kit.BEGAN) - 15))
    began = time.monotonic()
    print(f"== {name} (at most {limit:.0f} s)", flush=True)
    try:
        with kit.section_limit(limit):
            kit.stop_daemon() if name in ("demo", "tiers") else kit.daemon()
            function()
    except Exception as error:  # whatever it was, the other sections go on
        failed.append(name)
        kit.note(f"--- section {name}\n{traceback.format_exc()}")
        kit.row(name, f"FAILED: {type(error).__name__} {error}"[:1500], "", False)
        if isinstance(error, (kit.OutOfTime, subprocess.TimeoutExpired)) or "took more than" in str(error):
            kit.autopsy()
        kit.end_all(but=kit.SERVING)
        kit.stop_daemon()  # the next section begins with a fresh one
    finally:
        kit.end_all(but=kit.SERVING)
    kit.RESULTS.setdefault("seconds", {})[name] = round(time.monotonic() - began, 1)
    print(f"   ({time.monotonic() - began:.0f} s)", flush=True)


def main():
    every = {**SECTIONS, **SEVERAL}
    chosen = [name for name in kit.args.only.split(",") if name] or list(SECTIONS)
    failed = []
    build_probes()
    for name in chosen:
        if kit.args.budget:
            remains = kit.args.budget - (time.monotonic() - kit.BEGAN) - 15
            needs = every[name][1] * (0.4 if kit.args.quick else 1)
            if needs > remains:
                kit.row(name, f"not run: takes about {needs:.0f} s, {max(0, remains):.0f} s are left")
                continue
        one(name, failed)
    return 1 if failed or any(line[3] == "MISSED" for line in kit.TABLE) else 0


def finish():
    """Also when the whole run is told to stop: no process stays, and what is known is shown."""
    kit.end_all()
    with contextlib.suppress(OSError):
        kit.save()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        print("\n" + subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip())
    kit.print_table()
    shutil.rmtree(kit.WORK, ignore_errors=True)


def told_to_stop(_signal, _frame):
    kit.DEADLINE = time.monotonic()
    kit.kill_at_once(but=kit.SERVING)
    raise SystemExit(143)


if __name__ == "__main__":
    parsed = kit.options(__doc__, {**SECTIONS, **SEVERAL}).parse_args()
    if parsed.list:
        for name, (_, seconds, limit) in {**SECTIONS, **SEVERAL}.items():
            print(f"{name:<12} about {seconds:>3} s, at most {limit:>3} s{'  (only by --only)' if name in SEVERAL else ''}")
        sys.exit(0)
    unknown = [name for name in parsed.only.split(",") if name and name not in {**SECTIONS, **SEVERAL}]
    if unknown:
        sys.exit(f"there is no section {', '.join(unknown)}; --list shows them")
    kit.set_up(parsed)
    signal.signal(signal.SIGTERM, told_to_stop)
    code = 1
    try:
        code = main()
    finally:
        finish()
    sys.exit(code)
