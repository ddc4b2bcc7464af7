"""The prefix cache under traffic: the longest hit first within bounds, and a reset without a restart."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cb_backend.contracts.request import Request
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.scheduler.admission import LOOKAHEAD
from cb_backend.kv_cache.block_pool import BlockPool
from cb_backend.kv_cache.manager import KVCacheManager
from tests.fakes.engine import FakeEngine

SHARED = list(range(100, 140))  # ten blocks of four


def joined(engine: FakeEngine) -> list[int]:
    return [row.request_id for plan in engine.plans for row in plan.joined]


def warm_engine(**arguments: int) -> FakeEngine:
    engine = FakeEngine(num_blocks=200, max_num_seqs=1, **arguments)
    engine.add(0, [*SHARED, 1], max_tokens=1)
    engine.run()
    return engine


def test_the_longest_hit_goes_first() -> None:
    engine = warm_engine()
    engine.add(1, 20, max_tokens=1)
    engine.add(2, [*SHARED[:20], 5], max_tokens=1)
    engine.add(3, [*SHARED, 5], max_tokens=1)
    engine.run()
    assert joined(engine)[1:] == [3, 2, 1]


def test_a_hit_of_a_few_blocks_more_changes_nothing() -> None:
    engine = warm_engine()
    engine.add(1, 20, max_tokens=1)
    engine.add(2, [*SHARED[:12], 5], max_tokens=1)
    engine.run()
    assert joined(engine)[1:] == [1, 2]


def test_i10_hits_pass_nobody_more_often_than_documented() -> None:
    engine = warm_engine()
    cold = engine.add(1, 20, max_tokens=1)
    for number in range(2, 60):
        engine.add(number, [*SHARED, number], max_tokens=1)
    engine.run()
    assert joined(engine).index(1) == 1 + 16
    assert cold.num_overtaken == 16


@pytest.mark.parametrize("other", [SchedulingParams(priority=1), SchedulingParams(tenant="b")])
def test_nobody_passes_the_more_urgent_or_another_tenants_turn(other: SchedulingParams) -> None:
    engine = warm_engine()
    engine.add(1, 20, max_tokens=1)
    engine.add(2, [*SHARED, 5], max_tokens=1, scheduling=other)
    engine.run()
    assert joined(engine)[1] == 1 or other.tenant


def make_request(number: int, tokens: list[int], params: TokenRules | None = None) -> Request:
    return Request(number, np.array(tokens, np.int32), len(tokens), params or TokenRules(), (), 200)


@pytest.mark.parametrize("seed", range(20))
def test_findable_blocks_are_those_that_are_found(seed: int) -> None:
    rng = random.Random(seed)
    kv = KVCacheManager(40, 4)
    waiting: list[Request] = []
    running: list[Request] = []
    for number in range(20):
        tokens = [*SHARED[: rng.randint(0, 40)], *(rng.randint(0, 3) for _ in range(rng.randint(1, 9)))]
        params = TokenRules(prompt_logprobs=0 if rng.random() < 0.2 else None)
        waiting.append(make_request(number, tokens, params))
        if rng.random() < 0.5:
            kv.get_computed_blocks(waiting[-1])  # it was tried while nobody waited beside it
        for request in rng.sample(waiting, rng.randint(0, len(waiting))):
            num_found = len(kv.get_computed_blocks(request)[0])
            assert kv.num_findable_blocks(request) == num_found
            assert [kv.has_findable_blocks(request, n) for n in range(1, 13)] == [n <= num_found for n in range(1, 13)]
        if rng.random() < 0.4:
            continue
        request = waiting.pop(rng.randrange(len(waiting)))  # never empty: one comes a turn, and one leaves at most
        found = kv.get_computed_blocks(request)[0]
        if kv.allocate_slots(request, len(request.token_ids), found) is not None:
            kv.cache_full_blocks(request, request.token_ids, len(request.token_ids))
            running.append(request)
        if rng.random() < 0.5 and running:
            kv.free(running.pop(rng.randrange(len(running))))


@pytest.mark.parametrize("length", [1, 36, 37, 38, 39, 40])
def test_the_last_token_is_not_findable_as_it_is_computed_in_any_case(length: int) -> None:
    kv = KVCacheManager(40, 4)
    first = make_request(1, SHARED)
    assert kv.allocate_slots(first, 40) is not None
    kv.cache_full_blocks(first, first.token_ids, 40)
    request = make_request(2, SHARED[:length])
    assert kv.num_findable_blocks(request) == (length - 1) // 4 == len(kv.get_computed_blocks(request)[0])


def test_prompts_that_share_nothing_are_looked_for_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the queue: a start looks at the eight that wait beside, which may be thousands of times a second."""
    num_looks = 0
    plain = BlockPool.has_digest

    def has_digest(pool: BlockPool, digest: bytes) -> bool:
        nonlocal num_looks
        num_looks += 1
        return plain(pool, digest)

    monkeypatch.setattr(BlockPool, "has_digest", has_digest)
    engine = warm_engine()
    num_looks = 0
    for number in range(1, 33):
        engine.add(number, 40, max_tokens=1)
    engine.run()
    assert 0 < num_looks <= 32 * LOOKAHEAD


