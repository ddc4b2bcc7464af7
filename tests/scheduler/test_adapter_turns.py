"""Which slot is emptied for whom where adapters are more than slots: pytest tests/scheduler/test_adapter_turns.py"""

from __future__ import annotations

from typing import Any

import pytest

from cb_backend.contracts.request import Request, RequestStatus
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.engine.scheduler.adapter_turns import SLOTS_FOR_ONE, AdapterTurns
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN
from tests.fakes.engine import FakeEngine

LONG = 60  # tokens of an answer that does not end meanwhile


def besieged(**arguments: Any) -> tuple[FakeEngine, Request]:
    """Two slots, with `c` and then `a`, which has fewer tokens to come; and a request for `b` that has been passed so
    often that it is due."""
    engine = FakeEngine(
        **{"num_blocks": 1000, "max_num_seqs": 64, "num_adapter_slots": 2, "max_num_batched_tokens": 512, **arguments}
    )
    engine.add(1, 4, adapter=b"c", max_tokens=LONG)
    engine.add(0, 4, adapter=b"a", max_tokens=LONG - 20)
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


def test_where_somebody_before_it_joins_another_slot_is_emptied_beside() -> None:
    """Or those before it could keep the one for ever, while everybody else goes on."""
    engine, other = besieged()
    engine.add(40, 4, adapter=b"a", max_tokens=5 * LONG, scheduling=SchedulingParams(priority=-1))
    engine.step()
    joins, goes_on, base = engine.add(41, 4, adapter=b"a"), engine.add(42, 4, adapter=b"c"), engine.add(43, 4)
    engine.step()
    assert is_waiting(other, joins, goes_on, base) == [True, True, True, False]
    while other.status is RequestStatus.WAITING:
        assert goes_on.status is RequestStatus.WAITING
        engine.step()
    engine.run()


@pytest.mark.parametrize("kind", ["tenants", "strict", "aged"])
def test_those_who_come_before_it_without_end_do_not_starve_it(kind: str) -> None:
    """`a` is asked for by whoever comes before, by turns of tenants or for urgency, and `c` by all others."""
    engine = FakeEngine(
        num_blocks=2000, max_num_seqs=64, num_adapter_slots=2, max_num_batched_tokens=512,
        priority_aging_s=0 if kind == "strict" else 10,
    )  # fmt: skip
    first, second = SchedulingParams(priority=-1), SchedulingParams()
    if kind == "tenants":
        first, second = SchedulingParams(tenant="y"), SchedulingParams(tenant="x")
    other = None
    for turn in range(300):
        engine.scheduler.set_time(turn * 0.02)
        if turn % 3 == 0:
            engine.add(1000 + turn, 4, adapter=b"a", max_tokens=10, scheduling=first)
        if turn % 3 == 1:
            engine.add(1000 + turn, 4, adapter=b"c", max_tokens=12, scheduling=second)
        if turn == 20:
            other = engine.add(1, 4, adapter=b"b", scheduling=second)
        engine.step()
    assert other is not None
    assert other.status is not RequestStatus.WAITING
    engine.run()


def test_a_request_with_a_share_of_its_own_joins_what_is_emptied_for_others() -> None:
    engine, other = besieged(reserved_share=0.3, reserved_priority=-1)
    engine.scheduler.set_time(30.0)  # whoever comes now has a later place for all his urgency
    joins = engine.add(70, 4, adapter=b"a", scheduling=SchedulingParams(priority=-1))
    engine.step()
    assert is_waiting(other, joins) == [True, False]


def test_a_request_with_a_share_of_its_own_is_due_behind_the_first_too() -> None:
    """Others of its class ask for both adapters without end, and many older requests are before all of them."""
    engine = FakeEngine(num_blocks=4000, max_num_seqs=64, num_adapter_slots=2, max_num_batched_tokens=512,
                        reserved_share=0.5, reserved_priority=-1)  # fmt: skip
    urgent = SchedulingParams(priority=-1)
    for number in range(400):
        engine.add(1000 + number, 4, max_tokens=400)
    engine.scheduler.set_time(30.0)
    own = None
    for turn in range(150):
        engine.add(2000 + turn, 4, adapter=(b"a", b"c")[turn % 2], max_tokens=8, scheduling=urgent)
        if turn == 20:
            own = engine.add(1, 4, adapter=b"d", scheduling=urgent)
        engine.step()
    assert own is not None
    assert own.request_id not in [request.request_id for request in engine.scheduler._queue.first(8)]
    assert own.status is not RequestStatus.WAITING


def test_those_past_whom_it_has_a_share_apart_are_not_before_it() -> None:
    engine = FakeEngine(num_blocks=4000, max_num_seqs=64, num_adapter_slots=1, max_num_batched_tokens=512,
                        reserved_share=0.5, reserved_priority=-1)  # fmt: skip
    engine.add(0, 4, adapter=b"a", max_tokens=LONG)
    engine.step()
    older = engine.add(1, 400, adapter=b"a")
    engine.scheduler.set_time(30.0)
    own = engine.add(2, 4, adapter=b"d", scheduling=SchedulingParams(priority=-1))
    own.num_overtaken = MAX_OVERTAKEN
    turns = engine.scheduler._admission._turns
    turns.look([older, own])
    assert [turns.must_wait(request) for request in (older, own)] == [True, True]


