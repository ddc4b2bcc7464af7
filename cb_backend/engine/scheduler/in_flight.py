"""Steps that have been launched and not come back yet, and what must wait for them: one fence for everything.

With run-ahead a request may end or be preempted while a launched step still writes its blocks, or reads what else it
holds. Such things are kept until the last step that touches them has come back. This module does not know why they are
given back, nor to whom.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

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


class _Deferred(NamedTuple):
    """Something to give back once a launched step is back."""

    step_id: int
    give_back: Callable[[], None]
    block_ids: list[int]  # that become free by it


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
        self, slot: int, epoch: int, give_back: Callable[[], None], block_ids: Sequence[int] = ()
    ) -> None:
        """Give back what the request that had `slot` in `epoch` has held: now, or after the last launched step with it.

        `block_ids`: the blocks among it, which are counted as coming.
        """
        for step in reversed(self._steps):
            (rows,) = (step.rows.slots == slot).nonzero()
            if len(rows) and step.rows.epochs[rows[0]] == epoch:
                self._deferred.append(_Deferred(step.step_id, give_back, list(block_ids)))
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
