"""Looks at what a server needs beside the machine: the server itself, its ports, the folders of checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.addresses import http_status, why_taken, with_port
from cb_backend.cli.server.gateway_process import DEFAULT_PORT
from cb_backend.cli.server.local_server import find_server
from cb_backend.cli.terminal.cached_models import cached_models, hub_folder
from cb_backend.cli.terminal.findings import FAIL, OK, WARN, Finding
from cb_backend.cli.terminal.shown import bytes_text
from cb_backend.contracts.errors import ConfigError
from cb_backend.front_end.engines.engine_observer import model_of, running_engines
from cb_backend.front_end.engines.runtime_dir import runtime_base
from cb_backend.models.checkpoint import writable_cache

PORTS = {8000: "--http-port", 8001: "--grpc-port", 8002: "--metrics-port", DEFAULT_PORT: "--openai-port"}
HOST = "127.0.0.1"
_KNOCKS = {8000: "/v2/health/ready", 8002: "/metrics", DEFAULT_PORT: "/health"}  # answered by what should be there
FEW_BYTES, LITTLE_BYTES = 2 << 30, 20 << 30  # of disk: no room for anything; none for a checkpoint of 8B


def server() -> Iterator[Finding]:
    try:
        found = find_server()
    except (CliError, ConfigError) as error:
        yield Finding(FAIL, "server", "no Triton server can be started here", str(error))
        return
    version = "of unknown version" if found.version is None else "{}.{}".format(*found.version)
    yield Finding(OK, "server", f"tritonserver {version} ({found.origin})")


def ports(numbers: dict[int, str] | None = None) -> Iterator[Finding]:
    """`numbers`: ports, each with the option of `serve` that names another; default: `PORTS`."""
    for port, option in (PORTS if numbers is None else numbers).items():
        reason = why_taken(HOST, port)
        if reason is None:
            yield Finding(OK, "port", f"{port} is free")
        elif (path := _KNOCKS.get(port)) and http_status(with_port(HOST, port), path) is not None:
            yield Finding(OK, "port", f"{port} answers: a server runs here (cb-backend status)")
        elif port == 8001 and running_engines():
            yield Finding(OK, "port", f"{port} is in use: a server runs here (cb-backend status)")
        else:
            yield Finding(WARN, "port", f"{port} cannot be used: {reason}", f"cb-backend serve {option} N")


def engines() -> Iterator[Finding]:
    base = runtime_base()  # raises for a folder of somebody else's, which keeps every engine from starting
    running = running_engines()
    for life in running:
        yield Finding(OK, "engine", f"{life.pid} serves {model_of(life) or 'a model'}")
    if not running:
        yield Finding(OK, "engine", f"none runs ({base} is theirs)")


def caches() -> Iterator[Finding]:
    """Where checkpoints lie: whether they can be written, and how much room there is."""
    try:
        own = writable_cache()
    except ConfigError as error:
        yield Finding(FAIL, "cache", "converted checkpoints have no place", str(error))
    else:
        yield from _room(own, "CB_BACKEND_CACHE")
    hub = hub_folder()
    existing = next(path for path in (hub, *hub.parents) if path.exists())
    if os.access(existing, os.W_OK):
        yield from _room(hub, "HF_HOME", existing)
    else:
        yield Finding(FAIL, "cache", f"{existing} cannot be written", "set HF_HOME to a folder that can")
    models = cached_models()
    size = bytes_text(sum(model.num_bytes for model in models))
    yield Finding(OK, "cache", f"{len(models)} checkpoint{'s' * (len(models) != 1)}, {size} (cb-backend models)")
    if not os.environ.get("HF_TOKEN") and not _has_login():
        yield Finding(OK, "hub", "no token: enough for public checkpoints; gated ones need HF_TOKEN")


def _room(folder: Path, variable: str, existing: Path | None = None) -> Iterator[Finding]:
    free = shutil.disk_usage(existing or folder).free
    text = f"{folder}, {bytes_text(free)} free"
    if free >= LITTLE_BYTES:
        yield Finding(OK, "cache", text)
        return
    remedy = f"cb-backend models remove ID, or {variable}=FOLDER on a larger disk"
    yield Finding(FAIL if free < FEW_BYTES else WARN, "cache", text, remedy)


def _has_login() -> bool:
    from huggingface_hub import get_token

    token: Callable[[], str | None] = get_token
    return bool(token())
