"""The cells of the equivalence matrix that have been run, kept in a file so that a run can be stopped and go on.

A cell is (setting, parameter set). It does not know what is compared in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.kept_results import append_entry, read_entries


class Cells:
    """`code` names the code that the results hold for; lines of other code in the file are passed over."""

    def __init__(self, path: Path | None, code: str) -> None:
        self._path = path
        self._code = code
        self.wrong: dict[tuple[str, str], list[str]] = {}  # differences, in words
        self.statistics: dict[tuple[str, str], dict[str, int]] = {}  # what the setting did
        self.has_effect: dict[str, bool] = {}  # by parameter set: it changes some answer
        for entry in read_entries(path):
            self._take(entry)

    def note(self, setting: str, params: str, wrong: list[str], statistics: dict[str, int], has_effect: bool) -> None:
        entry = {"code": self._code, "setting": setting, "params": params, "wrong": wrong}
        entry |= {"statistics": statistics, "has_effect": has_effect}
        self._take(entry)
        append_entry(self._path, entry)

    def _take(self, entry: dict) -> None:
        if entry["code"] != self._code:
            return
        cell = entry["setting"], entry["params"]
        self.wrong[cell], self.statistics[cell] = entry["wrong"], entry["statistics"]
        self.has_effect[entry["params"]] = entry["has_effect"]

    def of_setting(self, setting: str) -> dict[str, int]:
        """The statistics of all its cells together."""
        total: Counter[str] = Counter()
        for (name, _), counts in self.statistics.items():
            if name == setting:
                total.update(counts)
        return dict(total)

    def table(self, settings: Sequence[str], params: Sequence[str]) -> str:
        """Differences in each cell; a dot: not run yet. Then what the setting did."""
        width = max(map(len, settings))
        lines = [f"{number:3}  {name}" for number, name in enumerate(params, 1)]
        lines.append(" " * width + "".join(f"{number:4}" for number in range(1, len(params) + 1)))
        for setting in settings:
            found = [self.wrong.get((setting, name)) for name in params]
            cells = "".join("   ." if wrong is None else f"{len(wrong):4}" for wrong in found)
            did = ", ".join(f"{name} {count:,}" for name, count in self.of_setting(setting).items() if count)
            lines.append(f"{setting:{width}}{cells}   {did}")
        return "\n".join(lines)
