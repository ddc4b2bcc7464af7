"""Admission under pressure: fewer preemptions where requests grow, nothing held back where they do not.

The reserve is a part of the growth that is expected of running requests, learned from those that have ended.
"""

from __future__ import annotations

import random

import pytest

from cb_backend.errors import ConfigError
from cb_backend.scheduling_params import SchedulingParams
from tests.fakes.engine import FakeEngine


def preempted_share(reserve: float) -> float:
    """Of 300 requests whose outputs are long beside the cache: how many are preempted."""
    engine = FakeEngine(
        num_blocks=300, block_size=16, max_num_seqs=64, max_num_batched_tokens=512, enable_prefix_caching=False,
        admission_reserve=reserve,
    )  # fmt: skip
    rng = random.Random(5)
    requests = [engine.add(number, rng.randint(16, 120), max_tokens=200) for number in range(300)]
    engine.run()
    return sum(request.num_preemptions > 0 for request in requests) / len(requests)


def test_a_reserve_keeps_preemptions_rare() -> None:
    without, some, all_of_it = (preempted_share(reserve) for reserve in (0.0, 0.25, 1.0))
    assert without > 0.35, "the load is not what it should be"
    assert some < 0.7 * without
    assert all_of_it < 0.25 * without


def test_nothing_is_held_back_before_anything_is_known() -> None:
    engine = FakeEngine(num_blocks=40, admission_reserve=1.0, enable_prefix_caching=False)
    for number in range(8):
        engine.add(number, 12, max_tokens=400)
    engine.step()
    assert engine.scheduler.num_running == 8


def test_what_is_expected_follows_what_requests_use() -> None:
    engine = FakeEngine(num_blocks=400, script=lambda _, index: 99 if index == 9 else 1, max_num_seqs=4)
    for number in range(200):
        engine.add(number, 4, max_tokens=40, stop_ids=(99,))
    engine.run()
    assert engine.scheduler._results.output_fraction == pytest.approx(0.25, abs=0.01)


def test_the_growth_of_less_urgent_requests_does_not_count() -> None:
    engine = FakeEngine(num_blocks=64, admission_reserve=1.0, enable_prefix_caching=False)
    engine.scheduler._results.output_fraction = 1.0
    engine.add(1, 4, max_tokens=200, scheduling=SchedulingParams(priority=1))
    engine.step()
    engine.add(2, 100, max_tokens=4, scheduling=SchedulingParams(priority=1))
    engine.step()
    assert engine.scheduler.num_waiting == 1, "50 blocks are kept free for the first"
    engine.add(3, 100, max_tokens=4)
    engine.step()
    assert [row.request_id for plan in engine.plans for row in plan.joined] == [1, 3]


@pytest.mark.parametrize("reserve", [-0.1, 1.1, float("nan")])
def test_a_reserve_out_of_range_is_refused(reserve: float) -> None:
    with pytest.raises(ConfigError, match="admission_reserve"):
        FakeEngine(admission_reserve=reserve)
