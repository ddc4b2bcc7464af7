"""Adapters as models of OpenAI's: `llm<separator>adapter`, named as Triton's own OpenAI frontend has it.

A model that the server has under the whole name comes first, so a model that is an adapter is itself. Whether there is
such an adapter the server decides; the lists beside its models are looked at to show names, where they can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cb_backend.contracts.errors import ConfigError
from cb_backend.gateway.triton import Model, no_such_model
from cb_backend.support.adapter_files import LIST_NAME, Stamp, read_adapter_list, stamp_of
from cb_backend.support.json_files import read_json_object
from cb_backend.support.version_folder import engine_folder, own_adapter

DEFAULT_SEPARATOR = "_lora_"


class Chosen(NamedTuple):
    """What a client's `model` means. `adapter` is empty for the model as it is."""

    model: Model
    adapter: str = ""


class AdapterNames:
    """Takes names apart, and makes those that there are."""

    def __init__(self, separator: str, repository: str | None) -> None:
        """`separator` "": no adapters. `repository`: the server's model repository as this machine sees it, or None."""
        self._separator = separator
        self._repository = None if repository is None else Path(repository)
        self._read: dict[Path, tuple[Stamp | None, list[str]]] = {}  # by list: its state, and what it said

    def choose(self, name: str, models: Mapping[str, Model]) -> Chosen:
        """Raises `ApiError` 404 with the names that there are."""
        if name in models:
            return Chosen(models[name])
        for model, adapter in self._splits(name):
            known = self._adapters(model) if model in models else []
            if model in models and (known is None or adapter in known):
                return Chosen(models[model], adapter)
        raise no_such_model(name, self.names(models))

    def names(self, models: Mapping[str, Model]) -> list[str]:
        """Of the models, each with its adapters behind it."""
        return [
            name
            for model in sorted(models)
            for name in (model, *(f"{model}{self._separator}{adapter}" for adapter in self._adapters(model) or ()))
        ]

    def _splits(self, name: str) -> list[tuple[str, str]]:
        """Model and adapter; several, where a name holds the separator too."""
        parts = name.split(self._separator) if self._separator else [name]
        cuts = range(1, len(parts))
        halves = [(self._separator.join(parts[:cut]), self._separator.join(parts[cut:])) for cut in cuts]
        return [(model, adapter) for model, adapter in halves if adapter]

    def _adapters(self, model: str) -> list[str] | None:
        """Of a model's list; None where that cannot be known here."""
        if not self._separator:
            return []
        if self._repository is None:
            return None
        versions = [path for path in (self._repository / model).glob("*") if path.name.isdigit()]
        if not versions:
            return None
        newest = max(versions, key=lambda path: int(path.name))
        try:
            if own_adapter(newest) is not None:
                return []  # the server takes no other adapter for it
            engine = engine_folder(newest)
            arguments = read_json_object(engine / "model.json")
        except ConfigError:
            return []
        if str(arguments.get("enable_lora")).lower() not in ("true", "1"):  # of vLLM's models too
            return []
        return self._names_in(engine / LIST_NAME)

    def _names_in(self, path: Path) -> list[str]:
        """A list that cannot be read is what it was before, as it is to the server."""
        stamp, (known_stamp, names) = stamp_of(path), self._read.get(path, (None, []))
        if stamp is not None and (stamp != known_stamp or not stamp.is_settled):
            try:
                names = list(read_adapter_list(path))
            except ConfigError:
                return names
            self._read[path] = stamp, names
        return names
