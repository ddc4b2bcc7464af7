"""A front end whose server is gone ends by itself."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from cb_backend.process_watch import ProcessWatch
from cb_backend.serving.server_watch import start_server_watch
from tests.waiting import WAIT_S

SLEEPER = [sys.executable, "-c", "import time; time.sleep(3600)"]


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
