"""The conformance suite, in all its ways, on this card. Group by group, so that what was done is kept if time runs out."""

import json
import subprocess

import kit
from kit import RESULTS, row, say

NOTHING = "nothing was evicted in this mode"  # said of a group that has nothing to evict, too


def cell(counts):
    known = f"(+{counts['known']})" if counts.get("known") else ""
    return f"{counts['passed']}/{counts['failed']}{known}/{counts['skipped']}"


def group(program, name, seconds):
    report = kit.WORK / f"conformance-{name}.json"
    words = [program, "--json", "--out", report, "--jobs", 4 if kit.args.sim else 10, "--limit", 30, "--verbose", "--only", f"{name}.*",
             "--ebb", kit.EBB, "--library", kit.LIB]
    if kit.args.sim:
        words.append("--sim")
    with open(kit.args.out / "conformance.log", "a") as log:
        child = kit.start(words, kit.UNDER, stdout=log, stderr=log)
        try:
            child.wait(kit.bounded(seconds))
        except subprocess.TimeoutExpired:
            kit.end(child)
            raise RuntimeError(f"more than {seconds:.0f} s") from None
    if not report.exists():
        raise RuntimeError(f"status {child.returncode}: {(kit.args.out / 'conformance.log').read_text()[-400:]}")
    return json.loads(report.read_text())


def conformance():
    program = kit.EBB.parent / "ebb-conformance"
    if not program.exists():
        row("conformance", f"not run: there is no {program.name} beside ebb")
        return
    kit.stop_daemon()  # it brings its own
    names = [line.split(".")[0] for line in kit.run([program, "--list"], timeout=20).splitlines() if "." in line.split(" ")[0]]
    groups = list(dict.fromkeys(names))
    totals, faults, evictions, done, results = {}, [], 0, 0, []
    for number, name in enumerate(groups):
        try:
            found = group(program, name, max(20, kit.left() - 3 * (len(groups) - number)))
        except (RuntimeError, ValueError, OSError) as error:
            if isinstance(error, kit.OutOfTime):
                faults.append(f"the time was over before {', '.join(groups[number:])}")
                break
            faults.append(f"group {name}: {error}")
            say(f"{name}: FAILED: {error}")
            continue
        done += found["behaviours"]
        results += found["results"]
        evictions += found["evictions"]["releases"]
        faults += [fault for fault in found["faults"] if NOTHING not in fault]
        for way, counts in found["totals"].items():
            so_far = totals.setdefault(way, {})
            for word, count in counts.items():
                so_far[word] = so_far.get(word, 0) + count
        say(f"{name:<12} " + "  ".join(f"{way} {cell(counts)}" for way, counts in found["totals"].items()))
        RESULTS["conformance"] = {"behaviours": done, "of": len(names), "totals": totals, "evictions": evictions, "faults": faults}
        (kit.args.out / "conformance.json").write_text(json.dumps(results))
        kit.save()
    if not evictions:
        faults.append(f"evicting: {NOTHING}")
    for fault in faults[:25]:
        say(f"fault: {fault[:200]}")
    ways = "; ".join(f"{way} {cell(counts)}" for way, counts in totals.items())
    row(f"conformance, {done} of {len(names)} behaviours", f"passed/failed/skipped: {ways}; {evictions} evictions; {len(faults)} faults",
        "0 faults", not faults and done == len(names))
