"""Host time of the scheduler in a steady decode: `python -m tests.simulation.bench_scheduler`. Prints, asserts nothing.

The runner is left out: results are made up in advance, so what is measured is `schedule` + `update_from_output`.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

import numpy as np

from cb_backend.config import EngineConfig
from cb_backend.engine.scheduler.scheduler import Scheduler
from cb_backend.kv_cache.manager import KVCacheManager
from cb_backend.outputs import ModelRunnerOutput, SchedulerOutput
from cb_backend.request import Request
from cb_backend.sampling_params import SamplingParams

NUM_STEPS = 800


def result_of(plan: SchedulerOutput) -> ModelRunnerOutput:
    sampled = np.full(plan.num_rows, 5, np.int32)
    sampled[~plan.is_sampling] = -1
    return ModelRunnerOutput(plan.step_id, sampled, np.zeros(plan.num_rows, np.bool_))


def steady_times_us(num_rows: int, run_ahead: int, enable_prefix_caching: bool, is_staggered: bool) -> list[float]:
    """Microseconds of each step. Staggered: a sixteenth of the rows crosses a block border in every step.

    Otherwise all rows cross in the same step, and only steps without any change are returned.
    """
    config = EngineConfig(
        model="fake", max_num_seqs=num_rows, max_num_batched_tokens=8192, run_ahead=run_ahead,
        enable_prefix_caching=enable_prefix_caching,
    )  # fmt: skip
    kv = KVCacheManager(1 + num_rows * 80, 16, enable_prefix_caching)
    scheduler = Scheduler(config, kv, 4096)
    params = SamplingParams(max_tokens=NUM_STEPS + 100)
    for index in range(num_rows):
        prompt = np.arange(index, index + 17 + is_staggered * (index % 16), dtype=np.int32)
        scheduler.add_request(Request(index, prompt, len(prompt), params, (2, 3), len(prompt) + params.max_tokens))
    launched: deque[SchedulerOutput] = deque()
    while scheduler.num_waiting or len(launched) < run_ahead:
        plan = scheduler.schedule()
        assert plan is not None
        launched.append(plan)
        if len(launched) > run_ahead:
            scheduler.update_from_output(result_of(launched.popleft()))
    times = []
    for _ in range(NUM_STEPS):
        began = time.perf_counter_ns()
        plan = scheduler.schedule()
        middle = time.perf_counter_ns()
        assert plan is not None
        launched.append(plan)
        result = result_of(launched.popleft())
        again = time.perf_counter_ns()
        scheduler.update_from_output(result)
        ended = time.perf_counter_ns()
        if is_staggered or not plan.new_blocks:
            times.append((ended - again + middle - began) / 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    for rows in parser.parse_args().rows:
        for run_ahead in (0, 2):
            for caching in (False, True):
                plain, staggered = (
                    float(np.median(steady_times_us(rows, run_ahead, caching, x))) for x in (False, True)
                )
                print(
                    f"{rows:4} rows, run_ahead {run_ahead}, prefix caching {caching!s:5}: median "
                    f"{plain:6.1f} us without change, {staggered:6.1f} us with 1 row in 16 at a block border"
                )


if __name__ == "__main__":
    main()
