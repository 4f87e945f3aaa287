"""Memory that goes between processes, and what a program is told of the card."""

import subprocess

import kit
from frameworks import Case, TORCH, once, verdict
from kit import GIB, MIB, RESULTS, installed, last_json, python, row, run, start, under


def share():
    try:
        looks()
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        if isinstance(error, kit.OutOfTime):
            raise
        row("what a task sees", f"FAILED: {type(error).__name__} {error}"[:400], "limit, own process", False)
    if not installed("torch"):
        row("sharing", "not run: no PyTorch here")
        return
    results = RESULTS["share"] = {}

    def work(name, env, number):
        # With cudaMallocAsync PyTorch cannot send tensors through queues, with or without ebb.
        works = ["events", "loader"] if "cudaMallocAsync" in name else ["queues", "events", "loader"]
        case = Case(f"sharing, {name}", python("share_work.py"), works, env, seconds=4)
        result = results[name] = once(case, number)
        none = {"error": "no result", "steps": 0}
        words, fines = [], []
        for piece in case.works:
            word, fine = verdict(*(result[which].get(piece, none) for which in ("plain", "again", "ebb")))
            words.append(f"{piece} {word}")
            fines.append(fine)
        counted = result["counted"]
        row(case.name, f"{', '.join(words)}; {counted['releases']} releases, {sum(counted['refused'].values())} refused", "equal",
            False if False in fines else True if True in fines else None)

    done = kit.together([(name, lambda name=name, env=env, number=number: work(name, env, 100 + number))
                         for number, (name, env) in enumerate(TORCH.items())], 3)
    for name, error in done.items():
        if isinstance(error, Exception):
            row(f"sharing, {name}", f"FAILED: {type(error).__name__} {error}"[:300], "equal", False)


def looks():
    """A task with a limit of 8 GiB that holds 1, beside another that holds 3, sees itself only."""
    if not (installed("cuda.bindings") or installed("cuda")):
        row("what a task sees", "not run: no cuda-bindings here")
        return
    scale = 1 if not kit.args.sim else 16
    other = start(under([kit.WORK / "calls", "hold", 3 * GIB // scale], "--name", "beside"), kit.UNDER,
                  stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        if other.stdout.readline().strip() != "ready":
            raise RuntimeError("the program beside it did not start")
        limit = 8 * GIB // scale
        seen = last_json(run(under(python("sees.py", GIB // scale), "--name", "looker", "--limit", str(limit)), kit.UNDER, 60))
    finally:
        kit.end(other)
    RESULTS["sees"] = seen
    wrong = []

    def expect(what, good):
        if not good:
            wrong.append(what)

    context = 1200 * MIB
    expect("driver total", seen["driver"]["total"] == limit)
    expect("driver free", limit - GIB // scale - context <= seen["driver"]["free"] <= limit - GIB // scale)
    for form in ("nvml", "nvml_v2", "nvitop"):
        if form in seen:
            expect(f"{form} total {seen[form]['total']}", seen[form]["total"] == limit)
            expect(f"{form} used {seen[form]['used']}", GIB // scale <= seen[form]["used"] <= GIB // scale + context)
    if "nvml_processes" in seen:
        expect(f"NVML's processes {seen['nvml_processes']}", [p[0] for p in seen["nvml_processes"]] == [seen["pid"]])
    if "nvitop" in seen:
        expect(f"nvitop's processes {seen['nvitop']['processes']}", seen["nvitop"]["processes"] == [seen["pid"]])
    if "smi" in seen:
        figures = seen["smi"].split(",")
        expect(f"nvidia-smi {seen['smi']}", figures[0].strip() == str(limit // MIB) and float(figures[1]) <= (GIB + context) / MIB)
        rows = [line.split(",")[0].strip() for line in seen["smi_processes"].splitlines() if line.strip()]
        expect(f"nvidia-smi's processes {seen['smi_processes']!r}", rows == [str(seen["pid"])])
    for form in ("nvml_error", "nvitop_error"):
        expect(f"{form} {seen.get(form)}", form not in seen)
    asked = [form for form in ("driver", "nvml", "nvml_v2", "smi", "nvitop") if form in seen]
    row("what a task sees", f"{', '.join(asked)}: " + ("its own world" if not wrong else "WRONG: " + "; ".join(wrong)), "limit, own process", not wrong)
