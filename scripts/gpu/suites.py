"""Public test suites that the machine carries, with and without ebb: the same result of every test.

numba-cuda's own tests ship in its wheel: those of the driver, of its memory management, and as many of the language's as
there is time for. JAX ships a collection of all its primitives. A test whose result differs is run again both ways, alone:
what differs then too is a difference.
"""

import os
import subprocess
import time
from pathlib import Path

import kit
from kit import RESULTS, installed, python, row, run, say, under

# Managed memory of more than the card has can hang the GPU itself, not only the program; the suite skips that test, and so
# does this. The other modules named here measure time or look for tools.
NOT_RUN = {"test_profiler"}
FIRST = "cudadrv", "nrt", "cudapy", "nocuda"


def numba_modules():
    """Names of the test modules, the driver's first."""
    folder = run([*python("find_tests.py")], timeout=60).strip().splitlines()[-1]
    found = []
    for part in FIRST:
        for path in sorted(Path(folder, part).glob("test_*.py")):
            if path.stem not in NOT_RUN:
                found.append((part, f"numba.cuda.tests.{part}.{path.stem}"))
    return found


def results_of(command, ours, more, timeout):
    """{test: result} of a program's lines; a test that began and did not end is named so."""
    child = kit.start(under(command) if ours else command, {**(kit.UNDER if ours else kit.BASE), **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=kit.WORK)
    try:
        out, err = child.communicate(timeout=kit.bounded(timeout))
        status = child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        out, err = child.communicate()
        status = "too slow"
    found, begun = {}, None
    for line in kit.json_lines(out):
        if "begin" in line:
            begun = line["begin"]
        elif "cut" in line:
            found["(cut)"] = "cut"
        elif "test" in line:
            found.setdefault(line["test"], line["result"])
            if line.get("result") in ("failed", "error"):
                kit.note(f"    {'ebb' if ours else 'plain'} {line['test']} {line['result']}: {line.get('why', '')}")
            begun = None
    if status != 0:
        if begun:
            found[begun] = f"did not end ({status})"
        kit.note(f"--- {' '.join(map(str, command))}: {status}\n{err[-3000:]}")
        if not found:
            found["(the whole module)"] = f"nothing ran ({status})"
    return found


def both(command, more, timeout):
    return results_of(command, False, more, timeout), results_of(command, True, more, timeout)


def differences(plain, ours):
    # Of a program that ended because its time was over, only what both ways reached says anything.
    tests = plain.keys() & ours.keys() if "(cut)" in plain or "(cut)" in ours else plain.keys() | ours.keys()
    return {test: (plain.get(test, "absent"), ours.get(test, "absent")) for test in tests if plain.get(test) != ours.get(test)}


def compare(name, commands, width, timeout, until, more=None):
    """`commands`: {module: command}. Runs them both ways, `width` modules at a time, until the time is over."""
    results = {}

    def module(key, command):
        if time.monotonic() > until:
            return
        results[key] = both(command, more or {}, timeout)

    done = kit.together([(key, lambda key=key, command=command: module(key, command)) for key, command in commands.items()], width)
    for key, error in done.items():
        if isinstance(error, Exception):
            kit.note(f"--- {name}, {key}: {error}")
    differ = {key: found for key, (plain, ours) in results.items() if (found := differences(plain, ours))}
    say(f"{name}: {len(results)} of {len(commands)} modules; {sum(map(len, differ.values()))} results differ at first")
    lasting = {}
    for key, found in differ.items():
        if kit.left() < 30 or time.monotonic() > until + 45:
            lasting |= {f"{key} {test} (not tried again)": pair for test, pair in found.items()}
            continue
        plain, ours = both(commands[key], more or {}, min(timeout, kit.left() - 10))
        again = differences(plain, ours)
        lasting |= {test: again[test] for test in found if test in again}
    counts = {}
    for _, ours in results.values():
        for word in ours.values():
            word = word if word in ("passed", "failed", "error", "skipped") else "failed" if "error" in word or "did not" in word else "passed"
            counts[word] = counts.get(word, 0) + 1
    RESULTS.setdefault("suites", {})[name] = {
        "modules": len(results), "counts": counts, "differ_at_first": differ, "differ": lasting,
        "not_passed_plain": {key: {t: r for t, r in plain.items() if r in ("failed", "error") or "did not" in r} for key, (plain, _) in results.items()},
    }
    for test, (was, is_now) in list(lasting.items())[:30]:
        say(f"differs: {test}: {was} plain, {is_now} under ebb")
    words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    row(name, f"{len(results)} of {len(commands)} modules, under ebb {words}; {len(lasting)} differ from plain", "0 differ",
        not lasting and counts.get("passed", 0) > 0)


def suites():
    began, limit = time.monotonic(), min(kit.left(), 900)
    if installed("numba") and installed("numba_cuda"):
        modules = numba_modules()
        driver = {name: python("run_tests.py", name) for part, name in modules if part in ("cudadrv", "nrt")}
        rest = {name: python("run_tests.py", name) for part, name in modules if part not in ("cudadrv", "nrt")}
        compare("numba-cuda, driver and memory", driver, 6, 90, began + 0.4 * limit)
        if not kit.args.quick:
            compare("numba-cuda, language", rest, 10, 90, began + 0.65 * limit)
    else:
        row("numba-cuda's tests", "not run: it is not here")
    if installed("jax"):
        parts, stride = (2, 80) if kit.args.quick else (8, 48)
        seconds = 15 if kit.args.quick else max(15, (kit.left() - 50) / 6)
        commands = {f"part {part}": python("jax_harnesses.py", part, stride, f"{seconds:.0f}") for part in range(parts)}
        compare("JAX's primitives", commands, 5, 4 * seconds, began + 0.9 * limit, {"XLA_CLIENT_MEM_FRACTION": "0.04"})
