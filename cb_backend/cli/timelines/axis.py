"""The horizontal axis of a timeline: where steps begin and end, in pixels. It knows no slots and draws nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cb_backend.cli.timelines.steps import Step
from cb_backend.support.charts import nice_step

WIDTH = 1280
LEFT, RIGHT = 92, 24
MOST_TICKS = 12
LABEL_PX = 48.0  # from one tick's label to the next, at least
# A time without a step is a pause if it is longer than both: this share of the steps' time, and so many seconds.
PAUSE_SHARE, LEAST_PAUSE_S = 0.1, 0.2
SHOWN_SHARE = 0.03  # of the steps' time: as wide a pause is drawn


@dataclass(frozen=True)
class Pause:
    """A time without a step, drawn shorter than it was. Seconds after the first step."""

    step: int  # index of the step after it
    begin: float
    end: float
    shown: float
    asleep: float  # so much of it the model was

    @property
    def cut(self) -> float:
        return self.end - self.begin - self.shown


class TimeAxis:
    """True to time, but for pauses, which are cut short; or the same width for each step."""

    def __init__(self, steps: Sequence[Step], is_by_time: bool, span: float | None = None) -> None:
        """`span`: seconds (or steps) that the whole width stands for, so that pictures can be compared."""
        self._is_by_time = is_by_time
        self.pauses: list[Pause] = []
        if is_by_time:
            zero = steps[0].begin if steps else 0.0
            starts = [step.begin - zero for step in steps]
            # A step that was launched ahead begins to run when the one before has ended.
            for i in range(1, len(steps)):
                starts[i] = max(starts[i], steps[i - 1].end - zero, starts[i - 1])
            ends = [max(step.end - zero, start) for step, start in zip(steps, starts, strict=True)]
            self.pauses = _pauses(steps, starts, ends)
            for pause in self.pauses:
                for i in range(pause.step, len(steps)):
                    starts[i] -= pause.cut
                    ends[i] -= pause.cut
        else:
            starts = [float(i) for i in range(len(steps))]
            ends = [i + 1.0 for i in range(len(steps))]
        self.length = ends[-1] if ends else 0.0
        self._scale = (WIDTH - LEFT - RIGHT) / (span or self.length or 1.0)
        self._starts, self._ends = starts, ends

    def begin(self, step: int) -> float:
        return LEFT + self._starts[step] * self._scale

    def end(self, step: int) -> float:
        """Right edge of a step; gaps between busy steps belong to the step before, true pauses to none."""
        return LEFT + self._ends[step] * self._scale

    def ticks(self) -> list[tuple[float, str]]:
        """(pixel, label) at round figures of the true time; none within a pause."""
        total = (WIDTH - LEFT - RIGHT) / self._scale
        unit = nice_step(total, MOST_TICKS)
        if not self._is_by_time:
            unit = max(unit, 1.0)
        found: list[tuple[float, str]] = []
        for begin, end, cut in self._kept(total):
            for i in range(math.ceil(begin / unit - 1e-9), math.floor(end / unit + 1e-9) + 1):
                x = LEFT + (i * unit - cut) * self._scale
                if not found or x - found[-1][0] >= LABEL_PX:
                    found.append((x, self._label(i * unit, total)))
        return found

    def _kept(self, total: float) -> list[tuple[float, float, float]]:
        """What is drawn at its own length: (begin, end) in true seconds, and how much was cut away before."""
        kept, begin, cut = [], 0.0, 0.0
        for pause in self.pauses:
            kept.append((begin, pause.begin, cut))
            begin, cut = pause.end, cut + pause.cut
        return [*kept, (begin, total + cut, cut)]

    def _label(self, mark: float, total: float) -> str:
        if not self._is_by_time:
            return f"{mark:.0f}"
        name, factor = ("ms", 1000.0) if total + sum(pause.cut for pause in self.pauses) < 2.0 else ("s", 1.0)
        return f"{mark * factor:.10g} {name}"


def shown_seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _pauses(steps: Sequence[Step], starts: Sequence[float], ends: Sequence[float]) -> list[Pause]:
    busy = sum(end - start for start, end in zip(starts, ends, strict=True))
    least = max(PAUSE_SHARE * busy, LEAST_PAUSE_S)
    gaps = ((i, ends[i - 1], starts[i]) for i in range(1, len(starts)))
    return [
        Pause(i, begin, end, SHOWN_SHARE * busy, steps[i].asleep_seconds)
        for i, begin, end in gaps
        if end - begin > least
    ]
