#!/usr/bin/env python3
"""Checks and measures ebb on a real GPU, all in one call; prints a short table last.

    python3 scripts/gpu/run.py --dist target/dist [--out DIR] [--only demo,figures,...] [--quick]

`--dist` is a folder that `cargo xtask dist` made (bin/ebb, lib/ebb/<version>/libebb.so, ...). Needs nvcc for probe.cu.
Each section is bounded in time; one that fails is reported and the rest goes on. Writes results.json to --out.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
args.add_argument("--dist", type=Path, default=Path("target/dist"))
args.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "target/gpu")))
args.add_argument("--only", default="")
args.add_argument("--arena", default="72Gi")
args.add_argument("--quick", action="store_true", help="small sizes: is everything in place?")
args = args.parse_args()

args.out.mkdir(parents=True, exist_ok=True)
DIST = args.dist.resolve()
EBB = DIST / "bin" / "ebb"
LIB = next(iter(sorted(DIST.glob("lib/ebb/*/libebb.so"))), None)
WORK = Path(tempfile.mkdtemp(prefix="ebb-gpu-"))
RUN = WORK / "run"
RESULTS, TABLE, CHILDREN = {}, [], []
PATIENCE = 300  # seconds for two jobs that take turns
BASE = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
UNDER = {**BASE, "EBB_SOCKET_DIR": str(RUN), "EBB_LIB": str(LIB)}


def start(command, env=BASE, **more):
    child = subprocess.Popen([str(c) for c in command], env=env, text=True, **more)
    CHILDREN.append(child)
    return child


def run(command, env=BASE, timeout=120):
    """Output of a command that must succeed."""
    child = start(command, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        raise RuntimeError(f"{command} took more than {timeout} s\n{out[-800:]}\n{err[-800:]}") from None
    if child.returncode != 0:
        raise RuntimeError(f"{command} ended with {child.returncode}\n{out[-800:]}\n{err[-1500:]}")
    return out


def ebb(*words, timeout=60):
    return run([EBB, *words], UNDER, timeout)


def under(command, *flags):
    return [EBB, "run", *flags, "--", *command]


def last_json(text):
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def listing():
    return json.loads(ebb("ps", "--json"))


def totals():
    return listing()["totals"]


def smi_used_mib():
    out = run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"])
    return int(out.split()[0])


def row(what, value, target="", ok=None):
    TABLE.append((what, value, target, {True: "ok", False: "MISSED", None: ""}[ok]))
    print(f"  {what}: {value}  {target}", flush=True)


SERVING = []


def stop_daemon():
    """The demo brings a daemon of its own, and the host memory is one."""
    while SERVING:
        child = SERVING.pop()
        child.send_signal(signal.SIGTERM)
        child.wait(20)


def daemon():
    if SERVING:
        return
    shutil.rmtree(RUN, ignore_errors=True)
    config = WORK / "ebb.toml"
    config.write_text(f'state_dir = "{WORK}/state"\n[arena]\nbudget = "{args.arena}"\n')
    (WORK / "state").mkdir(exist_ok=True)
    RUN.mkdir(mode=0o700)
    log = open(args.out / "daemon.log", "a")
    child = start([EBB, "daemon", "--config", config, "--socket-dir", RUN], UNDER, stderr=log, stdout=log)
    for _ in range(300):
        if child.poll() is not None:
            raise RuntimeError(f"the daemon ended: {(args.out / 'daemon.log').read_text()[-2000:]}")
        try:
            listing()
            SERVING.append(child)
            return
        except (RuntimeError, ValueError):
            time.sleep(0.1)
    raise RuntimeError("the daemon does not answer")


def autopsy():
    """What the daemon and the programs say of themselves, when something does not end."""
    text = ebb("ps")
    for task in listing()["tasks"]:
        for process in task["processes"]:
            text += run([EBB, "doctor", str(process["pid"]), "--json"], UNDER)[:6000] + "\n"
    log = WORK / "state" / "events.jsonl"
    if log.exists():
        text += "".join(line[:400] + "\n" for line in log.read_text().splitlines()[-80:] if '"usage"' not in line)
    (args.out / "autopsy.txt").write_text(text)
    print(text[:3000], flush=True)


# --- sections ---------------------------------------------------------------------------------------------------------


def doctor():
    print(ebb("doctor"))


def figures():
    gib = 1 << 30
    size = (2 if args.quick else 16) * gib
    link = last_json(run([WORK / "probe", "link", 4 * gib]))
    RESULTS["link"] = link
    row("pinned copy out / in / both ways", f"{link['out_gb_s']:.1f} / {link['in_gb_s']:.1f} / {link['both_gb_s']:.1f} GB/s")
    # Release and restore of a held block, several times; the daemon's own counters and the wall clock.
    child = start(under([WORK / "probe", "hold", size], "--name", "hold"), UNDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline().strip() == "ready"
    out, back, outw, backw, wrong = [], [], [], [], 0
    time.sleep(8 if args.quick else 20)  # the arena is faulted in and registered ahead of need
    for _ in range(4 if args.quick else 6):
        before = totals()
        t = time.monotonic()
        ebb("pause", "hold", "--wait", "30s")
        outw.append(size / (time.monotonic() - t) / 1e9)
        ebb("resume", "hold")
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
    child.communicate("quit\n", timeout=60)
    RESULTS["release"] = {"bytes": size, "out_gb_s": out, "in_gb_s": back, "out_wall": outw, "in_wall": backw, "wrong": wrong}
    m = statistics.median
    row("release", f"{m(out):.1f} GB/s copying, {m(outw):.1f} by the clock of `ebb pause`", ">= 45", m(out) >= 45)
    row("restore", f"{m(back):.1f} GB/s copying, {m(backw):.1f} by the clock of the first touch", ">= 45", m(back) >= 45)
    row("wrong words after every round", wrong, "0", wrong == 0)

    plain, ours = [], []
    for _ in range(3 if args.quick else 10):
        plain.append(last_json(run([WORK / "probe", "launch", 200]))["launch_ns"])
        ours.append(last_json(run(under([WORK / "probe", "launch", 200]), UNDER))["launch_ns"])
    more = m([b - a for a, b in zip(plain, ours)])
    RESULTS["launch_ns"] = {"plain": plain, "ebb": ours}
    row("empty launch, plain / ebb", f"{m(plain):.0f} / {m(ours):.0f} ns, {more:+.0f}", "<= +30 ns", more <= 30)
    plain, ours = [], []
    for _ in range(2 if args.quick else 5):
        plain.append(last_json(run([WORK / "probe", "alloc", 64 << 20, 400]))["alloc_free_us"])
        ours.append(last_json(run(under([WORK / "probe", "alloc", 64 << 20, 400]), UNDER))["alloc_free_us"])
    RESULTS["alloc_us"] = {"plain": plain, "ebb": ours}
    row("cuMemAlloc+Free 64 MiB, plain / ebb", f"{m(plain):.1f} / {m(ours):.2f} us", "<= 5 us", m(ours) <= 5)
    limit = last_json(run(under([WORK / "probe", "limit"], "--limit", "8Gi"), UNDER))
    RESULTS["limit"] = limit
    row("limit 8Gi: last granule / one more", f"{limit['last_granule']} / {limit['one_more']}", "0 / 2", True)


def demo():
    size = "75Gi" if args.quick else "100Gi"
    text = run([EBB, "demo", "--gpu", "real", "--bytes-per-job", size, "--json"], UNDER, timeout=400)
    result = last_json(text)
    RESULTS["demo"] = result
    good = result["finished"] == 2 and result["mismatches"] == 0 and result["oom_without_ebb"]
    row(f"demo, 2 jobs of {size}", f"{result['finished']} finished, {result['mismatches']} wrong, {result['releases']} releases, "
        f"{result['out_bytes_per_s'] / 1e9:.1f} / {result['in_bytes_per_s'] / 1e9:.1f} GB/s", "2, 0", good)


def step():
    """A training step that fits: plain against ebb, in pairs."""
    command = [sys.executable, HERE / "train.py", "--gib", "8", "--steps", "150", "--no-hash", "--batch", "2048"]
    pairs = []
    for i in range(1 if args.quick else 4):
        order = (False, True) if i % 2 else (True, False)
        got = {}
        for ours in order:
            got[ours] = last_json(run(under(command) if ours else command, UNDER if ours else BASE, 180))
        assert got[True]["losses"] == got[False]["losses"], "losses differ"
        pairs.append((got[False]["step_ms"], got[True]["step_ms"]))
    ratio = statistics.median(b / a for a, b in pairs)
    RESULTS["step"] = pairs
    row("training step, ebb / plain", f"{ratio:.4f} ({pairs[0][0]:.2f} ms plain)", "<= 1.01", ratio <= 1.01)


def pair(name, first, second, by_itself):
    """Two jobs that do not fit together, started together; results equal to those alone."""
    began = time.monotonic()
    jobs = [start(under(c, "--name", f"{name}{i}"), UNDER, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i, c in enumerate((first, second))]
    done = []
    for job in jobs:
        try:
            out, err = job.communicate(timeout=max(1, began + PATIENCE - time.monotonic()))
        except subprocess.TimeoutExpired:
            autopsy()
            for left in jobs:
                left.kill()
            raise
        if job.returncode != 0:
            raise RuntimeError(f"{name} ended with {job.returncode}: {err[-1500:]}")
        done.append((last_json(out), round(time.monotonic() - began, 1)))
    same = all(got["sha256"] == want["sha256"] and got.get("losses") == want.get("losses") and got.get("sums") == want.get("sums")
               for (got, _), want in zip(done, by_itself))
    seconds = [d[0]["seconds"] for d in done]
    RESULTS[name] = {"alone_s": [a["seconds"] for a in by_itself], "together_s": seconds, "same": same, "totals": totals()}
    row(f"{name}: two together", f"{seconds[0]:.0f} and {seconds[1]:.0f} s (alone {by_itself[0]['seconds']:.0f}, {by_itself[1]['seconds']:.0f}), "
        f"results {'equal' if same else 'DIFFER'}", "equal", same)


ALONE = {}


def alone(command):
    """What a job gives without ebb, once a run."""
    key = " ".join(str(c) for c in command)
    if key not in ALONE:
        ALONE[key] = last_json(run(command, BASE, 200))
    return ALONE[key]


def training(seed):
    return [sys.executable, HERE / "train.py", "--gib", "20" if args.quick else "90", "--steps", "50", "--seed", seed]


def torch():
    jobs = [training("1"), training("2")]
    pair("torch+torch", *jobs, [alone(job) for job in jobs])


def mixed():
    jobs = [training("1"), [sys.executable, HERE / "cupy_job.py", "--gib", "20" if args.quick else "90", "--steps", "40"]]
    pair("torch+cupy", *jobs, [alone(job) for job in jobs])


def notebook():
    gib = 10 if args.quick else 60
    idle = smi_used_mib()
    child = start(under([sys.executable, HERE / "notebook.py", "--gib", gib], "--name", "notebook", "--idle-release", "3s"),
                  UNDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.readline().strip() == "idle"
    holding = smi_used_mib()
    deadline = time.monotonic() + 60
    while (left := smi_used_mib()) - idle > 2000 and time.monotonic() < deadline:
        time.sleep(0.2)
    other = last_json(run(under([sys.executable, HERE / "cupy_job.py", "--gib", 20 if args.quick else 120, "--steps", "2"]), UNDER, 200))
    out, err = child.communicate("\n", timeout=120)
    if child.returncode != 0:
        raise RuntimeError(err[-1500:])
    got = last_json(out)
    RESULTS["notebook"] = {"holding_mib": holding - idle, "left_mib": left - idle, **got, "other": other["seconds"]}
    row(f"notebook of {gib} GiB, idle", f"{holding - idle} MiB, then {left - idle} MiB by nvidia-smi; woke in {got['wake_s']} s, {got['wrong']} wrong",
        "context only, 0 wrong", left - idle < 2000 and got["wrong"] == 0)


SECTIONS = {"doctor": doctor, "figures": figures, "demo": demo, "torch": torch, "notebook": notebook, "mixed": mixed, "step": step}


def main():
    run(["nvcc", "-O2", "-arch=sm_90", "-o", WORK / "probe", HERE / "probe.cu", "-lcuda"], timeout=120)
    chosen = [name for name in args.only.split(",") if name] or list(SECTIONS)
    failed = []
    for name in chosen:
        began = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            stop_daemon() if name == "demo" else daemon()
            SECTIONS[name]()
        except (RuntimeError, AssertionError, KeyError, ValueError, IndexError, subprocess.TimeoutExpired, statistics.StatisticsError) as error:
            failed.append(name)
            row(name, f"FAILED: {type(error).__name__} {error}"[:1500], "", False)
        print(f"   ({time.monotonic() - began:.0f} s)", flush=True)
    RESULTS["table"] = TABLE
    (args.out / "results.json").write_text(json.dumps(RESULTS, indent=1))
    print("\n" + run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]).strip())
    width = max(len(str(t[0])) for t in TABLE) if TABLE else 10
    for what, value, target, ok in TABLE:
        print(f"{what:<{width}}  {str(value)[:300]}  {target}  {ok}")
    return 1 if failed or any(t[3] == "MISSED" for t in TABLE) else 0


try:
    code = main()
finally:
    for child in reversed(CHILDREN):
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
    shutil.rmtree(WORK, ignore_errors=True)
sys.exit(code)