def test_who_finds_nothing_because_it_may_not_passes_nobody() -> None:
    engine = warm_engine()
    engine.add(1, 20, max_tokens=1)
    engine.add(2, [*SHARED, 5], max_tokens=1, prompt_logprobs=0)
    engine.run()
    assert joined(engine)[1:] == [1, 2]


def test_what_a_request_generates_is_found_though_its_hits_were_counted_while_it_waited() -> None:
    engine = warm_engine()
    engine.add(1, [*SHARED, 1, 2, 3], max_tokens=10)
    engine.add(2, 20, max_tokens=1)
    engine.run()
    again = engine.add(3, [*SHARED, 1, 2, 3, *engine.tokens[1], 9], max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 52, "all but the last of its tokens, in blocks of four"


# ---- reset --------------------------------------------------------------------------------------------------------


def test_after_a_reset_nothing_from_before_is_found() -> None:
    engine = warm_engine()
    num_cached = engine.kv.pool.num_cached_blocks
    assert engine.scheduler.stats().num_reset_blocks == 0
    assert engine.scheduler.reset_prefix_cache() == num_cached > 0
    assert engine.scheduler.stats().num_reset_blocks == num_cached
    request = engine.add(1, [*SHARED, 1], max_tokens=1)
    engine.run()
    assert request.num_cached_tokens == 0
    again = engine.add(2, [*SHARED, 1], max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 40, "what was computed since is found"


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_who_runs_through_a_reset_goes_on_and_leaves_nothing_to_find(run_ahead: int) -> None:
    engine = FakeEngine(num_blocks=200, run_ahead=run_ahead)
    engine.add(1, SHARED, max_tokens=40)
    for _ in range(10):
        engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.tokens[1] == list(range(10, 50))
    assert engine.kv.pool.num_cached_blocks == 0


def test_a_swapped_request_is_computed_again_after_a_reset() -> None:
    engine = FakeEngine(num_blocks=16, num_host_blocks=16, max_num_seqs=2)
    engine.scheduler._swap.fixed_cost_tokens = 0
    engine.add(1, 20, max_tokens=30)
    second = engine.add(2, 20, max_tokens=30)
    while not second.num_swaps:
        engine.step()
    engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.stats().num_free_host_blocks == 16
    engine.run()
    assert engine.scheduler.stats().num_swapped_in == 0
    assert engine.tokens[2] == list(range(10, 40))


def test_nobody_waits_for_a_prefix_that_a_reset_has_made_useless() -> None:
    engine = FakeEngine(num_blocks=200, max_num_batched_tokens=16)
    engine.add(1, SHARED, max_tokens=2)
    engine.step()
    engine.add(2, [*SHARED, 9], max_tokens=2)
    engine.step()
    assert joined(engine) == [1], "it waits"
    engine.scheduler.reset_prefix_cache()
    engine.step()
    assert joined(engine) == [1, 2]
    engine.run()
