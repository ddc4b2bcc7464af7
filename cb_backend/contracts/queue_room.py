"""How much room an engine's queue has, as its front ends know it: enough to refuse without asking.

The engine decides who is refused, but it does so between steps, and a front end has to read and tokenise the request
before it can ask. While the queue is nearly full the engine therefore tells its front ends how many requests it still
takes, and each of them counts down what it sends. A front end that knows of no room refuses at once; as it does not
count what the others send, it may only refuse too few, and the engine refuses the rest.
"""

from __future__ import annotations

import threading

import msgspec

TOLD_BELOW = 64  # requests; with more room than this nobody refuses by himself


class QueueRoom(msgspec.Struct, tag=True, frozen=True):
    """Engine to front end: how many more requests the queue takes. None: many."""

    num_requests: int | None
    refusal: str = ""  # what to tell the others


MUCH_ROOM = QueueRoom(None)


class RefusedRequests(msgspec.Struct, tag=True, frozen=True):
    """Front end to engine: so many were refused since the last such message, for the statistics."""

    num_requests: int


class KnownRoom:
    """What one front end knows of one engine's queue. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_left: int | None = None
        self._refusal = ""
        self._num_refused = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing more is taken, as far as is known here."""
        return self._num_left == 0

    def told(self, room: QueueRoom) -> None:
        """Requests that are on their way are not in it; when they arrive, the engine tells again."""
        with self._lock:
            self._num_left, self._refusal = room.num_requests, room.refusal

    def forget(self) -> None:
        """The engine is gone; of the next one nothing is known."""
        with self._lock:
            self._num_left = None

    def take(self) -> None:
        """A request is sent."""
        with self._lock:
            if self._num_left:
                self._num_left -= 1

    def give_back(self, num_requests: int) -> None:
        """So many are cancelled."""
        with self._lock:
            if self._num_left is not None:
                self._num_left += num_requests

    def refuse(self) -> str:
        """A request is refused because `is_full`; returns what to tell it."""
        with self._lock:
            self._num_refused += 1
            return self._refusal

    def take_refused(self) -> RefusedRequests | None:
        """What the engine has to be told of refusals, once; None if there were none."""
        with self._lock:
            num_refused, self._num_refused = self._num_refused, 0
        return RefusedRequests(num_refused) if num_refused else None
