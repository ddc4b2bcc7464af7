"""When metrics are told to the server: twice a second, and at once when a front end falls idle.

Whoever reads /metrics after an answer expects to find it there. So the last open request's figures are published before
its final response goes out, and again when the engine has told of its own end of the work. That costs messages to the
server (a few milliseconds), so it may take `MAX_SHARE` of the time and no more; what it may not do at once is
done half a second later. What is published is `metrics`' business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

INTERVAL_S = 0.5
MAX_SHARE = 0.1
BURST_S = 0.25  # what may be spent at once after a time of saving

logger = logging.getLogger("cb_backend.serving")


class Publisher:
    """Calls `publish` from any thread, one at a time. Never raises."""

    def __init__(self, publish: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._publish = publish
        self._clock = clock
        self._lock = threading.Lock()
        self._is_open = True
        self._credit_s = BURST_S
        self._last_end = clock()

    def publish(self) -> None:
        """Now, whatever it costs: the regular call, every `INTERVAL_S`."""
        with self._lock:
            self._run()

    def publish_if_cheap(self) -> None:
        """Now, unless that has taken more than its share of the time lately."""
        with self._lock:
            saved = (self._clock() - self._last_end) * MAX_SHARE
            if self._credit_s + saved > 0:
                self._run()

    def close(self) -> None:
        """Nothing is published after this returns."""
        with self._lock:
            self._is_open = False

    def _run(self) -> None:
        if not self._is_open:
            return
        begin = self._clock()
        self._credit_s = min(self._credit_s + (begin - self._last_end) * MAX_SHARE, BURST_S)
        try:
            self._publish()
        except Exception:
            logger.exception("metrics could not be published")
        self._last_end = self._clock()
        self._credit_s -= self._last_end - begin
