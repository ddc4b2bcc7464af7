"""The part of slots and blocks that only urgent requests may start with."""

from __future__ import annotations

import pytest

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.scheduling import SchedulingParams
from tests.fakes.engine import FakeEngine


def urgent(priority: int = -1) -> SchedulingParams:
    return SchedulingParams(priority=priority)


def joined(engine: FakeEngine) -> list[int]:
    return [row.request_id for plan in engine.plans for row in plan.joined]


def test_reserved_slots_are_left_for_the_urgent_and_nobody_is_preempted_for_them() -> None:
    engine = FakeEngine(num_blocks=400, max_num_seqs=8, reserved_share=0.25)
    for number in range(10):
        engine.add(number, 4, max_tokens=40)
    engine.step()
    assert engine.scheduler.num_running == 6
    engine.add(100, 4, max_tokens=4, scheduling=urgent())
    engine.add(101, 4, max_tokens=4, scheduling=urgent(-7))
    engine.step()
    assert engine.scheduler.num_running == 8
    engine.run()
    assert joined(engine)[6:8] == [101, 100]
    assert engine.scheduler.num_preemptions == 0


def test_of_two_slots_one_can_be_reserved_and_of_one_none() -> None:
    for num_slots in (2, 1):
        engine = FakeEngine(max_num_seqs=num_slots, reserved_share=0.99)
        for number in range(3):
            engine.add(number, 1, max_tokens=9)
        engine.step()
        assert engine.scheduler.num_running == 1


def test_reserved_blocks_are_left_for_the_urgent() -> None:
    engine = FakeEngine(num_blocks=40, reserved_share=0.5, enable_prefix_caching=False)
    for number in range(8):
        engine.add(number, 20, max_tokens=2)
    engine.step()
    assert engine.scheduler.num_running == 4, "20 blocks of 40"
    engine.add(100, 44, max_tokens=4, scheduling=urgent())
    engine.step()
    assert 100 in joined(engine)
    assert engine.scheduler.num_preemptions == 0


def test_what_the_urgent_hold_of_their_share_is_not_kept_free_twice() -> None:
    engine = FakeEngine(num_blocks=40, reserved_share=0.5, enable_prefix_caching=False)
    engine.add(100, 76, max_tokens=3, scheduling=urgent())
    for number in range(8):
        engine.add(number, 15, max_tokens=2)
    engine.step()
    assert engine.scheduler.num_running == 1 + 4


def test_the_urgent_pass_however_long_the_queue_is_and_however_old_others_are() -> None:
    engine = FakeEngine(num_blocks=400, max_num_seqs=4, reserved_share=0.25, priority_aging_s=1.0)
    requests = [engine.add(number, 4, max_tokens=60) for number in range(50)]
    engine.step()
    engine.scheduler.set_time(1000.0)
    for number in range(100, 130):
        engine.add(number, 4, max_tokens=1, scheduling=urgent())
        engine.step()
    assert len(engine.reasons) == 30, "each of them at once"
    assert not any(request.num_overtaken for request in requests), "it was not theirs"


def test_without_a_share_an_old_request_comes_first() -> None:
    engine = FakeEngine(num_blocks=400, max_num_seqs=4, priority_aging_s=1.0)
    for number in range(20):
        engine.add(number, 4, max_tokens=10)
    engine.step()
    engine.scheduler.set_time(1000.0)
    engine.add(100, 4, max_tokens=1, scheduling=urgent())
    engine.run()
    assert joined(engine)[-1] == 100


@pytest.mark.parametrize("num_blocks", [10, 11])
def test_d3_a_request_larger_than_what_is_left_runs_when_nothing_else_does(num_blocks: int) -> None:
    engine = FakeEngine(num_blocks=num_blocks, max_num_seqs=1, reserved_share=0.9)
    engine.add(1, 36, max_tokens=3)
    engine.add(2, 36, max_tokens=3)
    engine.run()
    assert len(engine.reasons) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("reserved_share", -0.1), ("reserved_share", 1.0), ("reserved_share", float("nan")), ("reserved_priority", 100)],
)
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        FakeEngine(**{name: value})
