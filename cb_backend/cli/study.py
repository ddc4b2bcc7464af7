"""`cb-backend study`: what in-flight batching gains on your own traffic, and the settings to run it with.

It takes a sample of the requests of a trace, runs them in static batches and in flight with the same cache, tries
values of `max_num_seqs` and `max_num_batched_tokens`, and recommends the pair that does most within the latency target
with preemption under 2 %. With `--simulate` a short calibration is run and everything else is the simulator's, in
minutes of one core; the recommended setting is then run for real and held against its prediction.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from cb_backend import __version__
from cb_backend.cli.paths import CliError
from cb_backend.cli.study_session import Session
from cb_backend.cli.teller import Teller
from cb_backend.contracts.adapters import DEFAULT_MAX_LORAS
from cb_backend.contracts.config import MAX_ENGINES, EngineConfig, engine_config_from_dict
from cb_backend.study import machine
from cb_backend.study.adapter_mix import AdapterMix
from cb_backend.study.advice import Study
from cb_backend.study.bench import Setting
from cb_backend.study.report import html_report, text_report
from cb_backend.study.sample import Sample, sample_lengths, sample_trace
from cb_backend.study.step_times import StepTimes
from cb_backend.study.sweep import Target
from cb_backend.support.argument_types import (
    int_up_to,
    ints,
    json_object,
    positive_float,
    positive_int,
    unwritable,
)
from cb_backend.support.json_files import read_json_object

HELP = "what in-flight batching gains on your own traffic, and which settings to run it with"
GRIDS = {  # by device: values of max_num_seqs and of max_num_batched_tokens
    "cuda": ((32, 64, 128, 256, 512), (512, 2048, 8192)),
    "cpu": ((2, 4, 8, 16, 32), (128, 512, 2048)),
}
DEFAULT_CARD = "h200"
INTERRUPTED = 130  # exit code, as after Ctrl-C


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--trace", type=Path, help="Azure CSV, Mooncake JSON lines, or a CSV with columns of lengths")
    traffic.add_argument("--num-requests", type=int, default=1000, help="how many of its requests (%(default)s)")
    traffic.add_argument("--input-column", default="", help="CSV column of prompt lengths")
    traffic.add_argument("--output-column", default="", help="CSV column of answer lengths")
    forms = "N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA[:MAX]"
    traffic.add_argument("--input-len", metavar="LENGTH", help=f"prompt tokens without --trace: {forms}")
    traffic.add_argument("--output-len", metavar="LENGTH", help="answer tokens without --trace: the same forms")
    traffic.add_argument("--max-input-len", type=int, help="cut longer prompts to this")
    traffic.add_argument("--max-output-len", type=int, help="cut longer answers to this")
    traffic.add_argument("--max-tokens", type=int, help="what clients allow; default: as much as the longest answer")
    traffic.add_argument(
        "--rate", type=float, help="requests/s; default: the trace's own, else 80%% of what is possible"
    )
    traffic.add_argument("--seed", type=int, default=0)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", help="folder, GGUF file or hub id")
    engine.add_argument("--model-json", type=Path, metavar="FILE", help="engine arguments of a deployment")
    engine.add_argument(
        "--engine-args", type=json_object, default={}, metavar="JSON", help="further keys of model.json"
    )
    engine.add_argument("--max-num-seqs", type=_ints, metavar="N[,N]", help="values to try")
    engine.add_argument("--max-num-batched-tokens", type=_ints, metavar="N[,N]", help="values to try")
    engine.add_argument(
        "--gpus", type=int_up_to(MAX_ENGINES), metavar="N",
        help="of the host: `cb-backend plan`'s table first, then every tensor_parallel_size that the model fits",
    )  # fmt: skip
    engine.add_argument("--card", help="what --gpus are, as `cb-backend plan` names them; default: h200")
    goal = parser.add_argument_group("goal")
    goal.add_argument("--target-ttft-ms", type=float, help="most milliseconds to the first token, 99th percentile")
    goal.add_argument("--target-itl-ms", type=float, help="most milliseconds between tokens, 99th percentile")
    how = parser.add_argument_group("how")
    how.add_argument("--simulate", action="store_true", help="try the settings in the simulator")
    how.add_argument("--times", type=Path, metavar="FILE", help="step times saved before, instead of a calibration")
    how.add_argument("--save-times", type=Path, metavar="FILE", help="keep the step times that were measured")
    how.add_argument("--no-confirm", action="store_true", help="do not run the recommended setting again")
    how.add_argument(
        "--max-run-s", type=float, default=60.0, help="most seconds a real run may take: it gets fewer requests"
    )
    how.add_argument(
        "--cpu-time", action="store_true", help="count this process's CPU seconds: for a busy machine and one thread"
    )
    how.add_argument("--html", type=Path, metavar="FILE", help="write the report here")
    how.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    _add_adapter_arguments(parser)


def _add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    lora = parser.add_argument_group("adapters, with --simulate and --no-confirm (max_loras: in --engine-args)")
    lora.add_argument("--adapters", type=positive_int, metavar="N", help="each request goes through one of so many")
    lora.add_argument(
        "--adapter-skew", type=float, default=1.0, metavar="S",
        help="how unevenly: the exponent of Zipf's law; 0: all alike (%(default)s)",
    )  # fmt: skip
    lora.add_argument(
        "--adapter-mib", type=positive_float, metavar="MIB",
        help="of one on the device: what the log of a start says of all slots, over their number",
    )  # fmt: skip
    lora.add_argument(
        "--adapter-gb-s", type=positive_float, default=20.0, metavar="GB/S",
        help="by which one is copied from the host to the device (%(default)s)",
    )  # fmt: skip


def _ints(text: str) -> list[int]:
    return sorted(set(ints(text)))


def run(args: argparse.Namespace) -> int:
    """Study and report; returns the exit code. Raises `CliError` and `CbError` for what cannot be done."""
    check(args)
    begin = time.monotonic()
    teller = Teller(begin)
    times = StepTimes.load(args.times) if args.times is not None else None
    sample = _sample(args)
    device = times.device if times is not None and args.model is None else _device(args)
    seqs, budgets = _grid(args, device)
    config = _config(args, times, Setting(max(seqs), max(*budgets, *seqs)))
    session = Session(
        config=config,
        sample=sample,
        seqs=seqs,
        budgets=budgets,
        target=Target(args.target_ttft_ms, args.target_itl_ms),
        rate=args.rate,
        max_tokens=args.max_tokens,
        seed=args.seed,
        max_run_s=args.max_run_s,
        is_simulated=args.simulate,
        is_confirmed=not args.no_confirm,
        is_cpu_time=args.cpu_time,
        times=times,
        say=teller,
        note=teller.note,
        conditions=machine.conditions,
        adapters=_adapters(args, config),
    )
    study = session.run() if args.gpus is None else _run_ways(args, session)
    study.made_at = f"cb_backend {__version__}, {datetime.now().astimezone().isoformat(' ', 'minutes')}"
    study.command = shlex.join(["cb-backend", *sys.argv[1:]]) if sys.argv[1:2] == ["study"] else ""
    print(text_report(study), flush=True)  # before any file: a full disk must not cost the figures
    if args.save_times is not None and session.times is not None:
        session.times.save(args.save_times)
    if args.html is not None:
        args.html.write_text(html_report(study), encoding="utf-8")
    if args.json is not None:
        args.json.write_text(json.dumps(study.to_json(), indent=1) + "\n", encoding="utf-8")
    print(f"\n{time.monotonic() - begin:.1f} s" + (f", report in {args.html}" if args.html is not None else ""))
    return INTERRUPTED if study.was_interrupted else 0


def _run_ways(args: argparse.Namespace, session: Session) -> Study:
    """The plan's table, and then the study of every way; `session` has the step times afterwards."""
    from cb_backend.cli.study_ways import WaysSession  # brings torch in

    ways = WaysSession(session, args.gpus, args.card or DEFAULT_CARD)
    planned = ways.plan()
    print("\n".join(ways.lines(planned)), end="\n\n", flush=True)
    study = ways.run(planned)
    session.times = ways.times
    return study


