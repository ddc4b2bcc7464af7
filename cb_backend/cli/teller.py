"""Says which of several runs goes on, and now and then how far it is. To stderr: stdout is the command's result."""

from __future__ import annotations

import sys
import time

from cb_backend.study.replay import Progress

TELL_EVERY_S = 5.0


class Teller:
    """A `study.replay.Say`. `begin`: `time.monotonic` from which it counts."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._last = begin

    def __call__(self, name: str) -> Progress:
        self._last = time.monotonic()
        self.note(name)
        return self._tell

    def note(self, text: str) -> None:
        print(f"{time.monotonic() - self._begin:7.1f} s  {text}", file=sys.stderr, flush=True)

    def _tell(self, num_ended: int, num_requests: int) -> None:
        now = time.monotonic()
        if now - self._last >= TELL_EVERY_S:
            self._last = now
            self.note(f"  {num_ended} of {num_requests} requests")
