"""The state of every slot on the device: who sits there, its last token, its blocks, how it samples.

Indexed by slot and never gathered by the host. Requests join by one packed copy, block tables grow by deltas; a step
(`step_rows`) reads and advances the rest. The last slot is nobody's: rows of padding name it, its `num_tokens` stays 0,
so such a row attends to nothing and writes to the null block. A slot whose request has had its last token is the same.

Each function has a torch twin of the same signature (`<name>_torch`), the specification and the CPU path.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cb_backend.kernels.launch import jit, next_power_of_2, tl
from cb_backend.kernels.row_sampling import ROW_PARAMETERS, RowSampling


class SlotState(NamedTuple):
    """The state of every slot. Tensors [num_slots, ...]; the last slot is padding's."""

    last_token: Tensor  # int32
    num_tokens: Tensor  # int32 known tokens, the last one included; 0 for padding, and once the request has ended
    num_prompt_tokens: Tensor  # int32
    min_positions: Tensor  # int32 first position at which a stop id may be sampled
    max_total_tokens: Tensor  # int32 the token that makes so many is the last
    adapter: Tensor  # int32 slot of the adapter that its rows go through, -1 = none
    sampling: RowSampling
    block_tables: Tensor  # int32 [num_groups * num_slots, max_blocks] one table a slot, group of layers by group
    stop_ids: Tensor  # int32 [num_slots, K], -1 = none

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with block tables of its own."""
        return self.block_tables.shape[0] // self.num_tokens.shape[0]

    @property
    def tables(self) -> Tensor:
        """[num_groups, num_slots, max_blocks]"""
        return self.block_tables.view(self.num_groups, *self.num_tokens.shape, -1)

    @property
    def joined(self) -> tuple[Tensor, ...]:
        """What a joining request brings one value of, in the order of `JOINED_VALUES`."""
        return *(getattr(self, name) for name in _OWN_VALUES), *self.sampling


_OWN_VALUES = ("last_token", "num_tokens", "num_prompt_tokens", "min_positions", "max_total_tokens", "adapter")
_WORDS_A_VALUE = 2
# How requests join: their slot and one value for each column, two words of 32 bits apart; stop ids follow.
JOINED_VALUES = np.dtype(
    {
        "names": ["slot", *_OWN_VALUES, *ROW_PARAMETERS],
        "formats": ["<i4"] * (1 + len(_OWN_VALUES)) + [row.format for row in ROW_PARAMETERS.values()],
        "offsets": [4 * _WORDS_A_VALUE * index for index in range(1 + len(_OWN_VALUES) + len(ROW_PARAMETERS))],
        "itemsize": 4 * _WORDS_A_VALUE * (1 + len(_OWN_VALUES) + len(ROW_PARAMETERS)),
    }
)
NUM_JOINED_WORDS = JOINED_VALUES.itemsize // 4  # before the stop ids


@jit()
def _join_slots_kernel(
    joined_ptr,
    columns,
    stop_ids_ptr,
    NUM_WORDS: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_ptr = joined_ptr + tl.program_id(0) * (NUM_WORDS + NUM_STOP_IDS)
    slot = tl.load(row_ptr)
    for index in tl.static_range(len(columns)):
        low = tl.load(row_ptr + 2 + 2 * index)
        if columns[index].dtype.element_ty.primitive_bitwidth == 64:
            high = tl.load(row_ptr + 3 + 2 * index).to(tl.int64)
            tl.store(columns[index] + slot, low.to(tl.int64) & 0xFFFFFFFF | (high << 32))
        else:
            tl.store(columns[index] + slot, low.to(columns[index].dtype.element_ty, bitcast=True))
    column = tl.arange(0, BLOCK)
    is_column = column < NUM_STOP_IDS
    stop_ids = tl.load(row_ptr + NUM_WORDS + column, mask=is_column, other=-1)
    tl.store(stop_ids_ptr + slot * NUM_STOP_IDS + column, stop_ids, mask=is_column)


def join_slots(joined: Tensor, state: SlotState) -> None:
    """`join_slots_torch` in one launch."""
    num_stop_ids = state.stop_ids.shape[1]
    _join_slots_kernel[(joined.shape[0],)](
        joined, state.joined, state.stop_ids,
        NUM_WORDS=NUM_JOINED_WORDS, NUM_STOP_IDS=num_stop_ids, BLOCK=next_power_of_2(num_stop_ids), num_warps=1,
    )  # fmt: skip


def join_slots_torch(joined: Tensor, state: SlotState) -> None:
    """Write the slots of requests that join, in place. joined: int32 [num_joined, NUM_JOINED_WORDS + K], a
    `JOINED_VALUES` in each row and the stop ids behind it."""
    values = joined[:, :NUM_JOINED_WORDS].contiguous().view(len(joined), -1, _WORDS_A_VALUE)
    slots = values[:, 0, 0].long()
    for index, column in enumerate(state.joined, 1):
        words = values[:, index] if column.itemsize == 8 else values[:, index, :1]
        column[slots] = words.contiguous().view(column.dtype)[:, 0]
    state.stop_ids[slots] = joined[:, NUM_JOINED_WORDS:]


@jit("num_deltas")
def _apply_deltas_kernel(block_tables_ptr, deltas_ptr, num_deltas, table_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_deltas
    slot = tl.load(deltas_ptr + row * 3, mask=is_row, other=-1)
    index = tl.load(deltas_ptr + row * 3 + 1, mask=is_row, other=0)
    block_id = tl.load(deltas_ptr + row * 3 + 2, mask=is_row, other=0)
    tl.store(block_tables_ptr + slot.to(tl.int64) * table_stride + index, block_id, mask=slot >= 0)


def apply_deltas(block_tables: Tensor, deltas: Tensor) -> None:
    """`apply_deltas_torch` in one launch."""
    num_deltas = deltas.shape[0]
    if num_deltas:
        _apply_deltas_kernel[(-(-num_deltas // 128),)](
            block_tables, deltas, num_deltas, block_tables.stride(0), BLOCK=128, num_warps=4
        )


def apply_deltas_torch(block_tables: Tensor, deltas: Tensor) -> None:
    """Write block ids into block tables, in place.

    block_tables: int32 [num_tables, max_blocks]; deltas: int32 [N, 3] of (table, index, block_id), table -1 = no
    change.
    """
    slots, indices, block_ids = deltas.long().unbind(1)
    keep = slots >= 0
    block_tables[slots[keep], indices[keep]] = block_ids[keep].to(torch.int32)
