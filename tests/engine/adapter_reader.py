"""A reader of adapters that gives each folder what the test says, and how a test asks a store for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.errors import CbError, ConfigError
from cb_backend.engine.adapters import AdapterStore
from cb_backend.support.adapter_files import Stamp
from tests.waiting import eventually


@dataclass
class Packed:
    key: bytes
    stamp: Stamp | None = None


@dataclass
class Reader:
    """Gives each folder the key that its content says; `gate` holds reading up."""

    content: dict[str, bytes] = field(default_factory=dict)
    read_paths: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    packed_of: Callable[[bytes], Packed] | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def read(self, path: str) -> Packed:
        self.gate.wait()
        self.read_paths.append(path)
        if path not in self.content:
            raise ConfigError(f"{path}/adapter_config.json does not exist")
        if self.content[path] == b"broken":
            raise ValueError("not what was foreseen")
        return Packed(self.content[path])


def source(name: str, mtime_ns: int = 1) -> AdapterSource:
    return AdapterSource(name, f"/adapters/{name}", mtime_ns, 100)


def found(
    store: AdapterStore, wanted: AdapterSource, now: float = 0.0, in_use: frozenset[bytes] = frozenset()
) -> bytes:
    """The key, waited for while these are in use."""
    keys: list[bytes] = []

    def is_there() -> bool:
        key = store.find(wanted, now)
        store.tidy(lambda: in_use, now)
        keys.extend([] if key is None else [key])
        return key is not None

    eventually(is_there, "the adapter")
    return keys[0]


def refusal(store: AdapterStore, wanted: AdapterSource, now: float = 0.0) -> CbError:
    with pytest.raises(CbError) as caught:
        found(store, wanted, now)
    return caught.value
