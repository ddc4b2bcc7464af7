"""The report of one or several load tests: a table on the terminal, and one HTML file with plots.

Works on result files alone (the JSON that the load test writes), so that runs of different days can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from cb_backend.support.charts import COLOURS, Line, line_chart, page

from . import summary

SCHEMA = "cb_backend.load_test/1"
FROM_NOTHING = "from 0"  # the change of what was 0 and is more
_LATENCIES = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "itl_token_ms": "ITL per token",
    "itl_chunk_ms": "ITL per chunk",
    "e2e_ms": "E2E",
}
# (label, path into a run, unit, which way is better: +1 more, -1 less, 0 neither)
_ROWS: list[tuple[str, tuple[str, ...], str, int]] = [
    ("output tokens", ("output_tokens_per_s",), "/s", 1),
    ("responses", ("responses_per_s",), "/s", 0),
    ("tokens per response", ("tokens_per_response",), "", 0),
    ("offered requests", ("offered_per_s",), "/s", 0),
    ("finished requests", ("requests_per_s",), "/s", 1),
    ("goodput", ("goodput_per_s",), "requests/s", 1),
    ("within SLO", ("goodput_share",), "%", 1),
    *(
        (f"{label} {p}", (name, p), "ms", -1)
        for name, label in _LATENCIES.items()
        for p in (f"p{number}" for number in summary.PERCENTILES)
    ),
    ("requests sent", ("num_requests",), "", 0),
    ("finished", ("num_ok",), "", 0),
    ("refused", ("num_refused",), "", -1),
    ("errors", ("num_error",), "", -1),
    ("cancelled by this client", ("cancelled_share",), "%", 0),
    ("unfinished at the end", ("num_unfinished",), "", -1),
    ("answers of another length", ("num_wrong_length",), "", -1),
    ("duration", ("duration_s",), "s", 0),
    ("prompt tokens (planned)", ("prompt_tokens_planned",), "", 0),
    ("preemptions per request", ("server", "preemptions_per_request"), "", -1),
    ("client send lag p99", ("client", "send_lag_p99_ms"), "ms", 0),
    ("client loop lag p99", ("client", "loop_lag_p99_ms"), "ms", 0),
    ("busiest client process", ("client", "busiest_process_cpu_share"), "% of a core", 0),
]


@dataclass(frozen=True)
class _Column:
    """One run of one result, as it appears in tables and legends."""

    label: str
    run: dict[str, Any]
    result_index: int


def load_result(path: Path) -> dict[str, Any]:
    """A result file. Raises OSError, ValueError."""
    result = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} is not a result of this load test (schema {SCHEMA})")
    return result


def _columns(results: Sequence[dict[str, Any]]) -> list[_Column]:
    columns = []
    for index, result in enumerate(results):
        for run in result["runs"]:
            is_named = len(results) > 1
            parts = [result["label"]] if is_named else []
            parts += [run["load"]["label"]] if len(result["runs"]) > 1 or not is_named else []
            columns.append(_Column(", ".join(parts), run, index))
    return columns


def _value(run: dict[str, Any], path: tuple[str, ...]) -> float | None:
    node: Any = {**run["summary"], "client": run["client"], "server": run.get("server") or {}}
    for name in path:
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit.startswith("%"):
        return f"{100 * value:.1f}"
    if float(value).is_integer() and abs(value) < 1e15 and unit == "":
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Header and rows of all figures. Two runs side by side get a column with the change."""
    columns = _columns(results)
    has_change = len(columns) == 2 and len(results) == 2
    rows = [["", *(column.label for column in columns), *(["change"] if has_change else [])]]
    for label, path, unit, _ in _ROWS:
        values = [_value(column.run, path) for column in columns]
        if all(value is None for value in values) or ("goodput" in path[0] and not _has_slo(results)):
            continue
        name = f"{label} [{unit}]" if unit else label
        rows.append([name, *(_text(value, unit) for value in values), *([_change(values)] if has_change else [])])
    return rows


