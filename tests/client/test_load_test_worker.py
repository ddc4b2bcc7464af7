"""What a process of the load test tells its parent, in which order. pytest tests/client/test_load_test_worker.py"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import pytest
from load_generator import worker
from load_generator.contracts import Done, Progress, WorkerSpec
from load_generator.prompts import Vocabulary
from load_generator.wire import WireOptions

from cb_backend.traffic.workload import PlannedRequest


class PipeThatStalls:
    """A pipe whose first Progress takes long: until the Done is sent beside it, or a second, in which nobody does."""

    def __init__(self, pipe: Connection) -> None:
        self.sent: list[Any] = []
        self.fileno, self.recv = pipe.fileno, pipe.recv
        self._is_done = threading.Event()

    def send(self, message: Any) -> None:
        if isinstance(message, Done):
            self._is_done.set()
        elif isinstance(message, Progress) and not any(isinstance(each, Progress) for each in self.sent):
            self._is_done.wait(timeout=1.0)
        self.sent.append(message)


def test_no_record_is_overtaken_by_the_last_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent stops listening at the Done: what comes after it would be lost, records and all."""

    async def exchange(stream: Any, request: bytes, record: Any, clock: Any, **options: Any) -> None:
        await asyncio.sleep(0.05)

    monkeypatch.setattr(worker, "exchange", exchange)
    monkeypatch.setattr(worker, "PROGRESS_INTERVAL_S", 0.12)
    spec = WorkerSpec(
        process=0,
        url="localhost:1",
        wire=WireOptions(model="llm"),
        vocabulary=Vocabulary(),
        seed=0,
        requests=[PlannedRequest(i, 0.0, 4, 4) for i in range(4)],
        warm_up=[],
        num_streams=1,
        num_requests=4,
        duration_s=None,
        drain_timeout_s=60.0,
        request_timeout_s=None,
        num_connections=1,
    )
    here, there = multiprocessing.Pipe()
    pipe = PipeThatStalls(there)
    here.send(("start", time.perf_counter()))
    asyncio.run(worker._Worker(spec, pipe, count().__next__).run())  # type: ignore[arg-type]
    assert isinstance(pipe.sent[-1], Done), [type(each).__name__ for each in pipe.sent]
    assert any(isinstance(each, Progress) for each in pipe.sent), "the run was long enough for a report"
    parts = [each.progress if isinstance(each, Done) else each for each in pipe.sent[1:]]
    assert sorted(record.request_id for part in parts for record in part.records) == [0, 1, 2, 3]
