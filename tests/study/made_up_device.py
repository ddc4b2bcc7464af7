"""A device in virtual time that does what a GPU does to a measurement: steps run in a queue while the host launches
the next, large ones are launched kernel by kernel, and a shape that comes for the first time is slow."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from cb_backend.contracts.step import MaskSource, StepPlan
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.study.bench import RealBench, Setting, settings_of
from cb_backend.study.replay import Progress, Replay, fresh_engine, replay
from cb_backend.study.simulator import PendingStep, SimulatedRunner, VirtualClock, simulated_engine
from cb_backend.study.step_times import PROMPT_ROWS, PROMPT_TOKENS, StepTimes, shape_of
from cb_backend.study.traffic import Traffic
from tests.study.made_up import config

H100 = StepTimes.load(Path(__file__).parents[2] / "kernels/results/step_times_h100_llama-3.2-1b.json")
NOISE = 0.05  # standard deviation of a step's time
LAUNCH_S, EAGER_S, FIRST_USE_S = 150e-6, 6e-3, 2e-3  # host time: of a graph, kernel by kernel, of a new shape
MOST_PROMPTS = 8  # in a step that is one graph


class DeviceRunner(SimulatedRunner):
    """Steps take what `H100` says, give or take the noise; launching them takes the host's time."""

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        super().__init__(H100, clock)
        self._rng = np.random.default_rng(seed)
        self._seen: set[tuple[int, int]] = set()

    def execute(self, plan: StepPlan, masks: MaskSource) -> PendingStep:
        shape = shape_of(plan)
        bucket = (plan.num_decode_rows // 8, math.ceil(math.log2(max(shape[PROMPT_TOKENS], 1))))
        is_eager = shape[PROMPT_ROWS] > MOST_PROMPTS
        launch_s = LAUNCH_S + EAGER_S * is_eager + FIRST_USE_S * (bucket not in self._seen)
        self._seen.add(bucket)
        self._clock.sleep(launch_s * self._rng.uniform(1.0, 1.5))
        seconds = self._times.seconds(shape) * (1 + NOISE * self._rng.standard_normal())
        return self.launched(plan, seconds)


class DeviceBench(RealBench):
    """A `RealBench` whose engine and clock are the device's."""

    def __init__(self, num_blocks: int, largest: Setting, seed: int = 0) -> None:
        self.num_runs = 0
        self._clock = VirtualClock()
        engine_config = config(
            max_num_seqs=largest.max_num_seqs,
            max_num_batched_tokens=largest.max_num_batched_tokens,
            block_size=H100.block_size,
            num_gpu_blocks_override=num_blocks,
            run_ahead=H100.run_ahead,
        )
        info = simulated_engine(engine_config, H100, self._clock).info
        self.engine = LLMEngine(engine_config, DeviceRunner(self._clock, seed), info, self._clock)

    def run(
        self,
        traffic: Traffic,
        setting: Setting,
        policy: PolicyKind = ContinuousAdmission,
        progress: Progress | None = None,
    ) -> Replay:
        self.num_runs += 1
        engine = fresh_engine(self.engine, self._clock, policy, **settings_of(traffic, setting))
        return replay(engine, traffic, self._clock, self._clock.sleep, progress)
