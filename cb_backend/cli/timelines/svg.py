"""Draws a step log: a lane a slot, requests joining and leaving, prompts in chunks; below them KV use, queue, load.

One self-contained piece of SVG, legible from 8 slots to several hundred. It does not know where logs come from.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from cb_backend.cli.timelines.axis import LEFT, RIGHT, WIDTH, TimeAxis, shown_seconds
from cb_backend.cli.timelines.lanes import Leave, Stay, Summary, find_stays, lanes_of, summarise
from cb_backend.cli.timelines.panels import PANELS_HEIGHT, draw_panels, peaks_of
from cb_backend.cli.timelines.steps import StepLogFile
from cb_backend.contracts.request import split_request_id
from cb_backend.support.charts import page as html_page

TOP = 80
LANES_HEIGHT, MIN_LANE, MAX_LANE = 620, 2.5, 24.0
AXIS_HEIGHT = 34
MIN_LABEL_PX = 7.0  # a character of a label, roughly
LOAD_PX, LOAD_PAINT = 7.0, 'fill="#fff" stroke="#1a1a1a" stroke-width="0.7"'  # the corner of who had an adapter loaded
PAUSE_LABEL_PX = 110.0

# States are told by pattern and shade: the colours belong to the requests.
LEAVE_FILL = {
    Leave.STOP: "#1a1a1a",
    Leave.LENGTH: "#1a1a1a",
    Leave.PREEMPTED: "url(#preempted)",
    Leave.CANCELLED: "url(#cancelled)",
    Leave.ERROR: "url(#failed)",
}
PATTERNS = (
    "<style>.ink{fill:#222}.dim{fill:#444}.panel{fill:#f6f6f6}rect.pause{fill:#fff}</style>"
    "<defs>"
    '<pattern id="preempted" width="6" height="4" patternUnits="userSpaceOnUse">'
    '<rect width="6" height="4" fill="#fff"/><rect width="6" height="2" fill="#1a1a1a"/></pattern>'
    '<pattern id="cancelled" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<rect width="6" height="6" fill="#fff"/><circle cx="3" cy="3" r="2" fill="#1a1a1a"/></pattern>'
    '<pattern id="failed" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<rect width="6" height="6" fill="#d00000"/><path d="M0 0L6 6M6 0L0 6" stroke="#fff"/></pattern>'
    '<pattern id="prompt" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2" height="5" fill="#000" opacity="0.28"/></pattern>'
    "</defs>"
)
STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:14px/1.5 system-ui,sans-serif;margin:16px auto;padding:0 12px;max-width:1600px}"
    "h1{font-size:20px;margin:0 0 6px}p{margin:0 0 8px}.scroll{overflow-x:auto}"
    ".legend span{margin-right:18px;display:inline-block}"
    ".key{width:18px;height:12px;padding:1px;margin-right:6px;vertical-align:-2px;background:#fff}"
    ".picture{display:block;margin-top:14px;width:100%;min-width:900px;height:auto;background:#fff}"
    "g:hover .stay{stroke:#000}"
)
LEAVE_PX = {Leave.STOP: 2.0, Leave.LENGTH: 2.0, Leave.PREEMPTED: 5.0, Leave.CANCELLED: 6.0, Leave.ERROR: 6.0}
REASON_TEXT = {
    Leave.STOP: "ended at a stop",
    Leave.LENGTH: "ended at its length",
    Leave.CANCELLED: "was cancelled",
    Leave.ERROR: "ended with an error",
    Leave.PREEMPTED: "was preempted: its blocks went to others",
    Leave.STILL_THERE: "goes on",
}


def request_name(request_id: int) -> str:
    """front end.counter, or the plain id where there is no front end."""
    front_end, counter = split_request_id(request_id)
    return f"{front_end}.{counter}" if front_end else str(counter)


def draw(
    log: StepLogFile, is_by_time: bool = True, span: float | None = None, peaks: Sequence[float] | None = None
) -> str:
    """The picture as `<svg>`. `span` as for `TimeAxis`; `peaks`: what the panels' heights stand for, so that pictures
    can be compared (`panels.peaks_of` all of them); None: the log's own."""
    steps = log.steps
    stays = find_stays(steps, log.header.adapters)
    slots = lanes_of(stays, log.header.num_slots)
    lane_of, num_lanes = {slot: index for index, slot in enumerate(slots)}, len(slots)
    axis = TimeAxis(steps, is_by_time, span)
    lane = min(max(LANES_HEIGHT / num_lanes, MIN_LANE), MAX_LANE)
    panels_top = TOP + lane * num_lanes + AXIS_HEIGHT
    height = panels_top + PANELS_HEIGHT + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="system-ui, sans-serif" font-size="12">',
        PATTERNS,
        _heading(log, summarise(steps, stays, log.header.num_slots), num_lanes, axis if is_by_time else None),
        *_lanes_background(slots, lane),
        *_pauses(axis, height - 8),
        *(part for stay in stays for part in _stay(stay, axis, lane_of[stay.slot], lane)),
        *_step_lines(axis, len(steps), lane * num_lanes),
        # Over the lines, which would cut the figures.
        *(part for stay in stays for part in _labels(stay, axis, lane_of[stay.slot], lane)),
        *_ticks(axis, TOP + lane * num_lanes, height - 8, is_by_time),
        *draw_panels(log, axis, panels_top, peaks_of([log]) if peaks is None else peaks),
        "</svg>",
    ]
    return "\n".join(parts)


