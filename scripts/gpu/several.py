"""Two cards: NCCL while memory is released, one process on both cards, copies between them."""

import json
import subprocess
import time

import kit
from kit import GIB, RESULTS, installed, last_json, processes_of, python, row, run, say, start, under


def nccl2():
    if len(kit.listing()["devices"]) < 2:
        row("NCCL on two cards", "not run: there is one card")
        return
    rounds = 200 if kit.args.quick else 1000
    command = python("nccl_work.py", rounds)
    plain = last_json(run(command, timeout=90))
    say(f"plain: {plain}")
    quiet = last_json(run(under(command, "--name", "nccl0"), kit.UNDER, 90))
    row("NCCL under ebb, undisturbed", f"{quiet['rounds']} rounds, {quiet['wrong']} wrong, {quiet['seconds']} s (plain {plain['seconds']} s); "
        f"the last four fifths {quiet['steady']} s (plain {plain['steady']} s)",
        "0 wrong", quiet["wrong"] == 0 and not any(quiet["status"]))
    # A third process on the same cards, which is released too.
    other = start(under([kit.WORK / "calls", "hold", 2 * GIB], "--name", "third"), kit.UNDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    threads = [kit.Releases(name, wait_ms=3000) for name in ("nccl1", "third")]
    for thread in threads:
        thread.start()
    try:
        got = last_json(run(under(command, "--name", "nccl1"), kit.UNDER, 180))
    finally:
        counted = [thread.stop() for thread in threads]
        kit.end(other)
    RESULTS["nccl2"] = {"plain": plain, "quiet": quiet, "released": got, "counted": counted}
    row("NCCL, released all the time", f"{got['rounds']} rounds on {got['ranks']} cards, {got['wrong']} wrong, {got['seconds']} s; "
        f"{counted[0]['releases']} releases of {counted[0]['bytes'] / GIB:.1f} GiB, {sum(counted[0]['refused'].values())} refused",
        "0 wrong, no hang", got["wrong"] == 0 and not any(got["status"]) and counted[0]["releases"] > 0)


class Talk:
    """A program that answers each line with a line of JSON."""

    def __init__(self, command, env):
        self.errors = open(kit.WORK / "talk.err", "w+")
        self.child = start(command, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)

    def answer(self):
        while line := self.child.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        self.errors.seek(0)
        raise RuntimeError(f"ended with {self.child.wait(10)}: {self.errors.read()[-800:]}")

    def ask(self, word):
        self.child.stdin.write(word + "\n")
        self.child.stdin.flush()
        return self.answer()


def two_cards():
    seen = kit.listing()["devices"]
    if len(seen) < 2:
        row("one process on two cards", "not run: there is one card")
        return
    # The first one checks every word on the processor, which takes its time; twice what is held has to fit into the arena.
    for program, needs, gib in (("two_cards_driver.py", "cuda.bindings", 4), ("two_cards.py", "torch", 24)):
        if installed(needs):
            try:
                one_program(program, seen, gib)
            except (RuntimeError, OSError, ValueError, KeyError) as error:
                if isinstance(error, kit.OutOfTime):
                    raise
                row(f"two cards, {program}", f"FAILED: {type(error).__name__} {error}"[:500], "", False)
            finally:
                kit.end_all(but=kit.SERVING)


def one_program(program, seen, gib):
    name = program.removesuffix(".py").replace("_", "-")
    hold = min(gib * GIB, int(0.3 * seen[1]["capacity"]))
    devices = {device["uuid"]: device["index"] for device in seen}
    talk = Talk(under(python(program, hold / GIB), "--name", name), kit.UNDER)
    say(f"{program} holds {talk.answer()['ready']}")

    def resident():
        return {devices[p["device"]]: round(p["resident"] / GIB, 2) for p in processes_of(name) if p["device"]}

    for _ in range(100):  # what is resident is told ten times a second at most
        before = resident()
        if all(before.get(card, 0) >= 0.95 * hold / GIB for card in (0, 1)):
            break
        time.sleep(0.1)
    # Another job fills the second card: the first card's memory has to stay where it is.
    want = seen[1]["capacity"] - hold // 2
    filler = start(under([kit.WORK / "calls", "hold", want], "--name", "filler"),
                   {**kit.UNDER, "CUDA_VISIBLE_DEVICES": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    came = filler.stdout.readline().strip()
    after = resident()
    kit.end(filler)
    stayed = after.get(0, 0) >= 0.99 * before.get(0, 0)
    alone = came == "ready" and stayed and after.get(1, 0) < 0.9 * before.get(1, 1)
    wrong = talk.ask("check")
    row(f"{name}: each card released on its own", f"{before} GiB before, {after} while another filled card 1 ({came}); wrong {wrong.get('wrong')}",
        "card 0 stays, 0 wrong", alone and not any(wrong.get("wrong", {"?": 1}).values()))
    thread = kit.Releases(name)
    thread.start()
    answers = []
    try:
        for word in ("check", "peer", "direct", "peer", "direct", "check"):
            answers.append(talk.ask(word))
            time.sleep(0.5)
    finally:
        counted = thread.stop()
    answers.append(talk.ask("check"))
    kit.end(talk.child)
    RESULTS[name] = {"before": before, "after": after, "answers": answers, "counted": counted}
    bad = [a for a in answers if "error" in a or a.get("peer_wrong") or a.get("direct_wrong") or any(a.get("wrong", {}).values())]
    row(f"{name}: copies from card to card, released all the time", f"{len(answers)} answers, {len(bad)} bad {bad[:2] if bad else ''}, "
        f"direct {answers[2]}, {counted['releases']} releases, {sum(counted['refused'].values())} refused", "0 bad", not bad and counted["releases"] > 0)
