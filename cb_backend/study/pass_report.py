"""From a timed pass to one JSON record, and from records to the table: every figure with its limit beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cb_backend.study.latencies import batch_histogram, summary
from cb_backend.study.roofline import CardLimits, ModelShape, ideal_schedule, prefill_seconds
from cb_backend.study.timed_pass import PassResult
from cb_backend.study.workloads import Workload

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pass is held against."""

    shape: ModelShape
    card: CardLimits
    num_cache_tokens: int


def pass_record(workload: Workload, result: PassResult, limits: Limits | None) -> Record:
    """All figures of one pass. Times in milliseconds unless the key says otherwise."""
    num_prompt_tokens = sum(workload.prompt_lens)
    num_cached = result.stats.num_cached_prompt_tokens
    # The last token of each answer is never computed with.
    num_needed = num_prompt_tokens - num_cached + result.num_output_tokens - len(workload.prompts)
    steps = list(result.steps.steps.values())
    num_rows = [step.num_rows for step in steps]
    return {
        "workload": workload.name,
        "requests": len(workload.prompts),
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": result.num_output_tokens,
        "lengths_digest": workload.lengths_digest,
        "seconds": round(result.seconds, 4),
        "idle_seconds": round(result.idle_seconds, 4),
        "output_tok_s": round(result.num_output_tokens / result.seconds, 2),
        "total_tok_s": round((num_prompt_tokens + result.num_output_tokens) / result.seconds, 2),
        "ttft_ms": summary(result.latencies.ttft),
        "tpot_ms": summary(result.latencies.tpot),
        "itl_ms": summary(result.latencies.token_gaps),
        "chunk_itl_ms": summary(result.latencies.chunk_gaps),
        "e2e_ms": summary(result.latencies.e2e),
        "steps": len(steps),
        "mean_batch": round(float(np.mean(num_rows)), 1),
        "batch_histogram": batch_histogram(num_rows),
        "full_decode_step_ms": summary(result.steps.step_intervals()),
        "host_us": result.steps.host_summary(),
        "step_kinds": _step_kinds(result, limits),
        "preemptions": result.stats.num_preemptions,
        "recomputed_tokens": result.steps.num_recomputed_tokens(num_needed),
        "padding_share": None if result.padding_share is None else round(result.padding_share, 4),
        "cached_prompt_tokens": num_cached,
        "limit": None if limits is None else _limit(workload, result, limits),
    }


def _step_kinds(result: PassResult, limits: Limits | None) -> list[Record]:
    """Where the time went: steps, seconds and floor of each kind of step, and means of a step."""
    last = max((step.end for step in result.steps.steps.values()), default=0.0)
    records = []
    for name, steps in result.steps.by_kind(last - result.seconds).items():
        own = [step for step, _ in steps]
        floor = None if limits is None else result.steps.floor_seconds(limits.shape, limits.card, own)
        records.append(
            {
                "kind": name,
                "steps": len(own),
                "seconds": round(sum(seconds for _, seconds in steps), 4),
                "floor_seconds": None if floor is None else round(floor, 4),
                "rows": round(float(np.mean([step.num_rows for step in own])), 1),
                "tokens": round(float(np.mean([step.num_scheduled_tokens.sum() for step in own])), 1),
                "host_us": round(float(np.mean([step.host_time for step in own])) * 1e6, 1),
            }
        )
    return records


def step_table(record: Record) -> str:
    """The kinds of steps of one pass, a line each."""
    lines = [f"{'step':26s} {'steps':>6s} {'s':>8s} {'floor':>8s} {'':>5s} {'ms each':>8s} {'rows':>6s} {'tokens':>7s}"]
    for kind in record["step_kinds"]:
        seconds, floor = kind["seconds"], kind["floor_seconds"]
        held = ("-", "") if floor is None or not seconds else (f"{floor:.3f}", f"{floor / seconds:.0%}")
        lines.append(
            f"{kind['kind']:26s} {kind['steps']:6d} {seconds:8.3f} {held[0]:>8s} {held[1]:>5s}"
            f" {seconds / kind['steps'] * 1e3:8.3f} {kind['rows']:6.0f} {kind['tokens']:7.0f}"
        )
    return "\n".join(lines)


