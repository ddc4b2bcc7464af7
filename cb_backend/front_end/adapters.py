"""Which adapters the requests of a model may name, and which files a name stands for at this moment.

`multi_lora.json` is watched: what is added can be named by the next request, what is removed is refused from then on. A
list that cannot be read leaves the last one in force. What is in an adapter's files is the engine's business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from cb_backend.contracts.adapters import DEFAULT_MAX_LORAS, NOT_ENABLED, AdapterSource
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError, InvalidRequestError, UnavailableError
from cb_backend.contracts.scheduling import MAX_NAME_BYTES
from cb_backend.support.adapter_files import LIST_NAME, Stamp, folder_stamp, read_adapter_list, stamp_of
from cb_backend.support.bounded_call import BoundedCall
from cb_backend.support.native_paths import shown_path
from cb_backend.support.version_folder import adapter_models, own_adapter

LOOK_INTERVAL_S = 1.0  # from one look at a file to the next
LOOK_TIMEOUT_S = 2.0  # of a look at a file: a disk of another machine may not answer
MAX_LISTED = 100  # adapters that an error names

NOT_SUPPORTED = "LoRA {} is not supported, we currently support {}"  # clients of vllm_backend compare with this text

logger = logging.getLogger("cb_backend.front_end")


class Adapters(Protocol):
    """What a front end asks for each request; any thread may."""

    def find(self, name: str) -> AdapterSource | None:
        """What a request means that gives this `lora_name` ("": none); None: the model as it is.

        Raises `InvalidRequestError`, and `UnavailableError` where its files do not answer.
        """
        ...


class NoAdapters:
    """Of a model without `enable_lora`."""

    def find(self, name: str) -> AdapterSource | None:
        if name:
            raise InvalidRequestError(NOT_ENABLED)
        return None


class AdapterFolder:
    """One adapter's files, looked at now and then. Not for several threads at once."""

    def __init__(self, name: str, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._name = name
        self._clock = clock
        self._next_look = 0.0
        self._stamp: Stamp | None = None  # of the files that count
        self._is_settled = False  # those had not changed for a while when they were looked at
        self._is_missing_told = False
        self._stamp_of = BoundedCall[Stamp | None]()

    def source(self) -> AdapterSource:
        """The files as they count now. Files that change are those of before until they have settled, and files that
        are gone are too: the engine may hold what was in them, and if not, it says why it cannot serve them. Raises
        `UnavailableError` for a folder that does not answer and of which nothing is known."""
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + LOOK_INTERVAL_S
            self._look()
        if self._stamp is None and self._stamp_of.is_late:
            raise UnavailableError(
                f"adapter {self._name!r}: its folder {shown_path(self.folder)} does not answer (within"
                f" {LOOK_TIMEOUT_S:g} s); look at the file system that it is on, and try again"
            )
        return (self._stamp or Stamp(0, 0, 0, 0)).source(self._name, shown_path(self.folder), self._is_settled)

    def _look(self) -> None:
        try:
            stamp = self._stamp_of(partial(folder_stamp, self.folder), LOOK_TIMEOUT_S)
        except TimeoutError:
            return
        if stamp is None:
            if not self._is_missing_told:
                logger.warning("the files of adapter %r are not in %s", self._name, shown_path(self.folder))
            self._is_missing_told = True
            return
        self._is_missing_told = False
        is_settled = stamp.is_settled
        if self._stamp is None or is_settled:
            self._stamp, self._is_settled = stamp, is_settled


class NamedAdapters:
    """Folders by name."""

    def __init__(self, folders: Mapping[str, Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._folders = {name: AdapterFolder(name, folder, clock) for name, folder in folders.items()}

    @property
    def names(self) -> list[str]:
        """In the order in which they were given."""
        return list(self._folders)

    def find(self, name: str) -> AdapterSource | None:
        if not name:
            return None
        with self._lock:
            self._look(name)
            if name in self._folders:
                return self._folders[name].source()
            raise _not_supported(name, self.names)

    def _look(self, name: str) -> None:
        """Before the name is looked up."""


class ListedAdapters(NamedAdapters):
    """Those of a `multi_lora.json`, which may change."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `ConfigError` for a list that is missing or wrong: at the start nothing else can count."""
        self._path = path
        self._stamp = stamp_of(path)  # before it is read: a change meanwhile is then seen as one
        self._is_settled = False  # the list was read when it had not changed for a while
        self._read = BoundedCall[tuple[Stamp | None, Mapping[str, Path] | ConfigError | None]]()
        super().__init__(read_adapter_list(path), clock)
        self._next_look = 0.0

    def _look(self, name: str) -> None:
        if name in self._folders and self._clock() < self._next_look:
            return
        self._next_look = self._clock() + LOOK_INTERVAL_S
        try:
            stamp, found = self._read(self._look_at_list, LOOK_TIMEOUT_S)
        except TimeoutError:  # the list stays as it was
            return
        if found is None:
            return
        is_news, self._stamp = stamp != self._stamp, stamp
        self._is_settled = stamp is None or stamp.is_settled
        if not isinstance(found, ConfigError):
            self._take(found)
        elif is_news:
            logger.error("the list of adapters stays as it was, because the new one is wrong: %s", found)

    def _look_at_list(self) -> tuple[Stamp | None, Mapping[str, Path] | ConfigError | None]:
        """Its stamp, and what is in it: None where that is known."""
        stamp = stamp_of(self._path)  # before it is read: a change meanwhile is then seen as one
        if stamp == self._stamp and self._is_settled:
            return stamp, None
        try:
            return stamp, read_adapter_list(self._path)
        except ConfigError as error:
            return stamp, error

    def _take(self, folders: Mapping[str, Path]) -> None:
        """The list from now on. An adapter that stays where it was keeps what is known of its files."""
        known = self._folders
        added = [name for name, folder in folders.items() if name not in known or known[name].folder != folder]
        removed = [name for name in known if name not in folders]
        self._folders = {
            name: AdapterFolder(name, folder, self._clock) if name in added else known[name]
            for name, folder in folders.items()
        }
        if added or removed:
            logger.info("adapters: %d, new: %s, gone: %s", len(folders), _listed(added), _listed(removed))


class OneAdapter:
    """Of a model that is an adapter: every request is for it."""

    def __init__(self, name: str, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._folder = AdapterFolder(name, folder, clock)
        self._lock = threading.Lock()

    def find(self, name: str) -> AdapterSource | None:
        if name not in ("", self._name):
            raise _not_supported(name, [self._name])
        with self._lock:
            return self._folder.source()


def make_adapters(config: EngineConfig, engine: Path, version: Path, model_name: str) -> Adapters:
    """Of the model in this version folder, whose engine's arguments are `config`, of the folder `engine`.

    Raises `ConfigError`.
    """
    own = own_adapter(version)
    if own is not None and not config.enable_lora:
        name = shown_path(engine.parent.name)
        raise ConfigError(f"'lora' in model.json needs an engine that takes adapters; set enable_lora for {name!r}")
    if own is not None:
        return OneAdapter(model_name, own)
    return ListedAdapters(engine / LIST_NAME) if config.enable_lora else NoAdapters()


def with_places(config: EngineConfig, engine: Path) -> EngineConfig:
    """What the engine of this folder is started with: where nobody has said `max_loras`, a batch has room for as many
    adapters as are foreseen, up to a limit. Where none is foreseen yet, the engine decides.
    """
    if not config.enable_lora or config.max_loras is not None:
        return config
    num_foreseen = len(read_adapter_list(engine / LIST_NAME)) + len(adapter_models(engine))
    most = min(DEFAULT_MAX_LORAS, config.max_cpu_loras or DEFAULT_MAX_LORAS)
    return replace(config, max_loras=min(num_foreseen, most)) if num_foreseen else config


def _not_supported(name: str, names: list[str]) -> InvalidRequestError:
    listed = str(names) if len(names) <= MAX_LISTED else f"{str(names[:MAX_LISTED])[:-1]}, and {len(names)} in all]"
    shown = name if len(name) <= MAX_NAME_BYTES else f"{name[:MAX_NAME_BYTES]}..."
    return InvalidRequestError(NOT_SUPPORTED.format(shown, listed))


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_LISTED]) or "none"
    return shown if len(names) <= MAX_LISTED else f"{shown}, and {len(names) - MAX_LISTED} more"
