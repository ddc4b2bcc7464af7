"""When large steps are barred beside streams, what is learned while one is launched, and what a small step holds."""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.step import StepPlan
from cb_backend.engine.scheduler.large_steps import LargeSteps
from cb_backend.engine.scheduler.pace import Pace
from cb_backend.engine.step_shapes import MOST_SMALL_PROMPTS, MOST_SMALL_TOKENS, step_shapes
from tests.fakes.engine import FakeEngine

SLOW, QUICK = 0.03, 0.01


def after(*launches: float) -> LargeSteps:
    steps = LargeSteps(0.02)
    for seconds in launches:
        steps.launched(seconds)
    return steps


def test_one_slow_launch_of_eight_is_forgiven_and_the_second_bars() -> None:
    assert not LargeSteps(0.02).are_barred
    assert not after(SLOW).are_barred
    assert after(SLOW, SLOW).are_barred
    assert after(SLOW, *[QUICK] * 6, SLOW).are_barred
    assert not after(SLOW, *[QUICK] * 7, SLOW).are_barred, "the first is forgotten"
    assert not after(SLOW, SLOW, QUICK).are_barred, "it is quick again"
    assert after(SLOW, SLOW, QUICK, SLOW).are_barred


def test_just_the_limit_is_not_slow() -> None:
    assert not after(0.02, 0.02).are_barred


def test_how_long_launching_takes_is_the_middle_of_the_last_launches() -> None:
    assert LargeSteps(0.02).launch_seconds == 0.0
    assert after(0.3, 0.010, 0.012).launch_seconds == 0.012


def test_one_in_256_steps_may_be_a_trial_while_large_ones_are_barred() -> None:
    steps = after(SLOW, SLOW)
    assert [steps.may_come() for _ in range(258)] == [False] * 256 + [True] * 2, "until one is launched"
    steps.launched(SLOW)
    assert not steps.may_come()
    steps.launched(QUICK)
    assert all(steps.may_come() for _ in range(300))


def test_a_small_step_fits_a_graph_whatever_the_budget() -> None:
    for budget in (4096, 8192):
        small = [shape for shape in step_shapes(64, budget) if not shape.is_large]
        assert max(shape.num_prefill for shape in small) == MOST_SMALL_TOKENS
        assert max(shape.num_prompts for shape in small) == MOST_SMALL_PROMPTS


def plan(step_id: int, num_prefill: int, num_decode: int = 2) -> StepPlan:
    num_tokens = np.array([1] * num_decode + [num_prefill] * (num_prefill > 0), np.int32)
    slots = np.arange(len(num_tokens), dtype=np.int32)
    return StepPlan(step_id, slots, np.zeros_like(slots), num_tokens, slots >= 0, num_decode)


def unlearning() -> Pace:
    """One that keeps what it is to learn from."""
    pace = Pace(20.0)
    pace._learn = lambda: None  # type: ignore[method-assign]
    return pace


def launch(pace: Pace, step: StepPlan, begin: float, end: float) -> None:
    pace.launched(step, begin)
    pace.launch_ended(end)


def learned(pace: Pace) -> list[tuple[int, float]]:
    return [(step.step_id, pytest.approx(seconds)) for step, seconds in pace._unlearned]


def test_a_step_that_was_done_while_a_large_one_was_launched_teaches_nothing() -> None:
    pace = unlearning()
    launch(pace, plan(1, 0), 0.0, 0.0)
    launch(pace, plan(2, 100), 0.0, 0.001)
    pace.completed(1, 0.002)
    launch(pace, plan(3, 3000), 0.002, 0.012)
    pace.completed(2, 0.0121)  # its result was there
    launch(pace, plan(4, 0), 0.0121, 0.0122)
    pace.completed(3, 0.016)  # was waited for; but when it began is not known
    launch(pace, plan(5, 0), 0.016, 0.0161)
    pace.completed(4, 0.018)
    assert learned(pace) == [(1, 0.002), (4, 0.002)]
    assert pace.large_steps.launch_seconds == pytest.approx(0.01)


