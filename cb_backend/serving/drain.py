"""Notices that the server is stopping (or unloading this model), which nothing tells a Python model.

From that moment the server still delivers what open requests send, until its exit time limit; it calls `finalize` only
when every request has had its final response. So: refuse new work, let running requests go on, and end the rest
shortly before the limit, so that no client is left without an answer.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils

DEFAULT_EXIT_TIMEOUT_S = 30.0
DEFAULT_HTTP_PORT = 8000
MAX_MARGIN_S = 2.0  # before the exit limit
MAX_MARGIN_SHARE = 0.2
NUM_SIGNS = 2  # looks in a row that must agree, one look may hit a hiccup

logger = logging.getLogger("cb_backend.serving")


class DrainWatch:
    """`check` from time to time; once `is_draining`, it stays so. `is_time_up`: end what is still open."""

    def __init__(self, server_pid: int, model_name: str, model_version: str) -> None:
        self._model = (model_name, model_version)
        self._arguments = server_arguments(server_pid)
        self._has_been_ready = False
        self._http_listener: tuple[Path, str] | None = None
        self._server_pid = server_pid
        self._num_signs = 0
        self._first_sign = 0.0
        self._deadline: float | None = None

    @property
    def is_draining(self) -> bool:
        return self._deadline is not None

    @property
    def is_time_up(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def check(self) -> None:
        """Ask the server for the model's readiness (a blocking call of about 0.2 ms) and look at its listener."""
        if self.is_draining:
            return
        if not self._has_been_ready:
            if self._is_model_ready():
                self._has_been_ready = True
                port = int(self._arguments.get("http-port", DEFAULT_HTTP_PORT))
                self._http_listener = find_listener(self._server_pid, port)
            return
        if self._is_model_ready() and self._is_listening():
            self._num_signs = 0
            return
        if self._num_signs == 0:
            self._first_sign = time.monotonic()
        self._num_signs += 1
        if self._num_signs >= NUM_SIGNS:
            limit = float(self._arguments.get("exit-timeout-secs", DEFAULT_EXIT_TIMEOUT_S))
            self._deadline = self._first_sign + limit - min(MAX_MARGIN_S, MAX_MARGIN_SHARE * limit)
            logger.info("the server is stopping this model: new requests are refused, open ones may go on for a while")

    def _is_model_ready(self) -> bool:
        try:
            return bool(pb_utils.is_model_ready(*self._model))
        except pb_utils.TritonModelException:  # "Server not ready": it is starting, or stopping
            return False

    def _is_listening(self) -> bool:
        if self._http_listener is None:
            return True
        link, target = self._http_listener
        try:
            return os.readlink(link) == target
        except OSError:
            return False


def server_arguments(server_pid: int) -> dict[str, str]:
    """The server's command line as a dict; empty where it cannot be read or the server is embedded."""
    try:
        words = Path(f"/proc/{server_pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    arguments: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, is_joined, value = word[2:].partition("=")
            arguments[name] = value if is_joined else following
    return arguments


def find_listener(pid: int, port: int) -> tuple[Path, str] | None:
    """The process's listening socket on a TCP port, as (link in /proc, what it points to), or None.

    The server closes its HTTP listener first of all when it stops, but waits for open HTTP connections before it says
    that it is not ready.
    """
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)
            if target in inodes:
                return link, target
    except OSError:
        pass
    return None
