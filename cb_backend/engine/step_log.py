"""The engine's diary: the last steps as they ran, how long they took, and totals since the start.

Filled by `LLMEngine` at a few microseconds a step: a record keeps references to the plan's frozen arrays, which steady
decode steps share, and copies nothing a row. The clock of the engine is here. What the steps were for, and who asks
to see them, is not known here.

NOTE: times are of CLOCK_MONOTONIC, which all processes of a machine share, so a front end can subtract its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import NO_ADAPTER
from cb_backend.contracts.messages import Buckets, StepStats
from cb_backend.contracts.request import FinishReason, Request
from cb_backend.contracts.step import EngineOutput, StepPlan
from cb_backend.contracts.step_dump import StepDump
from cb_backend.support.buckets import BucketCounts, one_two_five

CAPACITY = 4096  # steps that are kept
COUNT_EVERY = 512  # steps

_STEP_SECONDS = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
)
_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


class StepRecord(msgspec.Struct, eq=False):
    """One step. Row arrays are the plan's own; `ended` alone grows after the step."""

    step_id: int
    begin: float  # when it was launched
    end: float  # when its result had been taken in; 0.0: not yet
    slots: NDArray[np.int32]  # [num_rows], decode rows first
    num_scheduled_tokens: NDArray[np.int32]  # [num_rows]
    num_decode_rows: int
    request_ids: NDArray[np.int64]  # [num_slots] who has each slot, from this step on
    joined: tuple[tuple[int, int, int, int], ...]  # slot, request_id, tokens it has, of them computed (cached) before
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int  # since the engine's start
    ended: tuple[tuple[int, int], ...] = ()  # request_id, FinishReason
    adapters: tuple[tuple[int, str], ...] = ()  # request_id, adapter's name: of those joined that go through one
    adapter_loads: tuple[int, ...] = ()  # for each adapter that was loaded, the request_id it was loaded for


