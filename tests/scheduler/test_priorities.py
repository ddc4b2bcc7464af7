"""Priorities, timeouts and the bounded queue: who starts first, who gives way, who is sent away.

O11 priorities that are no small integers · O8 preempted in the step it was scheduled in · I10 bounded waiting and
bounded preemption · wishes 33 to 36: the engine knows the priority, refuses beyond a limit, frees what timed out
"""

from __future__ import annotations

import random

import pytest

from cb_backend.contracts.errors import InvalidRequestError, UnavailableError
from cb_backend.contracts.request import FinishReason, RequestStatus
from cb_backend.contracts.scheduling import SchedulingParams
from tests.fakes.engine import FakeEngine


def at(priority: int) -> SchedulingParams:
    return SchedulingParams(priority=priority)


def joined(engine: FakeEngine) -> list[int]:
    """Request ids in the order of their starts."""
    return [row.request_id for plan in engine.plans for row in plan.joined]


def test_wish_33_the_lowest_priority_value_starts_first() -> None:
    engine = FakeEngine(max_num_seqs=1)
    for request_id, priority in ((1, 2), (2, 0), (3, -1), (4, 0), (5, 1)):
        engine.add(request_id, 4, max_tokens=2, scheduling=at(priority))
    engine.run()
    assert joined(engine) == [3, 2, 4, 5, 1]


def test_o11_equal_priority_and_arrival_keep_their_order() -> None:
    engine = FakeEngine(max_num_seqs=2)
    for request_id in (7, 3, 5):  # three answers of one request arrive together
        engine.add(request_id, [1, 2, 3], max_tokens=2, scheduling=at(1))
    engine.run()
    assert joined(engine) == [7, 3, 5]


@pytest.mark.parametrize("priority", [2**64, 101, -101, "high", True, 1.5])
def test_o11_a_priority_that_is_no_small_integer_is_refused(priority: object) -> None:
    with pytest.raises(InvalidRequestError, match="priority must be"):
        SchedulingParams(priority=priority).check()  # type: ignore[arg-type]


def test_i10_a_request_is_overtaken_only_by_what_comes_within_its_priority_times_the_aging_time() -> None:
    engine = FakeEngine(max_num_seqs=1, priority_aging_s=10)
    engine.scheduler.set_time(100)
    engine.add(1, 4, max_tokens=2)
    engine.step()
    engine.add(2, 4, max_tokens=2, scheduling=at(3))
    engine.scheduler.set_time(129.9)
    engine.add(3, 4, max_tokens=2, scheduling=at(0))
    engine.scheduler.set_time(130.1)
    engine.add(4, 4, max_tokens=2, scheduling=at(0))
    engine.run()
    assert joined(engine) == [1, 3, 2, 4]


def test_without_aging_no_waiting_makes_up_for_priority() -> None:
    engine = FakeEngine(max_num_seqs=1, priority_aging_s=0)
    engine.add(1, 4, max_tokens=9)
    engine.step()
    engine.add(2, 4, max_tokens=2, scheduling=at(1))
    engine.scheduler.set_time(1e6)
    engine.add(3, 4, max_tokens=2)
    engine.run()
    assert joined(engine) == [1, 3, 2]


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_a_running_request_gives_its_slot_to_a_more_urgent_one_and_loses_no_token(run_ahead: int) -> None:
    engine = FakeEngine(max_num_seqs=2, run_ahead=run_ahead)
    first, second = (engine.add(request_id, 4, max_tokens=20, scheduling=at(1)) for request_id in (1, 2))
    for _ in range(5):
        engine.step()
    engine.add(3, 4, max_tokens=3)
    engine.step()
    assert engine.scheduler.num_running == 2
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.PREEMPTED), "the later one gives way"
    engine.run()
    assert engine.tokens == {1: list(range(10, 30)), 2: list(range(10, 30)), 3: [10, 11, 12]}
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_a_running_request_gives_its_blocks_to_a_more_urgent_one(run_ahead: int) -> None:
    engine = FakeEngine(num_blocks=14, run_ahead=run_ahead, enable_prefix_caching=False)
    low = [engine.add(request_id, 15, max_tokens=9, scheduling=at(1)) for request_id in (1, 2)]
    for _ in range(4):
        engine.step()
    engine.add(3, 21, max_tokens=3)
    engine.run()
    assert [request.num_preemptions for request in low] == [0, 1], "one victim is enough"
    assert joined(engine) == [1, 2, 3, 2]
    assert engine.tokens == {1: list(range(10, 19)), 2: list(range(10, 19)), 3: [10, 11, 12]}


