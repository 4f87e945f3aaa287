#!/usr/bin/env python3
"""How much later programs start under ebb: one at a time, and a hundred at once.

    cargo build --release && scripts/startup.py [--target target/release] [--at-once 100] [--rounds 5] [--json]

A program here is `gpu-script`: it loads the driver, makes a context, loads a module, allocates, and ends. By default the card is the simulated
one, whose calls cost next to nothing: what is seen is what ebb adds. `--real` uses the machine's driver. Each round runs both ways, in
turns; figures are medians over the rounds. The last line of `--json` is one object.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

SAY = b"open 0\nalloc m 4096\nfree m\n"


class Stage:
    def __init__(self, target, real, at_once):
        self.target = target
        base = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ebb-start", dir=base))
        for name in ("sim", "run", "state", "lib"):
            (self.folder / name).mkdir()
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("EBB_") and k not in ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES")}
        if not real:
            for built, name in (("libsimcuda.so", "libcuda.so.1"), ("libsimnvml.so", "libnvidia-ml.so.1")):
                (self.folder / "lib" / name).symlink_to((target / built).resolve())
            self.env.update(
                LD_LIBRARY_PATH=str(self.folder / "lib"), EBB_SIM_DIR=str(self.folder / "sim"), EBB_SIM_MEMORY="4Gi",
                EBB_SIM_CONTEXT_BYTES="4Mi",
            )
        self.env.update(EBB_SOCKET_DIR=str(self.folder / "run"), EBB_LIB=str(target / "libebb.so"))
        config = self.folder / "ebb.toml"
        config.write_text(f'state_dir = "{self.folder / "state"}"\n[arena]\nbudget = "256Mi"\n')
        self.daemon = subprocess.Popen(
            [target / "ebb", "daemon", "--config", config, "--socket-dir", self.folder / "run"],
            env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        while subprocess.run([target / "ebb", "ps"], env=self.env, capture_output=True).returncode:
            if time.monotonic() > deadline or self.daemon.poll() is not None:
                sys.exit("the daemon does not start")
            time.sleep(0.02)

    def run(self, under, count):
        """Seconds from the start of the first to the end of the last, and the failures."""
        program = [str(self.target / "gpu-script")]
        if under:
            program = [str(self.target / "ebb"), "run", "--"] + program
        began = time.monotonic()
        children = []
        for _ in range(count):
            child = subprocess.Popen(program, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            child.stdin.write(SAY)
            child.stdin.close()
            children.append(child)
        failed = 0
        for child in children:
            said = child.stdout.read()
            if child.wait() or b"err" in said or said.count(b"ok") != 3:
                failed += 1
        return time.monotonic() - began, failed

    def close(self):
        self.daemon.terminate()
        try:
            self.daemon.wait(10)
        except subprocess.TimeoutExpired:
            self.daemon.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("--target", type=pathlib.Path, default=root / "target/release")
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in ("ebb", "libebb.so", "gpu-script"):
        if not (arguments.target / name).exists():
            sys.exit(f"{arguments.target / name} is missing: cargo build --release --workspace")
    stage = Stage(arguments.target.resolve(), arguments.real, arguments.at_once)
    rows, failed = [], 0
    try:
        stage.run(False, 1), stage.run(True, 1)
        for count in (1, arguments.at_once):
            times = {False: [], True: []}
            for _ in range(arguments.rounds * (4 if count == 1 else 1)):
                for under in (False, True):
                    seconds, bad = stage.run(under, count)
                    times[under].append(seconds)
                    failed += bad
            plain, ebb = (statistics.median(times[under]) * 1000 for under in (False, True))
            rows.append({"programs": count, "plain_ms": plain, "ebb_ms": ebb, "later_ms": ebb - plain, "later_each_ms": (ebb - plain) / count, "ratio": ebb / plain})
    finally:
        stage.close()
    if arguments.json:
        print(json.dumps({"cpus": os.cpu_count(), "failed": failed, "rows": rows}))
    else:
        print(f"{'programs':>8} {'plain ms':>9} {'ebb ms':>9} {'later ms':>9} {'each ms':>8} {'ratio':>6}")
        for row in rows:
            print("{programs:>8} {plain_ms:>9.1f} {ebb_ms:>9.1f} {later_ms:>9.1f} {later_each_ms:>8.2f} {ratio:>6.2f}".format(**row))
    if failed:
        sys.exit(f"{failed} programs failed")


if __name__ == "__main__":
    main()
