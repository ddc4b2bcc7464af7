"""The load test's figures and reports, which need no server. Expected values by hand."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from array import array
from pathlib import Path
from typing import Any

import load_test
import numpy as np
import pytest
from load_generator import options, report, server_metrics, summary
from load_generator.contracts import ClientHealth
from load_generator.records import RequestRecord, Status
from load_generator.summary import Slo, describe, judge_client, summarise

from cb_backend.support import charts


def record(
    request_id: int, scheduled_s: float, chunks: list[tuple[float, int]], status: Status = Status.OK, **fields: Any
) -> RequestRecord:
    times, tokens = array("d", [t for t, _ in chunks]), array("I", [n for _, n in chunks])
    filled = {"sent_s": scheduled_s, "end_s": chunks[-1][0] if chunks else scheduled_s, **fields}
    total = sum(tokens)
    return RequestRecord(
        request_id, 0, scheduled_s, 10, total, chunk_times=times, chunk_tokens=tokens, status=status,
        num_output_tokens=total, num_responses=len(chunks), **filled,
    )  # fmt: skip


RECORDS = [
    record(0, 0.0, [(0.1, 1), (0.2, 1), (0.5, 3)], end_s=0.6),
    record(1, 1.0, [(1.3, 2)]),
    record(2, 1.0, [(1.1, 1), (1.2, 1)], Status.CANCELLED),
    record(3, 1.5, [], Status.REFUSED, error="full", sent_s=1.52),
    record(4, 1.0, [(1.4, 1), (2.0, 1)]),
]


def test_percentiles_by_hand() -> None:
    assert describe(np.array([4.0, 1.0, 3.0, 2.0])) == pytest.approx(
        {"mean": 2.5, "p50": 2.5, "p90": 3.7, "p99": 3.97, "max": 4.0}
    )
    assert describe(np.zeros(0)) == {}


def test_latencies_by_hand() -> None:
    samples = summary.collect_samples(RECORDS)
    assert samples.ttft.tolist() == pytest.approx([100, 300, 400])
    assert samples.tpot.tolist() == pytest.approx([400 / 4, 0.0, 600])  # record 1: two tokens in one response
    assert samples.itl_chunk.tolist() == pytest.approx([100, 300, 600])
    assert samples.itl_token.tolist() == pytest.approx([100, 100, 100, 100, 600])
    assert samples.e2e.tolist() == pytest.approx([600, 300, 1000])


def test_rates_shares_and_goodput_by_hand() -> None:
    figures = summarise(RECORDS, Slo(ttft_ms=350, tpot_ms=50))
    assert figures["duration_s"] == 2.0
    counts = [figures[f"num_{k}"] for k in ("requests", "ok", "refused", "error", "cancelled", "unfinished")]
    assert counts == [5, 3, 1, 0, 1, 0]
    assert figures["cancelled_share"] == 0.2
    assert figures["output_tokens_per_s"] == 11 / 2
    assert figures["total_tokens_per_s"] == (11 + 4 * 10) / 2  # the refused prompt was not read
    assert figures["responses_per_s"] == 8 / 2
    assert figures["tokens_per_response"] == 11 / 8
    assert figures["requests_per_s"] == 3 / 2
    # Record 0 misses the limit per token, 4 both; of the four judged (not the cancelled one) only 1 is good.
    assert (figures["goodput_per_s"], figures["goodput_share"]) == (0.5, 0.25)
    assert summarise(RECORDS, Slo())["goodput_share"] == 0.75
    assert figures["errors"] == {"full": 1}
    assert summarise([], Slo())["output_tokens_per_s"] == 0.0


def test_over_time_adds_up() -> None:
    over_time = summary.curves(RECORDS)["over_time"]
    width = 2.0 / 60
    assert sum(over_time["output_tokens_per_s"]) * width == pytest.approx(11, rel=1e-3)
    assert sum(over_time["requests_per_s"]) * width == pytest.approx(3, rel=1e-3)
    at = dict(zip(over_time["time_s"], over_time["in_flight"], strict=True))
    assert [at[min(at, key=lambda t: abs(t - moment))] for moment in (0.3, 0.8, 1.15, 1.8)] == [1, 0, 3, 1]


def test_slow_client_is_told() -> None:
    figures, warnings = judge_client(RECORDS, [ClientHealth(0, 0.3, [0.001] * 50)], 0.2)
    assert figures["send_lag_p99_ms"] == pytest.approx(np.percentile([0, 0, 0, 0, 20], 99))
    assert [w.split(":")[0] for w in warnings] == ["the client sent late"]
    _, warnings = judge_client(RECORDS[:3], [ClientHealth(0, 0.95, [0.05] * 50)], 0.99)
    assert len(warnings) == 3
    assert "95% of a core" in warnings[1]
    assert judge_client(RECORDS[:3], [ClientHealth(0, 0.1, [0.001])], 0.1)[1] == []


def test_metrics_without_preemption_counter() -> None:
    text = '# TYPE a_total counter\na_total{model="m",version="1"} 4\na_total{model="m",version="2"} 1.5e1\n'
    assert server_metrics.counters(text, "m") == {"a_total": 19.0}
    moved = server_metrics.difference("", text, "m", 3)
    assert moved == {"num_preemptions": None, "preemptions_per_request": None, "counters": {"a_total": 19.0}}


# Reports


def result(label: str, factor: float, rates: tuple[float, ...] = (1.0,), slo: Slo | None = None) -> dict[str, Any]:
    """A result file's content, all times of RECORDS stretched by `factor`."""
    stretched = []
    for r in RECORDS:
        chunks = [(t * factor, n) for t, n in zip(r.chunk_times, r.chunk_tokens, strict=True)]
        stretched.append(record(r.request_id, r.scheduled_s * factor, chunks, r.status, error=r.error))
    run = {
        "summary": {**summarise(stretched, slo or Slo()), "offered_per_s": summary.offered_per_s(stretched)},
        "curves": summary.curves(stretched),
        "client": judge_client(stretched, [ClientHealth(0, 0.1, [0.0])], 0.1)[0],
        "server": None,
    }
    return {
        "schema": report.SCHEMA,
        "label": label,
        "started_at": "2026-01-01T00:00:00",
        "command": "load_test.py --rate 1",
        "url": "localhost:8001",
        "model": "llm",
        "client_cpus": 2,
        "prompts": {"tokens_per_word": 1.0, "num_extra_tokens": 0.0, "source": "server"},
        "was_interrupted": False,
        "runs": [
            {
                **run,
                "load": {"kind": "rate", "value": rate, "label": f"{rate:g} requests/s"},
                "warnings": [f"w{rate:g}"],
            }
            for rate in rates
        ],
    }


