"""`cb-backend bench engine`: throughput and latency of the in-process engine on fixed workloads, beside the limit.

The model is loaded once; every pass gets a fresh scheduler and an empty cache. The card's bandwidth and arithmetic are
measured in the same run. Random weights (`--load-format dummy`) do: no figure depends on their values.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cb_backend.cli.benchmarks.kernel_times import window_table
from cb_backend.contracts.config import EngineConfig, engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.kv_cache.layout import ALL_TOKENS
from cb_backend.models.spec import ModelSpec
from cb_backend.study import machine
from cb_backend.study.pass_report import LEGEND, Limits, Record, pairs_record, pass_record, step_table, table
from cb_backend.study.replay import fresh_engine
from cb_backend.study.timed_pass import run_pass
from cb_backend.study.workloads import (
    LATENCY_PAIRS,
    WORKLOADS,
    Draw,
    Workload,
    expand_names,
    fixed,
    latency_pairs,
)
from cb_backend.support.argument_types import ints, json_object, output_file, positive_float, positive_int

HELP = "throughput, latency and host time of the engine on fixed workloads, beside the card's limit"
PEER_MAX_MODEL_LEN = 4096  # what the peers run with; longer only where a workload needs it
PAIRS_PER_REPETITION = 5
RATED_WORKLOADS = ("W3", "W4")
PROFILED_STEPS = 200  # by default; some 300 kernels each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help="folder, GGUF file or hub id; with dummy weights a config.json do"
    )
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument(
        "--workload", default="a,b,c", help="comma-separated: a (= W1), b, c, W1 to W8, or one part (W5-8x32)"
    )
    parser.add_argument(
        "--reps", type=positive_int, default=3, help=f"timed passes ({PAIRS_PER_REPETITION} times as many of b)"
    )
    parser.add_argument("--warm-up-passes", type=int, default=0, help="whole untimed passes before them")
    parser.add_argument(
        "--run-ahead", type=ints, default=[], metavar="N[,N]", help="depths to try; default: the engine's"
    )
    parser.add_argument("--max-num-seqs", type=ints, default=[256], metavar="N[,N]", help="batch sizes to try")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--max-model-len", type=int, help="default: 4096, or what the longest request needs")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument(
        "--engine-args", type=json_object, default={}, metavar="JSON", help="further keys of model.json"
    )
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--rate", default="inf", help="requests/s of W3 and W4: numbers, inf, or 50%% of saturation")
    parser.add_argument("--trace", type=Path, help="CSV of W4: TIMESTAMP,ContextTokens,GeneratedTokens")
    parser.add_argument("--scale", type=positive_float, default=1.0, help="fraction of the requests (smoke test)")
    parser.add_argument("--steps", action="store_true", help="after each pass, what its kinds of steps took")
    parser.add_argument(
        "--profile",
        type=positive_int,
        nargs="?",
        const=PROFILED_STEPS,
        metavar="STEPS",
        help="after the timed passes, one more under torch's profiler: kernel times by kind and the device's busy share"
        f" of STEPS steps ({PROFILED_STEPS}), half of them the first, half in the middle of the rest",
    )
    parser.add_argument("--out", type=output_file, help="append JSON lines to this file")


def run(args: argparse.Namespace) -> int:
    """Load, measure, print the table last; returns the exit code. Raises `ConfigError` for what cannot be run."""
    start = machine.StartUp()
    names = expand_names(args.workload)
    folder, model_config = _read_model(args.model)
    start.stage("config_s")
    engine = create_engine(_engine_config(args, _max_model_len(args, names, model_config.vocab_size)))
    start.stage("engine_s")
    first = fixed("first-token", 1, 128, 1, Draw(model_config.vocab_size))
    run_pass(fresh_engine(engine), first, args.temperature)
    start.stage("first_token_s")
    start_up = start.finish()
    bench = Bench(args, engine, folder, model_config)
    print(bench.describe(), flush=True)
    bench.emit({"workload": "startup", **start_up})
    print(machine.start_up_line(start_up), flush=True)
    bench.warm_up()
    for name in names:
        for setting, changes in _settings(args):
            for record in bench.run_workload(name, setting, changes):
                bench.emit(record)
    engine.close()
    print(f"\n{table(bench.records)}\n{LEGEND}")
    return 0


def _max_model_len(args: argparse.Namespace, names: list[str], vocab_size: int) -> int:
    if args.max_model_len is not None:
        return int(args.max_model_len)
    draw = Draw(vocab_size, trace=args.trace)
    longest = [WORKLOADS[name](draw).max_total_tokens for name in names if name != LATENCY_PAIRS]
    return max(PEER_MAX_MODEL_LEN, *longest) if longest else PEER_MAX_MODEL_LEN


def _read_model(name: str) -> tuple[Path, ModelSpec]:
    # Imported here: torch comes with them, and its import is a stage of the start-up.
    from cb_backend.models.checkpoint import resolve_checkpoint
    from cb_backend.models.registry import read_model_config

    folder = resolve_checkpoint(name)
    return folder, read_model_config(folder)


def _engine_config(args: argparse.Namespace, max_model_len: int) -> EngineConfig:
    arguments: dict[str, Any] = {
        "model": args.model,
        "load_format": args.load_format,
        "dtype": args.dtype,
        "device": args.device,
        "max_model_len": max_model_len,
        "max_num_seqs": max(args.max_num_seqs),
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "gpu_memory_utilization": args.gpu_memory_utilization,
    }
    given = {key: value for key, value in arguments.items() if value is not None}
    return engine_config_from_dict({**given, **args.engine_args})


def _settings(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, int]]]:
    """Every combination of run-ahead depth and batch size that was asked for; the name says what is not alone."""
    for depth, max_num_seqs in itertools.product(args.run_ahead or [None], args.max_num_seqs):
        changes = {"max_num_seqs": max_num_seqs}
        parts = [f"seqs={max_num_seqs}"] if len(args.max_num_seqs) > 1 else []
        if depth is not None:
            changes["run_ahead"] = depth
            parts.append(f"ahead={depth}")
        yield " ".join(parts), changes


class Bench:
    """The loaded engine, what it is held against, and the records so far."""

    def __init__(self, args: argparse.Namespace, engine: LLMEngine, folder: Path, model_config: ModelSpec) -> None:
        self.args = args
        self.engine = engine
        self.records: list[Record] = []
        info = engine.info
        self.card = machine.measure_card(info.device, info.dtype)
        self.limits: Limits | None = None
        if self.card is not None:
            shape = machine.model_shape(model_config, info.dtype, info.kv_cache_dtype, info.quantization)
            # At best, layers with a window keep nothing.
            num_tokens = info.num_blocks * info.block_size // max(info.kv_windows.count(ALL_TOKENS), 1)
            self.limits = Limits(shape, self.card, num_tokens)
        self.base = {
            **machine.conditions(info.device),
            "model": Path(args.model).name,
            "config_digest": machine.config_digest(folder),
            "dtype": info.dtype,
            "kv_cache_dtype": info.kv_cache_dtype,
            "quantization": info.quantization,
            "max_model_len": info.max_model_len,
            "block_size": info.block_size,
            "num_blocks": info.num_blocks,
            "temperature": args.temperature,
        }

    def describe(self) -> str:
        base, info = self.base, self.engine.info
        measured = "limits not measured: no memory left for it"
        if self.card is not None:
            measured = f"measured {self.card.bandwidth / 1e12:.3g} TB/s, {self.card.flops / 1e12:.4g} TFLOP/s"
        return (
            f"{base['card']}, driver {base['driver'] or '-'}, {base['cores']} cores; torch {base['torch']}, triton"
            f" {base['triton']}, Python {base['python']}; cb_backend {base['version']} ({base['commit']}); {measured}\n"
            f"{base['model']} ({base['config_digest']}), {base['dtype']}, weights {info.quantization or 'as they are'},"
            f" KV cache {info.kv_cache_dtype},"
            f" {info.num_blocks} blocks of {info.block_size}, max_model_len {info.max_model_len},"
            f" temperature {self.args.temperature}"
        )

    def emit(self, record: Record) -> None:
        """Keep a record, and write it at once, so that a run that is cut short leaves what it had."""
        if record["workload"] != "startup":
            self.records.append(record)
            print(
                f"  {record['workload']} {record['setting']} rep {record['rep']}: {record['output_tok_s']:,.1f} output"
                f" tok/s in {record['seconds']:.2f} s",
                flush=True,
            )
            if self.args.steps:
                print(step_table(record), flush=True)
        self._write(record)

    def _write(self, record: Record) -> None:
        if self.args.out is not None:
            with self.args.out.open("a") as file:
                file.write(json.dumps({**self.base, **record}) + "\n")

    def warm_up(self) -> None:
        """As the peer's script: eight prompts of 64 tokens, 16 out."""
        run_pass(fresh_engine(self.engine), fixed("warm-up", 8, 64, 16, self._draw(0)), self.args.temperature)

    def run_workload(self, name: str, setting: str, changes: dict[str, int]) -> Iterator[Record]:
        """Records of the timed passes of one workload under one setting (and, for W3 and W4, each rate)."""
        if name == LATENCY_PAIRS:
            yield self._finished(self._run_pairs(changes), setting, 0, changes)
            if self.args.profile is not None:
                _, (_, long) = latency_pairs(self._draw(0), 1)
                self._profile(long, setting, changes, long.output_lens[0])
            return
        for rate_name, rate in self._rates(name, changes):
            label = f"{setting} {rate_name}".strip()
            for repetition in range(-self.args.warm_up_passes, self.args.reps):
                # A warm-up pass has ids of its own.
                draw = self._draw(repetition if repetition >= 0 else 500 - repetition, rate)
                workload = self._scaled(WORKLOADS[name](draw))
                machine.reset_peak_memory(self.engine.info.device)
                result = run_pass(fresh_engine(self.engine, **changes), workload, self.args.temperature)
                if repetition >= 0:
                    yield self._finished(pass_record(workload, result, self.limits), label, repetition, changes)
            if self.args.profile is not None:
                workload = self._scaled(WORKLOADS[name](self._draw(800, rate)))  # ids of its own again
                self._profile(workload, label, changes, len(result.steps.steps))

    def _profile(self, workload: Workload, setting: str, changes: dict[str, int], num_steps: int) -> None:
        """One more pass, under the profiler: its tables, and a record of its own."""
        from cb_backend.cli.benchmarks.profiled_pass import profile_pass  # imports torch

        fresh, most = fresh_engine(self.engine, **changes), self.args.profile
        windows = profile_pass(fresh, workload, self.args.temperature, num_steps, most)
        for window in windows:
            print(f"  {workload.name} {setting} {window_table(window)}", flush=True)
        self._write({"workload": "profile", "of": workload.name, "setting": setting, **changes, "windows": windows})

    def _run_pairs(self, changes: dict[str, int]) -> Record:
        machine.reset_peak_memory(self.engine.info.device)
        pairs = []
        for short, full in latency_pairs(self._draw(0), PAIRS_PER_REPETITION * self.args.reps):
            results = [
                run_pass(fresh_engine(self.engine, **changes), workload, self.args.temperature)
                for workload in (short, full)
            ]
            pairs.append((short, results[0], full, results[1]))
        return pairs_record(pairs[1:], self.limits)

    def _rates(self, name: str, changes: dict[str, int]) -> Iterator[tuple[str, float]]:
        """(label, requests/s); percentages are of the saturation measured here, all requests at once."""
        if name not in RATED_WORKLOADS:
            yield "", math.inf
            return
        saturation: float | None = None
        for part in self.args.rate.split(","):
            if part.endswith("%"):
                saturation = saturation or self._saturation(name, changes)
                yield f"rate={part}", saturation * _number(part[:-1]) / 100
            else:
                yield f"rate={part}", _number(part)

    def _saturation(self, name: str, changes: dict[str, int]) -> float:
        workload = self._scaled(WORKLOADS[name](self._draw(900)))
        workload = dataclasses.replace(workload, arrivals=[0.0] * len(workload.prompts))
        result = run_pass(fresh_engine(self.engine, **changes), workload, self.args.temperature)
        return len(workload.prompts) / result.seconds

    def _draw(self, repetition: int, rate: float = math.inf) -> Draw:
        return Draw(self.engine.info.vocab_size, repetition, rate, self.args.trace)

    def _scaled(self, workload: Workload) -> Workload:
        if self.args.scale >= 1:
            return workload
        return workload.first(max(1, round(self.args.scale * len(workload.prompts))))

    def _finished(self, record: Record, setting: str, repetition: int, changes: dict[str, int]) -> Record:
        peak = machine.peak_memory_bytes(self.engine.info.device)
        return {**record, "setting": setting, "rep": repetition, **changes, "peak_memory_bytes": peak}


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ConfigError(f"rate {text!r} must be a number above 0 (requests/s), inf, or a percentage of saturation")
    return value
