"""Ctrl-C in commands that run a server, and a load test of a model that is not there, on a real server.

pytest tests/server/test_interrupts_and_names.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cb_backend.cli.paths import checkout_path
from cb_backend.cli.server.server_process import free_ports
from tests.server.conftest import MARK, RunningServer, marked_processes
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server


@pytest.fixture
def repository(checkpoint: Path, tmp_path: Path) -> Path:
    shutil.copytree(checkout_path("model_repository/llm"), tmp_path / "models" / "llm")
    arguments = {"model": str(checkpoint), "max_num_seqs": 16, "kv_cache_memory_bytes": 32 << 20}
    (tmp_path / "models" / "llm" / "1" / "model.json").write_text(json.dumps(arguments))
    return tmp_path / "models"


@contextmanager
def command(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A command of ours and its log; it must leave no process behind."""
    log, mark = folder / "log", folder.name
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "cb_backend.cli.main", *words], env=environment, stdout=file, stderr=file
        )
    try:
        yield process, log
        eventually(lambda: marked_processes(mark) == [], "every process of it has ended")
    finally:
        print(log.read_text())  # shown by pytest where a test fails
        process.kill()


def wait_for(process: subprocess.Popen[bytes], log: Path, text: str) -> None:
    eventually(lambda: text in log.read_text() or process.poll() is not None, f"it says {text!r}")
    assert text in log.read_text()


def test_h03_an_interrupt_ends_the_demo_while_it_streams(repository: Path, tmp_path: Path) -> None:
    with command(tmp_path, "demo", "--plain", "--model-repository", str(repository)) as (process, log):
        wait_for(process, log, "] #1 joins")
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
        before, _, after = log.read_text().partition("\nstopping\n")
        assert "joins" in before
        assert after.count("\n") <= 1, "a line may have been on its way; nothing is printed on"
        assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("words", [("demo",), ("serve", "--verbose")])
def test_h03_an_interrupt_ends_a_start(repository: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    if words[0] == "serve":
        ports = zip(("--port", "--grpc-port", "--metrics-port"), map(str, free_ports(3)), strict=True)
        words = (*words, *(word for pair in ports for word in pair))
    with command(tmp_path, *words, "--model-repository", str(repository)) as (process, log):
        wait_for(process, log, "starting ")
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
        assert "stopping\n" in log.read_text()
        assert "Traceback" not in log.read_text()


def test_h12_a_wrong_model_name_is_one_line(server: RunningServer, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--url", server.url, "--model", "lm", "--rate", "1", "2", "--num-requests", "5", "--json", str(report)]
    done = subprocess.run(
        [sys.executable, checkout_path("client/load_test.py"), *words],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {server.url} does not serve 'lm' (")
    assert done.stderr.endswith("; it serves llm); give --model\n")
    assert not report.exists()


def test_h12_also_where_no_probe_is_sent(server: RunningServer) -> None:
    words = ["--url", server.url, "--model", "lm", "--rate", "1", "--tokens-per-word", "1"]
    done = subprocess.run(
        [sys.executable, checkout_path("client/load_test.py"), *words],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not serve 'lm'" in done.stderr
