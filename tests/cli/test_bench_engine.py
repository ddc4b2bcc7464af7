"""A benchmark pass over a runner without a model: pytest tests/cli/test_bench_engine.py"""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.request import Request
from cb_backend.contracts.step import MaskSource, StepPlan
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.runner.step_graphs import StepGraphs
from cb_backend.engine.step_shapes import StepShape
from cb_backend.study.pass_report import Limits, pairs_record, pass_record, step_table, table
from cb_backend.study.replay import ReplayError, drive, fresh_engine
from cb_backend.study.roofline import CardLimits, ModelShape, decode_seconds
from cb_backend.study.timed_pass import PassResult, run_pass
from cb_backend.study.workloads import Workload, offline
from tests.fakes.plan_follower import FakePending
from tests.fakes.runners import ScriptedRunner

BLOCK_SIZE = 4
SHAPE = ModelShape(
    num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=16, vocab_size=32
)
CARD = CardLimits(bandwidth=1e7, flops=1e7)
LIMITS = Limits(SHAPE, CARD, num_cache_tokens=4000)
STEP_SECONDS = 0.004


class SlowRunner(ScriptedRunner):
    """Every step takes the same time, so that latencies can be told beforehand; ids may start again."""

    def execute(self, plan: StepPlan, masks: MaskSource) -> FakePending:
        if plan.step_id == 1:
            self.num_steps = 0  # another pass over the same runner
        time.sleep(STEP_SECONDS)
        return super().execute(plan, masks)


def engine(max_num_seqs: int = 4, num_blocks: int = 1000, run_ahead: int = 0, is_delayed: bool = False) -> LLMEngine:
    config = engine_config_from_dict(
        {"model": "fake", "max_num_seqs": max_num_seqs, "run_ahead": run_ahead, "enable_prefix_caching": False}
    )
    info = ModelInfo(
        model="fake",
        tokenizer_dir="",
        vocab_size=32,
        max_model_len=500,
        eos_token_ids=(1,),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        dtype="bfloat16",
        device="cpu",
    )
    return LLMEngine(config, SlowRunner(BLOCK_SIZE, lambda request, n: (request + n) % 32, is_delayed), info)


def workload(prompt_lens: list[int], output_lens: list[int]) -> Workload:
    return offline("test", [[index % 32 for index in range(length)] for length in prompt_lens], output_lens)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_pass_counts_every_token_and_step(run_ahead: int) -> None:
    """Three requests of 5, 5 and 9 tokens: one step with the prompts, then decode steps of 3 and of 1 rows."""
    result = run_pass(engine(run_ahead=run_ahead, is_delayed=run_ahead > 0), workload([6, 7, 8], [5, 5, 9]), 0.6)
    steps = list(result.steps.steps.values())
    assert result.num_output_tokens == 19
    assert [step.num_scheduled_tokens.sum() for step in steps[:2]] == [21, 3]
    assert steps[0].num_sampling_rows == 3
    assert not steps[0].is_decode
    assert all(step.is_decode for step in steps[1:])
    if not run_ahead:
        assert [step.num_rows for step in steps] == [3] * 5 + [1] * 4
        assert len(result.steps.full_decode_steps()) == 4
        assert len(result.steps.step_intervals()) == 3
        assert result.steps.step_intervals().min() >= STEP_SECONDS
    assert len(result.latencies.ttft) == 3
    assert len(result.latencies.token_gaps) == 4 + 4 + 8
    # Nine steps one after the other, and a first token after one of them.
    assert result.seconds >= 9 * STEP_SECONDS
    assert result.latencies.ttft.min() >= STEP_SECONDS
    assert result.latencies.e2e.max() == pytest.approx(result.seconds, abs=1e-9)


def test_host_time_is_split_by_call() -> None:
    host = run_pass(engine(), workload([4, 4], [6, 6]), 0.0).steps.host_summary()
    parts = [host[name] for name in ("schedule", "execute", "update_from_output")]
    assert all(part is not None and part["min"] > 0 for part in parts)
    assert parts[1] is not None
    assert parts[1]["min"] >= STEP_SECONDS * 1e6  # this runner sleeps where a real one launches
    assert host["total"] is not None
    assert host["total"]["mean"] == pytest.approx(sum(part["mean"] for part in parts if part), rel=1e-6)


def test_the_executed_floor_is_the_sum_over_steps() -> None:
    result = run_pass(engine(), workload([6], [4]), 0.6)
    floors = [result.steps.floor_seconds(SHAPE, CARD, [step]) for step in result.steps.steps.values()]
    # After the prompt: contexts of 7, 8 and 9 tokens, the row's own token included.
    assert floors[1:] == pytest.approx([decode_seconds(SHAPE, CARD, 1, context) for context in (7, 8, 9)])
    assert result.steps.floor_seconds(SHAPE, CARD) == pytest.approx(sum(floors))


