"""One step's plan while it is being made. Knows rows and the token budget; not why a row is in the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cb_backend.engine.in_flight import LaunchedStep
from cb_backend.engine.slot_table import SlotTable
from cb_backend.outputs import JoinedRow, NewBlocks, SchedulerOutput
from cb_backend.request import Request


def _frozen(array: NDArray) -> NDArray:
    array.flags.writeable = False
    return array


@dataclass(slots=True)
class _DecodeRows:
    """What stays the same in a decode plan for as long as the same requests decode."""

    version: int
    slots: NDArray[np.intp]
    slots32: NDArray[np.int32]
    epochs: NDArray[np.int32]
    ones: NDArray[np.int32]
    all_true: NDArray[np.bool_]


@dataclass(slots=True)
class StepPlan:
    """Rows collected for one step: decode rows at once as arrays, prefill rows one by one."""

    budget: int  # tokens that may still be scheduled
    decode_slots: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    prefill: list[tuple[int, int, int, bool]] = field(default_factory=list)  # slot, computed, scheduled, is_sampling
    joined: list[JoinedRow] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.decode_slots) + len(self.prefill)

    def set_decode(self, slots: NDArray[np.intp]) -> None:
        self.decode_slots = slots
        self.budget -= len(slots)

    def add_prefill(self, slot: int, num_computed: int, num_scheduled: int, is_sampling: bool) -> None:
        self.prefill.append((slot, num_computed, num_scheduled, is_sampling))
        self.budget = max(0, self.budget - num_scheduled)

    def add_joined(self, request: Request) -> None:
        self.joined.append(
            JoinedRow(
                slot=request.slot,
                request_id=request.request_id,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=tuple(request.block_table),
                params=request.params,
                stop_token_ids=request.stop_token_ids,
            )
        )


class PlanBuilder:
    """Turns a `StepPlan` into the frozen plan and its record, and moves the slots' progress on."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._decode = self._decode_rows(table.order)

    def build(self, step_id: int, plan: StepPlan) -> tuple[SchedulerOutput, LaunchedStep]:
        table = self._table
        rows = self._decode
        if rows.version != table.version or len(rows.slots) != len(plan.decode_slots) or plan.prefill:
            rows = self._decode_rows(plan.decode_slots)
            is_whole_batch = not plan.prefill and plan.decode_slots is table.order
            rows.version = table.version if is_whole_batch else -1
            self._decode = rows
        slots, slots32, epochs = rows.slots, rows.slots32, rows.epochs
        computed, scheduled, is_sampling = table.num_computed_tokens[slots], rows.ones, rows.all_true
        if plan.prefill:
            columns = [np.array(column) for column in zip(*plan.prefill, strict=True)]
            slots = np.concatenate([slots, columns[0].astype(np.intp)])
            slots32, epochs = _frozen(slots.astype(np.int32)), table.epoch[slots]
            computed = np.concatenate([computed, columns[1].astype(np.int32)])
            scheduled = _frozen(np.concatenate([scheduled, columns[2].astype(np.int32)]))
            is_sampling = _frozen(np.concatenate([is_sampling, columns[3].astype(np.bool_)]))
        after = computed + scheduled
        table.num_computed_tokens[slots] = after
        num_decode = len(plan.decode_slots)
        output = SchedulerOutput(
            step_id=step_id,
            slots=slots32,
            num_computed_tokens=_frozen(computed),
            num_scheduled_tokens=scheduled,
            is_sampling=is_sampling,
            num_decode_rows=num_decode,
            joined=tuple(plan.joined),
            new_blocks=tuple(plan.new_blocks),
        )
        return output, LaunchedStep(step_id, table.version, slots, epochs, after, is_sampling, num_decode)

    def _decode_rows(self, slots: NDArray[np.intp]) -> _DecodeRows:
        n = len(slots)
        return _DecodeRows(
            version=-1,
            slots=slots,
            slots32=_frozen(slots.astype(np.int32)),
            epochs=self._table.epoch[slots],
            ones=_frozen(np.ones(n, np.int32)),
            all_true=_frozen(np.ones(n, np.bool_)),
        )
