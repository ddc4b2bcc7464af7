"""`cb-backend wake MODEL`: its engines take their memory back before a request makes them."""

from __future__ import annotations

import argparse

from cb_backend.cli.resting import add_arguments, order

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Where another model has the card, they wait for their turn."""
    return order(args, False, "awake")
