"""Two cards: NCCL while memory is released, one process on both cards, copies between them."""

import json
import subprocess
import time

import kit
from kit import GIB, RESULTS, last_json, processes_of, python, row, run, say, start, under


def cards():
    return len(kit.listing()["devices"])


def nccl2():
    if cards() < 2:
        row("NCCL on two cards", "not run: there is one card")
        return
    rounds = 200 if kit.args.quick else 1000
    command = python("nccl_work.py", rounds)
    plain = last_json(run(command, timeout=90))
    say(f"plain: {plain}")
    quiet = last_json(run(under(command, "--name", "nccl0"), kit.UNDER, 90))
    row("NCCL under ebb, undisturbed", f"{quiet['rounds']} rounds, {quiet['wrong']} wrong, {quiet['seconds']} s (plain {plain['seconds']} s)",
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
    if cards() < 2:
        row("one process on two cards", "not run: there is one card")
        return
    gib = 24  # twice that has to fit into the arena
    devices = {device["uuid"]: device["index"] for device in kit.listing()["devices"]}
    talk = Talk(under(python("two_cards.py", gib), "--name", "both"), kit.UNDER)
    say(f"holds {talk.answer()['ready']}")

    def resident():
        return {devices[p["device"]]: p["resident"] / GIB for p in processes_of("both") if p["device"]}

    before = resident()
    # Another job fills the second card: the first card's memory has to stay where it is.
    filler = start(under([kit.WORK / "calls", "hold", 128 * GIB], "--name", "filler"),
                   {**kit.UNDER, "CUDA_VISIBLE_DEVICES": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    came = filler.stdout.readline().strip()
    after = resident()
    kit.end(filler)
    alone = came == "ready" and after.get(0, 0) >= before.get(0, 0) - 0.1 and after.get(1, 0) < before.get(1, 0) - 1
    wrong = talk.ask("check")
    row("each card released on its own", f"{before} GiB before, {after} while another filled card 1; wrong {wrong.get('wrong')}",
        "card 0 stays, 0 wrong", alone and not any(wrong.get("wrong", {"?": 1}).values()))
    thread = kit.Releases("both")
    thread.start()
    answers = {}
    for word in ("check", "peer", "direct", "peer", "direct", "check"):
        answers[word] = talk.ask(word)
        time.sleep(0.5)
    counted = thread.stop()
    talk.ask("check")
    kit.end(talk.child)
    RESULTS["two_cards"] = {"before": before, "after": after, "answers": answers, "counted": counted}
    bad = [a for a in answers.values() if "error" in a or a.get("peer_wrong") or a.get("direct_wrong") or any(a.get("wrong", {}).values())]
    row("copies from card to card, released all the time", f"{answers['peer']}, {answers['direct']}, {counted['releases']} releases, "
        f"{sum(counted['refused'].values())} refused", "0 wrong", not bad and counted["releases"] > 0)