def _limit(workload: Workload, result: PassResult, limits: Limits) -> Record:
    """Floors beside the figures; both fractions of the limit.

    `fraction_ideal` holds the wall time against a perfect schedule (offline workloads only: otherwise the arrivals
    decide); `fraction_executed` against the floor of the steps that ran, so it shows kernels and host alone.
    """
    shape, card = limits.shape, limits.card
    executed = result.steps.floor_seconds(shape, card)
    floors = [result.steps.floor_seconds(shape, card, [step]) for step in result.steps.steps.values() if step.is_decode]
    rows = [step.num_rows for step in result.steps.steps.values() if step.is_decode]
    full = result.steps.full_decode_steps()
    record: Record = {
        "bandwidth": card.bandwidth,
        "flops": card.flops,
        "executed_s": round(executed, 6),
        "fraction_executed": round(executed / (result.seconds - result.idle_seconds), 4),
        # One prompt of the middle length alone; the steps that ran, weighted by the rows that waited for them.
        "ttft_ms": _ms(prefill_seconds(shape, card, [int(np.median(workload.prompt_lens))])),
        "tpot_ms": _ms(float(np.average(floors, weights=rows))) if floors else None,
        "full_decode_step_ms": _ms(result.steps.floor_seconds(shape, card, full) / len(full)) if full else None,
    }
    if workload.is_offline:
        ideal = ideal_schedule(
            shape,
            card,
            workload.prompt_lens,
            workload.output_lens,
            limits.num_cache_tokens,
            workload.num_shared_tokens,
        )
        record["ideal_s"] = round(ideal.seconds, 6)
        record["output_tok_s"] = round(result.num_output_tokens / ideal.seconds, 1)
        record["fraction_ideal"] = round(ideal.seconds / result.seconds, 4)
    return record


def pairs_record(pairs: Sequence[tuple[Workload, PassResult, Workload, PassResult]], limits: Limits | None) -> Record:
    """Batch-1 latency out of (1 output token, many output tokens) passes, as the peer's script computes it.

    TTFT is the whole time of a one-token request; TPOT = (time of the long one - median TTFT) / (tokens - 1).
    """
    ttfts = np.array([short.seconds for _, short, _, _ in pairs])
    fulls = np.array([full.seconds for _, _, _, full in pairs])
    _, _, workload, middle = sorted(pairs, key=lambda pair: pair[3].seconds)[len(pairs) // 2]
    record = pass_record(workload, middle, limits)
    num_gaps = workload.output_lens[0] - 1
    record["passes"] = len(pairs)
    record["ttft_ms"] = summary(ttfts)
    record["tpot_ms"] = summary((fulls - np.median(ttfts)) / num_gaps)
    record["itl_ms"] = summary(np.concatenate([full.latencies.token_gaps for _, _, _, full in pairs]))
    record["e2e_ms"] = summary(fulls)
    return record


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


_HEADER = (
    f"{'workload':22s} {'out tok/s (min-max)':>24s} {'limit':>8s} {'ideal':>6s} {'exec.':>6s}  {'TTFT p50/p99':>16s}"
    f" {'floor':>6s}  {'TPOT':>7s} {'floor':>6s}  {'ITL p50/p99/max':>20s}  {'E2E p50':>8s}"
    f" {'batch':>6s} {'pad':>4s} {'pre.':>5s} {'again':>6s}  {'host us p50/p99':>15s} {'GB':>5s}"
)
LEGEND = (
    "times in ms; limit and ideal: perfect schedule; exec.: floor of the steps that ran;"
    " pad: padding of all tokens run; again: tokens recomputed"
)


def table(records: Sequence[Record]) -> str:
    """One line a workload and setting: medians over the repetitions. Times in milliseconds."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault((record["workload"], record.get("setting", "")), []).append(record)
    lines = [_line(f"{name} {setting}".strip(), group) for (name, setting), group in groups.items()]
    return "\n".join((_HEADER, *lines))


def _line(name: str, group: list[Record]) -> str:
    rates = [record["output_tok_s"] for record in group]
    spread = f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"
    host = [record["host_us"]["total"] for record in group]
    return (
        f"{name:22s} {spread:>24s} {_mid(group, 'limit', 'output_tok_s', form=',.0f'):>8s}"
        f" {_mid(group, 'limit', 'fraction_ideal', form='.0%'):>6s}"
        f" {_mid(group, 'limit', 'fraction_executed', form='.0%'):>6s}"
        f"  {_several(group, 'ttft_ms', ('p50', 'p99')):>16s} {_mid(group, 'limit', 'ttft_ms'):>6s}"
        f"  {_mid(group, 'tpot_ms', 'p50'):>7s} {_mid(group, 'limit', 'tpot_ms'):>6s}"
        f"  {_several(group, 'itl_ms', ('p50', 'p99', 'max')):>20s}  {_mid(group, 'e2e_ms', 'p50', form=',.0f'):>8s}"
        f" {_mid(group, 'mean_batch', form='.0f'):>6s} {_mid(group, 'padding_share', form='.0%'):>4s}"
        f" {_mid(group, 'preemptions', form='.0f'):>5s} {_mid(group, 'recomputed_tokens', form=',.0f'):>6s}"
        f"  {_several([{'host': value} for value in host], 'host', ('p50', 'p99'), '.0f'):>15s}"
        f" {max(record['peak_memory_bytes'] for record in group) / 1e9:5.1f}"
    )


def _mid(group: list[Record], *keys: str, form: str = "") -> str:
    """Median over the repetitions of one (nested) value; `-` where it is missing."""
    values = []
    for record in group:
        value: Any = record
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            values.append(value)
    if not values:
        return "-"
    middle = statistics.median(values)
    return format(middle, form or (".2f" if middle < 100 else ",.0f"))


def _several(group: list[Record], key: str, names: tuple[str, ...], form: str = "") -> str:
    return "/".join(_mid(group, key, name, form=form) for name in names)
