"""The simulator against times worked out by hand and against the engine: pytest tests/study/test_simulator.py"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.study.figures import figures, prompt_time_share
from cb_backend.study.replay import ReplayError, replay
from cb_backend.study.static_admission import StaticAdmission
from tests.study.made_up import (
    ROW_S,
    STEP_S,
    TOKEN_S,
    mixed_traffic,
    scripted_engine,
    simulate,
    step_times,
    traffic,
)


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_one_request_takes_its_steps(run_ahead: int) -> None:
    """30 prompt tokens in a step, then four decode steps of one row; run-ahead does not make a device faster."""
    result = simulate(traffic([30], [5]), run_ahead=run_ahead)
    first = STEP_S + 30 * TOKEN_S
    assert result.latencies.ttft.tolist() == pytest.approx([first])
    assert result.latencies.e2e.tolist() == pytest.approx([first + 4 * (STEP_S + ROW_S)])
    assert result.latencies.token_gaps.tolist() == pytest.approx([STEP_S + ROW_S] * 4)
    assert result.idle_seconds == 0


def test_an_idle_engine_waits_for_the_next_arrival_without_taking_time() -> None:
    result = simulate(traffic([10, 10], [2, 2], [0.0, 50.0]))
    assert result.seconds == pytest.approx(50 + STEP_S + 10 * TOKEN_S + STEP_S + ROW_S)
    assert result.idle_seconds == pytest.approx(50 - STEP_S - 10 * TOKEN_S - STEP_S - ROW_S)
    assert result.latencies.ttft[1] == pytest.approx(STEP_S + 10 * TOKEN_S)  # from its arrival
    assert result.wall_seconds < result.seconds


def test_a_static_batch_waits_for_its_longest_answer() -> None:
    """Two slots, answers of 2, 10 and 2 tokens: the third joins at once in flight, and after the tenth if static."""
    load = traffic([10, 10, 10], [2, 10, 2])
    in_flight = simulate(load, max_num_seqs=2)
    static = simulate(load, policy=StaticAdmission, max_num_seqs=2)
    assert len(in_flight.steps.ends) == 10
    assert len(static.steps.ends) == 12
    assert static.latencies.ttft[2] > static.latencies.e2e[1]
    assert figures(in_flight).slots_busy > figures(static).slots_busy
    # 2 rows in 2 steps, 1 row in 8, then 1 row in 2, by hand weighted with the steps' times.
    seconds = [STEP_S + 20 * TOKEN_S, STEP_S + 2 * ROW_S, *[STEP_S + ROW_S] * 8, STEP_S + 10 * TOKEN_S, STEP_S + ROW_S]
    rows = [2, 2, *[1] * 8, 1, 1]
    assert figures(static).mean_rows == pytest.approx(np.average(rows, weights=seconds))


def test_a_static_batch_reserves_what_clients_allow() -> None:
    """160 tokens of cache: of requests that may need 10 + 70 tokens two run together, of 10 + 10 eight."""
    load = traffic([10] * 8, [10] * 8, max_tokens=70)
    settings: dict[str, Any] = {"policy": StaticAdmission, "max_num_seqs": 8, "num_gpu_blocks_override": 40}
    reserved = simulate(load, **settings)
    known = simulate(load.with_known_lengths(), **settings)
    assert reserved.steps.num_rows.max() == 2
    assert known.steps.num_rows.max() == 8
    assert simulate(load, max_num_seqs=8, num_gpu_blocks_override=40, admission_reserve=-10.0).steps.num_rows.max() == 8


@pytest.mark.parametrize(
    ("run_ahead", "policy"), [(0, ContinuousAdmission), (0, StaticAdmission), (2, ContinuousAdmission)]
)
def test_plans_are_those_of_the_engine(run_ahead: int, policy: PolicyKind) -> None:
    """The same requests at once through another runner: step for step the same rows, tokens, blocks, preemptions."""
    load = mixed_traffic(40).at_once()
    settings: dict[str, Any] = {
        "run_ahead": run_ahead,
        "policy": policy,
        "max_num_batched_tokens": 32,
        "admission_reserve": -10.0,
    }
    simulated = simulate(load, num_gpu_blocks_override=40, **settings)
    real = replay(scripted_engine(40, is_delayed=run_ahead > 0, **settings), load)
    assert simulated.steps.shapes.tolist() == real.steps.shapes.tolist()
    assert simulated.steps.num_free_blocks.tolist() == real.steps.num_free_blocks.tolist()
    assert simulated.num_preemptions == real.num_preemptions
    assert (simulated.num_preemptions > 0) == policy.is_continuous


def test_shared_prefixes_are_found() -> None:
    """Mooncake's blocks of 512 tokens: the second prompt has the first block of the first and one of its own."""
    load = traffic([1024, 1024], [2, 2], [0.0, 10.0], prefix_ids=[(7, 8), (7, 9)])
    times = step_times(max_model_len=2000)
    result = simulate(load, times, enable_prefix_caching=True, max_num_batched_tokens=2048)
    assert result.num_cached_prompt_tokens == 512
    assert figures(result).cached_share == 0.25
    assert simulate(load, times).num_cached_prompt_tokens == 0


def test_layers_with_a_window_leave_room_for_more_rows() -> None:
    """Half of the layers see 16 tokens: a request of 400 holds little more than half of what it would without."""
    load = traffic([200] * 12, [200] * 12)
    settings: dict[str, Any] = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 900}
    kept, given_back = (simulate(load, step_times(kv_windows=windows), **settings) for windows in ((0, 0), (0, 16)))
    assert figures(given_back).mean_rows > 1.3 * figures(kept).mean_rows
    assert given_back.num_preemptions < kept.num_preemptions


def test_share_of_prompts_in_the_time() -> None:
    """A step with 100 prompt tokens is 20 ms, of which all counts as the prompt's; then 9 of 11 ms."""
    result = simulate(traffic([100], [10]))
    assert prompt_time_share(result, step_times()) == pytest.approx(0.02 / (0.02 + 9 * 0.011))


def test_an_answer_that_cannot_end_where_it_should_has_no_figures() -> None:
    with pytest.raises(ReplayError, match="1 requests ended early, the first with 30 of 60 tokens"):
        simulate(traffic([10], [60]), num_gpu_blocks_override=10)  # the whole cache holds 40 tokens


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    load = traffic([5] * 8, [40] * 8)
    replay(scripted_engine(1000), load, progress=lambda num_ended, num_requests: seen.append((num_ended, num_requests)))
    assert {total for _, total in seen} == {8}
    ended = [count for count, _ in seen]  # two batches of four, of some forty steps each
    assert ended == sorted(ended)
    assert {0, 4} <= set(ended) <= {0, 4, 8}
    assert len(ended) > 8
