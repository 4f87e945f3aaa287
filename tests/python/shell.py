"""Python that a test talks to: a line of source in, a line `ok [numbers]` out. Names stay from line to line; `gpu` is the driver."""

import os
import sys
import traceback

sys.path.insert(0, os.environ["EBB_TEST_PYTHON"])

import gpu  # noqa: E402

names = dict(vars(gpu))


def numbers(value):
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in numbers(part)]
    return [int(value)] if isinstance(value, (int, bool)) else []


for line in sys.stdin:
    try:
        try:
            code = compile(line.strip(), "<line>", "eval")
        except SyntaxError:
            exec(line.strip().replace("\\n", "\n"), names)
            value = None
        else:
            value = eval(code, names)
        print("ok", *numbers(value), flush=True)
    except Exception:
        traceback.print_exc()
        print("err 999", flush=True)
