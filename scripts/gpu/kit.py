"""What every section needs: the command line, processes that end with their section, the daemon, its control socket,
a thread that releases tasks again and again, and the table that is printed last.

Each section has a deadline. Nothing here waits beyond it, an alarm ends what still does, and only processes that were
started here are ever ended, each with its own process group.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
GIB = 1 << 30
MIB = 1 << 20


def options(doc, sections):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=Path("target/dist"), help="what `cargo xtask dist` made")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "target/gpu")), help="folder of the results")
    parser.add_argument("--only", default="", help="these sections, in this order: " + ",".join(sections))
    parser.add_argument("--budget", type=float, default=0, help="seconds for all: sections run in order while they fit")
    parser.add_argument("--arena", default="72Gi", help="host memory for what is off the card")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of measurements in `throughput`")
    parser.add_argument("--period", type=float, default=0.2, help="seconds between two releases of a task")
    parser.add_argument("--window", type=float, default=0.7, help="seconds of one side of a pair of step times")
    parser.add_argument("--quick", action="store_true", help="small sizes: is everything in place?")
    parser.add_argument("--sim", action="store_true", help="on the simulated GPU, to try the scripts themselves")
    parser.add_argument("--mix-seconds", type=float, default=100, help="how long each job of `mix` takes alone: all of it takes about four times that")
    parser.add_argument("--simulate", type=Path, help="another `ebb` for what `mix` predicts")
    parser.add_argument("--list", action="store_true", help="print the sections and their seconds")
    return parser


args = argparse.Namespace(dist=Path("."), out=Path("."), quick=True, sim=False, arena="1Gi", period=0.2, pairs=2, window=0.7,
                          mix_seconds=6, simulate=None)
EBB = LIB = WORK = RUN = Path(".")
BASE, UNDER = {}, {}
RESULTS, TABLE, CHILDREN = {}, [], []
SERVING = []
BEGAN = time.monotonic()
DEADLINE = None
LOCK = threading.Lock()
SAVING = threading.RLock()  # a signal may come while its holder saves, and saves too


class OutOfTime(RuntimeError):
    """The section's time is over."""


def set_up(parsed):
    global args, EBB, LIB, WORK, RUN, BASE, UNDER
    args = parsed
    args.out.mkdir(parents=True, exist_ok=True)
    dist = args.dist.resolve()
    EBB = dist / "bin" / "ebb"
    LIB = next(iter(sorted(dist.glob("lib/ebb/*/libebb.so"))), None)
    if LIB is None:
        sys.exit(f"{dist} holds no libebb.so: make it with `cargo xtask dist` and name it with --dist")
    WORK = Path(tempfile.mkdtemp(prefix="ebb-gpu-"))
    RUN = WORK / "run"
    BASE = {
        **os.environ,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONUNBUFFERED": "1",
        # A program that uses NVLink multicast can put a shared host's cards out of service.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    if "CUDA_HOME" not in BASE and (nvcc := shutil.which("nvcc")):
        BASE["CUDA_HOME"] = str(Path(nvcc).resolve().parent.parent)
    if args.sim:
        sim = LIB.parent / "sim"
        (WORK / "sim").mkdir()
        BASE |= {"LD_LIBRARY_PATH": f"{sim}:{os.environ.get('LD_LIBRARY_PATH', '')}", "EBB_SIM_DIR": str(WORK / "sim"),
                 "EBB_NVML": str(sim / "libnvidia-ml.so.1")}
        BASE.setdefault("EBB_SIM_MEMORY", "4Gi")
    UNDER = {**BASE, "EBB_SOCKET_DIR": str(RUN), "EBB_LIB": str(LIB)}


# --- time -------------------------------------------------------------------------------------------------------------


def left():
    """Seconds until the section has to end."""
    if DEADLINE is None:
        return 1e9
    return DEADLINE - time.monotonic()


def bounded(seconds):
    """At most `seconds`, and within the section."""
    if left() <= 0:
        raise OutOfTime("the section's time is over")
    return max(0.1, min(seconds, left()))


@contextlib.contextmanager
def section_limit(seconds):
    """Bounds all that is done inside; also a read that waits for ever."""
    global DEADLINE

    def over(_signal, _frame):
        kill_at_once(but=SERVING)
        raise OutOfTime(f"more than {seconds:.0f} s")

    DEADLINE = time.monotonic() + seconds
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds + 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        DEADLINE = None


# --- processes --------------------------------------------------------------------------------------------------------


def start(command, env=None, **more):
    child = subprocess.Popen([str(c) for c in command], env=BASE if env is None else env, text=True, process_group=0, **more)
    with LOCK:
        CHILDREN.append(child)
    return child


def end(child, patience=10):
    """Ends a child and what it started."""
    for what in (signal.SIGTERM, signal.SIGKILL):
        # The group outlives its leader as long as a member lives; its number is not given away before that.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, what)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
    for pipe in (child.stdin, child.stdout, child.stderr):
        with contextlib.suppress(OSError, ValueError):
            pipe and pipe.close()


def kill_at_once(but=()):
    """From a signal handler: no lock, no waiting. Threads that wait for a child then return."""
    for child in list(CHILDREN):
        if child not in but and child.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)


