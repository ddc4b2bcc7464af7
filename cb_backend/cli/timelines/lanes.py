"""What a picture of the batch shows: who held which slot from when to when, and what was computed there.

Out of a step log, without any drawing. A *stay* is a request in a slot, from its join to its end or preemption.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from types import MappingProxyType

from cb_backend.cli.timelines.steps import Step
from cb_backend.contracts.request import FinishReason

MIN_LANES = 8  # or as many as there are slots


class Leave(Enum):
    """Why a stay ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    PREEMPTED = "preempted"
    STILL_THERE = "goes on"


_LEAVE_OF_REASON = {
    FinishReason.STOP: Leave.STOP,
    FinishReason.LENGTH: Leave.LENGTH,
    FinishReason.ABORT: Leave.CANCELLED,
    FinishReason.ERROR: Leave.ERROR,
}


@dataclass
class Chunk:
    """Part of a prompt computed in one step."""

    step: int  # index into the log's steps
    num_tokens: int


@dataclass
class Run:
    """Consecutive steps in which the request got one token each."""

    first: int  # indices into the log's steps
    last: int


@dataclass
class Stay:
    slot: int
    request_id: int
    first: int  # index of its first step here
    last: int  # index of the last one
    has_joined: bool  # False: it was there before the log begins
    num_tokens_at_join: int = 0
    num_cached_tokens: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    leave: Leave = Leave.STILL_THERE
    adapter: str = ""  # name of the one it goes through; "": the model as it is
    has_loaded: bool = False  # that adapter was loaded for it when it joined

    @property
    def num_decode_steps(self) -> int:
        return sum(run.last - run.first + 1 for run in self.runs)


def find_stays(steps: list[Step], adapters: Mapping[int, str] = MappingProxyType({})) -> list[Stay]:
    """All stays, in the order of their first step. Rows of a request past its end (run-ahead) are left out.

    `adapters`: names by request_id, as in the log's header.
    """
    ends = {ended.request_id: (i, ended.reason) for i, step in enumerate(steps) for ended in step.ended}
    stays: list[Stay] = []
    here: dict[int, Stay] = {}  # by slot
    for i, step in enumerate(steps):
        joined = {entry.slot: entry for entry in step.joined}
        for row in step.rows:
            end, _ = ends.get(row.request_id, (len(steps), 0))
            if i > end:
                continue
            stay = here.get(row.slot)
            if stay is None or stay.request_id != row.request_id or row.slot in joined:
                stay = Stay(row.slot, row.request_id, i, i, row.slot in joined)
                if row.slot in joined:
                    stay.num_tokens_at_join = joined[row.slot].num_tokens
                    stay.num_cached_tokens = joined[row.slot].num_cached_tokens
                stay.adapter = adapters.get(row.request_id, "")
                stay.has_loaded = row.request_id in step.adapter_loads
                here[row.slot] = stay
                stays.append(stay)
            stay.last = i
            if row.is_prefill:
                stay.chunks.append(Chunk(i, row.num_tokens))
            elif stay.runs and stay.runs[-1].last == i - 1:
                stay.runs[-1].last = i
            else:
                stay.runs.append(Run(i, i))
    _find_leaves(stays, ends)
    return stays


def _find_leaves(stays: list[Stay], ends: dict[int, tuple[int, int]]) -> None:
    later: dict[int, Stay] = {}  # request_id -> its next stay
    taken: dict[int, Stay] = {}  # slot -> the next stay in it
    for stay in reversed(stays):
        if stay.request_id in later or (stay.slot in taken and stay.request_id not in ends):
            stay.leave = Leave.PREEMPTED
        elif stay.request_id in ends:
            stay.leave = _LEAVE_OF_REASON[FinishReason(ends[stay.request_id][1])]
        later[stay.request_id] = taken[stay.slot] = stay


def lanes_of(stays: list[Stay], num_slots: int) -> list[int]:
    """The slots that get a lane, in order: those that were held, and the lowest others up to `MIN_LANES`.

    After a crowd has left, few requests hold slots far apart: lanes for all between them would be empty throughout.
    """
    held = {stay.slot for stay in stays}
    others = (slot for slot in range(num_slots) if slot not in held)
    return sorted([*held, *islice(others, max(MIN_LANES - len(held), 0))])


@dataclass(frozen=True)
class Summary:
    """One line about a whole log."""

    num_steps: int
    seconds: float
    num_requests: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_preemptions: int
    num_adapter_loads: int
    utilisation: float  # rows computed / (steps x slots)


def summarise(steps: list[Step], stays: list[Stay], num_slots: int) -> Summary:
    rows = [row for step in steps for row in step.rows]
    last = max((max(step.end, step.begin) for step in steps), default=0.0)
    return Summary(
        num_steps=len(steps),
        seconds=last - steps[0].begin if steps else 0.0,
        num_requests=len({stay.request_id for stay in stays}),
        num_decode_tokens=sum(1 for row in rows if not row.is_prefill),
        num_prefill_tokens=sum(row.num_tokens for row in rows if row.is_prefill),
        num_preemptions=sum(stay.leave is Leave.PREEMPTED for stay in stays),
        num_adapter_loads=sum(len(step.adapter_loads) for step in steps),
        utilisation=len(rows) / max(len(steps) * num_slots, 1),
    )