def check(args: argparse.Namespace) -> None:
    """Raise `CliError` for what argparse cannot judge."""
    if (args.trace is None) == (args.input_len is None or args.output_len is None):
        raise CliError("give --trace FILE, or both --input-len and --output-len")
    for name in ("num_requests", "max_input_len", "max_output_len", "max_tokens"):
        value = getattr(args, name)
        if value is not None and value < (2 if name == "num_requests" else 1):
            raise CliError(f"--{name.replace('_', '-')} is {value}; it is too small")
    for name in ("rate", "target_ttft_ms", "target_itl_ms", "max_run_s"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise CliError(f"--{name.replace('_', '-')} is {value:g}; it must be above 0")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(args, name) is not None and min(getattr(args, name)) < 1:
            raise CliError(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("html", "json", "save_times"):
        path = getattr(args, name)
        if path is not None and (reason := unwritable(path)) is not None:
            raise CliError(f"--{name.replace('_', '-')} {path}: {reason}")
    _check_ways(args)
    if args.adapters is not None:
        if not (args.simulate and args.no_confirm):
            raise CliError("--adapters is for the simulator alone: add --simulate and --no-confirm")
        if args.adapter_mib is None:
            raise CliError(
                "--adapters needs --adapter-mib: what the log of a start says of all slots, over their number"
            )
    is_without_engine = args.simulate and args.times is not None and args.no_confirm
    if args.model is None and args.model_json is None and not is_without_engine:
        raise CliError("name a --model (or --model-json); only --simulate --times FILE --no-confirm goes without one")


def _check_ways(args: argparse.Namespace) -> None:
    if args.gpus is None:
        if args.card is not None:
            raise CliError("--card says what --gpus are: add that, or leave it out")
        return
    from cb_backend.cli.check_cards import CARDS  # brings torch in
    from cb_backend.cli.gpu_ways import OWN

    if args.card is not None and args.card not in CARDS:
        raise CliError(f"--card is {args.card!r}; use one of {', '.join(sorted(CARDS))}")
    if args.adapters is not None or args.cpu_time:
        name = "--adapters" if args.adapters is not None else "--cpu-time"
        raise CliError(f"{name} is for one device: leave it or --gpus out")
    arguments = _arguments(args)
    if not arguments.get("model"):
        raise CliError("--gpus needs a --model (or --model-json), whose sizes are planned with")
    for name in OWN:
        if name in arguments:
            raise CliError(f"{name} is what --gpus tries; leave it out of the engine's arguments")


def _adapters(args: argparse.Namespace, config: EngineConfig) -> AdapterMix | None:
    """Raises `CliError` where the engine's arguments do not enable them."""
    if args.adapters is None:
        return None
    if not config.enable_lora:
        raise CliError("--adapters needs an engine that takes them: --engine-args '{\"enable_lora\": true}'")
    num_slots = config.max_loras or min(args.adapters, DEFAULT_MAX_LORAS)
    return AdapterMix(args.adapters, args.adapter_skew, num_slots, args.adapter_mib * 2**20, args.adapter_gb_s * 1e9)


def _sample(args: argparse.Namespace) -> Sample:
    cut = {"max_input_len": args.max_input_len, "max_output_len": args.max_output_len, "seed": args.seed}
    if args.trace is None:
        return sample_lengths(args.input_len, args.output_len, args.num_requests, **cut)
    return sample_trace(args.trace, args.num_requests, args.input_column, args.output_column, **cut)


def _device(args: argparse.Namespace) -> str:
    from cb_backend.engine.runner.runner_factory import resolve_device  # brings torch in

    return resolve_device(str(_arguments(args).get("device", "auto"))).type


def _grid(args: argparse.Namespace, device: str) -> tuple[list[int], list[int]]:
    seqs, budgets = GRIDS["cuda" if device == "cuda" else "cpu"]
    return args.max_num_seqs or list(seqs), args.max_num_batched_tokens or list(budgets)


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if args.model_json is not None:
        arguments = read_json_object(args.model_json, refuses_twins=True)
    arguments.update(args.engine_args)
    return arguments if args.model is None else {**arguments, "model": args.model}


def _config(args: argparse.Namespace, times: StepTimes | None, largest: Setting) -> EngineConfig:
    """The engine's arguments, made for the largest setting."""
    measured = {} if times is None else {"model": times.model, "block_size": times.block_size}
    settings = {
        "max_num_seqs": largest.max_num_seqs,
        "max_num_batched_tokens": largest.max_num_batched_tokens,
    }
    return engine_config_from_dict({**measured, **_arguments(args), **settings})
