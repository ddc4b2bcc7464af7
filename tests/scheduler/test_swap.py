"""Preempted requests whose blocks wait in host memory. What the copies must carry is checked by runner H in simulation.

P1 no swap room aborts the engine · P3 new prefills always win, swapped ones never return
"""

from __future__ import annotations

from typing import Any

import pytest

from cb_backend.contracts.request import Request
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.step import StepPlan
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.kv_cache.swap_space import FIXED_COST_TOKENS
from tests.fakes.engine import FakeEngine
from tests.fakes.hash_rule import HashModel
from tests.fakes.runners import HashRunner


def growing_pair(num_host_blocks: int, run_ahead: int = 0) -> tuple[FakeEngine, Request]:
    """Two requests of 100 tokens in 60 blocks of 4: the second is preempted when 240 tokens are used up."""
    engine = FakeEngine(
        num_blocks=60, num_host_blocks=num_host_blocks, run_ahead=run_ahead, enable_prefix_caching=False
    )
    engine.add(1, 100, max_tokens=40)
    return engine, engine.add(2, 100, max_tokens=40)


def swaps(engine: FakeEngine) -> tuple[list[StepPlan], list[StepPlan]]:
    return [plan for plan in engine.plans if plan.copies.out], [plan for plan in engine.plans if plan.copies.back]


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_preempted_request_returns_from_host_memory_and_computes_one_token(run_ahead: int) -> None:
    engine, second = growing_pair(num_host_blocks=100, run_ahead=run_ahead)
    engine.run()
    assert (second.num_preemptions, second.num_swaps) == (1, 1)
    out, back = swaps(engine)
    assert len(out) == len(back) == 1
    copied_out, copied_in = dict(out[0].copies.out), {host: device for device, host in back[0].copies.back}
    assert sorted(copied_out.values()) == sorted(copied_in)
    row = back[0].joined[0]
    assert [copied_in[host] for _, host in out[0].copies.out] == list(row.block_ids[: len(copied_in)]), "in their order"
    index = back[0].slots.tolist().index(row.slot)
    assert back[0].first[index] == len(row.token_ids) - 1
    assert back[0].num_tokens[index] == 1
    assert engine.tokens == {1: list(range(10, 50)), 2: list(range(10, 50))}
    stats = engine.scheduler.stats()
    assert (stats.num_swapped_out, stats.num_swapped_in, stats.num_free_host_blocks) == (1, 1, 100)
    assert not engine.scheduler._swap._on_trust, "the step that copied it out has come back"


def test_p1_without_room_a_victim_is_computed_again() -> None:
    engine, second = growing_pair(num_host_blocks=5)
    engine.run()
    assert (second.num_preemptions, second.num_swaps) == (1, 0)
    assert swaps(engine) == ([], [])
    assert engine.tokens[2] == list(range(10, 50))
    assert engine.scheduler.stats().num_free_host_blocks == 5


def test_short_requests_are_cheaper_to_compute_again() -> None:
    engine = FakeEngine(num_blocks=10, num_host_blocks=100, enable_prefix_caching=False)
    requests = [engine.add(number, 8, max_tokens=20) for number in (1, 2)]
    engine.run()
    assert FIXED_COST_TOKENS > 8 + 20
    assert [request.num_preemptions for request in requests] == [0, 1]
    assert swaps(engine) == ([], [])


