"""`cb-backend doctor`: what keeps a server from starting or serving here, each with what to do about it.

Exit code 1 where something does, 0 otherwise; warnings are for people.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from cb_backend.cli.terminal import machine_checks, place_checks
from cb_backend.cli.terminal.findings import Look, counts, exit_code, look_at, shown

LOOKS: tuple[tuple[str, Look], ...] = (
    ("python", machine_checks.python),
    ("libraries", machine_checks.libraries),
    ("torch", machine_checks.torch_and_triton),
    ("driver", machine_checks.driver),
    ("gpu", machine_checks.gpus),
    ("memory", machine_checks.memory),
    ("files", machine_checks.open_files),
    ("server", place_checks.server),
    ("port", place_checks.ports),
    ("engine", place_checks.engines),
    ("cache", place_checks.caches),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs: a list of findings")


def run(args: argparse.Namespace) -> int:
    findings = look_at(LOOKS)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(shown(findings))
        print(counts(findings))
    return exit_code(findings)
