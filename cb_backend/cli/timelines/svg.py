"""Draws a step log: a lane a slot, requests joining and leaving, prompts in chunks; below them KV use, queue, load.

One self-contained piece of SVG, legible from 8 slots to several hundred. It does not know where logs come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from cb_backend.cli.timelines.lanes import Leave, Stay, Summary, find_stays, lanes_of, summarise
from cb_backend.cli.timelines.steps import Step, StepLogFile
from cb_backend.request import split_request_id

WIDTH = 1280
LEFT, RIGHT, TOP = 92, 24, 64
LANES_HEIGHT, MIN_LANE, MAX_LANE = 620, 2.5, 24.0
PANEL_HEIGHT, PANEL_GAP = 46, 22
AXIS_HEIGHT = 34
MIN_LABEL_PX = 7.0  # a character of a label, roughly

LEAVE_COLOURS = {
    Leave.STOP: "#1a1a1a",
    Leave.LENGTH: "#1a1a1a",
    Leave.CANCELLED: "#e08a00",
    Leave.ERROR: "#d00000",
    Leave.PREEMPTED: "#8a2be2",
}
REASON_TEXT = {
    Leave.STOP: "ended at a stop",
    Leave.LENGTH: "ended at its length",
    Leave.CANCELLED: "was cancelled",
    Leave.ERROR: "ended with an error",
    Leave.PREEMPTED: "was preempted: its blocks went to others",
    Leave.STILL_THERE: "goes on",
}


class TimeAxis:
    """Where steps begin and end, in pixels: true to time, or the same width for each."""

    def __init__(self, steps: Sequence[Step], is_by_time: bool, span: float | None = None) -> None:
        """`span`: seconds (or steps) that the whole width stands for, so that pictures can be compared."""
        self._is_by_time = is_by_time
        if is_by_time:
            zero = steps[0].begin if steps else 0.0
            starts = [step.begin - zero for step in steps]
            # A step that was launched ahead begins to run when the one before has ended.
            for i in range(1, len(steps)):
                starts[i] = max(starts[i], steps[i - 1].end - zero, starts[i - 1])
            ends = [max(step.end - zero, start) for step, start in zip(steps, starts, strict=True)]
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
        """(pixel, label) at round figures."""
        total = (WIDTH - LEFT - RIGHT) / self._scale
        unit = next(u * 10.0**e for e in range(-6, 9) for u in (1, 2, 5) if total / (u * 10.0**e) <= 12)
        if not self._is_by_time:
            unit = max(unit, 1.0)
        marks = [i * unit for i in range(int(total / unit) + 1)]
        if not self._is_by_time:
            return [(LEFT + mark * self._scale, f"{mark:.0f}") for mark in marks]
        name, factor = ("ms", 1000.0) if total < 2.0 else ("s", 1.0)
        return [(LEFT + mark * self._scale, f"{mark * factor:g} {name}") for mark in marks]


def request_name(request_id: int) -> str:
    """front end.counter, or the plain id where there is no front end."""
    front_end, counter = split_request_id(request_id)
    return f"{front_end}.{counter}" if front_end else str(counter)


def draw(log: StepLogFile, is_by_time: bool = True, span: float | None = None, most_waiting: int | None = None) -> str:
    """The picture as `<svg>`. `span` as for `TimeAxis`; `most_waiting`: top of the panel of waiting requests, so that
    pictures can be compared; None: the log's own most."""
    steps = log.steps
    stays = find_stays(steps)
    num_lanes = lanes_of(stays, log.header.num_slots)
    axis = TimeAxis(steps, is_by_time, span)
    lane = min(max(LANES_HEIGHT / num_lanes, MIN_LANE), MAX_LANE)
    panels_top = TOP + lane * num_lanes + AXIS_HEIGHT
    height = panels_top + 3 * (PANEL_HEIGHT + PANEL_GAP) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="system-ui, sans-serif" font-size="12">',
        _heading(log, summarise(steps, stays, log.header.num_slots), num_lanes, is_by_time),
        *_lanes_background(num_lanes, lane),
        *(part for stay in stays for part in _stay(stay, axis, lane)),
        *_step_lines(axis, len(steps), lane * num_lanes),
        *(part for stay in stays for part in _labels(stay, axis, lane)),  # over the lines, which would cut the figures
        *_ticks(axis, TOP + lane * num_lanes, height - 8, is_by_time),
        *_panels(log, axis, panels_top, most_waiting_of(log) if most_waiting is None else most_waiting),
        "</svg>",
    ]
    return "\n".join(parts)


