"""What one test does to the package's logger, the next does not notice: pytest tests/unit/test_captured_logs.py"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

LOGGER = logging.getLogger("cb_backend")


def silence() -> None:
    """What a simulated world does."""
    LOGGER.setLevel(logging.CRITICAL + 1)


def keep_to_itself() -> None:
    """What a front end does in the server's process."""
    LOGGER.addHandler(logging.NullHandler())
    LOGGER.propagate = False


# Each test finds what the one before it has left.
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("leave", [silence, keep_to_itself])
def test_a_test_captures_what_is_logged_whatever_ran_before_it(
    caplog: pytest.LogCaptureFixture, leave: Callable[[], None], number: int
) -> None:
    with caplog.at_level(logging.WARNING):
        logging.getLogger("cb_backend.models").warning("said %d: %s", number, leave.__name__)
    assert f"said {number}: {leave.__name__}" in caplog.text
    assert LOGGER.handlers == []
    leave()
