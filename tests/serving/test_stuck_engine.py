"""A front end whose engine has requests and falls silent is not ready, says so in the log, and is ready again after."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cb_backend.serving import housekeeping
from tests.serving.driven_model import ask, folder, make_repository, server_args
from tests.waiting import eventually

__all__ = ["folder"]  # a fixture


def test_v6_a_silent_engine_makes_the_model_not_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case V6: before the watchdog ends the engine, which may take minutes, nobody is sent here any more."""
    from cb_backend.serving.backend import TritonPythonModel

    monkeypatch.setattr(housekeeping, "ENGINE_SILENCE_S", 1.5)
    model: Any = TritonPythonModel()
    model.initialize(server_args(make_repository(folder / "stuck", max_num_seqs=8, max_model_len=15_200)))
    logging.getLogger("cb_backend").addHandler(caplog.handler)  # it hands nothing on to pytest's
    try:
        sender = ask(model, "a", sampling={"max_tokens": 15_000}).sender
        eventually(lambda: bool(sender.responses), "the request runs")
        engine = model._client.members[0].life.pid
        os.kill(engine, signal.SIGSTOP)
        try:
            eventually(lambda: not model.is_ready(), "the silence is noticed")
            assert sender.final_count == 0, "the request is not given up"
            num_before = len(sender.responses)
        finally:
            os.kill(engine, signal.SIGCONT)
        eventually(model.is_ready, "the engine speaks again")
        eventually(lambda: len(sender.responses) > num_before, "the request goes on")
        assert sender.final_count == 0
        assert sum("has been silent for" in record.message for record in caplog.records) >= 1
    finally:
        logging.getLogger("cb_backend").removeHandler(caplog.handler)
        model.finalize()
