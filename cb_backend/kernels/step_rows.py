"""The rows of one step: what they read of their slots before the model runs, and what they write after it.

With these a decode step runs without the host: its input tokens, positions and cache cells come from the slot state,
and the sampled tokens go back there. Rows of padding name the last slot (see `slot_state`).

Each function has a torch twin of the same signature (`<name>_torch`), the specification and the CPU path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cb_backend.contracts.step import RowStatus
from cb_backend.kernels.launch import (
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    let_next_start,
    next_power_of_2,
    tl,
)
from cb_backend.kernels.row_sampling import RowSampling
from cb_backend.kernels.slot_state import SlotState


class StepRows(NamedTuple):
    """What `prepare_rows` fills in for one step. The first `num_decode` rows decode; the rest only sample."""

    token_ids: Tensor  # int32 [>= num_decode] last known token of the row
    positions: Tensor  # int32 [>= num_decode] its position
    # int32 [>= num_decode] where its key and value go; 0 for padding. [num_groups, >= num_decode] where layers are
    # in several groups, each with tables of its own
    slot_mapping: Tensor
    num_prompt_tokens: Tensor  # int32 [>= num_decode]
    seq_lens: Tensor  # int32 [>= num_decode] tokens to attend to, its own included; 0 for padding
    sampling: RowSampling  # each [num_rows]
    sample_positions: Tensor  # int64 [num_rows] position of the token to be sampled; 0 for padding


@jit("num_rows", "num_decode")
def _prepare_rows_kernel(
    slots_ptr,
    last_token_ptr,
    num_tokens_ptr,
    num_prompt_tokens_ptr,
    block_tables_ptr,
    sampling,
    out_token_ids_ptr,
    out_positions_ptr,
    out_slot_mapping_ptr,
    out_num_prompt_tokens_ptr,
    out_seq_lens_ptr,
    out_sampling,
    out_sample_positions_ptr,
    num_rows,
    num_decode,
    table_stride,
    group_stride,
    mapping_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    let_next_start(IS_DEPENDENT)
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    slot = tl.load(slots_ptr + row, mask=is_row, other=0).to(tl.int64)
    num_tokens = tl.load(num_tokens_ptr + slot, mask=is_row, other=0)
    for index in tl.static_range(len(sampling)):
        tl.store(out_sampling[index] + row, tl.load(sampling[index] + slot, mask=is_row, other=0), mask=is_row)
    tl.store(out_sample_positions_ptr + row, num_tokens.to(tl.int64), mask=is_row)
    is_row = row < num_decode
    position = tl.maximum(num_tokens - 1, 0)
    table_ptr = block_tables_ptr + slot * table_stride + position // BLOCK_SIZE
    for group in tl.static_range(NUM_GROUPS):
        block_id = tl.load(table_ptr + group * group_stride, mask=is_row & (num_tokens > 0), other=0)
        mapping = tl.where(num_tokens > 0, block_id * BLOCK_SIZE + position % BLOCK_SIZE, 0)
        tl.store(out_slot_mapping_ptr + group * mapping_stride + row, mapping, mask=is_row)
    num_prompt_tokens = tl.load(num_prompt_tokens_ptr + slot, mask=is_row, other=0)
    tl.store(out_token_ids_ptr + row, tl.load(last_token_ptr + slot, mask=is_row, other=0), mask=is_row)
    tl.store(out_positions_ptr + row, position, mask=is_row)
    tl.store(out_num_prompt_tokens_ptr + row, num_prompt_tokens, mask=is_row)
    tl.store(out_seq_lens_ptr + row, num_tokens, mask=is_row)


def prepare_rows(slots: Tensor, num_decode: int, state: SlotState, block_size: int, out: StepRows) -> None:
    """`prepare_rows_torch` in one launch."""
    num_rows, num_groups = slots.shape[0], state.num_groups
    _prepare_rows_kernel[(-(-num_rows // 128),)](
        slots, state.last_token, state.num_tokens, state.num_prompt_tokens, state.block_tables, tuple(state.sampling),
        out.token_ids, out.positions, out.slot_mapping, out.num_prompt_tokens, out.seq_lens, tuple(out.sampling),
        out.sample_positions,
        num_rows, num_decode, state.block_tables.stride(0),
        state.block_tables.stride(0) * state.num_tokens.shape[0] if num_groups > 1 else 0,
        out.slot_mapping.stride(0) if num_groups > 1 else 0,
        BLOCK_SIZE=block_size, NUM_GROUPS=num_groups, IS_DEPENDENT=can_overlap(slots.device), BLOCK=128,
        num_warps=4, **dependent_options(slots.device, num_rows),
    )  # fmt: skip


def prepare_rows_torch(slots: Tensor, num_decode: int, state: SlotState, block_size: int, out: StepRows) -> None:
    """Gather a step's rows by slot into `out`. slots: int32 [num_rows], of which the first `num_decode` decode."""
    index = slots.long()
    num_tokens = state.num_tokens[index]
    out.sample_positions.copy_(num_tokens)
    for gathered, values in zip(out.sampling, state.sampling, strict=True):
        gathered.copy_(values[index])
    index, num_tokens = index[:num_decode], num_tokens[:num_decode]
    positions = (num_tokens - 1).clamp(min=0)
    blocks = state.tables[:, index, (positions // block_size).long()]  # [num_groups, num_decode]
    cells = blocks * block_size + positions % block_size
    out.token_ids[:num_decode] = state.last_token[index]
    out.positions[:num_decode] = positions
    out.slot_mapping.view(len(cells), -1)[:, :num_decode] = torch.where(num_tokens > 0, cells, 0)
    out.num_prompt_tokens[:num_decode] = state.num_prompt_tokens[index]
    out.seq_lens[:num_decode] = num_tokens


_COMMIT_ROWS = 4  # a program of one warp


@jit("num_rows")
def _commit_tokens_kernel(
    slots_ptr,
    sampled_ptr,
    is_failed_ptr,
    sample_positions_ptr,
    min_positions_ptr,
    last_token_ptr,
    num_tokens_ptr,
    max_total_tokens_ptr,
    stop_ids_ptr,
    result_ptr,
    num_rows,
    NOT_FINITE: tl.constexpr,
    ENDED: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
    STOP_BLOCK: tl.constexpr,
):
    let_next_start(IS_DEPENDENT)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    # All but the sampler's results was there before the step's first layer (see `launch.can_overlap`): it is read while
    # the sampler works, so that a step does not wait for stop ids that most rows do not have.
    position = tl.load(sample_positions_ptr + row, mask=is_row, other=0)
    keep = position > 0
    slot = tl.load(slots_ptr + row, mask=is_row, other=0).to(tl.int64)
    column = tl.arange(0, STOP_BLOCK)
    stop_ids = tl.load(
        stop_ids_ptr + slot[:, None] * NUM_STOP_IDS + column[None, :],
        mask=keep[:, None] & (column < NUM_STOP_IDS)[None, :],
        other=-1,
    )
    num_tokens = (position + 1).to(tl.int32)
    may_stop = num_tokens >= tl.load(min_positions_ptr + slot, mask=keep, other=0)
    is_last = num_tokens >= tl.load(max_total_tokens_ptr + slot, mask=keep, other=0)
    await_previous(IS_DEPENDENT)
    token_id = tl.load(sampled_ptr + row, mask=is_row, other=0)
    is_failed = tl.load(is_failed_ptr + row, mask=is_row, other=0).to(tl.int1)
    is_stop = tl.max((stop_ids == token_id[:, None]).to(tl.int32), axis=1) > 0
    is_last = is_last | is_failed | (is_stop & may_stop)
    tl.store(last_token_ptr + slot, token_id, mask=keep)
    tl.store(num_tokens_ptr + slot, tl.where(is_last, 0, num_tokens), mask=keep)
    tl.store(result_ptr + row, token_id, mask=is_row)
    code = tl.where(keep, tl.where(is_failed, NOT_FINITE, 0), ENDED)
    tl.store(result_ptr + num_rows + row, code, mask=is_row)


def commit_tokens(
    slots: Tensor,
    sampled: Tensor,
    is_failed: Tensor,
    sample_positions: Tensor,
    min_positions: Tensor,
    state: SlotState,
    result: Tensor,
) -> None:
    """`commit_tokens_torch` in one launch. `result` is contiguous.

    All but `sampled` and `is_failed` may be read before the kernels launched since the last plain launch are complete:
    none of them must have written it.
    """
    num_rows, num_stop_ids = slots.shape[0], state.stop_ids.shape[1]
    _commit_tokens_kernel[(-(-num_rows // _COMMIT_ROWS),)](
        slots, sampled, is_failed, sample_positions, min_positions,
        state.last_token, state.num_tokens, state.max_total_tokens, state.stop_ids, result, num_rows,
        NOT_FINITE=int(RowStatus.NOT_FINITE), ENDED=int(RowStatus.ENDED), NUM_STOP_IDS=num_stop_ids,
        IS_DEPENDENT=can_overlap(slots.device), BLOCK=_COMMIT_ROWS, STOP_BLOCK=next_power_of_2(num_stop_ids),
        num_warps=1, **dependent_options(slots.device, num_rows),
    )  # fmt: skip


def commit_tokens_torch(
    slots: Tensor,
    sampled: Tensor,
    is_failed: Tensor,
    sample_positions: Tensor,
    min_positions: Tensor,
    state: SlotState,
    result: Tensor,
) -> None:
    """Make the sampled tokens the last tokens of their slots, in place, and end the slots whose last token it is.

    slots, sampled: int32 [B]; is_failed: bool [B]; sample_positions: int64 [B]; min_positions: int32 [num_slots], a
    stop id at or behind that many tokens ends the slot; result: int32 [2, B], what the host reads: `sampled` and
    `RowStatus`: NOT_FINITE where it failed, ENDED where there was nothing to sample. Such rows (position 0: padding,
    and slots that have ended) change nothing. A slot that ends gets no tokens (`num_tokens` 0): it is padding from
    then on.
    """
    result[0].copy_(sampled)
    index, keep = slots.long(), sample_positions > 0
    num_tokens = (sample_positions + 1).to(torch.int32)
    is_stop = (state.stop_ids[index] == sampled[:, None]).any(dim=1) & (num_tokens >= min_positions[index])
    is_last = is_stop | is_failed | (num_tokens >= state.max_total_tokens[index])
    result[1].copy_(torch.where(keep, torch.where(is_failed, RowStatus.NOT_FINITE, RowStatus.OK), RowStatus.ENDED))
    index = index[keep]
    state.last_token[index] = sampled[keep]
    state.num_tokens[index] = torch.where(is_last, 0, num_tokens)[keep]


@jit()
def _mask_stop_ids_kernel(
    logits_ptr,
    slots_ptr,
    sample_positions_ptr,
    min_positions_ptr,
    stop_ids_ptr,
    logits_stride,
    num_stop_ids,
    IS_DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    let_next_start(IS_DEPENDENT)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    is_too_short = tl.load(sample_positions_ptr + row) < tl.load(min_positions_ptr + slot)
    # Which was there before the step's first layer; the logits are just being made.
    await_previous(IS_DEPENDENT)
    if is_too_short:
        column = tl.arange(0, BLOCK)
        token_id = tl.load(stop_ids_ptr + slot * num_stop_ids + column, mask=column < num_stop_ids, other=-1)
        tl.store(logits_ptr + row.to(tl.int64) * logits_stride + token_id, float("-inf"), mask=token_id >= 0)


def mask_stop_ids(
    logits: Tensor, slots: Tensor, sample_positions: Tensor, min_positions: Tensor, stop_ids: Tensor
) -> None:
    """`mask_stop_ids_torch` in one launch. All but the logits may be read early, as in `commit_tokens`."""
    _mask_stop_ids_kernel[(slots.shape[0],)](
        logits, slots, sample_positions, min_positions, stop_ids, logits.stride(0), stop_ids.shape[1],
        IS_DEPENDENT=can_overlap(logits.device), BLOCK=next_power_of_2(stop_ids.shape[1]),
        num_warps=1, **dependent_options(logits.device, slots.shape[0]),
    )  # fmt: skip


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
