"""A model that the server has stopped and never takes down does not keep its engine, and the memory with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cb_backend.serving import housekeeping
from cb_backend.support.process_watch import process_start_time
from tests.serving.driven_model import ask, folder, make_repository, server_args
from tests.serving.fake_server import TritonError
from tests.waiting import eventually

__all__ = ["folder"]  # a fixture
ENDLESS = {"max_tokens": 15_000}


class Server:
    """What its readiness probe says, and the front ends of one model."""

    def __init__(self, repository: Path) -> None:
        self.is_ready = True
        self.models: list[Any] = []
        self._repository = repository

    def add_front_end(self) -> Any:
        from cb_backend.serving.backend import TritonPythonModel

        model = TritonPythonModel()
        model.initialize(server_args(self._repository, len(self.models)))
        self.models.append(model)
        eventually(lambda: model._housekeeping._drain.has_been_ready, "it has seen the server ready")
        return model

    def stop(self) -> None:
        self.is_ready = False
        for model in self.models:
            eventually(lambda model=model: model._housekeeping.is_draining, "the stop is noticed")  # type: ignore[misc]


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(make_repository(folder / tmp_path.name, max_num_seqs=8, max_model_len=15_200))
    monkeypatch.setattr(housekeeping, "readiness_probe", lambda *_: lambda: server.is_ready)
    monkeypatch.setattr(housekeeping, "LET_GO_S", 0.5)
    yield server
    for model in server.models:
        model.finalize()  # as when the server takes it down at last


def engine_of(model: Any) -> tuple[int, int]:
    life = model._client.members[0].life
    return life.pid, life.start_time


def is_gone(engine: tuple[int, int]) -> bool:
    pid, start_time = engine
    return process_start_time(pid) != start_time


def test_s92_an_idle_engine_is_given_up_and_requests_are_refused(server: Server) -> None:
    model = server.add_front_end()
    assert ask(model, "a", sampling={"max_tokens": 2}).sender.wait().text == "bc"
    engine = engine_of(model)
    server.stop()
    eventually(lambda: is_gone(engine), "the engine has ended")
    assert (ask(model, "a").sender.wait().error or (None,))[0] == TritonError.UNAVAILABLE


def test_s92_not_before_the_last_request_has_ended(server: Server) -> None:
    model = server.add_front_end()
    open_one = ask(model, "a", sampling=ENDLESS).sender
    eventually(lambda: bool(open_one.responses), "the request runs")
    engine = engine_of(model)
    server.stop()
    num_before = len(open_one.responses)
    eventually(lambda: len(open_one.responses) > num_before + 200, "it goes on for a second and more")
    assert (is_gone(engine), open_one.final_count) == (False, 0)
    open_one.cancel()
    open_one.wait()
    eventually(lambda: is_gone(engine), "the engine has ended")


def test_s92_not_while_another_front_end_has_requests(server: Server) -> None:
    model, other = server.add_front_end(), server.add_front_end()
    engine = engine_of(model)
    open_one = ask(other, "a", sampling=ENDLESS).sender
    eventually(lambda: bool(open_one.responses), "the request runs")
    server.stop()
    eventually(lambda: model._housekeeping._has_let_go, "the idle one leaves")
    num_before = len(open_one.responses)
    eventually(lambda: len(open_one.responses) > num_before + 50, "the other's request goes on")
    assert not is_gone(engine)
    open_one.cancel()
    open_one.wait()
    eventually(lambda: is_gone(engine), "the engine has ended")


def test_s92_not_while_the_model_is_served(server: Server) -> None:
    model = server.add_front_end()
    engine = engine_of(model)
    for _ in range(3):
        turns = model._housekeeping._next_publish
        eventually(lambda turns=turns: model._housekeeping._next_publish > turns, "half a second has gone by")  # type: ignore[misc]
    assert not is_gone(engine)
    assert ask(model, "a", sampling={"max_tokens": 2}).sender.wait().text == "bc"
