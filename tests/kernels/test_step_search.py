"""kernels/step_search.py against made-up times: what it finds, and what it makes of noise, failures and a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from cb_backend.cli.paths import checkout_path


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import linear_shapes
    import step_search

    shapes = [linear_shapes.Shape("linear", 64, 512, "qkv"), linear_shapes.Shape("linear_silu_mul", 64, 512, "gate_up")]
    return SimpleNamespace(Search=step_search.Search, rounds=step_search.ROUNDS, shapes=shapes)


@dataclass
class MadeUpSteps:
    """Steps whose time is a function of the tiles' sizes and of the prefetches, (qkv's, gate_up's) each."""

    time: Callable[[tuple[int, ...], tuple[int, ...]], float]
    too_large: int = 1000  # from this tile on nothing can be launched
    compiled: list[int] = field(default_factory=list)  # how many at once
    timed: list[Any] = field(default_factory=list)

    def compile(self, many: list[Any]) -> None:
        self.compiled.append(len(many))

    def make(self, settings: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        tiles = tuple(use["block_n"] for use in settings.values())
        if max(tiles) >= self.too_large:
            raise ValueError("too much shared memory\nand more lines")
        return tiles, tuple(use.get("prefetch", 0) for use in settings.values())

    def milliseconds(self, step: Any) -> float:
        self.timed.append(step)
        return self.time(*step)


def settings_of(workshop: SimpleNamespace, *tiles: int) -> dict[Any, dict[str, int]]:
    return {shape: {"block_n": tile} for shape, tile in zip(workshop.shapes, tiles, strict=True)}


def candidates(workshop: SimpleNamespace, *tiles: int) -> dict[Any, list[dict[str, int]]]:
    return {shape: [{"block_n": tile} for tile in tiles] for shape in workshop.shapes}


def test_finds_a_best_that_needs_all_prefetches_at_once_and_a_second_pass(workshop: SimpleNamespace) -> None:
    def time(tiles: tuple[int, ...], prefetches: tuple[int, ...]) -> float:
        best_qkv = 3 if tiles[1] == 2 else 1  # so the first pass takes another
        miss = abs(tiles[0] - best_qkv) + 3 * abs(tiles[1] - 2)
        return 10 + miss + {(512, 512): -1, (512, 0): -1.5, (0, 0): 0}.get(prefetches, 0.5)

    lines: list[str] = []
    steps = MadeUpSteps(time)
    search = workshop.Search(steps, settings_of(workshop, 4, 4), lambda: False, lines.append)
    search.run(candidates(workshop, 1, 2, 3, 4), (0, 512))
    qkv, gate_up = workshop.shapes
    assert search.best == {qkv: {"block_n": 3, "prefetch": 512}, gate_up: {"block_n": 2}}
    assert search.tried == {qkv, gate_up}
    assert steps.timed[:4] == [((4, 4), (0, 0)), ((4, 4), (512, 512))] * 2  # in turn
    assert lines[0].startswith(
        "  prefetches of all: now 19.0000; 4/1+512 18.0000 -> 4/1+512, again 19.0000 and 18.0000"
    )
    assert lines[1].startswith("  qkv: now 18.0000; 1/1+512 15.0000 | 2/1+512 16.0000 | 3/1+512 17.0000 -> 1/1+512")


@pytest.mark.parametrize(("gain", "is_kept"), [(0.001, False), (0.002, True)])
def test_keeps_what_gains_more_than_noise(workshop: SimpleNamespace, gain: float, is_kept: bool) -> None:
    steps = MadeUpSteps(lambda tiles, _: 2.0 * (1 - gain) if tiles[0] == 8 else 2.0)
    lines: list[str] = []
    search = workshop.Search(steps, settings_of(workshop, 4, 4), lambda: False, lines.append)
    search.run(candidates(workshop, 8), ())
    assert search.best == settings_of(workshop, 8 if is_kept else 4, 4)
    assert ("-> 8/1+0" if is_kept else "-> stays") in lines[0]


def test_one_that_was_fast_by_luck_is_not_kept(workshop: SimpleNamespace) -> None:
    """The fastest of many is often the luckiest: it has to be faster again."""

    def time(tiles: tuple[int, ...], _: tuple[int, ...]) -> float:
        num_timed = sum(step[0] == (8, 4) for step in steps.timed)
        return 1.5 if tiles == (8, 4) and num_timed <= workshop.rounds else 2.0

    steps = MadeUpSteps(time)
    search = workshop.Search(steps, settings_of(workshop, 4, 4), lambda: False, lambda line: None)
    search.run(candidates(workshop, 8), ())
    assert sum(step[0] == (8, 4) for step in steps.timed) > workshop.rounds
    assert search.best == settings_of(workshop, 4, 4)


def test_ends_with_its_budget_and_knows_what_it_tried(workshop: SimpleNamespace) -> None:
    qkv = workshop.shapes[0]
    lines: list[str] = []
    steps = MadeUpSteps(lambda tiles, prefetches: sum(tiles) - sum(prefetches) / 1000)
    # A trial a unit of time: prefetches of all, tiles and prefetches of qkv.
    search = workshop.Search(steps, settings_of(workshop, 4, 4), lambda: len(steps.compiled) >= 3, lines.append)
    search.run(candidates(workshop, 1, 2), (0, 512))
    assert steps.compiled == [2, 3, 2]
    assert search.tried == {qkv}
    assert [use["block_n"] for use in search.best.values()] == [1, 4]
    assert lines[-1] == "  gate_up: no time left"
    before = list(steps.timed)
    search.run(candidates(workshop, 1, 2), (0, 512))
    assert steps.timed == before


def test_one_that_cannot_be_launched_is_told_and_left_out(workshop: SimpleNamespace) -> None:
    lines: list[str] = []
    steps = MadeUpSteps(lambda tiles, _: 100.0 - sum(tiles), too_large=64)
    search = workshop.Search(steps, settings_of(workshop, 4, 4), lambda: False, lines.append)
    search.run(candidates(workshop, 8, 64), ())
    assert search.best == settings_of(workshop, 8, 8)
    assert lines[0] == "    left out 64/1+0: ValueError: too much shared memory"
    assert lines[1] == "  qkv: now 92.0000; 8/1+0 88.0000 -> 8/1+0, again 92.0000 and 88.0000"


def test_finds_another_where_what_is_used_now_cannot_be_launched(workshop: SimpleNamespace) -> None:
    lines: list[str] = []
    steps = MadeUpSteps(lambda tiles, _: 100.0 - sum(tiles), too_large=64)
    search = workshop.Search(steps, settings_of(workshop, 64, 4), lambda: False, lines.append)
    search.run(candidates(workshop, 8), ())
    assert lines[0].startswith("    left out what is used now: ValueError")
    assert search.best == settings_of(workshop, 8, 8)