class StepLog:
    """Told of each step by the one thread that runs the engine."""

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        request_of: Callable[[int], Request] | None = None,
        clock: Callable[[], float] = time.monotonic,
        capacity: int = CAPACITY,
    ) -> None:
        """`request_of` knows running requests by their ids; without it no adapter has a name."""
        self.records: deque[StepRecord] = deque(maxlen=capacity)
        self.sleeps: deque[tuple[float, float]] = deque(maxlen=capacity)
        self.first_tokens: dict[int, float] = {}  # request_id -> its first launch; first tokens of the last step
        self._sizes = (num_slots, num_blocks, block_size)
        self._clock = clock
        self._request_of = request_of
        self._request_ids = np.full(num_slots, -1, np.int64)
        self._open: dict[int, StepRecord] = {}  # by step_id
        self._scheduled_at: dict[int, float] = {}  # request_id -> its first launch, until its first token
        self._last_end = 0.0
        self._mark = 0.0
        self._is_going_on = False
        # Totals since the start.
        self.host_seconds = 0.0  # scheduling, taking results in, sending them
        self.launch_seconds = 0.0  # in execute: launching on a GPU, computing on a CPU
        self.wait_seconds = 0.0  # waiting for a result
        self.num_steps = 0
        self.num_scheduled_tokens = 0
        self.step_seconds = BucketCounts(_STEP_SECONDS)
        self.step_requests = BucketCounts(_BATCH_SIZES)
        self.step_tokens = BucketCounts(one_two_five(20_000))
        self._sizes_to_count: list[tuple[int, int]] = []  # requests and tokens of steps not yet in the buckets
        self._seconds_to_count: list[float] = []

    # ---- told by the engine, in this order ---------------------------------------------------------------------

    def begin(self) -> None:
        """The engine looks for work. What it did since the last step, if it was busy all the time, counts as host."""
        now = self._clock()
        if self._is_going_on:
            self.host_seconds += now - self._mark
        self._mark = now

    def launching(self, plan: StepPlan, num_waiting: int, num_free_blocks: int, num_preemptions: int) -> None:
        now = self._clock()
        self.host_seconds += now - self._mark
        self._mark = now
        record = StepRecord(
            plan.step_id,
            now,
            0.0,
            plan.slots,
            plan.num_tokens,
            plan.num_decode_rows,
            self._request_ids,
            (),
            num_waiting,
            num_free_blocks,
            num_preemptions,
        )
        num_rows = num_tokens = len(plan.slots)
        if plan.joined:
            self._note_joined(record, plan)
        if plan.num_decode_rows < num_rows:
            num_tokens = plan.total_tokens
        self._open[plan.step_id] = record
        self.records.append(record)
        self.num_steps += 1
        self.num_scheduled_tokens += num_tokens
        self._sizes_to_count.append((num_rows, num_tokens))

    def launched(self) -> None:
        now = self._clock()
        self.launch_seconds += now - self._mark
        self._mark = now

    def waiting(self) -> None:
        now = self._clock()
        self.host_seconds += now - self._mark
        self._mark = now

    def arrived(self) -> None:
        now = self._clock()
        self.wait_seconds += now - self._mark
        self._mark = now

    def completed(self, step_id: int, output: EngineOutput, is_going_on: bool) -> None:
        """The step's time counts from its launch, or from the end of the step before if it was launched ahead."""
        now = self._clock()
        self.host_seconds += now - self._mark
        self._mark = now
        self._is_going_on = is_going_on
        record = self._open.pop(step_id)
        record.end = now
        self._seconds_to_count.append(now - max(record.begin, self._last_end))
        self._last_end = now
        if len(self._seconds_to_count) >= COUNT_EVERY:
            self._count()
        scheduled_at = self._scheduled_at
        if output.num_cached_tokens or self.first_tokens:
            self.first_tokens = {rid: scheduled_at.pop(rid, record.begin) for rid in output.num_cached_tokens}
        if np.count_nonzero(output.finish_reasons):  # a fifth of what `any` costs
            is_end = output.finish_reasons != 0
            request_ids = output.request_ids[is_end].tolist()
            record.ended += tuple(zip(request_ids, output.finish_reasons[is_end].tolist(), strict=True))
            for request_id in request_ids:
                scheduled_at.pop(request_id, None)

    def slept(self, begin: float, end: float) -> None:
        """The model was asleep, by the log's clock."""
        self.sleeps.append((begin, end))

    def idle(self) -> None:
        """There was nothing to run."""
        self._is_going_on = False

    def cancelled(self, request_id: int) -> None:
        """The request was ended from outside, running or not."""
        self._scheduled_at.pop(request_id, None)
        if self.records:
            self.records[-1].ended += ((request_id, int(FinishReason.ABORT)),)

    def _note_joined(self, record: StepRecord, plan: StepPlan) -> None:
        self._request_ids = self._request_ids.copy()  # earlier records keep the old one
        computed = dict(zip(plan.slots.tolist(), plan.first.tolist(), strict=True))
        joined = []
        for row in plan.joined:
            self._request_ids[row.slot] = row.request_id
            self._scheduled_at.setdefault(row.request_id, record.begin)
            joined.append((row.slot, row.request_id, len(row.token_ids), computed[row.slot]))
        record.request_ids, record.joined = self._request_ids, tuple(joined)
        through = [(row.adapter, row.request_id) for row in plan.joined if row.adapter != NO_ADAPTER]
        if through:  # an adapter is only ever loaded for one who joins: for the first, if several want it
            record.adapters = tuple((request_id, self._adapter_name(request_id)) for _, request_id in through)
            first = dict(reversed(through))
            record.adapter_loads = tuple(first[slot] for slot, _ in plan.adapter_loads)

    def _adapter_name(self, request_id: int) -> str:
        source = None if self._request_of is None else self._request_of(request_id).adapter_source
        return "" if source is None else source.name

    def _count(self) -> None:
        """Sort what was collected into buckets: many at once cost a tenth of one by one."""
        sizes, seconds = self._sizes_to_count, self._seconds_to_count
        self._sizes_to_count, self._seconds_to_count = [], []
        self.step_seconds.add_all(seconds)
        self.step_requests.add_all([num_requests for num_requests, _ in sizes])
        self.step_tokens.add_all([num_tokens for _, num_tokens in sizes])

    # ---- asked by others ------------------------------------------------------------------------------------------

    def stats(self) -> StepStats:
        self._count()
        return StepStats(
            num_steps=self.num_steps,
            num_scheduled_tokens=self.num_scheduled_tokens,
            host_seconds=self.host_seconds,
            launch_seconds=self.launch_seconds,
            wait_seconds=self.wait_seconds,
            step_seconds=_as_message(self.step_seconds),
            step_requests=_as_message(self.step_requests),
            step_tokens=_as_message(self.step_tokens),
        )

    def dump(self, max_steps: int) -> StepDump:
        """The newest `max_steps` records, oldest first. Holds the engine up for some 10 microseconds a step."""
        records = list(self.records)[-max_steps:] if max_steps > 0 else []
        num_slots, num_blocks, block_size = self._sizes

        owners: dict[tuple[int, int], NDArray[np.int64]] = {}  # steady steps share their arrays, so also these
        for record in records:
            key = (id(record.request_ids), id(record.slots))
            if key not in owners:
                owners[key] = record.request_ids[record.slots]

        def column(dtype: str, name: str) -> bytes:
            return np.array([getattr(record, name) for record in records], dtype).tobytes()

        def rows(dtype: str, parts: list[NDArray]) -> bytes:
            return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype).tobytes()

        return StepDump(
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_size=block_size,
            step_ids=column("<i8", "step_id"),
            begins=column("<f8", "begin"),
            ends=column("<f8", "end"),
            num_rows=np.array([len(record.slots) for record in records], "<i4").tobytes(),
            num_decode_rows=column("<i4", "num_decode_rows"),
            num_waiting=column("<i4", "num_waiting"),
            num_free_blocks=column("<i4", "num_free_blocks"),
            num_preemptions=column("<i8", "num_preemptions"),
            slots=rows("<i4", [record.slots for record in records]),
            num_scheduled_tokens=rows("<i4", [record.num_scheduled_tokens for record in records]),
            request_ids=rows("<i8", [owners[id(record.request_ids), id(record.slots)] for record in records]),
            joined=[(i, *joined) for i, record in enumerate(records) for joined in record.joined],
            ended=[(i, *ended) for i, record in enumerate(records) for ended in record.ended],
            sleeps=[slept for slept in self.sleeps if records and slept[1] >= records[0].begin],
            adapters=self._adapters_of(owners.values()),
            adapter_loads=[(i, rid) for i, record in enumerate(records) for rid in record.adapter_loads],
        )

    def _adapters_of(self, request_ids: Iterable[NDArray[np.int64]]) -> list[tuple[int, str]]:
        """Of those that go through one, also where their join is older than what is asked for."""
        names = {request_id: name for record in self.records for request_id, name in record.adapters}
        shown = set[int]().union(*(ids.tolist() for ids in request_ids)) if names else ()
        return [(request_id, names[request_id]) for request_id in shown if request_id in names]


def _as_message(buckets: BucketCounts) -> Buckets:
    return Buckets(buckets.bounds, tuple(buckets.counts), tuple(buckets.sums))
