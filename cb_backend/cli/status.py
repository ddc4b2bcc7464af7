"""`cb-backend status`: what runs here, on which ports, how full it is, how fast: servers, models, engines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from cb_backend.cli.paths import CliError
from cb_backend.cli.terminal.local_state import EngineState, LocalServer, engine_state, gateways, local_servers
from cb_backend.cli.terminal.server_state import ModelState, ServerState, ask_server, with_rates
from cb_backend.cli.terminal.shown import table
from cb_backend.contracts.rest import AWAKE
from cb_backend.front_end.engines.runtime_dir import model_name
from cb_backend.support.argument_types import positive_float, server_address

TITLES = ("MODEL", "STATE", "RUNNING", "WAITING", "SLOTS", "KV CACHE", "TOKENS/S")
CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.add_argument(
        "--url",
        type=server_address,
        metavar="HOST:PORT",
        help="a server's HTTP address; default: every one of yours here",
    )
    parser.add_argument(
        "--metrics-url",
        type=server_address,
        metavar="HOST:PORT",
        help="with --url: where its metrics are (the host's 8002)",
    )
    parser.add_argument(
        "--interval",
        type=positive_float,
        default=1.0,
        metavar="S",
        help="seconds that tokens are counted (%(default)g)",
    )
    parser.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="for programs; with --watch a line each time")


def run(args: argparse.Namespace) -> int:
    if args.metrics_url is not None and args.url is None:
        raise CliError("--metrics-url belongs to a server that --url names")
    while True:
        try:
            found = _look(args)
        except CliError as error:
            if not args.watch:
                raise
            print(f"{CLEAR if not args.json and sys.stdout.isatty() else ''}{error}", file=sys.stderr, flush=True)
            time.sleep(args.interval)
            continue
        if args.json:
            print(json.dumps(found, indent=None if args.watch else 2), flush=True)
        else:
            print(f"{CLEAR if args.watch and sys.stdout.isatty() else ''}{shown(found)}", flush=True)
        if not args.watch:
            return int(not all(server["state"]["is_ready"] for server in found))


def _look(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each server, in a form for programs. Raises `CliError` where there is none."""
    if args.url is not None:
        metrics = args.metrics_url or f"{args.url.rpartition(':')[0] or args.url}:8002"
        servers = [LocalServer(0, args.url, None, metrics, {}, ())]
    else:
        servers = local_servers()
    if not servers:
        raise CliError("no engine of yours is running here; start one: cb-backend serve (or name a server: --url)")
    before = [_ask(server) for server in servers]
    began = time.monotonic()
    time.sleep(args.interval)
    found = []
    for server, first in zip(servers, before, strict=True):
        state = with_rates(first, _ask(server), time.monotonic() - began)
        engines = [engine_state(life) for life in server.engines]
        state = _with_own_rates(state, engines)
        places = {"pid": server.pid, "http": server.http, "grpc": server.grpc, "metrics": server.metrics}
        found.append(
            {
                **places,
                "openai": gateways(server.grpc),
                "state": asdict(state),
                "engines": [asdict(engine) for engine in engines],
            }
        )
    return found


def _with_own_rates(state: ServerState, engines: list[EngineState]) -> ServerState:
    """Engines know their tokens to the step; the server's metrics hear of them about twice a second."""
    rates: dict[str, float] = {}
    for engine in engines:
        if not engine.problem:
            name = model_name(engine.name)
            rates[name] = rates.get(name, 0.0) + engine.output_tokens_per_s
    models = {
        name: replace(model, tokens_per_s=rates[name]) if name in rates else model
        for name, model in state.models.items()
    }
    return replace(state, models=models)


def _ask(server: LocalServer) -> ServerState:
    """One whose HTTP is off, or that is embedded in a program, has engines all the same."""
    if server.http is None:
        return ServerState("", True)
    try:
        return ask_server(server.http, server.metrics, server.index_headers)
    except CliError as error:
        if not server.engines:
            raise
        return ServerState("", False, problem=f"it starts, or it hangs: {error}")  # the others are shown all the same


def shown(found: list[dict[str, Any]]) -> str:
    return "\n\n".join(_server_text(server) for server in found)


def _server_text(server: dict[str, Any]) -> str:
    state = server["state"]
    pid = f" {server['pid']}" if server["pid"] else ""
    lines = [f"server{pid}  {state['version']}  {'ready' if state['is_ready'] else 'NOT READY'}".replace("    ", "  ")]
    metrics = server["metrics"] if state["has_metrics"] else None
    places = {"HTTP": server["http"], "gRPC": server["grpc"], "metrics": metrics}
    places["OpenAI"] = ", ".join(server["openai"]) or None
    lines.append("  " + "  ".join(f"{name} {address}" for name, address in places.items() if address))
    if state["problem"]:
        lines.append(f"  {state['problem']}")
    elif server["http"] and server["metrics"] and not state["has_metrics"]:
        way = "" if server["pid"] else "; --metrics-url HOST:PORT says where they are"
        lines.append(f"  no metrics answer at {server['metrics']}, so figures are missing{way}")
    models = [ModelState(**model) for model in state["models"].values()]
    if models:
        lines.append(table(TITLES, [_model_row(model) for model in models], "<<>>>>>"))
    lines += [_engine_text(EngineState(**engine)) for engine in server["engines"]]
    return "\n".join(lines)


def _model_row(model: ModelState) -> tuple[str, ...]:
    counts = ["" if value is None else str(value) for value in (model.running, model.waiting, model.num_slots)]
    usage = "" if model.kv_usage is None else f"{model.kv_usage:.1%}"
    rate = "" if model.tokens_per_s is None else f"{model.tokens_per_s:,.1f}"
    return (model.name, model.state[:60], *counts, usage, rate)


def _engine_text(engine: EngineState) -> str:
    head = f"engine {engine.pid}  {engine.name or engine.model}: "
    if engine.problem:
        return head + engine.problem
    return (
        f"{head}{engine.running} of {engine.num_slots} slots, KV cache {engine.kv_usage:.1%}, "
        f"{engine.output_tokens_per_s:,.1f} tokens/s, {engine.prompt_tokens_per_s:,.1f} prompt tokens/s, "
        f"{engine.steps_per_s:,.1f} steps/s{_rest_text(engine)}"
    )


def _rest_text(engine: EngineState) -> str:
    """What is not as it would be without sleep and updates."""
    told = [engine.rest.replace("_", " ")] if engine.rest not in ("", AWAKE) else []
    if engine.weights:
        told.append(f"weights of {engine.weights}")
    if engine.lost_update:
        told.append(f"weights of model.json: {engine.lost_update}")
    if engine.update:
        told.append(f"those of {engine.update} come next")
    return "".join(f", {each}" for each in told)
