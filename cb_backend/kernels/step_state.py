"""The device's own memory of the batch: small kernels that let a decode step run without the host.

State is indexed by slot and never gathered by the host: `last_token`, `num_tokens`, the block tables and the sampling
values. A step reads them through `slots [B]`; rows of padding name the last slot, which is nobody's: its `num_tokens`
stays 0, so such a row attends to nothing and writes to the null block.

Each function has a torch twin of the same signature (`<name>_torch`), which is the specification and the CPU path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU box: only the twins are used
    triton = None


class SamplingState(NamedTuple):
    """How each slot samples. Each tensor [num_slots]."""

    temperature: Tensor  # float32, 0 = greedy
    top_k: Tensor  # int32, 0 = off
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seeds: Tensor  # int64, bit pattern of the unsigned seed


class StepRows(NamedTuple):
    """What `prepare_rows` fills in for one step. The first `num_decode` rows decode; the rest only sample."""

    token_ids: Tensor  # int32 [>= num_decode] last known token of the row
    positions: Tensor  # int32 [>= num_decode] its position
    slot_mapping: Tensor  # int32 [>= num_decode] where its key and value go; 0 for padding
    num_prompt_tokens: Tensor  # int32 [>= num_decode]
    seq_lens: Tensor  # int32 [>= num_decode] tokens to attend to, its own included; 0 for padding
    sampling: SamplingState  # each [num_rows]
    sample_positions: Tensor  # int64 [num_rows] position of the token to be sampled; 0 for padding


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


# ---- joining -----------------------------------------------------------------------------------------------------


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


# ---- block table deltas ------------------------------------------------------------------------------------------


def apply_deltas_torch(block_tables: Tensor, deltas: Tensor) -> None:
    """Write block ids into block tables, in place.

    block_tables: int32 [num_slots, max_blocks]; deltas: int32 [N, 3] of (slot, index, block_id), slot -1 = no change.
    """
    slots, indices, block_ids = deltas.long().unbind(1)
    keep = slots >= 0
    block_tables[slots[keep], indices[keep]] = block_ids[keep].to(torch.int32)


# ---- rows of a step ----------------------------------------------------------------------------------------------


def prepare_rows_torch(slots: Tensor, num_decode: int, state: SlotState, block_size: int, out: StepRows) -> None:
    """Gather a step's rows by slot into `out`. slots: int32 [num_rows], of which the first `num_decode` decode."""
    index = slots.long()
    num_tokens = state.num_tokens[index]
    out.sample_positions.copy_(num_tokens)
    for gathered, values in zip(out.sampling, state.sampling, strict=True):
        gathered.copy_(values[index])
    index, num_tokens = index[:num_decode], num_tokens[:num_decode]
    positions = (num_tokens - 1).clamp(min=0)
    cells = state.block_tables[index, (positions // block_size).long()] * block_size + positions % block_size
    out.token_ids[:num_decode] = state.last_token[index]
    out.positions[:num_decode] = positions
    out.slot_mapping[:num_decode] = torch.where(num_tokens > 0, cells, 0)
    out.num_prompt_tokens[:num_decode] = state.num_prompt_tokens[index]
    out.seq_lens[:num_decode] = num_tokens


# ---- after sampling ----------------------------------------------------------------------------------------------


def commit_tokens_torch(
    slots: Tensor, sampled: Tensor, sample_positions: Tensor, last_token: Tensor, num_tokens: Tensor
) -> None:
    """Make the sampled tokens the last tokens of their slots, in place. Rows of padding (position 0) change nothing.

    slots, sampled: int32 [B]; sample_positions: int64 [B]; last_token, num_tokens: int32 [num_slots].
    """
    keep = sample_positions > 0
    index = slots.long()[keep]
    last_token[index] = sampled[keep]
    num_tokens[index] = (sample_positions[keep] + 1).to(torch.int32)


def mask_stop_ids_torch(
    logits: Tensor, slots: Tensor, sample_positions: Tensor, min_positions: Tensor, stop_ids: Tensor
) -> None:
    """Rule out the stop ids of rows that are below their min_tokens, in place.

    logits: [B, vocab]; min_positions: int32 [num_slots], first position at which a stop id may be sampled; stop_ids:
    int32 [num_slots, K], -1 = none.
    """
    index = slots.long()
    ids = stop_ids[index].long()  # [B, K]
    is_masked = (sample_positions < min_positions[index])[:, None] & (ids >= 0)
    rows, columns = is_masked.nonzero(as_tuple=True)
    logits[rows, ids[rows, columns]] = float("-inf")


if triton is not None:

    @triton.jit(do_not_specialize=["num_deltas"])
    def _apply_deltas_kernel(block_tables_ptr, deltas_ptr, num_deltas, table_stride, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_row = row < num_deltas
        slot = tl.load(deltas_ptr + row * 3, mask=is_row, other=-1)
        index = tl.load(deltas_ptr + row * 3 + 1, mask=is_row, other=0)
        block_id = tl.load(deltas_ptr + row * 3 + 2, mask=is_row, other=0)
        tl.store(block_tables_ptr + slot.to(tl.int64) * table_stride + index, block_id, mask=slot >= 0)

    @triton.jit
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

    @triton.jit(do_not_specialize=["num_rows", "num_decode"])
    def _prepare_rows_kernel(
        slots_ptr,
        last_token_ptr,
        num_tokens_ptr,
        num_prompt_tokens_ptr,
        block_tables_ptr,
        temperature_ptr,
        top_k_ptr,
        top_p_ptr,
        min_p_ptr,
        seeds_ptr,
        out_token_ids_ptr,
        out_positions_ptr,
        out_slot_mapping_ptr,
        out_num_prompt_tokens_ptr,
        out_seq_lens_ptr,
        out_temperature_ptr,
        out_top_k_ptr,
        out_top_p_ptr,
        out_min_p_ptr,
        out_seeds_ptr,
        out_sample_positions_ptr,
        num_rows,
        num_decode,
        table_stride,
        BLOCK_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_row = row < num_rows
        slot = tl.load(slots_ptr + row, mask=is_row, other=0).to(tl.int64)
        num_tokens = tl.load(num_tokens_ptr + slot, mask=is_row, other=0)
        tl.store(out_temperature_ptr + row, tl.load(temperature_ptr + slot, mask=is_row, other=0.0), mask=is_row)
        tl.store(out_top_k_ptr + row, tl.load(top_k_ptr + slot, mask=is_row, other=0), mask=is_row)
        tl.store(out_top_p_ptr + row, tl.load(top_p_ptr + slot, mask=is_row, other=1.0), mask=is_row)
        tl.store(out_min_p_ptr + row, tl.load(min_p_ptr + slot, mask=is_row, other=0.0), mask=is_row)
        tl.store(out_seeds_ptr + row, tl.load(seeds_ptr + slot, mask=is_row, other=0), mask=is_row)
        tl.store(out_sample_positions_ptr + row, num_tokens.to(tl.int64), mask=is_row)
        is_row = row < num_decode
        position = tl.maximum(num_tokens - 1, 0)
        table_ptr = block_tables_ptr + slot * table_stride + position // BLOCK_SIZE
        block_id = tl.load(table_ptr, mask=is_row & (num_tokens > 0), other=0)
        mapping = tl.where(num_tokens > 0, block_id * BLOCK_SIZE + position % BLOCK_SIZE, 0)
        num_prompt_tokens = tl.load(num_prompt_tokens_ptr + slot, mask=is_row, other=0)
        tl.store(out_token_ids_ptr + row, tl.load(last_token_ptr + slot, mask=is_row, other=0), mask=is_row)
        tl.store(out_positions_ptr + row, position, mask=is_row)
        tl.store(out_slot_mapping_ptr + row, mapping, mask=is_row)
        tl.store(out_num_prompt_tokens_ptr + row, num_prompt_tokens, mask=is_row)
        tl.store(out_seq_lens_ptr + row, num_tokens, mask=is_row)

    @triton.jit(do_not_specialize=["num_rows"])
    def _commit_tokens_kernel(
        slots_ptr, sampled_ptr, sample_positions_ptr, last_token_ptr, num_tokens_ptr, num_rows, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        position = tl.load(sample_positions_ptr + row, mask=row < num_rows, other=0)
        keep = position > 0
        slot = tl.load(slots_ptr + row, mask=keep, other=0)
        tl.store(last_token_ptr + slot, tl.load(sampled_ptr + row, mask=keep, other=0), mask=keep)
        tl.store(num_tokens_ptr + slot, (position + 1).to(tl.int32), mask=keep)

    @triton.jit
    def _mask_stop_ids_kernel(
        logits_ptr,
        slots_ptr,
        sample_positions_ptr,
        min_positions_ptr,
        stop_ids_ptr,
        logits_stride,
        num_stop_ids,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if tl.load(sample_positions_ptr + row) < tl.load(min_positions_ptr + slot):
            column = tl.arange(0, BLOCK)
            token_id = tl.load(stop_ids_ptr + slot * num_stop_ids + column, mask=column < num_stop_ids, other=-1)
            tl.store(logits_ptr + row.to(tl.int64) * logits_stride + token_id, float("-inf"), mask=token_id >= 0)


def apply_deltas(block_tables: Tensor, deltas: Tensor) -> None:
    """`apply_deltas_torch` in one launch."""
    num_deltas = deltas.shape[0]
    if num_deltas:
        _apply_deltas_kernel[(triton.cdiv(num_deltas, 128),)](
            block_tables, deltas, num_deltas, block_tables.stride(0), BLOCK=128, num_warps=4
        )


def join_slots(joined: Tensor, state: SlotState) -> None:
    """`join_slots_torch` in one launch."""
    num_stop_ids = state.stop_ids.shape[1]
    _join_slots_kernel[(joined.shape[0],)](
        joined, state.last_token, state.num_tokens, state.num_prompt_tokens, *state.sampling,
        state.min_positions, state.stop_ids,
        NUM_COLUMNS=len(JOIN_COLUMNS), NUM_STOP_IDS=num_stop_ids, BLOCK=triton.next_power_of_2(num_stop_ids),
        num_warps=1,
    )  # fmt: skip


def prepare_rows(slots: Tensor, num_decode: int, state: SlotState, block_size: int, out: StepRows) -> None:
    """`prepare_rows_torch` in one launch."""
    num_rows = slots.shape[0]
    _prepare_rows_kernel[(triton.cdiv(num_rows, 128),)](
        slots, state.last_token, state.num_tokens, state.num_prompt_tokens, state.block_tables, *state.sampling,
        out.token_ids, out.positions, out.slot_mapping, out.num_prompt_tokens, out.seq_lens, *out.sampling,
        out.sample_positions,
        num_rows, num_decode, state.block_tables.stride(0),
        BLOCK_SIZE=block_size, BLOCK=128, num_warps=4,
    )  # fmt: skip


def commit_tokens(
    slots: Tensor, sampled: Tensor, sample_positions: Tensor, last_token: Tensor, num_tokens: Tensor
) -> None:
    """`commit_tokens_torch` in one launch."""
    num_rows = slots.shape[0]
    _commit_tokens_kernel[(triton.cdiv(num_rows, 128),)](
        slots, sampled, sample_positions, last_token, num_tokens, num_rows, BLOCK=128, num_warps=4
    )


def mask_stop_ids(
    logits: Tensor, slots: Tensor, sample_positions: Tensor, min_positions: Tensor, stop_ids: Tensor
) -> None:
    """`mask_stop_ids_torch` in one launch."""
    _mask_stop_ids_kernel[(slots.shape[0],)](
        logits,
        slots,
        sample_positions,
        min_positions,
        stop_ids,
        logits.stride(0),
        stop_ids.shape[1],
        BLOCK=triton.next_power_of_2(stop_ids.shape[1]),
        num_warps=1,
    )
