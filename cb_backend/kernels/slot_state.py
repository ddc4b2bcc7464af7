"""The state of every slot on the device: who sits there, its last token, its blocks, how it samples.

Indexed by slot and never gathered by the host. Requests join by one packed copy, block tables grow by deltas; a step
(`step_rows`) reads and advances the rest. The last slot is nobody's: rows of padding name it, its `num_tokens` stays 0,
so such a row attends to nothing and writes to the null block.

Each function has a torch twin of the same signature (`<name>_torch`), the specification and the CPU path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cb_backend.kernels.launch import jit, next_power_of_2, tl


class SamplingState(NamedTuple):
    """How each slot samples. Each tensor [num_slots]."""

    temperature: Tensor  # float32, 0 = greedy
    top_k: Tensor  # int32, 0 = off
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seeds: Tensor  # int64, bit pattern of the unsigned seed


class SlotState(NamedTuple):
    """The state of every slot. Tensors [num_slots, ...]; the last slot is padding's."""

    last_token: Tensor  # int32
    num_tokens: Tensor  # int32 known tokens, the last one included; 0 for padding
    num_prompt_tokens: Tensor  # int32
    block_tables: Tensor  # int32 [num_slots, max_blocks]
    sampling: SamplingState
    min_positions: Tensor  # int32 first position at which a stop id may be sampled
    stop_ids: Tensor  # int32 [num_slots, K], -1 = none


# Columns of the array by which requests join, before the stop ids: int32, floats and seeds by their bits.
JOIN_COLUMNS = (
    "slot", "last_token", "num_tokens", "num_prompt_tokens", "top_k", "min_position",
    "temperature", "top_p", "min_p", "seed_low", "seed_high",
)  # fmt: skip


@jit()
def _join_slots_kernel(
    joined_ptr,
    last_token_ptr,
    num_tokens_ptr,
    num_prompt_tokens_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    min_positions_ptr,
    stop_ids_ptr,
    NUM_COLUMNS: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_ptr = joined_ptr + tl.program_id(0) * (NUM_COLUMNS + NUM_STOP_IDS)
    slot = tl.load(row_ptr)
    tl.store(last_token_ptr + slot, tl.load(row_ptr + 1))
    tl.store(num_tokens_ptr + slot, tl.load(row_ptr + 2))
    tl.store(num_prompt_tokens_ptr + slot, tl.load(row_ptr + 3))
    tl.store(top_k_ptr + slot, tl.load(row_ptr + 4))
    tl.store(min_positions_ptr + slot, tl.load(row_ptr + 5))
    tl.store(temperature_ptr + slot, tl.load(row_ptr + 6).to(tl.float32, bitcast=True))
    tl.store(top_p_ptr + slot, tl.load(row_ptr + 7).to(tl.float32, bitcast=True))
    tl.store(min_p_ptr + slot, tl.load(row_ptr + 8).to(tl.float32, bitcast=True))
    low = tl.load(row_ptr + 9).to(tl.int64) & 0xFFFFFFFF
    tl.store(seeds_ptr + slot, low | (tl.load(row_ptr + 10).to(tl.int64) << 32))
    column = tl.arange(0, BLOCK)
    is_column = column < NUM_STOP_IDS
    stop_ids = tl.load(row_ptr + NUM_COLUMNS + column, mask=is_column, other=-1)
    tl.store(stop_ids_ptr + slot * NUM_STOP_IDS + column, stop_ids, mask=is_column)


def join_slots(joined: Tensor, state: SlotState) -> None:
    """`join_slots_torch` in one launch."""
    num_stop_ids = state.stop_ids.shape[1]
    _join_slots_kernel[(joined.shape[0],)](
        joined, state.last_token, state.num_tokens, state.num_prompt_tokens, *state.sampling,
        state.min_positions, state.stop_ids,
        NUM_COLUMNS=len(JOIN_COLUMNS), NUM_STOP_IDS=num_stop_ids, BLOCK=next_power_of_2(num_stop_ids),
        num_warps=1,
    )  # fmt: skip


def join_slots_torch(joined: Tensor, state: SlotState) -> None:
    """Write the slots of requests that join, in place. joined: int32 [num_joined, len(JOIN_COLUMNS) + K]."""
    column = {name: joined[:, index] for index, name in enumerate(JOIN_COLUMNS)}
    slots = column["slot"].long()
    state.last_token[slots] = column["last_token"]
    state.num_tokens[slots] = column["num_tokens"]
    state.num_prompt_tokens[slots] = column["num_prompt_tokens"]
    state.min_positions[slots] = column["min_position"]
    state.sampling.top_k[slots] = column["top_k"]
    for name in ("temperature", "top_p", "min_p"):
        getattr(state.sampling, name)[slots] = column[name].contiguous().view(torch.float32)
    low, high = column["seed_low"].long() & 0xFFFFFFFF, column["seed_high"].long()
    state.sampling.seeds[slots] = low | (high << 32)
    state.stop_ids[slots] = joined[:, len(JOIN_COLUMNS) :]


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

    block_tables: int32 [num_slots, max_blocks]; deltas: int32 [N, 3] of (slot, index, block_id), slot -1 = no change.
    """
    slots, indices, block_ids = deltas.long().unbind(1)
    keep = slots >= 0
    block_tables[slots[keep], indices[keep]] = block_ids[keep].to(torch.int32)
