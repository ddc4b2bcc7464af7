"""Legends of charts: pytest tests/client/test_charts.py"""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

from cb_backend.support.charts import DIGIT_PX, LABEL_LENGTHS, WIDTH, Line, line_chart

CHARACTER_PX = 8  # of 13 px text, at most on average


def chart(*labels: str) -> ElementTree.Element:
    lines = [Line(label, [1.0, 2.0], [1.0, 2.0], "#000") for label in labels]
    return ElementTree.fromstring(line_chart("title", "x", "y", lines))


def legend(svg: ElementTree.Element, *labels: str) -> list[tuple[float, float]]:
    """Where the labels stand."""
    found = {text.text: text for text in svg.iter("{http://www.w3.org/2000/svg}text")}
    return [(float(found[label].get("x", "")), float(found[label].get("y", ""))) for label in labels]


def height(svg: ElementTree.Element) -> float:
    match = re.fullmatch(r"0 0 (\d+) (\d+)", svg.get("viewBox", ""))
    assert match is not None
    assert int(match.group(1)) == WIDTH
    return float(match.group(2))


def test_short_labels_stand_in_two_columns() -> None:
    names = ("in flight", "static", "twenty-four characters..")
    assert len(names[2]) == LABEL_LENGTHS[2]
    svg = chart(*names)
    (x, y), second, third = legend(svg, *names)
    assert second == (second[0], y)
    assert x < second[0]
    assert third == (x, third[1])
    assert third[1] < height(svg)


def test_long_labels_stand_whole_in_a_row_each() -> None:
    """Two that begin alike: cut to half the width they would be the same."""
    names = ("closed loop, four streams, prefix cache on", "closed loop, four streams, prefix cache off")
    svg = chart(*names)
    (x, y), (other_x, other_y) = legend(svg, *names)
    assert x == other_x
    assert y + 13 < other_y < height(svg)
    assert x + CHARACTER_PX * LABEL_LENGTHS[1] * 0.85 < WIDTH


def test_labels_of_ticks_stay_in_the_picture_and_apart() -> None:
    """The last tick may lie at the right edge, and labels of ten digits fill the gaps."""
    for largest in (10.0, 10_000.0, 1_200_000.0, 5e9):
        svg = ElementTree.fromstring(line_chart("t", "x", "y", [Line("a", [0.0, largest], [1.0, 2.0], "#000")]))
        ticks = [
            (float(text.get("x", "")), len(text.text or "") * DIGIT_PX)
            for text in svg.iter("{http://www.w3.org/2000/svg}text")
            if text.get("class") == "mid" and (text.text or "").replace(",", "").isdigit()
        ]
        assert len(ticks) > 1
        assert ticks[-1][0] + ticks[-1][1] / 2 <= WIDTH
        for (left, left_width), (right, right_width) in itertools.pairwise(ticks):
            assert left + left_width / 2 < right - right_width / 2


def test_what_does_not_fit_ends_with_dots() -> None:
    svg = chart("short", "x" * 200)
    assert legend(svg, "x" * (LABEL_LENGTHS[1] - 1) + "…")