@pytest.mark.parametrize(
    ("num_tokens", "num_host_blocks", "is_moved"),
    [
        # Moving n tokens costs as much as computing FIXED_COST_TOKENS + n / 5.
        (FIXED_COST_TOKENS * 5 // 4, 100, False),
        (FIXED_COST_TOKENS * 5 // 4 + 1, 100, True),
        (100, 25, True),
        (100, 24, False),
    ],
)
def test_a_victim_is_moved_where_that_is_cheaper_and_there_is_just_room(
    num_tokens: int, num_host_blocks: int, is_moved: bool
) -> None:
    engine = FakeEngine(num_host_blocks=num_host_blocks, max_num_seqs=1)
    victim = engine.add(1, num_tokens, scheduling=SchedulingParams(priority=1))
    engine.step()
    engine.add(2, 4, max_tokens=1)
    engine.run()
    assert (victim.num_preemptions, victim.num_swaps) == (1, is_moved)
    assert engine.tokens[1] == list(range(10, 18))


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_prompt_that_is_not_complete_is_computed_again(run_ahead: int) -> None:
    engine = hash_engine(run_ahead, max_num_batched_tokens=64, enable_prefix_caching=False)
    victim = engine.add(1, 200, max_tokens=4, scheduling=SchedulingParams(priority=1))
    engine.step()
    engine.add(2, 4, max_tokens=1)
    engine.run()
    assert (victim.num_preemptions, victim.num_swaps) == (1, 0)
    assert engine.tokens == {1: lone_output([1] * 200, 4), 2: lone_output([2] * 4, 1)}


def test_p3_swapped_requests_return_before_newcomers() -> None:
    engine = FakeEngine(num_blocks=100, num_host_blocks=400, enable_prefix_caching=False, max_num_seqs=8)
    first = [engine.add(number, 96, max_tokens=60) for number in range(4)]
    swapped_seen: set[int] = set()
    for number in range(10, 150):
        engine.add(number, 8, max_tokens=2)
        engine.step()
        swapped = [request for request in first if engine.scheduler._swap.num_tokens(request)]
        swapped_seen |= {request.request_id for request in swapped}
        if engine.plans[-1].joined and swapped:
            last = max(row.request_id for row in engine.plans[-1].joined)
            assert last < 10, "a newcomer started while a swapped request waits"
    assert len(swapped_seen) >= 2
    engine.run()
    assert all(engine.tokens[request.request_id] == list(range(10, 70)) for request in first)


def test_p3_a_cancel_while_swapped_frees_the_host_blocks() -> None:
    engine, second = growing_pair(num_host_blocks=100)
    while not second.num_swaps:
        engine.step()
    stats = engine.scheduler.stats()
    assert stats.num_free_host_blocks < 100
    assert (stats.num_swapped, stats.num_waiting) == (1, 1)
    assert engine.scheduler.cancel(2)
    stats = engine.scheduler.stats()
    assert (stats.num_free_host_blocks, stats.num_swapped) == (100, 0)
    engine.run()
    assert engine.tokens[1] == list(range(10, 50))


def test_nothing_kept_in_host_memory_outlives_a_reset_of_the_prefix_cache() -> None:
    engine, second = growing_pair(num_host_blocks=100)
    while not second.num_swaps:
        engine.step()
    engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.stats().num_free_host_blocks == 100
    engine.run()
    assert swaps(engine)[1] == [], "it is computed again"
    assert engine.tokens[2] == list(range(10, 50))


def test_what_a_failed_step_was_to_copy_is_computed_again() -> None:
    engine, second = growing_pair(num_host_blocks=100)
    while not second.num_swaps:
        engine.launch()
        if not second.num_swaps:
            engine.finish()
    plan, _ = engine.in_flight.pop()
    assert plan.copies.out
    engine.take(engine.scheduler.fail_step(plan.step_id))
    engine.scheduler.check_integrity()
    assert engine.scheduler._swap.num_tokens(second) == 0
    engine.run()
    assert swaps(engine)[1] == []
    assert engine.tokens[2] == list(range(10, 50))


def hash_engine(run_ahead: int, **arguments: Any) -> FakeEngine:
    """One slot, 100 blocks of 4 and as many in host memory; a token depends on what is in all blocks before it."""
    engine = FakeEngine(num_host_blocks=100, run_ahead=run_ahead, max_num_seqs=1, **arguments)
    engine.runner = HashRunner(HashModel(vocab_size=1000), 101, 4, is_delayed=True, num_host_blocks=100)
    return engine


def lone_output(prompt: list[int], max_tokens: int) -> list[int]:
    params = TokenRules(max_tokens=max_tokens)
    return HashModel(vocab_size=1000).lone_output(prompt, b"", params, (), len(prompt) + max_tokens)
