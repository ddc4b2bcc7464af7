"""`cb-backend cache reset`: the running engines of a model forget their prefix caches, and serve on."""

from __future__ import annotations

import argparse
import sys

from cb_backend.cli.engine_choice import add_engine_arguments, chosen_model
from cb_backend.contracts.errors import UnavailableError
from cb_backend.front_end.engines.engine_observer import reset_prefix_cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("reset",), help="reset: reuse nothing that was computed until now")
    add_engine_arguments(parser, "an engine of the model that is meant, where several models run")


def run(args: argparse.Namespace) -> int:
    """Every engine of the model is reset, also beside one that does not answer; that makes the exit code 1."""
    exit_code = 0
    for life in chosen_model(args):
        try:
            num_blocks = reset_prefix_cache(life.socket_path)
        except UnavailableError as error:
            print(f"error: engine {life.pid} was not reset: {error}", file=sys.stderr)
            exit_code = 1
            continue
        known = f"{num_blocks} blocks forgotten by resets so far"
        print(f"engine {life.pid}: its prefix cache is empty ({known}); requests go on")
    return exit_code
