"""From records to figures. Pure functions of the records: no clock, no server, no files.

Definitions (also printed in the report):
- TTFT: arrival of the first token minus the scheduled time in an open loop, minus the
  moment its stream was free for it in a closed one.
- TPOT: (arrival of the last token - arrival of the first) / (tokens - 1), for answers of two tokens or more.
- ITL per chunk: gaps between responses. Per token: a response of k tokens after a gap g counts as k gaps of g / k.
- E2E: arrival of the final response minus the same start as TTFT.
- Latencies are those of finished requests; tokens/s and responses/s count every token that arrived, those of cancelled
  requests included, over the time from the start to the end of the last request.
- Offered: requests a second of the schedule of an open loop. A Poisson process keeps its rate on average only, and
  finished requests a second are fewer where the last answers take long, even if the server keeps up.
- Goodput: finished requests a second that met the SLO. Its share leaves out those this client cancelled.
- Client send lag: sent minus scheduled. Loop lag: how late the client's event loop wakes. Both are in the latencies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .contracts import ClientHealth
from .records import RequestRecord, Status

PERCENTILES = (50, 90, 99)
CDF_POINTS = (*range(100), 99.5, 99.9, 100)
NUM_TIME_BINS = 60
MAX_SEND_LAG_S = 0.010  # beyond it the client, not the server, is part of what was measured
MAX_CPU_SHARE = 0.9  # of one core, which is all an event loop has
MAX_ERROR_KINDS = 10


@dataclass(frozen=True)
class Slo:
    """Service level: limits in milliseconds, None = no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True)
class Samples:
    """Latencies in milliseconds of the finished requests, and what only they can tell."""

    ttft: NDArray[np.float64]  # [requests with a token]
    tpot: NDArray[np.float64]  # [requests with two tokens or more]
    itl_chunk: NDArray[np.float64]  # [gaps between responses]
    itl_token: NDArray[np.float64]  # [tokens after the first response]
    e2e: NDArray[np.float64]  # [requests]

    def by_name(self) -> dict[str, NDArray[np.float64]]:
        return {
            "ttft_ms": self.ttft,
            "tpot_ms": self.tpot,
            "itl_chunk_ms": self.itl_chunk,
            "itl_token_ms": self.itl_token,
            "e2e_ms": self.e2e,
        }


def ttft_s(record: RequestRecord) -> float | None:
    """Seconds to the first token, None if none came."""
    return record.chunk_times[0] - record.scheduled_s if record.chunk_times else None


def tpot_s(record: RequestRecord) -> float | None:
    """Mean seconds per token after the first, None for fewer than two tokens."""
    if record.num_output_tokens < 2:
        return None
    return (record.chunk_times[-1] - record.chunk_times[0]) / (record.num_output_tokens - 1)


def collect_samples(records: Iterable[RequestRecord]) -> Samples:
    """Samples over the records that ended well."""
    finished = [record for record in records if record.status is Status.OK]
    gaps = [np.diff(np.asarray(record.chunk_times)) for record in finished if len(record.chunk_times) > 1]
    counts = [np.asarray(record.chunk_tokens)[1:] for record in finished if len(record.chunk_times) > 1]
    all_gaps = np.concatenate(gaps) if gaps else np.zeros(0)
    all_counts = np.concatenate(counts).astype(np.int64) if counts else np.zeros(0, dtype=np.int64)
    return Samples(
        ttft=_milliseconds(ttft_s(record) for record in finished),
        tpot=_milliseconds(tpot_s(record) for record in finished),
        itl_chunk=all_gaps * 1e3,
        itl_token=np.repeat(all_gaps / np.maximum(all_counts, 1), all_counts) * 1e3,
        e2e=_milliseconds(record.end_s - record.scheduled_s for record in finished),
    )


def _milliseconds(values: Iterable[float | None]) -> NDArray[np.float64]:
    return np.array([value for value in values if value is not None], dtype=np.float64) * 1e3


def describe(values: NDArray[np.float64]) -> dict[str, float]:
    """mean, p50, p90, p99 (linear interpolation) and max; empty for no values."""
    if values.size == 0:
        return {}
    figures = dict(zip((f"p{p}" for p in PERCENTILES), np.percentile(values, PERCENTILES).tolist(), strict=True))
    return {"mean": float(values.mean()), **figures, "max": float(values.max())}


def meets(record: RequestRecord, slo: Slo) -> bool:
    """Whether a request finished, within the limits."""
    ttft, tpot = ttft_s(record), tpot_s(record)
    if record.status is not Status.OK or ttft is None:
        return False
    is_quick = slo.ttft_ms is None or ttft * 1e3 <= slo.ttft_ms
    return is_quick and (slo.tpot_ms is None or tpot is None or tpot * 1e3 <= slo.tpot_ms)


