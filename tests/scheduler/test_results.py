"""What a step's result means for accounts: tenants are charged, lengths learned, attachments reach whom they are of."""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.step import (
    NO_TOKEN,
    EngineOutput,
    Failure,
    PromptLogprobs,
    RowStatus,
    StepResult,
    TokenLogprobs,
)
from cb_backend.engine.scheduler.stats import FIRST_SAMPLES, OutputLengths
from tests.fakes.engine import FakeEngine


def logprobs(owners: list[int]) -> TokenLogprobs:
    values = np.array(owners, np.float32)
    top = np.zeros((len(owners), 0))
    return TokenLogprobs(np.array(owners), -values, {"rank": values}, top.astype(np.int32), top.astype(np.float32))


def told(output: EngineOutput) -> list[tuple[str, list[int]]]:
    return [(type(part).__name__, part.owners.tolist()) for part in output.attached]


# ---- tenants --------------------------------------------------------------------------------------------------------


def test_a_tenant_is_charged_what_is_not_cached_and_what_is_expected() -> None:
    engine = FakeEngine()
    charged: list[tuple[int, float]] = []
    start, share = engine.scheduler._parts.share.start, engine.scheduler._parts.share
    share.start = lambda request, tokens: (  # type: ignore[method-assign]
        charged.append((request.request_id, tokens)),
        start(request, tokens),
    )
    for number in (1, 2):
        engine.add(number, [7] * 9, max_tokens=10, scheduling=SchedulingParams(tenant="a"))
        engine.run()
    used_share = 0.05  # of what the first was allowed, all
    assert charged == [(1, 9.0), (2, pytest.approx(9 - 8 + used_share * 10))]


def test_who_has_ended_is_charged_what_it_has_cost_without_the_cached_tokens() -> None:
    engine = FakeEngine()
    settled: list[tuple[int, int, bool]] = []
    end, share = engine.scheduler._parts.share.end, engine.scheduler._parts.share
    share.end = lambda request, tokens, started: (  # type: ignore[method-assign]
        settled.append((request.request_id, tokens, started)),
        end(request, tokens, started),
    )
    for number in (1, 2):
        engine.add(number, [7] * 9, max_tokens=4)
        engine.run()
    engine.add(3, 9)
    engine.scheduler.cancel(3)
    assert settled == [(1, 13, True), (2, 13 - 8, True), (3, 0, False)]


# ---- lengths --------------------------------------------------------------------------------------------------------


def test_lengths_are_learned_of_those_that_ended_themselves() -> None:
    engine = FakeEngine()
    added: list[tuple[int, int]] = []
    engine.scheduler._parts.lengths.add = lambda *figures: added.append(figures)  # type: ignore[method-assign]
    engine.add(1, 5, max_tokens=7)
    engine.add(2, 9, max_tokens=20, stop_ids=(12,))
    engine.add(3, 9, max_tokens=20)
    engine.step()
    engine.scheduler.cancel(3)
    engine.run()
    assert sorted(added) == [(3, 20), (7, 7)], "tokens of the output, of those allowed; not of who was cancelled"


def test_the_used_share_moves_by_a_twentieth_towards_each_request_that_ends() -> None:
    lengths = OutputLengths()
    assert lengths.used_share == 0.0
    lengths.add(10, 10)
    assert lengths.used_share == pytest.approx(0.05)
    lengths.add(5, 10)
    assert lengths.used_share == pytest.approx(0.05 + 0.05 * (0.5 - 0.05))
    for _ in range(500):
        lengths.add(30, 100)
    assert lengths.used_share == pytest.approx(0.3)


