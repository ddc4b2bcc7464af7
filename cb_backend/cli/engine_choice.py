"""Which running engine a command speaks to."""

from __future__ import annotations

import argparse
from pathlib import Path

from cb_backend.cli.paths import CliError
from cb_backend.front_end.engine_observer import running_engines
from cb_backend.front_end.runtime_dir import EngineLife


def add_engine_arguments(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--engine-pid", type=int, metavar="PID", help="which engine, where several run")
    parser.add_argument("--runtime-dir", type=Path, metavar="DIR", help="where engines' folders are; default: found")


def chosen_engine(args: argparse.Namespace) -> EngineLife:
    """Raises `CliError` unless there is exactly one engine to choose."""
    engines, pid = running_engines(args.runtime_dir), args.engine_pid
    known = ", ".join(str(life.pid) for life in engines)
    if pid is not None:
        engines = [life for life in engines if life.pid == pid]
        if not engines:
            raise CliError(f"no engine of yours has pid {pid}; running: {known or 'none'}")
    if not engines:
        raise CliError("no engine of yours is running here; start one: cb-backend serve")
    if len(engines) > 1:
        raise CliError(f"several engines are running; choose one: --engine-pid ({known})")
    return engines[0]
