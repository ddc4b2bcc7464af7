"""Which running engine, or which model's engines, a command speaks to."""

from __future__ import annotations

import argparse
from pathlib import Path

from cb_backend.cli.paths import CliError
from cb_backend.front_end.engines.engine_observer import model_of, running_engines
from cb_backend.front_end.engines.runtime_dir import EngineLife, model_name, read_model, server_pid_of
from cb_backend.serving.server_arguments import is_on, of_process


def add_engine_arguments(parser: argparse._ActionsContainer, pid_help: str = "which engine, where several run") -> None:
    parser.add_argument("--engine-pid", type=int, metavar="PID", help=pid_help)
    parser.add_argument("--runtime-dir", type=Path, metavar="DIR", help="where engines' folders are; default: found")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="as the server calls it")
    add_engine_arguments(parser, "one of its engines, where several servers have a model of this name")


def chosen_engine(args: argparse.Namespace) -> EngineLife:
    """Raises `CliError` unless there is exactly one engine to choose."""
    engines = _candidates(args)
    if args.engine_pid is not None:
        return next(life for life in engines if life.pid == args.engine_pid)
    if len(engines) > 1:
        raise CliError(f"several engines are running; choose one: --engine-pid ({_names(engines)})")
    return engines[0]


def chosen_model(args: argparse.Namespace) -> list[EngineLife]:
    """All engines of one model copy (`data_parallel_size` of them), by pid; `args.engine_pid` is any of them.

    `args.model`, where a command has it, is the model's name. Raises `CliError` unless there is exactly one to choose.
    """
    models: dict[Path, list[EngineLife]] = {}
    for life in _candidates(args):
        models.setdefault(life.folder, []).append(life)
    if (name := getattr(args, "model", None)) is not None:
        known = ", ".join(sorted({model_name(read_model(folder)) for folder in models}))
        models = {folder: engines for folder, engines in models.items() if model_name(read_model(folder)) == name}
        if not models:
            raise CliError(f"no engine of yours serves a model {name!r}; there are {known}")
    if args.engine_pid is not None:
        for engines in models.values():
            if args.engine_pid in [life.pid for life in engines]:
                return engines
        raise CliError(f"engine {args.engine_pid} does not serve {name!r}; leave one of them out")
    if len(models) > 1:
        known = "; ".join(_names(engines) for engines in models.values())
        raise CliError(f"engines of several models are running; name one of a model's: --engine-pid ({known})")
    (engines,) = models.values()
    return engines


def _candidates(args: argparse.Namespace) -> list[EngineLife]:
    """What runs; not empty, and with the engine that `args.engine_pid` names, if it names one."""
    engines, pid = running_engines(args.runtime_dir), args.engine_pid
    if pid is not None and pid not in [life.pid for life in engines]:
        raise CliError(f"no engine of yours has pid {pid}; running: {_names(engines) or 'none'}")
    if not engines:
        raise CliError("no engine of yours is running here; start one: cb-backend serve")
    return engines


def _names(engines: list[EngineLife]) -> str:
    """Each pid with what it serves and where: alone it tells nobody which engine is meant."""
    return ", ".join(f"{life.pid} {model_of(life)} ({_place(life.folder)})" for life in engines)


def _place(folder: Path) -> str:
    """The model and the server, as people know them."""
    server_pid = server_pid_of(folder)
    arguments = of_process(server_pid)
    is_known = "model-repository" in arguments or "http-port" in arguments  # else it is embedded in some program
    has_port = is_known and is_on(arguments, "allow-http")
    port = f", HTTP port {arguments.get('http-port', '8000')}" if has_port else ""
    return f"{read_model(folder)} in server {server_pid}{port}".strip()
