"""Plans of measurements: their lines, and what of a machine each of their lanes has. `measure.py` runs them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

GPU_CORES = 12  # of each GPU's lane, where there are lanes without one: an engine, its front ends and their clients
GOES_ON = "\\"
_LINE = re.compile(
    r"(?P<lane>gpu\d+|gpus|cpu\d*)\s+(?P<seconds>\d+)\s+(?P<name>[\w.-]+)(?:\s+(?P<shown>\d+))?:\s+(?P<command>.+)"
)
_VARIABLE = re.compile(r"\$\{?([A-Z][A-Z0-9_]*)")


class PlanError(ValueError):
    """A plan that cannot be run; says file, line and what is there."""


@dataclass(frozen=True)
class Line:
    """A command of a plan."""

    lane: str
    seconds: float  # it is ended after
    name: str
    num_shown: int  # lines of what it printed last
    command: str

    def excludes(self, lane: str) -> bool:
        """Whether it cannot run while a command of that lane does."""
        are_gpus = self.lane.startswith("gpu") and lane.startswith("gpu")
        return lane == self.lane or (are_gpus and "gpus" in (self.lane, lane))

    def variables(self) -> list[str]:
        """Names in capitals that the command reads."""
        return _VARIABLE.findall(self.command)


def read_plans(paths: Iterable[Path]) -> list[Line]:
    """Their lines, in order. Raises `PlanError` for a line that says nothing to run, and where a name comes twice."""
    found: dict[str, Line] = {}
    for path in paths:
        for number, text in _whole_lines(path.read_text(encoding="utf-8")):
            here, match = f"{path}, line {number}", _LINE.fullmatch(text)
            if match is None:
                raise PlanError(
                    f"{here}: {text!r} is not `lane seconds name [lines]: command`, lane gpu0, gpus, cpu, ..."
                )
            shown = int(match["shown"] or 1)
            line = Line(match["lane"], float(match["seconds"]), match["name"], shown, match["command"])
            if line.name in found:
                raise PlanError(f"{here}: {line.name!r} is there already, and would write the same file: rename one")
            found[line.name] = line
    return list(found.values())


def _whole_lines(text: str) -> Iterable[tuple[int, str]]:
    """(number, text) of each line that is no comment, with those that it goes on in."""
    begun, start = "", 1
    for number, raw in enumerate(text.splitlines(), 1):
        start = start if begun else number
        begun = f"{begun} {raw.removesuffix(GOES_ON).strip()}".strip()
        if raw.endswith(GOES_ON):
            continue
        if begun and not begun.startswith("#"):
            yield start, begun
        begun = ""


def share_cores(
    lanes: Iterable[str], num_gpus: int, cores: list[int], gpu_cores: int = GPU_CORES
) -> dict[str, list[int]]:
    """The cores of each lane: `gpu_cores` for each GPU's, where there are lanes without one, which have what is left.

    Where there are too few, all.
    """
    names = sorted(set(lanes))
    without = [name for name in names if name.startswith("cpu")]
    gpus = [name for name in names if name not in without and name != "gpus"]
    if "gpus" in names:
        gpus = [f"gpu{index}" for index in range(num_gpus)]
    each = len(cores) // max(1, len(gpus))
    if without:
        each = min(gpu_cores, len(cores) // (len(gpus) + 1))
    rest = cores[each * len(gpus) :]
    of_rest = len(rest) // max(1, len(without))
    shares = {name: cores[index * each :][:each] for index, name in enumerate(gpus)}
    shares |= {name: rest[index * of_rest :][:of_rest] for index, name in enumerate(without)}
    shares["gpus"] = cores[: each * len(gpus)]
    return {name: shares.get(name) or cores for name in names}
