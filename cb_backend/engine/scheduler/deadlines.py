"""Until when requests are willing to wait, and which of them have waited too long.

Knows times and states of requests; ending one is the scheduler's work. Time is told to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from cb_backend.contracts.request import Request, RequestStatus


class Deadlines:
    """A heap of deadlines. Those of requests that have ended stay in it until they are due, or until most have."""

    def __init__(self, timeout_ms: int | None, queue_timeout_ms: int | None) -> None:
        """Both are for requests that set none of their own; None: no limit."""
        self._timeout_ms = timeout_ms
        self._queue_timeout_ms = queue_timeout_ms
        self._heap: list[tuple[float, int, int, bool, Request]] = []  # due, number, milliseconds, is of the queue
        self._num_added = 0
        self._most = 1024  # the heap is swept beyond this size

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request that has just arrived."""
        own = request.scheduling
        self._push(request, own.timeout_ms or self._timeout_ms, is_queue=False)
        self._push(request, own.queue_timeout_ms or self._queue_timeout_ms, is_queue=True)

    def due(self, now: float) -> Iterator[tuple[Request, str]]:
        """Requests whose time is over, with what to tell their clients. End each before asking for the next."""
        while self._heap and self._heap[0][0] <= now:
            _, _, timeout_ms, is_queue, request = heapq.heappop(self._heap)
            if not _is_watched(request, is_queue):
                continue
            if is_queue or request.status is RequestStatus.WAITING:
                name = "queue_timeout_ms" if is_queue else "timeout_ms"
                yield request, f"timed out after {timeout_ms} ms in the queue ({name}); try again later"
            else:
                yield request, f"timed out after {timeout_ms} ms (timeout_ms) before its last token"

    def _push(self, request: Request, timeout_ms: int | None, is_queue: bool) -> None:
        if timeout_ms is None:
            return
        self._num_added += 1
        due = request.arrival_time + timeout_ms / 1000
        heapq.heappush(self._heap, (due, self._num_added, timeout_ms, is_queue, request))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if _is_watched(entry[4], entry[3])]
            heapq.heapify(self._heap)
            self._most = max(1024, 2 * len(self._heap))


def _is_watched(request: Request, is_queue: bool) -> bool:
    """Whether the deadline can still be missed; the queue's ends when the request runs for the first time."""
    return request.status is RequestStatus.WAITING if is_queue else not request.status.is_finished
