"""The capacity simulator: the real engine loop, scheduler and block manager under a virtual clock, without a device.

Only the model runner is made up: a step takes what `StepTimes` says, one after the other as on a device, and its
tokens are blank. So a replay of a thousand requests takes seconds, wherever it runs. What it leaves out: swap space
(preempted requests are computed again), and hits on cached answers (no later prompt contains made-up tokens). An
adapter that a step loads makes it longer by the time of a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.step import NO_TOKEN, MaskSource, StepPlan, StepResult, Want
from cb_backend.engine.adapters import PackedAdapter
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.study.adapter_mix import AdapterMix
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


class NoFiles:
    """In place of what reads adapters: requests of a replay come with the keys of theirs."""

    packed_of: Callable[[AdapterKey], PackedAdapter] | None = None

    def read(self, path: str) -> PackedAdapter:
        raise ConfigError(f"{path}: a simulation reads no adapters")


class SimulatedRunner:
    """Executes plans in no time and says when a device would have been done with them."""

    def __init__(self, times: StepTimes, clock: VirtualClock, load_seconds: float = 0.0) -> None:
        """`load_seconds`: of an adapter."""
        self.adapters = NoFiles()
        self._load_seconds = load_seconds
        self._times = times
        self._clock = clock
        self._free_at = 0.0  # when the last launched step ends

    def execute(self, plan: StepPlan, masks: MaskSource) -> PendingStep:
        load_seconds = len(plan.adapter_loads) * self._load_seconds
        return self.launched(plan, self._times.seconds(shape_of(plan)) + load_seconds)

    def launched(self, plan: StepPlan, seconds: float) -> PendingStep:
        """A step that takes so long, once those before it have ended."""
        self._free_at = max(self._free_at, self._clock.now) + seconds
        return PendingStep(self._clock, self._free_at, plan.step_id, plan.wants)

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        return b""

    def close(self) -> None:
        pass


def simulated_engine(
    config: EngineConfig,
    times: StepTimes,
    clock: VirtualClock,
    policy: PolicyKind = ContinuousAdmission,
    adapters: AdapterMix | None = None,
) -> LLMEngine:
    """An engine like the measured one, with the arguments of `config`, that lives in `clock`'s time.

    The cache has the measured number of blocks unless `num_gpu_blocks_override` says otherwise; model, dtype and
    device are those of `times`. With `adapters`, for which the config must enable them, it has slots for these.
    """
    if adapters is not None and not config.enable_lora:
        raise ConfigError("adapters are simulated where enable_lora is true")
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
        num_adapter_slots=0 if adapters is None else adapters.num_slots,
    )
    runner = SimulatedRunner(times, clock, 0.0 if adapters is None else adapters.load_seconds)
    return LLMEngine(config, runner, info, clock, policy)
