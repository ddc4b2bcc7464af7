"""When the engine's process collects Python's garbage: when it is idle, and now and then in a load that never pauses.

A collection in the middle of a step would hold up every stream; what exists at the start is never looked at again.
"""

from __future__ import annotations

import gc
import time
from types import TracebackType

BUSY_COLLECT_INTERVAL_S = 30.0


class GarbageSchedule:
    """A context in which only `collect` collects."""

    def __init__(self) -> None:
        self.has_run = False  # steps, since garbage was last collected
        self._next_collect = time.monotonic() + BUSY_COLLECT_INTERVAL_S

    def __enter__(self) -> GarbageSchedule:
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        gc.unfreeze()
        gc.enable()

    def collect_if_due(self, is_idle: bool) -> None:
        if self.has_run and (is_idle or time.monotonic() >= self._next_collect):
            gc.collect()
            self._next_collect = time.monotonic() + BUSY_COLLECT_INTERVAL_S
            self.has_run = False