def _change(values: Sequence[float | None]) -> str:
    """In percent. From nothing to something no percentage leads: it is said in words."""
    first, second = values
    if first is None or second is None:
        return "-"
    if not first and second:
        return FROM_NOTHING
    change = 100 * (second - first) / first if first else 0.0
    return f"{change:+.1f} %" if abs(change) >= 0.05 else "0.0 %"


def _verdict(change: str, better: int) -> str:
    """The colour of a change, as a CSS class; `better` as in `_ROWS`."""
    is_more, is_less = change[0] == "+" or change == FROM_NOTHING, change[0] == "-" and len(change) > 1
    if not better or not (is_more or is_less):
        return ""
    return "good" if is_more == (better > 0) else "bad"


def _has_slo(results: Sequence[dict[str, Any]]) -> bool:
    """Whether goodput means more than finished requests."""
    return any(_limits(result) for result in results)


def _limits(result: dict[str, Any]) -> str:
    """What a request had to keep to count as good; empty: nothing."""
    slo = next((run["summary"].get("slo") for run in result["runs"]), None) or {}
    names = (("TTFT", slo.get("ttft_ms")), ("TPOT", slo.get("tpot_ms")))
    return " and ".join(f"{name} at most {limit:g} ms" for name, limit in names if limit is not None)


def text_table(results: Sequence[dict[str, Any]]) -> str:
    """The table in plain text."""
    rows = table(results)
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def html_report(results: Sequence[dict[str, Any]]) -> str:
    """One self-contained page."""
    title = " against ".join(result["label"] for result in results)
    body = [*(_origin(result) for result in results), *_warnings(results)]
    body += ["<h2>Plots</h2>", '<div class="plots">', *plots(results), "</div>"]
    body += ["<h2>Figures</h2>", _html_table(results)]
    body += [*_errors(results), *_counters(results), "<h2>Definitions</h2>", _definitions()]
    return page(f"Load test: {title}", body)


def _origin(result: dict[str, Any]) -> str:
    prompts = result["prompts"]
    return (
        f'<p class="dim"><b>{escape(result["label"])}</b>: {escape(result["started_at"])}, model '
        f"{escape(result['model'])} at {escape(result['url'])}; {prompts['tokens_per_word']:.3f} tokens per word "
        f"({escape(prompts['source'])}); client with {result['client_cpus']} CPUs"
        + (f"; SLO: {escape(limits)}" if (limits := _limits(result)) else "")
        + ("; <b>interrupted</b>" if result["was_interrupted"] else "")
        + f"<br><code>{escape(result['command'])}</code></p>"
    )


def _warnings(results: Sequence[dict[str, Any]]) -> list[str]:
    """One for what several columns are warned of in the same words, so that the pictures stay near."""
    labels: dict[str, list[str]] = {}
    for column in _columns(results):
        for text in column.run["warnings"]:
            labels.setdefault(text, []).append(column.label)
    return [f'<p class="warn"><b>{escape("; ".join(of))}</b>: {escape(text)}</p>' for text, of in labels.items()]


def _html_table(results: Sequence[dict[str, Any]]) -> str:
    header, *rows = table(results)
    better_of = {(f"{label} [{unit}]" if unit else label): better for label, _, unit, better in _ROWS}
    cells = "".join(f"<th>{escape(text)}</th>" for text in header)
    lines = [f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>']
    for row in rows:
        verdict = _verdict(row[-1], better_of[row[0]]) if header[-1] == "change" else ""
        plain = "".join(f"<td>{escape(text)}</td>" for text in row[:-1])
        mark = f' class="{verdict}"' if verdict else ""
        lines.append(f"<tr>{plain}<td{mark}>{escape(row[-1])}</td></tr>")
    return "".join([*lines, "</tbody></table></div>"])


def plots(results: Sequence[dict[str, Any]]) -> list[str]:
    """The SVG elements: a CDF for each latency, rates over time, and latency against load for a sweep."""
    columns = _columns(results)
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(columns))]
    charts = []
    for name, label in _LATENCIES.items():
        lines = [
            Line(
                column.label,
                quantiles,
                column.run["curves"]["cdf_points"],
                colour,
                is_dashed=column.result_index % 2 == 1,
            )
            for column, colour in zip(columns, colours, strict=True)
            if (quantiles := column.run["curves"]["quantiles"][name])
        ]
        charts.append(
            line_chart(f"{label}: share of {_counted(name)}", "ms", "% at or below", lines, y_max=100, may_be_log=True)
        )
    for name, label in (("output_tokens_per_s", "Output tokens/s"), ("in_flight", "Requests in flight")):
        lines = [
            Line(column.label, over_time["time_s"], over_time[name], colour, is_dashed=column.result_index % 2 == 1)
            for column, colour in zip(columns, colours, strict=True)
            if (over_time := column.run["curves"]["over_time"])
        ]
        charts.append(line_chart(f"{label} over time", "seconds after the start", label, lines))
    return charts + _against_load(results)


