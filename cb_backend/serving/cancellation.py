"""Finds out which open requests their clients have given up, queued ones included.

The server tells only when asked, one blocking call (about 100 us) a request. So a thread goes round the open
requests: each is asked about every 100 ms, unless that would cost more than a fifth of a core; then less often.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable

from cb_backend.contracts.errors import ErrorCode
from cb_backend.serving.live_request import LiveRequest
from cb_backend.serving.responder import Responder

PERIOD_S = 0.1  # within which each open request is asked about, while the cost allows
TICK_S = 0.01  # the round is spread over ticks, so that the server's message thread is never blocked for long
MAX_SHARE = 0.2  # of a core

logger = logging.getLogger("cb_backend.serving")


class CancellationPoller:
    """The thread that asks. `cancel` ends requests at the engine."""

    def __init__(self, responder: Responder, cancel: Callable[[list[int]], None]) -> None:
        self._responder = responder
        self._cancel = cancel
        self._round: deque[LiveRequest] = deque()
        self._num_per_tick = 1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancellation", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when the thread has ended: it must not speak to the server after that."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(TICK_S if self._responder.num_live else PERIOD_S / 2):
            try:
                self._tick()
            except Exception:
                logger.exception("asking the server about cancelled requests failed")

    def _tick(self) -> None:
        """Ask about the next few requests of the round, for at most a fifth of the tick's time."""
        if not self._round:
            self._round.extend(self._responder.live_requests())
            self._num_per_tick = math.ceil(len(self._round) * TICK_S / PERIOD_S)
        deadline = time.perf_counter() + TICK_S * MAX_SHARE
        for _ in range(min(self._num_per_tick, len(self._round))):
            live = self._round.popleft()
            if _is_cancelled(live) and live.end(ErrorCode.CANCELLED, "Request was cancelled"):
                self._cancel(live.request_ids)
            if time.perf_counter() >= deadline:
                return


def _is_cancelled(live: LiveRequest) -> bool:
    """NOTE: the server frees its side of a request with the final flag; asking after that reads freed memory."""
    if live.is_ended:
        return False
    if not live.close_lock.acquire(blocking=False):
        return False  # its final response is on its way, however long that takes
    try:
        return not live.is_closed and bool(live.response_sender.is_cancelled())
    finally:
        live.close_lock.release()
