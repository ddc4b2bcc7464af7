"""Host time of an engine step without a device: `python -m tests.engine.bench_host`. Prints, asserts nothing.

The real loop of the engine process, scheduler, slot runner and socket to its front ends, on a CPU; only the captured
graphs and the kernels that join slots and book tokens are left out: launching them does nothing here. So what is
measured is the host's part of a step, but for what the driver takes for a launch, a copy and an event.

    python -m tests.engine.bench_host --rows 256 --front-ends 4
    python -m tests.engine.bench_host --against /path/to/another/checkout     # by turns with this one, 50 steps each

Times are CPU time of the loop's thread: what other processes take of the machine is not in them, but they slow it down
all the same. So on a machine that others use as well only the ratio of two checkouts in one run means something, and
the counts: what Python executes in a step is the same on any machine.

`steady`: every row decodes, a sixteenth of them crosses a block border in each step. `turnover`: requests of 128 to 384
tokens, each followed by a new one, so that nearly every step has one that joins and one that ends.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cb_backend.engine.garbage import GarbageSchedule
from tests.engine.host_loop import Loop

TURNS_AT_ONCE = 50


def serve(scenario: str, num_rows: int, num_front_ends: int) -> None:
    """What runs apart: does what a line of the input names, so often, and prints the result."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, GarbageSchedule():
        loop = Loop(folder, scenario, num_rows, num_front_ends)
        for line in sys.stdin:
            what, number = line.split()
            print(json.dumps(getattr(loop, what)(int(number))), flush=True)
        loop.close()


class Apart:
    """A process that runs the loop of one checkout's package, by that checkout's own copy of this file."""

    def __init__(self, checkout: str, arguments: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": checkout, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, f"{checkout}/tests/engine/bench_host.py", "--serve", *arguments]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str, number: int) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, number, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def compare(checkouts: list[str], arguments: list[str], num_turns: int) -> None:
    """Run all of them by turns, and print."""
    processes = {checkout: Apart(checkout, arguments) for checkout in checkouts}
    times: dict[str, list[float]] = {checkout: [] for checkout in checkouts}
    for _ in range(0, num_turns, TURNS_AT_ONCE):
        for checkout, process in processes.items():
            times[checkout] += process.ask("turns", TURNS_AT_ONCE)
    if len(checkouts) == 2:
        base, here = (np.percentile(times[checkout], [10, 50]) for checkout in checkouts)
        print("  this checkout's share of the other's time: 10th percentile {:.3f}, median {:.3f}".format(*here / base))
    for checkout, process in processes.items():
        tenth, median = 1e6 * np.percentile(times[checkout], [10, 50])
        instructions, c_calls = process.ask("count", 50)
        phases = process.ask("phases", 500)
        parts = ", ".join(f"{name} {us:.0f}" for name, us in sorted(phases.items(), key=lambda item: -item[1]))
        print(f"  {checkout}: median {median:.1f} us, 10th percentile {tenth:.1f}")
        print(f"    a step executes {instructions:.0f} instructions of Python and {c_calls:.0f} calls of C functions")
        print(f"    with a stopwatch around each part: {sum(phases.values()):.0f} us = {parts}", flush=True)
        process.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", nargs="+", default=["steady", "turnover"], choices=("steady", "turnover"))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--against", help="another checkout, run by turns with this one")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.scenario[0], args.rows, args.front_ends)
        return
    here = str(Path(__file__).resolve().parents[2])
    for scenario in args.scenario:
        print(f"{scenario}, {args.rows} rows, {args.front_ends} front ends, run-ahead 4:", flush=True)
        sizes = ["--rows", str(args.rows), "--front-ends", str(args.front_ends)]
        checkouts = [args.against, here] if args.against else [here]
        compare(checkouts, ["--scenario", scenario, *sizes], args.turns)


if __name__ == "__main__":
    main()
