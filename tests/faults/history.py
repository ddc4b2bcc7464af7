"""What a client saw, one JSON line an event, written at once: a client that is killed leaves all it knew.

Events of a request: `send`, then `delta`s, then one of `final` and `error`; `cancel` and `give_up` are the client's own
doing, `closed` says that nothing more can come. Times are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    time: float
    request: str
    kind: str  # send | delta | final | error | cancel | give_up | closed
    text: str = ""  # of a delta, a final or an error
    code: str = ""  # of an error: the gRPC status; of a final: the finish reason
    role: str = ""  # of a send: load | canary | bad | long (longer than its item says)
    item: int = -1  # of a send: index in the plan


@dataclass(frozen=True, slots=True)
class Item:
    """A request that may be sent, and what must come back."""

    prompt: str
    max_tokens: int
    expected: str


class HistoryWriter:
    """Appends events to a file. For one thread."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, request: str, kind: str, **values: Any) -> None:
        event = Event(time.monotonic(), request, kind, **values)
        self._file.write(json.dumps(asdict(event)) + "\n")

    def close(self) -> None:
        self._file.close()


class HistoryReader:
    """Reads a history while it is written: each call to `read` gives the events since the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole_lines, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole_lines) + len(newline)
        return [Event(**json.loads(line)) for line in whole_lines.splitlines()]


def read_history(path: Path) -> list[Event]:
    """All events; a last line that was cut off is left out."""
    return HistoryReader(path).read()


def write_plan(path: Path, items: list[Item]) -> None:
    path.write_text(json.dumps([asdict(item) for item in items]))


def read_plan(path: Path) -> list[Item]:
    return [Item(**item) for item in json.loads(path.read_text())]


def by_request(events: list[Event]) -> Iterator[tuple[str, list[Event]]]:
    """The events of each request, in order."""
    groups: dict[str, list[Event]] = {}
    for event in events:
        groups.setdefault(event.request, []).append(event)
    yield from groups.items()
