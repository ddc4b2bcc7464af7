"""The capacity simulator: the real engine loop, scheduler and block manager under a virtual clock, without a device.

Only the model runner is made up: a step takes what `StepTimes` says, one after the other as on a device, and its
tokens are blank. So a replay of a thousand requests takes seconds, wherever it runs. What it leaves out: swap space
(preempted requests are computed again), and hits on cached answers (no later prompt contains made-up tokens).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.step import NO_TOKEN, MaskSource, StepPlan, StepResult, Want
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.study.step_times import StepTimes, shape_of

_SAMPLED = 0  # the token id of every sampled token


class VirtualClock:
    """Seconds that pass only when told to. Call it for the time, like `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Time goes on, be it by the least that a float can tell: who waits for a moment would wait for ever else."""
        if seconds > 0:
            self.now = max(self.now + seconds, math.nextafter(self.now, math.inf))

    def advance_to(self, moment: float) -> None:
        self.now = max(self.now, moment)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step; reading its result waits until its end."""

    clock: VirtualClock
    end: float
    step_id: int
    wants: NDArray[np.uint8]  # of the plan

    def result(self) -> StepResult:
        self.clock.advance_to(self.end)
        num_new = (self.wants == Want.TOKENS).astype(np.uint8)
        token_ids = np.where(num_new, _SAMPLED, NO_TOKEN).astype(np.int32)[:, None]
        return StepResult(self.step_id, token_ids, num_new, np.zeros(len(num_new), np.uint8))


class SimulatedRunner:
    """Executes plans in no time and says when a device would have been done with them."""

    def __init__(self, times: StepTimes, clock: VirtualClock) -> None:
        self._times = times
        self._clock = clock
        self._free_at = 0.0  # when the last launched step ends

    def execute(self, plan: StepPlan, masks: MaskSource) -> PendingStep:
        return self.launched(plan, self._times.seconds(shape_of(plan)))

    def launched(self, plan: StepPlan, seconds: float) -> PendingStep:
        """A step that takes so long, once those before it have ended."""
        self._free_at = max(self._free_at, self._clock.now) + seconds
        return PendingStep(self._clock, self._free_at, plan.step_id, plan.wants)

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        return b""

    def close(self) -> None:
        pass


def simulated_engine(
    config: EngineConfig, times: StepTimes, clock: VirtualClock, policy: PolicyKind = ContinuousAdmission
) -> LLMEngine:
    """An engine like the measured one, with the arguments of `config`, that lives in `clock`'s time.

    The cache has the measured number of blocks unless `num_gpu_blocks_override` says otherwise; model, dtype and
    device are those of `times`.
    """
    info = ModelInfo(
        model=times.model,
        tokenizer_dir="",
        vocab_size=times.vocab_size,
        max_model_len=config.max_model_len or times.max_model_len,
        eos_token_ids=(),
        block_size=config.block_size,
        num_blocks=config.num_gpu_blocks_override or times.num_blocks * times.block_size // config.block_size,
        max_num_seqs=config.max_num_seqs,
        dtype=times.dtype,
        device=times.device,
        kv_windows=times.kv_windows,
    )
    return LLMEngine(config, SimulatedRunner(times, clock), info, clock, policy)
