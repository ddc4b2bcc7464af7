"""What must stay free when somebody starts: how much running requests and the newcomer are expected to grow."""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.engine.scheduler.admission import ContinuousAdmission
from tests.fakes.engine import FakeEngine


def test_before_anything_is_known_a_usual_length_is_expected_but_no_more_than_is_allowed() -> None:
    for max_tokens, num_running in ((4, 8), (400, 5)):
        engine = FakeEngine(num_blocks=40, enable_prefix_caching=False, admission_reserve=0.5)
        for number in range(8):
            engine.add(number, 12, max_tokens=max_tokens)
        engine.step()
        assert engine.scheduler.num_running == num_running


@pytest.mark.parametrize(
    ("mean", "expected"), [(5.0, [5 + 2 * 6 / 3**0.5] * 3), (100.0, [37.0, 40.0, 28.0])], ids=["likely", "allowed"]
)
def test_growth_is_what_is_expected_of_each_after_what_it_has_generated_but_no_more_than_is_allowed(
    mean: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(num_blocks=400, windows=(0, 8), admission_reserve=2.0)
    engine.add(1, 8, max_tokens=40)
    for _ in range(3):
        engine.step()
    engine.add(2, 8, max_tokens=40)
    engine.step()
    preempted = engine.add(3, 8, is_held=True, max_tokens=30)
    preempted.token_ids = np.append(preempted.token_ids, [10, 11])
    policy = engine.scheduler._admission._policy
    assert isinstance(policy, ContinuousAdmission)
    asked: list[list[float]] = []

    def still_to_come(num_generated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        asked.append(num_generated.tolist())
        return np.full(3, mean), np.full(3, 6.0)

    def growth(held: np.ndarray, to_come: np.ndarray, _: float) -> int:
        asked.extend([held.tolist(), to_come.tolist()])
        return 7

    monkeypatch.setattr(policy._lengths, "still_to_come", still_to_come)
    monkeypatch.setattr(engine.kv, "growth", growth)
    assert policy.num_reserved_blocks(preempted) == 2 * 2 + 7, "a row of two groups for each that runs"
    assert asked == [[3, 0, 2], [11, 8, 10], pytest.approx(expected)]


def test_the_growth_of_less_urgent_requests_does_not_count() -> None:
    engine = FakeEngine(num_blocks=64, enable_prefix_caching=False, admission_reserve=0.5)
    for _ in range(50):
        engine.scheduler._parts.lengths.add(200, 400)
    engine.add(1, 4, max_tokens=200, scheduling=SchedulingParams(priority=1))
    engine.step()
    engine.add(2, 100, max_tokens=100, scheduling=SchedulingParams(priority=1))
    engine.step()
    assert engine.scheduler.num_waiting == 1, "at its end both would hold 76 blocks"
    engine.add(3, 100, max_tokens=100)
    engine.step()
    assert [row.request_id for plan in engine.plans for row in plan.joined] == [1, 3]


@pytest.mark.parametrize("windows", [(0,), (0, 8)])
def test_the_most_that_may_be_reserved_is_no_less_than_what_is(windows: tuple[int, ...]) -> None:
    engine = FakeEngine(num_blocks=400, windows=windows, admission_reserve=10.0, reserved_share=0.1)
    for length in (1, 1000) * 20:  # so different that each may run to its limit
        engine.scheduler._parts.lengths.add(length, 1000)
    for number in range(4):
        engine.add(number, 8, max_tokens=40)
    held = engine.add(9, 8, is_held=True, max_tokens=40)
    policy = engine.scheduler._admission._policy
    for _ in range(30):
        engine.step()
        assert policy.most_reserved_blocks(held) >= policy.num_reserved_blocks(held) > 4 * len(windows)
