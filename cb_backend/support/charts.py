"""Line charts as inline SVG text and the page around them: a report is one file and needs no library to be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 290  # a phone shows it whole, and its 13 px type as 10 px
LEFT, RIGHT, TOP, BOTTOM = 74, 16, 38, 52  # margins around the plotted area
LEGEND_ROW, LEGEND_GAP, LEGEND_LEFT = 18, 10, 16
LABEL_LENGTHS = {2: 24, 1: 50}  # characters of a legend's label that there is room for, by entries in a row
# Eight colours that stay apart for colour-blind readers (Okabe and Ito's set; yellow and black made to be seen on white
# and on dark paper).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b59b00", "#56b4e9", "#e69f00", "#808080")
DIGIT_PX = 8.3  # of a tick's label, at most
LOG_FROM_RATIO = 30.0  # an x axis that spans more than this is drawn in powers of ten
STYLE = """
:root{color-scheme:light dark;--ink:#1b1b1b;--dim:#555;--paper:#fff;--line:#ddd;--rule:#999;--grid:#e6e6e6;
--good:#00704e;--bad:#b03a00;--warn:#fff4e0;--code:#f3f3f3}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e8;--dim:#aaa;--paper:#181818;--line:#383838;--rule:#777;--grid:#333;
--good:#4cc79a;--bad:#ff9166;--warn:#3a2c12;--code:#2a2a2a}}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;color:var(--ink);background:var(--paper);
max-width:1500px;margin:28px auto;padding:0 16px}
h1{font-size:24px;margin:0 0 4px}h1,p{overflow-wrap:break-word}
h2{font-size:18px;margin:32px 0 8px}.dim{color:var(--dim)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:4px 14px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0;position:sticky;left:0;background:var(--paper)}
thead th{border-bottom:2px solid var(--rule)}
.good{color:var(--good)}.bad{color:var(--bad)}
.warn{background:var(--warn);border-left:4px solid #d98200;padding:8px 14px;margin:8px 0}
.plots{margin:18px 0;display:grid;grid-template-columns:repeat(auto-fit,minmax(min(340px,100%),1fr));gap:18px}
svg{width:100%;height:auto;border:1px solid var(--line);border-radius:6px;background:var(--paper)}
svg text{font:13px system-ui,"DejaVu Sans",sans-serif;fill:var(--ink)}svg .title{font-weight:600;font-size:15px}
svg .mid{text-anchor:middle}svg .end{text-anchor:end}svg .grid{stroke:var(--grid)}
@media(max-width:800px){h1{font-size:20px}th,td{padding:4px 7px}td:first-child{white-space:normal;min-width:104px}}
code{background:var(--code);padding:2px 5px;border-radius:3px;overflow-wrap:anywhere}li{margin:3px 0}
"""


@dataclass(frozen=True)
class Line:
    """One curve. `dash` tells curves of one colour apart."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    is_dashed: bool = False
    has_markers: bool = False


@dataclass(frozen=True)
class _Axis:
    """Maps values to pixels, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def pixel(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.is_log else v for v in (self.low, self.high, max(value, self.floor)))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    @property
    def floor(self) -> float:
        return self.low if self.is_log else -math.inf

    def ticks(self) -> list[float]:
        if not self.is_log:
            return nice_ticks(self.low, self.high)
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        return [m * 10.0**e for e in exponents for m in (1, 2, 5) if self.low <= m * 10.0**e <= self.high]


def nice_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, ... (and 0.1, 0.2, ...) that goes at most so often into `span`, which is above 0."""
    step = 10.0 ** math.floor(math.log10(span / most))
    return step * next(m for m in (1, 2, 5, 10) if span / (step * m) <= most)


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round values from `low` to `high`."""
    step = nice_step(high - low, count)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 10) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    *,
    y_max: float | None = None,
    may_be_log: bool = False,
) -> str:
    """An `<svg>` element with all `lines`, a legend, and axes from zero.

    `may_be_log`: the x axis is logarithmic where its values span widely.
    """
    drawn = [line for line in lines if len(line.xs)]
    legend = [line for line in drawn if line.label] if len(drawn) > 1 else []
    in_a_row = 2 if all(len(line.label) <= LABEL_LENGTHS[2] for line in legend) else 1
    height = HEIGHT + LEGEND_ROW * -(-len(legend) // in_a_row) + LEGEND_GAP * bool(legend)
    bottom = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f'<text x="{LEFT}" y="20" class="title">{escape(title)}</text>',
    ]
    if not drawn:
        return "".join([*parts, f'<text x="{LEFT}" y="{HEIGHT // 2}">no data</text></svg>'])
    x_axis, y_axis = _axes(drawn, y_max, may_be_log, bottom)
    parts += _grid(x_axis, y_axis, bottom)
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{bottom + 38}" class="mid">{escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(16 {(TOP + bottom) / 2}) rotate(-90)" class="mid">{escape(y_label)}</text>'
    )
    parts += [_curve(line, x_axis, y_axis) for line in drawn]
    parts += [_legend_entry(index, line, in_a_row) for index, line in enumerate(legend)]
    return "".join([*parts, "</svg>"])


def _axes(lines: Sequence[Line], y_max: float | None, may_be_log: bool, bottom: float) -> tuple[_Axis, _Axis]:
    xs = [x for line in lines for x in line.xs]
    positive = [x for x in xs if x > 0]
    is_log = may_be_log and len(positive) == len(xs) and max(xs) / min(positive) > LOG_FROM_RATIO
    x_low, x_high = (min(xs), max(xs)) if is_log else (min(0.0, min(xs)), max(xs))
    y_high = y_max if y_max is not None else 1.05 * max(y for line in lines for y in line.ys)
    x_axis = _Axis(x_low, x_high if x_high > x_low else x_low + 1.0, LEFT, WIDTH - RIGHT, is_log)
    return x_axis, _Axis(0.0, y_high if y_high > 0 else 1.0, bottom, TOP)


def _grid(x_axis: _Axis, y_axis: _Axis, bottom: float) -> list[str]:
    parts = []
    last_label_end = -math.inf
    for tick in x_axis.ticks():
        x = x_axis.pixel(tick)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" class="grid"/>')
        label = f"{tick:,.10g}"
        half = len(label) * DIGIT_PX / 2
        middle = min(x, WIDTH - 2 - half)  # the last one stays in the picture
        if middle - half > last_label_end + 8:  # labels must not touch
            parts.append(f'<text x="{middle:.1f}" y="{bottom + 17}" class="mid">{label}</text>')
            last_label_end = middle + half
    for tick in y_axis.ticks():
        y = y_axis.pixel(tick)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" class="end">{tick:,.10g}</text>')
    return parts


def _curve(line: Line, x_axis: _Axis, y_axis: _Axis) -> str:
    points = [(x_axis.pixel(x), y_axis.pixel(y)) for x, y in zip(line.xs, line.ys, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    markers = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}"/>' for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>' + (
        markers if line.has_markers else ""
    )


def _legend_entry(index: int, line: Line, in_a_row: int) -> str:
    x, y = (
        LEGEND_LEFT + (index % in_a_row) * (WIDTH - LEGEND_LEFT) // 2,
        HEIGHT + LEGEND_GAP + (index // in_a_row) * LEGEND_ROW,
    )
    dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    most = LABEL_LENGTHS[in_a_row]
    label = line.label if len(line.label) <= most else line.label[: most - 1] + "…"
    return (
        f'<line x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}" stroke="{line.colour}" stroke-width="2"{dash}/>'
        f'<text x="{x + 28}" y="{y}">{escape(label)}</text>'
    )


def page(title: str, body: Sequence[str], style: str = STYLE) -> str:
    """One self-contained HTML page with the title as its heading; `body` are elements, ready to be put in."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head><body>'
        + "\n".join([f"<h1>{escape(title)}</h1>", *body])
        + "</body></html>\n"
    )
