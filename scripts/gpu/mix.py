"""Six jobs that do not fit together: predicted from what each did alone, and measured.

(a) Each job alone, for a few of its bursts: its *profile*, seconds of a burst and of the pause after it. (b) All of them as
they fit: a job starts when the card has room for what it holds, beside those that run. (c) All of them under ebb, started as
they come, with priorities. Work per hour is the same work over the time that it took. profiles.json and result.json
are written; `ebb simulate --profiles profiles.json --measured result.json` says what the lab makes of the former.

A job is the demo worker (`--serve`), told what to do by a thread: it holds memory, and a burst is so many passes over all of it. It
checks at the end that nobody changed a word.
"""

import json
import subprocess
import threading
import time

import kit
from kit import GIB, MIB, RESULTS, row, say, start, under

# Six jobs: share of the card, what a pass does, seconds of a burst and of the pause after it, pauses between passes in passes (a service
# does not fill the GPU), priority, arrival. A service's bursts come by the clock. On 141 GiB they hold 309 GiB together; they use the whole of one GPU's
# time. The first service has its memory for itself: it is requested and never lent, for bringing 34 GB back takes longer than its burst.
JOBS = [
    {"name": "train-a", "share": 0.52, "op": "rewrite", "busy": 4.0, "pause": 12.0, "gap": 0.0, "priority": "low", "at": 0.0},
    {"name": "train-b", "share": 0.44, "op": "rewrite", "busy": 5.0, "pause": 20.0, "gap": 0.0, "priority": "low", "at": 0.0},
    {"name": "serve-a", "share": 0.24, "op": "check", "busy": 0.5, "pause": 3.5, "gap": 4.0, "priority": "high", "at": 0.0, "clock": True, "own": True},
    {"name": "serve-b", "share": 0.32, "op": "check", "busy": 1.0, "pause": 9.0, "gap": 2.0, "priority": "normal", "at": 2.0, "clock": True},
    {"name": "notebook", "share": 0.40, "op": "rewrite", "busy": 3.0, "pause": 22.0, "gap": 0.0, "priority": "normal", "at": 5.0},
    {"name": "batch", "share": 0.27, "op": "rewrite", "busy": 5.0, "pause": 20.0, "gap": 0.0, "priority": "low", "at": 10.0},
]
PROFILED = 2  # bursts of a profile
ROOM = 0.97  # of the card is given to jobs: the rest is contexts


def worker():
    for folder in (kit.EBB.parent, kit.LIB.parent):
        if (folder / "ebb-demo-worker").exists():
            return folder / "ebb-demo-worker"
    raise RuntimeError("the distribution holds no ebb-demo-worker")


