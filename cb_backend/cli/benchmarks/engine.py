"""`cb-backend bench engine`: throughput and latency of the in-process engine on fixed workloads, beside the limit.

The model is loaded once; every pass gets a fresh scheduler and an empty cache. The card's bandwidth and arithmetic are
measured in the same run. Random weights (`--load-format dummy`) do: no figure depends on their values.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from cb_backend.cli.benchmarks.engine_options import (
    PAIRS_PER_REPETITION,
    Setting,
    add_arguments,
    engine_config,
    rate_of,
    settings_to_try,
)
from cb_backend.cli.benchmarks.kernel_times import window_table
from cb_backend.cli.benchmarks.made_up_adapters import MadeUpAdapters
from cb_backend.contracts.adapters import AdapterKey
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.kv_cache.layout import ALL_TOKENS
from cb_backend.models.spec import ModelSpec
from cb_backend.study import machine
from cb_backend.study.pass_report import LEGEND, Limits, Record, pairs_record, pass_record, step_table, table
from cb_backend.study.replay import fresh_engine
from cb_backend.study.timed_pass import PassResult, run_pass
from cb_backend.study.workloads import (
    LATENCY_PAIRS,
    WORKLOADS,
    Draw,
    Workload,
    expand_names,
    fixed,
    latency_pairs,
)

__all__ = ["HELP", "add_arguments", "run"]

HELP = "throughput, latency and host time of the engine on fixed workloads, beside the card's limit"
PEER_MAX_MODEL_LEN = 4096  # what the peers run with; longer only where a workload needs it
RATED_WORKLOADS = ("W3", "W4")


def run(args: argparse.Namespace) -> int:
    """Load, measure, print the table last; returns the exit code. Raises `ConfigError` for what cannot be run."""
    start = machine.StartUp()
    names = expand_names(args.workload)
    folder, model_config = _read_model(args.model)
    start.stage("config_s")
    engine = create_engine(engine_config(args, _max_model_len(args, names, model_config.vocab_size)))
    start.stage("engine_s")
    first = fixed("first-token", 1, 128, 1, Draw(model_config.vocab_size))
    run_pass(fresh_engine(engine), first, args.temperature)
    start.stage("first_token_s")
    start_up = start.finish()
    bench = Bench(args, engine, folder, model_config)
    print(bench.describe(), flush=True)
    bench.emit({"workload": "startup", **start_up, **bench.about_adapters()})
    print(machine.start_up_line(start_up), flush=True)
    if bench.adapters is not None:
        print(bench.adapters, flush=True)
    bench.warm_up()
    for name in names:
        for setting in settings_to_try(args):
            for record in bench.run_workload(name, setting):
                bench.emit(record)
    engine.close()
    print(f"\n{table(bench.records)}\n{LEGEND}")
    return 0


def _max_model_len(args: argparse.Namespace, names: list[str], vocab_size: int) -> int:
    if args.max_model_len is not None:
        return int(args.max_model_len)
    draw = Draw(vocab_size, trace=args.trace)
    longest = [WORKLOADS[name](draw).max_total_tokens for name in names if name not in LATENCY_PAIRS]
    return max(PEER_MAX_MODEL_LEN, *longest) if longest else PEER_MAX_MODEL_LEN


def _read_model(name: str) -> tuple[Path, ModelSpec]:
    # Imported here: torch comes with them, and its import is a stage of the start-up.
    from cb_backend.models.checkpoint import resolve_checkpoint
    from cb_backend.models.registry import read_model_config

    folder = resolve_checkpoint(name)
    return folder, read_model_config(folder)


class Bench:
    """The loaded engine, what it is held against, and the records so far."""

    def __init__(self, args: argparse.Namespace, engine: LLMEngine, folder: Path, model_config: ModelSpec) -> None:
        self.args = args
        self.engine = engine
        self.records: list[Record] = []
        most = max(args.adapters or [0])
        self.adapters = MadeUpAdapters(engine, most) if most else None
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
        for setting in settings_to_try(self.args):
            self._pass(fixed("warm-up", 8, 64, 16, self._draw(0)), setting)

    def run_workload(self, name: str, setting: Setting) -> Iterator[Record]:
        """Records of the timed passes of one workload under one setting (and, for W3 and W4, each rate)."""
        if name in LATENCY_PAIRS:
            yield self._finished(self._run_pairs(name, setting), setting, setting.label, 0)
            if self.args.profile is not None:
                _, (_, long) = latency_pairs(self._draw(0), 1, name)
                self._profile(long, setting, setting.label, long.output_lens[0])
            return
        for rate_name, rate in self._rates(name, setting):
            label = f"{setting.label} {rate_name}".strip()
            for repetition in range(-self.args.warm_up_passes, self.args.reps):
                # A warm-up pass has ids of its own.
                draw = self._draw(repetition if repetition >= 0 else 500 - repetition, rate)
                workload = self._scaled(WORKLOADS[name](draw))
                machine.reset_peak_memory(self.engine.info.device)
                result = self._pass(workload, setting)
                if repetition >= 0:
                    yield self._finished(pass_record(workload, result, self.limits), setting, label, repetition)
            if self.args.profile is not None:
                workload = self._scaled(WORKLOADS[name](self._draw(800, rate)))  # ids of its own again
                self._profile(workload, setting, label, len(result.steps.steps))

    def _profile(self, workload: Workload, setting: Setting, label: str, num_steps: int) -> None:
        """One more pass, under the profiler: its tables, and a record of its own."""
        from cb_backend.cli.benchmarks.profiled_pass import profile_pass  # imports torch

        fresh, most = fresh_engine(self.engine, **setting.changes), self.args.profile
        adapters = self._adapters_of(workload, setting)
        windows = profile_pass(fresh, workload, self.args.temperature, num_steps, most, adapters)
        for window in windows:
            print(f"  {workload.name} {label} {window_table(window)}", flush=True)
        about = {"workload": "profile", "of": workload.name, "setting": label, "adapters": setting.num_adapters}
        self._write({**about, **setting.changes, "windows": windows})

    def about_adapters(self) -> Record:
        return {} if self.adapters is None else self.adapters.record()

    def _pass(self, workload: Workload, setting: Setting) -> PassResult:
        """On an engine that has done nothing yet."""
        engine = fresh_engine(self.engine, **setting.changes)
        return run_pass(engine, workload, self.args.temperature, self._adapters_of(workload, setting))

    def _adapters_of(self, workload: Workload, setting: Setting) -> Sequence[AdapterKey]:
        """In turn; call when the engine of the pass has been made, which sets who keeps adapters."""
        if self.adapters is None or not setting.num_adapters:
            return ()
        return self.adapters.of_requests(len(workload.prompts), setting.num_adapters)

    def _run_pairs(self, name: str, setting: Setting) -> Record:
        machine.reset_peak_memory(self.engine.info.device)
        pairs = []
        count = self.args.reps * (PAIRS_PER_REPETITION if name == "b" else 1)
        for short, full in latency_pairs(self._draw(0), count, name):
            results = [self._pass(workload, setting) for workload in (short, full)]
            pairs.append((short, results[0], full, results[1]))
        return pairs_record(pairs[1:], self.limits)

    def _rates(self, name: str, setting: Setting) -> Iterator[tuple[str, float]]:
        """(label, requests/s); percentages are of the saturation measured here, all requests at once."""
        if name not in RATED_WORKLOADS:
            yield "", math.inf
            return
        saturation: float | None = None
        for part in self.args.rate.split(","):
            if part.endswith("%"):
                saturation = saturation or self._saturation(name, setting)
                yield f"rate={part}", saturation * rate_of(part[:-1]) / 100
            else:
                yield f"rate={part}", rate_of(part)

    def _saturation(self, name: str, setting: Setting) -> float:
        workload = self._scaled(WORKLOADS[name](self._draw(900)))
        workload = dataclasses.replace(workload, arrivals=[0.0] * len(workload.prompts))
        result = self._pass(workload, setting)
        return len(workload.prompts) / result.seconds

    def _draw(self, repetition: int, rate: float = math.inf) -> Draw:
        return Draw(self.engine.info.vocab_size, repetition, rate, self.args.trace)

    def _scaled(self, workload: Workload) -> Workload:
        if self.args.scale >= 1:
            return workload
        return workload.first(max(1, round(self.args.scale * len(workload.prompts))))

    def _finished(self, record: Record, setting: Setting, label: str, repetition: int) -> Record:
        peak = machine.peak_memory_bytes(self.engine.info.device)
        about = {"setting": label, "rep": repetition, "adapters": setting.num_adapters, **setting.changes}
        return {**record, **about, "peak_memory_bytes": peak}
