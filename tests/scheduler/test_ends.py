"""How a request ends in the scheduler: by a stop id, its length, a cancel or a failure; what ran ahead is dropped."""

from __future__ import annotations

import pytest

from cb_backend.contracts.request import FinishReason, RequestStatus
from cb_backend.contracts.scheduling import SchedulingParams
from tests.fakes.engine import FakeEngine
from tests.scheduler.test_scheduler import computed


def test_a_stop_id_ends_the_request_and_is_part_of_the_output() -> None:
    engine = FakeEngine()
    engine.add(1, 5, stop_ids=(99, 12))
    engine.run()
    assert engine.tokens[1] == [10, 11, 12]
    assert engine.reasons[1] == FinishReason.STOP


def test_a_stop_id_does_not_end_the_request_before_min_tokens() -> None:
    engine = FakeEngine(script=lambda _, index: 7)
    engine.add(1, 5, stop_ids=(7,), min_tokens=4)
    engine.run()
    assert engine.tokens[1] == [7, 7, 7, 7]
    assert engine.reasons[1] == FinishReason.STOP


def test_a_least_number_of_tokens_beyond_all_bounds_is_one_that_no_stop_id_reaches() -> None:
    engine = FakeEngine(script=lambda _, index: 7)
    engine.add(1, 5, stop_ids=(7,), min_tokens=2**31, max_tokens=6)
    engine.run()
    assert engine.reasons[1] == FinishReason.LENGTH


def test_a_stop_id_stays_when_one_with_more_of_them_joins() -> None:
    engine = FakeEngine()
    engine.add(1, 5, stop_ids=(13,))
    engine.step()
    engine.add(2, 5, stop_ids=(98, 99, 12))
    engine.run()
    assert engine.tokens == {1: [10, 11, 12, 13], 2: [10, 11, 12]}


@pytest.mark.parametrize("run_ahead", [0, 1, 4])
def test_a_stop_found_late_drops_what_ran_ahead(run_ahead: int) -> None:
    engine = FakeEngine(run_ahead=run_ahead)
    engine.add(1, 5, stop_ids=(12,), max_tokens=30)
    engine.add(2, 5, max_tokens=12)
    engine.run()
    assert engine.tokens == {1: [10, 11, 12], 2: list(range(10, 22))}
    assert engine.runner.num_computed[1] == 5 + 2, "the runner ends a row by itself: nothing is computed in vain"


@pytest.mark.parametrize("run_ahead", [0, 1, 4])
def test_running_ahead_never_passes_a_length_limit(run_ahead: int) -> None:
    engine = FakeEngine(run_ahead=run_ahead)
    engine.add(1, 5, max_tokens=3)
    engine.run()
    assert engine.runner.num_computed[1] == 5 + 2


def test_a_request_that_was_cancelled_waits_like_any_other_when_it_is_sent_again() -> None:
    engine = FakeEngine()
    request = engine.add(1, 5)
    engine.scheduler.cancel(1)
    engine.scheduler.add_request(request)
    assert request.status is RequestStatus.WAITING
    engine.run()
    assert engine.tokens[1] == list(range(10, 18))


@pytest.mark.parametrize("has_started", [True, False])
def test_a_cancelled_request_keeps_no_grammar_though_its_deadline_still_remembers_it(has_started: bool) -> None:
    engine = FakeEngine()
    request = engine.add(1, 5, scheduling=SchedulingParams(timeout_ms=60_000))
    request.guide = object()
    if has_started:
        engine.step()
    assert engine.scheduler.num_guided == has_started
    assert engine.scheduler.cancel(1)
    assert engine.scheduler.num_guided == 0
    assert len(engine.scheduler._deadlines) == 1
    assert request.guide is None


def test_a_failed_row_ends_its_request_alone_and_is_not_cached() -> None:
    engine = FakeEngine()
    engine.add(1, 9)
    engine.add(2, 9, max_tokens=4)
    engine.runner.failing.add(1)
    engine.run()
    assert (engine.tokens[1], engine.reasons[1]) == ([], FinishReason.ERROR)
    assert (engine.tokens[2], engine.reasons[2]) == ([10, 11, 12, 13], FinishReason.LENGTH)
    engine.add(3, [1] * 9)
    assert computed(engine.step()) == [0]
    engine.add(4, [2] * 9)
    assert computed(engine.step()) == [9, 8]


def test_blocks_computed_before_the_failing_step_are_not_reused_either() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    engine.add(1, 13)
    engine.step()  # two blocks computed, without a token that could have shown that the numbers are bad
    assert engine.kv.pool.num_cached_blocks == 2
    engine.runner.failing.add(1)
    engine.run()
    assert engine.reasons[1] == FinishReason.ERROR
    engine.add(2, [1] * 13)
    assert computed(engine.step()) == [0]


@pytest.mark.parametrize("failing", ["oldest", "newest"])
def test_a_failed_step_ends_its_requests_and_no_other(failing: str) -> None:
    engine = FakeEngine(run_ahead=1)
    engine.runner.is_delayed = False
    engine.add(1, 5, max_tokens=9)
    engine.launch()
    engine.add(2, 5, max_tokens=9)
    engine.launch()
    plan, _ = engine.in_flight.popleft() if failing == "oldest" else engine.in_flight.pop()
    output = engine.scheduler.fail_step(plan.step_id)
    engine.take(output)
    engine.scheduler.check_integrity()
    ended = {1} if failing == "oldest" else {1, 2}
    assert set(output.request_ids.tolist()) == ended
    assert set(output.finish_reasons.tolist()) == {FinishReason.ERROR}
    engine.run()
    assert engine.tokens.get(2) == ([] if 2 in ended else list(range(10, 19)))
