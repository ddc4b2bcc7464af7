"""Which slot is emptied for whom where adapters are more than slots: pytest tests/scheduler/test_adapter_turns.py"""

from __future__ import annotations

from cb_backend.contracts.request import Request, RequestStatus
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN
from tests.fakes.engine import FakeEngine

LONG = 60  # tokens of an answer that does not end meanwhile


def besieged(**arguments: int) -> tuple[FakeEngine, Request]:
    """Two slots, with `a`, which has fewer tokens left, and `c`; and a request for `b` that has been passed so often
    that it is due."""
    engine = FakeEngine(
        **{"num_blocks": 1000, "max_num_seqs": 64, "num_adapter_slots": 2, "max_num_batched_tokens": 512, **arguments}
    )
    engine.add(0, 4, adapter=b"a", max_tokens=LONG - 20)
    engine.add(1, 4, adapter=b"c", max_tokens=LONG)
    engine.step()
    other = engine.add(2, 4, adapter=b"b")
    for number in range(MAX_OVERTAKEN):
        engine.add(10 + number, 4, adapter=b"c", max_tokens=2)
        engine.step()
    assert (other.status, other.num_overtaken) == (RequestStatus.WAITING, MAX_OVERTAKEN)
    return engine, other


def is_waiting(*requests: Request) -> list[bool]:
    return [request.status is RequestStatus.WAITING for request in requests]


def test_only_the_slot_that_is_free_first_is_emptied() -> None:
    """All others go on starting; it is the first that gets it."""
    engine, other = besieged()
    joins, goes_on, base = engine.add(40, 4, adapter=b"a"), engine.add(41, 4, adapter=b"c"), engine.add(42, 4)
    engine.step()
    assert is_waiting(joins, goes_on, base) == [True, False, False]
    while other.status is RequestStatus.WAITING:
        assert joins.status is RequestStatus.WAITING
        engine.add(100 + len(engine.plans), 4, adapter=b"c", max_tokens=2)
        engine.step()
    assert other.num_overtaken > MAX_OVERTAKEN + 5, "nobody else has waited"
    engine.run()
    assert len(engine.tokens[40]) == len(engine.tokens[2]) == 8


def test_whoever_waits_for_the_slot_that_is_emptied_keeps_nobody_waiting_however_often_he_is_passed() -> None:
    engine, other = besieged()
    joins = engine.add(40, 4, adapter=b"a")
    for number in range(MAX_OVERTAKEN + 3):
        request = engine.add(50 + number, 4, adapter=b"c", max_tokens=2)
        engine.step()
        assert is_waiting(other, joins, request) == [True, True, False]
    assert joins.num_overtaken > MAX_OVERTAKEN


def test_who_comes_before_the_one_that_is_due_may_join_all_the_same() -> None:
    engine, other = besieged()
    urgent = engine.add(40, 4, adapter=b"a", scheduling=SchedulingParams(priority=-1))
    engine.step()
    assert is_waiting(urgent, other) == [False, True]


def test_the_choice_stands_though_another_slot_would_be_free_first_by_now() -> None:
    """Who comes before the one that is due has made the answers of `a` the longer ones."""
    engine, other = besieged()
    engine.add(40, 4, adapter=b"a", max_tokens=5 * LONG, scheduling=SchedulingParams(priority=-1))
    engine.step()
    joins, goes_on = engine.add(41, 4, adapter=b"a"), engine.add(42, 4, adapter=b"c")
    engine.step()
    assert is_waiting(other, joins, goes_on) == [True, True, False]


def test_a_less_urgent_request_does_not_pass_who_waits_for_a_slot() -> None:
    engine, other = besieged()
    base = engine.add(40, 4, scheduling=SchedulingParams(priority=1))
    adapted = engine.add(41, 4, adapter=b"c", scheduling=SchedulingParams(priority=1))
    for _ in range(3):
        engine.step()
    assert is_waiting(other, base, adapted) == [True, True, True]


def test_nor_one_that_is_behind_those_who_are_looked_at() -> None:
    """Whose place is later than theirs for all its urgency, and whose adapter lacks a slot too."""
    engine, other = besieged()
    for number in range(40, 52):
        engine.add(number, 4, adapter=b"b")
    engine.scheduler.set_time(11.0)
    urgent = engine.add(60, 4, adapter=b"d", scheduling=SchedulingParams(priority=-1))
    late = engine.add(61, 4, adapter=b"c")
    engine.step()
    assert is_waiting(other, urgent, late) == [True, True, True]
    engine.scheduler.cancel(urgent.request_id)
    engine.step()
    assert is_waiting(other, late) == [True, False]


def test_whoever_leaves_the_queue_leaves_the_slot_to_the_others() -> None:
    engine, other = besieged()
    joins = engine.add(40, 4, adapter=b"a")
    engine.step()
    assert is_waiting(joins) == [True]
    engine.scheduler.cancel(other.request_id)
    engine.step()
    assert is_waiting(joins) == [False]


def test_a_cached_prefix_is_no_way_into_the_slot_that_is_emptied() -> None:
    engine, other = besieged(enable_prefix_caching=True)
    prompt = [7] * 40
    first = engine.add(40, prompt, adapter=b"c", max_tokens=2)
    first.cache_salt = b"a"  # as if `a` had computed it
    engine.step()
    engine.step()
    again = engine.add(41, [*prompt, 8], adapter=b"a")
    again.cache_salt = b"a"
    engine.step()
    assert is_waiting(other, again) == [True, True]
    engine.run()


def test_a_preempted_request_is_due_at_once() -> None:
    engine = FakeEngine(num_blocks=1000, max_num_seqs=64, num_adapter_slots=2)
    preempted = engine.add(0, 4, adapter=b"b", max_tokens=LONG, scheduling=SchedulingParams(priority=5))
    engine.add(1, 4, adapter=b"a", max_tokens=20, scheduling=SchedulingParams(priority=-1))
    engine.step()
    engine.add(2, 4, adapter=b"c", max_tokens=LONG, scheduling=SchedulingParams(priority=-1))
    engine.step()
    assert preempted.status is RequestStatus.PREEMPTED
    joins = engine.add(3, 4, adapter=b"a", scheduling=SchedulingParams(priority=5))
    goes_on = engine.add(4, 4, adapter=b"c", scheduling=SchedulingParams(priority=5))
    engine.step()
    assert is_waiting(joins, goes_on) == [True, False]
    engine.run()
    assert len(engine.tokens[0]) == LONG


def test_nobody_who_has_begun_waits_for_an_emptied_slot_behind_a_closed_gate() -> None:
    engine, other = besieged()
    engine.add(40, 4, adapter=b"a")
    engine.step()  # and `a` takes nobody on
    begun = engine.scheduler._table.by_id[0]
    engine.scheduler.gate.close()
    engine.scheduler._admission._preemption.start_over(begun.request_id)
    engine.step()
    assert begun.status is RequestStatus.RUNNING
    assert is_waiting(other) == [True]


def test_without_slots_nothing_is_looked_for() -> None:
    engine = FakeEngine()
    engine.add(0, 4)
    engine.run()
    assert not engine.scheduler._admission._turns._before
