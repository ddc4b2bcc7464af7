"""The measurement of the response path against a real server. pytest tests/server/test_response_path.py"""

from __future__ import annotations

import subprocess
import sys

import pytest

from cb_backend.cli.paths import checkout_path
from tests.server.conftest import RunningServer

pytestmark = pytest.mark.server


def run(server: RunningServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout_path("client/response_path.py")), "--url", server.url, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_a_row_of_figures_and_nothing_left_behind(server: RunningServer) -> None:
    done = run(server, "--streams", "3", "--tokens", "50", "--seconds", "1", "--processes", "2")
    assert done.returncode == 0, done.stderr
    cells = [cell.strip() for cell in done.stdout.strip().split("\n")[-1].strip("|").split("|")]
    assert cells[0] == "llm"
    responses, tokens, ratio = (float(cell.replace(",", "")) for cell in cells[1:4])
    assert 0 < responses <= tokens
    assert ratio == pytest.approx(tokens / responses, rel=0.1)
    server.wait_idle()  # its streams are cancelled at the end


def test_an_error_is_one_line(server: RunningServer) -> None:
    done = run(server, "--models", "none_such", "--seconds", "1", "--processes", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: none_such: ")
    assert "Traceback" not in done.stderr
