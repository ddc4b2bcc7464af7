"""Below the lanes of a timeline: what was held, waited and ran, as areas over the same axis.

An area is as high as its panel where the log has its most, so that a lightly used engine is as legible as a full one;
the capacity is written beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cb_backend.cli.timelines.axis import LEFT, RIGHT, WIDTH, TimeAxis
from cb_backend.cli.timelines.steps import Header, Step, StepLogFile

PANEL_HEIGHT, PANEL_GAP = 46, 22


@dataclass(frozen=True)
class Panel:
    """One figure of a step; its capacity, None where there is none."""

    kind: str
    name: str
    colour: str
    figure: Callable[[Step], float]
    capacity: Callable[[Header], int | None]


PANELS = (
    Panel("kv", "KV blocks held", "#3b7dd8", lambda step: step.num_used_blocks, lambda header: header.num_blocks),
    Panel("waiting", "requests waiting", "#c2571a", lambda step: step.num_waiting, lambda header: None),
    Panel("load", "requests in the step", "#2e8b57", lambda step: len(step.rows), lambda header: header.num_slots),
)
PANELS_HEIGHT = len(PANELS) * (PANEL_HEIGHT + PANEL_GAP)


def peaks_of(logs: Sequence[StepLogFile]) -> list[float]:
    """The most of each panel's figure, over all logs: the scale of pictures that are compared."""
    return [max((panel.figure(step) for log in logs for step in log.steps), default=0) for panel in PANELS]


def draw_panels(log: StepLogFile, axis: TimeAxis, top: float, peaks: Sequence[float]) -> list[str]:
    """The panels from `top` on; `peaks`: what each one's full height stands for."""
    parts = []
    for i, (panel, most) in enumerate(zip(PANELS, peaks, strict=True)):
        y = top + i * (PANEL_HEIGHT + PANEL_GAP) + PANEL_GAP
        values = [panel.figure(step) for step in log.steps]
        peak, capacity = max(values, default=0), panel.capacity(log.header)
        of = "" if capacity is None else f" of {capacity:,} ({_share(peak / max(capacity, 1))})"
        parts += [
            f'<text x="{LEFT}" y="{y - 6:.1f}" class="ink">{panel.name}: at most {peak:,.0f}{of}</text>',
            f'<rect x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{PANEL_HEIGHT}" class="panel"/>',
            f'<path class="{panel.kind}" d="{_area(values, axis, y, most)}" fill="{panel.colour}" opacity="0.75"/>',
            *(
                f'<text x="{LEFT - 8}" y="{at:.1f}" text-anchor="end" class="dim" font-size="11">{text}</text>'
                for at, text in ((y + 9, f"{max(most, 1):,.0f}"), (y + PANEL_HEIGHT, "0"))
            ),
        ]
    return parts


def _share(value: float) -> str:
    """In percent; what is not nothing does not look like it."""
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def _area(values: list[float], axis: TimeAxis, y: float, most: float) -> str:
    """Steps of a staircase over a base line, closed."""
    base = y + PANEL_HEIGHT
    points = [f"M{LEFT:.1f} {base:.1f}"]
    after_pause = {pause.step for pause in axis.pauses}
    for i, value in enumerate(values):
        if i in after_pause:
            points.append(f"L{axis.end(i - 1):.1f} {base:.1f}L{axis.begin(i):.1f} {base:.1f}")
        at = base - PANEL_HEIGHT * min(value / max(most, 1), 1.0)
        points.append(f"L{axis.begin(i):.1f} {at:.1f}L{axis.end(i):.1f} {at:.1f}")
    return "".join([*points, f"L{axis.end(len(values) - 1) if values else LEFT:.1f} {base:.1f}Z"])
