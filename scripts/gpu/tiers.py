"""How fast memory leaves and returns, tier by tier: what `ebb bench` measures, each beside its limit in the same run."""

import json
import subprocess

import kit
from kit import GIB, RESULTS, row

# what: (arguments for the full size, for a quick look, what its ratio has to reach, or the largest value that is good)
BENCHES = {
    "release restore": (["--bytes", "16Gi"], ["--bytes", "2Gi"], {"release": 0.95, "restore": 0.95}, {}),
    "release restore, 64 GiB": (["--bytes", "64Gi", "--rounds", "3"], None, {"release": 0.95, "restore": 0.95}, {}),
    "clean": (["--bytes", "64Gi", "--rounds", "5"], ["--bytes", "4Gi"], {}, {"clean, time": 0.070}),
    "handover": (["--bytes", "48Gi", "--rounds", "2"], ["--bytes", "4Gi"], {"handover": 0.93}, {}),
    "hibernate": (["--bytes", "16Gi", "--rounds", "3"], ["--bytes", "2Gi"], {}, {"hibernate": 0.75, "wake": 0.65}),
    "disk": (["WORK", "--bytes", "8Gi"], ["WORK", "--bytes", "1Gi"], {"spill": 0.9, "load": 0.9}, {}),
}


# With two cards, and only if asked for.
PEER = {"peer": (["--bytes", "32Gi", "--rounds", "5"], ["--bytes", "4Gi", "--rounds", "3"], {"peer out": 0.93, "peer in": 0.93}, {})}


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
        return f"{value:.3f} s" if value >= 0.01 else f"{1e6 * value:.2f} us"

    return f"{one(figure['ebb'])}, {figure['against']} {one(figure['limit'])}, ratio {figure['ratio']:.3f}"


def tiers(only="", benches=BENCHES):
    for name, (full, quick, ratios, most) in benches.items():
        flags = quick if kit.args.quick else full
        if flags is None or only and only not in name:
            continue
        words = name.split(",")[0].split()
        flags = [kit.WORK if flag == "WORK" else flag for flag in flags]
        command = [kit.EBB, "bench", *words, *flags, "--json"]
        try:
            done = subprocess.run([str(word) for word in command], env=kit.UNDER, capture_output=True, text=True, timeout=kit.bounded(170))
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
            row(f"{what} {bytes_ / GIB:.0f} GiB" if bytes_ else what, shown(figure), target, good)
        if report.get("mismatches"):
            row(f"bench {name}", f"{report['mismatches']} wrong words", "0", False)
