"""Tries changes one after another in a process that has collected the tests of a target, each in a fork of its own."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import signal
from multiprocessing.connection import Connection

import pytest
from _pytest import main as pytest_main

from tests.mutation.change import Living, import_anew
from tests.mutation.mutate import Mutant
from tests.mutation.targets import ROOT, TARGETS

LONGEST_S = 1800  # for one that hangs without computing
SURVIVED, NOTICED, HUNG, SKIPPED = "survived", "noticed", "hung", "skipped"
_WAIT_S = 15.0  # for what a test waits for: long enough for all tests without a change, which is tried first
_ARGUMENTS = ("-x", "-q", "-p", "no:cacheprovider")


def serve(target: str, pipe: Connection) -> None:
    """For each (mutant, CPU seconds that it may take) that is received send how the tests of the target end (SURVIVED,
    ...) and the CPU seconds that they took. No change is made for a mutant None.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    _run_pytest(target, _Forks(target, pipe))


def _run_pytest(target: str, *plugins: object) -> int:
    return int(pytest.main([*_ARGUMENTS, *(str(ROOT / test) for test in TARGETS[target][1])], plugins=plugins))


class _Forks:
    """In place of pytest's loop over the tests: that loop in a fork for each mutant."""

    def __init__(self, target: str, pipe: Connection) -> None:
        self._target, self._pipe = target, pipe

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        living = Living(TARGETS[self._target][0])
        gc.freeze()  # children look for garbage among what they make, and nowhere else
        with contextlib.suppress(EOFError):  # nobody asks any more
            while True:
                mutant, longest_cpu_s = self._pipe.recv()
                pid = os.fork()
                if pid == 0:
                    self._run_tests(session, living, mutant, longest_cpu_s)
                _, status, usage = os.wait4(pid, 0)
                outcome = SURVIVED if status == 0 else HUNG if os.WIFSIGNALED(status) else NOTICED
                self._pipe.send((outcome, usage.ru_utime + usage.ru_stime))
        return True

    def _run_tests(self, session: pytest.Session, living: Living, mutant: Mutant | None, longest_cpu_s: int) -> None:
        """Never returns."""
        resource.setrlimit(resource.RLIMIT_CPU, (longest_cpu_s, longest_cpu_s))  # ends the process: it is noticed
        signal.alarm(LONGEST_S)
        code = 1
        try:
            if mutant is None or living.change(mutant.index):
                _wait_less()
                pytest_main.pytest_runtestloop(session)
                code = int(session.testsfailed > 0)
            else:
                import_anew(TARGETS[self._target][0], mutant.index)
                _wait_less()
                code = _run_pytest(self._target)
        finally:
            os._exit(code)


def _wait_less() -> None:
    waiting = importlib.import_module("tests.waiting")  # as the tests have it from now on
    waiting.WAIT_S = _WAIT_S
