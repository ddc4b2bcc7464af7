"""Who may start: borders of the rules by which requests pass each other, and what a look at a full engine costs."""

from __future__ import annotations

import pytest

from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.step import StepPlan
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN
from cb_backend.kv_cache.manager import MIN_COMING_BLOCKS
from cb_backend.study.static_admission import StaticAdmission
from tests.fakes.engine import FakeEngine

PREFIX = list(range(500, 1300))


def joined(engine: FakeEngine) -> list[int]:
    return [row.request_id for plan in engine.plans for row in plan.joined]


def start_of(plan: StepPlan | None) -> list[int]:
    return [] if plan is None else [row.request_id for row in plan.joined]


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_a_queue_that_cannot_start_is_not_tried_again_in_every_step(
    has_prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(num_blocks=20, enable_prefix_caching=has_prefix_cache)
    engine.add(1, 40, max_tokens=30)
    engine.step()
    engine.add(2, 60, max_tokens=1)
    tries = []
    allocate = engine.kv.allocate_slots

    def watched(request, *rest):  # type: ignore[no-untyped-def]
        if request.request_id == 2:
            tries.append(len(engine.plans))
        return allocate(request, *rest)

    monkeypatch.setattr(engine.kv, "allocate_slots", watched)
    for _ in range(20):
        engine.step()
    assert len(tries) == 1, "the running stream gave nothing back meanwhile"
    engine.run()
    assert joined(engine) == [1, 2]


def test_a_newcomer_that_fits_is_seen_though_the_queue_was_stuck() -> None:
    engine = FakeEngine(num_blocks=20, enable_prefix_caching=False)
    engine.add(1, 40, max_tokens=30)
    engine.step()
    engine.add(2, 60, max_tokens=1)
    for _ in range(3):
        engine.step()
    engine.add(3, 5, max_tokens=1)
    engine.step()
    assert joined(engine) == [1, 3]


def test_who_waits_no_longer_does_not_hold_up_those_behind() -> None:
    engine = FakeEngine(num_blocks=20, enable_prefix_caching=False)
    engine.add(1, 61, max_tokens=30)  # leaves four blocks, one of them to grow into
    engine.step()
    engine.add(2, 60, max_tokens=1)
    engine.add(3, 15, max_tokens=1)  # short beside 2, and needs four
    engine.add(4, 5, max_tokens=1)  # not short beside 3
    for _ in range(2):
        assert start_of(engine.step()) == []
    engine.scheduler.cancel(3)
    assert start_of(engine.step()) == [4]


def test_who_leaves_makes_way_though_no_more_blocks_are_free() -> None:
    # One block is kept free for every running request: with one request less, the same free blocks are enough.
    engine = FakeEngine(num_blocks=20, enable_prefix_caching=False)
    engine.add(1, 2, max_tokens=40)
    engine.add(2, 1, max_tokens=3)
    engine.step()
    engine.add(3, 17 * 4, max_tokens=1)
    while 2 not in engine.reasons:
        engine.step()
        assert joined(engine) == [1, 2]
    assert start_of(engine.launch()) == [3], "1 has just taken the block that 2 gave back"
    engine.finish()


def test_exactly_a_quarter_is_short() -> None:
    for length, passes in ((15, True), (16, False)):
        engine = FakeEngine(num_blocks=20, enable_prefix_caching=False)
        engine.add(1, 40, max_tokens=8)
        engine.step()
        engine.add(2, 60, max_tokens=1)
        engine.add(3, length, max_tokens=1)
        engine.step()
        assert joined(engine) == ([1, 3] if passes else [1])


@pytest.mark.parametrize("arguments", [{"enable_chunked_prefill": False}, {"policy": StaticAdmission}])
def test_nobody_passes_where_prompts_are_whole_or_batches_static(arguments: dict) -> None:
    engine = FakeEngine(num_blocks=20, enable_prefix_caching=False, max_num_batched_tokens=64, **arguments)
    engine.add(1, 40, max_tokens=8)
    engine.step()
    engine.add(2, 60, max_tokens=1)
    engine.add(3, 5, max_tokens=1)
    engine.run()
    assert joined(engine) == [1, 2, 3]


def test_the_longest_hit_is_looked_for_among_the_first_eight() -> None:
    for num_before, expected in ((7, 100), (8, 1)):
        engine = FakeEngine(num_blocks=400, max_num_seqs=1)
        engine.add(0, [*PREFIX[:40], 1], max_tokens=1)
        engine.run()
        for number in range(1, num_before + 1):
            engine.add(number, 4, max_tokens=1)
        engine.add(100, [*PREFIX[:40], 2], max_tokens=1)
        engine.run()
        assert joined(engine)[1] == expected


def test_a_hit_is_worth_passing_for_from_as_many_blocks_on_as_one_is_waited_for() -> None:
    for num_blocks, expected in ((MIN_COMING_BLOCKS, [2, 1]), (MIN_COMING_BLOCKS - 1, [1, 2])):
        engine = FakeEngine(max_num_seqs=1)
        prefix = PREFIX[: num_blocks * 4]
        engine.add(0, prefix, max_tokens=1)
        engine.run()
        engine.add(1, 4, max_tokens=1)
        engine.add(2, [*prefix, 1], max_tokens=1)
        engine.run()
        assert joined(engine) == [0, *expected]


@pytest.mark.parametrize(("num_tokens", "expected"), [(100, [3]), (101, [2])])
def test_beside_a_giant_the_longest_hit_goes_first_if_it_is_short(num_tokens: int, expected: list[int]) -> None:
    engine = FakeEngine(num_blocks=400, max_num_batched_tokens=32)
    engine.add(0, [*PREFIX[:40], 1], max_tokens=1)
    engine.run()
    engine.add(1, 432, max_tokens=1)
    engine.step()  # 400 are left
    engine.add(2, 30, max_tokens=1)
    engine.add(3, [*PREFIX[:40], *range(num_tokens - 40)], max_tokens=1)
    assert start_of(engine.step()) == expected


def test_exactly_a_quarter_of_a_giant_waits_for_a_prefix_that_the_giant_computes() -> None:
    engine = FakeEngine(num_blocks=400, max_num_batched_tokens=32)
    engine.add(1, PREFIX[:432], max_tokens=1)
    engine.step()  # 400 are left
    engine.add(2, [*PREFIX[:96], 1, 2, 3, 4], max_tokens=1)
    assert start_of(engine.step()) == []
    engine.run()
    assert engine.runner.num_computed[2] == 4


def test_others_start_beside_the_longest_hit_in_the_same_step_and_were_passed_once() -> None:
    engine = FakeEngine()
    engine.add(0, PREFIX[:40], max_tokens=1)
    engine.run()
    passed = engine.add(1, 4, max_tokens=1)
    engine.add(2, [*PREFIX[:40], 1], max_tokens=1)
    assert start_of(engine.step()) == [2, 1]
    assert passed.num_overtaken == 1


def test_who_may_not_pass_is_passed_like_the_others() -> None:
    engine = FakeEngine(num_blocks=20, enable_prefix_caching=False, priority_aging_s=10)
    engine.add(1, 40, max_tokens=8)
    engine.step()
    engine.add(2, 60, max_tokens=1)
    low = engine.add(3, 5, max_tokens=1, scheduling=SchedulingParams(priority=1))
    engine.scheduler.set_time(11)
    engine.add(4, 5, max_tokens=1)
    assert start_of(engine.step()) == [4]
    assert low.num_overtaken == 1, "it had waited longer"


def test_while_nobody_may_begin_those_who_have_begun_go_on_and_give_way_to_nobody() -> None:
    engine = FakeEngine(num_blocks=16, enable_prefix_caching=False)
    engine.add(1, 20, max_tokens=30)
    second = engine.add(2, 20, max_tokens=30)
    while not second.num_preemptions:
        engine.step()
    gate = engine.scheduler.gate
    gate.close()
    engine.add(3, 4, max_tokens=1, scheduling=SchedulingParams(priority=-1))
    assert (gate.is_closed, gate.num_begun) == (True, 2)
    while gate.num_begun:
        engine.step()
    assert joined(engine) == [1, 2, 2]
    assert engine.scheduler.num_preemptions == 1
    gate.open()
    engine.run()
    assert joined(engine) == [1, 2, 2, 3]


# ---- prompts that are computed whole ----------------------------------------------------------------------------


def test_whole_prompts_fill_a_step_to_the_last_token() -> None:
    engine = FakeEngine(num_blocks=100, max_num_batched_tokens=16, enable_chunked_prefill=False)
    for number in (1, 2, 3):
        engine.add(number, 8, max_tokens=1)
    assert start_of(engine.launch()) == [1, 2]


def test_cached_tokens_of_a_whole_prompt_cost_no_budget() -> None:
    engine = FakeEngine(num_blocks=100, max_num_batched_tokens=48, enable_chunked_prefill=False)
    engine.add(0, PREFIX[:40], max_tokens=1)
    engine.run()
    engine.add(1, 20, max_tokens=1)
    engine.add(2, [*PREFIX[:40], 1, 2, 3, 4], max_tokens=1)
    assert sorted(start_of(engine.step())) == [1, 2]


def test_whole_prompts_do_not_wait_for_a_prefix_of_the_same_step() -> None:
    engine = FakeEngine(num_blocks=400, max_num_batched_tokens=200, enable_chunked_prefill=False)
    engine.add(1, PREFIX[:61], max_tokens=1)
    engine.add(2, PREFIX[:61], max_tokens=1)
    assert start_of(engine.step()) == [1, 2]


def test_a_whole_prompt_without_budget_starts_in_the_next_step_though_memory_was_short_before() -> None:
    engine = FakeEngine(
        num_blocks=12, max_num_batched_tokens=16, enable_chunked_prefill=False, enable_prefix_caching=False
    )
    engine.add(1, 16, max_tokens=24)
    while engine.kv.num_free_blocks > 3:
        engine.step()
    engine.add(2, 10, max_tokens=20)
    engine.add(3, 10, max_tokens=20)
    while 2 not in joined(engine):
        engine.step()
    assert 3 not in joined(engine)
    assert start_of(engine.step()) == [3]


# ---- a prefix that is being computed ----------------------------------------------------------------------------


def test_i10_who_waits_for_a_prefix_waits_no_longer_than_for_others() -> None:
    engine = FakeEngine(num_blocks=4000, max_model_len=9000, max_num_batched_tokens=32)
    engine.add(1, [*PREFIX, *[1] * 8000], max_tokens=1)
    engine.step()
    waiting = engine.add(2, PREFIX, max_tokens=1)
    for number in range(100, 100 + MAX_OVERTAKEN):
        assert 2 not in joined(engine)
        engine.add(number, 4, max_tokens=1)
        engine.step()
    engine.step()
    assert waiting.num_overtaken == MAX_OVERTAKEN
    assert 2 in joined(engine), "it computes the rest itself"
    assert engine.kv.get_computed_blocks(waiting)[1] < 700, "the prefix was not complete"


def test_a_prefix_that_has_come_is_used_at_once_though_others_lack_memory() -> None:
    engine = FakeEngine(num_blocks=40, max_num_batched_tokens=200)
    engine.add(1, PREFIX[:41], max_tokens=60)
    engine.add(2, [*PREFIX[:40], 7], max_tokens=1)
    engine.add(3, 140, max_tokens=1)
    assert start_of(engine.step()) == [1]
    assert start_of(engine.step()) == [2], "its prefix is there, and it needs one block"


def test_an_urgent_request_takes_no_more_blocks_from_others_than_it_does_not_find() -> None:
    engine = FakeEngine(num_blocks=30)
    engine.add(1, PREFIX[:41], max_tokens=60)
    engine.step()
    for number in (2, 3):
        engine.add(number, 30, max_tokens=8, scheduling=SchedulingParams(priority=1))
    engine.step()
    assert engine.scheduler.num_running == 3
    assert engine.kv.num_free_blocks < 5
    engine.add(4, [*PREFIX[:40], *range(12)], max_tokens=1)
    engine.step()
    assert engine.scheduler.num_preemptions == 1, "three blocks and a reserve of one for each that runs: one is enough"
    assert 4 in joined(engine)
