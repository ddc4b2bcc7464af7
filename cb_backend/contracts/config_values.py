"""Values of `model.json` as the types of the engine's arguments: JSON's own, or strings that spell them."""

from __future__ import annotations

import json
from typing import Any

from cb_backend.contracts.errors import ConfigError

_TEXTS = "tuple[str, ...]"
BOOLS = {"true": True, "false": False, "1": True, "0": False}
_MAX_SHOWN = 80  # characters of a value that an error repeats


def kind_name(annotation: str) -> str:
    """A field's type in a user's words, without the `None` that it may also have."""
    kind = annotation.split(" | ")[0]
    return "list of strings" if kind == _TEXTS else kind


def coerced(key: str, value: Any, annotation: str) -> Any:
    """A JSON value as the field's type; strings that spell the value are accepted. Raises `ConfigError` for others."""
    if value is None:
        if "None" in annotation:
            return None
        raise ConfigError(f"engine argument {key!r} is null; remove it to get the default")
    kind = annotation.split(" | ")[0]
    try:
        if kind == "bool":
            return value if isinstance(value, bool) else BOOLS[value.strip().lower()]
        if kind == "int" and not isinstance(value, bool):
            number = int(value)
            if isinstance(value, int | str) or number == value:  # NOTE: as a float, a large one would be another number
                return number
        if kind == "float" and not isinstance(value, bool):
            return float(value)
        if kind == "str" and isinstance(value, str):
            return value
        if kind == _TEXTS:
            texts = json.loads(value) if isinstance(value, str) else value
            if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
                return tuple(texts)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        pass
    raise ConfigError(f"engine argument {key!r} must be of type {kind_name(annotation)}, got {show(value)}")


def show(value: Any) -> str:
    """For messages, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
