"""Rank 1 of a simulated world over two: a real `ShardRunner` that reads the real ring.

Made up are its process, which takes its steps when rank 0 takes its own, and its model: one layer for each group, whose
cells keep each token and its position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from cb_backend.contracts.step import StepPlan
from cb_backend.engine.runner.shard_runner import ShardRunner
from cb_backend.kv_cache.layout import KVGroup, KVLayout
from cb_backend.kv_cache.storage import KVCacheStorage
from cb_backend.kv_cache.swap import BlockSwapper
from cb_backend.layers.ops import resolve_ops
from cb_backend.layers.step_metadata import StepMetadata
from cb_backend.parallel.plan_ring import RingReader
from cb_backend.parallel.worker_plan import decode_plan
from cb_backend.support.fault_points import reach
from tests.fakes.plan_follower import Slot
from tests.simulation.scenario import Scenario

RING_SIZE = {"slot_bytes": 1 << 10, "num_slots": 128}  # some plans take several slots, none more than there are
_CPU = torch.device("cpu")

Work = list[tuple[Slot, int, int, bool]]  # rows of a step, as H has them


class SecondRank:
    """Rank 1: it reads every plan when it comes, and runs it when rank 0 does."""

    def __init__(self, scenario: Scenario, ring: Path) -> None:
        config, windows = scenario.config, scenario.windows
        layout = KVLayout(
            groups=tuple(KVGroup(window, (layer,)) for layer, window in enumerate(windows)),
            num_kv_heads=1, head_dim=1, block_size=config.block_size, element_bytes=4,
        )  # fmt: skip
        storage = KVCacheStorage(layout, scenario.num_blocks, torch.int32, _CPU)
        self.model = _CellsModel()
        model: Any = self.model
        self.shard = ShardRunner(
            model, resolve_ops("torch"), storage, config.max_num_seqs, scenario.max_model_len
        )  # as `load_runner` makes it
        if scenario.num_host_blocks:
            self.shard.swapper = BlockSwapper(storage, scenario.num_host_blocks)
        self.why_lost: str | None = None
        self.last_step_id = 0  # that it has run
        self._reader = RingReader(ring, 0, 1, **RING_SIZE)
        self._plans: deque[StepPlan] = deque()  # read, not run
        self._cells = storage.data.numpy()[0]  # [num_blocks, 2, 1, block_size, 1]
        self._tables = self.shard.state.tables.numpy()  # [num_groups, num_slots + 1, max_blocks]

    def receive(self) -> None:
        """Read what has come, as the process of a rank does; it ends where that fails."""
        while (message := self._reader.next(0.0)) is not None:
            try:
                reach("worker.execute")
                self._plans.append(decode_plan(message).plan)
            except Exception as error:
                self.die(str(error))

    def die(self, why: str) -> None:
        self.why_lost = self.why_lost or f"rank 1 has ended: {why}"
        self._plans.clear()

    def run_until(self, plan: StepPlan, work: Work) -> bool:
        """Run the plans up to this one, whose rows rank 0 has as `work`. False: the rank is not there any more."""
        while self.why_lost is None:
            own = self._plans.popleft()
            assert own.step_id <= plan.step_id, f"step {own.step_id} reached rank 1 before step {plan.step_id}"
            is_this = own.step_id == plan.step_id
            # What rank 0 has lost of a step before, it has forgotten: its rows have ended there.
            rows = work[: plan.num_decode_rows] if is_this else []
            self.model.group.known = {
                int(number): (slot.tokens[-1], 0 if slot.is_broken or slot.has_ended else len(slot.tokens))
                for number, (slot, *_) in zip(plan.slots, rows, strict=False)
            }
            self.shard.execute(own)
            self.last_step_id = own.step_id
            if is_this:
                assert _is_same(own, plan), "the plan of rank 1 is another"
                return True
        return False

    @property
    def lengths(self) -> Sequence[int]:
        """Of the decode rows of the last step, the tokens it attends to."""
        return self.model.lengths

    def block_table(self, slot: int, num_rows: int) -> list[int]:
        """As the device has it, in rows of one block for each group."""
        return cast(list[int], self._tables[:, slot, :num_rows].T.reshape(-1).tolist())

    def listed_table(self, slot: int, num_rows: int) -> list[int]:
        """As the host has it."""
        return cast(list[int], self.shard.batch.block_tables[slot, : num_rows * len(self._tables)].tolist())

    def cells(self, block_ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """[num_blocks, block_size, 2] of (token, position)."""
        return self._cells[block_ids][:, :, 0, :, 0].transpose(0, 2, 1)

    def close(self) -> None:
        self._plans.clear()
        self._reader.close()


def _is_same(one: StepPlan, other: StepPlan) -> bool:
    names = ("slots", "first", "num_tokens", "wants", "new_blocks")
    return (
        all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
        and (one.copies, one.num_decode_rows) == (other.copies, other.num_decode_rows)
        and [row.block_ids for row in one.joined] == [row.block_ids for row in other.joined]
    )


class _CellsModel:
    """A model that computes nothing: it writes down which token is where."""

    adapters = None
    spec = SimpleNamespace(hidden_size=1, generates=True)
    dtype = torch.int32  # of its hidden states, which are the tokens themselves

    def __init__(self) -> None:
        self.group = _GroupOfSecond()
        self.ropes = _Positions()
        self.lengths: list[int] = []

    def __call__(self, token_ids: Tensor, step: StepMetadata, layers: Sequence[Any]) -> Tensor:
        positions = step.ropes[0][1]
        for layer in layers:
            mapping = step.slot_mapping[layer.group].long()
            block_size = layer.cells.shape[3]
            blocks, offsets = mapping // block_size, mapping % block_size
            layer.cells[blocks, 0, 0, offsets, 0] = token_ids
            layer.cells[blocks, 1, 0, offsets, 0] = positions
        self.lengths = step.decode_seq_lens.tolist()
        return token_ids[:, None]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


class _Positions:
    """In place of the model's ropes: which token stands where."""

    def rows(self, positions: Tensor, num_prompt_tokens: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        return ((num_prompt_tokens, positions),)


class _GroupOfSecond:
    """Rank 1's group: it is told what rank 0 has of its decode rows."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.known: Mapping[int, tuple[int, int]] = {}  # by slot: last token, and how many; of others nothing is there

    def share_tokens(self, last_token: Tensor, num_tokens: Tensor, slots: Tensor) -> None:
        for slot in slots.tolist():
            last_token[slot], num_tokens[slot] = self.known.get(slot, (0, 0))
