"""A made-up GPU in virtual time whose host has its own pace: small steps are one launch, large ones hundreds.

The host launches one step after the other; the device runs them one after the other, a large one while its kernels
still come in. Figures are those of a 0.6B on one H200: 15 ms of the device for a full step of 8,192 prompt tokens, and
of the host as long as a test says for a step that has no graph, whatever its size. Which have one, `step_shapes` says.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cb_backend.contracts.config import EngineConfig, engine_config_from_dict
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.pooling import ModelTasks
from cb_backend.contracts.step import HIDDEN_WANTED, MaskSource, Pooled, StepPlan, StepResult
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.runner.step_graphs import StepGraphs
from cb_backend.engine.step_shapes import StepShape, step_shapes
from cb_backend.study.simulator import PendingStep, SimulatedRunner, VirtualClock
from cb_backend.study.step_times import DECODE_ROWS, PROMPT_ROWS, PROMPT_TOKENS, shape_of

STEP_S, TOKEN_S = 1.2e-3, 15.2e-3 / 8192  # of the device
GRAPH_S, READ_S = 0.25e-3, 0.1e-3  # of the host: to launch a graph, to take in a result
NUM_KERNELS = 300  # of a step without a graph
NUM_BLOCKS, BLOCK_SIZE = 20_000, 16


class PendingVectors:
    """A step whose prompts may end in vectors."""

    def __init__(self, step: PendingStep) -> None:
        self._step = step

    def result(self) -> StepResult:
        result = self._step.result()
        self._step.clock.sleep(READ_S)
        (rows,) = (self._step.wants == HIDDEN_WANTED).nonzero()
        vectors = (Pooled(rows, np.ones((len(rows), 1), np.float32)),) if len(rows) else ()
        return StepResult(result.step_id, result.token_ids, result.num_new, result.status, vectors)


class LaunchingRunner(SimulatedRunner):
    """`launch_s`: of a step without a graph; up to a seventh longer."""

    def __init__(self, config: EngineConfig, clock: VirtualClock, launch_s: float, first_s: float) -> None:
        """`first_s`: that the first of these steps takes the host beside."""
        super().__init__(SimpleNamespace(), clock)  # type: ignore[arg-type]
        self._launch_s, self._first_s = launch_s, first_s
        self._rng = np.random.default_rng(0)
        self._graphs = StepGraphs()
        for shape in step_shapes(config.max_num_seqs, config.max_num_batched_tokens):
            self._graphs.add(shape, None, SimpleNamespace(shape=shape))  # type: ignore[arg-type]

    def execute(self, plan: StepPlan, masks: MaskSource) -> Any:
        shape = shape_of(plan)
        num_decode, num_prefill, num_prompts = (int(shape[i]) for i in (DECODE_ROWS, PROMPT_TOKENS, PROMPT_ROWS))
        found = self._graphs.find(num_decode, num_prefill, num_prompts)
        padded = StepShape(num_decode, num_prefill) if found is None else found[1].shape
        seconds = (STEP_S + TOKEN_S * padded.num_tokens) * (1 + 0.03 * self._rng.standard_normal())
        begin = self._clock.now
        if found is not None:
            self._clock.sleep(GRAPH_S)
            return PendingVectors(self.launched(plan, seconds))
        self._clock.sleep(self._launch_s * self._rng.uniform(1.0, 1.15) + self._first_s)
        self._first_s = 0.0
        self._free_at = max(self._clock.now + seconds / NUM_KERNELS, max(self._free_at, begin) + seconds)
        return PendingVectors(PendingStep(self._clock, self._free_at, plan.step_id, plan.wants))


def launching_engine(clock: VirtualClock, launch_ms: float, first_ms: float = 0.0, **arguments: Any) -> LLMEngine:
    """An engine on the made-up GPU that generates and embeds."""
    usual = {"model": "made-up", "device": "cuda", "max_num_batched_tokens": 8192, "max_model_len": 1200}
    config = engine_config_from_dict(usual | {"enable_prefix_caching": False} | arguments)
    info = ModelInfo(
        model="made-up", tokenizer_dir="", vocab_size=1000, max_model_len=1200, eos_token_ids=(),
        block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=config.max_num_seqs, dtype="bfloat16",
        device="cuda", tasks=ModelTasks(embedding_size=1),
    )  # fmt: skip
    return LLMEngine(config, LaunchingRunner(config, clock, launch_ms / 1e3, first_ms / 1e3), info, clock)
