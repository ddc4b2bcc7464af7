"""Ends this front end when its server is gone.

A server that is killed cannot tell its stubs, and a stub of 24.10 then waits for it for ever, in its own C++ code: it
keeps its memory and its shared memory region, and its supervisor starts one engine after another. So a thread
waits for the server process to end, and ends this process with it. It knows nothing of models and requests.

NOTE: the thread may never get to run again: the server's own code holds Python's lock while it waits for an answer to a
message (24.10: wherever a metric is made or set). Then the engine ends this process (`shared_regions.end_stubs`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from cb_backend.support.process_watch import ProcessWatch, end_within
from cb_backend.support.shared_regions import regions_of, remove_regions

OWN_COMMAND_LINE = Path("/proc/self/cmdline")
EXIT_CODE = 1
END_WITHIN_S = 4.0

logger = logging.getLogger("cb_backend.serving")


def start_server_watch(server_pid: int, on_end: Callable[[], None] | None = None) -> threading.Thread:
    """Call `on_end` from a thread as soon as the server has ended; by default that ends this process.

    The thread never speaks to the server, so it may go on until the process ends.
    """
    return ProcessWatch(server_pid).call_at_end(on_end or end_process, "server-watch")


def end_process() -> None:
    """End this process without a farewell: every way through the stub's own code would wait for the server."""
    try:
        end_within(END_WITHIN_S)  # first: from any line on another thread may keep this one from running
        remove_regions(regions_of(OWN_COMMAND_LINE.read_bytes()))
        logger.warning("the server is gone; this front end ends")
    finally:
        os._exit(EXIT_CODE)
