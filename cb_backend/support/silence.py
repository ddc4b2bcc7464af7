"""How long another process has said nothing, counted only while this one was listening.

A process that was stopped, computed for long or slept with its machine finds old silence when it wakes, though what it
missed lies in its socket. So each look adds at most `MAX_LOOK_S`. It does not know who is listened to, nor what
follows from silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_LOOK_S = 1.0


class SilenceClock:
    """`heard` at each sign of life, `look` at least once a second. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_look = clock()
        self.seconds = 0.0  # of silence, as of the last look

    def heard(self) -> None:
        self.seconds = 0.0
        self._last_look = self._clock()

    def look(self) -> float:
        """Count the time since the last look; returns the seconds of silence so far."""
        now = self._clock()
        self.seconds += min(now - self._last_look, MAX_LOOK_S)
        self._last_look = now
        return self.seconds
