"""What `serve` and `demo` say while a server starts and once it is there. pytest tests/cli/test_start_of_a_server.py"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cb_backend.cli import demo, serve
from cb_backend.cli.paths import CliError
from cb_backend.cli.server import start_up
from cb_backend.cli.server.processes import ProcessId


class SlowServer:
    """Ready at the third look."""

    num_looks = 0

    def wait_ready(self, timeout: float) -> None:
        self.num_looks += 1
        if self.num_looks < 3:
            raise TimeoutError

    def dead_children(self) -> list[ProcessId]:
        return []

    def says_it_listens(self) -> bool:
        return False

    def last_lines(self, count: int) -> list[str]:
        return ["loading weights: 25%"]


def test_the_demo_tells_that_it_still_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_up, "PROGRESS_EVERY_S", 0.0)
    server = SlowServer()
    demo._wait_ready(server)  # type: ignore[arg-type]
    assert server.num_looks == 3
    assert capsys.readouterr().out.count("still loading after ") == 2


def test_the_demo_gives_up_with_the_servers_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "START_TIMEOUT_S", 0.0)
    with pytest.raises(CliError, match=r"not ready after \d+ s; .*loading weights: 25%"):
        demo._wait_ready(SlowServer())  # type: ignore[arg-type]


def test_the_client_is_offered_with_an_interpreter_that_can_run_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whose shell has not activated the environment has another `python`, or none."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve, "checkout_path", lambda name: tmp_path / name)
    assert serve._client() == ".venv/bin/python client/generate.py"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert serve._client() == f"{tmp_path}/.venv/bin/python {tmp_path}/client/generate.py"
