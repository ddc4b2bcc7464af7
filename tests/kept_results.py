"""Results of long runs, a line of JSON each, so that a run which was stopped can go on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any


def fingerprint(paths: Iterable[Path]) -> str:
    """A short name of the files' names and texts: results are reused only for the code they were found with."""
    state = blake2b(digest_size=8)
    for path in sorted(paths):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()


def read_entries(path: Path | None) -> list[dict[str, Any]]:
    """What is kept in the file, if there is one. A last line that was cut short is taken out of it.

    Raises `ValueError` for a line that is no JSON object.
    """
    if path is None or not path.exists():
        return []
    *lines, rest = path.read_text().split("\n")
    if rest:
        path.write_text("".join(f"{line}\n" for line in lines))
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is no kept result ({error}); name another file") from error
    return entries


def append_entry(path: Path | None, entry: dict[str, Any]) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
