"""Real servers for the tests: one shared by most, others for tests that end or change theirs.

Every server carries a mark in its environment, which its stubs and its engine inherit: so a test can say that no
process is left, whoever its parent is by then. How each of them ends is watched (`exit_watch`): a crash that nobody has
asked for fails the test, and so does a stop after which a process has not ended with exit code 0.
"""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from cb_backend.cli.paths import CliError, checkout_path, load_client
from cb_backend.cli.server.local_server import find_server
from cb_backend.cli.server.model_repository import copy_with_model
from cb_backend.cli.server.processes import descendants
from cb_backend.cli.server.server_process import ServerOptions, ServerProcess, free_ports
from tests.server.exit_watch import CRASHES, ExitWatch, describe
from tests.server.kept_models import KeptModels
from tests.server.shared_server import SharedServer
from tests.server.tiny_checkpoint import Reference, write_tiny_checkpoint
from tests.waiting import WAIT_S, eventually

MARK = "CB_BACKEND_TEST_SERVER"
START_TIMEOUT_S = 300.0
MAX_NUM_SEQS = 16  # few, so that tests can fill the batch and have a queue


def marked_processes(mark: str) -> list[str]:
    """Command lines of living processes that inherited a server's mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


class RunningServer:
    """A started, ready server with the tiny model as `llm`."""

    def __init__(self, process: ServerProcess, mark: str, kept: KeptModels) -> None:
        self.process = process
        self.mark = mark
        self.kept = kept
        self.url = process.grpc_address
        self.client = load_client().Client(self.url, "llm", timeout=WAIT_S)

    def engine_pids(self) -> list[int]:
        """The engine processes below the server."""
        return [
            process.pid
            for process in descendants(self.process.pid)
            if "cb_backend.engine.engine_process" in _command_line(process.pid)
        ]

    def metrics(self) -> str:
        """The text of /metrics."""
        with urllib.request.urlopen(f"http://{self.process.metrics_address}/metrics", timeout=WAIT_S) as response:
            return str(response.read().decode())

    def gauge(self, family: str, label: str) -> float | None:
        """A value of /metrics; None if it is not there."""
        match = re.search(rf'^{family}{{[^}}]*="{label}"[^}}]*}} (\S+)$', self.metrics(), re.MULTILINE)
        return float(match.group(1)) if match else None

    def num_used_blocks(self) -> float | None:
        return self.gauge("nv_trt_llm_kv_cache_block_metrics", "used")

    def num_active_requests(self) -> float | None:
        return self.gauge("nv_trt_llm_request_metrics", "active")

    def num_cancelled(self) -> float:
        """Requests that the engines of `llm` have ended before their end, since the start."""
        return self.gauge("cb_engine_cancellations_total", "llm") or 0.0

    def wait_idle(self) -> None:
        """Every block free and no request left, by the server's own gauges."""
        eventually(
            lambda: (self.num_used_blocks(), self.num_active_requests()) == (0.0, 0.0),
            "no block is in use and no request is active",
        )

    def post(self, path: str, body: dict[str, object]) -> tuple[int, str]:
        """Status and text of an HTTP request with a JSON body."""
        request = urllib.request.Request(
            f"http://{self.process.http_address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


@contextlib.contextmanager
def running_server(
    checkpoint: Path,
    folder: Path,
    front_ends: int = 2,
    exit_timeout_secs: int = 30,
    prepare: Callable[[Path], None] = lambda repository: None,
    server_arguments: tuple[str, ...] = (),
    through: str | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    **engine_arguments: object,
) -> Iterator[RunningServer]:
    """Start a server and wait for it; at the end stop it and fail if a process of it is left.

    `prepare` may change the model repository before the start. `through`: a line of shell that ends by executing the
    server, "$@"; what it sets up (limits, mounts, redirections) holds for everything the server starts.
    """
    repository = copy_with_model(checkout_path("model_repository/llm"), str(checkpoint), folder, front_ends)
    arguments = {"model": str(checkpoint), "max_num_seqs": MAX_NUM_SEQS, "kv_cache_memory_bytes": 32 << 20}
    (repository / "llm" / "1" / "model.json").write_text(json.dumps({**arguments, **engine_arguments}))
    prepare(repository)
    mark = uuid.uuid4().hex
    exits = ExitWatch(folder.with_name(f"{folder.name}-{mark[:8]}-exits"))
    options = ServerOptions(
        repository,
        "127.0.0.1",
        *free_ports(3),
        exit_timeout_secs=exit_timeout_secs,
        extra_arguments=server_arguments,
        extra_environment={MARK: mark, "OMP_NUM_THREADS": "1", **exits.environment, **environment},
    )
    installation = find_server()
    if through is not None:
        script = folder / "server.sh"
        script.write_text(f'#!/bin/sh\nset -- {installation.binary} "$@"\n{through}\n')
        script.chmod(0o755)
        installation = replace(installation, binary=script)
    kept = KeptModels(installation.version)
    process = ServerProcess(installation, options, on_line=kept.read)
    process.start()
    problems: list[str] = []
    try:
        process.wait_ready(START_TIMEOUT_S)
        yield RunningServer(process, mark, kept)
    finally:
        print("\n".join(process.last_lines(60)))  # shown by pytest where a test fails
        problems += stop(process, exits, kept)
        print("\n".join(problems))
        eventually(lambda: marked_processes(mark) == [], "no process of the server is left")
    assert problems == [], "a process of the server has crashed, or did not end well when it was stopped"


def stop(process: ServerProcess, exits: ExitWatch, kept: KeptModels | None = None) -> list[str]:
    """Stop a server that may have ended. What is wrong with how its processes have ended."""
    is_running = process.poll() is None
    pids = {each.pid for each in descendants(process.pid)}
    code = process.stop()
    problems = [str(each) for each in exits.exits() if each.is_crash or (is_running and each.pid in pids and each.code)]
    is_excused = kept is not None and kept.excuse(code)
    if -code in CRASHES or (is_running and code and not is_excused):
        problems.append(f"the server itself ended with {describe(code)}")
    return problems


@pytest.fixture(scope="session", autouse=True)
def server_is_installed() -> None:
    try:
        find_server()
    except CliError as error:
        if "no Triton server found" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="session")
def shared_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer[RunningServer]]:
    shared = SharedServer(lambda: running_server(checkpoint, tmp_path_factory.mktemp("repository")))
    yield shared
    shared.close()


@pytest.fixture
def server(shared_server: SharedServer[RunningServer]) -> RunningServer:
    """The shared server: two front ends."""
    return shared_server.get()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test under which a server dies that it shares with others says so, and fails with that alone."""
    with contextlib.ExitStack() as stack:
        for fixture in getattr(item, "funcargs", {}).values():
            if isinstance(fixture, SharedServer):
                stack.enter_context(fixture.watching())
        return (yield)
