"""The conformance suite, in all its ways, on this card."""

import json
import subprocess

import kit
from kit import RESULTS, row


def conformance():
    program = kit.EBB.parent / "ebb-conformance"
    if not program.exists():
        row("conformance", f"not run: there is no {program.name} beside ebb")
        return
    kit.stop_daemon()  # it brings its own
    report = kit.WORK / "conformance.json"
    words = [program, "--json", "--out", report, "--jobs", 6, "--limit", 30, "--verbose", "--ebb", kit.EBB, "--library", kit.LIB]
    if kit.args.sim:
        words.append("--sim")
    with open(kit.args.out / "conformance.log", "w") as log:
        child = kit.start(words, kit.UNDER, stdout=log, stderr=log)
        try:
            child.wait(kit.bounded(290))
        except subprocess.TimeoutExpired:
            kit.end(child)
            raise RuntimeError("the suite took more than its time; conformance.log says where it was") from None
    if not report.exists():
        raise RuntimeError(f"status {child.returncode}: {(kit.args.out / 'conformance.log').read_text()[-600:]}")
    found = json.loads(report.read_text())
    (kit.args.out / "conformance.json").write_text(json.dumps(found))
    RESULTS["conformance"] = {key: found.get(key) for key in ("behaviours", "totals", "groups", "evictions", "faults")}

    def cell(counts):
        known = f"(+{counts['known']})" if counts.get("known") else ""
        return f"{counts['passed']}/{counts['failed']}{known}/{counts['skipped']}"

    for name, ways in found["groups"].items():
        kit.say(f"{name:<24} " + "  ".join(f"{way} {cell(counts)}" for way, counts in ways.items()))
    for fault in found["faults"][:40]:
        kit.say(f"fault: {fault[:220]}")
    ways = "; ".join(f"{way} {cell(counts)}" for way, counts in found["totals"].items())
    row(f"conformance, {found['behaviours']} behaviours", f"passed/failed/skipped: {ways}; {len(found['faults'])} faults", "0 faults", not found["faults"])