def _heading(log: StepLogFile, summary: Summary, num_lanes: int, is_by_time: bool) -> str:
    num_slots = log.header.num_slots
    seconds = f" and {summary.seconds:.2f} s" if is_by_time else ""
    text = (
        f"{summary.num_requests} requests, {summary.num_decode_tokens:,} tokens decoded, "
        f"{summary.num_prefill_tokens:,} computed of prompts, in {summary.num_steps:,} steps{seconds}; "
        f"slots in use {summary.utilisation:.0%}; "
        f"{summary.num_preemptions} preemptions"
        + (f"; the other {num_slots - num_lanes} of {num_slots} slots were idle" if num_lanes < num_slots else "")
    )
    return (
        f'<text x="{LEFT}" y="24" font-size="17" font-weight="600">{escape(log.header.title)}</text>'
        f'<text x="{LEFT}" y="46" fill="#444">{escape(text)}</text>'
    )


def _lanes_background(num_lanes: int, lane: float) -> list[str]:
    width = WIDTH - LEFT - RIGHT
    parts = [
        f'<rect class="idle" x="{LEFT}" y="{TOP}" width="{width}" height="{lane * num_lanes:.1f}" fill="#ececec"/>'
    ]
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256) if step * lane >= 15)
    for slot in range(0, num_lanes, every):
        y = TOP + slot * lane
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#fff"/>')
        parts.append(
            f'<text class="lane" x="{LEFT - 8}" y="{y + (lane if every == 1 else 15) / 2 + 4:.1f}" text-anchor="end" '
            f'fill="#444" font-size="11">slot {slot}</text>'
        )
    return parts


def _hue(request_id: int) -> int:
    return round((request_id & 0xFFFFFF) * 137.508) % 360  # neighbours differ


def _stay(stay: Stay, axis: TimeAxis, lane: float) -> list[str]:
    """A pale bar while the slot is held, strong where tokens were decoded, dark where the prompt was computed."""
    hue, gap = _hue(stay.request_id), 1.0 if lane >= 8 else 0.0
    y, height = TOP + stay.slot * lane + gap / 2, lane - gap
    left, right = axis.begin(stay.first), axis.end(stay.last)

    def bar(kind: str, first: float, last: float, colour: str) -> str:
        width = max(last - first, 0.4)
        return (
            f'<rect class="{kind}" x="{first:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
            f'fill="{colour}"/>'
        )

    parts = [f"<g><title>{escape(describe(stay))}</title>", bar("stay", left, right, f"hsl({hue} 60% 88%)")]
    parts += [bar("decode", axis.begin(run.first), axis.end(run.last), f"hsl({hue} 62% 70%)") for run in stay.runs]
    for chunk in stay.chunks:
        parts.append(bar("prefill", axis.begin(chunk.step), axis.end(chunk.step), f"hsl({hue} 65% 36%)"))
    if stay.leave is not Leave.STILL_THERE:
        thick = 2.0 if lane >= 8 else 1.2
        colour, kind = LEAVE_COLOURS[stay.leave], f"leave {stay.leave.value}"
        parts.append(
            f'<rect class="{kind}" x="{right - thick:.2f}" y="{y:.2f}" width="{thick}" height="{height:.2f}" '
            f'fill="{colour}"/>'
        )
    return [*parts, "</g>"]


def _labels(stay: Stay, axis: TimeAxis, lane: float) -> list[str]:
    """Tokens of its chunks and its name, where there is room for them."""
    if lane < 12:
        return []
    middle, parts = TOP + (stay.slot + 0.5) * lane, []
    for chunk in stay.chunks:
        text, first, last = str(chunk.num_tokens), axis.begin(chunk.step), axis.end(chunk.step)
        if last - first >= MIN_LABEL_PX * len(text) + 3:
            parts.append(_label("chunk", first + 3, middle, text, "#fff"))
    return parts + _name(stay, axis, middle)


def _name(stay: Stay, axis: TimeAxis, middle: float) -> list[str]:
    """The request's name in the widest decoded stretch, if it fits."""
    text = request_name(stay.request_id)
    widest = max(stay.runs, key=lambda run: axis.end(run.last) - axis.begin(run.first), default=None)
    if widest is None or axis.end(widest.last) - axis.begin(widest.first) < MIN_LABEL_PX * len(text) + 8:
        return []
    return [_label("name", axis.begin(widest.first) + 4, middle, text, "#222")]


def _label(kind: str, x: float, middle: float, text: str, colour: str) -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{middle + 4:.1f}" fill="{colour}" font-size="11" pointer-events="none">'
        f"{escape(text)}</text>"
    )


def describe(stay: Stay) -> str:
    """A sentence for the pointer that rests on it."""
    if stay.has_joined:
        begin = f"joined with {stay.num_tokens_at_join} tokens, {stay.num_cached_tokens} of them cached"
    else:
        begin = "was there before"
    return (
        f"request {request_name(stay.request_id)}, slot {stay.slot}: {begin}; {len(stay.chunks)} prompt chunks, "
        f"{stay.num_decode_steps} tokens decoded; {REASON_TEXT[stay.leave]}"
    )


