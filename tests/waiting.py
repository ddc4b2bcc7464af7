"""How tests wait: for a condition, never for a time, and with a limit that only a failure reaches.

The limit says nothing about how quick anything should be: a machine may be ten times slower than usual, or stop a
process for seconds, and a test must not notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 120.0
_MAX_PAUSE_S = 0.05


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Return when the condition holds. `what` should be: the message of a test that has failed."""
    deadline, pause = time.monotonic() + WAIT_S, 0.002
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_S)
