"""A request for which there is no room is refused before anything is done for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.serving.driven_model import ask, folder, make_repository, num_in_engine, server_args
from tests.serving.fake_server import TritonError
from tests.waiting import eventually

__all__ = ["folder"]  # a fixture

ENDLESS = {"max_tokens": 15_000}  # minutes, whatever the test has to wait for
TIGHT = {"max_num_seqs": 1, "max_queue_size": 1, "max_model_len": 15_200}


def test_a_full_queue_refuses_before_a_request_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and tokenising wait in line behind whatever the workers do, and take seconds for a long prompt."""
    from cb_backend.serving.backend import TritonPythonModel

    model: Any = TritonPythonModel()
    model.initialize(server_args(make_repository(folder / "full", **TIGHT)))
    try:
        accepted = [ask(model, "xa", sampling=ENDLESS).sender for _ in range(2)]
        eventually(lambda: num_in_engine(model) == 2, "both places are taken")
        eventually(lambda: model._client.members[0].room.is_full, "and the front end knows")
        read: list[object] = []
        monkeypatch.setattr(TritonPythonModel, "_submit", lambda *work: read.append(work))
        for _ in range(3):
            code, message = ask(model, "x" * 1000).sender.wait().error or (None, "")
            assert code == TritonError.UNAVAILABLE
            assert re.fullmatch(
                r"the queue is full \(\d requests wait, max_queue_size is 1\); try again in about \d+ s", message
            )
        assert read == []
        stats = lambda: model._client.members[0].stats  # noqa: E731
        eventually(lambda: stats().num_refused == 3, "they are counted")
        assert [sender.final_count for sender in accepted] == [0, 0]
    finally:
        model.finalize()
