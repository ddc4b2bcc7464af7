"""`cb-backend serve`: a Triton server in the foreground, with checks before it and one-line reasons after it.

The first SIGTERM or Ctrl-C drains: running requests go on until they end or the exit timeout is over. The second
Ctrl-C ends everything at once. The exit code is the server's; the signal's if the server was not ready yet.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from cb_backend.cli.demo_model import DEMO_MODEL, ensure_demo_model
from cb_backend.cli.paths import CliError, checkout_path
from cb_backend.cli.server.addresses import numeric_host
from cb_backend.cli.server.backend_folder import our_backends
from cb_backend.cli.server.engine_options import add_engine_options, engine_options, flag_of
from cb_backend.cli.server.gateway_options import add_gateway_options, gateway_settings, gateway_words, open_note
from cb_backend.cli.server.gateway_process import DEFAULT_PORT, gateway_beside
from cb_backend.cli.server.known_faults import Configuration, known_faults, own_python_models
from cb_backend.cli.server.local_server import find_server
from cb_backend.cli.server.model_repository import (
    check_model_repository,
    copy_with_model,
    plain_path,
    read_adapters,
    served_checkpoints,
)
from cb_backend.cli.server.server_log import is_worth_showing
from cb_backend.cli.server.server_process import ServerOptions, ServerProcess, check_ports
from cb_backend.cli.server.start_up import PartlyLoadedError, wait_ready_aloud
from cb_backend.contracts.errors import ConfigError
from cb_backend.models.checkpoint import check_checkpoint_name

SAID_ONCE = ("failed to load", "Failed to create instance", "error: creating server")  # in our own words at the end
OVERDUE_S = 10.0  # after the exit timeout
STARTING_GRACE_S = 2.0  # for a server that is told to stop before it is ready


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options] [-- ARGUMENT ...]"
    parser.epilog = "What follows `--` is passed on to tritonserver."
    parser.add_argument("checkpoint", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--model-repository", type=Path, metavar="DIR", help="default: the checkout's model_repository")
    parser.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        help="serve this checkpoint (a folder, a .gguf file or a hub id) with the checkout's llm settings and the "
        "length of its own context",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="an adapter (LoRA, as PEFT saves it) that requests to the checkout's llm may name; may be given several "
        "times",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every interface")
    parser.add_argument("--http-port", "--port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument(
        "--openai-port",
        type=int,
        help=f"of the OpenAI gateway beside the server (default: {DEFAULT_PORT} if it is free)",
    )
    parser.add_argument("--no-openai", action="store_true", help="start no OpenAI gateway")
    add_gateway_options(parser.add_argument_group("OpenAI gateway"))
    parser.add_argument(
        "--exit-timeout-secs", type=int, default=30, help="how long running requests may go on at the end"
    )
    parser.add_argument("--verbose", action="store_true", help="show every line of the server's log")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.checkpoint is not None and args.model not in (None, args.checkpoint):
        raise CliError(f"{args.checkpoint!r} and --model {args.model!r} name two models; name one")
    model, engine_arguments = args.checkpoint or args.model, engine_options(args)
    if model is not None and args.model_repository is not None:
        raise CliError("--model serves the checkout's llm model; leave --model-repository out, or edit its model.json")
    if engine_arguments and args.model_repository is not None:
        raise CliError(
            f"{flag_of(next(iter(engine_arguments)))} changes the checkout's llm model; with --model-repository, set "
            f"{next(iter(engine_arguments))!r} in the model.json of the model that is meant"
        )
    if args.adapter and args.model_repository is not None:
        raise CliError("--adapter is for the checkout's llm model; with --model-repository, write a multi_lora.json")
    gateway_settings(args, "")  # a wrong value is told before anything starts
    if args.no_openai and (words := gateway_words(args)):
        flag = words[0].partition("=")[0]
        raise CliError(f"{flag} is for the OpenAI gateway, which --no-openai leaves out; leave one of them out")
    if args.exit_timeout_secs < 0:
        raise CliError(f"--exit-timeout-secs is {args.exit_timeout_secs}; it must be 0 or more")
    with tempfile.TemporaryDirectory(prefix="cb_backend-") as folder:
        return _serve(args, _repository(args, model, engine_arguments, Path(folder)), Path(folder))


def _repository(args: argparse.Namespace, model: str | None, engine_arguments: dict[str, Any], folder: Path) -> Path:
    """The one that is there, or a copy in `folder` with what the command line changes."""
    adapters = read_adapters(args.adapter)
    if adapters:
        engine_arguments = {"enable_lora": True, **engine_arguments}
    if model is None and not engine_arguments:
        return Path(args.model_repository or checkout_path("model_repository"))
    if model is not None:
        # The file's length is chosen for the checkpoint that stands beside it.
        engine_arguments = {"max_model_len": None, **engine_arguments}
        try:
            check_checkpoint_name(model)
        except ConfigError as error:
            raise CliError(f"--model {error}") from None
    source = checkout_path("model_repository/llm")
    return copy_with_model(source, model, folder / "models", engine_arguments=engine_arguments, adapters=adapters)


def _serve(args: argparse.Namespace, repository: Path, folder: Path) -> int:
    installation = find_server()
    backends = our_backends(installation.backend_dir)
    models = check_model_repository(repository, backends)
    if DEMO_MODEL in served_checkpoints(repository, backends):
        ensure_demo_model(_say)
    options = ServerOptions(
        model_repository=plain_path(repository, folder),
        host=numeric_host(args.host),
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        exit_timeout_secs=args.exit_timeout_secs,
        extra_arguments=tuple(args.handed_on),
    )

    if not args.no_openai:
        check_ports(options, args.openai_port)  # before minutes of loading, not after them

    def show(line: str) -> None:
        if args.verbose or (is_worth_showing(line) and not any(text in line for text in SAID_ONCE)):
            print(line, file=sys.stderr, flush=True)

    server = ServerProcess(installation, options, show)
    stopper = _Stopper(server)
    server.start()
    stopper.install()
    _say(f"starting {installation.origin} with {', '.join(models)}")
    for line in known_faults(installation.version, Configuration(server.arguments, own_python_models(repository))):
        _say(line)
    with contextlib.ExitStack() as beside:
        beside.callback(server.stop)
        if _wait_ready(server, stopper):
            openai = None if args.no_openai else _start_gateway(args, server, beside)
            _say(_ready_text(server, models, openai, args))
        exit_code = _wait_end(server, stopper)
    if not stopper.is_stopping:
        raise CliError(f"the server ended by itself with exit code {exit_code}; run with --verbose for its log")
    if stopper.exit_code_of_signal is not None:
        return stopper.exit_code_of_signal
    return exit_code if exit_code >= 0 else 128 - exit_code


def _start_gateway(args: argparse.Namespace, server: ServerProcess, beside: contextlib.ExitStack) -> str | None:
    """Its address; None where the default port is somebody else's."""
    address = beside.enter_context(
        gateway_beside(
            server.options.host,
            args.openai_port,
            server.grpc_address,
            [*gateway_words(args), "--model-repository", str(server.options.model_repository)],
        )
    )
    if address is None:
        _say(f"no OpenAI gateway: port {DEFAULT_PORT} is in use; --openai-port names another")
    return address


