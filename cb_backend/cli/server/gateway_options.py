"""The OpenAI gateway's options on a command line: of `openai`, which is it, and of `serve`, which hands them on."""

from __future__ import annotations

import argparse
import ipaddress
from pathlib import Path

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.addresses import numeric_host, with_port
from cb_backend.gateway.adapters import DEFAULT_SEPARATOR
from cb_backend.gateway.parsers import REASONING_NAMES, TOOL_NAMES
from cb_backend.gateway.settings import DEFAULT_BODY_MIB, Settings, read_names


def add_gateway_options(parser: argparse._ActionsContainer) -> None:
    """Who may ask, how much, and how answers are read. vLLM's names of parsers work too."""
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys that clients may use, one a line")
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="pages of this origin may call (CORS)"
    )
    parser.add_argument(
        "--max-body-mib", type=int, default=DEFAULT_BODY_MIB, help=f"largest request (default: {DEFAULT_BODY_MIB})"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that share the gateway's port")
    names = "; MODEL=NAME for one model. May be given several times"
    parser.add_argument(
        "--tool-parser", "--tool-call-parser", action="append", default=[], metavar="NAME",
        help=f"how calls of tools are written: {', '.join(TOOL_NAMES)} (default: auto, by the chat template){names}",
    )  # fmt: skip
    parser.add_argument(
        "--reasoning-parser", action="append", default=[], metavar="NAME",
        help=f"how reasoning is written: {', '.join(REASONING_NAMES)} (default: auto){names}",
    )  # fmt: skip
    parser.add_argument(
        "--lora-separator", default=DEFAULT_SEPARATOR, metavar="TEXT",
        help=f"between a model's name and an adapter's (default: {DEFAULT_SEPARATOR}); '' for no adapters",
    )  # fmt: skip


def gateway_settings(args: argparse.Namespace, url: str, model_repository: Path | None = None) -> Settings:
    """What the options say. Raises `CliError`, `ConfigError` for one that is wrong, so that it is told before anything
    starts."""
    if args.workers < 1 or args.max_body_mib < 1:
        raise CliError("--workers and --max-body-mib must be 1 or more")
    settings = Settings(
        url=url,
        api_key_file=None if args.api_key_file is None else str(args.api_key_file.resolve()),
        max_body_bytes=args.max_body_mib << 20,
        allow_origins=tuple(args.allow_origin),
        tool_parsers=read_names("--tool-parser", args.tool_parser),
        reasoning_parsers=read_names("--reasoning-parser", args.reasoning_parser),
        lora_separator=args.lora_separator,
        model_repository=None if model_repository is None else str(model_repository.absolute()),
    )
    settings.api_keys()
    return settings


def gateway_words(args: argparse.Namespace) -> list[str]:
    """The options of `add_gateway_options` that were given, for another command line."""
    several = {
        "--allow-origin": args.allow_origin,
        "--tool-parser": args.tool_parser,
        "--reasoning-parser": args.reasoning_parser,
    }
    single = {
        "--api-key-file": (args.api_key_file, None),
        "--max-body-mib": (args.max_body_mib, DEFAULT_BODY_MIB),
        "--workers": (args.workers, 1),
        "--lora-separator": (args.lora_separator, DEFAULT_SEPARATOR),
    }
    # With `=`: a value may begin with a dash.
    words = [f"{flag}={value}" for flag, (value, default) in single.items() if value != default]
    return words + [f"{flag}={value}" for flag, values in several.items() for value in values]


def open_note(args: argparse.Namespace, host: str, port: int | str, is_beside_server: bool = False) -> str:
    """What is to be said where others than this machine's users may ask without a key; else nothing.

    is_beside_server: the server's own ports are open at the same host, and know no keys.
    """
    address = numeric_host(host)
    if ipaddress.ip_address(address).is_loopback:
        return ""
    if args.api_key_file is not None:
        ports = "NOTE: the server's own ports (HTTP, gRPC) are open too and ask for no key; close them with a firewall"
        return ports if is_beside_server else ""
    return f"NOTE: everybody who reaches {with_port(address, port)} may use it; --api-key-file asks for a key"
