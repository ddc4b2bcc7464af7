"""The batch as the device sees it: slot-indexed tensors, changed by deltas, so that a decode step needs no host data.

The host writes a slot when a request joins it and appends block ids as they are given out; everything else (the last
token, its position) the step itself keeps up to date. Works on a CPU as well, where it is tested.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.kernels.step_state import SamplingState
from cb_backend.outputs import JoinedRow, SchedulerOutput
from cb_backend.sampling_params import MAX_STOP_TOKEN_IDS

# Room for a request's own stop ids and the model's end-of-sequence ids.
MAX_STOP_IDS_PER_SLOT = MAX_STOP_TOKEN_IDS + 16


class DeviceState:
    """Slots 0 to num_slots - 1, and one more (`padding_slot`) that rows of padding name: it never has a token."""

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        rows = num_slots + 1
        self.padding_slot = num_slots
        self.device = device
        self.last_token = torch.zeros(rows, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(rows, dtype=torch.int32, device=device)  # known tokens, the last one included
        self.num_prompt_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.sampling = SamplingState(
            temperature=torch.zeros(rows, dtype=torch.float32, device=device),
            top_k=torch.zeros(rows, dtype=torch.int32, device=device),
            top_p=torch.ones(rows, dtype=torch.float32, device=device),
            min_p=torch.zeros(rows, dtype=torch.float32, device=device),
            seeds=torch.zeros(rows, dtype=torch.int64, device=device),
        )
        self.min_positions = torch.zeros(rows, dtype=torch.int32, device=device)  # stop ids are ruled out before it
        self.stop_ids = torch.full((rows, MAX_STOP_IDS_PER_SLOT), -1, dtype=torch.int32, device=device)

    def join(self, rows: Sequence[JoinedRow]) -> None:
        """Write the slots of requests that join; their block tables come as deltas."""
        if not rows:
            return
        ints = np.full((len(rows), 6 + MAX_STOP_IDS_PER_SLOT), -1, np.int32)
        floats = np.empty((len(rows), 3), np.float32)
        seeds = np.empty(len(rows), np.uint64)
        for index, row in enumerate(rows):
            params = row.params
            num_stop_ids = min(len(row.stop_token_ids), MAX_STOP_IDS_PER_SLOT)
            ints[index, :6] = (
                row.slot,
                row.token_ids[-1],
                len(row.token_ids),
                row.num_prompt_tokens,
                max(params.top_k, 0),
                row.num_prompt_tokens + params.min_tokens,
            )
            ints[index, 6 : 6 + num_stop_ids] = row.stop_token_ids[:num_stop_ids]
            floats[index] = (0.0 if params.is_greedy else params.temperature, params.top_p, params.min_p)
            seeds[index] = params.seed or 0
        self._write(torch.from_numpy(ints), torch.from_numpy(floats), torch.from_numpy(seeds.view(np.int64)))

    def _write(self, ints: Tensor, floats: Tensor, seeds: Tensor) -> None:
        ints, floats, seeds = (copy_to(values, self.device) for values in (ints, floats, seeds))
        slots = ints[:, 0].long()
        self.last_token[slots] = ints[:, 1]
        self.num_tokens[slots] = ints[:, 2]
        self.num_prompt_tokens[slots] = ints[:, 3]
        self.sampling.top_k[slots] = ints[:, 4]
        self.min_positions[slots] = ints[:, 5]
        self.stop_ids[slots] = ints[:, 6:]
        self.sampling.temperature[slots] = floats[:, 0]
        self.sampling.top_p[slots] = floats[:, 1]
        self.sampling.min_p[slots] = floats[:, 2]
        self.sampling.seeds[slots] = seeds


def block_table_deltas(plan: SchedulerOutput) -> NDArray[np.int32]:
    """What a plan changes in the block tables: [N, 3] of (slot, index, block_id)."""
    changes = [(row.slot, 0, row.block_ids) for row in plan.joined]
    changes += [(new.slot, new.start, new.block_ids) for new in plan.new_blocks]
    total = sum(len(block_ids) for _, _, block_ids in changes)
    deltas = np.empty((total, 3), np.int32)
    first = 0
    for slot, start, block_ids in changes:
        rows = deltas[first : first + len(block_ids)]
        rows[:, 0] = slot
        rows[:, 1] = np.arange(start, start + len(block_ids))
        rows[:, 2] = block_ids
        first += len(block_ids)
    return deltas


def copy_to(values: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it. Pinned memory is held back by torch's allocator until the copy is done."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.clone()
