"""One running server: start it, wait until it is ready, hand its output on, stop it, leave no process behind.

Knows processes, ports and the server's log format; it does not know models or what they serve.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.addresses import check_port, http_status, with_port
from cb_backend.cli.server.local_server import ServerInstallation
from cb_backend.cli.server.processes import ProcessId, dead_children, descendants, session_members
from cb_backend.cli.server.server_log import failure_reason, is_worth_showing
from cb_backend.serving import server_arguments
from cb_backend.serving.server_arguments import access_headers, client_host, is_on, listen_address
from cb_backend.support.silence import SilenceClock

READY_POLL_S = 0.1
KILL_GRACE_S = 5.0  # for what the server leaves behind, after it has ended
LAST_LINES_S = 2.0  # for its output to be read to the end
LISTENING = "Started HTTPService at "  # in the server's log
_PR_SET_PDEATHSIG = 1
_FIRST_PORT = 10_000  # of those that free ports are taken from
_LOCAL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_libc = ctypes.CDLL(None)  # loaded before any fork


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to start a server."""

    model_repository: Path
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    exit_timeout_secs: int = 30
    extra_arguments: tuple[str, ...] = ()
    extra_environment: dict[str, str] = field(default_factory=dict)


class ServerProcess:
    """A server and its output. `start`, then `wait_ready`; always `stop` or `kill` it in the end."""

    def __init__(
        self, installation: ServerInstallation, options: ServerOptions, on_line: Callable[[str], None] | None = None
    ) -> None:
        """`on_line` gets each line of output from a thread of this object."""
        self.options = options
        self.lines: deque[str] = deque(maxlen=4000)  # the newest output, for reasons and tests
        self._installation = installation
        self.arguments = server_arguments.parse(self.command())  # by name, without dashes
        self._on_line = on_line
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() first"
        return self._process.pid

    @property
    def http_address(self) -> str:
        return self._address("http")

    @property
    def grpc_address(self) -> str:
        return self._address("grpc")

    @property
    def metrics_address(self) -> str:
        return self._address("metrics")

    @property
    def has_metrics(self) -> bool:
        return is_on(self.arguments, "allow-metrics")

    def _address(self, protocol: str) -> str:
        host = client_host(self.arguments, protocol)
        return with_port(host, self.arguments[f"{protocol}-port"])

    def start(self) -> None:
        """Start the server. Raises `CliError` if a port is taken, or if nobody could ask whether it is ready. Call it
        from a thread that outlives the server: the server is told to end when that thread ends."""
        if not is_on(self.arguments, "allow-http"):
            raise CliError("the server is asked over HTTP whether it is ready; leave --allow-http on")
        check_ports(self.options)
        self._process = subprocess.Popen(
            self.command(),
            env={**self._installation.environment, **self.options.extra_environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A session of its own: Ctrl-C in the terminal reaches us alone, and we ask the server to drain.
            start_new_session=True,
            preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        self._reader = threading.Thread(target=self._read_output, name="server-output", daemon=True)
        self._reader.start()

    def command(self) -> list[str]:
        options = self.options
        return [
            str(self._installation.binary),
            f"--model-repository={options.model_repository}",
            f"--backend-directory={self._installation.backend_dir}",
            f"--http-address={listen_address(options.host, 'http')}",
            f"--http-port={options.http_port}",
            f"--grpc-address={listen_address(options.host, 'grpc')}",
            f"--grpc-port={options.grpc_port}",
            f"--metrics-port={options.metrics_port}",
            f"--exit-timeout-secs={options.exit_timeout_secs}",
            *options.extra_arguments,
        ]

    def is_ready(self) -> bool:
        """Whether every model is loaded and every port answers. The server opens them one after the other: gRPC, HTTP,
        metrics; so one that says over HTTP that it is ready may still refuse who comes for the metrics."""
        return self.health() == 200 and (not self.has_metrics or http_status(self.metrics_address, "/metrics") == 200)

    def health(self) -> int | None:
        """What the HTTP port answers to the question whether the server is ready: a status; None: nothing."""
        headers = access_headers(self.arguments, "http", "health")
        return http_status(self.http_address, "/v2/health/ready", headers)

    def says_it_listens(self) -> bool:
        """Whether the server has written that its HTTP port is open."""
        return any(LISTENING in line for line in list(self.lines))

    def dead_children(self) -> list[ProcessId]:
        """What the server has started itself, and has not noticed the end of."""
        return dead_children(self.pid)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the server `is_ready`. Raises `CliError` with the reason if the server ends first, `TimeoutError`
        after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_ready():
            if self.poll() is not None:
                self._join_reader()
                raise CliError(failure_reason(list(self.lines), self.poll()))
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"the server was not ready after {timeout:.0f} s; its last line: {self.last_lines(1)}"
                )
            time.sleep(READY_POLL_S)

    def poll(self) -> int | None:
        """The exit code, or None while the server runs."""
        return None if self._process is None else self._process.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end; None if it has not come within `timeout` seconds."""
        assert self._process is not None, "start() first"
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask the server to drain and end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def stop(self, grace: float = 10.0, is_draining: bool = True) -> int:
        """Drain, end, and make sure that nothing is left. Returns the exit code (negative: the signal).

        `is_draining` False: requests that run are not waited for, so the server has `grace` seconds in all.
        """
        family = self._family()
        self.terminate()
        if self.wait((self.options.exit_timeout_secs if is_draining else 0) + grace) is None:
            self.kill()
        self._end_leftovers(family)
        self._join_reader()
        return self.poll() or 0

    def kill(self) -> None:
        """End the server and everything it started, now."""
        family = self._family()
        if self._process is not None and self.poll() is None:
            self._process.kill()
        for process in family:
            process.kill()
        self.wait(KILL_GRACE_S)

    def _family(self) -> list[ProcessId]:
        """What the server has started: below it, or orphans of its session if it has crashed."""
        return list({*descendants(self.pid), *session_members(self.pid)})

    @staticmethod
    def _end_leftovers(family: list[ProcessId]) -> None:
        deadline = time.monotonic() + KILL_GRACE_S
        while any(process.is_alive() for process in family) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in family:
            process.kill()

    def _read_output(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if self._on_line is not None:
                self._on_line(line.rstrip("\n"))

    def _join_reader(self) -> None:
        """Wait for the last lines, but not for a process that the server has left behind and that keeps the pipe."""
        silence = SilenceClock()
        while self._reader is not None and self._reader.is_alive() and silence.look() < LAST_LINES_S:
            self._reader.join(timeout=0.1)

    def last_lines(self, count: int) -> list[str]:
        """The newest lines of output that are worth showing, oldest first."""
        lines = list(self.lines)  # in one go: more may come while they are looked at
        return [line for line in lines if is_worth_showing(line)][-count:]


def check_ports(options: ServerOptions, openai_port: int | None = None) -> None:
    """Raises `CliError` that names the port and the flag if one of the server's three ports is taken, or that of the
    gateway beside it."""
    ports = {"--http-port": options.http_port, "--grpc-port": options.grpc_port, "--metrics-port": options.metrics_port}
    if openai_port is not None:
        ports["--openai-port"] = openai_port
    if len(set(ports.values())) < len(ports):
        raise CliError(f"the ports must differ, got {', '.join(f'{flag} {port}' for flag, port in ports.items())}")
    for flag, port in ports.items():
        check_port(options.host, port, flag)


def free_ports(count: int) -> list[int]:
    """Ports that are free on the loopback interface now.

    NOTE: not of those that the kernel gives to outgoing connections, where there are others: any client of anything
    could get such a port before the server has it.
    """
    low, high = map(int, _LOCAL_PORT_RANGE.read_text().split()) if _LOCAL_PORT_RANGE.exists() else (32768, 60999)
    others = [port for port in range(_FIRST_PORT, 1 << 16) if not low <= port <= high]
    sockets: list[socket.socket] = []
    try:
        for port in [*random.sample(others, len(others)), *[0] * count]:  # 0: whichever the kernel gives
            if len(sockets) == count:
                break
            sockets.append(socket.socket())
            try:
                sockets[-1].bind(("127.0.0.1", port))
            except OSError:
                sockets.pop().close()
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