def test_before_anything_is_known_answers_are_short_and_from_the_first_eight_on_they_are_known() -> None:
    lengths = OutputLengths()
    mean, deviation = lengths.still_to_come(np.array([0, 15, 16]))
    assert (mean.tolist(), deviation.tolist()) == ([16.0, 1.0, 16.0], [0.0, 0.0, 16.0])
    for _ in range(len(FIRST_SAMPLES) - 1):
        lengths.add(100, 1000)
    assert lengths.still_to_come(np.array([50]))[0].tolist() == [50.0], "seven are too few: as much again"
    lengths.add(100, 1000)
    assert lengths.still_to_come(np.array([0, 40]))[0].tolist() == [100.0, 60.0], "what was believed counts no more"
    assert lengths.still_to_come(np.array([100]))[0].tolist() == [100.0]


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_pooling_requests_end_with_their_prompts_and_those_beside_them_go_on() -> None:
    engine = FakeEngine()
    engine.add(1, 5)
    engine.add(2, [7] * 9, pooling=PoolingRules())
    engine.add(3, 9, pooling=PoolingRules())
    engine.launch()
    engine.scheduler.cancel(3)
    output = engine.finish()
    assert (output.request_ids.tolist(), output.token_ids.tolist()) == ([1, 2], [10, NO_TOKEN])
    assert output.finish_reasons.tolist() == [0, FinishReason.STOP]
    assert output.num_cached_tokens == {1: 0, 2: 0}
    engine.add(4, [7] * 9, pooling=PoolingRules())
    engine.launch()
    assert engine.finish().num_cached_tokens == {4: 8}
    engine.run()
    assert engine.tokens == {1: list(range(10, 18)), 2: [], 3: [], 4: []}


def test_rows_that_complete_no_block_are_not_looked_at_for_the_cache() -> None:
    engine = FakeEngine()
    for number, length in enumerate((3, 4, 9)):
        engine.add(number, length)
    engine.launch()
    assert engine.scheduler._in_flight._steps[0].filled.tolist() == [1, 2]


def test_what_waits_for_a_step_is_given_back_when_the_step_fails() -> None:
    engine = FakeEngine()
    engine.add(1, 9)
    engine.launch()
    engine.scheduler.cancel(1)
    assert engine.kv.num_free_blocks == 100 - 3
    engine.scheduler.fail_step(1)
    assert engine.kv.num_free_blocks == 100


def test_what_launched_steps_touch_is_given_back_with_the_last_of_them() -> None:
    engine = FakeEngine(run_ahead=2)
    engine.add(1, 9)
    for _ in range(3):
        engine.launch()
    engine.scheduler.cancel(1)
    free = []
    while engine.in_flight:
        engine.finish()
        free.append(engine.kv.num_free_blocks)
    assert free == [97, 97, 100]


# ---- attachments ----------------------------------------------------------------------------------------------------


def test_what_is_attached_reaches_the_requests_of_its_rows_and_failures_those_that_failed() -> None:
    engine = FakeEngine()
    for number in (5, 6, 7):
        engine.add(number, 5)
    engine.launch()
    flags = np.array([RowStatus.OK, RowStatus.NOT_FINITE, RowStatus.OK], np.uint8)
    attached = (logprobs([0, 1, 2]), Failure(np.array([1]), "why"), Failure(np.array([2]), "of one that is well"))
    result = StepResult(1, np.array([[10], [-1], [10]], np.int32), np.array([1, 0, 1], np.uint8), flags, attached)
    output = engine.scheduler.update_from_output(result)
    assert output.request_ids.tolist() == [6, 5, 7], "who failed is told first"
    assert told(output) == [("Failure", [6]), ("TokenLogprobs", [5, 7])]
    figures = output.attached[1]
    assert isinstance(figures, TokenLogprobs)
    assert figures.sampled.tolist() == [0.0, -2.0]
    assert figures.figures["rank"].tolist() == [0.0, 2.0]


def test_what_is_attached_to_who_has_left_is_dropped() -> None:
    engine = FakeEngine()
    for number in (5, 6):
        engine.add(number, 5)
    engine.launch()
    engine.scheduler.cancel(5)
    empty = np.zeros(0)
    prompt = PromptLogprobs(np.array([0]), 1, empty.astype(np.float32), {}, empty.astype(np.int32), empty)
    result = StepResult(
        1, np.array([[10], [10]], np.int32), np.ones(2, np.uint8), np.zeros(2, np.uint8), (logprobs([0, 1]), prompt)
    )
    assert told(engine.scheduler.update_from_output(result)) == [("TokenLogprobs", [6])]
