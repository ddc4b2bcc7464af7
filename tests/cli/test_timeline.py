"""The picture of a step log that is known by heart. pytest tests/cli/test_timeline.py"""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest

from cb_backend.cli import main, teller
from cb_backend.cli.paths import CliError
from cb_backend.cli.timelines.axis import LABEL_PX, LEFT, RIGHT, WIDTH
from cb_backend.cli.timelines.lanes import Leave, find_stays, summarise
from cb_backend.cli.timelines.panels import PANEL_HEIGHT, peaks_of
from cb_backend.cli.timelines.steps import Row, StepLogFile
from cb_backend.cli.timelines.svg import draw, page
from tests.cli.known_steps import elements, known_log, paused_log, step


def test_stays() -> None:
    stays = find_stays(known_log().steps)
    assert [(s.slot, s.request_id, s.first, s.last, s.leave, s.has_joined) for s in stays] == [
        (0, 7, 0, 5, Leave.CANCELLED, False),
        (1, 8, 0, 2, Leave.PREEMPTED, True),
        (1, 9, 3, 4, Leave.STOP, True),
        (2, 8, 6, 7, Leave.STILL_THERE, True),
    ]
    assert [[(chunk.step, chunk.num_tokens) for chunk in stay.chunks] for stay in stays] == [
        [],
        [(0, 6), (1, 4)],
        [(3, 3)],
        [(6, 11)],
    ]
    assert [[(run.first, run.last) for run in stay.runs] for stay in stays] == [[(0, 5)], [(2, 2)], [(4, 4)], [(7, 7)]]
    assert (stays[2].num_tokens_at_join, stays[2].num_cached_tokens) == (5, 2)


def test_summary() -> None:
    log = known_log()
    summary = summarise(log.steps, find_stays(log.steps), 3)
    assert (summary.num_steps, summary.num_requests, summary.num_preemptions) == (8, 3, 1)
    assert (summary.num_prefill_tokens, summary.num_decode_tokens) == (6 + 4 + 3 + 11, 6 + 1 + 2 + 1)
    assert summary.seconds == 8.0
    assert summary.utilisation == pytest.approx(14 / 24)


@pytest.mark.parametrize("is_by_time", [True, False])
def test_picture(is_by_time: bool) -> None:
    svg = draw(known_log(), is_by_time)
    unit = (WIDTH - LEFT - RIGHT) / 8  # every step takes a second
    assert [e.text for e in elements(svg, "lane")] == ["slot 0", "slot 1", "slot 2"]
    assert [e.text for e in elements(svg, "chunk")] == ["6", "4", "3", "11"]
    assert [e.text for e in elements(svg, "name")] == ["7", "8", "9", "8"]
    assert [e.get("class") for e in elements(svg, "leave")] == ["leave cancelled", "leave preempted", "leave stop"]

    def spans(kind: str) -> list[tuple[float, float]]:
        return [
            (round((float(e.get("x", "")) - LEFT) / unit, 2), round(float(e.get("width", "")) / unit, 2))
            for e in elements(svg, kind)
        ]

    assert spans("stay") == [(0, 6), (0, 3), (3, 2), (6, 2)]
    assert spans("prefill") == [(0, 1), (1, 1), (3, 1), (6, 1)]
    assert spans("decode") == [(0, 6), (2, 1), (4, 1), (7, 1)]
    ys = [float(e.get("y", "")) for e in elements(svg, "stay")]
    assert ys[1] == ys[2], "8 and 9 share a lane, one after the other"
    assert ys[0] < ys[1] < ys[3]
    titles = [e.text or "" for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("title")]
    assert titles[1] == (
        "request 8, slot 1: joined with 10 tokens, 0 of them cached; 2 prompt chunks, 1 tokens decoded; "
        "was preempted: its blocks went to others"
    )
    assert "known &lt;log&gt;" in svg
    assert [height_of(svg, kind) for kind in ("kv", "waiting", "load")] == pytest.approx([1.0, 1.0, 1.0], abs=0.01)


def height_of(svg: str, kind: str) -> float:
    """How much of its panel an area fills at its highest."""
    (area,) = elements(svg, kind)
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", area.get("d", ""))]
    return (max(heights) - min(heights)) / PANEL_HEIGHT


def test_no_line_is_drawn_over_a_figure() -> None:
    """Lines between steps would cut the digits of what was drawn before them."""
    kinds = [e.get("class", "") for e in ElementTree.fromstring(draw(known_log(), False)).iter()]
    assert max(kinds.index(kind) for kind in ("chunk", "name")) > kinds.index("steps")
    assert min(kinds.index(kind) for kind in ("chunk", "name")) > kinds.index("steps")
    assert all(kind in ("chunk", "name") for kind in kinds[kinds.index("steps") + 1 :][:8])


