"""Wakes a thread that waits for file descriptors. Any thread may ring."""

from __future__ import annotations

import os
import threading


class Bell:
    """`fd` is readable from a `ring` until it is `heard`. Rings after `close` do nothing."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # who comes late must not write into a file that has got this number since

    def ring(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def heard(self) -> None:
        """For the thread that waits, once `fd` is readable."""
        os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            os.close(self.fd)
            self.fd = -1
