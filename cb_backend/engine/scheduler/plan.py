"""One step's plan while it is being made, the decode batch that stays from plan to plan, and the launched steps.

Knows rows, progress and the token budget; not why a row is in a plan. With run-ahead a request may end or be preempted
while a launched step still writes its blocks, or reads what else it holds: such things are kept until the last step
that touches them has come back. One fence for everything; it does not know why they are given back, nor to whom.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import NO_ADAPTER, AdapterKey
from cb_backend.contracts.request import Request
from cb_backend.contracts.step import HIDDEN_WANTED, NO_BLOCKS, NO_COPIES, TOKENS_WANTED, Copies, JoinedRow, StepPlan
from cb_backend.engine.scheduler.slots import Rows, SlotTable
from cb_backend.kv_cache.grouped_manager import GroupedKVCacheManager
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
        """One more row of blocks for each of these slots, as `StepPlan.new_blocks`; so many are free: check before."""
        table, size = self._table, kv.num_groups
        room = table.num_block_tokens[slots]
        new_blocks = np.empty((len(slots) * size, 3), np.int32)
        if size == 1:
            new_blocks[:, 0] = slots
            new_blocks[:, 1] = room // kv.block_size
        else:
            new_blocks[:, 0] = np.repeat(slots, size)
            new_blocks[:, 1] = (room[:, None] // kv.block_size * size + np.arange(size)).ravel()
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
    num_decode_rows: int = 0
    prefill: list[tuple[int, int, int, int]] = field(default_factory=list)  # slot, computed, scheduled, wants
    joined: list[JoinedRow] = field(default_factory=list)
    new_blocks: NDArray[np.int32] = field(default_factory=lambda: NO_BLOCKS)  # [n, 3], see StepPlan
    swap_out: tuple[tuple[int, int], ...] = ()  # (device block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    adapter_loads: list[tuple[int, AdapterKey]] = field(default_factory=list)
    ends_prompts: bool = False  # of pooling requests

    @property
    def num_rows(self) -> int:
        return self.num_decode_rows + len(self.prefill)

    def set_decode(self, batch: DecodeBatch) -> None:
        self.decode = batch
        self.num_decode_rows = len(batch.slots)
        self.budget -= self.num_decode_rows

    @property
    def copies(self) -> Copies:
        return Copies(self.swap_out, tuple(self.swap_in)) if self.swap_out or self.swap_in else NO_COPIES

    def add_prefill(self, slot: int, num_computed: int, num_scheduled: int, wants: int) -> None:
        self.prefill.append((slot, num_computed, num_scheduled, wants))
        if wants == HIDDEN_WANTED:
            self.ends_prompts = True
        self.budget = max(0, self.budget - num_scheduled)

    def take_promised(self, kv: GroupedKVCacheManager, table: SlotTable) -> None:
        """Take the blocks that were promised for what this plan computes."""
        chunks = {slot: computed + scheduled for slot, computed, scheduled, _ in self.prefill}
        joined = {row.slot: place for place, row in enumerate(self.joined)}
        taken: list[tuple[int, int, int]] = []
        for request_id in kv.promised:
            request = table.by_id[request_id]
            slot = request.slot
            computed = int(table.num_computed_tokens[slot])
            if slot not in chunks and computed < table.num_prefill_tokens[slot]:
                continue  # its prompt has no part in this plan
            num_known = int(table.num_known_tokens[slot])
            # It has room for its whole length: that it fills blocks is not noted. Until its first token is known its
            # last chunk may be on its way, which reads what is before it.
            if slot not in chunks and num_known > table.num_prefill_tokens[slot]:
                kv.give_back(request, num_known - 1)
            rows = kv.take_rows(request, chunks.get(slot, computed + 1))
            if rows and slot in joined:
                self.joined[joined[slot]] = replace(self.joined[joined[slot]], block_ids=tuple(request.block_table))
            else:
                taken += [(slot, place, block_id) for place, block_id in rows]
        if taken:
            self.new_blocks = np.concatenate([self.new_blocks, np.array(taken, np.int32)])

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
                adapter=request.adapter_slot,
            )
        )


def launch(step_id: int, plan: PlanBuilder, table: SlotTable) -> tuple[StepPlan, LaunchedStep]:
    """Turn a `PlanBuilder` into the frozen plan and its record, and move the slots' progress on."""
    reach("plan.launch")
    batch, may_end = plan.decode, True
    if batch is not None and not plan.prefill:
        rows, slots, num_tokens, wants = batch.constants()
        first = batch.computed
        after = _frozen(first + 1)
        may_end = batch.num_steps_left <= 1
        batch.advance(after)
        filled = batch.out_of_room
    else:
        columns = [np.array(column, np.int32) for column in zip(*plan.prefill, strict=True)]
        if batch is not None:
            _, slots, ones, wants = batch.constants()
            decode_rows: list[NDArray] = [slots, batch.computed, ones, wants]
            columns = [np.concatenate(pair) for pair in zip(decode_rows, columns, strict=True)]
            batch.num_steps_left = 0
        slots, first, num_tokens = map(_frozen, columns[:3])
        wants = _frozen(columns[3].astype(np.uint8))
        after = first + num_tokens
        (filled,) = (after // table.block_size > first // table.block_size).nonzero()
        rows = table.rows(slots.astype(np.intp))
    table.num_computed_tokens[rows.slots] = after
    num_decode_rows = plan.num_decode_rows
    changes = tuple(plan.joined), plan.new_blocks, plan.copies, tuple(plan.adapter_loads)
    output = StepPlan(step_id, slots, first, num_tokens, wants, num_decode_rows, *changes)
    pooled = (wants == HIDDEN_WANTED).nonzero()[0] if plan.ends_prompts else None
    return output, LaunchedStep(step_id, table.version, rows, after, num_decode_rows, filled, may_end, pooled)


class LaunchedStep(msgspec.Struct, frozen=True, eq=False):
    """What the scheduler must remember of a plan until its result comes. Arrays are [num_rows]."""

    step_id: int
    table_version: int  # of the slot table when the plan was made
    rows: Rows  # epoch other than the slot's now = the row's request has left
    num_computed_after: NDArray[np.int32]
    num_decode_rows: int
    filled: NDArray[np.intp]  # rows (indices) that complete a block
    may_end: bool  # False: no row reaches its length limit with this step's token
    pooled: NDArray[np.intp] | None  # rows (indices) with which pooling requests end; None: there are none


class _Deferred(NamedTuple):
    """Something to give back once a launched step is back."""

    step_id: int
    give_back: Callable[[], None]
    block_ids: list[int]  # that become free by it
    adapter_slot: int  # of which a reference ends by it; NO_ADAPTER: none does


class InFlightSteps:
    """Launched steps in order, and what waits for them."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._steps: deque[LaunchedStep] = deque()
        self._deferred: list[_Deferred] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= self._max_steps

    @property
    def deferred_blocks(self) -> list[list[int]]:
        return [deferred.block_ids for deferred in self._deferred]

    @property
    def deferred_adapters(self) -> list[int]:
        """Slots of adapters, once for each reference that is yet to be given back."""
        return [deferred.adapter_slot for deferred in self._deferred if deferred.adapter_slot != NO_ADAPTER]

    def launch(self, step: LaunchedStep) -> None:
        self._steps.append(step)

    def take(self, step_id: int) -> LaunchedStep:
        """Remove and return a launched step. Raises `ValueError` if there is none with this id."""
        for step in self._steps:
            if step.step_id == step_id:
                self._steps.remove(step)
                return step
        launched = [step.step_id for step in self._steps]
        raise ValueError(f"step {step_id} is not in flight; launched steps are {launched}")

    def oldest_id(self) -> int | None:
        return self._steps[0].step_id if self._steps else None

    def free_when_safe(
        self,
        slot: int,
        epoch: int,
        give_back: Callable[[], None],
        block_ids: Sequence[int] = (),
        adapter_slot: int = NO_ADAPTER,
    ) -> None:
        """Give back what the request that had `slot` in `epoch` has held: now, or after the last launched step with it.

        `block_ids`: the blocks among it, which are counted as coming. `adapter_slot`: the adapter's.
        """
        for step in reversed(self._steps):
            (rows,) = (step.rows.slots == slot).nonzero()
            if len(rows) and step.rows.epochs[rows[0]] == epoch:
                self._deferred.append(_Deferred(step.step_id, give_back, list(block_ids), adapter_slot))
                return
        give_back()

    def release(self) -> None:
        """Give back what no launched step touches any more. Call after a step was taken."""
        if not self._deferred:
            return
        oldest = self._steps[0].step_id if self._steps else None
        waiting = []
        for deferred in self._deferred:
            if oldest is not None and oldest <= deferred.step_id:
                waiting.append(deferred)
            else:
                deferred.give_back()
        self._deferred = waiting

    def num_blocks_coming(self, ref_cnt: Callable[[int], int], ending: Iterable[list[int]]) -> int:
        """Blocks that become free without any further decision: deferred ones, and those of requests about to end."""
        leaving = Counter(block_id for block_ids in (*self.deferred_blocks, *ending) for block_id in block_ids)
        return sum(ref_cnt(block_id) == count for block_id, count in leaving.items())
