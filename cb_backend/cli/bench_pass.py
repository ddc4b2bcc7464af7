"""One timed pass of a workload through the in-process engine. Requests in at their arrival times, token times out.

While the clock runs, the driver only keeps each step's output with its time; every figure is computed afterwards.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cb_backend.cli.bench_steps import StepLog, watch
from cb_backend.cli.bench_workloads import Workload
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.errors import CbError
from cb_backend.messages import EngineStats
from cb_backend.outputs import EngineOutput
from cb_backend.sampling_params import SamplingParams
from cb_backend.study.latencies import Latencies, latencies


class BenchmarkError(CbError):
    """The pass did not do the work it was given, so it has no figures."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """Everything measured in one pass. Times in seconds."""

    seconds: float  # from the start to the last token
    idle_seconds: float  # of them, waiting for the next arrival with nothing to do
    num_output_tokens: int
    latencies: Latencies
    steps: StepLog
    stats: EngineStats


def fresh_engine(engine: LLMEngine, **changes: object) -> LLMEngine:
    """A new scheduler and an empty KV cache over the same runner; `changes` are engine arguments."""
    config = dataclasses.replace(engine.config, **changes)  # type: ignore[arg-type]
    return LLMEngine(config, engine.runner, engine.info)


def run_pass(engine: LLMEngine, workload: Workload, temperature: float) -> PassResult:
    """Run the workload to its end on an engine made by `fresh_engine`.

    Raises `BenchmarkError` when a request ends with another number of tokens than asked for.
    """
    log = watch(engine)
    params = [
        SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=True, seed=index)
        for index, length in enumerate(workload.output_lens)
    ]
    # As the engine process does: a collection of the whole heap in the middle of a step is no property of the engine.
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        outputs, idle = _drive(engine, workload, params, start)
    finally:
        gc.enable()
    seconds = outputs[-1][0] - start
    found = _latencies(workload, outputs, start)
    return PassResult(seconds, idle, sum(workload.output_lens), found, log, engine.stats())


def _drive(
    engine: LLMEngine,
    workload: Workload,
    params: list[SamplingParams],
    start: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[tuple[float, EngineOutput]], float]:
    """Step until every request has ended; each output with the time it came, and the seconds slept."""
    outputs: list[tuple[float, EngineOutput]] = []
    order = sorted(range(len(params)), key=workload.arrivals.__getitem__)
    joined, idle = 0, 0.0
    while joined < len(order) or engine.has_unfinished():
        now = clock() - start
        while joined < len(order) and workload.arrivals[order[joined]] <= now:
            index = order[joined]
            engine.add_request(engine.make_request(index, workload.prompts[index], params[index]))
            joined += 1
        if not engine.has_unfinished():
            pause = workload.arrivals[order[joined]] - now
            sleep(pause)
            idle += pause
            continue
        output = engine.step()
        if output is not None:
            outputs.append((clock(), output))
    return outputs, idle


def _latencies(workload: Workload, outputs: list[tuple[float, EngineOutput]], start: float) -> Latencies:
    """Pool the tokens of all outputs; entries without a token (an end on its own) do not count."""
    ids = np.concatenate([output.request_ids for _, output in outputs])
    tokens = np.concatenate([output.token_ids for _, output in outputs])
    sizes = [len(output.request_ids) for _, output in outputs]
    times = np.repeat([moment - start for moment, _ in outputs], sizes)
    is_token = tokens >= 0
    counts = np.bincount(ids[is_token], minlength=len(workload.prompts))
    wrong = np.flatnonzero(counts != np.asarray(workload.output_lens))
    if len(wrong):
        index = int(wrong[0])
        raise BenchmarkError(
            f"{len(wrong)} requests ended early, the first with {counts[index]} of {workload.output_lens[index]}"
            " tokens; the KV cache or max_model_len is too small for this workload"
        )
    return latencies(workload.arrivals, ids[is_token], times[is_token])
