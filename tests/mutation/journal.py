"""What a mutation run has found so far. An outcome counts only for the code and the tests it was found with."""

from __future__ import annotations

from pathlib import Path

from tests.kept_results import append_entry, read_entries
from tests.mutation.mutate import Mutant


class Journal:
    """Outcomes in a file, or in memory alone (`path` None)."""

    def __init__(self, path: Path | None) -> None:
        """Raises `ValueError` for a file that is not a journal."""
        self._path = path
        # The last line of each (module, index).
        self._found = {(entry.get("module"), entry.get("index")): entry for entry in read_entries(path)}

    def outcome(self, module: str, mutant: Mutant, code: str, tests: str, keep: str = "") -> str | None:
        """What is known of a mutant of this code under these tests. `keep`: what counts under other tests too."""
        entry = self._found.get((module, mutant.index))
        if entry is None or entry["code"] != code or (entry["tests"] != tests and entry["outcome"] != keep):
            return None
        return entry["outcome"]

    def note(self, module: str, mutant: Mutant, code: str, tests: str, outcome: str) -> None:
        entry = {"module": module, "index": mutant.index, "line": mutant.line, "what": mutant.what}
        append_entry(self._path, entry | {"outcome": outcome, "code": code, "tests": tests})
