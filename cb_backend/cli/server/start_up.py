"""Waiting for a server that starts: aloud, and not for one that will never be ready.

A server of 24.10 waits for ever for a Python model's process that has ended before it could say anything, and it
listens, without a word, on an address that nobody can reach when it is told one that it cannot read. It knows the
server's processes and its log; it does not know models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.model_repository import odd_characters
from cb_backend.cli.server.server_log import load_failures
from cb_backend.cli.server.server_process import ServerProcess
from cb_backend.support.silence import SilenceClock

LOOK_S = 0.5
PROGRESS_EVERY_S = 10.0
STALLED_S = 10.0  # what is wrong for so long does not mend itself
FORBIDDEN = (401, 403)
_SHOWN_LINES = 2


class PartlyLoadedError(CliError):
    """The server runs, and was told to go on without a model that could not be loaded. It does not become ready."""


def wait_ready_aloud(
    server: ServerProcess,
    say: Callable[[str], None],
    timeout: float = math.inf,
    is_given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until the server is ready, saying now and then that it still loads. Returns also when it is given up.

    Raises `CliError` with the reason if the server ends, or cannot become ready (`PartlyLoadedError`: it serves what it
    could load); with its last line when `timeout`
    seconds are over.
    """
    started = time.monotonic()
    next_progress = started + PROGRESS_EVERY_S
    stall = _StallWatch(server)
    while not is_given_up():
        try:
            return server.wait_ready(LOOK_S)
        except TimeoutError:
            now = time.monotonic()
        if now - started > timeout:
            raise CliError(f"the server was not ready after {now - started:.0f} s; its last line: {_last(server, 1)}")
        if server.says_it_listens() and (failures := load_failures(list(server.lines))):
            raise PartlyLoadedError("; ".join(failures))
        stall.check()
        if now >= next_progress:
            next_progress = now + PROGRESS_EVERY_S
            say(f"still loading after {now - started:.0f} s")


class _StallWatch:
    """`check` while the server is not ready; raises `CliError` once it has been stuck for a while."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._clock = SilenceClock()

    def check(self) -> None:
        reason = _why_never_ready(self._server)
        if reason is None:
            self._clock.heard()
        elif self._clock.look() >= STALLED_S:
            raise CliError(reason)


def _why_never_ready(server: ServerProcess) -> str | None:
    """What keeps the server from ever being ready, if it lasts."""
    if server.dead_children():
        return (
            "a Python model's process has ended while it was started, and the server would wait for it for ever; "
            f"its last lines: {_last(server, _SHOWN_LINES)}{_shell_hint(server)}"
        )
    if not server.says_it_listens():
        return None
    health = server.health()
    if health in FORBIDDEN:
        return (
            f"the server refuses to say whether it is ready (HTTP status {health}); leave `health` out of "
            "--http-restricted-api, or give it as `health:NAME=VALUE`"
        )
    if health is None:
        return (
            f"the server says that it is there, but nobody answers at http://{server.http_address}; "
            "--host must be an IP address or the name of one of this machine"
        )
    return None


def _shell_hint(server: ServerProcess) -> str:
    """The part of the repository's path that the server's command line for such a process cannot hold."""
    repository = server.options.model_repository
    folders = (path.name for path in repository.iterdir() if path.is_dir()) if repository.is_dir() else ()
    for name in (str(repository), *folders):
        if odd := odd_characters(name):
            return (
                f"; the server starts it by a shell's command line, which cannot hold {odd} of {name!r}: rename that "
                "folder, or link it from a path of letters, digits, '_', '-' and '.'"
            )
    return ""


def _last(server: ServerProcess, count: int) -> str:
    return " / ".join(server.last_lines(count)) or "it printed nothing"
