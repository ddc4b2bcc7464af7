"""What holds for all tests.

Kernels on a machine without a GPU run under Triton's interpreter, which reads its switch when triton is imported. So
the switch is set here, before any test module can import triton. Nothing but tests/kernels runs kernels there.

Hypothesis draws the same examples in every run, so that a test does not fail where nothing has changed, and however
slowly a busy machine draws them. `pytest --hypothesis-profile=default` draws others.

The package's logger is as Python makes it when a test begins, whatever front ends (which keep it to their process) and
simulated worlds (which silence it) were made before, so that tests capture what is logged in any order.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("hypothesis"):  # the tests for a GPU run without it
    from hypothesis import HealthCheck, settings

    settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("steady")


@pytest.fixture(autouse=True)
def logger_as_made() -> Iterator[None]:
    """What a fixture of several tests has made of it is there again after each."""
    logger = logging.getLogger("cb_backend")
    before = logger.level, logger.propagate, list(logger.handlers)
    _set(logger, logging.NOTSET, True, [])
    yield
    _set(logger, *before)


def _set(logger: logging.Logger, level: int, propagate: bool, handlers: list[logging.Handler]) -> None:
    logger.setLevel(level)
    logger.propagate, logger.handlers[:] = propagate, handlers
