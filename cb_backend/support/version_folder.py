"""The version folder of a model in the server's repository: where its engine arguments stand, and reading them."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

from cb_backend.contracts.config import EngineConfig, engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.support.adapter_files import SETTLED_S, adapter_folder
from cb_backend.support.json_files import read_json_object
from cb_backend.support.native_paths import native_path, shown_path


def load_engine_config(path: Path) -> EngineConfig:
    """Read `model.json`. Raises `ConfigError` that names the key and the remedy; model paths stay as written."""
    if not path.is_file():
        raise ConfigError(f"{path.name} is missing in the model's version folder; it must at least name a model")
    return engine_config_from_dict(_read_written(path))


def engine_folder(version: Path) -> Path:
    """The version folder whose `model.json` holds the engine arguments of a model: its own, or another model's.

    A model.json of `{"engine_of": "llm"}` makes a model another front of the engine of `llm`, its neighbour in the
    repository (the newest version of it); with `"lora": "folder"` beside it (see `own_adapter`) it is an adapter there.
    Raises `ConfigError` if there is no such model or something else stands beside it.
    """
    try:
        arguments = _read_written(version / "model.json")
    except ConfigError:
        return version  # for `load_engine_config` to explain
    if "engine_of" not in arguments:
        if "lora" in arguments:
            raise ConfigError("'lora' in model.json makes a model of one adapter; set 'engine_of' beside it")
        return version
    name = arguments["engine_of"]
    if not arguments.keys() <= {"engine_of", "lora"}:
        raise ConfigError("model.json sets 'engine_of', so the engine arguments are that model's; remove the others")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        raise ConfigError(f"'engine_of' in model.json is {name!r}; name a model of the same repository")
    neighbour = version.parent.parent / native_path(name)
    versions = sorted((int(p.name) for p in neighbour.glob("*") if p.name.isdigit()), reverse=True)
    if not versions or neighbour == version.parent or "engine_of" in _text(neighbour / str(versions[0]) / "model.json"):
        raise ConfigError(f"'engine_of' in model.json is {name!r}, which is no model with an engine in this repository")
    return neighbour / str(versions[0])


def own_adapter(version: Path) -> Path | None:
    """The adapter's folder of a model that is one: `lora` beside `engine_of` in its model.json, or None. A relative
    folder counts from the version folder. Raises `ConfigError` if it is no text.
    """
    path = version / "model.json"
    arguments = _read_written(path) if path.is_file() else {}
    if "engine_of" not in arguments or "lora" not in arguments:
        return None
    return adapter_folder(path, "lora", arguments["lora"])


def adapter_models(engine: Path) -> list[str]:
    """Names of the models in the repository that are adapters of this engine, by their files."""
    found = []
    for path in sorted(engine.parent.parent.glob("*/*/model.json")):
        with contextlib.suppress(ConfigError):
            arguments = read_json_object(path)
            if "lora" in arguments and arguments.get("engine_of") == shown_path(engine.parent.name):
                found.append(shown_path(path.parent.parent.name))
    return list(dict.fromkeys(found))


def _read_written(path: Path) -> dict[str, Any]:
    """The object in the file. One that was changed just now and cannot be read may be half written: a server that polls
    its repository looks at any moment, and a load that fails over a loaded model can crash it (24.10). Raises
    `ConfigError`.
    """
    while True:
        try:
            return read_json_object(path, refuses_twins=True)
        except ConfigError:
            if not path.exists() or not 0 <= time.time() - path.stat().st_mtime < SETTLED_S:
                raise
        time.sleep(0.05)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
