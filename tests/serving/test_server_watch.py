"""A front end whose server is gone ends, by itself or, where it cannot, by the engine.

pytest tests/serving/test_server_watch.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cb_backend.front_end.engines.runtime_dir import remove_leftovers
from cb_backend.serving.server_watch import start_server_watch
from cb_backend.support.process_watch import ProcessWatch, process_start_time
from cb_backend.support.shared_regions import REGION_PREFIX, SHARED_MEMORY
from tests.waiting import WAIT_S, eventually

SLEEPER = [sys.executable, "-c", "import time; time.sleep(3600)"]
ENGINE = {"model": "counting", "worker_cls": "tests.fakes.counting_runner:create_runner"}


class Leaving:
    """A server that is about to be killed, with the processes around it; `kill_server` and see what is left."""

    def __init__(self, base: Path) -> None:
        self._server = subprocess.Popen(SLEEPER)
        self.folder = base / f"{self._server.pid}-{process_start_time(self._server.pid)}-a"
        self.folder.mkdir()
        self.gate = base / "gate"  # while this file exists, an engine that starts does not come to serve
        self.regions: list[Path] = []
        self._processes: list[subprocess.Popen[str]] = []

    def add_stub(self, *options: str) -> subprocess.Popen[str]:
        region = SHARED_MEMORY / f"{REGION_PREFIX}{uuid.uuid4()}"
        region.touch()
        self.regions.append(region)
        arguments = [region.name, str(self.folder), str(self._server.pid), *options]
        stub = self._start("tests.fakes.stub", *arguments)
        assert stub.stdout is not None
        assert stub.stdout.readline() == "running\n"
        return stub

    def add_engine(self) -> subprocess.Popen[str]:
        arguments = ["--socket", str(self.folder / "s"), "--server-pid", str(self._server.pid)]
        return self._start("cb_backend.engine.engine_process", *arguments, "--config-json", json.dumps(ENGINE))

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "CB_TEST_GATE": str(self.gate)}
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._processes.append(process)
        return process

    def kill_server(self) -> None:
        """Nobody reaps it before the end."""
        self._server.kill()

    def close(self) -> None:
        for process in (self._server, *self._processes):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for region in self.regions:
            region.unlink(missing_ok=True)


@pytest.fixture
def leaving() -> Iterator[Leaving]:
    base = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))  # short: a socket's path has at most 107 bytes
    leaving = Leaving(base)
    yield leaving
    leaving.close()
    shutil.rmtree(base)


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_end_of_the_server_is_noticed(has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_pidfd:
        monkeypatch.delattr("os.pidfd_open")
    server = subprocess.Popen(SLEEPER)
    is_over = threading.Event()
    start_server_watch(server.pid, is_over.set)
    assert not is_over.wait(0.3)
    server.kill()
    assert is_over.wait(WAIT_S)  # though nobody has reaped it yet
    server.wait()


def test_a_server_that_is_gone_already_is_noticed() -> None:
    server = subprocess.Popen([sys.executable, "-c", ""])
    server.wait()
    watch = ProcessWatch(server.pid)
    watch.wait()
    assert not watch.is_alive


@pytest.mark.parametrize("options", [(), ("--hold", "after")])
def test_a_front_end_ends_with_the_server_and_leaves_no_region(leaving: Leaving, options: tuple[str, ...]) -> None:
    """Also where a thread of it takes Python's lock for ever once the end has been noticed."""
    stub = leaving.add_stub(*options)
    leaving.kill_server()
    stub.wait(WAIT_S)
    assert not leaving.regions[0].exists()


def test_the_engine_ends_front_ends_that_cannot_notice_the_servers_end(leaving: Leaving) -> None:
    """A thread of theirs holds Python's lock, so that the one that watches never runs again."""
    leaving.add_engine()
    stuck, well = leaving.add_stub("--hold", "before"), leaving.add_stub()
    leaving.kill_server()
    for stub in (stuck, well):
        stub.wait(WAIT_S)
    eventually(lambda: not any(region.exists() for region in leaving.regions), "no region is left")


def test_an_engine_that_still_loads_ends_with_the_server(leaving: Leaving) -> None:
    leaving.gate.touch()
    engine, stub = leaving.add_engine(), leaving.add_stub("--hold", "before")
    eventually(lambda: (leaving.folder / "s").exists(), "the engine has begun to load")
    leaving.kill_server()
    engine.wait(WAIT_S)
    stub.wait(WAIT_S)
    assert not leaving.regions[0].exists()


def test_where_no_engine_was_left_the_next_front_end_clears_up(leaving: Leaving) -> None:
    stub = leaving.add_stub("--hold", "before")
    leaving.kill_server()
    eventually(lambda: process_start_time(int(leaving.folder.name.partition("-")[0])) is None, "the server is gone")
    remove_leftovers(leaving.folder.parent)
    stub.wait(WAIT_S)
    assert not leaving.folder.exists()
    assert not leaving.regions[0].exists()