def _heading(log: StepLogFile, summary: Summary, num_lanes: int, axis: TimeAxis | None) -> str:
    """`axis`: None where the picture does not go by time."""
    num_slots = log.header.num_slots
    seconds = f" and {summary.seconds:.2f} s" if axis is not None else ""
    work = (
        f"{summary.num_requests} requests, {summary.num_decode_tokens:,} tokens decoded, "
        f"{summary.num_prefill_tokens:,} computed of prompts, in {summary.num_steps:,} steps{seconds}"
    )
    batch = f"slots in use {summary.utilisation:.0%}; {summary.num_preemptions} preemptions"
    if summary.num_adapter_loads:
        batch += f"; {summary.num_adapter_loads} adapters loaded"
    if num_lanes < num_slots:
        batch += f"; the other {num_slots - num_lanes} of {num_slots} slots were idle"
    if axis is not None and axis.pauses:
        paused = sum(pause.end - pause.begin for pause in axis.pauses)
        batch += f"; {paused:.2f} s without a step, drawn shorter"
    return (
        f'<text x="{LEFT}" y="24" font-size="17" font-weight="600">{escape(log.header.title)}</text>'
        f'<text x="{LEFT}" y="44" fill="#444">{escape(work)}</text>'
        f'<text x="{LEFT}" y="60" fill="#444">{escape(batch)}</text>'
    )


def _lanes_background(slots: Sequence[int], lane: float) -> list[str]:
    width = WIDTH - LEFT - RIGHT
    parts = [
        f'<rect class="idle" x="{LEFT}" y="{TOP}" width="{width}" height="{lane * len(slots):.1f}" fill="#ececec"/>'
    ]
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256) if step * lane >= 15)
    for index in range(0, len(slots), every):
        y = TOP + index * lane
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#fff"/>')
        parts.append(
            f'<text class="lane" x="{LEFT - 8}" y="{y + (lane if every == 1 else 15) / 2 + 4:.1f}" text-anchor="end" '
            f'fill="#444" font-size="11">slot {slots[index]}</text>'
        )
    return parts


def _pauses(axis: TimeAxis, bottom: float) -> list[str]:
    """White bands where there was no step, with their true length above where there is room."""
    parts: list[str] = []
    labelled: list[float] = []  # the middles of labels
    for pause in sorted(axis.pauses, key=lambda pause: pause.begin - pause.end):  # the longest has its label first
        left, right = axis.end(pause.step - 1), axis.begin(pause.step)
        text = f"no step for {shown_seconds(pause.end - pause.begin)}"
        if pause.asleep > 0:
            text += f", asleep for {shown_seconds(pause.asleep)}"
        parts.append(
            f'<rect class="pause" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{bottom - TOP:.1f}">'
            f"<title>{text}</title></rect>"
        )
        middle = min(max((left + right) / 2, LEFT + PAUSE_LABEL_PX / 2), WIDTH - PAUSE_LABEL_PX / 2)
        if all(abs(middle - other) >= PAUSE_LABEL_PX for other in labelled):
            parts.append(
                f'<text class="pause dim" x="{middle:.1f}" y="{TOP - 4}" text-anchor="middle" font-size="11">'
                f"{text}</text>"
            )
            labelled.append(middle)
    return parts


def _hue(request_id: int) -> int:
    return round((request_id & 0xFFFFFF) * 137.508) % 360  # neighbours differ


