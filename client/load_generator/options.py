"""The command line of the load test, and its translation into workloads. Knows no processes and no server."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cb_backend.support.argument_types import json_object, unwritable
from cb_backend.traffic.traces import read_trace
from cb_backend.traffic.workload import (
    LengthDistribution,
    Lengths,
    PlannedRequest,
    WorkloadError,
    arrival_times,
    num_open_loop_requests,
    plan,
    scaled_trace_times,
)

from .wire import WireOptions

DEFAULT_NUM_REQUESTS = 200
CLOSED_LOOP_PLANS = 20_000  # lengths drawn for a closed loop bounded by time; taken over again when used up
NAMES_DRAWN = 4096  # about: the finer, the closer to the law
RUN_SEED_STEP = 1_000_003  # each run of a sweep has prompts of its own, so that none finds the last one's in a cache


@dataclass(frozen=True)
class Load:
    """One run: an open loop at a rate, or a closed loop of so many streams."""

    kind: str  # "rate", "concurrency" or "trace"
    value: float | None  # requests/s, streams, or None for a trace at its own pace
    label: str

    def to_json(self) -> dict[str, Any]:
        value = self.value if self.value is not None and self.value != float("inf") else None
        return {"kind": self.kind, "value": value, "label": self.label}


def parser() -> argparse.ArgumentParser:
    """All options. Grouped as in the module's documentation."""
    root = argparse.ArgumentParser(
        description="Measure a served model under load: latencies, tokens/s, goodput; JSON and HTML report.",
        epilog="Several --rate or --concurrency values make a sweep. Ctrl-C ends a run and reports what was done.",
    )
    root.add_argument("--url", default="localhost:8001", help="host:port of the server's gRPC")
    root.add_argument("--model", default="llm")
    root.add_argument("--metrics-url", help="the server's /metrics, read before and after: preemption rate")
    _add_load(root.add_argument_group("load"))
    _add_lengths(root.add_argument_group("lengths and prompts"))
    _add_wire(root.add_argument_group("requests"))
    _add_client(root.add_argument_group("client and report"))
    return root


def _add_load(group: Any) -> None:
    group.add_argument("--rate", type=float, nargs="+", default=[], help="open loop: requests/s; inf = all at once")
    group.add_argument("--concurrency", type=int, nargs="+", default=[], help="closed loop: requests kept in flight")
    group.add_argument("--arrival", choices=("poisson", "gamma", "constant", "trace"), default="poisson")
    group.add_argument("--gamma-cv", type=float, default=2.0, help="gamma: coefficient of variation of the gaps")
    group.add_argument(
        "--time-scale", type=float, default=1.0, help="trace: its gaps times this; --rate sets it instead"
    )
    group.add_argument("--num-requests", type=int, help=f"default {DEFAULT_NUM_REQUESTS} without --duration")
    group.add_argument("--duration", type=float, help="seconds after which nothing new is sent")
    group.add_argument("--drain-timeout", type=float, default=60.0, help="seconds to wait for the answers after that")
    group.add_argument("--request-timeout", type=float, default=600.0, help="seconds for one request; 0 = no limit")
    group.add_argument("--warm-up", type=int, default=4, help="requests sent before, not measured")


def _add_lengths(group: Any) -> None:
    group.add_argument("--trace", type=Path, help="Azure CSV, Mooncake JSON lines, or a CSV with columns of lengths")
    group.add_argument("--trace-offset", type=int, default=0, help="skip so many rows")
    group.add_argument("--input-column", default="", help="CSV column of prompt lengths")
    group.add_argument("--output-column", default="", help="CSV column of answer lengths")
    forms = "N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA[:MAX]"
    group.add_argument("--input-len", default="128", help=f"prompt tokens without --trace: {forms}")
    group.add_argument("--output-len", default="128", help=f"answer tokens without --trace: {forms}")
    group.add_argument("--max-input-len", type=int, help="cut longer prompts to this")
    group.add_argument("--max-output-len", type=int, help="cut longer answers to this")
    group.add_argument("--tokenizer", type=Path, help="tokenizer.json of the model: prompts of exact length")
    group.add_argument("--tokens-per-word", type=float, help="skip the probe that learns this from the server")
    group.add_argument("--seed", type=int, default=0)


def _add_wire(group: Any) -> None:
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--sampling", type=json_object, default={}, metavar="JSON", help="further sampling parameters")
    group.add_argument(
        "--lora-names", type=_names, default=(), metavar="A[,B]", help="adapters that requests go through"
    )
    group.add_argument("--lora-skew", type=float, default=0.0, help="exponent of Zipf's law by which they are drawn")
    group.add_argument("--cancel-fraction", type=float, default=0.0, help="share of requests that the client cancels")
    group.add_argument("--no-token-counts", action="store_true", help="server without num_output_tokens: 1 a response")
    group.add_argument("--no-finish-reason", action="store_true", help="server without finish_reason")


