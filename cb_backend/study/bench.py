"""Where a study's replays run: on the real engine in this process, or in the simulator. Both take the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from cb_backend.config import EngineConfig
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.study.replay import Progress, Replay, fresh_engine, no_collections, replay
from cb_backend.study.simulator import VirtualClock, simulated_engine
from cb_backend.study.step_times import StepTimes, fit_lines
from cb_backend.study.traffic import Traffic

CALIBRATION_BATCHES = (1, 4, 16, 64, 256)
CALIBRATION_OUTPUT_TOKENS = 48  # answers are cut to this: what a step costs does not depend on how many follow


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """The engine arguments that a study chooses."""

    max_num_seqs: int
    max_num_batched_tokens: int

    def __str__(self) -> str:
        return f"{self.max_num_seqs} seqs, {self.max_num_batched_tokens} tokens"


class Bench(Protocol):
    """Something that runs traffic under a setting."""

    is_simulated: bool

    def run(
        self, traffic: Traffic, setting: Setting, policy: str = "fcfs", progress: Progress | None = None
    ) -> Replay: ...


class RealBench:
    """Over one loaded engine; each replay gets a new scheduler and an empty cache of the same size."""

    is_simulated = False

    def __init__(self, engine: LLMEngine) -> None:
        """`engine` must have been made for the largest setting that will be asked for."""
        self.engine = engine

    def run(self, traffic: Traffic, setting: Setting, policy: str = "fcfs", progress: Progress | None = None) -> Replay:
        engine = fresh_engine(
            self.engine,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            scheduling_policy=policy,
        )
        with no_collections():
            return replay(engine, traffic, progress=progress)


class SimulatedBench:
    """Under fitted step times; needs no device."""

    is_simulated = True

    def __init__(self, config: EngineConfig, times: StepTimes) -> None:
        self.config = config
        self.times = times

    def run(self, traffic: Traffic, setting: Setting, policy: str = "fcfs", progress: Progress | None = None) -> Replay:
        config = replace(
            self.config,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            scheduling_policy=policy,
        )
        clock = VirtualClock()
        return replay(simulated_engine(config, self.times, clock), traffic, clock, clock.sleep, progress)


def calibrate(bench: RealBench, traffic: Traffic, settings: Sequence[Setting]) -> list[Replay]:
    """Short replays whose steps cover batches from one request to the largest setting, and its budgets.

    The first of them warms up (kernels compile, memory is touched) and is not among those returned.
    """
    largest = max(setting.max_num_seqs for setting in settings)
    budgets = sorted({setting.max_num_batched_tokens for setting in settings})
    sizes = sorted({*(size for size in CALIBRATION_BATCHES if size < largest), largest})
    short = replace(traffic, output_lens=[min(length, CALIBRATION_OUTPUT_TOKENS) for length in traffic.output_lens])
    bench.run(first(short, 2).at_once(), Setting(largest, budgets[-1]))
    replays = []
    for index, size in enumerate(sizes):
        # Batches change from full to nearly empty in every pass; the budgets take turns, the largest first.
        budget = budgets[-1 - index % len(budgets)]
        count = min(max(size + size // 2, 4), len(traffic))
        replays.append(bench.run(first(short, count).at_once(), Setting(size, max(budget, size))))
    return replays


def fitted(engine: LLMEngine, replays: Sequence[Replay], conditions: dict[str, str]) -> StepTimes:
    """Step times out of real replays of this engine. Raises `ConfigError` if they have too few steps."""
    shapes = np.concatenate([result.steps.shapes for result in replays])
    seconds = np.concatenate([result.steps.seconds for result in replays])
    decode, mixed, error = fit_lines(shapes, seconds)
    info, config = engine.info, engine.config
    return StepTimes(
        conditions=conditions,
        model=info.model,
        dtype=info.dtype,
        device=info.device,
        run_ahead=engine.run_ahead,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_steps=len(seconds),
        relative_error=round(error, 4),
        decode=decode,
        mixed=mixed,
    )


def first(traffic: Traffic, count: int) -> Traffic:
    """The first `count` requests."""
    return Traffic(
        traffic.prompts[:count], traffic.output_lens[:count], traffic.max_tokens[:count], traffic.arrivals[:count]
    )
