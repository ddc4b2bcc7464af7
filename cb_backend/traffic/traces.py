"""Readers of request traces: when requests came, how long they were, which prefixes they shared.

Three formats: the Azure LLM inference CSV, Mooncake's JSON lines, and any CSV with one column of input lengths and one
of output lengths (as made from ShareGPT conversations). Nothing here knows rates, prompts or an engine.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TypeVar

from cb_backend.contracts.errors import CbError

MOONCAKE_BLOCK_TOKENS = 512  # tokens that one of Mooncake's hash_ids stands for

_INPUT_COLUMNS = ("input_length", "input_len", "input_tokens", "prompt_len", "prompt_tokens", "num_prompt_tokens")
_OUTPUT_COLUMNS = ("output_length", "output_len", "output_tokens", "completion_tokens", "num_output_tokens")
_TIME_COLUMNS = ("arrival_s", "timestamp_s")
_AZURE_TIME = "a time like 2023-11-16 18:17:03.9799600"
T = TypeVar("T")


class TraceError(CbError):
    """A trace file cannot be read as one of the known formats."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    arrival_s: float | None  # seconds after the first row; None where the file has no times
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()  # Mooncake: one id for each block of 512 prompt tokens; equal ids, equal text


def read_trace(
    path: Path, *, offset: int = 0, limit: int | None = None, input_column: str = "", output_column: str = ""
) -> list[TraceRow]:
    """Rows `offset` to `offset + limit`, times counted from the first of them. Raises `TraceError`.

    The format is told by the name (`.jsonl` is Mooncake's) and the header. Rows without any output are dropped: a
    request has at least one token to answer with.
    """
    rows = _mooncake(path) if path.suffix in (".jsonl", ".json") else _csv(path, input_column, output_column)
    kept = (row for row in rows if row.num_prompt_tokens > 0 and row.num_output_tokens > 0)
    try:
        selected = list(islice(kept, offset, None if limit is None else offset + limit))
    except OSError as error:
        raise TraceError(f"the trace {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"the trace {path} is not text; a CSV or JSON lines are expected") from None
    if not selected:
        raise TraceError(f"{path.name} has no usable row after row {offset}; lower the offset or check the file")
    start = selected[0].arrival_s
    if start is None:
        return selected
    return [
        TraceRow((row.arrival_s or 0.0) - start, row.num_prompt_tokens, row.num_output_tokens, row.prefix_ids)
        for row in selected
    ]


def _mooncake(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield TraceRow(
                    arrival_s=row["timestamp"] / 1000.0,
                    num_prompt_tokens=int(row["input_length"]),
                    num_output_tokens=int(row["output_length"]),
                    prefix_ids=tuple(row.get("hash_ids", ())),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise TraceError(
                    f"{path.name}, line {number}: not a Mooncake row ({error!r}); "
                    "expected timestamp, input_length, output_length, hash_ids"
                ) from None


def _csv(path: Path, input_column: str, output_column: str) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        header = reader.fieldnames or []
        is_azure = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(header) and not (input_column)
        if is_azure:
            input_name, output_name, time_name = "ContextTokens", "GeneratedTokens", "TIMESTAMP"
        else:
            input_name = _column(path, header, (input_column,) if input_column else _INPUT_COLUMNS, "--input-column")
            output_name = _column(
                path, header, (output_column,) if output_column else _OUTPUT_COLUMNS, "--output-column"
            )
            time_name = next((name for name in _TIME_COLUMNS if name in header), "")
        read_time, expected = (_azure_time, _AZURE_TIME) if is_azure else (float, "a number of seconds")
        for number, row in enumerate(reader, start=2):
            where = f"{path.name}, line {number}"
            arrival_s = _value(row, time_name, read_time, expected, where) if time_name else None
            num_prompt_tokens = _value(row, input_name, int, "a whole number", where)
            yield TraceRow(arrival_s, num_prompt_tokens, _value(row, output_name, int, "a whole number", where))


def _value(row: Mapping[str, str | None], name: str, read: Callable[[str], T], expected: str, where: str) -> T:
    """One cell. Raises `TraceError` that names it, and what it should be; a short row has None for what it lacks."""
    text = row[name]
    if text is None:
        raise TraceError(f"{where}: the row ends before column {name}")
    try:
        return read(text)
    except ValueError:
        raise TraceError(f"{where}: {name} is {text[:80]!r}, not {expected}") from None


def _column(path: Path, header: Sequence[str], names: tuple[str, ...], option: str) -> str:
    if not header:
        raise TraceError(f"the trace {path} is empty")
    found = next((name for name in names if name in header), None)
    if found is None:
        raise TraceError(f"{path.name} has no column {' or '.join(names)}, only {', '.join(header)}; use {option} NAME")
    return found


def _azure_time(text: str) -> float:
    # Seven digits of a second; datetime reads six.
    return datetime.fromisoformat(text[:26]).timestamp()
