"""Frameworks under a release every 200 ms: the same bits as plain, where plain equals itself.

Each case runs plain for some seconds, then again plain and under ebb with the same number of steps. While it runs under
ebb, its memory is taken and given back all the time; how often that really happened is counted in `ebb ps`.
"""

import os
import subprocess
import threading
import time

import kit
from kit import RESULTS, installed, python, row, say, under

TORCH = {
    "torch": {},
    "torch expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "torch cudaMallocAsync": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
}
JAX = {
    # Under ebb a limit makes three quarters of the card small enough; plain, a fraction does.
    "jax": ({"XLA_CLIENT_MEM_FRACTION": "0.016"}, {}, ["--limit", "4Gi"]),
    "jax platform": ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, None, []),
    "jax cuda_async": ({"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, None, []),
    "jax TF cuda_malloc_async": ({"TF_GPU_ALLOCATOR": "cuda_malloc_async", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, None, []),
    "jax vmm": ({"XLA_PYTHON_CLIENT_ALLOCATOR": "vmm", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, None, []),
}


class Case:
    """A program and its pieces of work."""

    def __init__(self, name, command, works, plain_env=None, ebb_env=None, flags=(), seconds=3):
        self.name, self.command, self.works, self.seconds = name, command, works, seconds
        self.plain_env = plain_env or {}
        self.ebb_env = self.plain_env if ebb_env is None else ebb_env
        self.flags = list(flags)


def cases():
    found = []
    if kit.args.sim:  # whose cards run no framework's kernels
        return [Case(f"driver {i}", python("driver_work.py"), ["copies", "fails"]) for i in range(2)]
    if installed("torch"):
        for name, env in TORCH.items():
            found.append(Case(f"{name}, compile", python("torch_work.py"), ["compile", "reduce-overhead"], env))
        for name, env in TORCH.items():
            found.append(Case(name, python("torch_work.py"), ["train", "convnet", "infer", "graphs"], env))
        if installed("triton"):
            found.append(Case("triton", python("triton_work.py"), ["kernels"], seconds=4))
    if installed("jax"):
        for name, (plain, ours, flags) in JAX.items():
            found.append(Case(name, python("jax_work.py"), ["train", "infer"], plain, ours, flags))
    if installed("cupy"):
        for pool in ("default", "async", "none"):
            found.append(Case(f"cupy {pool} pool", python("cupy_work.py", "--pool", pool), ["arrays", "linear"]))
    if installed("numba"):
        found.append(Case("numba", python("numba_work.py"), ["kernels"], seconds=4))
    return found


def lines_of(command, env, works, timeout):
    """The lines of all works; a process that dies of one is followed by another for the rest."""
    got, rest = {}, list(works)
    until = time.monotonic() + timeout
    while rest:
        words = [*command, "--work", ",".join(rest)]
        child = kit.start(words, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = child.communicate(timeout=kit.bounded(until - time.monotonic()))
            status = child.returncode
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            out, err = child.communicate()
            status = "too slow"
        found = {line["work"]: line for line in kit.json_lines(out) if "work" in line}
        got |= found
        rest = [work for work in rest if work not in got]
        if status == "too slow":
            kit.note(f"--- {' '.join(map(str, words))}: {status}\n{out[-1000:]}\n{err[-6000:]}")
            got |= {work: {"work": work, "error": "too slow", "steps": 0} for work in rest}
            break
        if status != 0 or rest or any("error" in line for line in found.values()):
            kit.note(f"--- {' '.join(map(str, words))}: {status}\n{out[-1000:]}\n{err[-6000:]}")
        if rest and not found:  # the first of them is what it died of
            tail = err.strip().splitlines()[-1:] or [""]
            culprit = rest.pop(0)
            got[culprit] = {"work": culprit, "error": f"died with {status}: {tail[0][:200]}", "steps": 0}
    return got


def once(case, number):
    """All three runs of a case."""
    seconds = 1 if kit.args.quick else case.seconds
    shared = {"TORCHINDUCTOR_CACHE_DIR": str(kit.WORK / f"inductor{number}"), "TRITON_CACHE_DIR": str(kit.WORK / f"triton{number}"),
              "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    plain_env = {**kit.BASE, **shared, **case.plain_env}
    timeout = 170
    first = lines_of([*case.command, "--seconds", seconds], plain_env, case.works, timeout)
    steps = ",".join(f"{work}={line['steps']}" for work, line in first.items() if line.get("steps"))
    say(f"{case.name}: plain did {steps}")
    task = f"fw{number}"
    second = {}
    again = threading.Thread(target=lambda: second.update(lines_of([*case.command, "--steps", steps], plain_env, case.works, timeout)))
    again.start()
    ours_env = {**kit.UNDER, **shared, **case.ebb_env}
    thread = kit.Releases(task)
    thread.start()
    try:
        ours = lines_of(under([*case.command, "--steps", steps], "--name", task, *case.flags), ours_env, case.works, timeout)
    finally:
        counted = thread.stop()
        again.join()
    return {"plain": first, "again": second, "ebb": ours, "counted": counted}


def verdict(plain, again, ours):
    """A word, and whether it is as it must be (None: nothing can be said)."""
    if "error" in plain and "error" in again:
        if "error" in ours:
            return ("not here", None) if ours["error"].split(":")[0] == plain["error"].split(":")[0] else ("another error", False)
        return "works only under ebb", None
    if "error" in plain or "error" in again:
        return "plain is not sure", None
    if "error" in ours:
        return f"FAILED under ebb: {ours['error'][:120]}", False
    if plain.get("sha256") != again.get("sha256"):
        return ("plain differs from itself", None)
    return ("equal", True) if ours.get("sha256") == plain["sha256"] else ("DIFFERS", False)


def frameworks():
    results = RESULTS["frameworks"] = {}
    print_lock = threading.Lock()

    def work(case, number):
        result = once(case, number)
        with print_lock:
            results[case.name] = result
            words, fines = [], []
            for name in case.works:
                none = {"error": "no result", "steps": 0}
                word, fine = verdict(*(result[which].get(name, none) for which in ("plain", "again", "ebb")))
                words.append(f"{name} {word}")
                fines.append(fine)
            good = False if False in fines else True if True in fines else None
            counted = result["counted"]
            slower = sum(line.get("seconds", 0) for line in result["ebb"].values())
            refused = sum(counted["refused"].values())
            if good and not counted["releases"] and not all("error" in line for line in result["plain"].values()):
                words.append("NOTHING WAS RELEASED")
                good = False
            row(case.name, f"{', '.join(words)}; {counted['releases']} releases of {counted['bytes'] / 1e6:.0f} MB in {slower:.0f} s, {counted['pause_ms']:.0f} ms each"
                + (f", {refused} refused" if refused else "") + (f", {counted['trouble']}" if counted.get("trouble") else ""), "equal", good)

    found = cases()
    say(f"{len(found)} cases, 6 at a time")
    done = kit.together([(case.name, lambda case=case, number=number: work(case, number)) for number, case in enumerate(found)], 6)
    broken = {name: error for name, error in done.items() if isinstance(error, Exception)}
    for name, error in broken.items():
        row(name, f"FAILED: {type(error).__name__} {error}"[:400], "equal", False)
    counts = [result["counted"]["releases"] for result in results.values()]
    row("frameworks", f"{len(results)} of {len(found)} cases done, {sum(counts)} releases in all, {min(counts, default=0)} to {max(counts, default=0)} a case")
