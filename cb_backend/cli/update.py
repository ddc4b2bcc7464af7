"""`cb-backend update MODEL FOLDER`: its engines serve another checkpoint's weights from the next request on."""

from __future__ import annotations

import argparse
from pathlib import Path

from cb_backend.cli.engine_choice import add_model_argument, chosen_model
from cb_backend.cli.paths import CliError
from cb_backend.cli.resting import told_all
from cb_backend.front_end.engines.engine_observer import update_weights
from cb_backend.support.argument_types import positive_float

AFTERWARDS = "a server that starts again reads model.json: name the folder there as well"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s MODEL FOLDER [options]"
    add_model_argument(parser)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkpoint of the same specification")
    parser.add_argument(
        "--timeout",
        type=positive_float,
        default=600.0,
        metavar="S",
        help="after which it is called off, where it has not begun (%(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Requests that run go on to their ends on the old weights; those that wait, and new ones, get the new."""
    folder = args.folder.expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise CliError(f"{folder} is no checkpoint's folder: it has no config.json")
    engines = chosen_model(args)
    exit_code = told_all(engines, lambda life: update_weights(life, str(folder), args.timeout), "updated")
    if exit_code == 0:
        print(AFTERWARDS)
    return exit_code
