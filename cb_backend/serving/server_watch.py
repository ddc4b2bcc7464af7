"""Ends this front end when its server is gone.

A server that is killed cannot tell its stubs, and a stub of 24.10 then waits for it for ever, in its own C++ code: it
keeps its memory and its shared memory region, and its supervisor starts one engine after another. So a thread
waits for the server process to end, and ends this process with it. It knows nothing of models and requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from cb_backend.process_watch import ProcessWatch

SHARED_MEMORY = Path("/dev/shm")
REGION_PREFIX = "triton_python_backend_shm_region_"
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
    remove_region(Path("/proc/self/cmdline").read_bytes())
    os._exit(EXIT_CODE)


def remove_region(command_line: bytes) -> None:
    """Remove the shared memory that a stub's command line names; nobody but its server would."""
    for word in command_line.decode(errors="replace").split("\0"):
        if word.startswith(REGION_PREFIX) and "/" not in word:
            with contextlib.suppress(OSError):
                (SHARED_MEMORY / word).unlink()
