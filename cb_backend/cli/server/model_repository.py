"""Check a model repository before a server is started on it, and make temporary ones. Starts nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cb_backend.cli.paths import CliError
from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.front_end.adapters import make_adapters
from cb_backend.models.checkpoint import check_checkpoint_name
from cb_backend.support.adapter_files import LIST_NAME, read_adapter_list
from cb_backend.support.json_files import read_json_object
from cb_backend.support.version_folder import engine_folder, load_engine_config

_SHELL_CHARACTERS = frozenset(" \t\n\r'\"\\$`&;|<>()*?[]{}!#~")


def check_model_repository(repository: Path, our_backends: Collection[str] = ()) -> list[str]:
    """Names of the models in it. Raises `CliError` for a repository that cannot be served, naming model and remedy.

    Models of other kinds are only listed; the ones that are ours (their `model.py` imports cb_backend, or their backend
    is one of `our_backends`, names under which this package is installed) must have a valid `model.json`.
    """
    if not repository.is_dir():
        raise CliError(f"model repository {repository} does not exist; name one with --model-repository")
    models = sorted(path for path in repository.iterdir() if (path / "config.pbtxt").is_file())
    if not models and (repository / "config.pbtxt").is_file():
        raise CliError(f"{repository} is a model, not a folder of models; name the folder around it")
    if not models:
        raise CliError(f"{repository} holds no model (a folder with a config.pbtxt); copy model_repository/llm into it")
    for model in models:
        versions = [path for path in model.iterdir() if path.is_dir() and path.name.isdigit()]
        if not versions and "platform:" not in (model / "config.pbtxt").read_text():
            raise CliError(f"model {model.name!r} has no version folder; it needs {model / '1'}")
        for version in versions:
            if is_ours(version, our_backends):
                _check_name(model)
                _check_engine_arguments(model.name, version)
    return [model.name for model in models]


def odd_characters(name: str) -> str:
    """Those of a path or name that the server cannot start a Python model with: its command line goes through a shell
    (24.10), and the Python behind it takes file names for ASCII."""
    return " ".join(repr(char) for char in sorted(set(name)) if char in _SHELL_CHARACTERS or not char.isascii())


def plain_path(repository: Path, folder: Path) -> Path:
    """A path to `repository` that the server can start Python models with: itself, or a link to it in `folder`."""
    if not odd_characters(str(repository.absolute())):
        return repository
    link = folder / "model_repository"
    link.symlink_to(repository.absolute(), target_is_directory=True)
    return link


def _check_name(model: Path) -> None:
    if odd := odd_characters(model.name):
        raise CliError(
            f"the server cannot start a Python model whose name holds {odd}; rename {model} to letters, digits, '_', "
            "'-' and '.' (text outside ASCII is fine in the path of the checkpoint)"
        )


def is_ours(version: Path, our_backends: Collection[str] = ()) -> bool:
    """Whether a version folder of a model is served by this package."""
    door = version / "model.py"
    if door.is_file():
        return "from cb_backend.serving." in door.read_text()
    config = version.parent / "config.pbtxt"
    if not config.is_file():
        return False
    named = re.search(r'^\s*backend\s*:\s*"([^"]*)"', config.read_text(), re.MULTILINE)
    return named is not None and named.group(1) in our_backends


def _check_engine_arguments(name: str, version: Path, model: str | None = None) -> None:
    """`model` replaces the one of the file."""
    try:
        engine = engine_folder(version)
        config = load_engine_config(engine / "model.json")
        check_checkpoint_name(model or config.model)
        make_adapters(config, engine, version, name)  # keeps nothing
    except ConfigError as error:
        raise CliError(f"model {name!r}: {error} (in {version})") from None


def served_checkpoints(repository: Path, our_backends: Collection[str] = ()) -> set[str]:
    """What the `model.json` files of a checked repository name as their model."""
    versions = [path.parent for path in repository.glob("*/*/model.json") if is_ours(path.parent, our_backends)]
    return {load_engine_config(engine_folder(version) / "model.json").model for version in versions}


def copy_with_model(
    model_folder: Path,
    checkpoint: str | None,
    target: Path,
    front_ends: int | None = None,
    engine_arguments: Mapping[str, Any] = MappingProxyType({}),
    adapters: Mapping[str, Path] = MappingProxyType({}),
) -> Path:
    """A repository in `target` that holds a copy of one model folder serving another checkpoint; None: the same one.

    Every other engine argument of `1/model.json` that `engine_arguments` does not name is kept. `front_ends` replaces
    the instance count, `adapters` come to those of `1/multi_lora.json`. Raises `CliError` for arguments that cannot be
    served.
    """
    _check_engine_arguments(model_folder.name, model_folder / "1", checkpoint)
    copy = target / model_folder.name
    shutil.copytree(model_folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    arguments_file = copy / "1" / "model.json"
    arguments = read_json_object(arguments_file)
    if checkpoint is not None:
        local = Path(checkpoint).expanduser()
        arguments["model"] = str(local.resolve()) if local.exists() else checkpoint
    arguments.update(engine_arguments)
    if engine_config_from_dict(arguments).enable_lora:
        listed = dict(adapters)
        if (copy / "1" / LIST_NAME).is_file():  # relative folders count from where it stands
            listed = {**read_adapter_list(model_folder.absolute() / "1" / LIST_NAME), **listed}
        (copy / "1" / LIST_NAME).write_text(json.dumps({name: str(path) for name, path in listed.items()}, indent=2))
    arguments_file.write_text(json.dumps(arguments, indent=2) + "\n")
    if front_ends is not None:
        set_instance_count(copy / "config.pbtxt", front_ends)
    return target


def read_adapters(values: list[str]) -> dict[str, Path]:
    """Folders by name, of `NAME=FOLDER` each. Raises `CliError`."""
    adapters = {}
    for value in values:
        name, is_pair, folder = value.partition("=")
        if not (name and is_pair and folder):
            raise CliError(f"--adapter {value!r}: write NAME=FOLDER")
        if name in adapters:
            raise CliError(f"--adapter {name!r} is given twice; keep one")
        adapters[name] = Path(folder).expanduser().absolute()
        if not adapters[name].is_dir():
            raise CliError(f"--adapter {value!r}: {folder!r} is no folder")
    return adapters


def set_instance_count(config: Path, count: int) -> None:
    """Replace the value of `count:` in a model's configuration, which must have exactly one."""
    head, found, tail = config.read_text().partition("\n    count: ")
    if not found:
        raise CliError(f"{config} has no `count:` line in its instance_group")
    config.write_text(f"{head}{found}{count}\n{tail.partition(chr(10))[2]}")
