"""Engines, step times and traffic of known figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cb_backend.contracts.config import EngineConfig, engine_config_from_dict
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.step import MaskSource, StepPlan
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.study.replay import Replay, replay
from cb_backend.study.simulator import VirtualClock, simulated_engine
from cb_backend.study.step_times import Law, StepTimes
from cb_backend.study.traffic import Traffic, traffic_of
from cb_backend.traffic.workload import PlannedRequest
from tests.fakes.plan_follower import FakePending
from tests.fakes.runners import ScriptedRunner

VOCAB_SIZE = 1000
BLOCK_SIZE = 4
STEP_S, ROW_S, TOKEN_S = 0.010, 0.001, 0.0001  # a step: 10 ms, 1 ms a decode row, 0.1 ms a prompt token


def step_times(**changes: Any) -> StepTimes:
    times = StepTimes(
        conditions={"card": "made up"},
        model="fake",
        dtype="bfloat16",
        device="cpu",
        run_ahead=0,
        max_model_len=500,
        vocab_size=VOCAB_SIZE,
        block_size=BLOCK_SIZE,
        num_blocks=1000,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        num_steps=100,
        relative_error=0.01,
        decode=Law([STEP_S], [ROW_S, 0, 0, 0, 0]),
        mixed=Law([STEP_S] * 14, [ROW_S, 0, TOKEN_S, 0, 0]),
    )
    return StepTimes(**{**{name: getattr(times, name) for name in times.__struct_fields__}, **changes})


def config(**changes: Any) -> EngineConfig:
    arguments = {"model": "fake", "max_num_seqs": 4, "block_size": BLOCK_SIZE, "enable_prefix_caching": False}
    return engine_config_from_dict({**arguments, **changes})


def traffic(
    prompt_lens: list[int],
    output_lens: list[int],
    arrivals: list[float] | None = None,
    max_tokens: int | None = None,
    prefix_ids: list[tuple[int, ...]] | None = None,
) -> Traffic:
    count = len(prompt_lens)
    rows = zip(arrivals or [0.0] * count, prompt_lens, output_lens, prefix_ids or [()] * count, strict=True)
    planned = [PlannedRequest(i, at, num_in, num_out, ids) for i, (at, num_in, num_out, ids) in enumerate(rows)]
    return traffic_of(planned, VOCAB_SIZE, max_tokens)


def simulate(
    load: Traffic, times: StepTimes | None = None, policy: PolicyKind = ContinuousAdmission, **arguments: Any
) -> Replay:
    clock = VirtualClock()
    engine = simulated_engine(config(**arguments), times or step_times(), clock, policy)
    return replay(engine, load, clock, clock.sleep)


class RepeatingRunner(ScriptedRunner):
    """One replay after the other: step ids start again with each."""

    def execute(self, plan: StepPlan, masks: MaskSource) -> FakePending:
        if plan.step_id == 1:
            self.num_steps = 0
        return super().execute(plan, masks)


def scripted_engine(
    num_blocks: int, is_delayed: bool = False, policy: PolicyKind = ContinuousAdmission, **arguments: Any
) -> LLMEngine:
    """The engine over a runner that samples made-up tokens at once: nothing of the simulator is in it."""
    info = ModelInfo(
        model="fake",
        tokenizer_dir="",
        vocab_size=VOCAB_SIZE,
        max_model_len=500,
        eos_token_ids=(),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=4,
        dtype="float32",
        device="cpu",
    )
    runner = RepeatingRunner(BLOCK_SIZE, lambda request, n: (request + n) % (VOCAB_SIZE - 1), is_delayed)
    return LLMEngine(config(**arguments), runner, info, policy=policy)


def mixed_traffic(count: int, seed: int = 0) -> Traffic:
    """Lengths of all kinds, a third of the requests there at once."""
    rng = np.random.default_rng(seed)
    arrivals = np.sort(np.where(rng.random(count) < 0.3, 0.0, rng.uniform(0.0, 2.0, count)))
    load = traffic(
        rng.integers(1, 60, count).tolist(), rng.integers(1, 40, count).tolist(), arrivals.tolist(), max_tokens=50
    )
    return replace(load, arrivals=arrivals.tolist())