def test_large_steps_that_the_device_is_slower_at_than_the_host_are_learned() -> None:
    pace = unlearning()
    launch(pace, plan(1, 3000), 0.0, 0.010)
    launch(pace, plan(2, 3000), 0.010, 0.020)
    for step_id, end in ((1, 0.025), (2, 0.050), (3, 0.075)):
        pace.completed(step_id, end)
        launch(pace, plan(step_id + 2, 3000), end, end + 0.010)
    assert learned(pace) == [(1, 0.025), (2, 0.025), (3, 0.025)]


def test_a_large_step_alone_is_learned_with_its_launch() -> None:
    pace = unlearning()
    launch(pace, plan(1, 3000), 0.0, 0.010)
    pace.completed(1, 0.0101)
    assert learned(pace) == [(1, 0.0101)]


def engine_with_streams(num_streams: int, max_tokens: int, run_ahead: int = 0) -> FakeEngine:
    engine = FakeEngine(
        num_blocks=4000, max_model_len=9000, max_num_batched_tokens=8192, block_size=64, max_itl_ms=20,
        enable_prefix_caching=False, max_num_seqs=64, run_ahead=run_ahead,
    )  # fmt: skip
    pace = engine.scheduler._pace
    pace._model.observe(np.full(9, 500.0), np.zeros(9), np.ones(9, np.bool_), np.full(9, 1e-3))
    pace._most_seen = 8192
    for _ in range(2):
        pace.large_steps.launched(SLOW)
    for number in range(num_streams):
        engine.add(number, 10, max_tokens=max_tokens)
    return engine


@pytest.mark.parametrize("rules", [{"pooling": PoolingRules()}, {"max_tokens": 1}])
@pytest.mark.parametrize(("length", "num_prompts", "num_tokens"), [(512, 4, 2048), (64, 16, 1024), (5000, 1, 2048)])
def test_beside_streams_steps_are_small_while_large_ones_are_barred(
    length: int, num_prompts: int, num_tokens: int, rules: dict[str, object]
) -> None:
    engine = engine_with_streams(2, 50)
    engine.step()
    for number in range(40):
        engine.add(100 + number, length, **rules)
    step = engine.step()
    assert step is not None
    assert (step.num_decode_rows, step.num_rows - 2, step.total_tokens - 2) == (2, num_prompts, num_tokens)


def test_last_tokens_on_their_way_are_not_held_up_by_a_large_step_without_streams() -> None:
    engine = engine_with_streams(2, 2, run_ahead=2)
    assert engine.launch() is not None  # the first token of each
    assert engine.launch().num_decode_rows == 2  # type: ignore[union-attr]
    for number in range(40):
        engine.add(100 + number, 512, max_tokens=1)
    step = engine.launch()
    assert step is not None
    assert (step.num_decode_rows, step.total_tokens) == (0, 2048)
    for _ in range(3):
        engine.finish()
    step = engine.launch()
    assert step is not None
    assert step.total_tokens == 8192, "nobody waits any more"


def test_steps_that_the_host_launches_for_longer_than_the_device_runs_are_not_worth_it() -> None:
    pace = Pace(20.0)
    tokens = np.linspace(100, 2000, 20)
    pace._model.observe(tokens, np.zeros(20), np.ones(20, np.bool_), 1e-3 + 2e-6 * tokens)
    pace._most_seen = 8000
    assert not pace.must_be_small(0, 0.0, 3000), "nothing is known of launches"
    pace.large_steps.launched(0.010)
    # 2,048 tokens take 5.1 ms: 402 a ms; large steps of less than 4,020 are at most so many in 10 ms.
    assert [pace.must_be_small(0, 0.0, num) for num in (2048, 2049, 4000, 4050, 8000)] == [
        False,
        True,
        True,
        False,
        False,
    ]
    pace._most_seen = 1000
    assert not pace.must_be_small(0, 0.0, 3000), "one that is larger than any before is tried"
