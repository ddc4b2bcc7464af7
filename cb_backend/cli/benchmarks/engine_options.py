"""Options of `cb-backend bench engine`, and what follows from them: the engine's configuration, settings to try."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cb_backend.contracts.config import EngineConfig, engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.support.argument_types import ints, json_object, output_file, positive_float, positive_int

PAIRS_PER_REPETITION = 5
PROFILED_STEPS = 200  # by default; some 300 kernels each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --model MODEL [options]"
    parser.add_argument(
        "--model", required=True, help="folder, GGUF file or hub id; with dummy weights a config.json do"
    )
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument(
        "--workload",
        default="a,b,c",
        help="comma-separated: a (= W1), b, d8 to d256, c, W1 to W8, or one part (W5-8x32)",
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
    parser.add_argument(
        "--adapters",
        type=ints,
        metavar="N[,N]",
        help="numbers of made-up adapters to try, which requests go through in turn; 0: the same engine without",
    )
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


def engine_config(args: argparse.Namespace, max_model_len: int) -> EngineConfig:
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
    if args.adapters is not None:
        if min(args.adapters) < 0:
            raise ConfigError(f"{min(args.adapters)} adapters cannot be tried: name numbers of 0 and more")
        arguments |= {"enable_lora": True, "max_loras": max(1, *args.adapters)}
    given = {key: value for key, value in arguments.items() if value is not None}
    return engine_config_from_dict({**given, **args.engine_args})


class Setting(NamedTuple):
    """What a workload is run under."""

    label: str
    changes: dict[str, int]  # of the engine's arguments
    num_adapters: int  # that requests go through in turn


def settings_to_try(args: argparse.Namespace) -> Iterator[Setting]:
    """Every combination of run-ahead depth, batch size and adapters that was asked for; the name says what is not
    alone."""
    for depth, max_num_seqs, num_adapters in itertools.product(
        args.run_ahead or [None], args.max_num_seqs, args.adapters or [0]
    ):
        changes = {"max_num_seqs": max_num_seqs}
        parts = [f"seqs={max_num_seqs}"] if len(args.max_num_seqs) > 1 else []
        if depth is not None:
            changes["run_ahead"] = depth
            parts.append(f"ahead={depth}")
        if args.adapters:
            parts.append(f"adapters={num_adapters}")
        yield Setting(" ".join(parts), changes, num_adapters)


def rate_of(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ConfigError(f"rate {text!r} must be a number above 0 (requests/s), inf, or a percentage of saturation")
    return value
