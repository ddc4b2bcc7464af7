"""Engine steps as plain data: out of a running engine's log, to and from a file of JSON lines.

The file's first line is the header, every other one a step. It does not know pictures or sockets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from cb_backend.cli.paths import CliError
from cb_backend.contracts.step_dump import StepDump

FORMAT = 1
T = TypeVar("T")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of the whole log."""

    format: int = FORMAT
    title: str = ""
    num_slots: int
    num_blocks: int
    block_size: int
    adapters: dict[int, str] = {}  # request_id -> name; who is not in it goes through the model as it is


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request in one step."""

    slot: int
    request_id: int
    num_tokens: int
    is_prefill: bool


class Joined(msgspec.Struct, frozen=True, array_like=True):
    """A request took a slot in this step."""

    slot: int
    request_id: int
    num_tokens: int  # prompt, and output from before a preemption
    num_cached_tokens: int  # of them found in the prefix cache


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A request ended with this step."""

    request_id: int
    reason: int  # FinishReason


class Step(msgspec.Struct, frozen=True, kw_only=True):
    step_id: int
    begin: float  # seconds, from an arbitrary zero
    end: float  # 0 = its result had not come when the log was taken
    rows: list[Row]
    joined: list[Joined] = []
    ended: list[Ended] = []
    num_waiting: int
    num_used_blocks: int
    num_preemptions: int  # since the engine's start
    asleep_seconds: float = 0.0  # that the model slept between the step before and this one
    adapter_loads: list[int] = []  # for each adapter that the step loaded, the request_id it was loaded for


@dataclass(frozen=True)
class StepLogFile:
    """A log, oldest step first."""

    header: Header
    steps: list[Step] = field(default_factory=list)

    def write(self, path: Path) -> None:
        encoder = msgspec.json.Encoder()
        path.write_bytes(b"\n".join(encoder.encode(part) for part in (self.header, *self.steps)) + b"\n")

    @staticmethod
    def read(path: Path) -> StepLogFile:
        """Raises `CliError` that names the line that is not a step."""
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise CliError(f"{path} cannot be read: {error.strerror}") from None
        header = _decode(lines[0] if lines else b"", Header, path, 1)
        if header.format != FORMAT:
            raise CliError(f"{path} has format {header.format}; this version reads {FORMAT}")
        return StepLogFile(header, [_decode(line, Step, path, number) for number, line in enumerate(lines[1:], 2)])


def _decode(line: bytes, kind: type[T], path: Path, number: int) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise CliError(f"{path}, line {number}, is not a step log: {error}") from None


def from_dump(dump: StepDump, title: str = "") -> StepLogFile:
    """Unpack what an engine sent."""
    num_rows = np.frombuffer(dump.num_rows, "<i4").tolist()
    num_decode_rows = np.frombuffer(dump.num_decode_rows, "<i4").tolist()
    slots = np.frombuffer(dump.slots, "<i4").tolist()
    request_ids = np.frombuffer(dump.request_ids, "<i8").tolist()
    num_tokens = np.frombuffer(dump.num_scheduled_tokens, "<i4").tolist()
    joined, ended, loads = _by_step(dump.joined, Joined), _by_step(dump.ended, Ended), _by_step(dump.adapter_loads, int)
    figures = zip(
        np.frombuffer(dump.step_ids, "<i8").tolist(),
        np.frombuffer(dump.begins, "<f8").tolist(),
        np.frombuffer(dump.ends, "<f8").tolist(),
        np.frombuffer(dump.num_waiting, "<i4").tolist(),
        np.frombuffer(dump.num_free_blocks, "<i4").tolist(),
        np.frombuffer(dump.num_preemptions, "<i8").tolist(),
        strict=True,
    )
    steps: list[Step] = []
    first = 0
    for index, (step_id, begin, end, num_waiting, num_free_blocks, num_preemptions) in enumerate(figures):
        last, decode_end = first + num_rows[index], first + num_decode_rows[index]
        rows = [Row(slots[i], request_ids[i], num_tokens[i], i >= decode_end) for i in range(first, last)]
        first = last
        steps.append(
            Step(
                step_id=step_id,
                begin=begin,
                end=end,
                rows=rows,
                joined=joined[index],
                ended=ended[index],
                num_waiting=num_waiting,
                num_used_blocks=dump.num_blocks - num_free_blocks,
                num_preemptions=num_preemptions,
                asleep_seconds=_asleep(dump.sleeps, steps[-1].begin, begin) if steps else 0.0,
                adapter_loads=loads[index],
            )
        )
    sizes = {"num_slots": dump.num_slots, "num_blocks": dump.num_blocks, "block_size": dump.block_size}
    header = Header(title=title, adapters=dict(dump.adapters), **sizes)
    return StepLogFile(header, steps)


def _by_step(entries: Iterable[tuple[Any, ...]], kind: Callable[..., T]) -> dict[int, list[T]]:
    """Entries that begin with the number of their step, made of what follows it; a step without any has none."""
    found: dict[int, list[T]] = defaultdict(list)
    for index, *values in entries:
        found[index].append(kind(*values))
    return found


def _asleep(sleeps: Sequence[tuple[float, float]], after: float, before: float) -> float:
    """Seconds of the sleeps that ended between two times."""
    return sum(end - begin for begin, end in sleeps if after < end <= before)
