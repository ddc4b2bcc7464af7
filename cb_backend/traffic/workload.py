"""What is to be sent: arrival times and lengths, decided before the run and reproducible from a seed.

A workload is a list of `PlannedRequest`. It knows neither text nor token ids, and nobody who sends it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.errors import CbError
from cb_backend.traffic.traces import TraceRow

MAX_OPEN_LOOP_REQUESTS = 5_000_000  # a typo in --rate must not eat the memory


class WorkloadError(CbError):
    """The described load makes no sense; the message says what to change."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request before it is sent."""

    request_id: int
    scheduled_s: float  # seconds after the start of the run; 0 in a closed loop, where the previous answer decides
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    cancel_after_tokens: int | None = None  # the client cancels once it has this many tokens; None: it never does


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths in tokens: fixed, uniform or lognormal, at least 1."""

    kind: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> LengthDistribution:
        """`128`, `fixed:128`, `uniform:LOW:HIGH`, `lognormal:MEAN:SIGMA[:MAX]`. Raises `WorkloadError`.

        MEAN is the mean of the lengths themselves, SIGMA the standard deviation of their natural logarithm.
        """
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        counts = {"fixed": (1,), "uniform": (2,), "lognormal": (2, 3)}
        try:
            values = tuple(float(number) for number in numbers)
        except ValueError:
            values = ()
        if kind not in counts or len(values) not in counts[kind] or not all(math.isfinite(v) for v in values):
            raise WorkloadError(f"length {text!r} is none of N, fixed:N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA[:MAX]")
        if min(values) < 0 or values[0] < 1 or (kind == "uniform" and values[1] < values[0]):
            raise WorkloadError(f"length {text!r}: lengths begin at 1, and LOW must not exceed HIGH")
        return cls(kind, values)

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` lengths, int64 `[count]`."""
        if self.kind == "fixed":
            return np.full(count, round(self.values[0]), dtype=np.int64)
        if self.kind == "uniform":
            return rng.integers(round(self.values[0]), round(self.values[1]) + 1, count)
        mean, sigma = self.values[:2]
        # The mean of a lognormal is exp(mu + sigma^2 / 2).
        lengths = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
        return np.clip(np.rint(lengths), 1, self.values[2] if len(self.values) == 3 else np.inf).astype(np.int64)


def arrival_times(kind: str, rate: float, count: int, rng: np.random.Generator, cv: float = 2.0) -> NDArray[np.float64]:
    """Times in seconds `[count]`, the first gap included. `rate` inf: all at 0.

    poisson: exponential gaps; gamma: gaps with coefficient of variation `cv` (1 would be poisson, above 1 is bursty);
    constant: equal gaps. Raises `WorkloadError`.
    """
    if not rate > 0:
        raise WorkloadError(f"--rate must be above 0, got {rate:g}")
    if math.isinf(rate):
        return np.zeros(count)
    if kind == "poisson":
        gaps = rng.exponential(1.0 / rate, count)
    elif kind == "gamma":
        if not cv > 0:
            raise WorkloadError(f"--gamma-cv must be above 0, got {cv:g}")
        shape = 1.0 / cv**2
        gaps = rng.gamma(shape, 1.0 / (rate * shape), count)
    elif kind == "constant":
        gaps = np.full(count, 1.0 / rate)
    else:
        raise WorkloadError(f"unknown arrival process {kind!r}; use poisson, gamma, constant or trace")
    return np.cumsum(gaps)


def scaled_trace_times(rows: Sequence[TraceRow], *, time_scale: float, rate: float | None) -> NDArray[np.float64]:
    """The trace's own times, stretched by `time_scale`, or so that they come at `rate` a second on average."""
    times = [row.arrival_s for row in rows]
    if any(time is None for time in times):
        raise WorkloadError("this trace has no times; choose --arrival poisson, gamma or constant with --rate")
    seconds = np.sort(np.array(times, dtype=np.float64))
    if rate is not None:
        if not rate > 0:
            raise WorkloadError(f"--rate must be above 0, got {rate:g}")
        span = float(seconds[-1] - seconds[0])
        if span > 0:
            time_scale = 0.0 if math.isinf(rate) else (len(rows) - 1) / rate / span
    elif not time_scale >= 0:
        raise WorkloadError(f"--time-scale must not be negative, got {time_scale:g}")
    return seconds * time_scale


@dataclass(frozen=True)
class Lengths:
    """Where lengths come from: rows of a trace, or two distributions; and their upper bounds."""

    rows: Sequence[TraceRow] = ()
    input_len: LengthDistribution = LengthDistribution("fixed", (128.0,))
    output_len: LengthDistribution = LengthDistribution("fixed", (128.0,))
    max_input_len: int | None = None  # longer prompts are cut, and their prefix ids with them
    max_output_len: int | None = None

    def sample(self, rng: np.random.Generator, count: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """`count` of (prompt tokens, output tokens, prefix ids). A trace is taken in order, over again if too short."""
        if self.rows:
            rows = [self.rows[index % len(self.rows)] for index in range(count)]
            triples = [(row.num_prompt_tokens, row.num_output_tokens, row.prefix_ids) for row in rows]
        else:
            inputs, outputs = self.input_len.sample(rng, count), self.output_len.sample(rng, count)
            triples = [(i, o, ()) for i, o in zip(inputs.tolist(), outputs.tolist(), strict=True)]
        max_in, max_out = self.max_input_len or sys.maxsize, self.max_output_len or sys.maxsize
        return [(min(i, max_in), min(o, max_out), ids) for i, o, ids in triples]


def plan(
    times: NDArray[np.float64], lengths: Lengths, rng: np.random.Generator, cancel_fraction: float = 0.0
) -> list[PlannedRequest]:
    """One request for each time, `cancel_fraction` of them cancelled at a point drawn evenly from their answer."""
    if not 0 <= cancel_fraction <= 1:
        raise WorkloadError(f"--cancel-fraction must be between 0 and 1, got {cancel_fraction:g}")
    count = len(times)
    is_cancelled = rng.random(count) < cancel_fraction
    cancel_points = rng.random(count)
    return [
        PlannedRequest(
            request_id=index,
            scheduled_s=float(times[index]),
            num_prompt_tokens=num_in,
            num_output_tokens=num_out,
            prefix_ids=prefix_ids,
            cancel_after_tokens=int(cancel_points[index] * num_out) if is_cancelled[index] else None,
        )
        for index, (num_in, num_out, prefix_ids) in enumerate(lengths.sample(rng, count))
    ]


def num_open_loop_requests(rate: float, num_requests: int | None, duration_s: float | None) -> int:
    """How many arrivals to draw so that `duration_s` is filled: the mean and many deviations of a bursty process."""
    if num_requests is not None:
        return num_requests
    if duration_s is None or math.isinf(rate):
        raise WorkloadError("an endless load: give --num-requests (with --rate inf always)")
    expected = rate * duration_s
    count = math.ceil(expected + 20 * math.sqrt(expected) + 20)
    if count > MAX_OPEN_LOOP_REQUESTS:
        raise WorkloadError(f"--rate {rate:g} for {duration_s:g} s is {count} requests; lower one of them")
    return count
