"""The engine's log against what was asked of the engine: tokens, chunks, joins, ends, times."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

from cb_backend.cli.timelines.steps import StepLogFile, from_dump
from cb_backend.contracts.adapters import NO_ADAPTER, AdapterSource
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.request import FinishReason, Request
from cb_backend.contracts.step import EngineOutput, JoinedRow, StepPlan
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.step_log import StepLog
from cb_backend.support.buckets import BucketCounts, one_two_five, total_of
from tests.fakes.runners import ScriptedRunner


def make_engine(run_ahead: int, num_blocks: int = 100, **arguments: int) -> LLMEngine:
    config = EngineConfig(model="fake", block_size=4, run_ahead=run_ahead, admission_reserve=-10.0, **arguments)  # type: ignore[arg-type]
    info = ModelInfo(
        model="m", tokenizer_dir="t", vocab_size=100, max_model_len=200, eos_token_ids=(), block_size=4,
        num_blocks=num_blocks, max_num_seqs=config.max_num_seqs, dtype="float32", device="cpu",
    )  # fmt: skip
    runner = ScriptedRunner(4, lambda request_id, index: 10 + index % 80, is_delayed=run_ahead > 0)
    return LLMEngine(config, runner, info)


def add(engine: LLMEngine, request_id: int, num_prompt_tokens: int, max_tokens: int) -> None:
    prompt = np.full(num_prompt_tokens, request_id, np.int32)
    params = TokenRules(max_tokens=max_tokens, ignore_eos=True, seed=0)
    engine.add_request(engine.make_request(request_id, prompt, params))


def finish(engine: LLMEngine) -> StepLogFile:
    while engine.has_unfinished():
        engine.step()
    return from_dump(engine.log.dump(10_000))


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_every_token_is_in_the_log(run_ahead: int) -> None:
    engine = make_engine(run_ahead, max_num_seqs=3, max_num_batched_tokens=8)
    asked = {1: (5, 7), 2: (20, 3), 3: (1, 12), 4: (9, 1), 5: (2, 6)}  # prompt and output tokens
    for request_id, (num_prompt_tokens, max_tokens) in asked.items():
        add(engine, request_id, num_prompt_tokens, max_tokens)
    log = finish(engine)
    computed, decoded = Counter[int](), Counter[int]()
    ended = {end.request_id: i for i, step in enumerate(log.steps) for end in step.ended}
    for i, step in enumerate(log.steps):
        assert sum(row.num_tokens for row in step.rows) <= 8
        for row in step.rows:
            if i <= ended[row.request_id]:  # beyond: launched ahead, dropped
                (computed if row.is_prefill else decoded)[row.request_id] += row.num_tokens
    assert computed == {request_id: prompt for request_id, (prompt, _) in asked.items()}
    assert +decoded == {request_id: output - 1 for request_id, (_, output) in asked.items() if output > 1}
    joins = [(join.request_id, join.num_tokens, join.num_cached_tokens) for step in log.steps for join in step.joined]
    assert joins == [(request_id, prompt, 0) for request_id, (prompt, _) in asked.items()]
    assert {end.reason for step in log.steps for end in step.ended} == {FinishReason.LENGTH}
    assert [step.step_id for step in log.steps] == list(range(1, len(log.steps) + 1))
    assert log.steps[0].num_waiting == 4 - (len(log.steps[0].joined) - 1)
    assert max(step.num_used_blocks for step in log.steps) <= 100
    for step in log.steps:
        assert 0 < step.begin <= step.end <= time.monotonic()
    stats = engine.stats()
    assert stats.steps is not None
    assert stats.steps.num_steps == len(log.steps) == sum(stats.steps.step_requests.counts)
    assert sum(stats.steps.step_tokens.sums) == sum(row.num_tokens for step in log.steps for row in step.rows)
    assert stats.steps.num_scheduled_tokens == sum(stats.steps.step_tokens.sums)


def test_preemption_and_cancellation_show() -> None:
    engine = make_engine(0, num_blocks=6, max_num_seqs=2, max_num_batched_tokens=16)
    add(engine, 1, 8, 12)
    add(engine, 2, 8, 12)
    add(engine, 3, 4, 50)
    log = finish_but_cancel(engine, 3)
    rejoined = [join.request_id for step in log.steps for join in step.joined]
    assert Counter(rejoined)[2] >= 2, "six blocks cannot hold both to their end: the younger comes twice"
    assert log.steps[-1].num_preemptions >= 1
    reasons = {end.request_id: end.reason for step in log.steps for end in step.ended}
    assert reasons == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH, 3: FinishReason.ABORT}


def finish_but_cancel(engine: LLMEngine, request_id: int) -> StepLogFile:
    while engine.has_unfinished():
        output = engine.step()
        if output is not None and request_id in output.request_ids.tolist():
            assert engine.cancel(request_id)
    return from_dump(engine.log.dump(10_000))


def test_times_by_a_known_clock() -> None:
    ticks = iter([1.0, 1.5, 3.5, 3.75, 4.75, 5.0, 5.25, 5.5, 7.5, 7.75, 8.0, 8.5])
    log = StepLog(2, 10, 4, clock=lambda: next(ticks))
    plan = [StepPlan(i, *(np.ones(1, np.int32) for _ in range(3)), np.ones(1, np.uint8), 1) for i in (1, 2)]
    output = EngineOutput(np.array([7]), np.array([1], np.int32), np.zeros(1, np.uint8))
    for i in (0, 1):
        log.begin()
        log.launching(plan[i], num_waiting=0, num_free_blocks=10, num_preemptions=0)
        log.launched()
        log.waiting()
        log.arrived()
        log.completed(i + 1, output, is_going_on=True)
    assert log.launch_seconds == 2.0 + 2.0
    assert log.wait_seconds == 1.0 + 0.25
    # Before, between and after; 0.25 of them from the end of the first step to the beginning of the second.
    assert log.host_seconds == (0.5 + 0.25 + 0.25) + 0.25 + (0.25 + 0.25 + 0.5)
    steps = log.stats().step_seconds
    assert sum(steps.counts) == 2
    assert sum(steps.sums) == (5.0 - 1.5) + (8.5 - 5.5)


def test_the_ring_forgets_the_oldest() -> None:
    engine = make_engine(0)
    engine.log = StepLog(256, 100, 4, capacity=5)
    add(engine, 9, 3, 20)
    steps = finish(engine).steps
    assert [step.step_id for step in steps] == [16, 17, 18, 19, 20]
    assert [row.request_id for row in steps[0].rows] == [9], "known although its join is forgotten"
    assert from_dump(engine.log.dump(2)).steps == steps[-2:]
    assert from_dump(engine.log.dump(0)).steps == []


def test_first_tokens_tell_when_their_request_began() -> None:
    engine = make_engine(0, max_num_batched_tokens=4)
    begin = time.monotonic()
    add(engine, 1, 10, 3)  # three chunks
    told = []
    while engine.has_unfinished():
        engine.step()
        told.append(dict(engine.log.first_tokens))
    assert told == [{}, {}, {1: engine.log.records[0].begin}, {}, {}]
    assert begin <= told[2][1] <= engine.log.records[0].end


def adapted_requests() -> dict[int, Request]:
    """1 and 4 go through `sql`, 2 through `law`, 3 through none."""
    wanted = {1: "sql", 2: "law", 3: None, 4: "sql"}
    requests = {}
    for request_id, name in wanted.items():
        source = None if name is None else AdapterSource(name, f"/adapters/{name}", 1, 1)
        prompt = np.ones(2, np.int32)
        requests[request_id] = Request(request_id, prompt, 2, TokenRules(seed=0), (), 10, adapter_source=source)
    return requests


def plan_of(
    step_id: int, joined: list[tuple[int, int, int]], loads: tuple[tuple[int, bytes], ...] = (), num_rows: int = 4
) -> StepPlan:
    """A step of the first slots. joined: slot, request_id, slot of its adapter."""
    rows = [
        JoinedRow(slot, request_id, np.ones(2, np.int32), 2, (), TokenRules(seed=0), (), 10, adapter)
        for slot, request_id, adapter in joined
    ]
    numbers = np.arange(num_rows, dtype=np.int32), np.zeros(num_rows, np.int32), np.ones(num_rows, np.int32)
    return StepPlan(step_id, *numbers, np.ones(num_rows, np.uint8), num_rows, joined=tuple(rows), adapter_loads=loads)


def log_of(plans: list[StepPlan], capacity: int = 10) -> StepLog:
    log = StepLog(4, 10, 4, adapted_requests().__getitem__, capacity=capacity)
    nothing = EngineOutput(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8))
    for plan in plans:
        log.begin()
        log.launching(plan, num_waiting=0, num_free_blocks=10, num_preemptions=0)
        log.completed(plan.step_id, nothing, is_going_on=True)
    return log


def test_adapters_of_who_joins_and_what_was_loaded_for_them() -> None:
    """Two want `sql`, which is loaded once, for the first; 3 goes through the model as it is; 2 finds its own there."""
    together = plan_of(1, [(0, 1, 1), (1, 4, 1), (2, 3, NO_ADAPTER)], ((1, b"sql"),), num_rows=3)
    log = from_dump(log_of([together, plan_of(2, [(3, 2, 0)]), plan_of(3, [])]).dump(10))
    assert log.header.adapters == {1: "sql", 2: "law", 4: "sql"}
    assert [step.adapter_loads for step in log.steps] == [[1], [], []]
    assert [(join.slot, join.request_id) for step in log.steps for join in step.joined] == [
        (0, 1),
        (1, 4),
        (2, 3),
        (3, 2),
    ]


def test_two_loads_in_one_step_are_two() -> None:
    log = from_dump(log_of([plan_of(1, [(0, 1, 1), (1, 2, 0)], ((0, b"law"), (1, b"sql")), num_rows=2)]).dump(10))
    assert log.steps[0].adapter_loads == [2, 1]


def test_adapters_are_known_of_who_joined_before_the_steps_that_are_asked_for() -> None:
    log = log_of([plan_of(1, [(0, 1, 1), (1, 2, 0)], num_rows=2), *(plan_of(i, [], num_rows=1) for i in (2, 3))])
    dump = from_dump(log.dump(1))
    assert [step.step_id for step in dump.steps] == [3]
    assert dump.header.adapters == {1: "sql"}, "2 has no row in what is asked for"


def test_without_adapters_nothing_is_said_of_them() -> None:
    engine = make_engine(0, max_num_seqs=2)
    add(engine, 1, 5, 3)
    log = finish(engine)
    assert log.header.adapters == {}
    assert {record.adapters for record in engine.log.records} == {()}
    assert all(step.adapter_loads == [] for step in log.steps)


@pytest.mark.parametrize("is_at_once", [False, True])
def test_buckets(is_at_once: bool) -> None:
    buckets = BucketCounts((1, 2, 5))
    values = [0.5, 1, 1.5, 2, 2.5, 5, 5.1, 100]
    if is_at_once:
        buckets.add_all(values[:3])
        buckets.add_all(values[3:])
    else:
        for value in values:
            buckets.add(value)
    assert buckets.read() == ([2, 2, 2, 2], [1.5, 3.5, 7.5, 105.1])
    assert total_of([buckets, buckets]) == ([4, 4, 4, 4], [3.0, 7.0, 15.0, 210.2])
    assert one_two_five(64) == (1, 2, 5, 10, 20, 50)
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
