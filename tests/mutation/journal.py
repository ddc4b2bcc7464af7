"""What a mutation run has found so far, a line of JSON a mutant, so that a run which was stopped can go on.

An outcome counts only for the code and the tests it was found with: their texts are part of each line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from tests.mutation.mutate import Mutant


def fingerprint(paths: Iterable[Path]) -> str:
    """Of the files' names and texts."""
    state = blake2b(digest_size=8)
    for path in sorted(paths):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()


class Journal:
    """Outcomes in a file, or in memory alone (`path` None)."""

    def __init__(self, path: Path | None) -> None:
        """Raises `ValueError` for a file that is not a journal."""
        self._path = path
        self._found: dict[tuple[str, int], dict[str, str]] = {}  # the last line of each (module, index)
        if path is None or not path.exists():
            return
        *lines, rest = path.read_text().split("\n")
        if rest:  # cut short in the middle of a line: that mutant is tried again
            path.write_text("".join(f"{line}\n" for line in lines))
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                self._found[entry["module"], entry["index"]] = entry
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}, is not of a mutation run ({error}); use another") from error

    def outcome(self, module: str, mutant: Mutant, code: str, tests: str, keep: str = "") -> str | None:
        """What is known of a mutant of this code under these tests. `keep`: what counts under other tests too."""
        entry = self._found.get((module, mutant.index))
        if entry is None or entry["code"] != code or (entry["tests"] != tests and entry["outcome"] != keep):
            return None
        return entry["outcome"]

    def note(self, module: str, mutant: Mutant, code: str, tests: str, outcome: str) -> None:
        if self._path is None:
            return
        entry = {"module": module, "index": mutant.index, "line": mutant.line, "what": mutant.what}
        entry |= {"outcome": outcome, "code": code, "tests": tests}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
