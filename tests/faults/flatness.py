"""Whether what processes hold stays flat over time: a line through each figure, a bound, a table.

A figure grows if the line through it rises by more than its bound and the rise is not within three standard errors of
none. It knows numbers and times, not servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.faults.processes import Held, slope_per_hour

MB_PER_HOUR = 2.0  # of the engine and each front end
SERVER_MB_PER_HOUR = 20.0  # of the server's own process, whose growth is not ours: reported, and bounded
# What allocators and bounded tables may still take within a run, however short: the engine's log of 4,096 steps, the
# tokenizer's 10,000 cached words (measured: 3 MB, reached after 12,000 new words and never passed).
SETTLING_MB = 3.0
COUNT_SLACK = 4.0  # threads and files that come and go with connections
SHARED_SLACK_MB = 1.0
NUM_ERRORS = 3.0  # standard errors that a rise must be away from none


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure over time. Times in seconds, ascending."""

    owner: str
    name: str
    times: Sequence[float]
    values: Sequence[float]
    per_hour: float  # how much it may grow in an hour ...
    slack: float  # ... and once, however short the time

    @property
    def hours(self) -> float:
        return (self.times[-1] - self.times[0]) / 3600

    @property
    def bound(self) -> float:
        """The steepest slope an hour that passes for flat over so long a time."""
        return self.per_hour + (self.slack / self.hours if self.hours else 0.0)

    @property
    def slope(self) -> tuple[float, float]:
        """Growth an hour and its standard error."""
        return slope_per_hour(self.times, self.values)

    @property
    def is_flat(self) -> bool:
        slope, error = self.slope
        return slope <= self.bound or slope - NUM_ERRORS * error <= 0


@dataclass
class Series:
    """One process over time."""

    name: str
    times: list[float] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def figures(self) -> Iterator[Figure]:
        per_hour = SERVER_MB_PER_HOUR if self.name == "server" else MB_PER_HOUR
        memory = [held.memory_mb for held in self.held]
        yield Figure(self.name, "memory MB", self.times, memory, per_hour, SETTLING_MB)
        yield Figure(self.name, "files", self.times, [float(h.num_files) for h in self.held], 0.0, COUNT_SLACK)
        yield Figure(self.name, "threads", self.times, [float(h.num_threads) for h in self.held], 0.0, COUNT_SLACK)


def shared_memory_figure(times: Sequence[float], values: Sequence[float]) -> Figure:
    return Figure("all", "shared memory MB", times, values, 0.0, SHARED_SLACK_MB)


def table(figures: Sequence[Figure]) -> Iterator[str]:
    """Lines to print, first a head; those of a figure that grows begin with '!'."""
    yield f"  {'process':13}{'figure':18}{'first':>9}{'last':>9}{'slope an hour':>22}{'bound':>9}   verdict"
    for figure in figures:
        if len(figure.times) < 3:
            yield f"! {figure.owner:13}{figure.name:18} was measured {len(figure.times)} times; run for longer"
            continue
        slope, error = figure.slope
        yield (
            f"{'  ' if figure.is_flat else '! '}{figure.owner:13}{figure.name:18}{figure.values[0]:9.1f}"
            f"{figure.values[-1]:9.1f}{slope:+13.2f} +-{error:6.2f}{figure.bound:9.1f}"
            f"   {'flat' if figure.is_flat else 'GROWS'}"
        )
