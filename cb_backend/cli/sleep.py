"""`cb-backend sleep MODEL`: its engines give the memory of weights and cache back; the first request wakes them."""

from __future__ import annotations

import argparse

from cb_backend.cli.resting import add_arguments, order

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Requests that run go on to their ends first."""
    return order(args, True, "asleep")
