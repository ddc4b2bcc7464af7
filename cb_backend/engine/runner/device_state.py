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

from cb_backend.contracts.adapters import NO_ADAPTER
from cb_backend.contracts.step import JoinedRow, StepPlan
from cb_backend.contracts.token_rules import MAX_STOP_TOKEN_IDS
from cb_backend.engine.runner.input_batch import is_sampled_apart, min_position
from cb_backend.kernels.row_sampling import ROW_PARAMETERS, neutral_rows
from cb_backend.kernels.slot_state import JOINED_VALUES, NUM_JOINED_WORDS, SlotState

# Room for a request's own stop ids and the model's end-of-sequence ids.
MAX_STOP_IDS_PER_SLOT = MAX_STOP_TOKEN_IDS + 16


def new_slot_state(num_slots: int, max_blocks: int, device: torch.device, num_groups: int = 1) -> SlotState:
    """State for slots 0 to num_slots - 1, and one more that rows of padding name: it never has a token."""
    if num_groups > 1:
        max_blocks = (
            -(-max_blocks // 4) * 4
        )  # so that each group's tables begin at 16 bytes, as `StepShape.layout` has it
    rows = num_slots + 1

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(rows, *shape, dtype=torch.int32, device=device)

    return SlotState(
        last_token=zeros(),
        num_tokens=zeros(),
        num_prompt_tokens=zeros(),
        min_positions=zeros(),
        max_total_tokens=torch.full((rows,), 2**31 - 1, dtype=torch.int32, device=device),
        adapter=torch.full((rows,), NO_ADAPTER, dtype=torch.int32, device=device),
        sampling=neutral_rows(rows, device),
        block_tables=torch.zeros(num_groups * rows, max_blocks, dtype=torch.int32, device=device),
        stop_ids=torch.full((rows, MAX_STOP_IDS_PER_SLOT), -1, dtype=torch.int32, device=device),
    )


def joined_slots(rows: Sequence[JoinedRow]) -> NDArray[np.int32]:
    """What `join_slots` takes: values and stop ids of each request; block tables come as deltas."""
    joined = np.full((len(rows), NUM_JOINED_WORDS + MAX_STOP_IDS_PER_SLOT), -1, np.int32)
    values = joined[:, :NUM_JOINED_WORDS].view(JOINED_VALUES)
    for index, row in enumerate(rows):
        params = row.params
        values[index, 0] = (
            row.slot,
            row.token_ids[-1],
            len(row.token_ids),
            row.num_prompt_tokens,
            0 if is_sampled_apart(params) else min_position(row),
            row.max_total_tokens,
            row.adapter,
            *[parameter.read(params) for parameter in ROW_PARAMETERS.values()],
        )
        stop_ids = row.stop_token_ids[:MAX_STOP_IDS_PER_SLOT]
        joined[index, NUM_JOINED_WORDS : NUM_JOINED_WORDS + len(stop_ids)] = stop_ids
    return joined


def block_table_deltas(plan: StepPlan) -> NDArray[np.int32]:
    """What a plan changes in the block tables: [N, 3] of (slot, index, block_id)."""
    if not plan.joined:
        return plan.new_blocks
    deltas = [plan.new_blocks]
    for row in plan.joined:
        table = np.empty((len(row.block_ids), 3), np.int32)
        table[:, 0] = row.slot
        table[:, 1] = np.arange(len(row.block_ids))
        table[:, 2] = row.block_ids
        deltas.append(table)
    return np.concatenate(deltas)


def deltas_of_groups(deltas: NDArray[np.int32], num_groups: int, num_tables: int) -> NDArray[np.int32]:
    """The same for `SlotState.block_tables` of several groups, `num_tables` of each: (table, index, block_id)."""
    index, group = np.divmod(deltas[:, 1], num_groups)
    return np.stack((group * num_tables + deltas[:, 0], index, deltas[:, 2]), axis=1)


def copy_to(values: NDArray, device: torch.device) -> Tensor:
    """To the device without waiting for it. Pinned memory is held back by torch's allocator until the copy is done."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.clone()
