"""The parts of `docs/measured.md` that stand as printed lines in the text files of `kernels/results`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.docs.result_files import RESULTS, card_of
from tests.docs.tables import table

_CARD = re.compile(r"One (NVIDIA \w+).*?, (driver [^,]+, )?(torch [^,]+, triton [^,;]+)")
_COMMIT = re.compile(r"(?:code of|commit) ([0-9a-f]{7})")
_SHAPE = re.compile(r"([\w.+-]+) +rows +(\d+) context (\d+) equal +([\d.]+) ms, floor ([\d.]+), ([\d.]+)%$")
_FORMAT = re.compile(r"([a-z][\w ]*?) +(\d+)(?: +(\d+))? +([\d.]+) +([\d.]+) +([\d.]+)%")
_MODEL = re.compile(r"--model (\S+)|\((llama-3\.1-8b), ")


CONTEXT = "640"  # tokens of every row: of steps with others the files tell, the tables do not


class Line(NamedTuple):
    """A step that was timed."""

    name: str  # a model, or a format
    rows: int
    milliseconds: str
    share: str  # of the limit, in percent
    source: str


def families() -> str:
    """Steps of the newer families beside those of Llama's shapes of about their sizes."""
    lines = [line for line in _lines("families.txt") if line.name != "w4a16"]
    return _by_rows(f"context {CONTEXT}, bfloat16; rows", lines)


def packed() -> str:
    """Steps of weights of few bits."""
    eight = [line for name in ("packed_formats.txt", "gguf.txt") for line in _lines(name)]
    seventy = [line._replace(name="llama-3.1-70b") for line in _lines("families.txt") if line.name == "w4a16"]
    parts = [_by_rows(f"Llama-3.1-8B, context {CONTEXT}; rows", eight)]
    parts += [_by_rows(f"w4a16 on one card, context {CONTEXT}; rows", seventy)] if seventy else []
    return "\n\n".join(parts)


def loading() -> str:
    """A checkpoint of 16 GB from its files, and where a start's time goes: the lines as they were printed."""
    text = (RESULTS / "load.txt").read_text()
    rates = [*re.finditer(r"^ *(\w[\w ]*, (?:warm|cold)): +([\d.]+) s +([\d.]+) GB/s", text, re.MULTILINE)]
    start = [*re.finditer(r"^(import torch .*; in all [\d.]+ s)$", text, re.MULTILINE)][-1]  # the newest
    shown = table(["16.06 GB in 4 files", "s", "GB/s"], [list(rate.groups()) for rate in rates])
    second = f"- a second start, to its first token: {start[1]} ({_source(text, start.end())})"
    return f"{shown}\n\n- {_source(text, rates[-1].end())}\n{second}"


def _lines(name: str) -> Iterator[Line]:
    """Of a file, the newest of each step alone; one model's, where a command above tells it."""
    text = (RESULTS / name).read_text()
    found: dict[tuple[str, int], Line] = {}
    place = 0
    for line in text.splitlines():
        place += len(line) + 1
        if (shape := _SHAPE.match(line.strip())) and shape[3] == CONTEXT:
            key = shape[1], int(shape[2])
            found[key] = Line(*key, shape[4], shape[6], _source(text, place))
        elif (step := _FORMAT.fullmatch(re.sub(r"%.*", "%", line.strip()))) and step[3] in (None, CONTEXT):
            key = step[1], int(step[2])
            found[key] = Line(*key, step[4], step[6], _source(text, place))
    yield from found.values()


def _source(text: str, place: int) -> str:
    """What the lines above a place say of card, versions and code."""
    above = text[:place]
    card = list(_CARD.finditer(above.replace("\n", " ")))[-1]
    commits = _COMMIT.findall(above)
    told = f", commit {commits[-1]}" if commits else ""
    return f"{card_of(card[1])}, {card[2] or ''}{card[3]}{told}"


def _by_rows(head: str, lines: list[Line]) -> str:
    """A line a name, a column a number of rows: ms, and the share of the limit. The first of several is told."""
    found: dict[tuple[str, int], Line] = {}
    for line in lines:
        found.setdefault((line.name, line.rows), line)
    counts = sorted({line.rows for line in lines})
    cells = [
        [name, *(_cell(found.get((name, count))) for count in counts)]
        for name in dict.fromkeys(line.name for line in lines)
    ]
    sources = "\n".join(f"- {each}" for each in dict.fromkeys(line.source for line in lines))
    return table([head, *map(str, counts)], cells) + "\n\n" + sources


def _cell(line: Line | None) -> str:
    return "" if line is None else f"{line.milliseconds} ({float(line.share):.0f} %)"
