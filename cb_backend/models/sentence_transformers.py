"""How sentence-transformers stores what an embedding is: `modules.json`, and the config of its pooling module.

Modules run one after the other: the transformer, a pooling, and perhaps a norm. What else there may be is refused by
name, because leaving it out would give other numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.pooling import Pooling
from cb_backend.models.config_reader import ConfigReader
from cb_backend.support.json_files import read_json_object

_MODULES = "modules.json"
_FLAG = "pooling_mode_"
# What the flags of a pooling's config, and newer files' `pooling_mode`, call the kinds that are built.
_POOLINGS: dict[str, Pooling] = {
    "lasttoken": "last",
    "last_token": "last",
    "last": "last",
    "mean_tokens": "mean",
    "mean": "mean",
}


@dataclass(frozen=True, slots=True)
class Embedding:
    """What a checkpoint says of its embeddings. Defaults: of one that says nothing."""

    pooling: Pooling = "last"
    is_normalized: bool = True
    dimensions: tuple[int, ...] = ()  # that they may be cut to; empty: any


def read_sentence_transformers(folder: Path, hidden_size: int) -> Embedding | None:
    """None where the folder has no `modules.json`. Raises `ConfigError` for what is broken or not built."""
    path = folder / _MODULES
    if not path.is_file():
        return None
    kinds = [(_kind(module), str(module.get("path", ""))) for module in _read_list(path)]
    names = [name for name, _ in kinds]
    if names[:2] != ["Transformer", "Pooling"] or names[2:] not in ([], ["Normalize"]):
        raise ConfigError(
            f"{_MODULES} names the modules {', '.join(names) or 'none'}; supported are Transformer, Pooling and, if"
            " need be, Normalize, in this order"
        )
    where = Path(kinds[1][1]) / "config.json"
    if where.is_absolute() or ".." in where.parts or not (folder / where).is_file():
        raise ConfigError(f"{where} is missing in the checkpoint's folder; {_MODULES} names it as the pooling's config")
    reader = ConfigReader(read_json_object(folder / where), str(where))
    width = reader.get("word_embedding_dimension", int, reader.get("embedding_dimension", int, hidden_size))
    if width != hidden_size:
        raise ConfigError(f"{where}: embeddings have {width} numbers, but the model's hidden states {hidden_size}")
    pooling = _read_pooling(reader)
    if pooling == "mean" and not reader.get("include_prompt", bool, True):
        raise ConfigError(f"{where}: include_prompt is false, a mean without the instruction's tokens: not supported")
    return Embedding(pooling, len(names) == 3, _read_dimensions(folder))


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{path.name} must hold a JSON list of objects, one a module")
    return modules


def _kind(module: dict[str, Any]) -> str:
    """The class's own name, without the package's."""
    return str(module.get("type", "")).rpartition(".")[2]


def _read_pooling(reader: ConfigReader) -> Pooling:
    modes = [key.removeprefix(_FLAG) for key, is_on in reader.values.items() if key.startswith(_FLAG) and is_on is True]
    if "pooling_mode" in reader.values:
        modes = [reader.get("pooling_mode", str)]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ConfigError(
            f"{reader.where}: the pooling is {' and '.join(modes) or 'not given'}; supported is one of lasttoken and"
            " mean_tokens"
        )
    return _POOLINGS[modes[0]]


def _read_dimensions(folder: Path) -> tuple[int, ...]:
    """`matryoshka_dimensions` of config.json, which some checkpoints name."""
    reader = ConfigReader(read_json_object(folder / "config.json"))
    dimensions: list[Any] = reader.get("matryoshka_dimensions", list, [])
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in dimensions):
        raise ConfigError(f"config.json: 'matryoshka_dimensions' must be a list of numbers, found {dimensions!r}")
    return tuple(dimensions)
