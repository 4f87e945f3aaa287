"""What ebb costs when memory suffices: two warm processes a framework, one plain and one under ebb, taking turns.

Both are alive the whole time, so that start-up costs are no part of it; only one computes at a time. Each pair is one
window of the same number of steps on either side, in the order ABBA. The ratio of a pair is what is judged.
"""

import json
import statistics
import subprocess

import kit
from kit import RESULTS, installed, python, row, say, start, under

SIDES = {
    "torch": ("torch", {}),
    "torch expandable": ("torch", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "torch cudaMallocAsync": ("torch", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    "torch graphs": ("torch-graphs", {}),
    "jax": ("jax", {"XLA_CLIENT_MEM_FRACTION": "0.03"}),
    "cupy": ("cupy", {}),
    "cupy async pool": ("cupy-async", {}),
    "numba": ("numba", {}),
    "triton": ("triton", {}),
}


class Side:
    """A warm process that computes when told to."""

    def __init__(self, kind, env, ours):
        command = python("window.py", kind)
        errors = open(kit.WORK / f"window-{kind}-{'ebb' if ours else 'plain'}.err", "w+")
        self.errors = errors
        self.child = start(under(command, "--name", f"w-{kind}", "--idle-release", "off") if ours else command,
                           {**(kit.UNDER if ours else kit.BASE), **env, "TRITON_CACHE_DIR": str(kit.WORK / "triton-w")},
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)

    def line(self, key):
        while line := self.child.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)[key]
        self.errors.seek(0)
        text = self.errors.read()
        kit.note(f"--- window ended\n{text[-6000:]}")
        raise RuntimeError(f"ended with {self.child.wait(10)}: {text.strip()[-400:]}")

    def window(self, steps):
        self.child.stdin.write(f"{steps}\n")
        self.child.stdin.flush()
        return self.line("seconds")


def spread(ratios):
    """Median, and the bounds between which the middle half lies."""
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 2 else [min(ratios), statistics.median(ratios), max(ratios)]
    return statistics.median(ratios), quarters[0], quarters[2]


def measure(name, plain, ours, window):
    guess = max(1, round(window / 8 / plain.step))
    step = plain.window(guess) / guess  # the first figure was taken while others started up
    steps = max(1, round(window / step))
    ours.window(max(1, steps // 4))
    ratios, times = [], []
    for i in range(2 if kit.args.quick else kit.args.pairs):
        order = (plain, ours) if i % 2 == 0 else (ours, plain)
        took = {side: side.window(steps) for side in order}
        ratios.append(took[ours] / took[plain])
        times.append((took[plain], took[ours]))
        RESULTS.setdefault("throughput", {})[name] = {"steps": steps, "pairs": times, "ratios": ratios}
    middle, low, high = spread(ratios)
    row(f"step time, {name}", f"x {middle:.4f} (middle half {low:.4f} to {high:.4f}, {len(ratios)} pairs of {steps} steps, "
        f"{1e3 * statistics.median(t[0] for t in times) / steps:.3f} ms plain)", "<= 1.01", middle <= 1.01)


def throughput():
    window = 0.4 if kit.args.quick else kit.args.window
    if kit.args.sim:
        SIDES.clear()
        SIDES["driver"] = ("driver", {})
    chosen = {name: side for name, side in SIDES.items() if kit.args.sim or installed(side[0].split("-")[0])}
    per = 2 * kit.args.pairs * window + 1
    alive = {}

    def begin(name):
        kind, env = chosen[name]
        alive[name] = (Side(kind, env, False), Side(kind, env, True))

    # All of them first: a process that starts takes processors, and would be seen in the figures of another.
    for name in chosen:
        begin(name)
    say(f"{len(alive)} pairs of processes start; {per:.0f} s each")
    for name in list(alive):
        try:
            for side in alive[name]:
                side.step = side.line("ready")
        except (RuntimeError, OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            if isinstance(error, kit.OutOfTime):
                raise
            row(f"step time, {name}", f"FAILED: {error}"[:400], "<= 1.01", False)
            for side in alive.pop(name):
                kit.end(side.child)
    say("all are warm")
    for name, (plain, ours) in alive.items():
        try:
            if kit.left() < per:
                row(f"step time, {name}", f"not run: {kit.left():.0f} s are left")
                continue
            measure(name, plain, ours, window)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            if isinstance(error, kit.OutOfTime):
                raise
            row(f"step time, {name}", f"FAILED: {error}"[:400], "<= 1.01", False)
        finally:
            kit.end(plain.child)
            kit.end(ours.child)