def test_once_somebody_before_it_has_taken_the_free_slot_another_choice_is_made() -> None:
    engine, other = besieged()
    engine.step()  # and `a` takes nobody on
    urgent = engine.add(40, 4, adapter=b"d", max_tokens=5 * LONG, scheduling=SchedulingParams(priority=-1))
    while urgent.status is RequestStatus.WAITING:
        engine.step()
    joins, goes_on = engine.add(41, 4, adapter=b"c"), engine.add(42, 4, adapter=b"d")
    engine.step()
    assert is_waiting(other, joins, goes_on) == [True, True, False], "`c` has fewer tokens to come than `d`"


def test_of_many_slots_several_are_emptied_where_several_adapters_are_due() -> None:
    engine = FakeEngine(num_blocks=4000, max_num_seqs=128, num_adapter_slots=16, max_num_batched_tokens=1024)
    for number in range(16):
        engine.add(number, 4, adapter=bytes([100 + number]), max_tokens=LONG + number)
    engine.step()
    others = [engine.add(20 + number, 4, adapter=bytes([number + 1])) for number in range(3)]
    for number in range(MAX_OVERTAKEN + 1):
        engine.add(30 + number, 4, adapter=bytes([115]), max_tokens=2)
        engine.step()
    late = [engine.add(60 + number, 4, adapter=bytes([100 + number])) for number in range(16)]
    engine.step()
    assert is_waiting(*others) == [True] * 3
    assert SLOTS_FOR_ONE == 8
    assert is_waiting(*late) == [True] * 2 + [False] * 14
    engine.run()


def test_one_slot_of_many_is_emptied_where_one_adapter_is_due() -> None:
    engine = FakeEngine(num_blocks=4000, max_num_seqs=128, num_adapter_slots=16, max_num_batched_tokens=1024)
    for number in range(16):
        engine.add(number, 4, adapter=bytes([100 + number]), max_tokens=LONG + number)
    engine.step()
    for number in range(2):
        engine.add(20 + number, 4, adapter=b"b").num_overtaken = MAX_OVERTAKEN
    late = [engine.add(60 + number, 4, adapter=bytes([100 + number])) for number in range(16)]
    engine.step()
    assert is_waiting(*late) == [True] + [False] * 15


def test_a_prompt_that_is_still_computed_does_not_make_an_adapter_last_longer() -> None:
    """Its steps have many tokens."""
    engine = FakeEngine(num_blocks=1000, max_num_seqs=64, num_adapter_slots=2, max_num_batched_tokens=64)
    engine.add(0, 4, adapter=b"c", max_tokens=LONG)
    engine.step()
    engine.add(1, 900, adapter=b"a", max_tokens=10)
    engine.step()
    engine.add(2, 4, adapter=b"b").num_overtaken = MAX_OVERTAKEN
    joins, goes_on = engine.add(3, 4, adapter=b"a"), engine.add(4, 4, adapter=b"c")
    engine.step()
    assert is_waiting(joins, goes_on) == [True, False]


def test_behind_a_gate_another_may_have_taken_the_slot_that_was_emptied() -> None:
    """Who has begun starts there without a look at who is next."""
    engine, other = besieged()
    engine.step()  # and `a` takes nobody on
    turns, adapters = engine.scheduler._admission._turns, engine.scheduler._parts.adapters
    engine.scheduler.gate.close()
    while adapters.is_used(b"a"):
        engine.step()
    adapters.take(b"d")
    joins = engine.add(41, 4, adapter=b"d")
    turns.look([other, joins])
    assert turns.must_wait(joins), "it has none to come, so its slot is the next"


def test_a_less_urgent_request_does_not_pass_who_waits_for_a_slot() -> None:
    engine, other = besieged()
    base = engine.add(40, 4, scheduling=SchedulingParams(priority=1))
    adapted = engine.add(41, 4, adapter=b"c", scheduling=SchedulingParams(priority=1))
    for _ in range(3):
        engine.step()
    assert is_waiting(other, base, adapted) == [True, True, True]


def test_one_far_behind_keeps_nobody_waiting_for_all_its_urgency() -> None:
    """Its place is later than that of those who are looked at: a slot is emptied for it when it is one of them."""
    engine, other = besieged()
    for number in range(40, 52):
        engine.add(number, 4, adapter=b"b")
    engine.scheduler.set_time(11.0)
    urgent = engine.add(60, 4, adapter=b"d", scheduling=SchedulingParams(priority=-1))
    late = engine.add(61, 4, adapter=b"c")
    engine.step()
    assert is_waiting(other, urgent, late) == [True, True, False]


def test_whoever_leaves_the_queue_leaves_the_slot_to_the_others() -> None:
    engine, other = besieged()
    joins = engine.add(40, 4, adapter=b"a")
    engine.step()
    assert is_waiting(joins) == [True]
    engine.scheduler.cancel(other.request_id)
    engine.step()
    assert is_waiting(joins) == [False]
    for number in range(50, 60):
        engine.add(number, 4, adapter=b"b")
    far = engine.add(60, 4, adapter=b"a")
    engine.step()
    assert is_waiting(far) == [False], "from any place"


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


def test_without_slots_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(AdapterTurns, "look")
    engine = FakeEngine()
    engine.add(0, 4)
    engine.run()
