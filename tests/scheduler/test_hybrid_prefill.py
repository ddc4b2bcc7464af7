"""The hybrid policy: a queue of prompts is drained in large steps of its own, and running streams keep their share.

I11 decode share · measured step times decide · mixed steps again once the prompts are done
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.step import StepPlan
from cb_backend.study.replay import Replay, replay
from cb_backend.study.simulator import VirtualClock, simulated_engine
from cb_backend.study.traffic import Traffic
from tests.fakes.engine import FakeEngine
from tests.simulation.replay import FormulaTimes

NUM_STREAMS, NUM_PROMPTS = 2, 60


def run(policy: str, num_prompts: int = NUM_PROMPTS, length: int = 2000) -> tuple[Replay, list[StepPlan]]:
    """Two long streams; after a second many prompts of `length` tokens arrive at once, each for one token."""
    config = engine_config_from_dict(
        {"model": "m", "run_ahead": 0, "max_itl_ms": 20, "prefill_policy": policy, "max_num_batched_tokens": 4096}
    )
    clock = VirtualClock()
    traffic = Traffic(
        [np.full(200 if n < NUM_STREAMS else length, 3 + n, np.int32) for n in range(NUM_STREAMS + num_prompts)],
        [600] * NUM_STREAMS + [1] * num_prompts,
        [600] * NUM_STREAMS + [1] * num_prompts,
        [0.0] * NUM_STREAMS + [1.0 + n / 1000 for n in range(num_prompts)],
    )
    engine = simulated_engine(config, FormulaTimes(num_blocks=20_000), clock)  # type: ignore[arg-type]
    plans: list[StepPlan] = []
    schedule = engine.scheduler.schedule

    def noting() -> StepPlan | None:
        plan = schedule()
        plans.extend([plan] if plan is not None else [])
        return plan

    engine.scheduler.schedule = noting  # type: ignore[method-assign]
    return replay(engine, traffic, clock, clock.sleep), plans


def test_prompts_are_drained_faster_and_streams_go_on() -> None:
    mixed, _ = run("mixed")
    hybrid, plans = run("hybrid")
    first = slice(NUM_STREAMS, None)
    assert hybrid.latencies.ttft[first].mean() < 0.8 * mixed.latencies.ttft[first].mean()
    alone = [plan.num_decode_rows == 0 for plan in plans[1:]]
    assert sum(alone) >= 10, "steps of prompts alone"
    assert max(plan.total_tokens for plan in plans) == 4096
    assert not any(one and other for one, other in pairwise(alone)), "I11: every other step"
    busy = [plan for plan in plans[-100:] if plan.num_rows > plan.num_decode_rows]
    assert not busy, "the streams are alone again at the end, with steps of their own"


def test_a_few_prompts_are_not_worth_it() -> None:
    _, plans = run("hybrid", num_prompts=1)
    assert all(plan.num_decode_rows for plan in plans[1:])


def test_a_prompt_larger_than_the_budget_is_drained_alone() -> None:
    _, plans = run("hybrid", length=6000)
    alone = [plan for plan in plans if plan.num_rows == 1 and not plan.num_decode_rows and plan.total_tokens == 4096]
    assert len(alone) >= 4


def test_streams_go_on_where_the_prompts_cannot_start() -> None:
    """It would be better to drain the queue, but the streams have all the slots."""
    engine = FakeEngine(
        num_blocks=1000, max_num_batched_tokens=2048, max_num_seqs=NUM_STREAMS, max_model_len=3000, block_size=64,
        enable_prefix_caching=False, max_itl_ms=8, prefill_policy="hybrid",
    )  # fmt: skip
    now = 0.0

    def step() -> StepPlan | None:
        nonlocal now
        plan = engine.launch()
        if plan is not None:
            now += 3e-3 + 1.2e-5 * plan.total_tokens
            engine.scheduler.set_time(now)
            engine.finish()
        return plan

    for number in range(8):  # so that the times are known
        engine.add(number, 2000, max_tokens=1)
    while engine.scheduler.has_unfinished():
        step()
    for number in range(100, 100 + NUM_STREAMS):
        engine.add(number, 20, max_tokens=100)
    step()
    for number in range(200, 200 + NUM_PROMPTS):
        engine.add(number, 2000, max_tokens=1)
    assert engine.scheduler._prefill.is_better_without_streams()
    for _ in range(20):
        plan = step()
        assert plan is not None
        assert plan.num_decode_rows == NUM_STREAMS


def test_the_policy_needs_a_limit_to_go_beyond() -> None:
    with pytest.raises(ConfigError, match="max_itl_ms"):
        FakeEngine(prefill_policy="hybrid")
    with pytest.raises(ConfigError, match="prefill_policy"):
        FakeEngine(prefill_policy="fast", max_itl_ms=20.0)
