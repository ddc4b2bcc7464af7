"""How prompts share steps with running streams and with each other, and when one waits for another's prefix.

O6 steady prefills leave running requests without tokens · I11 decode share · short prompts behind a giant one ·
max_itl_ms · a prefix that another request is computing
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.step import StepPlan
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN
from cb_backend.engine.scheduler.pace import MIN_PREFILL_TOKENS, Pace
from cb_backend.engine.scheduler.step_time_model import StepTimeModel
from tests.fakes.engine import FakeEngine


def tokens_of(plan: StepPlan | None, engine: FakeEngine) -> dict[int, int]:
    """Tokens computed in a step by request id, right after its launch."""
    assert plan is not None
    table = engine.scheduler._table
    return {
        table.request_at(slot).request_id: count
        for slot, count in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True)
    }


def joined(engine: FakeEngine) -> list[int]:
    return [row.request_id for plan in engine.plans for row in plan.joined]


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_o6_a_running_stream_gets_a_token_in_every_step_whatever_prompts_arrive(run_ahead: int) -> None:
    engine = FakeEngine(num_blocks=500, max_num_batched_tokens=16, run_ahead=run_ahead, max_num_seqs=8)
    engine.add(1, 4, max_tokens=100)
    engine.step()
    plans = []
    for number in range(2, 60):
        engine.add(number, 64, max_tokens=1)  # four steps' tokens each
        plans.append(engine.launch())
        if len(engine.in_flight) > run_ahead:
            engine.finish()
    assert all(plan is not None and plan.num_decode_rows >= 1 and plan.total_tokens == 16 for plan in plans)


def test_a_short_prompt_waits_one_step_for_a_giant_one() -> None:
    engine = FakeEngine(num_blocks=2000, max_model_len=5000, max_num_batched_tokens=64, enable_prefix_caching=False)
    engine.add(1, 4000, max_tokens=2)
    engine.step()
    engine.add(2, 20, max_tokens=2)
    assert tokens_of(engine.launch(), engine) == {2: 20, 1: 44}


def test_short_prompts_get_half_of_a_step_and_the_giant_the_other_half() -> None:
    engine = FakeEngine(num_blocks=2000, max_model_len=5000, max_num_batched_tokens=64, enable_prefix_caching=False)
    engine.add(1, 4000, max_tokens=2)
    engine.step()
    for number in range(2, 12):
        engine.add(number, 40, max_tokens=1)
    for _ in range(10):
        computed = tokens_of(engine.launch(), engine)
        engine.finish()
        assert computed[1] == 32
        assert sum(computed.values()) == 64
    assert len(engine.reasons) >= 7, "ten steps of half a budget are eight prompts of 40 tokens"


@pytest.mark.parametrize(("num_first", "expected"), [(31, {2: 31, 3: 1, 1: 32}), (32, {2: 32, 1: 32})])
def test_short_prompts_get_their_half_to_the_last_token_and_none_starts_with_nothing(
    num_first: int, expected: dict[int, int]
) -> None:
    engine = FakeEngine(num_blocks=2000, max_model_len=5000, max_num_batched_tokens=64, enable_prefix_caching=False)
    engine.add(1, 4000, max_tokens=2)
    engine.step()
    engine.add(2, num_first, max_tokens=1)
    engine.add(3, 40, max_tokens=1)
    assert tokens_of(engine.launch(), engine) == expected


def test_a_short_prompt_passes_a_second_giant_in_the_queue_but_only_so_often() -> None:
    engine = FakeEngine(num_blocks=4000, max_model_len=9000, max_num_batched_tokens=64, enable_prefix_caching=False)
    engine.add(1, 8000, max_tokens=2)
    engine.step()
    second = engine.add(2, 4000, max_tokens=1)
    for number in range(3, 60):
        engine.add(number, 16, max_tokens=1)
        engine.step()
    assert second.num_overtaken == MAX_OVERTAKEN
    assert len(engine.reasons) == MAX_OVERTAKEN
    engine.run()
    assert len(engine.reasons) == 59


def test_a_short_prompt_passes_a_giant_that_does_not_fit() -> None:
    engine = FakeEngine(num_blocks=20, enable_prefix_caching=False)
    engine.add(1, 40, max_tokens=8)
    engine.step()
    engine.add(2, 60, max_tokens=1)
    engine.add(3, 5, max_tokens=1)
    engine.add(4, 28, max_tokens=1)
    engine.step()
    assert joined(engine) == [1, 3], "4 would fit, but is not short beside 2"
    engine.run()
    assert joined(engine) == [1, 3, 2, 4]


def test_nobody_less_urgent_passes() -> None:
    engine = FakeEngine(num_blocks=20, enable_prefix_caching=False)
    engine.add(1, 40, max_tokens=8)
    engine.step()
    engine.add(2, 60, max_tokens=1)
    engine.add(3, 5, max_tokens=1, scheduling=SchedulingParams(priority=1))
    engine.run()
    assert joined(engine) == [1, 2, 3]


# ---- a prefix that is being computed ----------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_shared_prefix_is_computed_once_though_all_arrive_together(run_ahead: int) -> None:
    engine = FakeEngine(num_blocks=400, max_num_batched_tokens=64, run_ahead=run_ahead)
    prefix = list(range(200))
    for number in range(10):
        engine.add(number, [*prefix, 900 + number], max_tokens=2)
    engine.run()
    # The prefix once (at most its last few blocks again), the own token, the second token; without waiting, 7 times.
    assert sum(engine.runner.num_computed.values()) <= 200 + 9 * 8 + 10 + 10
    assert engine.scheduler.stats().num_cached_prompt_tokens >= 9 * 192


def test_others_pass_whoever_waits_for_a_prefix() -> None:
    engine = FakeEngine(num_blocks=400, max_num_batched_tokens=64)
    prefix = list(range(100))
    engine.add(1, [*prefix, 1], max_tokens=1)
    engine.add(2, [*prefix, 2], max_tokens=1)
    engine.add(3, 30, max_tokens=1)
    plans = [engine.step() for _ in range(3)]
    assert [[row.request_id for row in plan.joined] for plan in plans if plan] == [[1], [3], [2]]


def test_waiting_for_a_prefix_ends_when_its_computation_is_given_up() -> None:
    engine = FakeEngine(num_blocks=400, max_num_batched_tokens=32)
    prefix = list(range(100))
    engine.add(1, [*prefix, 1], max_tokens=1)
    engine.add(2, [*prefix, 2], max_tokens=1)
    engine.step()
    assert engine.scheduler.num_running == 1
    engine.scheduler.cancel(1)
    plan = engine.launch()
    assert plan is not None
    assert plan.joined[0].request_id == 2
    assert plan.first.tolist() == [32], "what was computed before is found"
    engine.finish()
    engine.run()
    assert engine.kv._coming == {}


@pytest.mark.parametrize("num_shared", [12, 0])
def test_a_few_blocks_are_not_waited_for(num_shared: int) -> None:
    engine = FakeEngine(num_blocks=400, max_num_batched_tokens=200)
    engine.add(1, [*range(num_shared), *[1] * 100], max_tokens=1)
    engine.add(2, [*range(num_shared), *[2] * 9], max_tokens=1)
    engine.step()
    assert joined(engine) == [1, 2]


def test_other_salts_do_not_wait() -> None:
    engine = FakeEngine(num_blocks=400, max_num_batched_tokens=200)
    prefix = list(range(60))
    engine.add(1, prefix, max_tokens=1)
    other = engine.add(2, prefix, max_tokens=1)
    other.cache_salt = b"other tenant"
    engine.add(3, prefix, max_tokens=1)
    engine.step()
    assert joined(engine) == [1, 2]


# ---- max_itl_ms -------------------------------------------------------------------------------------------------


def observe(model: StepTimeModel, num_tokens: int, num_pairs: float, has_prefill: bool, seconds: float) -> None:
    model.observe(np.array([num_tokens]), np.array([num_pairs]), np.array([has_prefill]), np.array([seconds]))


def test_many_steps_at_once_teach_what_they_teach_one_by_one() -> None:
    rng = np.random.default_rng(2)
    columns = rng.uniform(1, 2000, 300), rng.uniform(0, 4e6, 300), rng.random(300) < 0.4, rng.uniform(1e-3, 2e-3, 300)
    one_by_one, at_once = StepTimeModel(), StepTimeModel()
    for step in zip(*(column.tolist() for column in columns), strict=True):
        one_by_one.relative_error = 0.2
        one_by_one.num_prefill_samples = 0  # nothing counts as out of the ordinary
        observe(one_by_one, *step)
    at_once.observe(*columns)
    assert at_once.coefficients() == pytest.approx(one_by_one.coefficients(), rel=1e-6)
    assert at_once.num_prefill_samples == np.count_nonzero(columns[2])


@pytest.mark.parametrize("limit_ms", [None, 20.0])
@pytest.mark.parametrize("num_steps", [5, 255, 256, 257, 700])
def test_step_times_are_learned_with_and_without_a_limit(limit_ms: float | None, num_steps: int) -> None:
    """What learns of every step: the time of a step is asked for by more than the limit."""
    rng, pace, now = np.random.default_rng(3), Pace(limit_ms), 0.0
    for step_id in range(1, num_steps + 1):
        first = rng.integers(0, 2000, 5).astype(np.int32)
        num_tokens = np.array([1, 1, 1, 1, rng.integers(16, 400)], np.int32)
        pace.launched(StepPlan(step_id, first, first, num_tokens, num_tokens > 0, 4), now)
        now += 4e-3 + 2e-5 * int(num_tokens.sum()) + 3e-9 * float((num_tokens * (first + num_tokens / 2)).sum())
        pace.completed(step_id, now)
    assert pace.has_limit == (limit_ms is not None)
    assert pace.model.num_prefill_samples == num_steps
    assert pace.model.seconds(300, 1e5) == pytest.approx(4e-3 + 2e-5 * 300 + 3e-9 * 1e5, rel=0.05)


def test_the_fit_finds_the_coefficients() -> None:
    rng, model = np.random.default_rng(1), StepTimeModel()
    for _ in range(400):
        num_tokens, num_pairs, has_prefill = rng.integers(1, 2000), rng.integers(0, 4_000_000), rng.random() < 0.3
        seconds = 4e-3 + 2e-5 * num_tokens + 3e-9 * num_pairs
        observe(model, int(num_tokens), float(num_pairs), bool(has_prefill), seconds * rng.normal(1, 0.02))
    assert model.coefficients() == pytest.approx((4e-3, 2e-5, 3e-9), rel=0.1)
    assert model.relative_error < 0.05


def test_what_is_known_of_prompts_does_not_fade_while_only_streams_run() -> None:
    model = StepTimeModel()
    for num_tokens in (100, 200, 400, 800):
        observe(model, num_tokens, 0.0, True, 5e-3 + 1e-5 * num_tokens)
    for _ in range(5000):
        observe(model, 64, 0.0, False, 5e-3 + 1e-5 * 64)
    assert model.seconds(1000, 0.0) == pytest.approx(15e-3, rel=0.05)


@pytest.mark.parametrize(("run_ahead", "limit_ms"), [(0, 12.0), (2, 12.0), (0, 40.0)])
def test_steps_with_running_streams_stay_below_max_itl_ms(run_ahead: int, limit_ms: float) -> None:
    engine = FakeEngine(
        num_blocks=1000, max_model_len=8000, max_num_batched_tokens=2048, run_ahead=run_ahead,
        max_itl_ms=limit_ms, enable_prefix_caching=False, block_size=64,
    )  # fmt: skip
    rng, now = random.Random(3), 0.0
    for number in range(16):
        engine.add(number, 20, max_tokens=600)
    num_prompt_tokens, times_ms = [], []
    for step in range(400):
        if step % 12 == 4:
            engine.add(1000 + step, rng.choice((50, 500, 6000)), max_tokens=1)
        engine.scheduler.set_time(now)
        while len(engine.in_flight) <= run_ahead and engine.launch() is not None:
            pass
        plan = engine.in_flight[0][0]
        pairs = float((plan.num_tokens * (plan.first + plan.num_tokens / 2)).sum())
        seconds = (3e-3 + 1.2e-5 * plan.total_tokens + 1e-9 * pairs) * rng.gauss(1, 0.03)
        now += seconds
        engine.scheduler.set_time(now)
        engine.finish()
        if plan.num_decode_rows and step > 50:
            times_ms.append(seconds * 1000)
            if plan.num_rows > plan.num_decode_rows:
                num_prompt_tokens.append(plan.total_tokens - plan.num_decode_rows)
    assert np.quantile(times_ms, 0.99) <= limit_ms
    most_possible = min((limit_ms / 1000 - 3e-3) / 1.2e-5, 2048)
    used = np.quantile(num_prompt_tokens, 0.9)
    assert used >= 0.6 * most_possible, "prompts are held back more than they must be"


def test_prompts_go_on_even_where_the_limit_leaves_no_room() -> None:
    pace = Pace(max_itl_ms=1)
    ones = np.ones(4, np.int32)
    for step_id in range(1, 30):
        num_tokens = np.array([1, 1, 1, 64], np.int32)
        pace.launched(StepPlan(step_id, ones, ones * 100, num_tokens, ones > 0, 3), now=step_id * 1.0)
        pace.completed(step_id, now=step_id + 0.1)
    assert pace.most_prefill_tokens(3, 300.0, 0) == MIN_PREFILL_TOKENS


def test_without_running_streams_nothing_is_held_back() -> None:
    engine = FakeEngine(num_blocks=1000, max_model_len=3000, max_num_batched_tokens=2048, max_itl_ms=0.001)
    engine.add(1, 2000, max_tokens=1)
    plan = engine.launch()
    assert plan is not None
    assert plan.total_tokens == 2000


def test_max_itl_ms_needs_chunks() -> None:
    with pytest.raises(ConfigError, match="needs enable_chunked_prefill"):
        FakeEngine(max_itl_ms=20, enable_chunked_prefill=False)
