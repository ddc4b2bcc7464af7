"""Engine arguments on a command line: those of `model.json`, spelled as vLLM spells them (`--max-model-len`).

The list of them, their types and their limits are `cb_backend.contracts.config`'s.
"""

from __future__ import annotations

import argparse
from dataclasses import Field, asdict, fields
from typing import Any

from cb_backend.cli.paths import CliError
from cb_backend.contracts.config import EngineConfig, engine_config_from_dict
from cb_backend.contracts.config_values import kind_name
from cb_backend.contracts.errors import ConfigError
from cb_backend.support.native_paths import native_path

_NOT_AN_OPTION = ("model", "worker_cls")  # an argument of its own; for tests and experiments
_PREFIX = "engine_"  # of the parsed values: `seed` or `device` may be another option of a command


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "engine arguments", "those of model.json, with vLLM's names; they change a copy of the llm model, not its files"
    )
    for field in _fields():
        flag, dest = flag_of(field.name), _PREFIX + field.name
        if field.type == "bool":
            group.add_argument(flag, dest=dest, action=argparse.BooleanOptionalAction, default=None)
        else:
            kind = kind_name(str(field.type))
            group.add_argument(flag, dest=dest, metavar="JSON" if kind.startswith("list") else kind.upper())


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine arguments that were given, as `model.json` has them. Raises `CliError` for a value that is none."""
    given = {field.name: value for field in _fields() if (value := getattr(args, _PREFIX + field.name)) is not None}
    try:
        checked = asdict(engine_config_from_dict({"model": "any", **given}))
    except ConfigError as error:
        raise CliError(str(error)) from None
    return {name: checked[name] for name in given}


def options_for(args: argparse.Namespace, path: str) -> dict[str, Any]:
    """`engine_options` for a checkpoint that is only looked at. Ends as wrong usage for a value that is none, and where
    nothing is at the path."""
    parser: argparse.ArgumentParser = args.command_parser
    if not native_path(path).expanduser().exists():
        parser.error(f"{path!r} is neither a folder nor a file; nothing is fetched here")
    try:
        return engine_options(args)
    except CliError as error:
        parser.error(str(error))


def flag_of(name: str) -> str:
    """An engine argument's name on a command line."""
    return f"--{name.replace('_', '-')}"


def _fields() -> list[Field[Any]]:
    return [field for field in fields(EngineConfig) if field.name not in _NOT_AN_OPTION]
