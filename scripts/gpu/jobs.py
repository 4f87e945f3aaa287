"""Whole jobs that do not fit together: the demo, two trainings, a training beside CuPy, an idle notebook."""

import subprocess
import time

import kit
from kit import RESULTS, last_json, python, row, run, start, under

PATIENCE = 240  # seconds for two jobs that take turns
ALONE = {}


def demo():
    size = "75Gi" if kit.args.quick else "100Gi"
    text = run([kit.EBB, "demo", "--gpu", "real", "--bytes-per-job", size, "--json"], kit.UNDER, timeout=320)
    result = last_json(text)
    RESULTS["demo"] = result
    good = result["finished"] == 2 and result["mismatches"] == 0 and result["oom_without_ebb"]
    row(f"demo, 2 jobs of {size}", f"{result['finished']} finished, {result['mismatches']} wrong, {result['releases']} releases, "
        f"{result['out_bytes_per_s'] / 1e9:.1f} / {result['in_bytes_per_s'] / 1e9:.1f} GB/s", "2, 0", good)


def alone(command):
    """What a job gives without ebb, once a run."""
    key = " ".join(str(c) for c in command)
    if key not in ALONE:
        kit.say(f"alone: {key[-80:]}")
        ALONE[key] = last_json(run(command, timeout=200))
    return ALONE[key]


def pair(name, first, second, by_itself):
    """Two jobs that do not fit together, started together; results equal to those alone."""
    began = time.monotonic()
    before = kit.totals()
    both = [start(under(c, "--name", f"{name}{i}"), kit.UNDER, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i, c in enumerate((first, second))]
    done = []
    for job in both:
        try:
            out, err = job.communicate(timeout=kit.bounded(began + PATIENCE - time.monotonic()))
        except subprocess.TimeoutExpired:
            kit.autopsy()
            for other in both:
                kit.end(other)
            raise
        if job.returncode != 0:
            kit.note(f"--- {name}: {err[-8000:]}")
            raise RuntimeError(f"{name} ended with {job.returncode}: {err[-1000:]}")
        done.append((last_json(out), round(time.monotonic() - began, 1)))
    same = all(got["sha256"] == want["sha256"] and got.get("losses") == want.get("losses") and got.get("sums") == want.get("sums")
               for (got, _), want in zip(done, by_itself))
    seconds = [d[0]["seconds"] for d in done]
    apart = [a["seconds"] for a in by_itself]
    after = kit.totals()
    moved = after["out_bytes"] - before["out_bytes"]
    RESULTS[name] = {"alone_s": apart, "together_s": seconds, "same": same, "totals": after, "moved": moved}
    row(f"{name}: two together", f"{seconds[0]:.0f} and {seconds[1]:.0f} s (alone {apart[0]:.0f}, {apart[1]:.0f}), "
        f"{after['releases'] - before['releases']} releases, {moved / 1e9:.0f} GB out, results {'equal' if same else 'DIFFER'}", "equal", same)
    # Nobody starves: neither needs more than both one after the other, with a third for the copying.
    most = max(seconds)
    row(f"{name}: nobody starves", f"the slower one took {most / sum(apart):.2f} of both in turn", "<= 1.34", most <= 1.34 * sum(apart) + 5)


def training(seed):
    return python("train.py", "--gib", "20" if kit.args.quick else "90", "--steps", "50", "--seed", seed)


def torch():
    both = [training("1"), training("2")]
    pair("torch+torch", *both, [alone(job) for job in both])


def mixed():
    # As many steps as make it last about as long as the training: otherwise it is gone before that one has its memory.
    other = python("cupy_job.py", "--gib", "20" if kit.args.quick else "90", "--steps", "60" if kit.args.quick else "220")
    both = [training("1"), other]
    pair("torch+cupy", *both, [alone(job) for job in both])


def notebook():
    gib = 10 if kit.args.quick else 60
    idle = kit.smi_used_mib()
    child = start(under(python("notebook.py", "--gib", gib), "--name", "notebook", "--idle-release", "3s"),
                  kit.UNDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line = child.stdout.readline().strip()
    if line != "idle":
        raise RuntimeError(f"the notebook said {line!r}: {child.communicate(timeout=20)[1][-1000:]}")
    holding = kit.smi_used_mib()
    began = time.monotonic()
    while (remains := kit.smi_used_mib()) - idle > 2000 and time.monotonic() < began + 90:
        time.sleep(0.2)
    went = time.monotonic() - began
    kit.say(f"{holding - idle} MiB, {remains - idle} MiB after {went:.1f} s")
    other = last_json(run(under(python("cupy_job.py", "--gib", 20 if kit.args.quick else 120, "--steps", "2"), "--name", "other"), kit.UNDER, 120))
    out, err = child.communicate("\n", timeout=kit.bounded(120))
    if child.returncode != 0:
        raise RuntimeError(err[-1500:])
    got = last_json(out)
    RESULTS["notebook"] = {"holding_mib": holding - idle, "left_mib": remains - idle, "went_s": went, **got, "other": other["seconds"]}
    row(f"notebook of {gib} GiB, idle", f"{holding - idle} MiB, then {remains - idle} MiB by nvidia-smi after {went:.1f} s; "
        f"{other['gib']:.0f} GiB beside it in {other['seconds']} s; woke in {got['wake_s']} s, {got['wrong']} wrong",
        "context only, 0 wrong", remains - idle < 2000 and got["wrong"] == 0)
