"""The serving room's tests run outside the server: its module is replaced before anything imports it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import fake_server

fake_server.install()


@pytest.fixture(autouse=True)
def _no_violations() -> Iterator[None]:
    fake_server.violations.clear()
    yield
    assert fake_server.violations == []
