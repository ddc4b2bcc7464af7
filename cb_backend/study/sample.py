"""A sample of a user's traffic: so many requests of the lengths, gaps and shared prefixes of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cb_backend.contracts.errors import ConfigError
from cb_backend.study.traffic import Traffic, traffic_of
from cb_backend.traffic.traces import read_trace
from cb_backend.traffic.workload import (
    LengthDistribution,
    Lengths,
    PlannedRequest,
    arrival_times,
    plan,
    scaled_trace_times,
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Planned requests, and what is known of their origin."""

    name: str
    requests: list[PlannedRequest]
    rate: float | None  # requests/s of the whole trace; None where it has no times

    def share(self, num_engines: int) -> Sample:
        """What one of so many engines gets, where they take turns."""
        rate = None if self.rate is None else self.rate / num_engines
        return Sample(self.name, self.requests[::num_engines], rate)

    def traffic(self, vocab_size: int, longest: int, max_tokens: int | None, seed: int) -> tuple[Traffic, int]:
        """The requests of at most `longest` tokens, prompt and answer; and how many were left out as too long.

        Raises `ConfigError` if fewer than two are left.
        """
        fitting = [
            request for request in self.requests if request.num_prompt_tokens + request.num_output_tokens <= longest
        ]
        if len(fitting) < 2:
            raise ConfigError(
                f"of {len(self.requests)} requests {len(fitting)} fit into {longest} tokens; cut them"
                " (--max-input-len, --max-output-len), or raise max_model_len or the cache"
            )
        return traffic_of(fitting, vocab_size, max_tokens, seed), len(self.requests) - len(fitting)


def sample_trace(
    path: Path,
    num_requests: int,
    input_column: str = "",
    output_column: str = "",
    *,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
    seed: int = 0,
) -> Sample:
    """Rows drawn from all over the trace, in its order, with the trace's mean rate; all rows if it has no more.

    Rows that share prefixes are taken from its beginning, one after the other: drawn, they would not meet.
    Raises `TraceError`.
    """
    rows = read_trace(path, input_column=input_column, output_column=output_column)
    has_times = all(row.arrival_s is not None for row in rows) and len(rows) > 1
    span = max((row.arrival_s or 0.0 for row in rows), default=0.0)
    rate = (len(rows) - 1) / span if has_times and span > 0 else None
    rng = np.random.default_rng(seed)
    if len(rows) > num_requests:
        if any(row.prefix_ids for row in rows):
            rows = rows[:num_requests]
        else:
            rows = [rows[i] for i in np.sort(rng.choice(len(rows), num_requests, replace=False)).tolist()]
    is_timed = rate is not None and rows[-1].arrival_s != rows[0].arrival_s
    if is_timed:
        times = scaled_trace_times(rows, time_scale=1.0, rate=rate)
        times -= times[0]
    else:
        times = arrival_times("poisson", 1.0, len(rows), rng)
    lengths = Lengths(rows=rows, max_input_len=max_input_len, max_output_len=max_output_len)
    return Sample(path.name, plan(times, lengths, rng), rate)


def sample_lengths(
    input_len: str,
    output_len: str,
    num_requests: int,
    *,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
    seed: int = 0,
) -> Sample:
    """Lengths of two distributions, in the load test's notation, and Poisson arrivals. Raises `WorkloadError`."""
    rng = np.random.default_rng(seed)
    lengths = Lengths(
        input_len=LengthDistribution.parse(input_len),
        output_len=LengthDistribution.parse(output_len),
        max_input_len=max_input_len,
        max_output_len=max_output_len,
    )
    times = arrival_times("poisson", 1.0, num_requests, rng)
    return Sample(f"prompts {input_len}, answers {output_len}", plan(times, lengths, rng), None)
