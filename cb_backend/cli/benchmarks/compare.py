"""When two engines' figures may be divided by each other, and what the quotient is worth.

A ratio exists only between runs on the same card, of the same model, dtype, lengths and settings; otherwise there is a
reason instead. Differences inside the spread of the repetitions are ties. Knows records, not processes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cb_backend.study.workloads import LATENCY_PAIRS

Record = dict[str, Any]

SAME_MODEL = ("card", "config_digest", "dtype", "max_model_len")
SAME_WORK = (*SAME_MODEL, "temperature", "requests", "prompt_tokens", "output_tokens", "lengths_digest")

# The workload names of the peer's script, and ours.
PEER_WORKLOADS = {"a_nano256": "W1", "b_latency1": "b", "c_lognormal1000": "c", "startup": "startup"}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: which number of which workload, and which way is better."""

    title: str
    workload: str
    key: str
    is_higher_better: bool
    limit_key: str | None = None
    process: int | None = None  # only the n-th process of an engine counts (cold and warm starts); None: all


ROWS = (
    Row("offline a, output tok/s", "W1", "output_tok_s", True, "output_tok_s"),
    Row("offline c, output tok/s", "c", "output_tok_s", True, "output_tok_s"),
    Row("batch 1 TPOT, ms", "b", "tpot_ms", False, "tpot_ms"),
    Row("batch 1 TTFT (128 in), ms", "b", "ttft_ms", False, "ttft_ms"),
    *(Row(f"batch {name[1:]} TPOT, ms", name, "tpot_ms", False, "tpot_ms") for name in LATENCY_PAIRS if name != "b"),
    Row("first start-up, s", "startup", "total_s", False, process=0),
    Row("second start-up, s", "startup", "total_s", False, process=1),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range over the repetitions of all processes."""

    median: float
    low: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        form = ",.0f" if self.median >= 1000 else ".1f" if self.median >= 100 else ".2f"
        if self.low == self.high:
            return format(self.median, form)
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"


def spread(records: Sequence[Record], key: str) -> Spread | None:
    """Over one number a record, or over records that bring a summary of their own; None of nothing."""
    values = [record[key] for record in records if record.get(key) is not None]
    if not values:
        return None
    middles = [value["p50"] if isinstance(value, dict) else value for value in values]
    lows = [value["min"] if isinstance(value, dict) else value for value in values]
    highs = [value["max"] if isinstance(value, dict) else value for value in values]
    return Spread(statistics.median(middles), min(lows), max(highs))


def refusal(ours: Sequence[Record], theirs: Sequence[Record], conditions: Sequence[str]) -> str | None:
    """Why these may not be divided: the first condition that is unknown or differs; None when all are the same."""
    for name in conditions:
        values = {record.get(name) for record in (*ours, *theirs)}
        if None in values:
            return f"{name} is not known of every run"
        if len(values) > 1:
            return f"{name} differs: {', '.join(sorted(map(str, values)))}"
    return None


def ratio(ours: Spread, theirs: Spread, is_higher_better: bool) -> float:
    """How many times better ours is; above 1 is a lead whatever the unit."""
    return ours.median / theirs.median if is_higher_better else theirs.median / ours.median


def peer_records(lines: Sequence[Record], lengths_digests: dict[str, str], conditions: Record) -> list[Record]:
    """The peer script's JSON lines in the form of ours.

    `conditions` is what the caller knows of that process (card, config digest, settings). Start-up is the script's
    import and engine construction: without the interpreter's own start and the first token, to the peer's favour.
    """
    records = []
    for line in lines:
        name = str(PEER_WORKLOADS.get(line["workload"], line["workload"]))
        record = {**line, **conditions, "workload": name, "lengths_digest": lengths_digests.get(name)}
        if name == "startup":
            record["total_s"] = line["import_s"] + line["engine_init_s"]
        if name == "b":
            ttft = line["ttft_ms"]
            gaps = line["output_tokens"] - 1
            ends = {key: (1e3 * line[f"seconds_{key}"] - ttft) / gaps for key in ("min", "max")}
            record["tpot_ms"] = {"p50": line["tpot_ms"], **ends}
        records.append(record)
    return records


def table(model: str, ours: Sequence[Record], theirs: Sequence[Record]) -> list[str]:
    """The lines of one model: peer, ours, limit, ratio or the reason why there is none."""
    peer = f"vLLM {theirs[0].get('version', '')}" if theirs else "vLLM"
    lines = [_conditions(ours), f"{model:28s} {peer:>26s} {'ours':>26s} {'limit':>9s}  ours is"]
    for row in ROWS:
        left, right = _select(theirs, row), _select(ours, row)
        their_spread, our_spread = spread(left, row.key), spread(right, row.key)
        if their_spread is None and our_spread is None:
            continue
        found = spread([record["limit"] for record in right if record.get("limit")], row.limit_key or "")
        limit = "-" if found is None else str(Spread(found.median, found.median, found.median))
        lines.append(
            f"{row.title:28s} {their_spread or '-'!s:>26s} {our_spread or '-'!s:>26s} {limit:>9s}"
            f"  {_verdict(row, right, left, our_spread, their_spread)}"
        )
    return lines


def _conditions(ours: Sequence[Record]) -> str:
    if not ours:
        return "ours brought no record"
    names = ("commit", "driver", "torch", "triton", "cores")
    text = ", ".join(f"{name} {ours[0].get(name)}" for name in names)
    limits = [record["limit"] for record in ours if record.get("limit")]
    if not limits:
        return text
    bandwidth, flops = (statistics.median(limit[key] for limit in limits) / 1e12 for key in ("bandwidth", "flops"))
    return f"{text}; measured {bandwidth:.3g} TB/s, {flops:.4g} TFLOP/s"


def _select(records: Sequence[Record], row: Row) -> list[Record]:
    return [
        record
        for record in records
        if record["workload"] == row.workload and row.process in (None, record.get("process"))
    ]


def _verdict(row: Row, ours: list[Record], theirs: list[Record], left: Spread | None, right: Spread | None) -> str:
    if left is None or right is None:
        return f"no ratio: {'ours' if left is None else 'vLLM'} has no figure"
    reason = refusal(ours, theirs, SAME_MODEL if row.workload == "startup" else SAME_WORK)
    if reason is not None:
        return f"no ratio: {reason}"
    quotient = ratio(left, right, row.is_higher_better)
    return f"a tie ({quotient:.2f}x, inside the spread)" if left.overlaps(right) else f"{quotient:.2f}x"


@dataclass(frozen=True, slots=True)
class ArmCost:
    """Expected seconds of one process: fixed part and each repetition."""

    start: float
    repetition: float

    def total(self, repetitions: int) -> float:
        return self.start + repetitions * self.repetition


def affordable_repetitions(costs: Sequence[ArmCost], remaining: float, wanted: int) -> int:
    """Repetitions for the next of these processes, so that all of them fit into the remaining seconds.

    At least 1 as long as the next one itself fits, whatever becomes of the later ones; 0: leave it out.
    """
    if math.isinf(remaining):
        return wanted
    per_repetition = sum(cost.repetition for cost in costs)
    fitting = math.floor((remaining - sum(cost.start for cost in costs)) / per_repetition)
    if fitting >= 1:
        return min(wanted, fitting)
    return 1 if costs[0].total(1) <= remaining else 0
