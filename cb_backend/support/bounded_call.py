"""A call that may never come back, like one for a file of another machine: whoever asks waits for a while at most."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Running(Generic[T]):
    """One call in a thread of its own, which no end of the process waits for."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._is_done = threading.Event()
        self._value: list[T] = []
        self._error: Exception | None = None
        threading.Thread(target=self._work, name="bounded-call", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        return self._is_done.wait(seconds)

    def result(self) -> T:
        """Of a call that is done. Raises what the call raised."""
        if self._error is not None:
            raise self._error
        return self._value[0]

    def _work(self) -> None:
        try:
            self._value.append(self._call())
        except Exception as error:
            self._error = error
        finally:
            self._is_done.set()


class BoundedCall(Generic[T]):
    """Asks for one thing again and again. Not for several threads at once."""

    def __init__(self) -> None:
        self.is_late = False  # the call that was made last has not come back in time
        self._running: _Running[T] | None = None

    def __call__(self, call: Callable[[], T], seconds: float) -> T:
        """What `call` returns or raises. Raises `TimeoutError` where it takes longer: then the same call goes on, the
        next ones only ask whether it has come back, and none is made beside it."""
        if self._running is None:
            self._running = _Running(call)
        if not self._running.wait(0.0 if self.is_late else seconds):
            self.is_late = True
            raise TimeoutError
        running, self._running, self.is_late = self._running, None, False
        return running.result()
