"""What went wrong in other engines must not go wrong here. Each test is named after a known failure.

D3 prompt beyond the pool · D4 max_tokens=1 · N1, N3 storms of cancels · N5 cancel while queued · N8 cancel, end and
forget in any order · O1 a request that blocks the queue for ever · O3 nothing scheduled when the cache is full ·
O4 a cascade of preemptions while freed blocks are on their way · O8 preempted in the step it was scheduled in ·
O10 the preempted overtaken by newcomers
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request import FinishReason, RequestStatus
from cb_backend.contracts.step import Failure, RowStatus, StepResult
from tests.fakes.engine import FakeEngine


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_d3_one_token_more_than_the_pool_is_refused_one_less_ends(run_ahead: int) -> None:
    engine = FakeEngine(num_blocks=5, run_ahead=run_ahead)  # 20 tokens, model length 1000
    with pytest.raises(InvalidRequestError, match=r"20 tokens, but the whole KV cache holds 20 \(5 blocks of 4\)"):
        engine.add(1, 20)
    engine.add(2, 19, max_tokens=100)
    engine.run()
    assert (engine.tokens[2], engine.reasons[2]) == ([10], FinishReason.LENGTH)


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_a_request_that_outgrows_the_pool_ends_with_length(run_ahead: int) -> None:
    engine = FakeEngine(num_blocks=5, run_ahead=run_ahead)
    engine.add(1, 6, max_tokens=100)
    engine.run()
    assert (engine.tokens[1], engine.reasons[1]) == (list(range(10, 24)), FinishReason.LENGTH)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_d4_fifty_requests_of_one_token_half_of_them_full_hits(run_ahead: int) -> None:
    engine = FakeEngine(run_ahead=run_ahead, max_num_seqs=8)
    engine.add(1000, [3] * 8, max_tokens=1)
    engine.run()
    for request_id in range(50):
        engine.add(request_id, [3] * 8 if request_id % 2 else 8, max_tokens=1)
    engine.run()
    assert len(engine.reasons) == 51
    assert set(engine.reasons.values()) == {FinishReason.LENGTH}
    assert all(tokens == [10] for tokens in engine.tokens.values())
    assert engine.scheduler.stats().num_cached_prompt_tokens >= 25 * 4


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_n1_a_thousand_requests_cut_after_a_few_tokens(run_ahead: int) -> None:
    engine = FakeEngine(num_blocks=60, run_ahead=run_ahead, max_num_seqs=16)
    rng = random.Random(1)
    cut_after = {request_id: rng.randint(0, 5) for request_id in range(1000)}
    for request_id in cut_after:
        engine.add(request_id, rng.randint(1, 12), max_tokens=50)
    while engine.scheduler.has_unfinished():
        for request_id in list(engine.scheduler._table.by_id):
            if len(engine.tokens[request_id]) >= cut_after[request_id]:
                assert engine.scheduler.cancel(request_id)
        engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_cancelled, stats.num_free_blocks, stats.num_running) == (1000, 60, 0)
    engine.add(5000, 7, max_tokens=3)
    engine.run()
    assert engine.tokens[5000] == [10, 11, 12]


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_n3_random_cancels_leave_gauges_true(run_ahead: int) -> None:
    engine = FakeEngine(num_blocks=40, run_ahead=run_ahead, max_num_seqs=8)
    rng = random.Random(2)
    open_ids: set[int] = set()
    for number in range(1000):
        engine.add(number, rng.randint(1, 9), max_tokens=rng.randint(1, 9))
        open_ids.add(number)
        for _ in range(rng.randint(0, 2)):
            target = rng.randint(0, number)
            assert engine.scheduler.cancel(target) == (target in open_ids)
            open_ids.discard(target)
        engine.step()
        open_ids -= engine.reasons.keys()
        assert engine.scheduler.num_running + engine.scheduler.num_waiting == len(open_ids)
    engine.run()
    assert engine.scheduler.num_running == 0


def test_n5_a_queued_request_is_cancelled_without_running() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add(1, 5, max_tokens=50)
    engine.step()
    queued = engine.add(2, 5)
    assert engine.scheduler.cancel(2)
    assert (queued.status, engine.scheduler.num_waiting) == (RequestStatus.FINISHED_ABORTED, 0)
    engine.run()
    assert 2 not in engine.runner.num_computed


@pytest.mark.parametrize("order", list(itertools.permutations(["finish", "cancel", "forget"])))
def test_n8_finish_cancel_and_forget_in_any_order(order: tuple[str, ...]) -> None:
    engine = FakeEngine()
    engine.add(1, 5, max_tokens=1)
    engine.launch()
    has_ended = False
    for action in order:
        if action == "finish":
            engine.finish()
            has_ended = True
        else:  # to cancel and to forget are the same call here
            assert engine.scheduler.cancel(1) == (not has_ended)
            has_ended = True
    engine.run()
    assert engine.reasons == ({1: FinishReason.LENGTH} if order[0] == "finish" else {})


def test_o1_what_can_never_fit_is_refused_and_the_small_ones_run() -> None:
    engine = FakeEngine(num_blocks=76, max_model_len=1000)
    with pytest.raises(InvalidRequestError, match="400 tokens"):
        engine.add(1, 400)  # 100 blocks
    for request_id in range(2, 12):
        engine.add(request_id, 10)
    engine.run()
    assert len(engine.reasons) == 10


@pytest.mark.parametrize("run_ahead", [0, 1, 4])
def test_o3_sixty_four_growing_requests_in_a_pool_for_ten(run_ahead: int) -> None:
    engine = FakeEngine(num_blocks=10 * 8, run_ahead=run_ahead, max_num_seqs=64, enable_prefix_caching=False)
    for request_id in range(64):
        engine.add(request_id, 4, max_tokens=28)
    while engine.scheduler.has_unfinished():
        computed_before = sum(engine.runner.num_computed.values())
        was_idle = not engine.in_flight
        engine.step()
        assert not was_idle or sum(engine.runner.num_computed.values()) > computed_before, "a step without progress"
    assert all(engine.tokens[request_id] == list(range(10, 38)) for request_id in range(64))
    assert engine.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_o4_no_cascade_while_freed_blocks_are_on_their_way(run_ahead: int) -> None:
    # In the third step the oldest needs a third block, none is free, and the victim's are still being written.
    engine = FakeEngine(num_blocks=6, run_ahead=run_ahead, enable_prefix_caching=False)
    for request_id, prompt in ((1, 7), (2, 4), (3, 4)):
        engine.add(request_id, prompt, max_tokens=4)
    engine.launch()
    engine.launch()
    assert (engine.kv.num_free_blocks, engine.scheduler.stats().num_preemptions) == (0, 0)
    if run_ahead == 1:
        engine.finish()
    plan = engine.launch()
    assert engine.scheduler.stats().num_preemptions == 1, "one victim is enough"
    assert plan is not None
    assert plan.slots.tolist() == [1], "the first waits for the blocks, the second goes on, the third is the victim"
    assert engine.kv.num_free_blocks == 0, "the victim's blocks are still written by a launched step"
    engine.launch()
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 1
    assert all(tokens == [10, 11, 12, 13] for tokens in engine.tokens.values())


def test_o4_a_request_about_to_end_is_waited_for_and_not_preempted() -> None:
    engine = FakeEngine(num_blocks=5, run_ahead=2, enable_prefix_caching=False)
    engine.add(1, 8, max_tokens=6)
    engine.add(2, 3, max_tokens=5)
    for _ in range(3):
        engine.step()  # launches five steps and reads three: the second's last token is sampled, not read
    assert len(engine.plans) == 5
    assert engine.launch() is None, "the first needs a block, which the second will leave"
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
    assert engine.tokens == {1: list(range(10, 16)), 2: list(range(10, 15))}


@pytest.mark.parametrize("seed", range(40))
def test_o8_a_victim_has_no_row_in_the_plan_that_preempts_it(seed: int) -> None:
    rng = random.Random(seed)
    engine = FakeEngine(
        num_blocks=rng.randint(7, 14), run_ahead=rng.randint(0, 2), block_size=rng.choice((1, 2)), max_num_seqs=8
    )
    requests = [engine.add(i, rng.randint(1, 3), max_tokens=rng.randint(1, 4)) for i in range(12)]
    while engine.scheduler.has_unfinished():
        preempted_before = [request.num_preemptions for request in requests]
        plan = engine.launch()
        victims = {r.request_id for r, n in zip(requests, preempted_before, strict=True) if r.num_preemptions > n}
        if plan is not None:
            owners = {request.slot: request.request_id for request in requests}
            assert victims.isdisjoint(owners[slot] for slot in plan.slots.tolist())
            assert victims.isdisjoint(row.request_id for row in plan.joined)
        if plan is None or len(engine.in_flight) > engine.run_ahead:
            engine.finish()
    for request in requests:
        assert engine.tokens[request.request_id] == [10 + i for i in range(request.params.max_tokens)]


def test_o10_after_a_preemption_the_oldest_goes_first() -> None:
    engine = FakeEngine(num_blocks=8, enable_prefix_caching=False, max_num_seqs=4)
    requests = [engine.add(request_id, 4, max_tokens=20) for request_id in range(4)]
    for number in range(100, 160):  # newcomers all the time
        requests.append(engine.add(number, 4, max_tokens=2))
        engine.step()
        joined = [row.request_id for row in engine.plans[-1].joined]
        assert joined == sorted(joined)
        for request_id in joined:
            assert all(request_id < waiting.request_id for waiting in engine.scheduler._queue), "a newcomer overtook"
    assert engine.scheduler.stats().num_preemptions > 0
    engine.run()
    assert max(request.num_preemptions for request in requests) <= 3
    assert all(tokens == list(range(10, 10 + len(tokens))) for tokens in engine.tokens.values())
    assert len(engine.reasons) == len(requests)


def test_preempted_output_is_kept_and_never_sent_again() -> None:
    engine = FakeEngine(num_blocks=4, enable_prefix_caching=False, max_num_seqs=2)
    engine.add(1, 4, max_tokens=10)
    younger = engine.add(2, 4, max_tokens=10)
    while younger.num_preemptions == 0:
        engine.step()
    sent = len(engine.tokens[2])
    assert younger.token_ids.tolist() == [2] * 4 + engine.tokens[2]
    assert sent > 0
    engine.run()
    assert engine.tokens[2] == list(range(10, 20))


@pytest.mark.parametrize("status", [RowStatus.NOT_FINITE, RowStatus.RULED_OUT, RowStatus.ENDED])
def test_a_row_without_a_token_ends_whatever_its_status_says(status: RowStatus) -> None:
    """Also one that the runner calls ended and the scheduler does not: it must not wait for tokens for ever."""
    engine = FakeEngine(run_ahead=1)
    engine.add(1, 5)
    engine.add(2, 5)
    engine.launch()
    tokens, flags = np.array([[-1], [10]], np.int32), np.array([status, RowStatus.OK], np.uint8)
    failure = Failure(np.array([0]), "why")
    result = StepResult(1, tokens, np.array([0, 1], np.uint8), flags, (failure,))
    output = engine.scheduler.update_from_output(result)
    assert output.request_ids.tolist() == [1, 2]
    assert output.finish_reasons.tolist() == [FinishReason.ERROR, FinishReason.NONE]
    assert [(part.owners.tolist(), part.text) for part in output.attached if isinstance(part, Failure)] == [
        ([1], "why")
    ]
    engine.scheduler.check_integrity()