class Job:
    """One program and what it is told. `scale` makes its times shorter, for trying the script."""

    def __init__(self, spec, card, scale):
        self.spec, self.scale = spec, scale
        self.bytes = int(card * spec["share"]) // (2 * MIB) * (2 * MIB)
        self.passes = 1
        self.child, self.trouble = None, ""
        self.bursts, self.once, self.typical, self.worst_alone = [], 0.0, 0.0, 0.0

    @property
    def name(self):
        return self.spec["name"]

    def open(self, ours):
        command = [worker(), "--serve"]
        if ours:
            own = ["--request", self.bytes, "--idle-release", "off"] if self.spec.get("own") else []
            command = under(command, "--name", self.name, "--priority", self.spec["priority"], *own)
        errors = open(kit.WORK / f"mix-{self.name}.err", "w")
        self.child = start(command, kit.UNDER if ours else kit.BASE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        self.bursts, self.trouble = [], ""
        self.tell(f"hold {self.bytes}")

    def tell(self, line):
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        answer = self.child.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended: {(kit.WORK / f'mix-{self.name}.err').read_text()[-600:]}")
        answer = json.loads(answer)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {line}: {answer['error']}")
        return answer

    def close(self):
        wrong = self.tell("check")["wrong"]
        self.child.stdin.close()
        if self.child.wait(kit.bounded(60)) != 0 or wrong:
            raise RuntimeError(f"{self.name}: status {self.child.returncode}, {wrong} words changed")

    def calibrate(self):
        """How many passes a burst has, so that it lasts about as long alone as it should."""
        self.once = min(self.tell(self.spec["op"])["seconds"] for _ in range(3))
        self.passes = max(1, round(self.spec["busy"] * self.scale / max(self.once * (1 + self.spec["gap"]), 1e-6)))

    def burst(self):
        for _ in range(self.passes):
            self.tell(self.spec["op"])
            if self.spec["gap"]:
                time.sleep(self.once * self.spec["gap"])

    def work(self, count):
        """So many bursts and pauses; times are from when a burst was due."""
        pause = self.spec["pause"] * self.scale
        first = time.monotonic()
        for n in range(count):
            due = time.monotonic()
            if self.spec.get("clock"):
                # By the clock: late bursts do not push the next ones back.
                due = first + n * (self.typical + pause)
                time.sleep(max(0.0, due - time.monotonic()))
            self.burst()
            self.bursts.append(time.monotonic() - due)
            if not self.spec.get("clock"):
                time.sleep(pause)

    def alone(self):
        self.open(False)
        self.calibrate()
        took = []
        for _ in range(PROFILED if self.spec["busy"] > 2 else 4 * PROFILED):
            began = time.monotonic()
            self.burst()
            took.append(time.monotonic() - began)
        self.close()
        self.typical = sorted(took)[len(took) // 2]
        self.worst_alone = max(took)

    def count(self, length):
        return max(1, round(length / (self.typical + self.spec["pause"] * self.scale)))

    def profile(self, length):
        pause = self.spec["pause"] * self.scale
        phases = [{"seconds": self.typical, "bytes": self.bytes, "gpu": 1 / (1 + self.spec["gap"])}, {"seconds": pause, "bytes": self.bytes, "gpu": 0.0}]
        return {"name": self.name, "arrives_s": self.spec["at"] * self.scale, "priority": self.spec["priority"], "request_bytes": self.bytes if self.spec.get("own") else 0,
                "lends": not self.spec.get("own"), "by_clock": bool(self.spec.get("clock")), "repeat": self.count(length), "phases": phases}

    def whole(self, ours, length):
        try:
            self.open(ours)
            self.work(self.count(length))
            self.close()
        except (RuntimeError, OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            self.trouble = f"{type(error).__name__} {error}"


def as_they_fit(jobs, room, length):
    """First come, first served; one that fits goes ahead of one that does not."""
    line, running, began = sorted(jobs, key=lambda j: j.spec["at"]), {}, time.monotonic()
    while line or running:
        kit.bounded(1)
        for job in list(line):
            if sum(j.bytes for j in running) + job.bytes <= room and time.monotonic() - began >= job.spec["at"] * job.scale:
                line.remove(job)
                running[job] = threading.Thread(target=job.whole, args=(False, length), daemon=True)
                running[job].start()
        for job, thread in list(running.items()):
            thread.join(0.02)
            if not thread.is_alive():
                del running[job]
    return time.monotonic() - began


def together(jobs, length):
    began = time.monotonic()

    def one(job):
        time.sleep(job.spec["at"] * job.scale)
        job.whole(True, length)

    threads = [threading.Thread(target=one, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(kit.bounded(1e6))
        if thread.is_alive():
            raise RuntimeError("a job does not end")
    return time.monotonic() - began


def p99(values):
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def card_bytes():
    """What a program can have of the card."""
    probe = json.loads(kit.run([worker(), "--probe"], timeout=60).strip().splitlines()[-1])
    return int(probe["total"])


def mix():
    scale = kit.args.mix_seconds / 100
    card = card_bytes()
    room = int(card * ROOM)
    jobs = [Job(spec, card, scale) for spec in JOBS]
    say(f"{len(jobs)} jobs hold {sum(j.bytes for j in jobs) / GIB:.1f} GiB of a card of {card / GIB:.1f}; each alone")
    for job in jobs:
        job.alone()
    length = kit.args.mix_seconds
    profiles = {"card_bytes": room, "idle_release_s": 60, "jobs": [job.profile(length) for job in jobs]}
    (kit.args.out / "profiles.json").write_text(json.dumps(profiles, indent=1))
    say("as they fit, without ebb")
    apart = as_they_fit(jobs, room, length)
    failed = [job.trouble for job in jobs if job.trouble]
    before = kit.totals()
    say("all together under ebb")
    joint = together(jobs, length)
    after = kit.totals()
    failures = [job.trouble for job in jobs if job.trouble]
    service = next(job for job in jobs if job.spec["priority"] == "high")
    slow = p99(service.bursts) / max(service.worst_alone, 1e-9) if service.bursts else float("inf")
    result = {
        "makespan_s": joint, "as_they_fit_s": apart, "work_per_hour_ratio": apart / joint,
        "moved_out_bytes": after["out_bytes"] - before["out_bytes"], "moved_back_bytes": after["in_bytes"] - before["in_bytes"],
        "failures": failures, "failures_without_ebb": failed, "p99_vs_alone": slow,
        "jobs": [{"name": j.name, "bytes": j.bytes, "passes": j.passes, "alone_s": j.typical, "bursts_s": j.bursts} for j in jobs],
    }
    (kit.args.out / "result.json").write_text(json.dumps(result, indent=1))
    RESULTS["mix"] = result
    row("mix: work per hour over as they fit", f"x {apart / joint:.2f} ({joint:.0f} s, {apart:.0f} s)", ">= 1.5", apart / joint >= 1.5)
    row("mix: failures", "; ".join(failures)[:400] or "0", "0", not failures)
    row("mix: p99 of the high priority over alone", f"x {slow:.2f}", "<= 1.3", slow <= 1.3)
    row("mix: moved", f"{result['moved_out_bytes'] / 1e9:.0f} GB out, {result['moved_back_bytes'] / 1e9:.0f} GB back")
    compare()


def compare():
    """What the lab made of the profiles."""
    command = [kit.args.simulate or kit.EBB, "simulate", "--profiles", kit.args.out / "profiles.json", "--measured", kit.args.out / "result.json"]
    said = kit.last_json(kit.run([*command, "--json"], timeout=60))
    RESULTS["mix_predicted"] = said
    errors = (said["makespan_error_percent"], said["moved_error_percent"])
    row("mix: predicted from profiles", f"makespan off by {errors[0]:+.1f} %, bytes back by {errors[1]:+.1f} %", "within 10 %", said["within_10_percent"])
