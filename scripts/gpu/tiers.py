"""How fast memory leaves and returns, tier by tier: what `ebb bench` measures, each beside its limit in the same run."""

import json
import statistics
import subprocess

import kit
from kit import GIB, RESULTS, row

# what: (arguments for the full size, for a quick look, seconds at most, what its ratio has to reach, the largest value that is good). In the order of their
# worth: what comes after the time is over is named as skipped.
BENCHES = {
    "hibernate": (["--bytes", "16Gi", "--rounds", "3"], ["--bytes", "2Gi"], 120, {}, {"hibernate": 0.75, "wake": 0.65}),
    "handover": (["--bytes", "48Gi", "--rounds", "2"], ["--bytes", "4Gi"], 150, {"handover": 0.93}, {}),
    "clean, 64 GiB": (["--bytes", "64Gi", "--rounds", "5"], None, 120, {}, {"clean, time": 0.070}),
    "release restore, 64 GiB": (["--bytes", "64Gi", "--rounds", "3"], None, 150, {"release": 0.95, "restore": 0.95}, {}),
    "release restore": (["--bytes", "16Gi", "--rounds", "5"], ["--bytes", "2Gi"], 90, {"release": 0.95, "restore": 0.95}, {}),
    "release restore, ring": (["--bytes", "16Gi", "--rounds", "3", "--ring"], ["--bytes", "2Gi", "--ring"], 90, {}, {}),
    "clean, 32 GiB": (["--bytes", "32Gi", "--rounds", "5"], None, 90, {}, {"clean, time": 0.035}),
    "clean": (["--bytes", "16Gi", "--rounds", "5"], ["--bytes", "4Gi"], 60, {}, {"clean, time": 0.0175}),
    "hibernate, ring": (["--bytes", "16Gi", "--rounds", "3", "--ring"], None, 120, {}, {}),
    "replicas": (["--bytes", "48Gi", "--rounds", "3"], ["--bytes", "3Gi"], 150, {"replicas, restore": 0.95}, {}),
    "disk": (["WORK", "--bytes", "8Gi"], ["WORK", "--bytes", "1Gi"], 120, {"spill": 0.9, "load": 0.9}, {}),
    "disk, weights": (["WORK", "--bytes", "2Gi", "--rounds", "2", "--compress", "none,lz4,zstd", "--content", "weights"], None, 90, {}, {}),
    # From 1 GiB up to what is named here, and in 1, 2, 4, ... programs: the second one has small programs, as many as the card has contexts for.
    "curve, sizes": (["--curve", "--bytes", "96Gi", "--rounds", "1"], None, 240, {}, {}),
    "curve, programs": (["--curve", "--bytes", "64Gi", "--rounds", "1"], None, 240, {}, {}),
}


# With two cards, and only if asked for.
PEER = {"peer": (["--bytes", "32Gi", "--rounds", "5"], ["--bytes", "4Gi", "--rounds", "3"], 170, {"peer out": 0.93, "peer in": 0.93}, {})}


def peer():
    if len(kit.listing()["devices"]) < 2:
        row("to another card and back", "NOT RUN: there is one card", "", False)
        return
    kit.stop_daemon()
    tiers(benches=PEER)


def shown(figure):
    def one(value):
        if figure["unit"] == "bytes_per_s":
            return f"{value / 1e9:.1f} GB/s"
        if figure["unit"] == "bytes":
            return f"{value / GIB:.2f} GiB"
        return f"{value:.3f} s" if value >= 0.01 else f"{1e6 * value:.2f} us"

    return f"{one(figure['ebb'])}, {figure['against']} {one(figure['limit'])}, ratio {figure['ratio']:.3f}"


def phases(report):
    """Where the time of a hibernation goes: the medians of its parts, in milliseconds."""
    for of in ("hibernate", "wake"):
        parts = [phase for phase in report.get("phases", []) if phase["of"] == of]
        if parts:
            row(f"{of}, by phases", ", ".join(f"{p['what']} {1e3 * statistics.median(p['samples']):.1f} ms" for p in parts), "", None)


def flat(figures):
    """A byte costs the same whatever the size: the slowest rate over the fastest, of what is not small."""
    for what in ("release", "restore"):
        rates = [f["ebb"] for f in figures if f["what"].split(",")[0] == what and f["bytes"] >= 4 * GIB]
        if len(rates) > 1:
            row(f"curve, {what}: slowest over fastest", f"{min(rates) / max(rates):.2f} of {len(rates)}", ">= 0.9", min(rates) >= 0.9 * max(rates))


def tiers(only="", benches=BENCHES):
    for name, (full, quick, seconds, ratios, most) in benches.items():
        flags = quick if kit.args.quick else full
        if flags is None or only and only not in name:
            continue
        words = [] if "--curve" in flags else name.split(",")[0].split()
        if kit.left() < seconds / 2:
            row(f"bench {name}", f"skipped: {max(0, kit.left()):.0f} s are left", "", None)
            continue
        if "--curve" in flags:
            # It ends by itself, with what it has.
            flags = [*flags, "--within", str(int(0.7 * kit.bounded(seconds)))]
        flags = [kit.WORK if flag == "WORK" else flag for flag in flags]
        command = [kit.EBB, "bench", *words, *flags, "--json"]
        try:
            done = subprocess.run([str(word) for word in command], env=kit.UNDER, capture_output=True, text=True, timeout=kit.bounded(seconds))
        except subprocess.TimeoutExpired:
            row(f"bench {name}", "did not end in time", "", False)
            continue
        kit.note(f"--- {' '.join(map(str, command))}: {done.returncode}\n{done.stderr[-3000:]}")
        if done.returncode != 0:
            row(f"bench {name}", f"FAILED: {done.stderr.strip()[-400:]}", "", False)
            continue
        report = json.loads(done.stdout)
        RESULTS.setdefault("bench", {})[name] = report
        for figure in report["figures"]:
            what, bytes_ = figure["what"], figure["bytes"]
            target, good = "", None
            if what in ratios:
                target, good = f">= {100 * ratios[what]:.0f} %", figure["ratio"] >= ratios[what]
            elif what in most and figure["unit"] == "seconds":
                target, good = f"<= {most[what]} s", figure["ebb"] <= most[what]
            what += ", ring" if "--ring" in flags else ""
            row(f"{what} {bytes_ / GIB:.0f} GiB" if bytes_ else what, shown(figure), target, good)
        phases(report)
        if not words:
            flat(report["figures"])
        if report.get("mismatches"):
            row(f"bench {name}", f"{report['mismatches']} wrong words", "0", False)