def svg_elements(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in page.split("<svg")[1:]]


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter() if element.tag.endswith("text")]


def test_h11_columns_that_are_warned_in_the_same_words_share_a_line() -> None:
    both = result("one", 1.0, (1.0, 2.0, 3.0))
    both["runs"][2]["warnings"] = ["w1", "only <here>"]
    page = report.html_report([both])
    assert '<p class="warn"><b>1 requests/s; 3 requests/s</b>: w1</p>' in page
    assert '<p class="warn"><b>2 requests/s</b>: w2</p>' in page
    assert '<p class="warn"><b>3 requests/s</b>: only &lt;here&gt;</p>' in page
    assert page.count('<p class="warn">') == 3
    assert page.index('class="warn"') < page.index("<svg") < page.index("<table")


def test_html_report_has_figures_and_plots() -> None:
    page = report.html_report([result("one", 1.0)])
    for cell in ("<td>finished requests [/s]</td><td>1.5</td>", "<td>TTFT p50 [ms]</td><td>300</td>", "w1"):
        assert cell in page
    charts_by_title = {texts(svg)[0]: svg for svg in svg_elements(page)}
    assert list(charts_by_title)[:2] == ["TTFT: share of requests", "TPOT: share of requests"]
    assert len(charts_by_title) == 7
    (curve,) = [e for e in charts_by_title["TTFT: share of requests"].iter() if e.tag.endswith("polyline")]
    points = [tuple(map(float, point.split(","))) for point in (curve.get("points") or "").split()]
    assert len(points) == len(summary.CDF_POINTS)
    assert all(0 <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT for x, y in points)
    assert points == sorted(points, key=lambda point: (point[0], -point[1]))  # to the right and up


