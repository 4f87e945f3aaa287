"""Both orders of fork and init: a child of a parent that has not started may start its own; one of a parent that has
gets the driver's own error, and neither disturbs the parent."""

import sys
import threading

from gpu import *


def child(code):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = code()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fresh():
    init()
    retain()
    p = alloc(4 * MIB)
    fill(p, MIB, 1)
    return 40 + wrong(p, MIB, 1) + free(p)


print("child first", child(fresh))
init()
retain()
mine = alloc(8 * MIB)
fill(mine, MIB, 9)
stop = threading.Event()


def churn():
    ok(cuda.cuCtxSetCurrent(context), "set current")
    while not stop.is_set():
        p = alloc(2 * MIB)
        assert p > 0
        ok(free(p), "free")


context = c_void_p()
ok(cuda.cuCtxGetCurrent(byref(context)), "current")
churner = threading.Thread(target=churn)
churner.start()


def late():
    code = cuda.cuInit(0)
    return 50 + (0 if code == 3 else code + 1)


for _ in range(20):
    assert child(late) == 50
    assert child(lambda: 7) == 7
stop.set()
churner.join()
print("exec", child(lambda: os.execvp("sh", ["sh", "-c", "exit 5"])))
print("parent", wrong(mine, MIB, 9), free(mine))
