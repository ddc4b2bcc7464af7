"""The serving room's tests run outside the server: its module is replaced before anything imports it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import fake_server

fake_server.install()

from cb_backend.contracts.errors import ErrorCode  # noqa: E402
from tests.serving.response_bench import Bench  # noqa: E402


@pytest.fixture(autouse=True)
def _no_violations() -> Iterator[None]:
    fake_server.violations.clear()
    yield
    assert fake_server.violations == []


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, slow_reader_timeout_s=3600.0)  # a test of slow readers sets its own
    yield bench
    bench.responder.end_all(ErrorCode.UNAVAILABLE, "the test is over")
    bench.responder.close()
    assert bench.responder.num_live == 0
