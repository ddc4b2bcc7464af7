"""A front end whose server is gone ends by itself."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cb_backend.process_watch import ProcessWatch
from cb_backend.serving import server_watch
from cb_backend.serving.server_watch import REGION_PREFIX, remove_region, start_server_watch

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_end_of_the_server_is_noticed_at_once(has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_pidfd:
        monkeypatch.delattr("os.pidfd_open")
    server = subprocess.Popen(SLEEPER)
    is_over = threading.Event()
    start_server_watch(server.pid, is_over.set)
    assert not is_over.wait(0.3)
    server.kill()
    assert is_over.wait(2.0)  # though nobody has reaped it yet
    server.wait()


def test_a_server_that_is_gone_already_is_noticed() -> None:
    server = subprocess.Popen([sys.executable, "-c", ""])
    server.wait()
    watch = ProcessWatch(server.pid)
    watch.wait()
    assert not watch.is_alive


def test_only_the_region_that_the_command_line_names_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_watch, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    mine, other = (tmp_path / "shm" / f"{REGION_PREFIX}{name}" for name in ("1a", "2b"))
    outside = tmp_path / f"{REGION_PREFIX}3c"
    for path in (mine, other, outside):
        path.touch()
    words = ["stub", "/models/llm/1/model.py", mine.name, "1048576", f"{REGION_PREFIX}/../../{outside.name}", ""]
    remove_region("\0".join(words).encode())
    remove_region("\0".join(words).encode())  # it is no error that it is gone
    assert (mine.exists(), other.exists(), outside.exists()) == (False, True, True)