def _step_lines(axis: TimeAxis, num_steps: int, height: float) -> list[str]:
    """Hairlines between steps, where there is room for them: each cell is one token."""
    if not num_steps or (axis.end(num_steps - 1) - LEFT) / num_steps < 5:
        return []
    path = "".join(f"M{axis.begin(i):.1f} {TOP}v{height:.1f}" for i in range(1, num_steps))
    return [f'<path class="steps" d="{path}" stroke="#fff" stroke-width="0.7" opacity="0.75" pointer-events="none"/>']


def _ticks(axis: TimeAxis, top: float, bottom: float, is_by_time: bool) -> list[str]:
    name = "time" if is_by_time else "step"
    parts = [f'<text x="{LEFT - 22}" y="{top + 18:.1f}" text-anchor="end" fill="#444" font-size="11">{name}</text>']
    for x, text in axis.ticks():
        anchor = "middle" if x < WIDTH - RIGHT - 20 else "end"
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke="#000" opacity="0.10"/>'
            f'<text x="{x:.1f}" y="{top + 18:.1f}" text-anchor="{anchor}" fill="#444" font-size="11">{text}</text>'
        )
    return parts


def most_waiting_of(log: StepLogFile) -> int:
    return max([step.num_waiting for step in log.steps], default=0)


def _panels(log: StepLogFile, axis: TimeAxis, top: float, most_waiting: int) -> list[str]:
    num_slots, num_blocks = log.header.num_slots, log.header.num_blocks
    panels: list[tuple[str, str, str, float, Callable[[Step], float]]] = [
        ("kv", "KV blocks held", "#3b7dd8", num_blocks, lambda step: step.num_used_blocks),
        ("waiting", "requests waiting", "#c2571a", max(most_waiting, 1), lambda step: step.num_waiting),
        ("load", "requests in the step", "#2e8b57", num_slots, lambda step: len(step.rows)),
    ]
    parts = []
    for i, (kind, name, colour, most, figure) in enumerate(panels):
        y = top + i * (PANEL_HEIGHT + PANEL_GAP) + PANEL_GAP
        values = [figure(step) for step in log.steps]
        peak = max(values, default=0)
        parts += [
            f'<text x="{LEFT}" y="{y - 6:.1f}" fill="#222">{name}: at most {peak:,.0f}'
            f"{'' if kind == 'waiting' else f' of {most:,.0f} ({peak / max(most, 1):.0%})'}</text>",
            f'<rect x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{PANEL_HEIGHT}" fill="#f6f6f6"/>',
            f'<path class="{kind}" d="{_area(values, axis, y, most)}" fill="{colour}" opacity="0.75"/>',
            *(
                f'<text x="{LEFT - 8}" y="{at:.1f}" text-anchor="end" fill="#444" font-size="11">{text}</text>'
                for at, text in ((y + 9, f"{most:,.0f}"), (y + PANEL_HEIGHT, "0"))
            ),
        ]
    return parts


def _area(values: list[float], axis: TimeAxis, y: float, most: float) -> str:
    """Steps of a staircase over a base line, closed."""
    base = y + PANEL_HEIGHT
    points = [f"M{LEFT:.1f} {base:.1f}"]
    for i, value in enumerate(values):
        at = base - PANEL_HEIGHT * min(value / max(most, 1), 1.0)
        points.append(f"L{axis.begin(i):.1f} {at:.1f}L{axis.end(i):.1f} {at:.1f}")
    return "".join([*points, f"L{axis.end(len(values) - 1) if values else LEFT:.1f} {base:.1f}Z"])


def page(title: str, pictures: list[str], note: str = "") -> str:
    """A self-contained HTML page: the legend, then the pictures one below the other."""
    legend = [
        ("hsl(210 65% 36%)", "prompt computed (figures: tokens of the chunk)"),
        ("hsl(210 62% 70%)", "one token decoded in each step"),
        ("hsl(210 60% 88%)", "slot held, nothing computed"),
        ("#ececec", "slot idle"),
        (LEAVE_COLOURS[Leave.STOP], "end"),
        (LEAVE_COLOURS[Leave.PREEMPTED], "preempted"),
        (LEAVE_COLOURS[Leave.CANCELLED], "cancelled"),
        (LEAVE_COLOURS[Leave.ERROR], "error"),
    ]
    items = "".join(f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for colour, text in legend)
    style = (
        "body{font:13px system-ui,sans-serif;margin:16px;color:#222;background:#fff;width:1280px}"
        "h1{font-size:20px;margin:0 0 6px}p{margin:0 0 8px}"
        ".legend span{margin-right:18px;white-space:nowrap;line-height:1.8}"
        ".legend i{display:inline-block;width:13px;height:13px;margin-right:6px;vertical-align:-2px}"
        "svg{display:block;margin-top:14px}g:hover .stay{stroke:#000}"
    )
    body = f"<h1>{escape(title)}</h1><p>{escape(note)}</p><p class=legend>{items}</p>{''.join(pictures)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{style}</style><body>{body}</body></html>\n"
    )
