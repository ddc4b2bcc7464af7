"""What stands in `kernels/results`: read, and the newest of each measurement kept. Files grow at their end."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "kernels" / "results"
_CARD = re.compile(r"card: NVIDIA ([^,;]+)")
_COMMIT = re.compile(r"commit ([0-9a-f]{7})")
# A line that tells card, versions and code of what stands below it, as it was written at different times. The card's
# machine may stand in brackets or behind a comma, and may be `one of two of a host`.
_HEADER = re.compile(
    r"(?:card: |One )?(?:NVIDIA )?([A-Z]+\d+\w*)[^,(;]*(?:\([^)]*\))?, (.*?); code of (?:commit )?([0-9a-f]{7})"
)
_EXPERT_STEP = re.compile(
    r"(\S+) +rows +(\d+) context (\d+) equal +([\d.]+) ms, floor ([\d.]+), ([\d.]+ ?%), ([\d.]+) experts hit"
)


@dataclass
class Block:
    """One table of a text file: the lines above it that tell card and versions, its model, its rows of words."""

    card: str
    commit: str
    about: str
    model: str
    rows: list[list[str]] = field(default_factory=list)


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file, as written. Raises `ValueError` where a row has not the header's columns."""
    with (RESULTS / name).open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"{name}, line {number}: another number of columns than the header has")
    return rows


def newest(rows: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], Hashable]) -> list[dict[str, Any]]:
    """The last row of each key, in the order in which keys first appear."""
    found: dict[Hashable, dict[str, Any]] = {}
    for row in rows:
        found[key(row)] = row
    return list(found.values())


def json_rows(name: str) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines() if line.strip()]


def card_of(gpu: str) -> str:
    """`NVIDIA H100 80GB HBM3` and the like, as tables name it: `H100`."""
    return gpu.removeprefix("NVIDIA ").split()[0]


def comparison_blocks() -> list[Block]:
    """The tables of `compare_vllm.txt`; a row: measurement, vLLM, ours, limit (`-`: not measured)."""
    blocks: list[Block] = []
    card = commit = about = ""
    for line in (RESULTS / "compare_vllm.txt").read_text().splitlines():
        if found := _CARD.match(line):
            card = card_of(found[1])
        if line.startswith("commit "):
            commit, about = _COMMIT.match(line)[1], line.split(", ", 1)[1]  # type: ignore[index]
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) == 5 and cells[1].startswith("vLLM") and cells[2] == "ours":
            blocks.append(Block(card, commit, f"{cells[1]}, {about}", cells[0]))
        elif len(cells) == 5 and blocks and blocks[-1].commit == commit:
            blocks[-1].rows.append([cells[0], *(re.sub(r" \(.*\)", "", cell) for cell in cells[1:4])])
    return blocks


def interference_blocks() -> list[Block]:
    """The tables of `interference.txt`; a row: traffic, engine and setting, six times in ms."""
    blocks: list[Block] = []
    for line in (RESULTS / "interference.txt").read_text().splitlines():
        if found := _CARD.match(line):
            model = re.search(r"; (\S+), bfloat16", line)
            assert model is not None, line
            about = line.split(", ", 1)[1].split(";")[0]
            blocks.append(Block(card_of(found[1]), _COMMIT.search(line)[1], about, model[1]))  # type: ignore[index]
        elif line.startswith("W"):
            blocks[-1].rows.append(re.split(r"\s{2,}", line.strip()))
    return blocks


def header_of(line: str) -> tuple[str, str, str] | None:
    """(card, versions and machine, commit) where a line begins what was measured by one code."""
    found = _HEADER.match(line)
    return None if found is None else (found[1], found[2], found[3])


def expert_blocks() -> list[Block]:
    """The steps in `experts.txt`, a block a model and context; a row: rows, ms, limit, share, distinct experts."""
    blocks: list[Block] = []
    card = commit = about = ""
    for line in (RESULTS / "experts.txt").read_text().splitlines():
        if header := header_of(line):
            card, about, commit = header
        elif found := _EXPERT_STEP.match(line):
            name, rows, context, *figures = found.groups()
            model = f"{name}, context {int(context):,}: rows"
            if not blocks or (blocks[-1].model, blocks[-1].commit) != (model, commit):
                blocks.append(Block(card, commit, about, model))
            blocks[-1].rows.append([rows, *figures])
    return blocks


def kernel_time_blocks() -> list[Block]:
    """The tables of `kernel_times.txt`; a row: kind of kernel, number a step, us a step, us each, share."""
    blocks: list[Block] = []
    card = commit = about = ""
    for line in (RESULTS / "kernel_times.txt").read_text().splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if found := _CARD.match(line):
            card, commit = card_of(found[1]), _COMMIT.search(line)[1]  # type: ignore[index]
            about = line.split(", ", 1)[1].split(";")[0]
        elif "kernels of steps" in line:
            blocks.append(Block(card, commit, about, cells[1]))
        elif len(cells) == 5 and cells[4].endswith("%"):
            blocks[-1].rows.append(cells)
    return blocks
