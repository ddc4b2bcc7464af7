"""A study in words and pictures: the text on the terminal, and one self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape

from cb_backend.study.advice import Study, percentiles
from cb_backend.study.figures import CURVE_POINTS, Figures
from cb_backend.study.sweep import AS_GOOD, MAX_PREEMPTION_RATE, Comparison, Trial, calm_trials
from cb_backend.support.charts import COLOURS, Line, line_chart, page

Table = list[list[str]]
DEFINITIONS = (
    "All at once: every request is there at the start, which shows how much can be done. At a load: they arrive as in"
    " the trace, at that rate on average, which shows how long they wait.",
    "In flight: a request joins the batch at the next token and leaves it at its last. Static: nobody joins before the"
    " whole batch has ended, and a batch holds at most max_num_seqs requests, and as many as the cache has room for at"
    " the tokens that clients allow. Lengths known: the same, if a server could know how long each answer will be; none"
    " does.",
    "TTFT: first token minus arrival, so waiting counts. Inter-token: every gap between two tokens of an answer. E2E:"
    " last token minus arrival. p50 and p99: half, and 99 of 100, are at or below.",
    "Slots busy: share of max_num_seqs that was computed for. KV blocks in use: share of the cache. Both, and the"
    " requests in a step, are means over the time of the steps.",
    "Seqs: max_num_seqs, the most requests at once. Tokens a step (budget): max_num_batched_tokens. Preempted: requests"
    " that gave their blocks back and were computed again, as a share of all; the larger of at once and at the load.",
)


def text_report(study: Study) -> str:
    """Tables and the recommendation, for a terminal."""
    parts = [*heading(study), ""]
    if study.ways is not None:
        parts = ["The ways that were tried:", aligned(study.ways.table()), study.ways.summary(), "", *parts]
    if study.comparison is not None:
        parts += [
            "Static batches against in-flight batching, the same setting and cache:",
            aligned(comparison_table(study, 0)),
            "",
            aligned(comparison_table(study, 1)),
            "",
        ]
    parts += [
        f"Settings tried (latencies at {study.rate:.3g} requests/s):",
        aligned(trial_table(study)),
    ]
    if study.adapters is not None:
        parts += ["", f"{study.adapters.mix}:", aligned(study.adapters.table())]
    if study.checks:
        parts += ["", f"{_check_title(study)}:", aligned(check_table(study))]
    parts += ["", *recommendation(study), *(f"warning: {text}" for text in study.warnings)]
    return "\n".join(parts)


def html_report(study: Study) -> str:
    words = recommendation(study)
    body = [
        *(f'<p class="dim">{escape(line)}</p>' for line in heading(study)),
        f"<h2>{'Recommended' if study.is_kept else 'No setting keeps the target'}</h2>",
        *(f"<p>{escape(line)}</p>" for line in words[:-1]),
        f"<p>In <code>1/model.json</code>: <code>{escape(words[-1].strip())}</code></p>",
        *(f'<p class="warn">{escape(text)}</p>' for text in study.warnings),
        *_html_ways(study),
        *_html_comparison(study),
        "<h2>Settings tried</h2>",
        f'<p class="dim">Latencies at {study.rate:.3g} requests/s; slots busy with all requests at once.</p>',
        '<div class="plots">',
        *trial_charts(study),
        "</div>",
        html_table(trial_table(study)),
    ]
    if study.adapters is not None:
        body += ["<h2>Adapters</h2>", f"<p>{escape(str(study.adapters.mix))}.</p>", html_table(study.adapters.table())]
    if study.checks:
        body += [f"<h2>{_check_title(study)}</h2>", html_table(check_table(study))]
    body += ["<h2>Words</h2>", "<ul>", *(f"<li>{escape(text)}</li>" for text in DEFINITIONS), "</ul>"]
    body += [f"<h2>Command</h2><p><code>{escape(study.command)}</code></p>"] if study.command else []
    body += [f'<p class="dim">{escape(study.made_at)}</p>'] if study.made_at else []
    return page(f"Study: {study.traffic_name}", body)


def _html_ways(study: Study) -> list[str]:
    if study.ways is None:
        return []
    return ["<h2>Ways over several GPUs</h2>", html_table(study.ways.table()), f"<p>{escape(study.ways.summary())}</p>"]


def _html_comparison(study: Study) -> list[str]:
    if study.comparison is None:
        return []
    return [
        "<h2>Static batches against in-flight batching</h2>",
        '<div class="plots">',
        *comparison_charts(study),
        "</div>",
        html_table(comparison_table(study, 0)),
        "<br>",
        html_table(comparison_table(study, 1)),
    ]


def heading(study: Study) -> list[str]:
    traffic = study.traffic
    kind = "simulated with the step times of" if study.is_simulated else "run on"
    return [
        f"{study.traffic_name}: {len(traffic)} requests; prompt tokens {percentiles(traffic.prompt_lens)}; answer"
        f" tokens {percentiles(traffic.output_lens)}; clients allow up to {max(traffic.max_tokens):,}",
        f"{kind} {', '.join(f'{name} {value}' for name, value in study.conditions.items() if value)}",
        f"{study.cache}; load of interest {study.rate:.3g} requests/s"
        f"{f' ({study.rate_origin})' if study.rate_origin else ''}; {study.target}",
    ]


def recommendation(study: Study) -> list[str]:
    """The verdict in sentences; the last one is the line for model.json."""
    assert study.choice is not None
    trial = study.recommended
    did = (
        f"{trial.setting}. {trial.saturated.output_tokens_per_s:,.0f} output tokens/s with all requests at once; at"
        f" {study.rate:.3g} requests/s TTFT p99 {trial.loaded.ttft_ms['p99']:,.0f} ms and inter-token p99"
        f" {trial.loaded.itl_ms.get('p99', 0.0):,.1f} ms; {trial.preemption_rate:.1%} of the requests preempted."
    )
    lines = [f"Interrupted after {len(study.trials)} settings; this is of them."] if study.was_interrupted else []
    if study.is_kept:
        lines.append(f"Recommended: {did}")
        if len(study.trials) > 1:
            lines.append(_why(study))
    else:
        lines.append(f"No setting is recommended: {'; '.join(study.choice.broken)}. The nearest: {did}")
    if study.highest_rate > 0:
        by = "" if study.is_simulated else ", by the simulator,"
        lines.append(f"It holds the target{by} up to about {study.highest_rate:.3g} requests/s ({study.target}).")
    elif not study.is_kept and not study.was_interrupted:
        lines.append("It misses the target at any load: a faster card, shorter prompts or a laxer target are needed.")
    return [*lines, f"  {json.dumps(study.model_json())}"]


def _why(study: Study) -> str:
    """By which rule the setting was chosen, with the figure that a reader would otherwise miss."""
    good = [trial for trial in calm_trials(study.trials) if study.target.is_met(trial.loaded)]
    fastest = max(good, key=lambda trial: trial.saturated.output_tokens_per_s)
    of = f"of the {len(good)} settings (of {len(study.trials)} tried) that meet the target"
    of += f" and preempt less than {MAX_PREEMPTION_RATE:.0%}"
    if fastest == study.recommended:
        return f"Why: {of}, it does the most tokens/s with all requests at once."
    return (
        f"Why: {of}, it has the smallest max_num_seqs that does at least {AS_GOOD:.0%} of the tokens/s of the fastest"
        f" ({fastest.setting}: {fastest.saturated.output_tokens_per_s:,.0f})."
    )


def comparison_table(study: Study, which: int) -> Table:
    """Static and in flight side by side: all requests at once (0), or at the load (1)."""
    assert study.comparison is not None
    sides = _sides(study.comparison)
    columns = [pair[which] for pair in sides.values()]
    rows = [[name, *(show(found) for found in columns)] for name, show in _FIGURES]
    if which == 0:  # at a load that all of them bear, all do the same
        gains = [f"{columns[0].output_tokens_per_s / found.output_tokens_per_s:.2f}x" for found in columns]
        rows.append(["in flight does so many times the tokens/s", *gains])
    return [[_when(study)[which], *sides], *rows]


def _when(study: Study) -> tuple[str, str]:
    return "all requests at once", f"at {study.rate:.3g} requests/s"


def _sides(comparison: Comparison) -> dict[str, tuple[Figures, Figures]]:
    return {
        "in flight": comparison.continuous,
        "static": comparison.static,
        "static, lengths known": comparison.static_known,
    }


_FIGURES: list[tuple[str, Callable[[Figures], str]]] = [
    ("output tokens/s", lambda f: f"{f.output_tokens_per_s:,.1f}"),
    ("E2E p50, ms", lambda f: f"{f.e2e_ms['p50']:,.0f}"),
    ("E2E p99, ms", lambda f: f"{f.e2e_ms['p99']:,.0f}"),
    ("TTFT p50, ms", lambda f: f"{f.ttft_ms['p50']:,.0f}"),
    ("TTFT p99, ms", lambda f: f"{f.ttft_ms['p99']:,.0f}"),
    ("inter-token p99, ms", lambda f: f"{f.itl_ms.get('p99', 0.0):,.1f}"),
    ("slots busy", lambda f: f"{f.slots_busy:.0%}"),
    ("requests in a step", lambda f: f"{f.mean_rows:.1f}"),
    ("KV blocks in use, mean", lambda f: f"{f.kv_mean:.0%}"),
    ("preemptions a request", lambda f: f"{f.preemption_rate:.3f}"),
]


def trial_table(study: Study) -> Table:
    header = ["seqs", "tokens a step", "tokens/s at once", "TTFT p99, ms", "inter-token p99, ms", "E2E p99, ms"]
    header += ["slots busy", "preempted", "target"]
    rows = []
    for trial in study.trials:
        loaded, setting = trial.loaded, trial.setting
        mark = "met" if study.target.is_met(loaded) else "missed"
        if trial == study.recommended:
            mark = "chosen" if study.is_kept else "nearest"
        rows.append(
            [
                str(setting.max_num_seqs),
                str(setting.max_num_batched_tokens),
                f"{trial.saturated.output_tokens_per_s:,.1f}",
                f"{loaded.ttft_ms['p99']:,.0f}",
                f"{loaded.itl_ms.get('p99', 0.0):,.1f}",
                f"{loaded.e2e_ms['p99']:,.0f}",
                f"{trial.saturated.slots_busy:.0%}",
                f"{trial.preemption_rate:.1%}",
                mark,
            ]
        )
    return [header, *rows]


def _check_title(study: Study) -> str:
    name = "recommended" if study.is_kept else "nearest"
    return f"The {name} setting, {'simulated' if study.is_simulated else 'swept'} and run again to confirm it"


def check_table(study: Study) -> Table:
    """With the range of the runs where there were several."""
    names = ("predicted", "measured", "error") if study.is_simulated else ("in the sweep", "run again", "difference")
    is_range = any(c.lowest < c.highest for c in study.checks)
    rows = [
        [
            c.name,
            f"{c.predicted:,.1f}",
            f"{c.measured:,.1f}",
            *([f"{c.lowest:,.1f} to {c.highest:,.1f}"] if is_range else []),
            f"{c.error:+.1%}",
        ]
        for c in study.checks
    ]
    return [["", *names[:2], *(["runs"] if is_range else []), names[2]], *rows]


def comparison_charts(study: Study) -> list[str]:
    """Distributions of the times to the last token and to the first, for the three ways."""
    assert study.comparison is not None
    sides = list(_sides(study.comparison).items())
    charts = []
    for which, when in enumerate(_when(study)):
        for name, label in (("e2e_curve", "E2E"), ("ttft_curve", "TTFT")):
            lines = [
                Line(side, getattr(pair[which], name), CURVE_POINTS, COLOURS[index], is_dashed=index == len(sides) - 1)
                for index, (side, pair) in enumerate(sides)
            ]
            charts.append(line_chart(f"{label}, {when}", "ms", "% of requests at or below", lines, y_max=100))
    return charts


def trial_charts(study: Study) -> list[str]:
    """Each figure over max_num_seqs, a curve a token budget."""
    budgets = sorted({trial.setting.max_num_batched_tokens for trial in study.trials})
    figures: list[tuple[str, str, Callable[[Trial], float]]] = [
        ("Output tokens/s, all at once", "tokens/s", lambda trial: trial.saturated.output_tokens_per_s),
        (f"TTFT p99 at {study.rate:.3g} requests/s", "ms", lambda trial: trial.loaded.ttft_ms["p99"]),
        (f"Inter-token p99 at {study.rate:.3g} requests/s", "ms", lambda trial: trial.loaded.itl_ms.get("p99", 0.0)),
        ("Preempted requests", "%", lambda trial: 100 * trial.preemption_rate),
    ]
    return [
        line_chart(title, "max_num_seqs", label, list(_curves(study.trials, budgets, value)), may_be_log=True)
        for title, label, value in figures
    ]


def _curves(trials: Sequence[Trial], budgets: Sequence[int], value: Callable[[Trial], float]) -> Iterable[Line]:
    for index, budget in enumerate(budgets):
        own = [trial for trial in trials if trial.setting.max_num_batched_tokens == budget]
        xs = [float(trial.setting.max_num_seqs) for trial in own]
        colour = COLOURS[index % len(COLOURS)]
        yield Line(f"budget {budget} tokens", xs, [value(trial) for trial in own], colour, has_markers=True)


def aligned(table: Table) -> str:
    """Plain text: the first column to the left, the others to the right."""
    widths = [max(len(row[index]) for row in table) for index in range(len(table[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    )


def html_table(table: Table) -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in table[0])
    rows = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table[1:]]
    return f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
