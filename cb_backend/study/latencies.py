"""From token times to the figures people compare: TTFT, TPOT, ITL, E2E, percentiles, the batch-size histogram.

Definitions are vLLM's `benchmarks/serve.py`: TTFT = first token minus arrival; TPOT = (E2E - TTFT) / (tokens - 1); ITL
= gaps between arrivals of tokens. A chunk of k tokens after a gap g is one gap of g, or k gaps of g / k; both are
given.
Pure arithmetic over arrays: knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds. The first three are per request in the order of the request ids; the last two are pooled."""

    ttft: Floats  # [num_requests]
    e2e: Floats  # [num_requests]
    tpot: Floats  # [requests with at least two tokens]
    chunk_gaps: Floats  # one entry a chunk after the first of its request
    token_gaps: Floats  # one entry a token after the first chunk of its request


def latencies(arrivals: Sequence[float], request_ids: NDArray[np.int64], times: Floats) -> Latencies:
    """Figures of one pass. Requests are 0 to n - 1; entry i says that one token of `request_ids[i]` came at `times[i]`.

    Entries are in the order of time; equal times of one request are one chunk. Every request has at least one token.
    """
    order = np.argsort(request_ids, kind="stable")
    ids, times = request_ids[order], times[order]
    starts = np.searchsorted(ids, np.arange(len(arrivals)))
    ends = np.append(starts[1:], len(ids))
    counts = ends - starts
    if not np.all(counts > 0):
        raise ValueError(f"requests without a token: {np.flatnonzero(counts == 0).tolist()[:8]}")
    first, last = times[starts], times[ends - 1]
    begin = np.asarray(arrivals, np.float64)
    several = counts > 1
    tpot = (last - first)[several] / (counts[several] - 1)
    # A chunk begins where the request changes or time moves on.
    is_new_request = np.append(True, np.diff(ids) != 0)
    chunk_starts = np.flatnonzero(is_new_request | np.append(True, np.diff(times) > 0))
    sizes = np.diff(np.append(chunk_starts, len(ids)))
    follows = ~is_new_request[chunk_starts[1:]]  # chunks with an earlier one of the same request
    chunk_gaps = np.diff(times[chunk_starts])[follows]
    sizes = sizes[1:][follows]
    return Latencies(first - begin, last - begin, tpot, chunk_gaps, np.repeat(chunk_gaps / sizes, sizes))


def summary(values: Floats, scale: float = 1e3) -> dict[str, float] | None:
    """Mean, min, p50, p90, p99 and max, in milliseconds when the values are seconds; None of nothing.

    Percentiles interpolate linearly between the two nearest values.
    """
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    figures = {"mean": values.mean(), "min": values.min(), "p50": p50, "p90": p90, "p99": p99, "max": values.max()}
    return {name: round(float(value) * scale, 4) for name, value in figures.items()}


def batch_histogram(num_rows: Sequence[int]) -> dict[str, int]:
    """How many steps ran 1, 2, 3 to 4, 5 to 8, ... rows."""
    histogram: dict[str, int] = {}
    low, high = 1, 1
    while num_rows and low <= max(num_rows):
        count = sum(low <= rows <= high for rows in num_rows)
        if count:
            histogram[str(low) if low == high else f"{low}-{high}"] = count
        low, high = high + 1, high * 2
    return histogram
