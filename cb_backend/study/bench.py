"""Where a study's replays run: on the real engine in this process, or in the simulator. Both take the same calls."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from cb_backend.contracts.config import EngineConfig
from cb_backend.engine.llm_engine import LLMEngine, StepFailedError
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.study.adapter_mix import AdapterMix
from cb_backend.study.replay import Progress, Replay, ReplayError, Say, fresh_engine, no_collections, replay
from cb_backend.study.simulator import VirtualClock, simulated_engine
from cb_backend.study.step_times import StepTimes, fit_laws
from cb_backend.study.traffic import Traffic

CALIBRATION_BATCHES = (1, 4, 16, 64, 256)
CALIBRATION_TOKENS = 32  # in a short prompt, and in an answer beside those that are needed to fill a batch
# Of the calibration's time, for requests that come one by one: there are few long prompts, and they make the p99.
SINGLE_PROMPTS_SHARE = 0.2
CALIBRATION_LOAD = 0.7  # of the requests/s of all at once


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """The engine arguments that a study chooses."""

    max_num_seqs: int
    max_num_batched_tokens: int

    def model_json(self) -> dict[str, int]:
        """What to paste into `1/model.json`."""
        return {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": self.max_num_batched_tokens}

    def __str__(self) -> str:
        return f"{self.max_num_seqs} seqs, {self.max_num_batched_tokens} tokens"


class Bench(Protocol):
    """Something that runs traffic under a setting."""

    is_simulated: bool

    def run(
        self,
        traffic: Traffic,
        setting: Setting,
        policy: PolicyKind = ContinuousAdmission,
        progress: Progress | None = None,
    ) -> Replay: ...


class CpuClock:
    """CPU seconds of this process; pauses are skipped, and count as if they had been waited for.

    For an engine that computes on one CPU thread, on a machine that has other work as well: the wall clock would
    measure the neighbours.
    """

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += max(seconds, 0.0)


class RealBench:
    """Over one loaded engine; each replay gets a new scheduler and an empty cache of the same size."""

    is_simulated = False

    def __init__(self, engine: LLMEngine, is_cpu_time: bool = False) -> None:
        """`engine` must have been made for the largest setting that will be asked for."""
        self.engine = engine
        self._is_cpu_time = is_cpu_time
        gc.collect()
        gc.freeze()  # the loaded model and its libraries are not looked through again before each replay

    def run(
        self,
        traffic: Traffic,
        setting: Setting,
        policy: PolicyKind = ContinuousAdmission,
        progress: Progress | None = None,
    ) -> Replay:
        cpu = CpuClock()
        clock, sleep = (cpu, cpu.sleep) if self._is_cpu_time else (time.monotonic, time.sleep)
        engine = fresh_engine(self.engine, clock, policy, **settings_of(traffic, setting))
        try:
            with no_collections():
                return replay(engine, traffic, clock, sleep, progress)
        except StepFailedError as error:
            raise ReplayError(f"a step failed under {setting}: {error}; try smaller settings") from error


class SimulatedBench:
    """Under fitted step times; needs no device."""

    is_simulated = True

    def __init__(self, config: EngineConfig, times: StepTimes, adapters: AdapterMix | None = None) -> None:
        """Requests go through `adapters`, which the config must enable then; the same ones in every run."""
        self.config = config
        self.times = times
        self.adapters = adapters

    def run(
        self,
        traffic: Traffic,
        setting: Setting,
        policy: PolicyKind = ContinuousAdmission,
        progress: Progress | None = None,
    ) -> Replay:
        config = replace(self.config, **settings_of(traffic, setting))
        clock = VirtualClock()
        engine = simulated_engine(config, self.times, clock, policy, self.adapters)
        chosen = [] if self.adapters is None else self.adapters.draw(len(traffic))
        return replay(engine, traffic, clock, clock.sleep, progress, chosen)


def settings_of(traffic: Traffic, setting: Setting) -> dict[str, Any]:
    """The engine arguments of a replay. Its queue takes all of the traffic: what is studied is how long it waits."""
    return {
        "max_num_seqs": setting.max_num_seqs,
        "max_num_batched_tokens": setting.max_num_batched_tokens,
        "max_queue_size": len(traffic),
        "max_queue_tokens": 1 + sum(traffic.prompt_lens),
    }


def calibrate(
    bench: RealBench, traffic: Traffic, settings: Sequence[Setting], limit_s: float, say: Say
) -> list[Replay]:
    """Short replays whose steps cover batches from one request to the largest setting, and its budgets.

    What a device does for the first time (kernels compile, memory is touched or pinned) takes longer than ever again:
    all replays are run twice and only the second ones returned, unless the first ones have taken more than half of
    `limit_s`. Stops before it takes much longer than that. `say` is told of each.
    """
    largest = max(setting.max_num_seqs for setting in settings)
    budgets = sorted({setting.max_num_batched_tokens for setting in settings})
    once = _cut(first(traffic, 2), 1).at_once()
    bench.run(once, Setting(largest, budgets[-1]), progress=say("calibrating (how long steps take): the first step"))
    replays = _calibration(bench, traffic, largest, budgets, limit_s, say)
    seconds = sum(one.seconds for one in replays)
    return _calibration(bench, traffic, largest, budgets, limit_s, say) if 2 * seconds <= limit_s else replays


def _calibration(
    bench: RealBench, traffic: Traffic, largest: int, budgets: Sequence[int], limit_s: float, say: Say
) -> list[Replay]:
    """With everything there at once for each size of batch; then with requests that come one by one, so that single
    prompts are computed beside running answers; then with short prompts in the largest batch, so that the cost of a
    row can be told from that of its context."""
    sizes = sorted({*(size for size in CALIBRATION_BATCHES if size < largest), largest})
    replays: list[Replay] = []
    for index, size in enumerate(sizes):
        budget = budgets[-1 - index % len(budgets)]  # they take turns
        load = first(traffic, max(size, 4))
        # Answers so long that the whole batch is decoding for a while before the first of it ends.
        num_prompt_steps = sum(load.prompt_lens) // max(budget, size) + CALIBRATION_TOKENS
        load = _cut(load, num_prompt_steps)
        if replays and replays[-1].seconds * size / sizes[index - 1] > limit_s - sum(one.seconds for one in replays):
            break
        progress = say(f"calibrating: {size} requests at once")
        replays.append(bench.run(load.at_once(), Setting(size, max(budget, size)), progress=progress))
    last = replays[-1]
    setting = Setting(last.num_slots, max(budgets[len(budgets) // 2], last.num_slots))
    rate = CALIBRATION_LOAD * last.num_requests / last.seconds
    count = max(2 * last.num_requests, int(SINGLE_PROMPTS_SHARE * limit_s * rate))
    load = _cut(first(traffic, count), CALIBRATION_TOKENS)
    progress = say(f"calibrating: {count} requests one by one")
    replays.append(bench.run(load.at_rate(rate), setting, progress=progress))
    load = _cut(first(traffic, last.num_slots), 2 * CALIBRATION_TOKENS)
    load = replace(load, prompts=[prompt[:CALIBRATION_TOKENS] for prompt in load.prompts])
    replays.append(bench.run(load.at_once(), setting, progress=say("calibrating: short prompts")))
    return replays


def _cut(traffic: Traffic, num_tokens: int) -> Traffic:
    """Answers of half to one and a half times `num_tokens`, all different ends; clients allow just so many."""
    count = len(traffic)
    lengths = [max(num_tokens // 2 + num_tokens * i // count, 2) for i in range(count)]
    return replace(traffic, output_lens=lengths, max_tokens=lengths)


def fitted(engine: LLMEngine, replays: Sequence[Replay], conditions: dict[str, str]) -> StepTimes:
    """Step times out of real replays of this engine. Raises `ConfigError` if they have too few steps."""
    shapes = np.concatenate([result.steps.shapes for result in replays])
    costs = np.concatenate([result.steps.costs for result in replays])
    decode, mixed, error = fit_laws(shapes, costs)
    info = engine.info
    return StepTimes(
        conditions=conditions,
        model=info.model,
        dtype=info.dtype,
        device=info.device,
        tensor_parallel_size=engine.config.tensor_parallel_size,
        run_ahead=engine.run_ahead,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        kv_windows=info.kv_windows,
        max_num_seqs=max(result.num_slots for result in replays),
        max_num_batched_tokens=int(max(result.steps.shapes[:, :3:2].sum(1).max() for result in replays)),
        num_steps=len(costs),
        relative_error=round(error, 4),
        decode=decode,
        mixed=mixed,
    )


def first(traffic: Traffic, count: int) -> Traffic:
    """The first `count` requests."""
    return Traffic(
        traffic.prompts[:count], traffic.output_lens[:count], traffic.max_tokens[:count], traffic.arrivals[:count]
    )
