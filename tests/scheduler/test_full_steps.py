"""Steps with prompts that are as large as the budget are planned to fit a graph of the budget's rows, and not more."""

from __future__ import annotations

import random

import pytest

from cb_backend.contracts.step import StepPlan
from cb_backend.engine.step_shapes import MAX_GRAPH_PROMPTS
from tests.fakes.engine import FakeEngine
from tests.fakes.graphs import graphs_of


def num_prompt_tokens(plan: StepPlan | None) -> int:
    assert plan is not None
    return plan.total_tokens - plan.num_decode_rows


def busy_engine(num_streams: int, **arguments: object) -> FakeEngine:
    """So many running streams, each past its prompt, for as long as a test lasts."""
    engine = FakeEngine(
        num_blocks=4000, max_model_len=9000, block_size=16, enable_prefix_caching=False,
        **{"max_num_batched_tokens": 2048, "max_num_seqs": 128, **arguments},
    )  # fmt: skip
    for number in range(num_streams):
        engine.add(number, 4, max_tokens=200)
    engine.step()
    return engine


@pytest.mark.parametrize("run_ahead", [0, 3])
@pytest.mark.parametrize(
    ("max_num_seqs", "budget"), [(128, 2048), (64, 1024), (100, 700), (96, 512), (100, 2304), (256, 4096), (256, 8192)]
)
def test_every_plan_under_full_load_fits_a_graph_of_at_most_the_budget(
    max_num_seqs: int, budget: int, run_ahead: int
) -> None:
    engine = FakeEngine(
        num_blocks=10_000, max_model_len=5000, block_size=64, run_ahead=run_ahead, enable_prefix_caching=False,
        max_num_batched_tokens=budget, max_num_seqs=max_num_seqs,
    )  # fmt: skip
    graphs, rng, number = graphs_of(max_num_seqs, budget), random.Random(1), 0
    decode_rows: set[int] = set()
    num_full = 0
    for _ in range(300):
        while engine.scheduler.num_waiting < 4 + budget // 1024:
            engine.add(number, rng.randint(budget // 8, min(2 * budget, 4800)), max_tokens=rng.randint(1, 120))
            number += 1
        plan = engine.step()
        if plan is None or not num_prompt_tokens(plan):
            continue
        num_prompts = plan.num_rows - plan.num_decode_rows
        assert num_prompts <= MAX_GRAPH_PROMPTS, "the load is not what this test needs"
        found = graphs.find(plan.num_decode_rows, num_prompt_tokens(plan), num_prompts)
        assert found is not None, f"{plan.num_decode_rows} rows beside {num_prompt_tokens(plan)} prompt tokens"
        assert found[1].shape.num_tokens <= budget
        decode_rows.add(plan.num_decode_rows)
        num_full += found[1].shape.num_tokens == budget
    assert num_full > 100, "nearly every step is a full one"
    assert len(decode_rows) > 20


def test_a_full_step_leaves_room_for_the_padding_of_its_decode_rows() -> None:
    engine = busy_engine(40)
    engine.add(1000, 5000, max_tokens=1)
    assert [num_prompt_tokens(engine.step()) for _ in range(3)] == [1984, 1984, 5000 - 2 * 1984]


def test_prompts_alone_get_the_whole_budget() -> None:
    engine = FakeEngine(num_blocks=4000, max_model_len=9000, max_num_batched_tokens=2048)
    engine.add(1, 5000, max_tokens=1)
    assert num_prompt_tokens(engine.step()) == 2048


def test_a_whole_prompt_that_fits_the_budget_but_no_graph_does_not_wait_for_the_streams() -> None:
    engine = busy_engine(40, enable_chunked_prefill=False)
    engine.add(1000, 2000, max_tokens=1)
    plan = engine.step()
    assert plan is not None
    assert (plan.num_decode_rows, num_prompt_tokens(plan)) == (40, 2000)


@pytest.mark.parametrize("num_streams", [450, 519])
def test_prompts_go_on_where_streams_take_nearly_the_whole_budget(num_streams: int) -> None:
    engine = busy_engine(num_streams, max_num_batched_tokens=520, max_num_seqs=520)
    for _ in range(100):  # the streams' own prompts
        plan = engine.step()
        if plan is not None and plan.num_decode_rows == num_streams:
            break
    engine.add(1000, 1000, max_tokens=1)
    plan = engine.step()
    assert plan is not None
    assert plan.num_decode_rows == num_streams
    assert 4 * num_prompt_tokens(plan) >= 3 * (520 - num_streams)
