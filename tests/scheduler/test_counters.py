"""T1: counters only grow, whatever happens in one step, and an error in the statistics stops nobody."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cb_backend.contracts.messages import EngineStats
from tests.fakes.engine import FakeEngine
from tests.simulation.nth_failure import rich_scenario
from tests.simulation.scenario import Fault
from tests.simulation.world import World

GAUGES = {
    "adapters",
    "num_running",
    "num_waiting",
    "num_swapped",
    "num_free_blocks",
    "num_free_host_blocks",
    "steps",
    "rest",
    "engine_pid",
}


def counts(stats: EngineStats) -> dict[str, int]:
    return {name: getattr(stats, name) for name in stats.__struct_fields__ if name not in GAUGES}


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_t1_counters_only_grow_through_preemption_hits_swaps_and_cancels(run_ahead: int) -> None:
    engine = FakeEngine(num_blocks=20, num_host_blocks=8, run_ahead=run_ahead, max_num_seqs=6)
    engine.scheduler._swap.fixed_cost_tokens = 0
    rng, before = random.Random(3), counts(engine.scheduler.stats())
    for number in range(60):
        shared = [7] * rng.choice((8, 12, 16))
        engine.add(number, [*shared, number], max_tokens=rng.randint(1, 30))
        for _ in range(rng.randint(1, 4)):
            engine.step()
        if number % 7 == 0:
            engine.scheduler.cancel(number)
        after = counts(engine.scheduler.stats())
        assert all(after[name] >= before[name] >= 0 for name in before)
        before = after
    engine.run()
    final = engine.scheduler.stats()
    assert final.num_preemptions > 0
    assert final.num_cached_prompt_tokens > 0
    assert final.num_swapped_in > 0
    assert final.num_cancelled > 0
    assert final.num_output_tokens == sum(map(len, engine.tokens.values())), "no token is counted twice"


def test_t1_an_error_in_the_statistics_stops_nobody() -> None:
    world = World(replace(rich_scenario(0), faults=(Fault("process.stats", 1, times=1000),)))
    found = world.run()
    assert world.fired["process.stats"] > 0
    assert found["engine deaths"] == 0
    assert found["ended: length"] > 0