def test_nobody_gives_way_where_it_would_not_help() -> None:
    engine = FakeEngine(num_blocks=10, enable_prefix_caching=False)
    engine.add(1, 15, max_tokens=20)
    engine.add(2, 4, max_tokens=4, scheduling=at(1))
    engine.step()
    engine.add(3, 30, max_tokens=2)  # 8 blocks: not even the slot and the blocks of the second would do
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
    assert joined(engine) == [1, 2, 3]


def test_nobody_gives_way_to_an_equal() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add(1, 4, max_tokens=9, scheduling=at(-2))
    engine.step()
    engine.add(2, 4, max_tokens=2, scheduling=at(-2))
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0


def test_nobody_gives_way_to_an_equal_because_a_less_urgent_one_runs_too() -> None:
    engine = FakeEngine(max_num_seqs=2, priority_aging_s=10, enable_prefix_caching=False)
    engine.add(1, 4, max_tokens=60, scheduling=at(1))  # will have waited long enough to be no victim
    engine.add(2, 40, max_tokens=1, scheduling=SchedulingParams(tenant="served"))
    while 2 not in engine.reasons:
        engine.step()
    engine.scheduler.set_time(100)
    engine.add(3, 4, scheduling=SchedulingParams(tenant="served"))
    engine.add(4, 4, scheduling=SchedulingParams(tenant="new"))  # later in place, but it is this tenant's turn
    engine.run()
    assert joined(engine) == [2, 1, 4, 3]
    assert engine.scheduler.num_preemptions == 0


def test_a_slot_that_is_about_to_be_free_costs_nobody_his_place() -> None:
    engine = FakeEngine(max_num_seqs=2, run_ahead=2)
    engine.add(1, 4, max_tokens=4, scheduling=at(1))
    engine.add(2, 4, max_tokens=9, scheduling=at(1))
    for _ in range(2):
        engine.step()  # four steps are launched, so the first has nothing left to compute
    engine.add(3, 4, max_tokens=2)
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_i10_nobody_is_preempted_more_often_than_documented(run_ahead: int) -> None:
    engine = FakeEngine(num_blocks=12, max_num_seqs=3, run_ahead=run_ahead, priority_aging_s=0)
    patient = engine.add(1, 6, max_tokens=30, scheduling=at(5))
    for number in range(2, 60):  # urgent ones all the time
        engine.add(number, 9, max_tokens=4, scheduling=at(number % 3))
        for _ in range(3 + run_ahead):
            engine.step()
    assert 3 <= patient.num_preemptions <= 4
    assert run_ahead or patient.num_preemptions == 4, "the situation was not reached"
    engine.run()
    assert engine.tokens[1] == list(range(10, 40))
    assert len(engine.reasons) == 59


@pytest.mark.parametrize("seed", range(30))
def test_o8_with_random_priorities_a_victim_has_no_row_in_the_plan_that_preempts_it(seed: int) -> None:
    rng = random.Random(seed)
    engine = FakeEngine(
        num_blocks=rng.randint(7, 14), run_ahead=rng.randint(0, 2), block_size=rng.choice((1, 2)), max_num_seqs=3
    )
    requests = []
    while len(requests) < 20 or engine.scheduler.has_unfinished():
        if len(requests) < 20 and rng.random() < 0.6:
            size, number = rng.randint(1, 3), len(requests)
            priority = at(rng.randint(-2, 2))
            requests.append(engine.add(number, size, max_tokens=rng.randint(1, 4), scheduling=priority))
        preempted_before = [request.num_preemptions for request in requests]
        plan = engine.launch()
        victims = {r.request_id for r, n in zip(requests, preempted_before, strict=True) if r.num_preemptions > n}
        if plan is not None:
            owners = {request.slot: request.request_id for request in requests}
            assert victims.isdisjoint(owners[slot] for slot in plan.slots.tolist())
            assert plan.total_tokens == plan.num_tokens.sum()
        if engine.in_flight and (plan is None or len(engine.in_flight) > engine.run_ahead):
            engine.finish()
    for request in requests:
        assert engine.tokens[request.request_id] == [10 + i for i in range(request.params.max_tokens)]


