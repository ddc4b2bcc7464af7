"""Ends this front end when its server is gone.

A server that is killed cannot tell its stubs, and a stub of 24.10 then waits for it for ever, in its own C++ code: it
keeps its memory and its shared memory region, and its supervisor starts one engine after another. So a thread
waits for the server process to end, and ends this process with it. It knows nothing of models and requests.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from cb_backend.process_watch import ProcessWatch
from cb_backend.serving.shared_regions import regions_of, remove_regions

OWN_COMMAND_LINE = Path("/proc/self/cmdline")
EXIT_CODE = 1

logger = logging.getLogger("cb_backend.serving")


def start_server_watch(server_pid: int, on_end: Callable[[], None] | None = None) -> threading.Thread:
    """Call `on_end` from a thread as soon as the server has ended; by default that ends this process.

    The thread never speaks to the server, so it may go on until the process ends.
    """
    thread = threading.Thread(
        target=_run, args=(ProcessWatch(server_pid), on_end or end_process), name="server-watch", daemon=True
    )
    thread.start()
    return thread


def _run(watch: ProcessWatch, on_end: Callable[[], None]) -> None:
    watch.wait()
    on_end()


def end_process() -> None:
    """End this process without a farewell: every way through the stub's own code would wait for the server."""
    logger.warning("the server is gone; this front end ends")
    remove_regions(regions_of(OWN_COMMAND_LINE.read_bytes()))
    os._exit(EXIT_CODE)
