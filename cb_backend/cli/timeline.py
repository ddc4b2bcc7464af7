"""`cb-backend timeline`: the batch as a picture, out of a running engine, a saved step log, or a demonstration."""

from __future__ import annotations

import argparse
import time
from datetime import datetime
from pathlib import Path

from cb_backend.cli.engine_choice import add_engine_arguments, chosen_engine
from cb_backend.cli.paths import CliError
from cb_backend.cli.timelines.axis import TimeAxis
from cb_backend.cli.timelines.panels import peaks_of
from cb_backend.cli.timelines.steps import StepLogFile, from_dump
from cb_backend.cli.timelines.svg import draw, page, sheet
from cb_backend.front_end.engines.engine_observer import ask_for_steps, model_of
from cb_backend.support.argument_types import output_file, positive_int

HELP = "draw who was in the batch, token by token: of a running engine, a saved log, or a demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s SOURCE [options]"
    parser.add_argument("source", metavar="SOURCE", help="live, demo, or a file that --save has written")
    parser.add_argument(
        "--out", type=output_file, default=Path("timeline.html"), metavar="FILE",
        help="a page, or a plain picture where the name ends in .svg; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--save", type=output_file, metavar="FILE.jsonl", help="keep the steps as JSON lines")
    parser.add_argument(
        "--steps", type=positive_int, default=1000, metavar="N", help="newest steps to draw (%(default)s)"
    )
    parser.add_argument("--axis", choices=("time", "steps"), help="default: time, in the demo steps")
    live = parser.add_argument_group("live")
    add_engine_arguments(live)
    demo = parser.add_argument_group("demo")
    demo.add_argument("--model", help="folder or hub id; default: a tiny model with random weights")
    demo.add_argument("--slots", type=positive_int, default=8, help="most requests at once (%(default)s)")
    demo.add_argument("--requests", type=positive_int, help="how many requests (4 times the slots)")
    demo.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    if args.source == "demo":
        from cb_backend.cli.teller import Teller
        from cb_backend.cli.timelines.demo import compare  # needs torch

        logs = compare(args.model, args.slots, args.requests or 4 * args.slots, args.seed, Teller(time.monotonic()))
        title, note = "The same requests, batched in two ways", _comparison(logs)
    else:
        log = _live(args) if args.source == "live" else StepLogFile.read(Path(args.source))
        logs = [StepLogFile(log.header, log.steps[-args.steps :])]
        title, note = "Timeline of the batch", ""
    if not any(log.steps for log in logs):
        raise CliError("there are no steps to draw: the engine has not run any request yet")
    if args.save is not None:
        for i, log in enumerate(logs):
            log.write(args.save if i == 0 else args.save.with_suffix(f".{i}{args.save.suffix}"))
    is_by_time = (args.axis or ("steps" if args.source == "demo" else "time")) == "time"
    span = max(TimeAxis(log.steps, is_by_time).length for log in logs)
    peaks = peaks_of(logs)
    pictures = [draw(log, is_by_time, span, peaks) for log in logs]
    args.out.write_text(sheet(pictures) if args.out.suffix == ".svg" else page(title, pictures, note))
    print(f"{args.out}: {', '.join(f'{len(log.steps)} steps' for log in logs)}. {note}".rstrip())
    return 0


def _comparison(logs: list[StepLogFile]) -> str:
    in_flight, static = (len(log.steps) for log in logs)
    return (
        f"In-flight batching needs {in_flight} steps, static batching {static}: {static / in_flight:.2f} times as many."
    )


def _live(args: argparse.Namespace) -> StepLogFile:
    life = chosen_engine(args)
    now = datetime.now().astimezone().isoformat(" ", "seconds")
    title = f"{Path(model_of(life)).name or 'Engine'}, pid {life.pid}: the last steps at {now}"
    return from_dump(ask_for_steps(life.socket_path, args.steps), title)
