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


class DecodeInputs(NamedTuple):
    """One decode step's inputs, gathered by slot. Each tensor [B]."""

    token_ids: Tensor  # int32 last known token of the row
    positions: Tensor  # int32 its position
    seq_lens: Tensor  # int32 tokens to attend to, its own included; 0 for padding
    slot_mapping: Tensor  # int32 where its key and value go; 0 for padding
    sampling: SamplingState  # each [B]
    sample_positions: Tensor  # int64 position of the token to be sampled


def empty_decode_inputs(num_rows: int, device: torch.device) -> DecodeInputs:
    """Buffers for `prepare_decode` to fill."""

    def ints() -> Tensor:
        return torch.zeros(num_rows, dtype=torch.int32, device=device)

    def floats() -> Tensor:
        return torch.zeros(num_rows, dtype=torch.float32, device=device)

    def longs() -> Tensor:
        return torch.zeros(num_rows, dtype=torch.int64, device=device)

    sampling = SamplingState(floats(), ints(), floats(), floats(), longs())
    return DecodeInputs(ints(), ints(), ints(), ints(), sampling, longs())


# ---- block table deltas ------------------------------------------------------------------------------------------


def apply_deltas_torch(block_tables: Tensor, deltas: Tensor) -> None:
    """Write block ids into block tables, in place.

    block_tables: int32 [num_slots, max_blocks]; deltas: int32 [N, 3] of (slot, index, block_id), slot -1 = no change.
    """
    slots, indices, block_ids = deltas.long().unbind(1)
    keep = slots >= 0
    block_tables[slots[keep], indices[keep]] = block_ids[keep].to(torch.int32)


# ---- decode inputs -----------------------------------------------------------------------------------------------


def prepare_decode_torch(
    slots: Tensor,
    last_token: Tensor,
    num_tokens: Tensor,
    block_tables: Tensor,
    sampling: SamplingState,
    block_size: int,
    out: DecodeInputs,
) -> None:
    """Gather one decode step's inputs by slot into `out`.

    slots: int32 [B]; last_token, num_tokens: int32 [num_slots] (num_tokens counts the last token); block_tables:
    int32 [num_slots, max_blocks].
    """
    index = slots.long()
    seq_lens = num_tokens[index]
    positions = (seq_lens - 1).clamp(min=0)
    block_ids = block_tables[index, (positions // block_size).long()]
    is_row = seq_lens > 0
    out.token_ids.copy_(last_token[index])
    out.positions.copy_(positions)
    out.seq_lens.copy_(seq_lens)
    out.slot_mapping.copy_(torch.where(is_row, block_ids * block_size + positions % block_size, 0))
    out.sample_positions.copy_(seq_lens)
    for gathered, values in zip(out.sampling, sampling, strict=True):
        gathered.copy_(values[index])


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

    @triton.jit
    def _apply_deltas_kernel(block_tables_ptr, deltas_ptr, num_deltas, table_stride, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_row = row < num_deltas
        slot = tl.load(deltas_ptr + row * 3, mask=is_row, other=-1)
        index = tl.load(deltas_ptr + row * 3 + 1, mask=is_row, other=0)
        block_id = tl.load(deltas_ptr + row * 3 + 2, mask=is_row, other=0)
        tl.store(block_tables_ptr + slot.to(tl.int64) * table_stride + index, block_id, mask=slot >= 0)

    @triton.jit
    def _prepare_decode_kernel(
        slots_ptr,
        last_token_ptr,
        num_tokens_ptr,
        block_tables_ptr,
        temperature_ptr,
        top_k_ptr,
        top_p_ptr,
        min_p_ptr,
        seeds_ptr,
        out_token_ids_ptr,
        out_positions_ptr,
        out_seq_lens_ptr,
        out_slot_mapping_ptr,
        out_temperature_ptr,
        out_top_k_ptr,
        out_top_p_ptr,
        out_min_p_ptr,
        out_seeds_ptr,
        out_sample_positions_ptr,
        num_rows,
        table_stride,
        BLOCK_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_row = row < num_rows
        slot = tl.load(slots_ptr + row, mask=is_row, other=0).to(tl.int64)
        seq_len = tl.load(num_tokens_ptr + slot, mask=is_row, other=0)
        position = tl.maximum(seq_len - 1, 0)
        block_id = tl.load(
            block_tables_ptr + slot * table_stride + position // BLOCK_SIZE, mask=is_row & (seq_len > 0), other=0
        )
        mapping = tl.where(seq_len > 0, block_id * BLOCK_SIZE + position % BLOCK_SIZE, 0)
        tl.store(out_token_ids_ptr + row, tl.load(last_token_ptr + slot, mask=is_row, other=0), mask=is_row)
        tl.store(out_positions_ptr + row, position, mask=is_row)
        tl.store(out_seq_lens_ptr + row, seq_len, mask=is_row)
        tl.store(out_slot_mapping_ptr + row, mapping, mask=is_row)
        tl.store(out_temperature_ptr + row, tl.load(temperature_ptr + slot, mask=is_row, other=0.0), mask=is_row)
        tl.store(out_top_k_ptr + row, tl.load(top_k_ptr + slot, mask=is_row, other=0), mask=is_row)
        tl.store(out_top_p_ptr + row, tl.load(top_p_ptr + slot, mask=is_row, other=1.0), mask=is_row)
        tl.store(out_min_p_ptr + row, tl.load(min_p_ptr + slot, mask=is_row, other=0.0), mask=is_row)
        tl.store(out_seeds_ptr + row, tl.load(seeds_ptr + slot, mask=is_row, other=0), mask=is_row)
        tl.store(out_sample_positions_ptr + row, seq_len.to(tl.int64), mask=is_row)

    @triton.jit
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


def prepare_decode(
    slots: Tensor,
    last_token: Tensor,
    num_tokens: Tensor,
    block_tables: Tensor,
    sampling: SamplingState,
    block_size: int,
    out: DecodeInputs,
) -> None:
    """`prepare_decode_torch` in one launch."""
    num_rows = slots.shape[0]
    _prepare_decode_kernel[(triton.cdiv(num_rows, 128),)](
        slots, last_token, num_tokens, block_tables, *sampling,  # inputs
        out.token_ids, out.positions, out.seq_lens, out.slot_mapping, *out.sampling, out.sample_positions,  # outputs
        num_rows, block_tables.stride(0),  # sizes
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
