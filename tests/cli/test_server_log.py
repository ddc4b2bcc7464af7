"""What of a server's log is shown, and which line is the reason of a failure: pytest tests/cli/test_server_log.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.cli.server import server_process
from cb_backend.cli.server.server_log import failure_reason, is_worth_showing
from cb_backend.support.silence import SilenceClock
from tests.cli.test_server_process import gate, stand_in

__all__ = ["gate"]  # a fixture

LOAD_FAILURE = (
    "E1127 23:52:48.71 5985 model_lifecycle.cc:642] \"failed to load 'llm' version 1: Internal: TritonModelException:"
    " tensor 'x' is broken: expected [3], found [4]; download it again\\n\\nAt:\\n  /m/1/model.py(5): initialize\\n\""
)


def test_failure_reason_is_the_engines_own_sentence() -> None:
    lines = ['I1127 23:52:46.7 5985 model_lifecycle.cc:472] "loading: llm:1"', LOAD_FAILURE, "+---+", "error: creating"]
    assert failure_reason(lines, 1) == (
        "model 'llm' could not be loaded: tensor 'x' is broken: expected [3], found [4]; download it again"
    )


def test_failure_reason_without_a_model() -> None:
    lines = ['W1127 23:52:46.7 1 metrics.cc:798] "DCGM unable to start"', "error: creating server: Internal - no"]
    assert failure_reason(lines, 1) == "the server ended before it was ready: error: creating server: Internal - no"
    assert failure_reason([], -6) == "the server ended with exit code -6 before it was ready: it printed nothing"


def test_failure_reason_for_a_config_that_cannot_be_parsed() -> None:
    lines = [
        "[libprotobuf ERROR /src/text_format.cc:337] Error parsing text-format inference.ModelConfig: 177:12: Expected"
        " integer, got: two",
        "E1128 06:11:52.265172 32029 model_repository_manager.cc:1460] \"Poll failed for model directory 'llm': failed"
        ' to read text proto from /r/llm/config.pbtxt"',
        "error: creating server: Internal - failed to load all models",
    ]
    assert failure_reason(lines, 1) == (
        "model 'llm' could not be read: failed to read text proto from /r/llm/config.pbtxt; line 177, column 12:"
        " Expected integer, got: two"
    )


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (["/x/bin/tritonserver: unrecognized option '--bogus=1'"], "unrecognized option '--bogus=1'"),
        (['Bad option: "--http-port".', "Invalid option value. Got abc"], 'Bad option: "--http-port". Invalid option'),
    ],
)
def test_failure_reason_for_an_argument_that_the_server_does_not_take(said: list[str], told: str) -> None:
    usage = ["Usage: tritonserver [options]", "  --help", "\tPrint usage", "\tDefault is 0."]
    reason = failure_reason([*said, *usage], 1)
    assert reason.startswith(f"the server refused its arguments (those after `--` are handed on as they are): {told}")
    assert not any(is_worth_showing(line) for line in usage)


@pytest.mark.parametrize(
    ("line", "is_shown"),
    [
        ('  File "/m/1/model.py", line 5, in initialize', True),
        (LOAD_FAILURE, True),
        ('I1127 23:52:48.493251 5985 model.py:4] "engine ready"', True),
        ('I1127 23:52:48.319738 5985 python_be.cc:2249] "TRITONBACKEND_ModelInstanceInitialize"', False),
        ('E1127 23:52:46.707137 5985 server.cc:241] "CudaDriverHelper has not been initialized."', False),
        (
            'E1128 10:03:07.749847 12526 ensemble_scheduler.cc:1468] "unable to create stream for chat: CUDA driver '
            'version is insufficient for CUDA runtime version"',
            False,
        ),
        ("| python  | /opt/backends |", False),
        ("", False),
        ("Traceback (most recent call last):", True),
    ],
)
def test_what_of_the_log_is_shown(line: str, is_shown: bool) -> None:
    assert is_worth_showing(line) == is_shown


def test_lines_that_come_while_the_newest_are_chosen(gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = stand_in(gate)
    server.lines.extend(["one", "two"])
    monkeypatch.setattr(server_process, "is_worth_showing", lambda line: server.lines.append("late") is None)
    assert server.last_lines(2) == ["one", "two"]


def test_the_last_lines_are_waited_for_though_the_process_was_stopped(
    gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, joins = 0.0, 0

    class Reader:
        def is_alive(self) -> bool:
            return joins < 3

        def join(self, timeout: float) -> None:
            nonlocal now, joins
            now, joins = now + (3600.0 if joins == 0 else 0.1), joins + 1

    server = stand_in(gate)
    monkeypatch.setattr(server_process, "SilenceClock", lambda: SilenceClock(lambda: now))
    monkeypatch.setattr(server, "_reader", Reader())
    server._join_reader()
    assert joins == 3