class _Stopper:
    """Turns signals into a drain, and a second Ctrl-C into a kill. A server that is not ready yet has nothing to drain,
    and may not notice that it is told to stop: it gets a moment."""

    def __init__(self, server: ServerProcess) -> None:
        self.is_stopping = False
        self.exit_code_of_signal: int | None = None  # of one that came before the server was ready
        self.is_ready = False
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
            if self.is_ready:
                timeout = self._server.options.exit_timeout_secs
                self._deadline = time.monotonic() + timeout + OVERDUE_S
                os.write(2, f"draining for up to {timeout} s; Ctrl-C again ends at once\n".encode())
            else:
                self.exit_code_of_signal = 128 + number
                self._deadline = time.monotonic() + STARTING_GRACE_S
                os.write(2, b"stopping\n")
            self._server.terminate()
        elif number == signal.SIGINT:
            self._server.kill()


def _wait_ready(server: ServerProcess, stopper: _Stopper) -> bool:
    """True when ready; False if the server was told to stop first. Raises `CliError` with the engine's reason."""
    try:
        wait_ready_aloud(server, _say, is_given_up=lambda: stopper.is_stopping)
        stopper.is_ready = True
    except PartlyLoadedError as error:
        stopper.is_ready = True  # there may be requests to drain
        _say(f"the server goes on and is not ready: {error}")
        return False
    except CliError:
        if not stopper.is_stopping:
            server.kill()  # else: one that waits for itself would be waited for
            raise
    return not stopper.is_stopping


def _wait_end(server: ServerProcess, stopper: _Stopper) -> int:
    """Exit code of the server; one that does not end in time after a signal is ended."""
    while (exit_code := server.wait(timeout=1.0)) is None:
        if stopper.is_overdue():
            # A server whose clients keep their streams open does not end by itself (24.10).
            if stopper.is_ready:
                _say("the server has not ended in time; ending it")
            server.kill()
    return exit_code


def _ready_text(server: ServerProcess, models: list[str], openai: str | None, args: argparse.Namespace) -> str:
    url = f"http://{server.http_address}/v2/models/{'llm' if 'llm' in models else models[0]}"
    text = '"text_input": "The capital of France is"'
    sampling = '"max_tokens": 32, "temperature": 0'
    host, _, port = (openai or "").rpartition(":")
    note = openai and open_note(args, host, port, is_beside_server=True)
    noted = f"\n{note}" if note else ""
    return f"""ready: {", ".join(models)}
  HTTP    http://{server.http_address}
  gRPC    {server.grpc_address}
  metrics {f"http://{server.metrics_address}/metrics" if server.has_metrics else "off"}
  OpenAI  {f"http://{openai}/v1" if openai else "off"}{noted}
try
  curl -s {url}/generate -d '{{{text}, "parameters": {{{sampling}}}}}'
  curl -sN {url}/generate_stream -d '{{{text}, "parameters": {{"stream": true, {sampling}}}}}'
  {_client()} --url {server.grpc_address} --stream 'The capital of France is'"""


def _client() -> str:
    """The client under this interpreter, which has what it needs where `python` may not; as short as both can be said
    from here."""
    try:
        script = checkout_path("client/generate.py")
    except CliError:  # the package alone is installed here
        script = Path("client/generate.py")
    # Not resolve(): in a virtual environment the link is the environment.
    here, paths = Path.cwd(), (Path(sys.executable), script)
    return shlex.join(str(path.relative_to(here) if path.is_relative_to(here) else path) for path in paths)


def _say(text: str) -> None:
    print(text, flush=True)
