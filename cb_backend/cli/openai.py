"""`cb-backend openai`: OpenAI's HTTP API in front of a Triton server, this one's or any with vllm_backend's models."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from pathlib import Path

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.addresses import check_port, numeric_host, refuse_http
from cb_backend.cli.server.gateway_options import add_gateway_options, gateway_settings, open_note
from cb_backend.cli.server.gateway_process import DEFAULT_PORT
from cb_backend.gateway.settings import ENVIRONMENT_VARIABLE
from cb_backend.support.argument_types import server_address

PARENT_EVERY_S = 0.5
# A connection without requests must live longer here than with its client or proxy (of which nginx and load balancers
# keep them 60 s, clients in Go 90 s): one that is closed while its next request is on its way fails that request.
KEEP_ALIVE_S = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.add_argument(
        "--url",
        type=server_address,
        default="localhost:8001",
        metavar="HOST:PORT",
        help="the Triton server's gRPC address (default: %(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every interface")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument(
        "--beside-server", action="store_true", help=argparse.SUPPRESS
    )  # of `serve`, which speaks for it
    add_gateway_options(parser)
    parser.add_argument(
        "--model-repository", type=Path, metavar="DIR", help="the server's, to list the adapters of its models"
    )


def run(args: argparse.Namespace) -> int:
    import uvicorn

    if args.model_repository is not None and not args.model_repository.is_dir():
        raise CliError(f"--model-repository {args.model_repository} is no folder; name the server's")
    settings = gateway_settings(args, args.url, args.model_repository)
    check_port(numeric_host(args.host), args.port, "--port")
    refuse_http(args.url)
    if args.beside_server:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    else:
        _introduce(args)
    # uvicorn ends gracefully and then raises the signal again, for handlers like this one: its end is no failure.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    os.environ[ENVIRONMENT_VARIABLE] = settings.to_json()
    uvicorn.run(
        "cb_backend.gateway.app:create_from_environment", factory=True, host=args.host, port=args.port,
        workers=args.workers, log_level="warning", access_log=False, timeout_graceful_shutdown=30,
        timeout_keep_alive=KEEP_ALIVE_S,
    )  # fmt: skip
    return 0


def _introduce(args: argparse.Namespace) -> None:
    if note := open_note(args, args.host, args.port):
        print(note)
    print(f"OpenAI's API at http://{args.host}:{args.port}/v1 for the server at {args.url}", flush=True)


def _end_with(parent: int) -> None:
    """A gateway whose `serve` has been killed must not keep the port."""
    while os.getppid() == parent:
        time.sleep(PARENT_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)
