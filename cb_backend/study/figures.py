"""From a replay to the figures that are shown and compared. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.study.latencies import summary
from cb_backend.study.replay import Replay
from cb_backend.study.step_times import StepTimes

Percentiles = dict[str, float]  # mean, min, p50, p90, p99, max, in milliseconds
CURVE_POINTS = (*range(0, 100, 2), 99, 100)  # percentiles at which a distribution is drawn


@dataclass(frozen=True, slots=True)
class Figures:
    """One replay. Latencies in milliseconds; empty where there is nothing to measure."""

    seconds: float
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Percentiles  # first token minus arrival, so time in the queue counts
    tpot_ms: Percentiles  # of a request: its time after the first token over its further tokens
    itl_ms: Percentiles  # every gap between tokens
    e2e_ms: Percentiles
    slots_busy: float  # share of max_num_seqs that was computed for, over the time of the steps
    mean_rows: float  # requests in a step, over the time of the steps
    kv_mean: float  # share of the blocks in use, over the time of the steps
    kv_peak: float
    num_steps: int
    num_preemptions: int
    preemption_rate: float  # preemptions / requests
    num_adapter_loads: int
    mean_waiting: float  # requests in the queue, over the time of the steps
    cached_share: float  # of all prompt tokens, those found in the prefix cache
    ttft_curve: list[float]  # milliseconds at CURVE_POINTS
    e2e_curve: list[float]

    def to_json(self) -> dict[str, Any]:
        """As the report's JSON has it, rounded to what can be told; without the curves."""
        return {name: _rounded(getattr(self, name)) for name in self.__slots__ if not name.endswith("_curve")}


def figures(result: Replay) -> Figures:
    steps, found = result.steps, result.latencies
    used = 1.0 - steps.num_free_blocks / max(result.num_blocks, 1)
    rows = _over_time(steps.num_rows, steps.seconds)
    return Figures(
        seconds=result.seconds,
        output_tokens_per_s=result.num_output_tokens / result.seconds,
        requests_per_s=result.num_requests / result.seconds,
        ttft_ms=summary(found.ttft) or {},
        tpot_ms=summary(found.tpot) or {},
        itl_ms=summary(found.token_gaps) or {},
        e2e_ms=summary(found.e2e) or {},
        slots_busy=rows / result.num_slots,
        mean_rows=rows,
        kv_mean=_over_time(used, steps.seconds),
        kv_peak=float(used.max(initial=0.0)),
        num_steps=len(steps.ends),
        num_preemptions=result.num_preemptions,
        preemption_rate=result.num_preemptions / result.num_requests,
        num_adapter_loads=result.num_adapter_loads,
        mean_waiting=_over_time(steps.num_waiting.astype(np.float64), steps.seconds),
        cached_share=result.num_cached_prompt_tokens / max(result.num_prompt_tokens, 1),
        ttft_curve=(np.percentile(found.ttft, CURVE_POINTS) * 1e3).tolist(),
        e2e_curve=(np.percentile(found.e2e, CURVE_POINTS) * 1e3).tolist(),
    )


def prompt_time_share(result: Replay, times: StepTimes) -> float:
    """How much of the steps' time goes to prompts, by the fit: what batching decode steps better cannot save."""
    shapes = [tuple(shape) for shape in result.steps.shapes.tolist()]
    total = sum(times.seconds(shape) for shape in shapes)
    return sum(times.prompt_seconds(shape) for shape in shapes) / total if total > 0 else 0.0


def _over_time(values: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    total = float(seconds.sum())
    return float(np.dot(values, seconds) / total) if total > 0 else 0.0


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return round(value, 5) if isinstance(value, float) else value