def _add_client(group: Any) -> None:
    group.add_argument("--processes", type=int, default=1, help="client processes, each with an event loop")
    group.add_argument("--connections", type=int, default=4, help="connections of each process")
    group.add_argument("--slo-ttft-ms", type=float, help="goodput: most milliseconds to the first token")
    group.add_argument("--slo-tpot-ms", type=float, help="goodput: most milliseconds a token")
    group.add_argument("--label", help="name of this test in reports; default: the model's")
    group.add_argument("--json", type=Path, help="write the result here")
    group.add_argument("--html", type=Path, help="write the report here")
    group.add_argument("--history", type=Path, help="write a JSON line for each request here")
    group.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="report two results; sends nothing")


def loads(args: argparse.Namespace) -> list[Load]:
    """The runs, in order. Raises `WorkloadError` if none or contradicting ones are asked for."""
    if args.rate and args.concurrency:
        raise WorkloadError("--rate is an open loop and --concurrency a closed one; give one of them")
    if args.concurrency:
        if min(args.concurrency) < 1:
            raise WorkloadError(f"--concurrency must be at least 1, got {min(args.concurrency)}")
        return [Load("concurrency", float(n), f"{n} stream" if n == 1 else f"{n} streams") for n in args.concurrency]
    if args.rate:
        return [Load("rate", rate, f"{rate:g} requests/s") for rate in args.rate]
    if args.arrival == "trace":
        return [Load("trace", None, f"trace, gaps x {args.time_scale:g}")]
    raise WorkloadError("no load: give --rate (open loop), --concurrency (closed loop) or --arrival trace")


def check(args: argparse.Namespace) -> None:
    """Raise `WorkloadError` for values that argparse cannot judge."""
    for name, low in (("processes", 1), ("connections", 1), ("num_requests", 1), ("warm_up", 0), ("trace_offset", 0)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise WorkloadError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
    if args.duration is not None and not args.duration > 0:
        raise WorkloadError(f"--duration must be above 0, got {args.duration:g}")
    if args.tokens_per_word is not None and not args.tokens_per_word > 0:
        raise WorkloadError(f"--tokens-per-word must be above 0, got {args.tokens_per_word:g}")
    if args.arrival == "trace" and args.trace is None and not args.concurrency:
        raise WorkloadError("--arrival trace needs --trace FILE")
    for name in ("json", "html", "history"):
        path = getattr(args, name)
        if path is not None and (reason := unwritable(path)) is not None:
            raise WorkloadError(f"--{name} {path}: {reason}")
    if args.num_requests is None and args.duration is None:
        args.num_requests = DEFAULT_NUM_REQUESTS


def lengths(args: argparse.Namespace) -> Lengths:
    """Where the lengths come from. Raises `WorkloadError`, `TraceError`, OSError."""
    rows = []
    if args.trace is not None:
        rows = read_trace(
            args.trace,
            offset=args.trace_offset,
            limit=args.num_requests,
            input_column=args.input_column,
            output_column=args.output_column,
        )
    return Lengths(
        rows=rows,
        input_len=LengthDistribution.parse(args.input_len),
        output_len=LengthDistribution.parse(args.output_len),
        max_input_len=args.max_input_len,
        max_output_len=args.max_output_len,
    )


def plan_run(args: argparse.Namespace, load: Load, source: Lengths, seed: int) -> list[PlannedRequest]:
    """The requests of one run; for a closed loop bounded by time alone a list to be taken over and over."""
    rng = np.random.default_rng(seed)
    if load.kind == "concurrency":
        times = np.zeros(args.num_requests or CLOSED_LOOP_PLANS)
    elif args.arrival == "trace":
        times = scaled_trace_times(source.rows, time_scale=args.time_scale, rate=load.value)
    else:
        assert load.value is not None
        count = num_open_loop_requests(load.value, args.num_requests, args.duration)
        times = arrival_times(args.arrival, load.value, count, rng, args.gamma_cv)
    if args.duration is not None:
        times = times[times < args.duration]
    if not len(times):
        raise WorkloadError(f"no request arrives within {args.duration:g} s; raise --duration or --rate")
    return plan(times, source, rng, args.cancel_fraction)


def plan_warm_up(args: argparse.Namespace, source: Lengths, seed: int) -> list[PlannedRequest]:
    """Requests of the same kind, sent before the run and not measured."""
    rng = np.random.default_rng([seed, 1])
    return plan(np.zeros(args.warm_up), source, rng)


def wire_options(args: argparse.Namespace) -> WireOptions:
    """What every request asks for beside its prompt."""
    return WireOptions(
        model=args.model,
        has_token_counts=not args.no_token_counts,
        has_finish_reason=not args.no_finish_reason,
        sampling={"temperature": args.temperature, **args.sampling},
        lora_names=drawn_names(args.lora_names, args.lora_skew),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def drawn_names(names: tuple[str, ...], skew: float) -> tuple[str, ...]:
    """Each as often as Zipf's law has it, at least once: the first as often as the second 2 ** skew times."""
    weights = 1.0 / np.arange(1, len(names) + 1) ** skew
    counts = np.maximum(1, np.round(NAMES_DRAWN * weights / weights.sum())).astype(int)
    return tuple(name for name, count in zip(names, counts.tolist(), strict=True) for _ in range(count))