def test_h11_the_report_is_legible_in_any_window_and_has_its_pictures_first() -> None:
    page = report.html_report([result("llm", 1.0)])
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "prefers-color-scheme:dark" in page
    assert "minmax(min(340px,100%),1fr)" in page, "a picture is never wider than the window"
    assert page.index("<svg") < page.index("<table")


@pytest.mark.parametrize(("count", "label"), [(1, "1 stream"), (2, "2 streams")])
def test_h11_one_stream_is_one_stream(count: int, label: str) -> None:
    (load,) = options.loads(options.parser().parse_args(["--concurrency", str(count)]))
    assert load.label == label


def test_sweep_report_plots_latency_against_load() -> None:
    def titles(slo: Slo | None = None) -> list[str]:
        page = report.html_report([result("s", 1.0, (1.0, 2.0, 4.0), slo)])
        return [texts(svg)[0] for svg in svg_elements(page)][7:]

    latencies = ["TTFT against load", "TPOT against load", "E2E against load", "Output tokens/s against load"]
    assert titles(Slo(ttft_ms=350)) == [*latencies, "Goodput, requests/s against load"]
    assert titles() == latencies


def test_goodput_is_shown_with_its_limits_and_only_where_there_are_some() -> None:
    page = report.html_report([result("one", 1.0, slo=Slo(ttft_ms=350, tpot_ms=50))])
    assert "SLO: TTFT at most 350 ms and TPOT at most 50 ms" in page
    assert "<td>within SLO [%]</td><td>25.0</td>" in page
    page = report.html_report([result("one", 1.0)])
    assert "<td>within SLO" not in page
    assert "<td>goodput" not in page


def test_what_was_offered_stands_beside_what_finished() -> None:
    """Of the records' schedule: five requests in 1.5 s."""
    rows = {row[0]: row[1:] for row in report.table([result("one", 1.0)])}
    assert rows["offered requests [/s]"] == [f"{4 / 1.5:.4g}"]
    assert summary.offered_per_s([record(0, 0.5, []), record(1, 0.5, [])]) is None
    assert summary.offered_per_s([]) is None


def test_errors_that_were_not_there_before_are_no_good_news() -> None:
    """0 and 3 have no ratio: the cell says so, and has the colour of what is worse."""
    before, after = result("before", 1.0), result("after", 1.0)
    before["runs"][0]["summary"].update(num_refused=0, num_error=0, goodput_per_s=0.0)
    after["runs"][0]["summary"].update(num_refused=3, num_error=0, num_ok=2)
    page = report.html_report([before, after])
    assert '<td>refused</td><td>0</td><td>3</td><td class="bad">from 0</td>' in page
    assert "<td>errors</td><td>0</td><td>0</td><td>0.0 %</td>" in page
    page = report.html_report([after, before])
    assert '<td>refused</td><td>3</td><td>0</td><td class="good">-100.0 %</td>' in page
    assert '<td class="good">-</td>' not in page


def test_compare_two_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, (label, factor) in zip(paths, (("old", 1.0), ("new", 0.5)), strict=True):
        path.write_text(json.dumps(result(label, factor)))
    page_path = tmp_path / "c.html"
    assert load_test.main(["--compare", *map(str, paths), "--html", str(page_path)]) == 0
    page = page_path.read_text()
    assert "<th>old</th><th>new</th><th>change</th>" in page
    assert '">-</td>' not in page, "what is not known has no colour"
    assert '<td>TTFT p50 [ms]</td><td>300</td><td>150</td><td class="good">-50.0 %</td>' in page
    assert '<td>output tokens [/s]</td><td>5.5</td><td>11</td><td class="good">+100.0 %</td>' in page
    ttft = next(svg for svg in svg_elements(page) if texts(svg)[0].startswith("TTFT"))
    assert len([e for e in ttft.iter() if e.tag.endswith("polyline")]) == 2
    assert {"old", "new"} <= set(texts(ttft))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("TTFT p50"))
    assert line.split()[-4:] == ["300", "150", "-50.0", "%"]


def test_compare_refuses_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"schema": "other"}')
    assert load_test.main(["--compare", str(path), str(path)]) == 2
    assert "x.json is not a result of this load test" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 100, [0, 20, 40, 60, 80, 100]), (0, 0.7, [0, 0.2, 0.4, 0.6]), (3, 17, [5, 10, 15])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert charts.nice_ticks(low, high) == pytest.approx(expected)
