"""`cb-backend models`: the checkpoints on this machine's disk: list them, fetch one, remove one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from cb_backend.cli.paths import CliError
from cb_backend.cli.terminal.cached_models import CachedModel, cached_models, fetch, find_cached, remove
from cb_backend.cli.terminal.shown import age_text, bytes_text, table
from cb_backend.front_end.engines.engine_observer import model_of, running_engines
from cb_backend.front_end.engines.runtime_dir import read_weights

TITLES = ("MODEL", "SIZE", "USED", "IN")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listing = actions.add_parser("list", help="what is on the disk, with sizes (the same as without ACTION)")
    listing.add_argument("--json", action="store_true", help="for programs")
    fetching = actions.add_parser("fetch", help="fetch a checkpoint from the hub, so that a server starts at once")
    fetching.add_argument("ids", nargs="+", metavar="ID", help="a hub id: org/name")
    removing = actions.add_parser("remove", help="take a checkpoint from the disk")
    removing.add_argument("ids", nargs="+", metavar="ID", help="a name of the list")
    removing.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.set_defaults(action="list", json=False)


def run(args: argparse.Namespace) -> int:
    if args.action == "fetch":
        for name in args.ids:
            print(f"{name} is in {fetch(name, print)}; serve it: cb-backend serve {name}")
        return 0
    if args.action == "remove":
        return _remove(args)
    models = cached_models()
    if args.json:
        print(json.dumps([{**asdict(model), "folder": str(model.folder)} for model in models], indent=2))
    elif not models:
        print("no checkpoint is on the disk; fetch one: cb-backend models fetch ID")
    else:
        now = time.time()
        print(table(TITLES, [_row(model, now) for model in models], "<>><"))
        size = bytes_text(sum(model.num_bytes for model in models))
        print(f"{len(models)} checkpoint{'s' * (len(models) != 1)}, {size}")
    return 0


def _row(model: CachedModel, now: float) -> tuple[str, ...]:
    return model.name, bytes_text(model.num_bytes), age_text(now - model.used_at), model.origin


def _is_of(served: str, model: CachedModel) -> bool:
    """Whether what an engine was told to serve is this checkpoint: by its name, its folder, or one inside of it."""
    if not served or served == model.name:
        return bool(served)
    return Path(served).is_absolute() and model.folder.resolve() in (path := Path(served).resolve(), *path.parents)


def _remove(args: argparse.Namespace) -> int:
    """Names are looked up before anything is removed: a wrong one removes nothing."""
    models = [model for name in dict.fromkeys(args.ids) for model in find_cached(name)]
    engines = running_engines()
    in_use = [(served, life.pid) for life in engines for served in (model_of(life), read_weights(life.folder))]
    for model in models:
        if pid := next((pid for served, pid in in_use if _is_of(served, model)), None):
            raise CliError(f"{model.name} is being served by engine {pid}; stop that server first")
    if not args.yes:
        for model in models:
            print(f"{model.name}  {bytes_text(model.num_bytes)}  {model.folder}")
        if not sys.stdin.isatty():
            raise CliError("nothing was removed: nobody can be asked here; --yes removes without a question")
        if input("remove from the disk? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return 1
    for model in models:
        remove(model)
        print(f"removed {model.name}, {bytes_text(model.num_bytes)} are free again")
    return 0