def test_wish_35_the_queue_is_bounded_in_tokens_as_well() -> None:
    engine = FakeEngine(num_blocks=10, max_num_seqs=1, max_queue_tokens=30)
    engine.add(1, 20, max_tokens=9)
    engine.step()
    engine.add(2, 20)
    with pytest.raises(UnavailableError, match=r"20 tokens wait, 11 more would pass max_queue_tokens \(30\)"):
        engine.add(3, 11)
    engine.add(4, 10)
    assert engine.scheduler.stats().num_refused == 1


def test_a_burst_at_an_idle_engine_is_not_refused_below_its_limits() -> None:
    engine = FakeEngine(num_blocks=100, max_num_seqs=8, max_queue_size=2, max_queue_tokens=10)
    for request_id in range(10):
        engine.add(request_id, 20)
    with pytest.raises(UnavailableError):
        engine.add(10, 20)
    engine.run()
    assert len(engine.reasons) == 10


def test_a_refusal_says_when_to_come_back() -> None:
    engine = FakeEngine(max_num_seqs=1, max_queue_size=100)
    for request_id in range(101):
        engine.add(request_id, 4, max_tokens=1)
    for second in range(40):  # one starts every two seconds
        engine.scheduler.set_time(2.0 * second)
        engine.step()
    for request_id in range(200, 240):
        engine.add(request_id, 4)
    with pytest.raises(UnavailableError, match=r"try again in about 2\d s"):
        engine.add(300, 4)


def test_wish_36_a_request_that_waits_too_long_ends_and_frees_its_place() -> None:
    engine = FakeEngine(max_num_seqs=1, queue_timeout_ms=5000)
    engine.add(1, 4, max_tokens=50)
    engine.step()
    waiting = engine.add(2, 4, scheduling=SchedulingParams(queue_timeout_ms=250))
    engine.add(3, 4)
    engine.scheduler.set_time(0.249)
    assert engine.scheduler.expire() == []
    engine.scheduler.set_time(0.25)
    expired = engine.scheduler.expire()
    assert expired == [(2, "timed out after 250 ms in the queue (queue_timeout_ms); try again later")]
    assert (waiting.status, engine.scheduler.num_waiting) == (RequestStatus.FINISHED_ABORTED, 1)
    engine.scheduler.set_time(5.0)
    assert [request_id for request_id, _ in engine.scheduler.expire()] == [3], "the first runs: it does not wait"
    assert (engine.scheduler.stats().num_timed_out, engine.scheduler.stats().num_cancelled) == (2, 0)
    engine.run()
    assert engine.reasons == {1: FinishReason.LENGTH}


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_wish_36_a_request_that_runs_too_long_ends_and_frees_its_blocks(run_ahead: int) -> None:
    engine = FakeEngine(run_ahead=run_ahead)
    engine.add(1, 4, max_tokens=50, scheduling=SchedulingParams(timeout_ms=1000))
    engine.add(2, 4, max_tokens=9)
    for _ in range(3):
        engine.step()
    engine.scheduler.set_time(1.0)
    assert engine.scheduler.expire() == [(1, "timed out after 1000 ms (timeout_ms) before its last token")]
    assert not engine.scheduler.cancel(1)
    engine.run()
    assert engine.reasons == {2: FinishReason.LENGTH}
    assert engine.tokens[1] == [10, 11, 12]


def test_a_preempted_request_has_started_and_keeps_to_its_whole_timeout_only() -> None:
    engine = FakeEngine(num_blocks=4, enable_prefix_caching=False, max_num_seqs=2, queue_timeout_ms=10, timeout_ms=9000)
    engine.add(1, 4, max_tokens=10)
    younger = engine.add(2, 4, max_tokens=10)
    while younger.num_preemptions == 0:
        engine.step()
    engine.scheduler.set_time(8.9)
    assert engine.scheduler.expire() == []
    engine.scheduler.set_time(9.0)
    assert sorted(request_id for request_id, _ in engine.scheduler.expire()) == [1, 2]
    assert not engine.scheduler.has_unfinished() or engine.in_flight


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    engine = FakeEngine(max_num_seqs=8)
    for request_id in range(1100):
        engine.add(request_id, 1, max_tokens=1, scheduling=SchedulingParams(timeout_ms=10**8))
        engine.step()
    assert len(engine.scheduler._deadlines) <= 1024
