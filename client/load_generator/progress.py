"""What the user sees while a run goes on: one line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from .contracts import Progress

PLAIN_INTERVAL_S = 5.0
RATE_WINDOW_S = 3.0
STARTING = "starting, warming up"  # nothing is counted before it is over


class Display(Protocol):
    """Called with the seconds since the start and the totals so far."""

    def __call__(self, elapsed_s: float, totals: Progress) -> None: ...


class _Line:
    """The text of a moment. The rate is over the last seconds, not since the start."""

    def __init__(self, label: str, num_requests: int | None) -> None:
        self._label = label
        self._num_requests = num_requests
        self._window: deque[tuple[float, int]] = deque()

    def text(self, elapsed_s: float, totals: Progress) -> str:
        self._window.append((elapsed_s, totals.num_tokens))
        while len(self._window) > 2 and self._window[0][0] < elapsed_s - RATE_WINDOW_S:
            self._window.popleft()
        (start, before), (end, after) = self._window[0], self._window[-1]
        rate = (after - before) / (end - start) if end > start else 0.0
        of = f"/{self._num_requests}" if self._num_requests else ""
        return (
            f"{self._label}: {max(0.0, elapsed_s):6.1f} s  sent {totals.num_sent}{of}  "
            f"in flight {totals.num_sent - totals.num_done}  done {totals.num_done}  "
            f"failed {totals.num_failed}  {rate:,.0f} tokens/s"
        )


@contextmanager
def show_progress(label: str, num_requests: int | None) -> Iterator[Display]:
    """A display for one run, on stderr, so that stdout has the result alone."""
    line = _Line(label, num_requests)
    if not sys.stderr.isatty():
        last = -PLAIN_INTERVAL_S
        print(f"{label}: {STARTING}", file=sys.stderr, flush=True)

        def plain(elapsed_s: float, totals: Progress) -> None:
            nonlocal last
            text = line.text(elapsed_s, totals)
            if time.monotonic() - last >= PLAIN_INTERVAL_S:
                last = time.monotonic()
                print(text, file=sys.stderr, flush=True)

        yield plain
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{label}: {STARTING}") as status:
        yield lambda elapsed_s, totals: status.update(line.text(elapsed_s, totals))
