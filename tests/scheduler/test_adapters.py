"""Who may start where adapters have fewer slots than names: pytest tests/scheduler/test_adapters.py"""

from __future__ import annotations

import pytest

from cb_backend.contracts.request import FinishReason, RequestStatus
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.step import NO_ADAPTER
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN
from tests.fakes.engine import FakeEngine


def engine_with(num_adapter_slots: int, **arguments: int) -> FakeEngine:
    return FakeEngine(**{"num_blocks": 400, "max_num_seqs": 32, "num_adapter_slots": num_adapter_slots, **arguments})


def most_adapters(engine: FakeEngine) -> int:
    """That rows of one plan have used, by the plans' own words."""
    slot_of: dict[int, int] = {}
    most = 0
    for plan in engine.plans:
        slot_of.update({row.slot: row.adapter for row in plan.joined})
        most = max(most, len({slot_of[slot] for slot in plan.slots.tolist()} - {NO_ADAPTER}))
    return most


def test_rows_are_told_the_slot_of_their_adapter_and_loads_come_once() -> None:
    engine = engine_with(2)
    for number, adapter in enumerate((b"a", b"b", b"a", b"")):
        engine.add(number, 5, adapter=adapter)
    plan = engine.step()
    assert plan is not None
    loads = dict(plan.adapter_loads)
    assert sorted(loads.values()) == [b"a", b"b"]
    assert [loads.get(row.adapter, b"") for row in plan.joined] == [b"a", b"b", b"a", b""]
    engine.run()
    assert sum(len(plan.adapter_loads) for plan in engine.plans) == 2
    stats = engine.scheduler.stats().adapters
    assert stats is not None
    assert (stats.num_loads, stats.num_resident, stats.max_loras) == (2, 2, 2)
    assert not engine.scheduler._parts.adapters._loading, "the step that loaded them has come back"


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_one_adapter_more_than_slots_waits_and_everybody_answers(run_ahead: int) -> None:
    engine = engine_with(2, run_ahead=run_ahead)
    for number in range(30):
        engine.add(number, 6, adapter=bytes([number % 3 + 1]), max_tokens=3 + number % 5)
    engine.run()
    assert set(engine.reasons.values()) == {FinishReason.LENGTH}
    assert len(engine.reasons) == 30
    assert most_adapters(engine) == 2


def test_many_heads_without_a_slot_do_not_keep_others_waiting() -> None:
    engine = engine_with(1)
    engine.add(0, 4, adapter=b"a", max_tokens=40)
    engine.step()
    for number in range(1, 20):
        engine.add(number, 4, adapter=b"b")
    last, base = engine.add(20, 4, adapter=b"a"), engine.add(21, 4)
    engine.step()
    assert last.status is RequestStatus.RUNNING
    assert base.status is RequestStatus.RUNNING


def test_a_stream_of_one_adapter_does_not_starve_another() -> None:
    """A, B, A, A, ...: one slot, and never a moment without a request of A."""
    engine = engine_with(1)
    engine.add(0, 4, adapter=b"a", max_tokens=6)
    engine.step()
    other = engine.add(1, 4, adapter=b"b")
    num_started = 0
    for number in range(2, 200):
        engine.add(number, 4, adapter=b"a", max_tokens=6)
        engine.step()
        if other.status is not RequestStatus.WAITING:
            break
        num_started += 1
    assert other.status is not RequestStatus.WAITING
    assert other.num_overtaken == MAX_OVERTAKEN
    assert num_started < 2 * MAX_OVERTAKEN + 10
    engine.run()


def test_a_more_urgent_head_takes_the_slot_of_the_adapter_with_the_fewest() -> None:
    engine = engine_with(2, num_blocks=100)
    first = [engine.add(number, 4, adapter=b"a", max_tokens=50) for number in range(3)]
    lonely = engine.add(3, 4, adapter=b"b", max_tokens=50)
    engine.step()
    urgent = engine.add(4, 4, adapter=b"c", scheduling=SchedulingParams(priority=-1))
    for _ in range(3):
        engine.step()
    assert urgent.status is RequestStatus.RUNNING
    assert lonely.status is RequestStatus.PREEMPTED
    assert {request.status for request in first} == {RequestStatus.RUNNING}
    engine.run()
    assert len(engine.tokens[3]) == 50
    assert most_adapters(engine) == 2


def test_all_of_an_adapter_give_way_in_one_step() -> None:
    engine = engine_with(1)
    low = [engine.add(number, 5, adapter=b"a", max_tokens=20) for number in range(3)]
    engine.step()
    engine.add(9, 5, adapter=b"b", max_tokens=2, scheduling=SchedulingParams(priority=-1))
    plan = engine.step()
    assert plan is not None
    assert [row.request_id for row in plan.joined] == [9]
    assert [request.num_preemptions for request in low] == [1, 1, 1]


def test_nobody_without_an_adapter_gives_way_for_one() -> None:
    engine = engine_with(1)
    engine.add(0, 5, adapter=b"a", max_tokens=20, scheduling=SchedulingParams(priority=-5))
    engine.add(1, 5, max_tokens=20)
    engine.step()
    engine.add(9, 5, adapter=b"b", max_tokens=2, scheduling=SchedulingParams(priority=-1))
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_an_equally_urgent_head_takes_nobodys_slot() -> None:
    engine = engine_with(1)
    running = engine.add(0, 4, adapter=b"a", max_tokens=20)
    engine.step()
    engine.add(1, 4, adapter=b"b")
    for _ in range(5):
        engine.step()
    assert running.num_preemptions == 0


def test_the_slot_of_a_cancelled_request_is_overwritten_only_when_its_steps_are_back() -> None:
    engine = engine_with(1, run_ahead=3)
    engine.add(0, 4, adapter=b"a", max_tokens=50)
    for _ in range(3):
        engine.launch()
    engine.scheduler.cancel(0)
    waiting = engine.add(1, 4, adapter=b"b")
    assert engine.launch() is None, "steps that read the slot are launched"
    while engine.in_flight:
        assert waiting.status is RequestStatus.WAITING
        engine.finish()
    plan = engine.launch()
    assert plan is not None
    assert [key for _, key in plan.adapter_loads] == [b"b"]
    engine.run()


def test_after_a_failed_load_the_adapter_is_loaded_again_and_its_other_users_start_over() -> None:
    engine = engine_with(2, run_ahead=2)
    engine.add(0, 4, adapter=b"a", max_tokens=9)
    failing = engine.launch()
    later = engine.add(1, 4, adapter=b"a", max_tokens=9)
    engine.add(2, 4, max_tokens=9)
    engine.launch()
    assert failing is not None
    engine.in_flight.popleft()
    engine.take(engine.scheduler.fail_step(failing.step_id))
    engine.runner.num_steps = 2
    assert engine.reasons[0] is FinishReason.ERROR
    assert later.status is RequestStatus.PREEMPTED, "nobody knows what it was computed with"
    engine.run()
    loads = [key for plan in engine.plans for _, key in plan.adapter_loads]
    assert loads == [b"a", b"a"]
    assert len(engine.tokens[1]) == len(engine.tokens[2]) == 9
    assert engine.scheduler.adapters_in_use() == set()


def test_without_adapters_plans_say_nothing_of_them() -> None:
    engine = FakeEngine()
    engine.add(0, 5)
    engine.run()
    assert not any(plan.adapter_loads for plan in engine.plans)
    assert all(row.adapter == NO_ADAPTER for plan in engine.plans for row in plan.joined)
    assert engine.scheduler.stats().adapters is None