def test_pictures_to_be_compared_have_one_scale() -> None:
    """A queue of half the height of the longest one fills half of its panel."""
    log = known_log()
    kv, waiting, load = peaks_of([log])
    svg = draw(log, peaks=[kv, 2 * waiting, load])
    assert [height_of(svg, kind) for kind in ("kv", "waiting")] == pytest.approx([1.0, 0.5], abs=0.01)
    assert f">{2 * waiting}</text>" in svg
    busier = StepLogFile(log.header, [msgspec.structs.replace(log.steps[2], num_used_blocks=10, num_waiting=7)])
    assert peaks_of([log, busier]) == [10, 7, 2]


def test_h05_panels_of_an_idle_engine_are_as_legible_as_those_of_a_full_one() -> None:
    """1,455 blocks and 256 slots, of which 8 and 2 are used: areas to the top, the capacity in words."""
    log = known_log(num_slots=256)
    svg = draw(StepLogFile(msgspec.structs.replace(log.header, num_blocks=1455), log.steps))
    assert [height_of(svg, kind) for kind in ("kv", "load")] == pytest.approx([1.0, 1.0], abs=0.01)
    assert "KV blocks held: at most 8 of 1,455 (0.5%)" in svg
    assert "requests in the step: at most 2 of 256 (0.8%)" in svg
    assert "requests waiting: at most 1<" in svg, "nothing bounds the queue"


def test_h05_the_longest_pause_has_its_label() -> None:
    """Two pauses so near that one label fits: the second, longer one's."""
    log = known_log()
    late = [
        msgspec.structs.replace(s, begin=s.begin + (i > 0) * 2 + (i > 1) * 60, end=s.end + (i > 0) * 2 + (i > 1) * 60)
        for i, s in enumerate(msgspec.structs.replace(s, begin=s.begin / 10, end=s.end / 10) for s in log.steps)
    ]
    labels = [e.text for e in elements(draw(StepLogFile(log.header, late)), "pause") if e.tag.endswith("text")]
    assert labels[0] == "no step for 60 s"


def test_h05_states_are_told_by_pattern_not_by_a_requests_colour() -> None:
    svg = draw(known_log())
    fills = {e.get("class"): e.get("fill", "") for e in elements(svg, "leave")}
    assert fills == {
        "leave cancelled": "url(#cancelled)", "leave preempted": "url(#preempted)", "leave stop": "#1a1a1a",
    }  # fmt: skip
    ids = {e.get("id") for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("pattern")}
    assert {"cancelled", "preempted", "failed", "prompt"} <= ids
    assert len(elements(svg, "hatch")) == len(elements(svg, "prefill")) == 4
    assert "url(#preempted)" in page("t", [svg]).partition("<div")[0], "the legend shows the same patterns"


def test_h11_the_page_fits_narrow_windows_and_the_dark_scheme() -> None:
    html = page("t", [draw(known_log())])
    assert '<meta name="viewport" content="width=device-width' in html
    assert "color-scheme:light dark" in html
    assert ".picture{display:block;margin-top:14px;width:100%" in html


def test_256_slots_fit_a_page() -> None:
    log = known_log(num_slots=256)
    log.steps.append(step(8, [Row(slot, 10 + slot, 1, False) for slot in range(256)]))
    svg = draw(log)
    root = ElementTree.fromstring(svg)
    assert float(root.get("height", "")) < 1100
    labels = [float(e.get("y", "")) for e in elements(svg, "lane")]
    assert min(b - a for a, b in itertools.pairwise(labels)) >= 15, "labels of lanes must not overlap"
    assert elements(svg, "chunk") == [], "no room for figures"
    assert len(elements(svg, "prefill")) == 4


def test_slots_that_nobody_held_get_no_lane() -> None:
    """A default engine has 256 slots; a handful of requests in it must be as legible as in one of 8."""
    log = known_log(num_slots=256)
    svg = draw(log)
    assert [e.text for e in elements(svg, "lane")] == [f"slot {i}" for i in range(8)]
    assert len(elements(svg, "name")) == len(elements(draw(known_log(num_slots=8)), "name")) > 0
    assert "the other 248 of 256 slots were idle" in svg
    assert "slots were idle" not in draw(known_log(num_slots=3))
    log.steps.append(step(8, [Row(120, 11, 1, False)]))
    lanes = [e.text for e in elements(draw(log), "lane")]
    assert lanes == [*(f"slot {i}" for i in (0, 1, 2, 3, 4, 5, 6)), "slot 120"], "far apart, as after a crowd"
    ys = [float(e.get("y", "")) for e in elements(draw(log), "stay")]
    assert ys[-1] == pytest.approx(ys[0] + 7 * (ys[1] - ys[0])), "it is drawn in the eighth lane"


