"""A shared server that dies is one failure, and the other tests go on: pytest tests/server/test_shared_server.py"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cb_backend.cli.server.local_server import ServerInstallation
from cb_backend.cli.server.server_process import ServerOptions, ServerProcess, free_ports
from tests.server import shared_server
from tests.server.conftest import stop
from tests.server.exit_watch import ExitWatch
from tests.server.shared_server import ServerDied, SharedServer
from tests.waiting import eventually

pytestmark = pytest.mark.server

INNER_TESTS = """
import os, signal
import pytest
from cb_backend.cli.server.server_process import http_status

def answers(server):
    return server.post("/v2/models/llm/generate", {"text_input": "fox", "max_tokens": 2, "temperature": 0})[0] == 200

def test_before(server):
    assert answers(server)

def test_under_which_it_dies(server):
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(60)
    assert answers(server)

@pytest.mark.parametrize("number", range(2))
def test_after(server, number):
    assert answers(server)
"""


@pytest.mark.long
def test_a_death_of_the_shared_server_is_one_failure(tmp_path: Path) -> None:
    """With the suite's own fixtures, in a run of its own."""
    (tmp_path / "test_inner.py").write_text(INNER_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.server.conftest", "-c", "/dev/null"]
    command += [f"--rootdir={tmp_path}", str(tmp_path / "test_inner.py")]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    output = run.stdout + run.stderr
    assert "1 failed, 3 passed" in output, output
    assert re.search(r"FAILED .*test_under_which_it_dies", output), output
    assert "the shared server ended with -9 during this test" in output
    assert "ready after" in output.partition("It said:")[2], "its last lines"


class Fake:
    """A process that says one line and then does as told."""

    def __init__(self, folder: Path, script: str, **environment: str) -> None:
        binary = folder / "server.sh"
        binary.write_text(f"#!/bin/sh\necho said at last\n{script}\n")
        binary.chmod(0o755)
        installation = ServerInstallation(binary, folder, dict(environment), "test")
        self.process = ServerProcess(installation, ServerOptions(folder, "127.0.0.1", *free_ports(3), 2))
        self.process.start()
        eventually(lambda: "said at last" in self.process.lines, "it has started")


def shared_fake(folder: Path, script: str, started: list[Fake]) -> SharedServer[Fake]:
    @contextlib.contextmanager
    def start() -> Iterator[Fake]:
        started.append(Fake(folder, script))
        yield started[-1]
        started[-1].process.kill()

    return SharedServer(start)


def test_a_server_that_hangs_is_replaced_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_server, "ANSWER_S", 0.2)
    started: list[Fake] = []
    shared = shared_fake(tmp_path, "exec sleep 600", started)
    first = shared.get()
    with shared.watching():
        assert shared.get() is first
    with pytest.raises(ServerDied, match=r"did not answer any more during this test(.|\n)*said at last"):  # noqa: SIM117
        with shared.watching():
            raise ValueError("no answer came")
    assert first.process.poll() == -signal.SIGKILL
    assert shared.get() is not first
    shared.close()
    assert len(started) == 2


def test_a_test_that_passes_fails_if_the_server_has_died_meanwhile(tmp_path: Path) -> None:
    shared = shared_fake(tmp_path, "exec sleep 600", [])

    def die() -> None:
        with shared.watching():
            os.kill(shared.get().process.pid, signal.SIGSEGV)
            shared.get().process.wait(60)

    with pytest.raises(ServerDied, match="ended with -11"):
        die()
    with shared.watching():
        assert shared.get().process.poll() is None
    shared.close()


def test_s90_a_crash_below_a_server_that_ends_well_is_seen(tmp_path: Path) -> None:
    """And so is an exit code other than 0 of what a stop has ended; a killed child that nobody stopped is no crash."""
    exits = ExitWatch(tmp_path)
    child = f"import subprocess, sys; subprocess.call([sys.executable, '-c', {'import os; os.abort()'!r}])"
    waiting = "import signal, subprocess, sys, time\n"
    waiting += "child = subprocess.Popen(['sleep', '600'])\nsignal.signal(15, lambda *_: (child.kill(), child.wait(), "
    waiting += "sys.exit(0)))\nprint('waits', flush=True)\nwhile True: time.sleep(0.1)"
    for name, code in (("child", child), ("waiting", waiting)):
        (tmp_path / f"{name}.py").write_text(code)
    script = f"{sys.executable} {tmp_path}/child.py\nexec {sys.executable} {tmp_path}/waiting.py"
    fake = Fake(tmp_path, script, **exits.environment)
    eventually(lambda: "waits" in fake.process.lines, "it waits")
    problems = stop(fake.process, exits)
    assert [problem.partition(" ended with ")[2] for problem in problems] == ["SIGABRT", "SIGKILL"]


def test_s90_what_ends_well_is_no_problem(tmp_path: Path) -> None:
    exits = ExitWatch(tmp_path)
    fake = Fake(tmp_path, f"{sys.executable} -c 'pass'\nexit 0", **exits.environment)
    fake.process.wait(60)
    assert stop(fake.process, exits) == []
