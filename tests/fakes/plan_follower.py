"""What model runners without a model share: they obey plans exactly, so a wrong plan shows as a wrong token.

Slots, joins, checks of the plan, masks that are asked for, and delayed execution in order. They keep a request's tokens
from `JoinedRow` and their own sampling only, as the real runner does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.step import (
    HIDDEN_WANTED,
    NO_TOKEN,
    NOTHING_WANTED,
    ROW_OK,
    TOKENS_WANTED,
    JoinedRow,
    MaskSource,
    Pooled,
    RowStatus,
    StepPlan,
    StepResult,
)
from tests.fakes.hash_rule import OwnCells

NULL_BLOCK = 0


@dataclass
class Slot:
    row: JoinedRow
    tokens: list[int]
    block_table: list[int]
    has_ended: bool = False  # its last token is out: later launched steps find nothing to compute
    has_misread: bool = False
    digest: bytes = b""  # of what its last row has read
    num_summed: int = 0  # tokens whose states are in its mean
    is_broken: bool = False  # a step with it was lost: what later launched steps compute for it is garbage
    cells: list[OwnCells] = field(default_factory=list)  # by group, where there are several


@dataclass(eq=False)
class FakePending:
    """A launched step. With `is_delayed` its work is done only when its result, or a later step's, is asked for."""

    run: Callable[[], StepResult]
    written_blocks: set[int]
    read_blocks: set[int]
    undone: deque[FakePending]  # launched steps whose work has not been done, oldest first
    spoil: Callable[[], None] = lambda: None
    output: StepResult | None = None

    def result(self) -> StepResult:
        while self.output is None:
            oldest = self.undone.popleft()
            oldest.output = oldest.run()
        return self.output

    def lose(self) -> None:
        """The step never comes back, and nobody knows what it did."""
        if self in self.undone:
            self.undone.remove(self)
        self.spoil()