def end_all(but=()):
    with LOCK:
        mine = [child for child in CHILDREN if child not in but]
        CHILDREN[:] = list(but)
    alive = [child for child in reversed(mine) if child.poll() is None]
    for child in alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGTERM)
    until = time.monotonic() + 8
    while time.monotonic() < until and any(child.poll() is None for child in alive):
        time.sleep(0.05)
    for child in alive:
        end(child, 5)


def note(text):
    """Into the log, which comes back with the results."""
    with LOCK, open(args.out / "log.txt", "a") as log:
        log.write(text.rstrip() + "\n")


def run(command, env=None, timeout=120, check=True, **more):
    """Output of a command that must succeed."""
    child = start(command, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
    shown = " ".join(str(c) for c in command)
    try:
        out, err = child.communicate(timeout=bounded(timeout))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        note(f"--- {shown}: too slow\n{out[-4000:]}\n{err[-8000:]}")
        raise RuntimeError(f"{shown[:300]} took more than {timeout:.0f} s\n{out[-600:]}\n{err[-600:]}") from None
    if check and child.returncode != 0:
        note(f"--- {shown}: status {child.returncode}\n{out[-4000:]}\n{err[-8000:]}")
        raise RuntimeError(f"{shown[:300]} ended with {child.returncode}\n{out[-600:]}\n{err[-1000:]}")
    if err.strip() and check:
        note(f"--- {shown}: stderr\n{err[-2000:]}")
    return out


def together(work, width):
    """Calls each of `work` (name, function) in threads, `width` at a time; {name: result or exception}."""
    def guarded(call):
        try:
            return call()
        except Exception as error:  # a thread's failure is a result
            return error

    with concurrent.futures.ThreadPoolExecutor(width) as pool:
        waiting = {name: pool.submit(guarded, call) for name, call in work}
        return {name: future.result() for name, future in waiting.items()}


def json_lines(text):
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def last_json(text):
    found = json_lines(text)
    if not found:
        raise RuntimeError(f"no line of JSON in {text[-500:]!r}")
    return found[-1]


def python(program, *words):
    return [sys.executable, PROGRAMS / program, *words]


def installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


# --- ebb --------------------------------------------------------------------------------------------------------------


def ebb(*words, timeout=60):
    return run([EBB, *words], UNDER, timeout)


def under(command, *flags):
    gpu = ["--gpu", "sim"] if args.sim else []
    return [EBB, "run", *gpu, *flags, "--", *command]


class Control:
    """The daemon's control socket: one JSON object a line, one answer a request."""

    def __init__(self, timeout=40):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(timeout)
        self.socket.connect(str(RUN / "ctl.sock"))
        self.file = self.socket.makefile("rwb")

    def ask(self, op, **fields):
        """What the daemon answers: {"ok": ...} or {"error": ...}."""
        self.file.write(json.dumps({"op": op, **fields}).encode() + b"\n")
        self.file.flush()
        line = self.file.readline()
        if not line:
            raise ConnectionError("the daemon hung up")
        return json.loads(line)

    def close(self):
        with contextlib.suppress(OSError):
            self.file.close()
            self.socket.close()


def listing():
    control = Control()
    try:
        return control.ask("list")["ok"]
    finally:
        control.close()


def totals():
    return listing()["totals"]


def processes_of(name, seen=None):
    """The rows of a task's processes, one for each card."""
    return [p for task in (seen or listing())["tasks"] if task["name"] == name for p in task["processes"]]


class Releases(threading.Thread):
    """Takes a task's memory and gives it back, every `period` seconds, until the task ends; counts what really went.

    After `spell` seconds of that only every two seconds: a program that is slow under it still has to end in time.
    """

    def __init__(self, name, period=None, wait_ms=2000, spell=40):
        super().__init__(daemon=True)
        self.spell, self.first, self.took = spell, None, []
        self.task, self.period, self.wait_ms = name, period or args.period, wait_ms
        self.over = threading.Event()
        self.paused, self.refused, self.by_process, self.bytes = 0, collections.Counter(), {}, 0
        self.trouble = ""

    def run(self):
        try:
            control = Control()
            try:
                while not self.over.is_set():
                    began = time.monotonic()
                    self.once(control)
                    tired = self.first is not None and began - self.first > self.spell
                    self.over.wait(max(0.02, (2 if tired else self.period) - (time.monotonic() - began)))
            finally:
                control.close()
        except (OSError, ValueError, KeyError) as error:
            self.trouble = f"{type(error).__name__} {error}"

    def once(self, control):
        seen = control.ask("list")["ok"]
        rows = processes_of(self.task, seen)
        for row in rows:
            key = (row["pid"], row.get("device"))
            self.by_process[key] = max(self.by_process.get(key, 0), row["releases"])
            self.bytes = max(self.bytes, row["resident"] + row["evicted"])
        if not any(row["resident"] for row in rows):
            return
        began = time.monotonic()
        self.first = self.first or began
        answer = control.ask("pause", task=self.task, wait_ms=self.wait_ms)
        if "ok" in answer:
            self.paused += 1
            self.took.append(round(1e3 * (time.monotonic() - began), 1))
        else:
            message = answer["error"]["message"]
            self.refused[message.split(": ", 1)[-1][:80]] += 1
        control.ask("resume", task=self.task)

    @property
    def count(self):
        return sum(self.by_process.values())

    def stop(self):
        self.over.set()
        self.join(45)
        took = sorted(self.took) or [0]
        return {"releases": self.count, "paused": self.paused, "refused": dict(self.refused), "bytes": self.bytes,
                "pause_ms": took[len(took) // 2], "pause_ms_max": took[-1],
                **({"trouble": self.trouble} if self.trouble else {})}


@contextlib.contextmanager
def releasing(name, **more):
    thread = Releases(name, **more)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()


def stop_daemon():
    """The demo brings a daemon of its own, and the host memory is one."""
    while SERVING:
        end(SERVING.pop(), 20)


FILL = """
import sys
def total():
    lines = dict(line.split(":") for line in open("/proc/meminfo"))
    return int(lines["MemTotal"].split()[0]) << 10, int(lines["MemAvailable"].split()[0]) << 10
kept = []
while total()[0] < int(sys.argv[1]) and len(kept) < int(sys.argv[1]) >> 30:
    kept.append(bytearray(b"x") * (1 << 30))
print(total()[0])
"""


def grow_memory():
    """Some virtual machines start with little memory and are given more as they use it: uses what the arena will need."""
    units = {"Gi": GIB, "Mi": MIB}
    want = int(float(args.arena[:-2]) * units.get(args.arena[-2:], GIB) * 1.25) + 4 * GIB
    try:
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if has < want and not args.sim:
            say(f"the machine shows {has / GIB:.0f} GiB and the arena wants {args.arena}: filling memory until it shows enough")
            say(f"now {int(run([sys.executable, '-c', FILL, want], timeout=60)) / GIB:.0f} GiB")
    except (RuntimeError, ValueError, OSError) as error:
        note(f"--- memory did not grow: {error}")


def daemon():
    """A daemon that answers: the one that runs, or a new one."""
    if SERVING:
        try:
            listing()
            return
        except (OSError, ValueError, KeyError) as error:
            print(f"  the daemon does not answer ({error}): another one", flush=True)
            note(f"--- the daemon did not answer: {error}")
            stop_daemon()
    shutil.rmtree(RUN, ignore_errors=True)
    config = WORK / "ebb.toml"
    config.write_text(f'state_dir = "{WORK}/state"\n[arena]\nbudget = "{args.arena}"\n')
    (WORK / "state").mkdir(exist_ok=True)
    RUN.mkdir(mode=0o700)
    grow_memory()
    with open(args.out / "daemon.log", "a") as log:
        child = start([EBB, "daemon", "--config", config, "--socket-dir", RUN], UNDER, stderr=log, stdout=log)
    for _ in range(300):
        if child.poll() is not None:
            raise RuntimeError(f"the daemon ended: {(args.out / 'daemon.log').read_text()[-2000:]}")
        try:
            listing()
            SERVING.append(child)
            return
        except (OSError, ValueError, KeyError):
            time.sleep(0.1)
    raise RuntimeError("the daemon does not answer")


def autopsy():
    """What the daemon and the programs say of themselves, when something does not end."""
    try:
        seen = listing()
        text = json.dumps(seen, indent=1) + "\n"
        control = Control(10)
        for task in seen["tasks"]:
            for process in task["processes"]:
                text += json.dumps(control.ask("doctor", pid=process["pid"]))[:6000] + "\n"
        control.close()
        log = WORK / "state" / "events.jsonl"
        if log.exists():
            with open(log, "rb") as events:
                events.seek(max(0, log.stat().st_size - (1 << 20)))
                lines = events.read().decode(errors="replace").splitlines()[1:]
            text += "".join(line[:400] + "\n" for line in [line for line in lines if '"usage"' not in line][-80:])
        with open(args.out / "autopsy.txt", "a") as file:
            file.write(text)
        print(text[:2000], flush=True)
    except Exception as error:  # it only describes a failure
        note(f"--- no autopsy: {error}")


def smi_used_mib(card=0):
    if args.sim:
        return listing()["devices"][card]["leased"] // MIB
    out = run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", str(card)])
    return int(out.split()[0])


# --- results ----------------------------------------------------------------------------------------------------------


def save():
    """Everything so far, so that an interrupted run still brings it back."""
    with SAVING:
        for _ in range(5):
            try:
                text = json.dumps({**RESULTS, "table": TABLE}, indent=1, default=str)
            except RuntimeError:  # another thread added to it meanwhile
                time.sleep(0.01)
                continue
            temporary = WORK / "results.json"
            temporary.write_text(text)
            shutil.copyfile(temporary, args.out / "results.json")
            return


def row(what, value, target="", ok=None):
    TABLE.append((what, value, target, {True: "ok", False: "MISSED", None: ""}[ok]))
    print(f"  [{time.monotonic() - BEGAN:4.0f}] {what}: {value}  {target}", flush=True)
    save()


def say(text):
    print(f"  [{time.monotonic() - BEGAN:4.0f}] {text}", flush=True)


def print_table():
    width = min(44, max((len(str(t[0])) for t in TABLE), default=10))
    for what, value, target, ok in TABLE:
        value = " ".join(str(value).split())
        print(f"{what:<{width}}  {value[:160]}  {target}  {ok}".rstrip())
