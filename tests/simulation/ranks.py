"""Two ranks in a simulated world: what rank 0 is told to run, rank 1 must run alike, and without it nothing runs.

Rank 0 is runner H behind the real `RankedRunner`; its plans go through the real encoding and ring to rank 1
(`second_rank`), which takes its steps when rank 0 takes its own.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.step import MaskSource, StepPlan, StepResult
from cb_backend.engine.runner.ranks import RankedRunner, RankedStep
from cb_backend.engine.workers import WorkersLostError
from cb_backend.parallel.plan_ring import RingWriter
from tests.fakes.plan_follower import FakePending, Slot
from tests.fakes.runners import HashRunner
from tests.simulation.scenario import Fault, Scenario
from tests.simulation.second_rank import RING_SIZE, SecondRank, Work

SHARE = 0.03  # of worlds whose model is over two ranks


def with_ranks(scenario: Scenario, share_of_worlds: float = SHARE) -> Scenario:
    """The same world, in some cases over two ranks, of which the second may be lost. Drawn apart: the rest does not
    depend on it. Adapters over ranks are tried in tests/engine/test_rank_adapters.py; a
    world that has some stays as it is here."""
    rng = random.Random(f"ranks of {scenario.seed}")
    if rng.random() >= share_of_worlds or scenario.num_adapter_slots:
        return scenario
    faults = scenario.faults
    if rng.random() < 0.25:
        faults = (*faults, Fault("worker.execute", rng.choice((1, rng.randint(1, 8), rng.randint(1, 60)))))
    dies_at = rng.randint(0, 60) if rng.random() < 0.1 else None
    config = replace(scenario.config, tensor_parallel_size=2)
    return replace(scenario, config=config, faults=faults, rank_dies_at=dies_at)


class TwoRanks(HashRunner):
    """Rank 0, and all that it sees of rank 1."""

    def __init__(self, scenario: Scenario, *arguments: Any, **keywords: Any) -> None:
        """`arguments`: those of `HashRunner`."""
        super().__init__(*arguments, **keywords)
        self.apart: dict[int, dict[int, str]] = {}  # by step and request: how the ranks differ in it
        folder = Path(tempfile.mkdtemp(prefix="simulated_ranks_"))
        try:
            writer = RingWriter(folder / "plans", 1, **RING_SIZE)
            self.second = SecondRank(scenario, folder / "plans")
        finally:
            shutil.rmtree(folder)
        parts: Any = (_OwnPart(self), _Worker(self.second), _Ring(writer, self.second), _GroupOfFirst())
        self.ranked = RankedRunner(*parts)

    def execute(self, plan: StepPlan, masks: MaskSource) -> FakePending:
        try:
            return cast(FakePending, _RankedPending(self.ranked.execute(plan, masks)))
        except WorkersLostError as error:
            if isinstance(error.__cause__, AssertionError):  # not a rank's failure: the plan is wrong
                raise error.__cause__ from None
            raise

    def execute_own(self, plan: StepPlan, masks: MaskSource) -> FakePending:
        """Rank 0's part."""
        return super().execute(plan, masks)

    def _run(self, plan: StepPlan, work: Work, loads: dict[int, AdapterKey]) -> StepResult:
        is_live = [not (slot.is_broken or slot.has_ended) for slot, *_ in work]
        has_run = self.second.run_until(plan, work)
        result = super()._run(plan, work, loads)
        if has_run:
            self.apart[plan.step_id] = {
                slot.row.request_id: difference
                for index, (slot, computed, scheduled, _) in enumerate(work)
                if is_live[index] and computed + scheduled < self.fails_at.get(slot.row.request_id, 1 << 30)
                if (difference := self._difference(plan, index, slot, computed, computed + scheduled))
            }
        return result

    def _difference(self, plan: StepPlan, index: int, slot: Slot, computed: int, end: int) -> str:
        """What rank 1 has otherwise of a row that both have run; empty: nothing."""
        second, size, num_groups = self.second, self.block_size, len(self.windows)
        number, num_rows = int(plan.slots[index]), -(-end // size)
        own = slot.block_table[: num_rows * num_groups]
        if second.block_table(number, num_rows) != own or second.listed_table(number, num_rows) != own:
            return "the block table"
        if index < plan.num_decode_rows and second.lengths[index] != end:
            return "the length"
        for group, window in enumerate(self.windows):
            first = max(0, computed - window + 1) if window else 0
            block_ids = own[first // size * num_groups + group :: num_groups]
            cells = slice(first % size, first % size + end - first)
            if not np.array_equal(
                self.cells(block_ids).reshape(-1, 3)[cells, :2], second.cells(block_ids).reshape(-1, 2)[cells]
            ):
                return "what it reads"
        return ""

    def check_ranks(self, step_id: int, live: set[int]) -> None:
        """Of a step whose result was taken. live: ids of the requests that are told of it."""
        assert self.second.last_step_id >= step_id, "a result is taken of a step that a lost rank has not run"
        told = {request_id: what for request_id, what in self.apart.pop(step_id, {}).items() if request_id in live}
        assert not told, f"the ranks differ: {told}"

    def lost(self) -> str | None:
        return self.ranked.lost()

    def close(self) -> None:
        self.ranked.close()

    def close_own(self) -> None:
        super().close()


class _GroupOfFirst:
    def fault(self) -> str | None:
        return None

    def leave(self) -> None:
        """There is nothing to leave."""


class _OwnPart:
    """Rank 0's runner, as `RankedRunner` has it."""

    def __init__(self, ranks: TwoRanks) -> None:
        self.execute, self.cache_key, self.close = ranks.execute_own, ranks.cache_key, ranks.close_own
        self.adapters = None  # worlds over two ranks have none


class _Worker:
    """In place of `Workers`: the process of rank 1."""

    def __init__(self, second: SecondRank) -> None:
        self._second, self.end = second, second.close

    def lost(self) -> str | None:
        return self._second.why_lost

    lost_soon = lost

    def forget_folder(self) -> None:
        """There is none."""


class _Ring:
    """The real ring, whose reader looks as soon as something is in it."""

    def __init__(self, writer: RingWriter, second: SecondRank) -> None:
        self._writer, self._second, self.close = writer, second, writer.close

    def publish(self, message: bytes) -> None:
        self._writer.publish(message, timeout_s=0.0)
        self._second.receive()


class _RankedPending:
    """A step of both ranks, of which rank 0's part is asked what it reads and writes."""

    def __init__(self, step: RankedStep) -> None:
        own = cast(FakePending, step.pending)
        self.result, self.lose = step.result, own.lose
        self.written_blocks, self.read_blocks = own.written_blocks, own.read_blocks
