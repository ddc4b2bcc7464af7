"""The OpenAI gateway as a process beside a server that runs: started when that is ready, kept up, ended with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.addresses import family_of, why_taken, with_port
from cb_backend.serving.server_arguments import reachable_host

DEFAULT_PORT = 9000
START_S = 30.0
END_S = 10.0  # of its own drain, after the server's
WATCH_EVERY_S = 0.5
FIRST_PAUSE_S = 0.5  # before it is started again; twice as long each time that it ends soon
LONGEST_PAUSE_S = 30.0


@contextlib.contextmanager
def gateway_beside(host: str, port: int | None, grpc_address: str, options: Sequence[str] = ()) -> Iterator[str | None]:
    """A gateway on `host`:`port` for the server at `grpc_address`; gives its address.

    `options`: more words of its command line. `port` None: the default one, and where somebody has that already no
    gateway is started: then it gives None. Raises `CliError` where a port that was asked for is taken, or the gateway
    ends at once.
    """
    number = DEFAULT_PORT if port is None else port
    if why_taken(host, number) is not None:
        if port is not None:
            raise CliError(f"port {port} of --openai-port is in use; choose another, or --no-openai")
        yield None
        return
    command = [sys.executable, "-m", "cb_backend.cli.main", "openai", "--beside-server", "--url", grpc_address]
    kept = _Kept([*command, "--host", host, "--port", str(number), *options])
    try:
        is_there = _wait_listening(kept.process, host, number)
        if not is_there and port is not None:
            raise CliError(
                f"the OpenAI gateway ended with exit code {kept.process.returncode}; its reason stands above"
            )
        if is_there:
            kept.watch()
        yield with_port(host, number) if is_there else None
    finally:
        kept.end()


class _Kept:
    """The gateway's process; once it is watched, one that ends by itself is started again."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._is_ending = threading.Event()
        self._watcher: threading.Thread | None = None
        self.process = self._start()

    def watch(self) -> None:
        self._watcher = threading.Thread(target=self._watch, name="gateway-watch", daemon=True)
        self._watcher.start()

    def end(self) -> None:
        self._is_ending.set()
        if self._watcher is not None:
            self._watcher.join()
        self.process.terminate()
        try:
            self.process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._end_workers()

    def _end_workers(self) -> None:
        """Those of a gateway that has been killed would keep its port."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _start(self) -> subprocess.Popen[bytes]:
        # A group of its own: Ctrl-C of a terminal is for the server, which drains; the gateway ends after it.
        return subprocess.Popen(self._command, start_new_session=True)

    def _watch(self) -> None:
        pause, began = FIRST_PAUSE_S, time.monotonic()
        while not self._is_ending.wait(WATCH_EVERY_S):
            if self.process.poll() is None:
                continue
            if time.monotonic() - began > LONGEST_PAUSE_S:  # it ran well for a while
                pause = FIRST_PAUSE_S
            self._end_workers()
            code = self.process.returncode
            _say(f"the OpenAI gateway ended with exit code {code}; starting it again in {pause:g} s")
            if self._is_ending.wait(pause):
                return
            pause, began = min(2 * pause, LONGEST_PAUSE_S), time.monotonic()
            try:
                self.process = self._start()
            except OSError as error:  # no memory or no process left; later there may be
                _say(f"the OpenAI gateway could not be started ({error}); next try in {pause:g} s")


def _say(line: str) -> None:
    """Where nobody reads any more, the gateway is kept up all the same."""
    with contextlib.suppress(OSError, ValueError):
        print(line, flush=True)


def _wait_listening(process: subprocess.Popen[bytes], host: str, port: int) -> bool:
    """False if it ends instead: somebody was faster at the port."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        with socket.socket(family_of(host)) as probe:
            if probe.connect_ex((reachable_host(host), port)) == 0:
                return True
        time.sleep(0.05)
    raise CliError(f"the OpenAI gateway does not listen on port {port} after {START_S:g} s; --no-openai leaves it out")
