"""What the reports of a study say: pytest tests/study/test_report.py"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

from cb_backend.study.advice import Check, Study, far_off
from cb_backend.study.bench import Setting
from cb_backend.study.report import html_report, text_report, trial_table
from cb_backend.study.sweep import Target, choose, compare, run_trial
from tests.study.made_up import traffic
from tests.study.test_sweep import a_study, bench, say, trial


def reported() -> tuple[str, str, dict[str, object]]:
    study = a_study(traffic([4] * 16, [2, 2, 2, 60] * 4, [0.01 * i for i in range(16)]), target=Target(500, 50))
    study.trials = [
        run_trial(bench(), study.traffic, study.rate, Setting(*pair), say)
        for pair in ((2, 8), (2, 64), (4, 8), (4, 64))
    ]
    study.choice = choose(study.trials, study.target)
    study.comparison = compare(bench(), study.traffic, study.rate, study.recommended.setting, say)
    study.highest_rate = 12.5
    study.checks = [Check("TTFT p99, ms", 110.0, 100.0, 95.0, 130.0)]
    study.warnings = ["beware of <this>"]
    study.command = "cb-backend study --trace a.csv"
    study.rate_origin, study.made_at = "the trace's own", "cb_backend 0, 2026-01-02 03:04+00:00"
    return text_report(study), html_report(study), study.to_json()


def test_the_reader_learns_why_this_setting_and_whose_load() -> None:
    text, page, figures = reported()
    assert "load of interest 5 requests/s (the trace's own); TTFT" in text
    assert "2026-01-02 03:04" in page
    assert (figures["rate_origin"], figures["made_at"]) == ("the trace's own", "cb_backend 0, 2026-01-02 03:04+00:00")
    assert "Why: of the 4 settings (of 4 tried) that meet the target and preempt less than 2%, it" in text
    assert "Slots busy: share of max_num_seqs that was computed for." in page


def test_a_faster_setting_that_was_not_chosen_is_named() -> None:
    study = a_study(traffic([4] * 4, [2] * 4, [0.01 * i for i in range(4)]))
    study.trials = [trial(8, 500, 90), trial(16, 980, 90), trial(32, 1000, 90), trial(64, 2000, 90, preempted=0.5)]
    study.choice = choose(study.trials, study.target)
    text = text_report(study)
    assert "Why: of the 3 settings (of 4 tried)" in text
    assert "at least 97% of the tokens/s of the fastest (32 seqs, 512 tokens: 1,000)." in text
    study.choice = choose(study.trials, Target(ttft_ms=1))
    assert "Why:" not in text_report(study), "what is not kept is said instead"


def test_a_ratio_of_tokens_is_given_only_where_it_says_something() -> None:
    """At a load that both ways bear they do the same tokens/s."""
    text, page, _ = reported()
    assert text.count("in flight does so many times the tokens/s") == 1
    assert page.count("in flight does so many times the tokens/s") == 1


def test_what_was_run_is_not_called_a_prediction() -> None:
    study = a_study(traffic([4] * 4, [2] * 4, [0.01 * i for i in range(4)]), highest_rate=3.0)
    study.checks = [Check("TTFT p99, ms", 110.0, 100.0, 100.0, 100.0)]
    study.is_simulated = False
    for report in (text_report(study), html_report(study)):
        assert "in the sweep" in report
        assert "predicted" not in report
        assert "swept and run again" in report
        assert "by the simulator, up to about 3 requests/s" in report


def svg_texts(page: str) -> list[list[str]]:
    """The texts of each picture; raises where a picture is not well-formed."""
    pictures = [part.split("</svg>")[0] + "</svg>" for part in page.split("<svg")[1:]]
    return [list(ElementTree.fromstring("<svg" + picture).itertext()) for picture in pictures]


def test_the_text_says_what_was_found_and_what_to_do() -> None:
    text, _, figures = reported()
    gain = figures["gain"]
    assert "made up: 16 requests; prompt tokens p50 4, p90 4, p99 4; answer tokens p50 2, p90 60, p99 60" in text
    assert "simulated with the step times of card none" in text
    assert "TTFT p99 at most 500 ms and inter-token time p99 at most 50 ms" in text
    assert f"{gain:.2f}x" in text
    assert "Recommended: 4 seqs, 8 tokens." in text or "Recommended: 4 seqs, 64 tokens." in text
    assert "holds the target up to about 12.5 requests/s" in text
    assert "TTFT p99, ms      110.0     100.0  95.0 to 130.0  +10.0%" in text
    assert "warning: beware of <this>" in text
    snippet = next(line for line in text.splitlines() if line.startswith('  {"max_num_seqs"'))
    assert json.loads(snippet) == figures["recommended"]


def test_the_page_has_the_same_and_its_pictures_are_drawn() -> None:
    _, page, figures = reported()
    assert "beware of &lt;this&gt;" in page
    assert "<this>" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched
    assert "cb-backend study --trace a.csv" in page
    pictures = svg_texts(page)
    titles = [texts[0] for texts in pictures]
    assert titles == [
        "E2E, all requests at once",
        "TTFT, all requests at once",
        "E2E, at 5 requests/s",
        "TTFT, at 5 requests/s",
        "Output tokens/s, all at once",
        "TTFT p99 at 5 requests/s",
        "Inter-token p99 at 5 requests/s",
        "Preempted requests",
    ]
    assert {"in flight", "static", "static, lengths known"} <= set(pictures[0])
    assert {"budget 8 tokens", "budget 64 tokens"} <= set(pictures[4])
    assert json.dumps(figures["recommended"]).replace('"', "&quot;") in page


def test_the_figures_are_all_in_the_json() -> None:
    _, _, figures = reported()
    again = json.loads(json.dumps(figures))
    assert [(one["max_num_seqs"], one["max_num_batched_tokens"]) for one in again["trials"]] == [
        (2, 8), (2, 64), (4, 8), (4, 64)
    ]  # fmt: skip
    assert again["comparison"]["static"]["at_once"]["output_tokens_per_s"] > 0
    check = {"predicted": 110.0, "measured": 100.0, "lowest": 95.0, "highest": 130.0, "error": 0.1}
    assert again["checks"] == [{"name": "TTFT p99, ms", **check}]


def missed_study() -> Study:
    """No setting keeps the target; the nearest holds it at a lower load."""
    study = a_study(traffic([4] * 4, [2] * 4, [0.01 * i for i in range(4)]), target=Target(ttft_ms=10))
    study.trials = [trial(8, 500, 90), trial(16, 980, 40)]
    study.choice = choose(study.trials, study.target)
    study.highest_rate = 0.4
    return study


def test_h06_one_verdict_where_no_setting_keeps_the_target() -> None:
    study = missed_study()
    text, page = text_report(study), html_report(study)
    assert "No setting is recommended: no setting reaches TTFT p99 at most 10 ms at this load. The nearest: 16" in text
    assert "Recommended" not in text
    assert "<h2>No setting keeps the target</h2>" in page
    assert "Recommended" not in page
    assert "not kept" not in text
    assert "It holds the target up to about 0.4 requests/s" in text
    assert study.to_json()["verdict"] == "nearest"


def test_h06_what_missed_is_not_called_chosen() -> None:
    marks = [row[-1] for row in trial_table(missed_study())]
    assert marks == ["target", "missed", "nearest"]
    study = missed_study()
    study.target = Target(ttft_ms=50)
    study.choice = choose(study.trials, study.target)
    assert [row[-1] for row in trial_table(study)] == ["target", "missed", "chosen"]


def test_h06_a_target_that_is_never_kept_is_said_to_be() -> None:
    study = missed_study()
    study.highest_rate = 0.0
    assert "It misses the target at any load" in text_report(study)


def test_h06_a_prediction_that_is_far_off_has_a_reason() -> None:
    fast = Check("E2E p99, ms", predicted=237.0, measured=100.0, lowest=99.0, highest=101.0)
    slow = Check("E2E p99, ms", predicted=50.0, measured=100.0, lowest=99.0, highest=101.0)
    wild = Check("E2E p99, ms", predicted=237.0, measured=100.0, lowest=60.0, highest=300.0)
    near = Check("TTFT p99, ms", predicted=110.0, measured=100.0, lowest=99.0, highest=101.0)
    assert far_off([near]) == []
    assert "E2E p99, ms: predicted 237, measured 100: the engine was faster than when" in far_off([near, fast])[0]
    assert "slower than when its step times were measured" in far_off([slow])[0]
    assert "the runs themselves lie between 60 and 300" in far_off([wild])[0]


def test_h06_an_interrupted_study_reports_what_it_has() -> None:
    study = missed_study()
    study.was_interrupted = True
    study.comparison = None
    text, page, figures = text_report(study), html_report(study), study.to_json()
    assert "Interrupted after 2 settings; this is of them." in text
    assert "Static batches" not in text
    assert page.count("<svg") == 4
    assert (figures["was_interrupted"], figures["gain"], len(figures["trials"])) == (True, None, 2)


def test_h11_pictures_stand_before_tables() -> None:
    _, page, _ = reported()
    for part in page.split("<h2>")[1:]:
        if "<svg" in part:
            assert part.index("<svg") < part.index("<table")
