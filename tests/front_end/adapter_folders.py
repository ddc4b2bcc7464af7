"""Lists of adapters and their folders, as old as a test says, and the clock that the watch of them goes by."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.front_end.adapters import (
    ListedAdapters,
    NoAdapters,
    OneAdapter,
)
from cb_backend.support import adapter_files
from cb_backend.support.adapter_files import CONFIG_NAME, LIST_NAME, WEIGHTS_NAME

AGE_S = 100.0  # of a settled file


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def write_list(folder: Path, value: object, age_s: float = AGE_S) -> Path:
    """The list, as if written so long ago."""
    path = folder / LIST_NAME
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return aged(path, age_s)


@pytest.fixture(autouse=True)
def whole_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are as old as a test says: it can set the time of their contents, and no test the time of a change."""
    monkeypatch.setattr(adapter_files, "changed_ns", lambda status: status.st_mtime_ns)


def aged(path: Path, age_s: float) -> Path:
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def write_adapter(folder: Path, weights: bytes = b"weights", age_s: float = AGE_S) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in ((WEIGHTS_NAME, weights), (CONFIG_NAME, b"{}")):
        (folder / name).write_bytes(data)
        aged(folder / name, age_s)
    return folder


def refusal(adapters: ListedAdapters | OneAdapter | NoAdapters, name: str) -> str:
    with pytest.raises(InvalidRequestError) as raised:
        adapters.find(name)
    return str(raised.value)
