"""How long steps take is learned, and how many prompt tokens ride along by it: against formulas."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cb_backend.contracts.step import StepPlan
from cb_backend.engine.scheduler.pace import MIN_PREFILL_TOKENS, Pace
from cb_backend.engine.scheduler.step_time_model import StepTimeModel


def fitted(seconds: tuple[float, float, float]) -> StepTimeModel:
    """A model that has seen many steps of just these costs: of a step, a token, a pair."""
    model, rng = StepTimeModel(), np.random.default_rng(0)
    for _ in range(40):
        tokens, pairs = rng.uniform(1, 2000, 8), rng.uniform(0, 4e6, 8)
        model.observe(tokens, pairs, np.arange(8) % 2 == 0, seconds[0] + seconds[1] * tokens + seconds[2] * pairs)
    return model


COSTS = (4e-3, 2e-5, 3e-9)


def test_an_outlier_counts_as_three_times_what_was_expected() -> None:
    one, other = fitted(COSTS), fitted(COSTS)
    expected = one.seconds(500, 1e5)
    step = np.array([500.0]), np.array([1e5]), np.array([True])
    one.observe(*step, np.array([100.0]))
    other.observe(*step, np.array([3 * expected]))
    assert one.coefficients() == pytest.approx(other.coefficients())
    assert one.seconds(500, 1e5) < 1.5 * expected


def test_an_outlier_is_one_from_the_fifth_step_with_prompts_on() -> None:
    one, other, step = StepTimeModel(), StepTimeModel(), (np.array([50.0]), np.array([0.0]), np.array([True]))
    for model in (one, other):
        for tokens in (10.0, 20.0, 30.0, 40.0):
            model.observe(np.array([tokens]), np.array([0.0]), np.array([True]), np.array([1e-3 * tokens]))
    one.observe(*step, np.array([100.0]))
    other.observe(*step, np.array([3 * 0.05]))
    assert one.coefficients() == pytest.approx(other.coefficients())


def test_what_seemed_to_cost_nothing_is_learned_when_it_costs_something() -> None:
    model = fitted((0.0, 0.0, 0.0))
    model.observe(np.array([500.0]), np.array([1e5]), np.array([True]), np.array([0.02]))
    assert 0 < model.seconds(500, 1e5) < 0.02
    assert model.relative_error < 1


def test_the_error_moves_by_a_fiftieth() -> None:
    model = fitted(COSTS)
    before, expected = model.relative_error, model.seconds(500, 1e5)
    model.observe(np.array([500.0]), np.array([1e5]), np.array([True]), np.array([1.5 * expected]))
    assert model.relative_error == pytest.approx(before + 0.02 * (0.5 - before))


def test_the_last_hundred_or_so_steps_of_a_kind_count() -> None:
    model = fitted(COSTS)
    other = (8e-3, 1e-5, 6e-9)
    rng = np.random.default_rng(4)
    for _ in range(600):
        tokens, pairs, kinds = rng.uniform(1, 2000, 2), rng.uniform(0, 4e6, 2), np.array([True, False])
        model.observe(tokens, pairs, kinds, other[0] + other[1] * tokens + other[2] * pairs)
    assert model.coefficients() == pytest.approx(other, rel=0.01)


def paced(limit_ms: float | None, costs: tuple[float, float, float] = COSTS, most_seen: int = 4000) -> Pace:
    pace = Pace(limit_ms)
    pace._model, pace._most_seen = fitted(costs), most_seen
    pace._model.relative_error = 0.0
    return pace


@pytest.mark.parametrize("position", [0, 3000])
@pytest.mark.parametrize("error", [0.0, 0.1, 0.9])
def test_as_many_prompt_tokens_ride_along_as_the_limit_leaves_room_for(position: int, error: float) -> None:
    pace = paced(20.0)
    pace._model.relative_error = error
    num_tokens = pace.most_prefill_tokens(10, 1e5, position)
    limit_s = 0.02 / (1 + 2 * min(error, 0.5))

    def seconds(count: int) -> float:
        pairs = 1e5 + count * position + count * count / 2
        return COSTS[0] + COSTS[1] * (10 + count) + COSTS[2] * pairs

    assert seconds(num_tokens) <= limit_s * (1 + 1e-6) < seconds(num_tokens + 2)


def test_no_more_than_twice_what_has_been_seen_and_no_less_than_what_must_go_on() -> None:
    assert paced(1e6, most_seen=300).most_prefill_tokens(10, 1e5, 0) == 600
    assert paced(1.0).most_prefill_tokens(10, 1e5, 0) == MIN_PREFILL_TOKENS, "nothing is left of the limit"
    assert paced(4.25).most_prefill_tokens(10, 0.0, 0) == MIN_PREFILL_TOKENS, "less is left than must go on"
    assert Pace(20.0).most_prefill_tokens(1, 0.0, 0) == 64, "of the first trials"
    assert paced(20.005, (0.0, 1e-5, 0.0)).most_prefill_tokens(1, 0.0, 0) == 1999, "of 20.005 ms one stream takes 0.01"
    just = paced(20.0)
    just._model._coefficients = np.array([0.02, 0.0, 0.0])
    assert just.most_prefill_tokens(10, 0.0, 0) == MIN_PREFILL_TOKENS, "just nothing is left"
    assert timed(Pace(1e6), [0.0, 1.0, 2.0, 3.0, 4.0], 1).most_prefill_tokens(1, 0.0, 0) == 64, "at first twice 32"
    assert paced(20.0, (0.0, 0.0, 0.0), 100).most_prefill_tokens(1, 0.0, 0) == 200, "what costs nothing has no limit"


def test_the_first_trials_are_four_and_short() -> None:
    pace = Pace(1e6)
    pace._most_seen = 1000
    for known in range(5):
        assert pace.model.num_prefill_samples == known
        assert pace.most_prefill_tokens(0, 0.0, 0) == (64 if known < 4 else 2000)
        pace._model.observe(np.array([10.0]), np.array([0.0]), np.array([True]), np.array([1e-3]))


def test_a_chunks_tokens_look_at_half_of_itself_and_all_before_it() -> None:
    rng, pace, now = np.random.default_rng(5), Pace(None), 0.0
    for step_id in range(1, 301):
        first, num_tokens = rng.integers(0, 300, 1).astype(np.int32), rng.integers(1, 400, 1).astype(np.int32)
        pace.launched(StepPlan(step_id, first, first, num_tokens, num_tokens > 0, 0), now)
        now += 1e-3 + 1e-6 * float((num_tokens * (first + num_tokens / 2)).sum())
        pace.completed(step_id, now)
    assert pace.model.coefficients() == pytest.approx((1e-3, 0.0, 1e-6), rel=1e-3, abs=1e-9)


def test_a_step_of_the_same_streams_is_one_token_further_in_each_row() -> None:
    pace, slots, other = Pace(None), np.arange(3, dtype=np.int32), np.arange(1, 4, dtype=np.int32)
    first, ones = np.array([70, 2**31 - 9, 2**31 - 9], np.int32), np.ones(3, np.int32)
    chunk = np.array([1, 1, 30], np.int32)
    plans = [
        StepPlan(1, slots, first, ones, ones > 0, 3),
        StepPlan(2, slots, first + 1, ones, ones > 0, 3),
        StepPlan(3, slots, first + 2, chunk, ones > 0, 2),
        StepPlan(4, slots, first - 70, ones, ones > 0, 3),  # others in the same slots
        StepPlan(5, other, first, ones, ones > 0, 3),
    ]
    for plan in plans:
        pace.launched(plan, 0.0)
    told = [(work.num_tokens, work.num_pairs, work.has_prefill) for work, _ in pace._launched]
    pairs = [float((plan.num_tokens * (plan.first + plan.num_tokens / 2)).sum()) for plan in plans]
    assert told == list(zip((3, 3, 32, 3, 3), pairs, (False, False, True, False, False), strict=True))


def timed(pace: Pace, times: list[float], num_decode_rows: int) -> Pace:
    """Steps of two rows that end at these times, each launched when the one before it ends."""
    first, num_tokens = np.array([50, 0], np.int32), np.array([1, 30], np.int32)
    for step_id, (begin, end) in enumerate(itertools.pairwise(times), 1):
        pace.launched(StepPlan(step_id, first, first, num_tokens, num_tokens > 0, num_decode_rows), begin)
        pace.completed(step_id, end)
    return pace


def test_a_step_that_took_no_time_teaches_nothing_and_one_of_decode_rows_nothing_of_prompts() -> None:
    assert timed(Pace(20.0), [1.0, 1.0, 2.0], 1).model.num_prefill_samples == 1
    decoding = timed(Pace(20.0), [1.0, 2.0, 3.0], 2)
    assert decoding.model.num_prefill_samples == 0
    assert decoding.model.seconds(31, 30 * 15 + 50.5) > 0
    assert decoding.most_prefill_tokens(0, 0.0, 0) == 64


def test_a_step_takes_the_time_from_its_launch_or_from_the_end_of_the_one_before() -> None:
    pace, one = Pace(None), np.ones(1, np.int32)
    for step_id, launched in ((1, 0.0), (2, 0.0)):
        pace.launched(StepPlan(step_id, one, one, one, one > 0, 0), launched)
    pace.completed(1, 1.0)
    pace.completed(2, 1.5)
    pace.launched(StepPlan(3, one, one, one, one > 0, 0), 10.0)
    pace.completed(3, 10.25)
    assert [seconds for _, seconds in pace._unlearned] == [1.0, 0.5, 0.25]
    assert (pace.has_limit, Pace(20.0).has_limit) == (False, True)


def test_what_is_still_to_be_learned_never_piles_up() -> None:
    pace = timed(Pace(None), [float(second) for second in range(257)], 1)
    assert not pace._unlearned, "256 are learned at once, though nobody has asked"
    assert len(timed(pace, [256.0, 257.0], 1)._unlearned) == 1


def test_draining_is_weighed_by_what_a_prompt_token_costs_alone_and_beside_streams() -> None:
    pace = paced(20.0)
    num_mixed = pace.most_prefill_tokens(10, 1e5, 0)
    saved, lost = pace.shares_by_draining(10, 1e5, 2000)
    alone_s = COSTS[0] + COSTS[1] * 2000 + COSTS[2] * 2000 * 2000 / 2
    mixed_s = COSTS[0] + COSTS[1] * (10 + num_mixed) + COSTS[2] * (1e5 + num_mixed * num_mixed / 2)
    per_token_s = (alone_s + mixed_s) / (2000 + num_mixed)
    assert saved == pytest.approx(1 - per_token_s * num_mixed / mixed_s, rel=1e-3)
    assert lost == pytest.approx(alone_s / (alone_s + mixed_s), rel=1e-3)
    assert pace.shares_by_draining(10, 1e5, num_mixed) == (0.0, 0.0), "no more fit alone than beside"
    for num_samples, is_asked in ((3, False), (4, True)):
        pace._model.num_prefill_samples = num_samples
        assert (pace.shares_by_draining(10, 1e5, 2000) != (0.0, 0.0)) == is_asked, "after four trials"
    by_pairs = paced(20.0, (0.0, 0.0, 1e-5))  # so few that one more or less would show
    num_mixed = by_pairs.most_prefill_tokens(1, 0.0, 0)
    _, lost = by_pairs.shares_by_draining(1, 0.0, 2000)
    assert lost == pytest.approx(2000**2 / (2000**2 + num_mixed**2), rel=1e-6)
    limited = paced(20.0, most_seen=pace.most_prefill_tokens(10, 1e5, 0) // 2)
    assert limited.shares_by_draining(10, 1e5, 2000) == (0.0, 0.0), "no more has been seen"
