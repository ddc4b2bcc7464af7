"""Stands in for a stub process of the server: its command line names a region of shared memory, as a stub's does.

    python -m tests.fakes.stub REGION FOLDER SERVER_PID [--hold before|after]

It notes its region in FOLDER and watches the server as a front end does. `--hold before`: one of its threads then holds
Python's lock for ever. `after`: it takes the lock as soon as the front end has noticed the server's end, for its log is
such a thread's.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import time
from pathlib import Path

from cb_backend.serving.server_watch import OWN_COMMAND_LINE, start_server_watch
from cb_backend.support.shared_regions import note_regions


def hold_the_lock() -> None:
    """As the server's own code does in a stub while it waits for an answer: a call that never returns, and keeps it."""
    ctypes.PyDLL(None).pause()


class HoldingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        hold_the_lock()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("region")
    parser.add_argument("folder", type=Path)
    parser.add_argument("server_pid", type=int)
    parser.add_argument("--hold", choices=("before", "after"))
    options = parser.parse_args()
    note_regions(options.folder, OWN_COMMAND_LINE.read_bytes())
    if options.hold == "after":
        logging.getLogger("cb_backend.serving").addHandler(HoldingHandler())
    start_server_watch(options.server_pid)
    print("running", flush=True)
    if options.hold == "before":
        hold_the_lock()
    time.sleep(3600)


if __name__ == "__main__":
    main()
