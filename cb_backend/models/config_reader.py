"""Typed, checked access to the JSON files of a checkpoint. Every complaint names the file, the key and the value."""

from __future__ import annotations

import math
from typing import Any

from cb_backend.contracts.errors import ConfigError

_MISSING = object()
_MOST = (1 << 31) - 1


class ConfigReader:
    """Typed access to `config.json`; every complaint names the key and the value."""

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def with_defaults(self, **defaults: Any) -> ConfigReader:
        """The same, with a family's values for keys that are absent. Null is not absent: it may have a meaning."""
        return ConfigReader(defaults | self.values, self.where)

    def get(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """The value as int, float, bool or str; `default` where it is absent or null. Raises `ConfigError`."""
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise ConfigError(f"{self.where} does not set {key!r}; the checkpoint is incomplete")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                value = math.inf
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.where}: {key!r} must be of type {kind.__name__}, found {value!r}")
        if isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers, but Python's writer does
            raise ConfigError(f"{self.where}: {key!r} is {value}; it must be a finite number")
        return value

    def nullable(self, key: str, kind: type, default: Any = None) -> Any:
        """As `get`, but null is a value of its own, which means none: None is returned for it."""
        return None if key in self.values and self.values[key] is None else self.get(key, kind, default)

    def section(self, key: str) -> ConfigReader:
        """The object that stands under a key. Raises `ConfigError`."""
        return ConfigReader(self.get(key, dict), f"{self.where} ({key})")

    def positive(self, key: str, default: Any = _MISSING, most: int = _MOST) -> int:
        value = self.get(key, int, default)
        if not 1 <= value <= most:
            raise ConfigError(
                f"{self.where}: {key!r} is {value}; it must be at least 1"
                + (f" and at most {most}" if value > most else "")
            )
        return value

    def positive_float(self, key: str, default: Any = _MISSING) -> float:
        value = self.get(key, float, default)
        if value <= 0:
            raise ConfigError(f"{self.where}: {key!r} is {value}; it must be above 0")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A key that holds one id, a list of ids, or nothing."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise ConfigError(f"{self.where}: {key!r} must be a token id or a list of them, found {value!r}")
        return tuple(dict.fromkeys(ids))
