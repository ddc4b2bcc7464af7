"""Admission under pressure: fewer preemptions where requests grow, nothing held back where they do not.

What running requests are going to need is expected from the lengths of those that have ended.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.request import Request
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.engine.scheduler.admission import ContinuousAdmission
from cb_backend.engine.scheduler.stats import MAX_SAMPLES, OutputLengths, most_growth
from tests.fakes.engine import FakeEngine

STOP = 99


def preempted_share(reserve: float, num_blocks: int) -> float:
    """Of 100 requests whose outputs are long beside the cache, and end at their own lengths: how many are preempted."""
    rng = random.Random(5)
    lengths = [min(60, int(rng.lognormvariate(2.8, 0.9)) + 1) for _ in range(100)]
    engine = FakeEngine(
        num_blocks=num_blocks, block_size=4, max_num_seqs=32, max_num_batched_tokens=256, enable_prefix_caching=False,
        admission_reserve=reserve, script=lambda number, index: STOP if index + 1 == lengths[number] else 1,
    )  # fmt: skip
    requests = []
    for number in range(100):
        requests.append(engine.add(number, rng.randint(4, 24), max_tokens=60, stop_ids=(STOP,)))
        engine.step()
    engine.run()
    return sum(request.num_preemptions > 0 for request in requests) / len(requests)


def test_preemptions_are_rare_at_the_default_and_common_without_the_expectation() -> None:
    assert preempted_share(-10.0, num_blocks=40) > 0.15, "the load is not what it should be"
    assert preempted_share(0.5, num_blocks=40) <= 0.05, "though the cache holds only two of the longest"


def test_what_is_still_to_come_is_that_of_requests_that_ran_as_long() -> None:
    lengths = OutputLengths()
    for value in [10] * 30 + [100] * 10:  # more than what was believed at first
        lengths.add(value, 1000)
    mean, deviation = lengths.still_to_come(np.array([0, 9, 10, 50, 100]))
    assert mean.tolist() == [32.5, 23.5, 90.0, 50.0, 100.0]
    assert deviation[2:].tolist() == [0.0, 0.0, 100.0], "all alike; beyond all that is known as much again"
    assert deviation[0] == pytest.approx(np.std([10] * 30 + [100] * 10))


def test_only_the_last_lengths_count() -> None:
    lengths = OutputLengths()
    for value in [500] * MAX_SAMPLES + [20] * MAX_SAMPLES:
        lengths.add(value, 1000)
    assert lengths.still_to_come(np.array([0]))[0].tolist() == [20.0]


@pytest.mark.parametrize("seed", range(30))
def test_most_growth_is_that_of_the_worst_moment(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 12))
    held, to_come = rng.integers(1, 100, count).astype(float), rng.integers(0, 100, count).astype(float)
    worst = max(
        sum(have + moment for have, more in zip(held, to_come, strict=True) if more >= moment)
        for moment in range(int(to_come.max()) + 1)
    )
    assert most_growth(held, to_come) == worst - held.sum()


def test_nobody_grows_where_nobody_runs() -> None:
    assert most_growth(np.zeros(0), np.zeros(0)) == 0.0


@pytest.mark.parametrize("reserve", [-10.1, 10.1, float("nan")])
def test_a_reserve_out_of_range_is_refused(reserve: float) -> None:
    with pytest.raises(ConfigError, match="admission_reserve"):
        FakeEngine(admission_reserve=reserve)


def starts(num_blocks: int, **arguments: object) -> tuple[list[list[int]], int]:
    """Who started in each step of a traffic of two classes, and how many were preempted."""
    rng = random.Random(num_blocks)
    lengths = [min(60, int(rng.lognormvariate(2.8, 0.9)) + 1) for _ in range(60)]
    engine = FakeEngine(
        num_blocks=num_blocks, max_num_seqs=16, max_num_batched_tokens=64, **arguments,
        script=lambda number, index: STOP if index + 1 == lengths[number] else 1,
    )  # fmt: skip
    for number in range(60):
        scheduling = SchedulingParams(priority=rng.choice([-1, 0]))
        engine.add(number, rng.randint(1, 20), max_tokens=60, stop_ids=(STOP,), scheduling=scheduling)
        engine.step()
    engine.run()
    return [[row.request_id for row in plan.joined] for plan in engine.plans], engine.scheduler.num_preemptions


@pytest.mark.parametrize("num_blocks", [40, 100, 400])
@pytest.mark.parametrize(
    "arguments", [{"admission_reserve": 0.5}, {"admission_reserve": 3.0, "reserved_share": 0.4}, {"run_ahead": 3}]
)
def test_looking_first_whether_memory_is_enough_for_all_decides_nothing(
    num_blocks: int, arguments: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_it_is = starts(num_blocks, **arguments)
    most, tried = ContinuousAdmission.most_reserved_blocks, []

    def checked(policy: ContinuousAdmission, request: Request) -> int:
        tried.append(most(policy, request))
        assert tried[-1] >= policy.num_reserved_blocks(request)
        return 1_000_000  # so that it is always worked out

    monkeypatch.setattr(ContinuousAdmission, "most_reserved_blocks", checked)
    assert starts(num_blocks, **arguments) == as_it_is
    assert len(tried) >= 60


def test_nobody_starts_in_a_step_in_which_blocks_were_short() -> None:
    engine = FakeEngine(num_blocks=21, enable_prefix_caching=False, priority_aging_s=10)
    engine.add(1, 36, max_tokens=30)
    engine.add(2, 8, is_held=True, max_tokens=1, scheduling=SchedulingParams(priority=1))
    engine.scheduler.set_time(20)
    victim = engine.add(3, 40, max_tokens=30)  # later in place than 2
    engine.step()
    engine.scheduler.release(2)
    while not victim.num_preemptions:
        plan = engine.step()
        assert plan is not None
        assert 2 not in [row.request_id for row in plan.joined]
    plan = engine.step()
    assert plan is not None
    assert [row.request_id for row in plan.joined] == [2]
