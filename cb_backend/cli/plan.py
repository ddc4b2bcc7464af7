"""`cb-backend plan`: the ways to spread a model over several GPUs of a host, side by side, and which one to take.

No GPU is needed and no weight is read: sizes come from the checkpoint's headers, or where there are none yet from its
config.json alone; rates come from the cards' data sheets.
Exit codes: 0 there is a way, 1 there is none, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from cb_backend.cli.check_cards import CARDS
from cb_backend.cli.gpu_ways import OWN, Planned, plan_ways, table
from cb_backend.cli.server.engine_options import add_engine_options, flag_of, options_for
from cb_backend.contracts.config import MAX_ENGINES, EngineConfig
from cb_backend.study.gpu_plan import Traffic
from cb_backend.support.argument_types import int_up_to, positive_float, positive_int

EXIT_FOUND, EXIT_NONE = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --model DIR --gpus N [options]"
    parser.add_argument("--model", required=True, metavar="DIR", help="a checkpoint's folder, or a GGUF file")
    parser.add_argument("--gpus", required=True, type=int_up_to(MAX_ENGINES), metavar="N", help="GPUs of the host")
    parser.add_argument("--card", choices=sorted(CARDS), default="h200", help="what they are; default: h200")
    parser.add_argument("--input-len", type=positive_int, default=1024, help="tokens of a prompt; default: 1024")
    parser.add_argument("--output-len", type=positive_int, default=256, help="tokens of an answer; default: 256")
    parser.add_argument(
        "--target-itl-ms", type=positive_float, metavar="MS", help="from token to token, at most; default: as it comes"
    )
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    options = options_for(args, args.model)
    for name in OWN:
        if name in options:
            args.command_parser.error(f"{flag_of(name)} is what is planned; leave it out")
    target = None if args.target_itl_ms is None else args.target_itl_ms / 1e3
    traffic = Traffic(args.input_len, args.output_len, target)
    planned = plan_ways(EngineConfig(model=args.model, **options), CARDS[args.card], args.gpus, traffic)
    best = planned.best
    if args.json:
        ways = [asdict(way) for way in planned.ways]
        print(json.dumps({"ways": ways, "recommended": best and asdict(best)}, indent=2))
    else:
        print("\n".join([*table(planned), "", *_advice(planned, options)]))
    return EXIT_NONE if best is None else EXIT_FOUND


def _advice(planned: Planned, options: dict[str, Any]) -> Iterator[str]:
    """options: the engine's arguments that the plan was made with, and would not hold without."""
    ways, best, traffic = planned.ways, planned.best, planned.traffic
    if best is None:
        yield "None of them has room for the model and a request. Change what is named above, or take larger or more"
        yield "GPUs, or a quantised checkpoint."
        return
    is_late = traffic.target_itl is not None and best.itl > traffic.target_itl
    if is_late:
        yield f"None keeps {1e3 * (traffic.target_itl or 0):g} ms from token to token; the nearest:"
    least = min(way.tensor_parallel_size for way in ways if way.num_streams)
    if best.tensor_parallel_size == least:
        reason = "the model fits one GPU" if least == 1 else f"the model needs {least} GPUs"
    else:
        gain = "have room for more streams" if traffic.target_itl is None else "make the steps shorter"
        reason = f"{best.tensor_parallel_size} GPUs together {gain}"
    engines = "" if best.data_parallel_size == 1 else f", and {best.data_parallel_size} engines share the requests"
    yield f"In model.json, because {reason}{engines}:"
    sizes = {"tensor_parallel_size": best.tensor_parallel_size, "data_parallel_size": best.data_parallel_size}
    line = json.dumps({**sizes, **options, "max_num_seqs": best.num_streams})
    yield f"    {line[1:-1]}"
