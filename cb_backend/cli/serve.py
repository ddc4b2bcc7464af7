"""`cb-backend serve`: a Triton server in the foreground, with checks before it and one-line reasons after it.

The first SIGTERM or Ctrl-C drains: running requests go on until they end or the exit timeout is over. The second
Ctrl-C ends everything at once. The exit code is the server's.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from cb_backend.cli.demo_model import DEMO_MODEL, ensure_demo_model
from cb_backend.cli.paths import CliError, checkout_path
from cb_backend.cli.server.backend_folder import our_backends
from cb_backend.cli.server.local_server import find_server
from cb_backend.cli.server.model_repository import check_model_repository, copy_with_model, served_checkpoints
from cb_backend.cli.server.server_log import is_worth_showing
from cb_backend.cli.server.server_process import ServerOptions, ServerProcess, wait_ready_aloud
from cb_backend.errors import ConfigError
from cb_backend.models.checkpoint import check_checkpoint_name

SAID_ONCE = ("failed to load", "Failed to create instance", "error: creating server")  # in our own words at the end
OVERDUE_S = 10.0  # after the exit timeout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-repository", type=Path, metavar="DIR", help="default: the checkout's model_repository")
    parser.add_argument("--model", metavar="PATH_OR_ID", help="serve this checkpoint with the checkout's llm settings")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every interface")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument(
        "--exit-timeout-secs", type=int, default=30, help="how long running requests may go on at the end"
    )
    parser.add_argument("--verbose", action="store_true", help="show every line of the server's log")
    parser.add_argument("server_arguments", nargs="*", metavar="-- ARGUMENT", help="passed on to tritonserver")


def run(args: argparse.Namespace) -> int:
    if args.model is not None and args.model_repository is not None:
        raise CliError("--model serves the checkout's llm model; leave --model-repository out, or edit its model.json")
    if args.exit_timeout_secs < 0:
        raise CliError(f"--exit-timeout-secs is {args.exit_timeout_secs}; it must be 0 or more")
    if args.model is None:
        return _serve(args, args.model_repository or checkout_path("model_repository"))
    try:
        check_checkpoint_name(args.model)
    except ConfigError as error:
        raise CliError(f"--model {error}") from None
    with tempfile.TemporaryDirectory(prefix="cb_backend-") as folder:
        return _serve(args, copy_with_model(checkout_path("model_repository/llm"), args.model, Path(folder)))


def _serve(args: argparse.Namespace, repository: Path) -> int:
    installation = find_server()
    backends = our_backends(installation.backend_dir)
    models = check_model_repository(repository, backends)
    if DEMO_MODEL in served_checkpoints(repository, backends):
        ensure_demo_model(_say)
    options = ServerOptions(
        model_repository=repository,
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        exit_timeout_secs=args.exit_timeout_secs,
        extra_arguments=tuple(args.server_arguments),
    )

    def show(line: str) -> None:
        if args.verbose or (is_worth_showing(line) and not any(text in line for text in SAID_ONCE)):
            print(line, file=sys.stderr, flush=True)

    server = ServerProcess(installation, options, show)
    stopper = _Stopper(server)
    server.start()
    stopper.install()
    _say(f"starting {installation.origin} with {', '.join(models)}")
    try:
        if _wait_ready(server, stopper):
            _say(_ready_text(server, models))
        exit_code = _wait_end(server, stopper)
    finally:
        server.stop()
    if not stopper.is_stopping:
        raise CliError(f"the server ended by itself with exit code {exit_code}; run with --verbose for its log")
    return exit_code if exit_code >= 0 else 128 - exit_code


class _Stopper:
    """Turns signals into a drain, and a second Ctrl-C into a kill."""

    def __init__(self, server: ServerProcess) -> None:
        self.is_stopping = False
        self._server = server
        self._deadline = math.inf

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def is_overdue(self) -> bool:
        return time.monotonic() > self._deadline

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.is_stopping:
            self.is_stopping = True
            # os.write: a handler must not wait for a lock that the interrupted print holds.
            timeout = self._server.options.exit_timeout_secs
            self._deadline = time.monotonic() + timeout + OVERDUE_S
            os.write(2, f"draining for up to {timeout} s; Ctrl-C again ends at once\n".encode())
            self._server.terminate()
        elif number == signal.SIGINT:
            self._server.kill()


def _wait_ready(server: ServerProcess, stopper: _Stopper) -> bool:
    """True when ready; False if the server was told to stop first. Raises `CliError` with the engine's reason."""
    try:
        wait_ready_aloud(server, _say, is_given_up=lambda: stopper.is_stopping)
    except CliError:
        if not stopper.is_stopping:
            raise
    return not stopper.is_stopping


def _wait_end(server: ServerProcess, stopper: _Stopper) -> int:
    """Exit code of the server; one that does not end in time after a signal is ended."""
    while (exit_code := server.wait(timeout=1.0)) is None:
        if stopper.is_overdue():
            # A server whose clients keep their streams open does not end by itself (24.10).
            _say("the server has not ended in time; ending it")
            server.kill()
    return exit_code


def _ready_text(server: ServerProcess, models: list[str]) -> str:
    url = f"http://{server.http_address}/v2/models/{'llm' if 'llm' in models else models[0]}"
    text = '"text_input": "The capital of France is"'
    sampling = '"max_tokens": 32, "temperature": 0'
    return f"""ready: {", ".join(models)}
  HTTP    http://{server.http_address}
  gRPC    {server.grpc_address}
  metrics {f"http://{server.metrics_address}/metrics" if server.has_metrics else "off"}
try
  curl -s {url}/generate -d '{{{text}, "parameters": {{{sampling}}}}}'
  curl -sN {url}/generate_stream -d '{{{text}, "parameters": {{"stream": true, {sampling}}}}}'
  {_python()} client/generate.py --url {server.grpc_address} --stream 'The capital of France is'"""


def _python() -> str:
    """This interpreter, as short as it can be said from here: it has what the client needs, `python` may not."""
    # Not resolve(): in a virtual environment the link is the environment.
    here, python = Path.cwd(), Path(sys.executable)
    return shlex.quote(str(python.relative_to(here) if python.is_relative_to(here) else python))


def _say(text: str) -> None:
    print(text, flush=True)