def _counted(name: str) -> str:
    return {"itl_chunk_ms": "gaps", "itl_token_ms": "tokens"}.get(name, "requests")


def _against_load(results: Sequence[dict[str, Any]]) -> list[str]:
    """Each figure over the offered load, one colour a result. Rates and concurrencies have no common axis."""
    charts = []
    for kind, x_label in (("rate", "offered requests/s"), ("concurrency", "concurrent requests")):
        sweeps = []
        for result in results:
            runs = [run for run in result["runs"] if run["load"]["kind"] == kind and run["load"]["value"] is not None]
            sweeps.append((result["label"], sorted(runs, key=lambda run: run["load"]["value"])))
        if max((len(runs) for _, runs in sweeps), default=0) < 2:
            continue
        for name, label in [("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E")]:
            lines = _load_lines(sweeps, [((name, "p50"), "p50"), ((name, "p99"), "p99")])
            charts.append(line_chart(f"{label} against load", x_label, f"{label}, ms", lines))
        rates = [("output_tokens_per_s", "Output tokens/s"), ("goodput_per_s", "Goodput, requests/s")]
        for name, label in rates if _has_slo(results) else rates[:1]:
            charts.append(line_chart(f"{label} against load", x_label, label, _load_lines(sweeps, [((name,), "")])))
    return charts


def _load_lines(
    sweeps: Sequence[tuple[str, list[dict[str, Any]]]], figures: Sequence[tuple[tuple[str, ...], str]]
) -> list[Line]:
    lines = []
    for index, (label, runs) in enumerate(sweeps):
        for dash, (path, suffix) in enumerate(figures):
            points = [(run["load"]["value"], value) for run in runs if (value := _value(run, path)) is not None]
            name = suffix if len(sweeps) == 1 else f"{label} {suffix}".strip()
            xs, ys = [x for x, _ in points], [y for _, y in points]
            lines.append(Line(name, xs, ys, COLOURS[index % len(COLOURS)], is_dashed=dash > 0, has_markers=True))
    return lines


def _errors(results: Sequence[dict[str, Any]]) -> list[str]:
    items = [
        f"<li>{escape(column.label)}: {count} x <code>{escape(text)}</code></li>"
        for column in _columns(results)
        for text, count in column.run["summary"]["errors"].items()
    ]
    return ["<h2>Errors and refusals</h2>", "<ul>", *items, "</ul>"] if items else []


def _counters(results: Sequence[dict[str, Any]]) -> list[str]:
    parts = []
    for column in _columns(results):
        moved = (column.run.get("server") or {}).get("counters") or {}
        rows = "".join(f"<tr><td>{escape(name)}</td><td>{_text(value, '')}</td></tr>" for name, value in moved.items())
        if rows:
            parts.append(f"<h3>{escape(column.label)}</h3><table>{rows}</table>")
    if not parts:
        return []
    note = "From before the warm-up to after the run, whoever asked: with the warm-up's requests, and other clients'."
    return ["<h2>Server counters that moved</h2>", f'<p class="dim">{note}</p>', *parts]


def _definitions() -> str:
    text = (summary.__doc__ or "").split("report):", 1)[1]
    items = [" ".join(item.split()) for item in text.split("\n- ")[1:]]
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
