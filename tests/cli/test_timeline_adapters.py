"""What the picture of a step log says of adapters. pytest tests/cli/test_timeline_adapters.py"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest

from cb_backend.cli import main
from cb_backend.cli.timelines.axis import LEFT, RIGHT, WIDTH
from cb_backend.cli.timelines.lanes import find_stays, summarise
from cb_backend.cli.timelines.steps import Row, StepLogFile
from cb_backend.cli.timelines.svg import draw, page
from tests.cli.known_steps import elements, known_log


def adapted_log(name: str = "sql<1>", num_slots: int = 3) -> StepLogFile:
    """7, there before, and 8 go through adapters; that of 8 is loaded when it comes, and again when it returns.
    9 goes through the model as it is."""
    log = known_log(num_slots)
    steps = list(log.steps)
    for index in (0, 6):
        steps[index] = msgspec.structs.replace(steps[index], adapter_loads=[8])
    return StepLogFile(msgspec.structs.replace(log.header, adapters={7: "law", 8: name}), steps)


def titles(svg: str) -> list[str]:
    return [e.text or "" for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("title")]


def test_stays_know_their_adapters() -> None:
    log = adapted_log("sql")
    stays = find_stays(log.steps, log.header.adapters)
    assert [(stay.request_id, stay.adapter, stay.has_loaded) for stay in stays] == [
        (7, "law", False),
        (8, "sql", True),
        (9, "", False),
        (8, "sql", True),
    ]
    assert summarise(log.steps, stays, 3).num_adapter_loads == 2


def test_lanes_show_names_and_loads() -> None:
    svg = draw(adapted_log())
    assert [e.text for e in elements(svg, "name")] == ["7 law", "8 sql<1>", "9", "8 sql<1>"]
    unit = (WIDTH - LEFT - RIGHT) / 8
    begins = [float(e.get("d", "")[1:].split(" ")[0]) for e in elements(svg, "loaded")]
    assert begins == pytest.approx([LEFT, LEFT + 6 * unit], abs=0.1)
    assert "; 2 adapters loaded" in svg
    assert titles(svg) == [
        "request 7, slot 0: was there before, through adapter law; 0 prompt chunks, 6 tokens decoded; was cancelled",
        "request 8, slot 1: joined with 10 tokens, 0 of them cached, through adapter sql<1>, loaded for it; "
        "2 prompt chunks, 1 tokens decoded; was preempted: its blocks went to others",
        "request 9, slot 1: joined with 5 tokens, 2 of them cached; 1 prompt chunks, 1 tokens decoded; ended at a stop",
        "request 8, slot 2: joined with 11 tokens, 0 of them cached, through adapter sql<1>, loaded for it; "
        "1 prompt chunks, 1 tokens decoded; goes on",
    ]


def test_a_name_that_does_not_fit_leaves_the_requests_own() -> None:
    svg = draw(adapted_log("a-name-much-longer-than-a-step-is-wide"))
    assert [e.text for e in elements(svg, "name")] == ["7 law", "8", "9", "8"]


def test_thin_lanes_keep_the_mark_within() -> None:
    log = adapted_log(num_slots=256)
    log.steps.append(msgspec.structs.replace(log.steps[0], rows=[*log.steps[0].rows, *wide(256)]))
    svg = draw(log)
    heights = {float(e.get("height", "")) for e in elements(svg, "stay")}
    size = float(elements(svg, "loaded")[0].get("d", "").partition("h")[2].partition("l")[0])
    assert 0 < size <= max(heights)
    assert elements(svg, "name") == []


def wide(num_slots: int) -> list[Row]:
    rows = known_log().steps[0].rows
    return [msgspec.structs.replace(rows[0], slot=slot, request_id=100 + slot) for slot in range(3, num_slots)]


def test_without_adapters_the_picture_is_what_it_was() -> None:
    svg = draw(known_log())
    assert elements(svg, "loaded") == []
    assert "adapter" not in svg
    assert "adapter loaded" in page("t", [svg]), "the legend is the same for all"


def test_logs_are_kept_and_old_ones_still_read(tmp_path: Path) -> None:
    path, out = tmp_path / "steps.jsonl", tmp_path / "timeline.svg"
    adapted_log().write(path)
    assert StepLogFile.read(path) == adapted_log()
    assert main.main(["timeline", str(path), "--out", str(out), "--steps", "2"]) == 0
    assert "8 sql&lt;1&gt;" in out.read_text(), "the name outlives the step that it joined with"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("adapters", None)
        line.pop("adapter_loads", None)
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert StepLogFile.read(path) == known_log()