def test_the_time_of_a_pass_by_kind_of_step() -> None:
    """One step of 21 prompt tokens, 4 with three rows and 4 with one: every second of the pass is somebody's."""
    result = run_pass(engine(), workload([6, 7, 8], [5, 5, 9]), 0.6)
    record = pass_record(workload([6, 7, 8], [5, 5, 9]), result, LIMITS)
    decode, prompts = record["step_kinds"]
    assert (decode["kind"], decode["steps"], decode["rows"]) == ("decode, to   32 rows", 8, 2.0)
    assert (prompts["kind"], prompts["steps"], prompts["tokens"]) == ("prompts, to    32 tokens", 1, 21.0)
    assert decode["seconds"] + prompts["seconds"] == pytest.approx(result.seconds, abs=1e-3)
    whole = result.steps.floor_seconds(SHAPE, CARD)
    assert decode["floor_seconds"] + prompts["floor_seconds"] == pytest.approx(whole, abs=1e-3)
    assert prompts["floor_seconds"] == pytest.approx(
        result.steps.floor_seconds(SHAPE, CARD, [next(iter(result.steps.steps.values()))]), abs=1e-3
    )
    heading, first, second = step_table(record).splitlines()
    assert heading.split() == ["step", "steps", "s", "floor", "ms", "each", "rows", "tokens"]
    assert first.startswith("decode, to   32 rows            8 ")
    assert second.split()[-2:] == ["3", "21"]
    unmeasured = step_table(pass_record(workload([6, 7, 8], [5, 5, 9]), result, None))
    assert " - " in unmeasured.splitlines()[1]


def test_requests_join_when_they_arrive() -> None:
    late = replace(workload([4, 4], [2, 2]), arrivals=[0.0, 0.15])
    result = run_pass(engine(), late, 0.6)
    assert sum(step.num_rows for step in result.steps.steps.values()) == 4
    assert result.seconds >= 0.15
    assert result.idle_seconds <= result.seconds - 4 * STEP_SECONDS
    assert result.latencies.ttft[1] <= result.seconds - 0.15  # from the arrival, not from the start


def test_a_request_that_ends_early_has_no_figures() -> None:
    with pytest.raises(ReplayError, match="2 requests ended early, the first with 36 of 60 tokens"):
        run_pass(engine(num_blocks=10), workload([4, 4], [60, 60]), 0.6)  # the whole cache holds 40 tokens


def test_a_fresh_engine_starts_cold_over_the_same_runner() -> None:
    first = engine()
    again = fresh_engine(first, max_num_seqs=1)
    assert again.runner is first.runner
    assert again.config.max_num_seqs == 1
    run_pass(again, workload([4, 4], [3, 3]), 0.6)
    assert run_pass(fresh_engine(first), workload([4, 4], [3, 3]), 0.6).stats.num_output_tokens == 6


def test_tokens_of_preempted_requests_are_counted_as_recomputed() -> None:
    """Two requests of 4 in and 12 out need 4 blocks each at the end; the cache has 6, and nothing keeps one waiting."""
    tight = fresh_engine(engine(num_blocks=7), admission_reserve=-10)
    result = run_pass(tight, workload([4, 4], [12, 12]), 0.6)
    record = pass_record(workload([4, 4], [12, 12]), result, None)
    assert record["preemptions"] == 1
    # Both have 3 full blocks, 12 tokens, when one needs a fourth: the other's are computed again.
    assert record["recomputed_tokens"] == 12
    assert pass_record(workload([4], [9]), run_pass(engine(), workload([4], [9]), 0.6), None)["recomputed_tokens"] == 0


def test_tokens_of_the_prefix_cache_are_no_work_that_was_needed() -> None:
    """The log of a pass that computed 8 tokens again: as many where 8 others of its prompts were found in the cache."""
    given = workload([12, 12], [3, 3])
    result = run_pass(engine(), given, 0.6)
    first = next(iter(result.steps.steps.values()))
    first.num_scheduled_tokens[0] += 8
    assert pass_record(given, result, None)["recomputed_tokens"] == 8
    first.num_scheduled_tokens[1] -= 8
    stats = msgspec.structs.replace(result.stats, num_cached_prompt_tokens=8)
    assert pass_record(given, replace(result, stats=stats), None)["recomputed_tokens"] == 8