def summarise(records: Sequence[RequestRecord], slo: Slo) -> dict[str, Any]:
    """All figures of one run, as JSON values. Times in the names' units; rates over `duration_s`."""
    counts = Counter(record.status for record in records)
    duration = max((record.end_s for record in records), default=0.0)
    num_tokens = sum(record.num_output_tokens for record in records)
    num_chunks = sum(len(record.chunk_times) for record in records)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in records if record.chunk_times)
    num_good = sum(meets(record, slo) for record in records)
    num_judged = len(records) - counts[Status.CANCELLED]
    per_second = 1.0 / duration if duration > 0 else 0.0
    errors = Counter(record.error for record in records if record.error)
    return {
        "duration_s": duration,
        "num_requests": len(records),
        **{f"num_{status.value}": counts[status] for status in Status},
        "cancelled_share": counts[Status.CANCELLED] / len(records) if records else 0.0,
        "num_wrong_length": sum(
            r.status is Status.OK and r.num_output_tokens != r.num_output_tokens_wanted for r in records
        ),
        "output_tokens": num_tokens,
        "prompt_tokens_planned": num_prompt_tokens,
        "output_tokens_per_s": num_tokens * per_second,
        "total_tokens_per_s": (num_tokens + num_prompt_tokens) * per_second,
        "requests_per_s": counts[Status.OK] * per_second,
        "responses_per_s": num_chunks * per_second,
        "tokens_per_response": num_tokens / num_chunks if num_chunks else 0.0,
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms},
        "goodput_per_s": num_good * per_second,
        "goodput_share": num_good / num_judged if num_judged else 0.0,
        **{name: describe(values) for name, values in collect_samples(records).by_name().items()},
        "errors": dict(errors.most_common(MAX_ERROR_KINDS)),
    }


def offered_per_s(records: Sequence[RequestRecord]) -> float | None:
    """Requests/s of the schedule; None where all are there at once."""
    times = [record.scheduled_s for record in records]
    span = max(times, default=0.0) - min(times, default=0.0)
    return (len(times) - 1) / span if span > 0 else None


def curves(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """What the plots show: quantiles of each latency at `CDF_POINTS`, and rates over time."""
    quantiles = {
        name: np.percentile(values, CDF_POINTS).round(4).tolist() if values.size else []
        for name, values in collect_samples(records).by_name().items()
    }
    return {"cdf_points": list(CDF_POINTS), "quantiles": quantiles, "over_time": _over_time(records)}


def _over_time(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Tokens and finished requests a second, and requests in flight, in equal bins up to the last end."""
    end = max((record.end_s for record in records), default=0.0)
    if end <= 0:
        return {"time_s": [], "output_tokens_per_s": [], "requests_per_s": [], "in_flight": []}
    edges = np.linspace(0.0, end, NUM_TIME_BINS + 1)
    width = edges[1]
    times = np.concatenate([np.asarray(record.chunk_times) for record in records])
    tokens = np.concatenate([np.asarray(record.chunk_tokens) for record in records])
    finished = np.array([record.end_s for record in records if record.status is Status.OK])
    middles = (edges[:-1] + edges[1:]) / 2
    sent, ended = (np.sort(np.array([getattr(r, name) for r in records])) for name in ("sent_s", "end_s"))
    in_flight = np.searchsorted(sent, middles, "right") - np.searchsorted(ended, middles, "right")
    return {
        "time_s": middles.round(4).tolist(),
        "output_tokens_per_s": (np.histogram(times, edges, weights=tokens)[0] / width).round(3).tolist(),
        "requests_per_s": (np.histogram(finished, edges)[0] / width).round(3).tolist(),
        "in_flight": in_flight.tolist(),
    }


def judge_client(
    records: Sequence[RequestRecord], health: Sequence[ClientHealth], machine_cpu_share: float
) -> tuple[dict[str, Any], list[str]]:
    """How well the client itself kept time, and a warning for each way in which it did not."""
    lags = np.array([record.sent_s - record.scheduled_s for record in records])
    loop_lags = np.array([lag for one in health for lag in one.loop_lags_s])
    busiest = max((one.cpu_share for one in health), default=0.0)
    send_lag_p99 = float(np.percentile(lags, 99)) if lags.size else 0.0
    loop_lag_p99 = float(np.percentile(loop_lags, 99)) if loop_lags.size else 0.0
    figures = {
        "num_processes": len(health),
        "send_lag_p99_ms": send_lag_p99 * 1e3,
        "loop_lag_p99_ms": loop_lag_p99 * 1e3,
        "busiest_process_cpu_share": busiest,
        "machine_cpu_share": machine_cpu_share,
    }
    remedy = "use more --processes, or a client machine of its own"
    warnings = []
    if send_lag_p99 > MAX_SEND_LAG_S:
        warnings.append(f"the client sent late: p99 {send_lag_p99 * 1e3:.1f} ms after schedule; {remedy}")
    if loop_lag_p99 > MAX_SEND_LAG_S:
        warnings.append(f"the client read late: its event loop woke p99 {loop_lag_p99 * 1e3:.1f} ms late; {remedy}")
    if busiest > MAX_CPU_SHARE:
        warnings.append(f"a client process used {busiest:.0%} of a core: latencies include its own delay; {remedy}")
    if machine_cpu_share > MAX_CPU_SHARE:
        warnings.append(f"the client machine was {machine_cpu_share:.0%} busy; figures include waiting for its CPU")
    return figures, warnings