def _stay(stay: Stay, axis: TimeAxis, index: int, lane: float) -> list[str]:
    """A pale bar while the slot is held, strong where tokens were decoded, dark where the prompt was computed."""
    hue, gap = _hue(stay.request_id), 1.0 if lane >= 8 else 0.0
    y, height = TOP + index * lane + gap / 2, lane - gap
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
        parts.append(bar("hatch", axis.begin(chunk.step), axis.end(chunk.step), "url(#prompt)"))
    if stay.has_loaded:
        size = min(LOAD_PX, height / 2)
        parts.append(f'<path class="loaded" d="M{left:.2f} {y:.2f}h{size:.1f}l-{size:.1f} {size:.1f}z" {LOAD_PAINT}/>')
    if stay.leave is not Leave.STILL_THERE:
        thick = LEAVE_PX[stay.leave] * (1.0 if lane >= 8 else 0.6)
        colour, kind = LEAVE_FILL[stay.leave], f"leave {stay.leave.value}"
        parts.append(
            f'<rect class="{kind}" x="{right - thick:.2f}" y="{y:.2f}" width="{thick}" height="{height:.2f}" '
            f'fill="{colour}"/>'
        )
    return [*parts, "</g>"]


def _labels(stay: Stay, axis: TimeAxis, index: int, lane: float) -> list[str]:
    """Tokens of its chunks and its name, where there is room for them."""
    if lane < 12:
        return []
    middle, parts = TOP + (index + 0.5) * lane, []
    for chunk in stay.chunks:
        text, first, last = str(chunk.num_tokens), axis.begin(chunk.step), axis.end(chunk.step)
        if last - first >= MIN_LABEL_PX * len(text) + 3:
            parts.append(_label("chunk", first + 3, middle, text, "#fff"))
    return parts + _name(stay, axis, middle)


def _name(stay: Stay, axis: TimeAxis, middle: float) -> list[str]:
    """The request's name in the widest decoded stretch, if it fits, with that of its adapter, if both do."""
    name = request_name(stay.request_id)
    widest = max(stay.runs, key=lambda run: axis.end(run.last) - axis.begin(run.first), default=None)
    room = 0.0 if widest is None else axis.end(widest.last) - axis.begin(widest.first) - 8
    for text in (f"{name} {stay.adapter}", name) if stay.adapter else (name,):
        if widest is not None and MIN_LABEL_PX * len(text) <= room:
            return [_label("name", axis.begin(widest.first) + 4, middle, text, "#222")]
    return []


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
    if stay.adapter:
        begin += f", through adapter {stay.adapter}" + (", loaded for it" if stay.has_loaded else "")
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


def sheet(pictures: Sequence[str]) -> str:
    """The pictures one below the other as one `<svg>` on white paper: a file that a page can show as an image."""
    heights = [int(found[1]) for found in (re.search(r'height="(\d+)"', picture) for picture in pictures) if found]
    tops = [sum(heights[:i]) for i in range(len(pictures))]
    placed = (picture.replace("<svg ", f'<svg y="{top}" ', 1) for picture, top in zip(pictures, tops, strict=True))
    size = f'viewBox="0 0 {WIDTH} {sum(heights)}" width="{WIDTH}" height="{sum(heights)}"'
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{paper}\n' + "\n".join(placed) + "\n</svg>\n"


def page(title: str, pictures: list[str], note: str = "") -> str:
    """A self-contained HTML page: the legend, then the pictures one below the other, each as wide as the window.

    In the dark scheme the page is dark, and pictures and keys keep their paper: their shades tell states apart.
    """
    legend = [
        ('<rect width="18" height="12" fill="hsl(210 65% 36%)"/><rect width="18" height="12" fill="url(#prompt)"/>',
         "prompt computed (figures: tokens of the chunk)"),
        ('<rect width="18" height="12" fill="hsl(210 62% 70%)"/>', "one token decoded in each step"),
        ('<rect width="18" height="12" fill="hsl(210 60% 88%)"/>', "slot held, nothing computed"),
        ('<rect width="18" height="12" fill="#ececec"/>', "slot idle"),
        *((f'<rect x="5" width="8" height="12" fill="{LEAVE_FILL[leave]}"/>', text) for leave, text in (
            (Leave.STOP, "end"), (Leave.PREEMPTED, "preempted"), (Leave.CANCELLED, "cancelled"), (Leave.ERROR, "error"),
        )),
        (f'<path d="M5 1h9l-9 9z" {LOAD_PAINT}/>', "adapter loaded for the request; its name beside the request's"),
    ]  # fmt: skip
    items = "".join(
        f'<span><svg class="key" viewBox="0 0 18 12">{drawing}</svg>{escape(text)}</span>' for drawing, text in legend
    )
    items += "<span>each request has a colour of its own; shade and pattern say what is done</span>"
    marked = (picture.replace("<svg ", '<svg class="picture" ', 1) for picture in pictures)
    drawn = "".join(f'<div class="scroll">{picture}</div>' for picture in marked)
    return html_page(title, [f"<p>{escape(note)}</p>", f"<p class=legend>{items}</p>", drawn], STYLE)