def test_the_share_of_padding_is_of_the_graphs_that_hold_the_steps() -> None:
    """A step of 21 prompt tokens without a graph, 4 steps of 3 rows in graphs of 4, and 4 of 1 row in graphs of 1."""
    result = run_pass(engine(), workload([6, 7, 8], [5, 5, 9]), 0.6)
    assert result.padding_share is None  # this runner has no graphs
    graphs = StepGraphs()
    assert result.steps.padding_share(SimpleNamespace(graphs=graphs)) is None  # none captured
    for shape in (StepShape(1), StepShape(4), StepShape(8)):
        graphs.add(shape, Mock(), Mock(shape=shape))
    share = result.steps.padding_share(SimpleNamespace(graphs=graphs))
    assert share == pytest.approx(4 / (21 + 4 * 4 + 4))
    shape = StepShape(0, 32, 4)
    graphs.add(shape, Mock(), Mock(shape=shape))
    assert result.steps.padding_share(SimpleNamespace(graphs=graphs)) == pytest.approx((11 + 4) / (32 + 16 + 4))
    padded = pass_record(workload([6, 7, 8], [5, 5, 9]), replace(result, padding_share=share), None)
    assert padded["padding_share"] == round(4 / 41, 4)
    assert " 10% " in table([{**padded, "peak_memory_bytes": 1e9}]).splitlines()[1]


def passes(*pairs: tuple[float, float]) -> list[tuple[Workload, PassResult, Workload, PassResult]]:
    """(seconds of the one-token pass, of the five-token pass), over real results."""
    short, full = workload([4], [1]), workload([4], [5])
    results = [run_pass(engine(), one, 0.6) for one in (short, full)]
    return [(short, replace(results[0], seconds=a), full, replace(results[1], seconds=b)) for a, b in pairs]


def test_latency_pairs_as_the_peer_computes_them() -> None:
    record = pairs_record(passes((0.1, 0.5), (0.3, 0.9), (0.2, 0.6)), None)
    assert record["ttft_ms"]["p50"] == 200.0
    assert record["tpot_ms"] == {
        "mean": 116.6667, "min": 75.0, "p50": 100.0, "p90": 160.0, "p99": 173.5, "max": 175.0
    }  # fmt: skip
    assert record["seconds"] == 0.6  # the pass of the median time stands for the rest
    assert record["passes"] == 3


def test_a_record_and_its_table_line() -> None:
    result = run_pass(engine(), workload([6, 7, 8], [5, 5, 9]), 0.6)
    record = pass_record(workload([6, 7, 8], [5, 5, 9]), result, LIMITS)
    assert (record["requests"], record["prompt_tokens"], record["output_tokens"]) == (3, 21, 19)
    assert record["output_tok_s"] == pytest.approx(19 / result.seconds, rel=1e-3)
    assert record["total_tok_s"] == pytest.approx(40 / result.seconds, rel=1e-3)
    assert record["batch_histogram"] == {"1": 4, "3-4": 5}
    limit = record["limit"]
    assert limit["fraction_executed"] == pytest.approx(limit["executed_s"] / result.seconds, abs=0.01)
    assert limit["output_tok_s"] == pytest.approx(19 / limit["ideal_s"], rel=1e-3)
    # The first row of the ideal schedule runs 8 decode steps; here 9 steps ran, the prompts' one among them.
    assert limit["ideal_s"] <= limit["executed_s"] * 1.01
    line = table([{**record, "peak_memory_bytes": 2e9}]).splitlines()[1]
    assert line.startswith("test ")
    assert line.endswith(" 2.0")
    assert f"{record['output_tok_s']:,.0f}" in line


def test_a_record_without_a_measured_card() -> None:
    record = pass_record(workload([4], [3]), run_pass(engine(), workload([4], [3]), 0.6), None)
    assert record["limit"] is None
    assert " - " in table([{**record, "peak_memory_bytes": 1e9}]).splitlines()[1]


def test_the_driver_sleeps_until_the_next_arrival() -> None:
    """With a clock of its own the driver sleeps exactly until the next arrival."""
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    it = engine()
    params = TokenRules(max_tokens=1, ignore_eos=True, seed=0)

    def make_request(index: int) -> Request:
        return it.make_request(index, np.arange(4, dtype=np.int32), params)

    outputs, idle, notes = drive(it, make_request, [2.0, 5.0], 0.0, lambda: now[0], sleep)
    assert slept == [2.0, 3.0]
    assert idle == 5.0
    assert notes.begins == notes.ends == [moment for moment, _ in outputs] == [2.0, 5.0]
    assert np.concatenate([output.request_ids for _, output in outputs]).tolist() == [0, 1]
