"""One step's plan while it is being made, and the decode batch that stays the same from plan to plan.

Knows rows, progress and the token budget; not why a row is in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.request import Request
from cb_backend.contracts.step import NO_BLOCKS, NO_COPIES, TOKENS_WANTED, Copies, JoinedRow, StepPlan
from cb_backend.engine.scheduler.in_flight import LaunchedStep
from cb_backend.engine.scheduler.slot_table import Rows, SlotTable
from cb_backend.kv_cache.manager import KVCacheManager
from cb_backend.support.fault_points import reach


def _frozen(array: NDArray) -> NDArray:
    array.flags.writeable = False
    return array


class DecodeBatch:
    """The rows that decode in this step. While nobody joins, leaves or stops, one object serves step after step.

    Its own copies of progress and room are in row order, so that such a step gathers nothing from the slot table.
    """

    def __init__(self, table: SlotTable) -> None:
        order = table.order
        computed, sure = table.num_computed_tokens[order], table.num_sure_tokens(order)
        # At max_computed_tokens the request's last token has been sampled; its end comes with a launched result.
        num_left = table.max_computed_tokens[order] - sure
        is_decode = (sure >= table.num_prefill_tokens[order]) & (num_left > 0)
        is_whole = bool(is_decode.all())  # every running request is in it
        self.slots = order if is_whole else order[is_decode]
        self.computed = computed if is_whole else computed[is_decode]  # before this step
        self.room = table.num_block_tokens[self.slots]
        (self.out_of_room,) = (self.computed >= self.room).nonzero()  # rows that need a block in this step
        # Steps until a row reaches its limit; 0: the batch cannot go on as it is.
        self.num_steps_left = int(num_left.min()) if is_whole and len(order) else 0
        self._table = table
        self._version = table.version
        self._constants: tuple[Rows, NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8]] | None = None

    @property
    def can_continue(self) -> bool:
        """Whether the same rows can go on as they are."""
        return self.num_steps_left > 0 and self._version == self._table.version

    def drop(self, slots: list[int]) -> None:
        """Leave these rows out of this step."""
        keep = ~np.isin(self.slots, slots)
        self.slots, self.computed, self.room = self.slots[keep], self.computed[keep], self.room[keep]
        self.num_steps_left, self._constants = 0, None

    def grow(self, slots: NDArray[np.intp], kv: KVCacheManager) -> NDArray[np.int32]:
        """One more block for each of these slots, as `StepPlan.new_blocks`; so many are free: check before."""
        table = self._table
        room = table.num_block_tokens[slots]
        new_blocks = np.empty((len(slots), 3), np.int32)
        new_blocks[:, 0] = slots
        new_blocks[:, 1] = room // kv.block_size
        new_blocks[:, 2] = kv.append_blocks(table.requests_at(slots))
        table.num_block_tokens[slots] = room + kv.block_size
        self.room = table.num_block_tokens[self.slots]
        return _frozen(new_blocks)

    def constants(self) -> tuple[Rows, NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8]]:
        """(rows, slots as int32, one token each, tokens wanted of each): the same arrays in every step."""
        if self._constants is None:
            n = len(self.slots)
            ones, wants = _frozen(np.ones(n, np.int32)), _frozen(np.full(n, TOKENS_WANTED, np.uint8))
            self._constants = self._table.rows(self.slots), _frozen(self.slots.astype(np.int32)), ones, wants
        return self._constants

    def advance(self, computed_after: NDArray[np.int32]) -> None:
        """The step was planned: one more token is computed in every row."""
        self.computed = computed_after
        (self.out_of_room,) = (computed_after >= self.room).nonzero()
        self.num_steps_left -= 1


@dataclass(slots=True)
class PlanBuilder:
    """Rows collected for one step's `StepPlan`: decode rows at once, prefill rows one by one."""

    budget: int  # tokens that may still be scheduled
    decode: DecodeBatch | None = None
    prefill: list[tuple[int, int, int, int]] = field(default_factory=list)  # slot, computed, scheduled, wants
    joined: list[JoinedRow] = field(default_factory=list)
    new_blocks: NDArray[np.int32] = field(default_factory=lambda: NO_BLOCKS)  # [n, 3], see StepPlan
    swap_out: tuple[tuple[int, int], ...] = ()  # (device block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_decode_rows(self) -> int:
        return 0 if self.decode is None else len(self.decode.slots)

    @property
    def num_rows(self) -> int:
        return self.num_decode_rows + len(self.prefill)

    def set_decode(self, batch: DecodeBatch) -> None:
        self.decode = batch
        self.budget -= len(batch.slots)

    @property
    def copies(self) -> Copies:
        return Copies(self.swap_out, tuple(self.swap_in)) if self.swap_out or self.swap_in else NO_COPIES

    def add_prefill(self, slot: int, num_computed: int, num_scheduled: int, wants: int) -> None:
        self.prefill.append((slot, num_computed, num_scheduled, wants))
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
                max_total_tokens=request.max_total_tokens,
            )
        )


def launch(step_id: int, plan: PlanBuilder, table: SlotTable) -> tuple[StepPlan, LaunchedStep]:
    """Turn a `PlanBuilder` into the frozen plan and its record, and move the slots' progress on."""
    reach("plan.launch")
    if plan.decode is not None and not plan.prefill:
        return _launch_decode(step_id, plan, plan.decode, table)
    slots, computed, scheduled, wants = (np.array(column, np.int32) for column in zip(*plan.prefill, strict=True))
    wants = wants.astype(np.uint8)
    if plan.decode is not None:
        _, decode_slots, ones, decode_wants = plan.decode.constants()
        slots = np.concatenate([decode_slots, slots])
        computed = np.concatenate([plan.decode.computed, computed])
        scheduled = np.concatenate([ones, scheduled])
        wants = np.concatenate([decode_wants, wants])
        plan.decode.num_steps_left = 0
    after = computed + scheduled
    (filled,) = (after // table.block_size > computed // table.block_size).nonzero()
    rows = table.rows(slots.astype(np.intp))
    table.num_computed_tokens[rows.slots] = after
    output = StepPlan(
        step_id,
        _frozen(slots),
        _frozen(computed),
        _frozen(scheduled),
        _frozen(wants),
        plan.num_decode_rows,
        tuple(plan.joined),
        plan.new_blocks,
        plan.copies,
    )
    step = LaunchedStep(step_id, table.version, rows, after, plan.num_decode_rows, filled, may_end=True)
    return output, step


def _launch_decode(
    step_id: int, plan: PlanBuilder, batch: DecodeBatch, table: SlotTable
) -> tuple[StepPlan, LaunchedStep]:
    rows, slots, ones, wants = batch.constants()
    computed = batch.computed
    after = _frozen(computed + 1)
    may_end = batch.num_steps_left <= 1
    table.num_computed_tokens[rows.slots] = after
    batch.advance(after)
    num_rows = len(slots)
    output = StepPlan(step_id, slots, computed, ones, wants, num_rows, (), plan.new_blocks, plan.copies)
    return output, LaunchedStep(step_id, table.version, rows, after, num_rows, batch.out_of_room, may_end)
