"""How the engine process ends, and what it does first where its server has ended without a word.

It does not know the loop: that notices the server's end by itself, unless it is loading a model, or hangs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from cb_backend.support.process_watch import ProcessWatch, end_within
from cb_backend.support.shared_regions import end_stubs

STUBS_GRACE_S = 3.0  # after the server's end, for front ends to end by themselves
END_WITHIN_S = 5.0  # after that, for the loop to end by itself


class ServerEnding:
    """Waits for the end of the server on a thread of its own. Then it ends front ends that cannot end themselves, and
    sees to it that this process ends."""

    def __init__(self, server_pid: int, runtime_folder: Path) -> None:
        self._folder = runtime_folder
        self._server = ProcessWatch(server_pid)
        self._thread = self._server.call_at_end(self._follow, "server-watch")

    def wait_if_begun(self) -> None:
        """Before this process ends: return when no front end is left, or at once while the server lives."""
        if not self._server.is_alive:
            self._thread.join()

    def _follow(self) -> None:
        try:
            end_stubs(self._folder, STUBS_GRACE_S)
        finally:
            end_within(END_WITHIN_S)


def leave(exit_code: int) -> NoReturn:
    """End at once: taking torch and its threads down in order takes seconds, out of the server's exit timeout."""
    with contextlib.suppress(OSError):  # of a log that cannot be written
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)
