"""`cb-backend cache reset`: a running engine forgets its prefix cache, and serves on."""

from __future__ import annotations

import argparse

from cb_backend.cli.engine_choice import add_engine_arguments, chosen_engine
from cb_backend.front_end.engine_observer import reset_prefix_cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("reset",), help="reset: reuse nothing that was computed until now")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    life = chosen_engine(args)
    num_blocks = reset_prefix_cache(life.socket_path)
    print(
        f"engine {life.pid}: its prefix cache is empty ({num_blocks} blocks forgotten by resets so far); requests go on"
    )
    return 0