@pytest.mark.parametrize(("pause_s", "words"), [(60.0, "60 s"), (90_000.0, "90,000 s")])
def test_a_pause_is_cut_short_and_its_length_said(pause_s: float, words: str) -> None:
    """An engine that was idle for a minute, or a day: its steps must not be squeezed into a hair."""
    svg = draw(paused_log(pause_s))
    (band, label) = elements(svg, "pause")
    assert label.text == f"no step for {words}"
    assert 10 < float(band.get("width", "")) < 60
    assert f"; {pause_s:.2f} s without a step, drawn shorter" in svg
    widths = [float(e.get("width", "")) for e in elements(svg, "prefill")]
    assert all(width > 0.9 * (WIDTH - LEFT - RIGHT) / 8.3 for width in widths)
    ticks = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="\w+" fill="#444" font-size="11">([\d.]+) s<', svg)
    # The tick at the pause's end stands too near to the one at its begin.
    assert [float(text) for _, text in ticks] == [0, 1, 2, 3, 4, *(pause_s + i for i in (5, 6, 7, 8))]
    xs = [float(x) for x, _ in ticks]
    assert all(b - a >= LABEL_PX for a, b in itertools.pairwise(xs)), "labels must not overlap"
    (area,) = elements(svg, "load")
    base = max(float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", area.get("d", "")))
    at_base = re.findall(rf"L([\d.]+) {base:.1f}", area.get("d", ""))
    left = float(band.get("x", ""))
    assert any(float(x) == pytest.approx(left, abs=0.2) for x in at_base), "nothing was computed in the pause"


def test_short_gaps_are_no_pauses() -> None:
    assert elements(draw(paused_log(0.7)), "pause") == []
    assert elements(draw(paused_log(60.0), is_by_time=False), "pause") == []
    assert "without a step" not in draw(known_log())


def test_the_heading_fits_the_picture() -> None:
    """With figures as long as they get: what is cut off at the right edge is not read."""
    log = paused_log(90_000.0)
    many = [
        msgspec.structs.replace(one, rows=[Row(slot, 10**6 + slot, 9000, True) for slot in range(240)])
        for one in log.steps
    ]
    svg = draw(StepLogFile(msgspec.structs.replace(log.header, num_slots=1024), many))
    lines = re.findall(r'<text x="92" y="\d+" fill="#444">([^<]*)</text>', svg)
    assert len(lines) == 2
    assert all(LEFT + 6.6 * len(line) < WIDTH for line in lines)  # 12 px type


def test_a_small_share_is_not_called_none() -> None:
    log = known_log()
    svg = draw(StepLogFile(msgspec.structs.replace(log.header, num_blocks=4000), log.steps))
    assert "KV blocks held: at most 8 of 4,000 (0.2%)" in svg


def test_file_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "steps.jsonl", tmp_path / "timeline.html"
    known_log().write(path)
    assert StepLogFile.read(path) == known_log()
    assert main.main(["timeline", str(path), "--out", str(out), "--steps", "5"]) == 0
    assert "5 steps" in capsys.readouterr().out
    html = out.read_text()
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", ""), "nothing is loaded from elsewhere"
    assert html.count('class="stay"') == 3, "the first stay of 8 lies before them"
    path.write_text(path.read_text().replace('"step_id":3', '"step_id":"three"'))
    with pytest.raises(CliError, match=r"line 5.*not a step log"):
        StepLogFile.read(path)
    assert main.main(["timeline", str(path), "--out", str(out)]) == 1
    assert main.main(["timeline", "live", "--runtime-dir", str(tmp_path)]) == 1
    assert "no engine of yours is running" in capsys.readouterr().err


def test_the_demo_tells_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teller, "TELL_EVERY_S", 0.0)
    assert main.main(["timeline", "demo", "--slots", "2", "--requests", "3", "--out", str(tmp_path / "d.html")]) == 0
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if re.match(r" *\d+\.\d s  ", line)]
    begins = [index for index, line in enumerate(lines) if line.endswith(("  in flight", "  static batches"))]
    assert len(begins) == 2
    assert begins[0] == 0
    for first, last in ((1, begins[1]), (begins[1] + 1, len(lines))):
        found = [re.fullmatch(r" *\d+\.\d s    (\d) of 3 requests", line) for line in lines[first:last]]
        ended = [int(match[1]) for match in found if match is not None]
        assert len(ended) == last - first > 1
        assert ended == sorted(ended)
    assert "requests" not in told.out


def test_demo_shows_static_batches_waiting(tmp_path: Path) -> None:
    out, saved = tmp_path / "demo.html", tmp_path / "demo.jsonl"
    arguments = ["timeline", "demo", "--slots", "4", "--requests", "10", "--out", str(out), "--save", str(saved)]
    assert main.main(arguments) == 0
    in_flight, static = StepLogFile.read(saved), StepLogFile.read(tmp_path / "demo.1.jsonl")
    assert len(in_flight.steps) < len(static.steps)
    for log in (in_flight, static):
        stays = find_stays(log.steps)
        assert {stay.request_id for stay in stays} == set(range(1, 11))
        assert {stay.leave for stay in stays if stay.leave is not Leave.PREEMPTED} == {Leave.LENGTH}
    # Static: when a batch has begun to end, nobody joins until it is empty.
    present: set[int] = set()
    is_ending = False
    for taken in static.steps:
        if taken.joined:
            assert not is_ending or not present
            is_ending = False
        present |= {row.request_id for row in taken.rows}
        if taken.ended:
            is_ending = True
            present -= {end.request_id for end in taken.ended}
    assert out.read_text().count('<svg class="picture"') == 2
