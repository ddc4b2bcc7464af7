"""Types for flags: argparse says what is wrong with a value in one line, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def int_up_to(most: int) -> Callable[[str], int]:
    """The type of a whole number from 1 to `most`."""

    def bounded(text: str) -> int:
        value = positive_int(text)
        if value > most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most}")
        return value

    return bounded


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def ints(text: str) -> list[int]:
    """Whole numbers with commas between."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, like 64,256") from None


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:80]}")
    return value


def server_address(text: str) -> str:
    """`HOST:PORT`; `[::1]:8001` and the names of gRPC's own kinds of addresses too."""
    match = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})", text)
    is_one = match is not None and 1 <= int(match[1]) <= 65535
    if not is_one and not re.match(r"(dns|ipv4|ipv6|unix|unix-abstract):", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, like localhost:8001")
    return text


def output_file(text: str) -> Path:
    """A file to be written later."""
    path = Path(text)
    reason = unwritable(path)
    if reason is not None:
        raise argparse.ArgumentTypeError(f"{text}: {reason}")
    return path


def unwritable(path: Path) -> str | None:
    """Why no file could be written there, as far as it can be said now and not after the work; None: nothing seen."""
    if path.is_dir():
        return "it is a folder; name a file"
    return None if path.parent.is_dir() else f"there is no folder {path.parent}"
