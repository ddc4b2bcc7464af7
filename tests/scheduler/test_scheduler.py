"""The scheduler, one situation at a time. Random mixtures of them are in tests/simulation."""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.contracts.config import MAX_RUN_AHEAD, EngineConfig
from cb_backend.contracts.errors import InvalidRequestError, UnavailableError
from cb_backend.contracts.request import FinishReason, Request
from cb_backend.contracts.step import StepPlan, StepResult
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.scheduler.scheduler import Scheduler
from cb_backend.kv_cache.manager import KVCacheManager
from cb_backend.study.static_admission import StaticAdmission
from tests.fakes.engine import FakeEngine


def scheduled(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return plan.num_tokens.tolist()


def computed(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return plan.first.tolist()


def test_a_request_is_prefilled_then_decoded_to_its_length() -> None:
    engine = FakeEngine()
    engine.add(1, 5, max_tokens=3)
    engine.run()
    assert [scheduled(plan) for plan in engine.plans] == [[5], [1], [1]]
    assert [plan.num_decode_rows for plan in engine.plans] == [0, 1, 1]
    assert engine.tokens[1] == [10, 11, 12]
    assert engine.reasons[1] == FinishReason.LENGTH


def test_decode_rows_come_before_prefill_rows() -> None:
    engine = FakeEngine()
    engine.add(1, 5)
    engine.step()
    engine.add(2, 6)
    plan = engine.step()
    assert plan is not None
    assert (scheduled(plan), plan.num_decode_rows) == ([1, 6], 1)


def test_a_steady_step_brings_nothing_but_arrays() -> None:
    engine = FakeEngine()
    for request_id in range(3):
        engine.add(request_id, 5)
    engine.step()
    plan = engine.step()
    assert plan is not None
    assert (plan.joined, plan.new_blocks.tolist(), scheduled(plan)) == ((), [], [1, 1, 1])
    assert plan.first.tolist() == [5, 5, 5]
    assert not any(array.flags.writeable for array in (plan.slots, plan.num_tokens, plan.wants)), (
        "the next has them too"
    )


def test_a_long_prompt_is_computed_in_chunks_beside_a_decode() -> None:
    engine = FakeEngine(max_num_batched_tokens=8, enable_prefix_caching=False)
    engine.add(1, 3, max_tokens=5)
    engine.step()
    engine.add(2, 20, max_tokens=2)
    plans = [engine.step() for _ in range(3)]
    assert [scheduled(plan) for plan in plans] == [[1, 7], [1, 7], [1, 6]]
    assert [plan.wants.tolist() for plan in plans if plan] == [[1, 0], [1, 0], [1, 1]]
    engine.run()
    assert engine.tokens == {1: [10, 11, 12, 13, 14], 2: [10, 11]}


def test_without_chunking_a_prompt_beyond_the_budget_runs_alone_and_decodes_take_turns() -> None:
    engine = FakeEngine(max_num_batched_tokens=8, enable_chunked_prefill=False)
    engine.add(1, 3, max_tokens=9)
    engine.step()
    engine.add(2, 20, max_tokens=1)
    engine.add(3, 21, max_tokens=1)
    assert [scheduled(engine.step()) for _ in range(4)] == [[20], [1], [21], [1]]
    engine.run()
    assert [len(engine.tokens[request_id]) for request_id in (1, 2, 3)] == [9, 1, 1]


@pytest.mark.parametrize(("num_tokens", "expected"), [(7, [[1, 7], [1]]), (8, [[8], [1]])])
def test_without_chunking_a_prompt_holds_up_the_decodes_if_it_does_not_just_fit_beside_them(
    num_tokens: int, expected: list[list[int]]
) -> None:
    engine = FakeEngine(max_num_batched_tokens=8, enable_chunked_prefill=False)
    engine.add(1, 3, max_tokens=9)
    engine.step()
    engine.add(2, num_tokens, max_tokens=1)
    assert [scheduled(engine.step()) for _ in range(2)] == expected


@pytest.mark.parametrize(("run_ahead", "num_steps"), [(0, 1), (2, 3), (None, 1 + MAX_RUN_AHEAD)])
def test_no_more_steps_are_launched_than_the_engine_may_run_ahead(run_ahead: int | None, num_steps: int) -> None:
    config = EngineConfig(model="fake", block_size=4, run_ahead=run_ahead)
    scheduler = Scheduler(config, KVCacheManager(101, 4), 1000)
    scheduler.add_request(Request(1, np.ones(5, np.int32), 5, TokenRules(), (), 100))
    assert [scheduler.schedule() is not None for _ in range(num_steps + 1)] == [True] * num_steps + [False]
    assert (scheduler.stats().num_host_blocks, scheduler.stats().adapters) == (0, None)


def test_the_queue_is_bounded() -> None:
    engine = FakeEngine(max_queue_size=2, max_num_seqs=1)
    for request_id in (1, 2, 3):
        engine.add(request_id, 5)
    with pytest.raises(UnavailableError, match=r"queue is full \(3 requests wait, max_queue_size is 2\); try again in"):
        engine.add(4, 5)
    assert engine.scheduler.num_waiting == 3


@pytest.mark.parametrize("prompt", [[], [1] * 1000])
def test_a_prompt_that_leaves_no_room_is_refused(prompt: list[int]) -> None:
    engine = FakeEngine(num_blocks=1000)
    with pytest.raises(InvalidRequestError):
        engine.add(1, prompt)
    assert not engine.scheduler.has_unfinished()


def test_an_id_in_use_is_refused() -> None:
    engine = FakeEngine()
    engine.add(1, 5)
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add(1, 5)
    engine.step()
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add(1, 5)


def test_a_held_request_that_fits_is_seen_when_it_is_released_though_the_queue_was_stuck() -> None:
    engine = FakeEngine(num_blocks=20, enable_prefix_caching=False)
    engine.add(1, 40, max_tokens=30)
    engine.step()
    engine.add(2, 60, max_tokens=1)
    engine.add(3, 5, is_held=True, max_tokens=1)
    for _ in range(3):
        engine.step()
    engine.scheduler.release(3)
    plan = engine.step()
    assert plan is not None
    assert [row.request_id for row in plan.joined] == [3]


def test_results_must_come_in_order_and_in_shape() -> None:
    engine = FakeEngine(run_ahead=1)
    engine.add(1, 5)
    for _ in range(2):
        engine.launch()

    def result(step_id: int, num_rows: int) -> StepResult:
        flags = np.ones(num_rows, np.uint8)
        return StepResult(step_id, np.ones((num_rows, 1), np.int32), flags, 0 * flags)

    with pytest.raises(ValueError, match="step 1 is due"):
        engine.scheduler.update_from_output(result(2, 1))
    with pytest.raises(ValueError, match="is not in flight"):
        engine.scheduler.fail_step(3)
    with pytest.raises(ValueError, match="had 1 rows"):
        engine.scheduler.update_from_output(result(1, 2))


def test_cached_tokens_are_told_with_the_first_token() -> None:
    engine = FakeEngine()
    engine.add(1, [5] * 9, max_tokens=1)
    engine.run()
    engine.add(2, [5] * 9, max_tokens=2)
    engine.launch()
    assert engine.finish().num_cached_tokens == {2: 8}
    engine.launch()
    assert engine.finish().num_cached_tokens == {}


@pytest.mark.parametrize(("limit", "learned"), [(20.0, [0.5]), (None, [])])
def test_how_long_steps_take_is_learned_by_the_time_that_is_told(limit: float | None, learned: list[float]) -> None:
    """Where there is a limit: nobody else asks for it."""
    engine = FakeEngine(max_itl_ms=limit)
    engine.add(1, 5, max_tokens=1)
    engine.scheduler.set_time(1.0)
    engine.launch()
    engine.scheduler.set_time(1.5)
    engine.finish()
    assert [seconds for _, seconds in engine.scheduler._pace._unlearned] == learned


def test_stats_count_what_happened() -> None:
    engine = FakeEngine()
    engine.add(1, [5] * 9, max_tokens=2)
    engine.run()
    engine.add(2, [5] * 9, max_tokens=3)
    engine.add(3, 4)
    engine.step()
    engine.scheduler.cancel(3)
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_cancelled) == (1, 0, 1)
    assert (stats.num_prompt_tokens, stats.num_cached_prompt_tokens) == (22, 8)
    assert stats.num_output_tokens == 2 + 2 + 1
    assert (stats.num_blocks, stats.num_free_blocks) == (100, 97)


def test_static_batching_admits_nobody_until_all_have_ended() -> None:
    engine = FakeEngine(policy=StaticAdmission, max_num_seqs=2)
    for request_id, max_tokens in ((1, 2), (2, 6), (3, 1)):
        engine.add(request_id, 5, max_tokens=max_tokens)
    running = []
    while engine.scheduler.has_unfinished():
        plan = engine.step()
        assert plan is not None
        running.append(plan.num_rows)
    assert running == [2, 2, 1, 1, 1, 1, 1]
    assert [row.request_id for plan in engine.plans for row in plan.joined] == [1, 2, 3]


def test_a_static_batch_is_limited_by_the_full_length_of_its_requests() -> None:
    engine = FakeEngine(num_blocks=10, policy=StaticAdmission)
    for request_id in (1, 2, 3):
        engine.add(request_id, 4, max_tokens=12)  # 4 blocks each at the end
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
