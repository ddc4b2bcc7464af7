"""What a command prints where nobody reads it any more, and what its libraries may not print beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cb_backend.cli import main as entry

BY_PIPE = 128 + 13  # of SIGPIPE, as a shell tells it
COMMANDS = [["models", "list"], ["models", "list", "--json"], ["doctor"]]


def run_without_reader(words: list[str], cache: Path) -> tuple[int, str]:
    """Exit code and stderr of a command whose stdout is a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "CB_BACKEND_CACHE": str(cache), "HF_HOME": str(cache)}
    command = [sys.executable, "-m", "cb_backend.cli.main", *words]
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, env=environment, text=True, timeout=120, check=False
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_reader_that_has_enough_is_no_error(words: list[str], tmp_path: Path) -> None:
    assert run_without_reader(words, tmp_path) == (BY_PIPE, "")


def test_a_connection_that_breaks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("cb_backend.cli.models.run", fail)
    assert entry.main(["models", "list"]) == 1
    assert capsys.readouterr().err == "error: [Errno 32] Broken pipe\n"


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy or cold, torch alone takes many seconds."""

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry.importlib, "import_module", interrupt)
    assert entry.main(["plan", "--model", "m", "--gpus", "2"]) == 130


@pytest.mark.parametrize(("own", "expected"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_tells_of_errors_only_unless_asked(
    own: str | None, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a chat that starts a server shows lines about forks and threads."""
    if own is None:
        monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    else:
        monkeypatch.setenv("GRPC_VERBOSITY", own)
    monkeypatch.setattr("cb_backend.cli.models.run", lambda args: 0)
    # gRPC reads it once, at its import, which may be that of the command.
    load, found = entry.importlib.import_module, []
    monkeypatch.setattr(
        entry.importlib, "import_module", lambda name: found.append(os.getenv("GRPC_VERBOSITY")) or load(name)
    )
    assert entry.main(["models", "list"]) == 0
    assert found == [expected]
