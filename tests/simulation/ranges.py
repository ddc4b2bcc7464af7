"""What several runs of seeds have found, in files that add up: a line for each range that was run to its end.

Ranges add up only where the same was run: the same source of the package, as far as the worlds import it, the same
source of the worlds, and the same kind of worlds (`draw.make_scenario`).
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kept_results import append_entry, fingerprint, read_entries

ROOT = Path(__file__).parents[2]
_NOT_OF_THE_WORLDS = ("run.py", "ranges.py", "shrink.py", "replay.py", "test_simulation.py", "test_ranges.py")


@dataclass(frozen=True, order=True)
class Key:
    """What was run."""

    package: str  # fingerprint of what the worlds import of the package
    worlds: str  # ... of the worlds themselves, and of the made-up runner
    kind: str  # of worlds, as `draw.Kind` is written

    @classmethod
    def of_this_checkout(cls, kind: str) -> Key:
        """To be asked once the worlds are imported."""
        worlds = [path for path in Path(__file__).parent.glob("*.py") if path.name not in _NOT_OF_THE_WORLDS]
        return cls(fingerprint(_sources("cb_backend")), fingerprint([*worlds, *_sources("tests.fakes")]), kind)


def _sources(package: str) -> list[Path]:
    named = [module for name, module in sys.modules.items() if name == package or name.startswith(f"{package}.")]
    return [Path(module.__file__) for module in named if module.__file__]


@dataclass
class Total:
    """The sum of ranges that do not overlap."""

    seeds: set[int] = field(default_factory=set)
    counters: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    commits: set[str] = field(default_factory=set)

    def add(self, entry: dict[str, Any]) -> None:
        """A range that overlaps what is counted already adds nothing but its failures."""
        seeds = range(entry["first"], entry["first"] + entry["num_seeds"])
        self.failures.update({int(seed): what for seed, what in entry["failures"].items()})
        if self.seeds.isdisjoint(seeds):
            self.seeds.update(seeds)
            self.counters.update(entry["counters"])
            self.commits.add(entry["commit"])

    def left_of(self, seeds: range, most: int) -> Iterator[range]:
        """Ranges of at most `most` seeds, which nobody has run."""
        first = None
        for seed in (*seeds, seeds.stop):
            is_end = seed == seeds.stop or seed in self.seeds
            if first is not None and (is_end or seed - first == most):
                yield range(first, seed)
                first = None
            if first is None and not is_end:
                first = seed


class RangeLog:
    """A file of ranges, or none (`path` None)."""

    def __init__(self, path: Path | None, key: Key) -> None:
        """Raises `ValueError` for a file that is no such log."""
        self._path, self._key = path, key
        self._commit = _commit() if path else ""
        self.known = totals([path] if path else []).get(key, Total())

    def note(self, seeds: Sequence[int], counters: Counter[str], failures: dict[int, str]) -> None:
        what = {"package": self._key.package, "worlds": self._key.worlds, "kind": self._key.kind}
        numbers = {name: int(count) for name, count in sorted(counters.items())}
        found = {"counters": numbers, "failures": failures, "commit": self._commit}
        append_entry(self._path, what | {"first": seeds[0], "num_seeds": len(seeds)} | found)


def totals(paths: Iterable[Path]) -> dict[Key, Total]:
    """Raises `ValueError` for a file that is no log of ranges."""
    found: dict[Key, Total] = {}
    for path in paths:
        for entry in read_entries(path):
            try:
                key = Key(entry["package"], entry["worlds"], entry["kind"])
                found.setdefault(key, Total()).add(entry)
            except KeyError as error:
                raise ValueError(f"{path} is no log of ranges of seeds: a line has no {error}") from error
    return found


def describe(found: dict[Key, Total], current: set[Key]) -> str:
    """A line for each kind of run: how many seeds, which, and what was wrong; marks those of this checkout."""
    lines = []
    for key, total in sorted(found.items()):
        worlds = ", ".join(
            f"{count:,} of {name.removeprefix('groups: ')}"
            for name, count in sorted(total.counters.items())
            if name.startswith("groups: ")
        )
        mark = "this checkout" if key in current else f"commits {', '.join(sorted(total.commits))}"
        lines.append(
            f"package {key.package}, worlds {key.worlds} ({mark}), groups {key.kind}: {len(total.seeds):,} seeds "
            f"({_spans(total.seeds)}; worlds by groups: {worlds}; {total.counters['with adapters']:,} with adapters), "
            f"{total.counters['steps']:,} steps, {len(total.failures)} violations"
        )
        lines += [f"  seed {seed}: {what}" for seed, what in sorted(total.failures.items())]
    return "\n".join(lines)


def _spans(seeds: set[int]) -> str:
    ordered = sorted(seeds)
    firsts = [seed for seed in ordered if seed - 1 not in seeds]
    lasts = [seed for seed in ordered if seed + 1 not in seeds]
    return ", ".join(f"{first} to {last}" for first, last in zip(firsts, lasts, strict=True))


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
