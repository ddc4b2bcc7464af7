"""`cb-backend openai`: OpenAI's HTTP API in front of a Triton server, this one's or any with vllm_backend's models."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from pathlib import Path

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.addresses import check_port, numeric_host
from cb_backend.cli.server.gateway_process import DEFAULT_PORT, add_reading_options
from cb_backend.gateway.adapters import DEFAULT_SEPARATOR
from cb_backend.gateway.settings import DEFAULT_BODY_MIB, ENVIRONMENT_VARIABLE, Settings, read_names
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
    parser.add_argument("--workers", type=int, default=1, help="processes that share the port")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys that clients may use, one a line")
    parser.add_argument(
        "--max-body-mib", type=int, default=DEFAULT_BODY_MIB, help=f"largest request (default: {DEFAULT_BODY_MIB})"
    )
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="pages of this origin may call (CORS)"
    )
    parser.add_argument(
        "--beside-server", action="store_true", help=argparse.SUPPRESS
    )  # of `serve`, which speaks for it
    add_reading_options(parser)
    parser.add_argument(
        "--lora-separator", default=DEFAULT_SEPARATOR, metavar="TEXT",
        help=f"between a model's name and an adapter's (default: {DEFAULT_SEPARATOR}); '' for no adapters",
    )  # fmt: skip
    parser.add_argument(
        "--model-repository", type=Path, metavar="DIR", help="the server's, to list the adapters of its models"
    )


def run(args: argparse.Namespace) -> int:
    import uvicorn

    if args.workers < 1 or args.max_body_mib < 1:
        raise CliError("--workers and --max-body-mib must be 1 or more")
    if args.model_repository is not None and not args.model_repository.is_dir():
        raise CliError(f"--model-repository {args.model_repository} is no folder; name the server's")
    settings = Settings(
        url=args.url,
        api_key_file=None if args.api_key_file is None else str(args.api_key_file.resolve()),
        max_body_bytes=args.max_body_mib << 20,
        allow_origins=tuple(args.allow_origin),
        tool_parsers=read_names("--tool-parser", args.tool_parser),
        reasoning_parsers=read_names("--reasoning-parser", args.reasoning_parser),
        lora_separator=args.lora_separator,
        model_repository=None if args.model_repository is None else str(args.model_repository.absolute()),
    )
    settings.api_keys()  # a wrong file is told before anything listens
    check_port(numeric_host(args.host), args.port, "--port")
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
    if args.host not in ("127.0.0.1", "localhost", "::1") and args.api_key_file is None:
        print(f"NOTE: everybody who reaches {args.host}:{args.port} may use it; --api-key-file asks for a key")
    print(f"OpenAI's API at http://{args.host}:{args.port}/v1 for the server at {args.url}", flush=True)


def _end_with(parent: int) -> None:
    """A gateway whose `serve` has been killed must not keep the port."""
    while os.getppid() == parent:
        time.sleep(PARENT_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)