@dataclass
class PlanFollower:
    """What both fakes share: slots, joins, checks of the plan, and delayed execution in order."""

    block_size: int
    is_delayed: bool = False
    slots: dict[int, Slot] = field(default_factory=dict)
    windows: tuple[int, ...] = (0,)
    num_steps: int = 0
    num_computed: dict[int, int] = field(default_factory=dict)  # tokens computed, by request id
    # By step: requests that read cells of others. After a lost step they may, if nobody hears what comes of it.
    misread: dict[int, set[int]] = field(default_factory=dict)
    undone: deque[FakePending] = field(default_factory=deque)

    def execute(self, plan: StepPlan, masks: MaskSource) -> FakePending:
        self.num_steps += 1
        self._ask(plan, masks)
        assert plan.step_id == self.num_steps, "step ids have a gap"
        work = self._rows(plan)
        blocks, undone = self._written_blocks(work), self.undone
        read_blocks = self._read_blocks(work)
        loads = self._loads(plan)
        pending = FakePending(lambda: self._run(plan, work, loads), blocks, read_blocks, undone, lambda: _break(work))
        undone.append(pending)
        if not self.is_delayed:
            pending.result()
        return pending

    def lose(self, plan: StepPlan) -> None:
        """A plan that could not be launched: its requests are lost."""
        self.num_steps += 1
        _break(self._rows(plan))

    def _ask(self, plan: StepPlan, masks: MaskSource) -> None:
        """Ask for the masks of structured output, as the real runner does; the tokens do not depend on them."""
        joined = {row.slot: row for row in plan.joined}
        asking = [
            (slot, first + num_tokens)
            for slot, first, num_tokens, want in zip(
                *(array.tolist() for array in (plan.slots, plan.first, plan.num_tokens, plan.wants)), strict=True
            )
            if want == TOKENS_WANTED
            and (joined[slot] if slot in joined else self.slots[slot].row).params.structured_output is not None
        ]
        if asking:
            slots, positions = np.array(asking, np.int32).T
            masks.masks(slots, positions)

    def _rows(self, plan: StepPlan) -> list[tuple[Slot, int, int, bool]]:
        """(slot state, computed, scheduled, wants anything) of each row; the plan's changes are applied."""
        joined = set()
        for row in plan.joined:
            self.slots[row.slot] = Slot(row, row.token_ids.tolist(), list(row.block_ids))
            joined.add(row.slot)
        for grown, index, block_id in plan.new_blocks.tolist():
            assert grown not in joined, "a joining row brings its whole block table"
            table = self.slots[grown].block_table
            if index < len(table):  # promised until now
                assert len(self.windows) > 1 or self.windows[0], "a block that is there already is given again"
                assert table[index] == NULL_BLOCK, "a place in the block table is taken twice"
                table[index] = block_id
                continue
            assert len(table) == index, "new blocks must continue the block table"
            table.append(block_id)
        slots = plan.slots.tolist()
        assert len(set(slots)) == len(slots), "a slot has two rows"
        assert joined <= set(slots), "a request joined without a row"
        computed, scheduled = plan.first.tolist(), plan.num_tokens.tolist()
        is_asking, num_decode_rows = (plan.wants != NOTHING_WANTED).tolist(), plan.num_decode_rows
        assert scheduled[:num_decode_rows] == [1] * num_decode_rows, "a decode row computes one token"
        assert (plan.wants[:num_decode_rows] == TOKENS_WANTED).all(), "a decode row must sample"
        assert all(scheduled), "a row computes at least one token"
        return list(zip(map(self.slots.__getitem__, slots), computed, scheduled, is_asking, strict=True))

    def _written_blocks(self, work: list[tuple[Slot, int, int, bool]]) -> set[int]:
        written, size = set(), len(self.windows)
        for slot, computed, scheduled, _ in work:
            first, last = computed // self.block_size, (computed + scheduled - 1) // self.block_size
            blocks = slot.block_table[first * size : (last + 1) * size]
            assert len(blocks) == (last + 1 - first) * size, "the block table has no room for the scheduled tokens"
            assert 0 not in blocks, "the null block is in a block table"
            assert written.isdisjoint(blocks), "two rows write the same block"
            written.update(blocks)
        return written

    def _read_blocks(self, work: list[tuple[Slot, int, int, bool]]) -> set[int]:
        """Of every group, the blocks in the window of a row's first token, and of those after it."""
        read, size = set(), len(self.windows)
        for slot, computed, scheduled, _ in work:
            last = (computed + scheduled - 1) // self.block_size
            for group, window in enumerate(self.windows):
                first = max(0, computed - window + 1) // self.block_size if window else 0
                read.update(slot.block_table[first * size + group : (last + 1) * size : size])
        assert NULL_BLOCK not in read, "the null block is read"
        return read

    def _run(self, plan: StepPlan, work: list[tuple[Slot, int, int, bool]], loads: dict[int, AdapterKey]) -> StepResult:
        sampled: list[int] = []
        status: list[int] = []
        pooled: dict[int, bytes] = {}
        self._swap(plan, loads)
        for index, (slot, computed, scheduled, is_asking) in enumerate(work):
            end = computed + scheduled
            if slot.is_broken or slot.has_ended:
                sampled.append(0 if slot.is_broken else NO_TOKEN)
                status.append(ROW_OK if slot.is_broken else RowStatus.ENDED)
                continue
            assert end <= len(slot.tokens), "the plan runs past the known tokens"
            assert is_asking == (end == len(slot.tokens)), "what the row wants is wrong"
            is_pooling = slot.row.params.pooling is not None
            is_sampling = is_asking and not is_pooling
            if is_pooling:
                _check_pooling(slot, computed, end, is_hidden=not is_asking or plan.wants[index] == HIDDEN_WANTED)
            request_id = slot.row.request_id
            self.num_computed[request_id] = self.num_computed.get(request_id, 0) + scheduled
            token, failed = self._compute(slot, computed, end)
            if slot.has_misread:
                self.misread.setdefault(plan.step_id, set()).add(request_id)
            status.append(RowStatus.NOT_FINITE if failed else ROW_OK)
            sampled.append(token if is_sampling and not failed else NO_TOKEN)
            if is_sampling:
                slot.tokens.append(token)
                slot.has_ended = failed or self._is_last(slot, token)
            elif is_asking:
                slot.has_ended = True
                if not failed:
                    pooled[index] = slot.digest
        token_ids = np.array(sampled, np.int32)
        num_new = ((plan.wants == TOKENS_WANTED) & (token_ids != NO_TOKEN)).astype(np.uint8)
        attached = (_pooled(pooled),) if pooled else ()
        return StepResult(plan.step_id, token_ids[:, None], num_new, np.array(status, np.uint8), attached)

    def _is_last(self, slot: Slot, token: int) -> bool:
        row, num_tokens = slot.row, len(slot.tokens)
        is_stop = token in row.stop_token_ids and num_tokens >= row.num_prompt_tokens + row.params.min_tokens
        return is_stop or num_tokens >= row.max_total_tokens

    def _compute(self, slot: Slot, computed: int, end: int) -> tuple[int, bool]:
        raise NotImplementedError

    def _loads(self, plan: StepPlan) -> dict[int, AdapterKey]:
        """What is to be copied to slots of adapters. It is looked up when a step is launched: whoever asked for it may
        have gone, and the host have forgotten it, before the step is done.
        """
        return {}

    def _swap(self, plan: StepPlan, loads: dict[int, AdapterKey]) -> None:
        """Load adapters, and copy blocks out, then in."""

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        return b""

    def close(self) -> None:
        self.slots.clear()


def _check_pooling(slot: Slot, computed: int, end: int, *, is_hidden: bool) -> None:
    assert is_hidden, "a pooling request has no token"
    rules = slot.row.params.pooling
    if rules is not None and rules.pooling == "mean":
        assert computed == slot.num_summed, "a mean lacks the states of some tokens"
        slot.num_summed = end


def _pooled(digests: dict[int, bytes]) -> Pooled:
    """By row; each byte is a number."""
    values = [list(digest) for digest in digests.values()]
    return Pooled(np.array(list(digests), np.int64), np.array(values, np.float32))


def _break(work: list[tuple[Slot, int, int, bool]]) -> None:
    for slot, *_ in work:
        slot.is_broken = True
