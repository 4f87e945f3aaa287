"""Runs the tests of one module with unittest and prints a line of JSON for each: {"test": id, "result": word, "why": ...}."""

import importlib.util
import json
import os
import sys
import time
import types
import unittest

import numpy_names  # noqa: F401, before numba


def stand_in(name, **members):
    """For a package that is not here and that a few tests use: those are skipped, the others run."""
    def missing(*_words, **_more):
        raise unittest.SkipTest(f"{name.split('.')[0]} is not here")

    module = types.ModuleType(name)
    module.__path__ = []
    for member in members:
        setattr(module, member, missing)
    sys.modules[name] = module


if importlib.util.find_spec("filecheck") is None:
    for name, members in {"filecheck": (), "filecheck.matcher": ("Matcher",), "filecheck.options": ("Options",),
                          "filecheck.parser": ("Parser", "pattern_for_opts"), "filecheck.finput": ("FInput",)}.items():
        stand_in(name, **dict.fromkeys(members))


class Lines(unittest.TestResult):
    def emit(self, test, result, why=""):
        print(json.dumps({"test": test.id(), "result": result, "why": str(why)[-300:]}), file=OUT, flush=True)

    def startTest(self, test):
        super().startTest(test)
        print(json.dumps({"begin": test.id(), "at": time.time()}), file=OUT, flush=True)

    def addSuccess(self, test):
        self.emit(test, "passed")

    def addFailure(self, test, err):
        self.emit(test, "failed", err[1])

    def addError(self, test, err):
        self.emit(test, "error", f"{err[0].__name__}: {err[1]}")

    def addSkip(self, test, reason):
        self.emit(test, "skipped", reason)

    def addExpectedFailure(self, test, err):
        self.emit(test, "expected failure")

    def addUnexpectedSuccess(self, test):
        self.emit(test, "unexpected success")

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.emit(subtest, "failed", err[1])


# The tests write to stdout too.
OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
suite = unittest.defaultTestLoader.loadTestsFromName(sys.argv[1])
suite.run(Lines())
sys.stderr.flush()
os._exit(0)  # what is left of the driver's state is no part of the result
