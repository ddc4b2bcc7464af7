"""A thousand random scenarios hold every invariant, and really contain the situations they are meant to contain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cb_backend.kv_cache.manager import KVCacheManager
from cb_backend.support.fault_points import POINTS
from tests.simulation.draw import make_scenario
from tests.simulation.nth_failure import points_failing, rich_scenario
from tests.simulation.scenario import Scenario
from tests.simulation.shrink import CASES, failure_of, keep, shrink
from tests.simulation.sweep import run_seeds
from tests.simulation.world import World

NUM_SCENARIOS = 600


def test_random_scenarios_hold_and_contain_what_they_should() -> None:
    sweep = run_seeds(range(NUM_SCENARIOS))
    assert not sweep.failures, (
        f"python -m tests.simulation.run --start {min(sweep.failures)} --seeds 1: {sweep.failures}"
    )
    assert sweep.num_seeds == NUM_SCENARIOS
    assert not sweep.missing(), "too rare (found, wanted)"


@pytest.mark.parametrize("path", sorted(CASES.glob("*.json")), ids=lambda path: path.stem)
def test_scenarios_that_once_failed(path: Path) -> None:
    World(Scenario.load(path)).run()


@pytest.mark.parametrize("point", POINTS)
def test_f10_the_first_failures_at_each_point_are_survived(point: str) -> None:
    num_runs, broken = points_failing(point, index=2, most=3)
    assert not broken
    assert num_runs > 1, "the point is never reached"


def test_a_scenario_is_the_same_after_it_was_kept(tmp_path: Path) -> None:
    for seed in range(20):
        scenario = make_scenario(seed)
        assert Scenario.load(keep(scenario, tmp_path)) == scenario


def test_a_scenario_runs_the_same_way_every_time() -> None:
    for seed in range(4):
        assert World(make_scenario(seed)).run() == World(make_scenario(seed)).run()


def test_a_bug_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of other salts are found: the simulation must notice, and two short requests must suffice to show it."""
    find = KVCacheManager.get_computed_blocks

    def saltless(self: KVCacheManager, request):
        salt, request.cache_salt = request.cache_salt, b""
        request.block_hashes.clear()
        found = find(self, request)
        request.cache_salt = salt
        request.block_hashes.clear()
        return found

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", saltless)
    failing = next(seed for seed in range(300) if failure_of(make_scenario(seed)) is not None)
    small = shrink(make_scenario(failing), most_runs=150)
    assert len(small.arrivals) <= 3
    monkeypatch.undo()
    assert failure_of(small) is None


def test_without_faults_the_rich_world_ends_well() -> None:
    for index in range(4):
        found = World(replace(rich_scenario(index), faults=())).run()
        assert found["preemptions"] > 0
        assert found["engine deaths"] == 0
