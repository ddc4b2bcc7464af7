"""Model runners without a model, which obey plans exactly (`plan_follower`).

`HashRunner` (H) has the cells of `hash_rule`: a single wrong block changes its output; a pooling request is given the
hash itself. Of several groups of layers each has cells of its own, of which it reads those in its window.
`ScriptedRunner` (S): the test says which token comes at each position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import NO_ADAPTER, AdapterKey
from cb_backend.contracts.step import (
    NO_TOKEN,
    JoinedRow,
    StepPlan,
)
from tests.fakes.hash_rule import (
    CELL,
    EMPTY_CELL,
    GARBAGE_CELL,
    GROUP_FACTOR,
    HashModel,
    OwnCells,
    adapter_salt,
    salt_number,
)
from tests.fakes.plan_follower import PlanFollower, Slot


class HashRunner(PlanFollower):
    """H. `fails_at`: request id -> number of known tokens at which its row fails (its cells are then garbage)."""

    def __init__(
        self,
        model: HashModel,
        num_blocks: int,
        block_size: int,
        salts: Mapping[int, bytes] | None = None,
        fails_at: dict[int, int] | None = None,
        is_delayed: bool = False,
        num_host_blocks: int = 0,
    ) -> None:
        super().__init__(block_size, is_delayed, windows=model.windows)
        self.model = model
        self._empty_block = EMPTY_CELL * block_size
        # Bytes, block by block: rows write and read a few cells at a time, for which arrays are slow.
        self._blocks = [bytearray(self._empty_block) for _ in range(num_blocks)]
        self._host_blocks = [self._empty_block] * num_host_blocks
        self.salts = salts or {}  # of clients; adapters are told apart by what the slots hold
        self.adapters: Any = None  # what reads them, where there are slots for any
        self._adapter_slots: dict[int, AdapterKey] = {}
        self.fails_at = fails_at or {}

    def _loads(self, plan: StepPlan) -> dict[int, AdapterKey]:
        return {slot: self.adapters.packed_of(key).key for slot, key in plan.adapter_loads}

    def _swap(self, plan: StepPlan, loads: dict[int, AdapterKey]) -> None:
        self._adapter_slots |= loads
        for device, host in plan.copies.out:
            self._host_blocks[host] = bytes(self._blocks[device])
        for device, host in plan.copies.back:
            self._blocks[device][:] = self._host_blocks[host]
            self._host_blocks[host] = self._empty_block

    def _salt(self, row: JoinedRow) -> bytes:
        """The client's, and the adapter that is in the row's slot now."""
        own = self.salts.get(row.request_id, b"")
        return own if row.adapter == NO_ADAPTER else own + adapter_salt(self._adapter_slots.get(row.adapter, b"?"))

    def cells(self, block_ids: Sequence[int]) -> NDArray[np.int64]:
        """What is in these blocks: [num_blocks, block_size, 3] of (token, position, salt)."""
        content = b"".join([self._blocks[block_id] for block_id in block_ids])
        return np.frombuffer(content, np.int64).reshape(-1, self.block_size, 3)

    def _compute(self, slot: Slot, computed: int, end: int) -> tuple[int, bool]:
        if self.windows != (0,):
            return self._compute_groups(slot, computed, end)
        row, size = slot.row, self.block_size
        blocks = [self._blocks[block_id] for block_id in slot.block_table]
        failed = end >= self.fails_at.get(row.request_id, end + 1)
        salt = salt_number(self._salt(row))
        for position in range(computed, end):
            token = -7 if failed else slot.tokens[position]
            CELL.pack_into(blocks[position // size], position % size * CELL.size, token, position, salt)
        if end < len(slot.tokens):
            return NO_TOKEN, failed
        read = self.model.new_hash()
        read.update(b"".join(blocks)[: end * CELL.size])
        slot.digest = read.digest()
        num_out = len(slot.tokens) - row.num_prompt_tokens
        return self.model.next_token(read, num_out, row.params, row.stop_token_ids), failed

    def _compute_groups(self, slot: Slot, computed: int, end: int) -> tuple[int, bool]:
        row, size, num_groups = slot.row, self.block_size, len(self.windows)
        failed = end >= self.fails_at.get(row.request_id, end + 1)
        salt = salt_number(self._salt(row))
        if not slot.cells or slot.cells[0].number != salt:
            slot.cells = [OwnCells(salt + group * GROUP_FACTOR) for group in range(num_groups)]
        read = self.model.new_hash()
        for group, (own, window) in enumerate(zip(slot.cells, self.windows, strict=True)):
            blocks = [self._blocks[block_id] for block_id in slot.block_table[group::num_groups]]
            expected = own.until(end, slot.tokens)
            written = GARBAGE_CELL * end if failed else expected
            for index in range(computed // size, -(-end // size)):
                begin, until = max(computed, index * size), min(end, (index + 1) * size)
                place = slice((begin - index * size) * CELL.size, (until - index * size) * CELL.size)
                blocks[index][place] = written[begin * CELL.size : until * CELL.size]
            # Chunks that sample nothing read as well, from the window of their first token on.
            first = max(0, computed - window + 1) if window else 0
            cells = b"".join(blocks[first // size : -(-end // size)])[first % size * CELL.size :]
            cells = cells[: (end - first) * CELL.size]
            slot.has_misread |= not failed and cells != expected[first * CELL.size : end * CELL.size]
            last = max(0, end - window) if window else 0
            read.update(cells[(last - first) * CELL.size :])
        if end < len(slot.tokens):
            return NO_TOKEN, failed
        slot.digest = read.digest()
        num_out = len(slot.tokens) - row.num_prompt_tokens
        return self.model.next_token(read, num_out, row.params, row.stop_token_ids), failed


class ScriptedRunner(PlanFollower):
    """S. `script(request_id, n)` is the n-th generated token (from 0) of a request."""

    def __init__(
        self,
        block_size: int,
        script: Callable[[int, int], int],
        is_delayed: bool = False,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        super().__init__(block_size, is_delayed, windows=windows)
        self.script = script
        self.failing: set[int] = set()  # request ids whose rows fail from now on

    def _compute(self, slot: Slot, computed: int, end: int) -> tuple[int, bool]:
        row = slot.row
        return self.script(row.request_id, len(slot.tokens) - row.num_prompt_tokens), row.request_id in self.failing
