"""`cb-backend bench`: one sub-command a benchmark. It only routes; each benchmark is a module of its own."""

from __future__ import annotations

import argparse
import os

from cb_backend.cli.benchmarks import accuracy, embed, engine

HELP = "measure the engine"

BENCHMARKS = {"accuracy": accuracy, "embed": embed, "engine": engine}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, module in BENCHMARKS.items():
        module.add_arguments(benchmarks.add_parser(name, help=module.HELP, description=module.HELP))


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was named; returns its exit code."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the served engine has it; before torch is imported
    return BENCHMARKS[args.benchmark].run(args)
