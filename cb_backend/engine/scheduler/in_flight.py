"""Steps that have been launched and not come back yet, and the blocks that must wait for them.

With run-ahead a request may end or be preempted while a launched step still writes its blocks. Such blocks are kept
until the last step that touches them has come back. This module does not know why blocks are freed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.engine.scheduler.slot_table import Rows


class LaunchedStep(msgspec.Struct, frozen=True, eq=False):
    """What the scheduler must remember of a plan until its result comes. Arrays are [num_rows]."""

    step_id: int
    table_version: int  # of the slot table when the plan was made
    rows: Rows  # epoch other than the slot's now = the row's request has left
    num_computed_after: NDArray[np.int32]
    num_decode_rows: int
    filled: NDArray[np.intp]  # rows (indices) that complete a block
    may_end: bool  # False: no row reaches its length limit with this step's token


class InFlightSteps:
    """Launched steps in order, and deferred frees."""

    def __init__(self, max_steps: int, free_blocks: Callable[[list[int]], None]) -> None:
        self._max_steps = max_steps
        self._free_blocks = free_blocks
        self._steps: deque[LaunchedStep] = deque()
        self._deferred: list[tuple[int, list[int]]] = []  # (free once this step is back, blocks)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= self._max_steps

    @property
    def deferred_blocks(self) -> list[list[int]]:
        return [block_ids for _, block_ids in self._deferred]

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

    def free_when_safe(self, block_ids: list[int], slot: int, epoch: int) -> None:
        """Free blocks of the request that had `slot` in `epoch`: now, or after the last launched step with it."""
        for step in reversed(self._steps):
            (rows,) = (step.rows.slots == slot).nonzero()
            if len(rows) and step.rows.epochs[rows[0]] == epoch:
                self._deferred.append((step.step_id, block_ids))
                return
        self._free_blocks(block_ids)

    def release(self) -> None:
        """Free what no launched step touches any more. Call after a step was taken."""
        if not self._deferred:
            return
        oldest = self._steps[0].step_id if self._steps else None
        waiting = []
        for step_id, block_ids in self._deferred:
            if oldest is not None and oldest <= step_id:
                waiting.append((step_id, block_ids))
            else:
                self._free_blocks(block_ids)
        self._deferred = waiting

    def num_blocks_coming(self, ref_cnt: Callable[[int], int], ending: Iterable[list[int]]) -> int:
        """Blocks that become free without any further decision: deferred ones, and those of requests about to end."""
        leaving = Counter(block_id for block_ids in (*self.deferred_blocks, *ending) for block_id in block_ids)
        return sum(ref_cnt(block_id) == count for block_id, count in leaving.items())
