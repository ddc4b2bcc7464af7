"""Ctrl-C between steps: a step that is broken off in its middle would leave the engine's books wrong."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def whole() -> Iterator[None]:
    """What runs inside is not interrupted by Ctrl-C; it takes effect at the end, as the program has chosen.

    A second Ctrl-C takes effect at once. Outside the main thread, and where the program has no handler, nothing is
    changed.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    seen: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            previous(number, frame)
        seen.append((number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if seen:
            previous(*seen[0])
