"""Requests that have a model sleep or wake: how many may wait at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from cb_backend.contracts.errors import ErrorCode, UnavailableError
from cb_backend.contracts.messages import decode_front_end_message, encode
from cb_backend.contracts.rest import CallOffOrders, RestAnswer, SetRest
from cb_backend.front_end.engines.runtime_dir import EngineLife
from cb_backend.serving import rest_request
from cb_backend.serving.rest_request import MAX_WAITING, answer_rest
from cb_backend.support.process_watch import process_start_time
from tests.waiting import WAIT_S, eventually


class Live:
    """A request of a client."""

    def __init__(self) -> None:
        self.errors: list[tuple[ErrorCode, str]] = []
        self.is_ended = False

    def end(self, code: ErrorCode, text: str) -> None:
        self.errors.append((code, text))


class SlowEngine:
    """Says only at last that it starts."""

    life = SimpleNamespace(socket_path="")

    def __init__(self) -> None:
        self.gate = threading.Event()

    @property
    def is_ready(self) -> bool:
        self.gate.wait(30)
        return False


def test_so_many_wait_and_no_more() -> None:
    engine: Any = SlowEngine()
    lives: list[Any] = [Live() for _ in range(MAX_WAITING)]
    for live in lives:
        answer_rest(live, "sleep", [engine])
    one_more: Any = Live()
    with pytest.raises(UnavailableError, match=f"{MAX_WAITING} requests wait for the model to wake already"):
        answer_rest(one_more, "wake", [engine])
    engine.gate.set()
    eventually(lambda: all(live.errors for live in lives), "all are answered")
    assert {live.errors[0][0] for live in lives} == {ErrorCode.UNAVAILABLE}
    eventually(lambda: _has_place(engine), "their places are free again")


def test_a_client_that_leaves_calls_its_order_off_and_its_place_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a model that is busy for long slept, much later, for somebody who had gone."""
    places = threading.BoundedSemaphore(1)
    monkeypatch.setattr(rest_request, "_places", places)
    folder = tempfile.mkdtemp(prefix="cb-", dir="/tmp")  # a socket's path has at most 107 bytes
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{folder}/engine")

        def told() -> tuple[bytes, object]:
            assert router.poll(1000 * WAIT_S)
            identity, data = router.recv_multipart()
            return identity, decode_front_end_message(data)

        life = EngineLife(os.getpid(), process_start_time(os.getpid()) or 0, f"{folder}/engine")
        engine: Any = SimpleNamespace(life=life, is_ready=True)
        live: Any = Live()
        answer_rest(live, "sleep", [engine, engine])
        identity, order = told()
        assert isinstance(order, SetRest)
        live.is_ended = True
        assert told() == (identity, CallOffOrders())
        router.send_multipart([identity, encode(RestAnswer("awake", "it was called off before it began"))])
        assert places.acquire(timeout=WAIT_S)
        assert not router.poll(100), "the other engine is told nothing"
    shutil.rmtree(folder)


def _has_place(engine: Any) -> bool:
    try:
        answer_rest(Live(), "sleep", [engine])  # type: ignore[arg-type]
    except UnavailableError:
        return False
    return True
