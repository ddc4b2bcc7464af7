"""Ranges of seeds of several runs add up: each seed counts once, and only where the same was run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation.draw import Kind, make_scenario
from tests.simulation.ranges import Key, RangeLog, describe, totals
from tests.simulation.sweep import run_seed, run_seeds

KEY = Key("package", "worlds", "drawn")


def test_ranges_of_two_files_add_up_and_no_seed_counts_twice(tmp_path: Path) -> None:
    one, two = RangeLog(tmp_path / "one", KEY), RangeLog(tmp_path / "two", KEY)
    one.note(range(0, 10), Counter({"steps": 5, "groups: 1": 6, "groups: 7": 4}), {})
    two.note(range(20, 30), Counter({"steps": 7, "groups: 2": 10, "with adapters": 3}), {})
    two.note(range(25, 35), Counter({"steps": 100}), {33: "I3: tokens"})
    found = totals([tmp_path / "one", tmp_path / "two"])
    total = found[KEY]
    assert total.seeds == {*range(10), *range(20, 30)}
    assert total.counters["steps"] == 12
    assert total.failures == {33: "I3: tokens"}, "what failed is told, whether its range counts or not"
    text = describe(found, {KEY})
    assert "20 seeds (0 to 9, 20 to 29; worlds by groups: 6 of 1, 10 of 2, 4 of 7; 3 with adapters)" in text
    assert "12 steps, 1 violations" in text
    assert "(this checkout)" in text
    assert "seed 33: I3: tokens" in text


def test_other_code_and_other_worlds_do_not_add_up(tmp_path: Path) -> None:
    path = tmp_path / "log"
    others = [replace(KEY, package="changed"), replace(KEY, worlds="changed"), replace(KEY, kind="7")]
    for key in (KEY, *others):
        RangeLog(path, key).note(range(10), Counter(), {})
    assert {key: len(total.seeds) for key, total in totals([path]).items()} == dict.fromkeys((KEY, *others), 10)


def test_what_is_left_is_cut_at_what_is_known(tmp_path: Path) -> None:
    log = RangeLog(tmp_path / "log", KEY)
    for first in (3, 20):
        log.note(range(first, first + 4), Counter(), {})
    known = RangeLog(tmp_path / "log", KEY).known
    left = list(known.left_of(range(0, 22), 6))
    assert left == [range(0, 3), range(7, 13), range(13, 19), range(19, 20)]
    assert list(known.left_of(range(3, 7), 6)) == []
    assert list(RangeLog(None, KEY).known.left_of(range(5), 10)) == [range(5)]


def test_a_run_that_was_stopped_goes_on_and_counts_the_same(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run_seeds(range(6), num_jobs=1, kind=Kind((2,)), log=path)
    whole = run_seeds(range(12), num_jobs=1, kind=Kind((2,)), log=path)
    (key, total), *others = totals([path]).items()
    assert not others
    assert key.kind == "2"
    assert total.seeds == set(range(12))
    assert whole.counters == total.counters == sum((run_seed(seed, Kind((2,))) for seed in range(12)), Counter())
    assert whole.counters["groups: 2"] == whole.num_seeds == 12
    again = run_seeds(range(12), num_jobs=1, kind=Kind((2,)), log=path)
    assert (again.num_seeds, again.counters) == (12, whole.counters)


def test_another_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('{"module": "scheduler"}\n')
    with pytest.raises(ValueError, match="journal is no log of ranges of seeds: a line has no 'package'"):
        totals([path])


@pytest.mark.parametrize("num_groups", [1, 2, 7])
def test_worlds_of_so_many_groups_are_the_drawn_ones_otherwise(num_groups: int) -> None:
    for seed in range(20):
        drawn, grouped = make_scenario(seed), make_scenario(seed, Kind((num_groups,)))
        assert len(grouped.windows) == num_groups
        assert grouped.windows[0] == 0
        assert grouped.arrivals == drawn.arrivals
        assert grouped.config == drawn.config
        assert num_groups == 1 or len(set(grouped.windows[1:])) == 1


def test_worlds_of_several_kinds_are_mixed_and_told_by_name() -> None:
    kind = Kind((2, 7), has_adapters=True)
    worlds = [make_scenario(seed, kind) for seed in range(40)]
    assert 10 < sum(len(world.windows) == 2 for world in worlds) < 30
    assert {len(world.windows) for world in worlds} == {2, 7}
    assert all(world.num_adapter_slots for world in worlds)
    assert any(not make_scenario(seed, Kind((2, 7))).num_adapter_slots for seed in range(40))
    names = [str(kind), str(Kind()), str(Kind((2,))), str(Kind(has_adapters=True))]
    assert names == ["2 or 7, all with adapters", "drawn", "2", "drawn, all with adapters"]
