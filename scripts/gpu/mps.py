"""Clients of the driver's multi-process service: the same bits as plain under releases, two of them at once.

The service is a program of the driver that serves its clients through a pipe; it changes no setting of the card. It runs here
in the foreground, with folders of its own, and is asked to quit at the end.
"""

import contextlib
import shutil
import subprocess
import time

import kit
from frameworks import Case, once, verdict
from kit import RESULTS, installed, python, row, start


@contextlib.contextmanager
def service():
    folders = {"CUDA_MPS_PIPE_DIRECTORY": str(kit.WORK / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(kit.WORK / "mps-log")}
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
        (kit.WORK / folder).mkdir()
    env = {**kit.BASE, **folders}
    child = start(["nvidia-cuda-mps-control", "-f"], env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            if child.poll() is not None:
                raise RuntimeError(f"the service ended with {child.returncode}")
            if (kit.WORK / "mps" / "control").exists():
                break
            time.sleep(0.1)
        yield folders
    finally:
        with contextlib.suppress(RuntimeError, OSError, subprocess.TimeoutExpired):
            if child.poll() is None:
                quit_service(env)
                child.wait(10)
        kit.end(child)


def quit_service(env):
    child = start(["nvidia-cuda-mps-control"], env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    child.communicate("quit -t 5\n", timeout=30)


def mps():
    if not shutil.which("nvidia-cuda-mps-control"):
        row("MPS", "not run: the service is not on this machine")
        return
    found = []
    with service() as folders:
        if installed("cupy"):
            found.append(Case("MPS, cupy", python("cupy_work.py"), ["arrays"], folders))
        if installed("torch"):
            found.append(Case("MPS, torch", python("torch_work.py"), ["train"], folders))
        done = kit.together([(case.name, lambda case=case, number=number: once(case, 200 + number)) for number, case in enumerate(found)], 2)
    RESULTS["mps"] = done
    for case in found:
        result = done[case.name]
        if isinstance(result, Exception):
            row(case.name, f"FAILED: {result}"[:300], "equal", False)
            continue
        none = {"error": "no result", "steps": 0}
        word, fine = verdict(*(result[which].get(case.works[0], none) for which in ("plain", "again", "ebb")))
        counted = result["counted"]
        row(case.name, f"{word}; {counted['releases']} releases, {sum(counted['refused'].values())} refused", "equal", fine)
