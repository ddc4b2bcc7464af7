"""How fast a model sleeps and wakes, and what of a card it holds meanwhile. Prints; fails where answers differ.

    python -m tests.engine.bench_sleep cycles MODEL [--cycles 200] [--seconds 120]   # sizes, times, answers under load
    python -m tests.engine.bench_sleep turns MODEL [--seconds 20]                    # two models that need a whole card
    python -m tests.engine.bench_sleep update MODEL FOLDER                           # other weights, and back
    python -m tests.engine.bench_sleep write FOLDER --shape 8b                       # a checkpoint for `update`

MODEL is a folder with a config.json: weights are random (`--load-format dummy`). Engines run as behind a server: in
processes of their own, asked by a front end's client. Answers that are compared come from requests that run alone, so
that no neighbour moves their rounding; the load around them does not.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.engine.sleep_measurements import cycles, turns, update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("cycles", "turns", "update"):
        command = commands.add_parser(name)
        command.add_argument("model")
        if name == "update":
            command.add_argument("folder")
        command.add_argument("--cycles", type=int, default=200)
        command.add_argument("--seconds", type=float, default=120.0 if name == "cycles" else 20.0)
        command.add_argument("--rest", type=float, default=1.0, help="seconds asleep: what was given up is cleared")
        command.add_argument("--no-plain", action="store_true", help="no engine without sleep beside")
        command.add_argument("--engine", type=_pairs, default={}, metavar="NAME=VALUE,...", help="engine arguments")
    write = commands.add_parser("write")
    write.add_argument("folder", type=Path)
    write.add_argument("--shape", default="8b")
    args = parser.parse_args()
    if args.command == "write":
        from tests.models.bench_load import write as write_checkpoint

        write_checkpoint(args.folder, args.shape)
        return
    base = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    try:
        {"cycles": cycles, "turns": turns, "update": update}[args.command](args, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _pairs(text: str) -> dict[str, object]:
    return dict(pair.split("=", 1) for pair in text.split(",") if pair)


if __name__ == "__main__":
    sys.exit(main())
