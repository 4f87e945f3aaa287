"""Runs pieces of work and prints one line of JSON for each: its steps and a SHA-256 of its result.

    PROGRAM --work train,infer [--seconds 3 | --steps train=400,infer=1000]

With --seconds it does as many steps as fit; with --steps just those, so that a second run can be compared with a first.
A piece that fails is reported and the next one follows, unless the GPU itself is in an error from which no process recovers.
"""

import argparse
import gc
import hashlib
import json
import os
import sys
import time
import traceback


def options(**more):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", default="")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--steps", default="")
    for name, value in more.items():
        parser.add_argument(f"--{name}", default=value)
    return parser.parse_args()


class Steps:
    """`for i in steps`: so many, or as long as there is time. The clock starts after ten, which compile and warm up."""

    def __init__(self, seconds, count):
        self.seconds, self.count, self.done = seconds, count, 0

    def __iter__(self):
        began = None
        while self.done < self.count if self.count else (self.done % 10 or began is None or time.monotonic() - began < self.seconds):
            yield self.done
            self.done += 1
            if self.done == 10:
                began = time.monotonic()


def digest(arrays):
    """SHA-256 over arrays of NumPy, in order."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(str((array.shape, str(array.dtype))).encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def run_all(works, args):
    """`works`: {name: function(steps) that returns NumPy arrays}."""
    counts = dict(pair.split("=") for pair in args.steps.split(",") if pair)
    chosen = [name for name in args.work.split(",") if name] or list(works)
    for name in chosen:
        began = time.monotonic()
        steps = Steps(args.seconds, int(counts.get(name, 0)))
        line = {"work": name}
        try:
            line["sha256"] = digest(works[name](steps))
        except Exception as error:  # reported, and compared with the plain run's
            traceback.print_exc()
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        line |= {"steps": steps.done, "seconds": round(time.monotonic() - began, 2)}
        print(json.dumps(line), flush=True)
        if any(word in line.get("error", "") for word in ("CUDA error", "illegal", "CUDA_ERROR", "cudaError", "AcceleratorError")):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(70)
        gc.collect()
