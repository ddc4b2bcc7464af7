"""What a front end keeps must not grow with the requests it has answered. See tests/engine/test_growth.py."""

from __future__ import annotations

import gc
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.driven_model import ask, folder, make_repository, num_in_engine, server_args
from tests.serving.fake_server import Metric
from tests.waiting import eventually

__all__ = ["folder"]  # a fixture

NUM_REQUESTS = 200  # a round
WARM_UP_ROUNDS, ROUNDS = 1, 3
MAX_GROWTH = NUM_REQUESTS  # objects a round; what is known of one request is dozens


def serve(model: Any, rng: random.Random) -> None:
    """Streamed and whole answers, stop strings, log-probabilities, bad requests; a fifth of them at once."""
    for _ in range(NUM_REQUESTS // 20):
        open_requests = []
        for _ in range(20):
            sampling: dict[str, Any] = {"max_tokens": rng.choice([0, 1, 2, 4])}
            if rng.random() < 0.2:
                sampling["stop"] = "cd"
            text = "".join(rng.choices("abcdefg é中", k=rng.randint(1, 30)))
            open_requests.append(ask(model, text, stream=rng.random() < 0.5, sampling=sampling))
        for request in open_requests:
            request.sender.wait()
            assert request.sender.final_count == 1


def num_objects() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def test_u3_nothing_is_kept_of_answers_that_were_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case U3, the front end's part of it."""
    from cb_backend.serving.backend import TritonPythonModel

    monkeypatch.setattr(Metric, "observe", lambda _self, _value: None)  # the fake server keeps every value
    model: Any = TritonPythonModel()
    model.initialize(server_args(make_repository(folder / "growth", max_num_seqs=8)))
    rng = random.Random(0)
    growth = []
    try:
        for number in range(WARM_UP_ROUNDS + ROUNDS):
            before = num_objects()
            serve(model, rng)
            eventually(lambda: num_in_engine(model) == 0, "the engine is idle")
            if number >= WARM_UP_ROUNDS:
                growth.append(num_objects() - before)
        assert model._responder.num_live == 0
        # What is kept of each request shows in every round; a table that grows, or a message on its way, in one.
        assert min(growth) < MAX_GROWTH, growth
    finally:
        model.finalize()
