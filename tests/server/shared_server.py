"""A server that many tests share. If it dies under one of them, that one fails, and the next gets a new server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from cb_backend.cli.server.server_process import ServerProcess, http_status

ANSWER_S = 30.0  # a server that has not answered by then hangs: so does 24.10 when it aborts inside of malloc
NUM_LAST_LINES = 40


class HasProcess(Protocol):
    """What `SharedServer` has to know of a server."""

    process: ServerProcess


T = TypeVar("T", bound=HasProcess)


class ServerDied(AssertionError):  # noqa: N818 as it is shown
    """In the test that met it. The message ends with the server's last lines."""


class SharedServer(Generic[T]):
    """Starts one when it is asked for, and another if the last has died."""

    def __init__(self, start: Callable[[], contextlib.AbstractContextManager[T]]) -> None:
        self._start = start
        self._running: T | None = None
        self._ending = contextlib.ExitStack()

    def get(self) -> T:
        if self._running is None:
            self._running = self._ending.enter_context(self._start())
        return self._running

    def check(self, is_suspected: bool) -> None:
        """After a test. `is_suspected`: it has failed, so ask whether the server still answers. Raises `ServerDied`."""
        if self._running is None:
            return
        process = self._running.process
        if process.poll() is None and not (is_suspected and not self._answers(process)):
            return
        code = process.poll()
        how = "did not answer any more" if code is None else f"ended with {code}"
        process.kill()
        lines = "\n".join(process.last_lines(NUM_LAST_LINES))
        self._running = None
        with contextlib.suppress(AssertionError):  # what it says of a dead server is said here
            self._ending.close()
        raise ServerDied(f"the shared server {how} during this test; the next test gets a new one. It said:\n{lines}")

    def close(self) -> None:
        self._running = None
        self._ending.close()

    @staticmethod
    def _answers(process: ServerProcess) -> bool:
        return http_status(process.http_address, "/v2/health/live", timeout=ANSWER_S) is not None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around a test: if the server dies, this is what the test fails with, whatever else it has met."""
        try:
            yield
        except BaseException:
            self.check(is_suspected=True)
            raise
        self.check(is_suspected=False)
