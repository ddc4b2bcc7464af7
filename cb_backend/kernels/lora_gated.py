"""What adapters add to gate and up, and the gated activation of the sums, in one launch: the MLP's middle.

Apart, gate and up would be read and written to be read once more. So every row goes through here, those without an
adapter too: their items follow the adapters' in the plan (`lora_plan`), and of them there is the activation alone. A
row's bits are those of `lora_expand` and then `silu_mul` or `gelu_mul`, where both sum a rank in blocks of one size.
Knows rows and weights, not whose they are.
"""

from __future__ import annotations

from torch import Tensor

from cb_backend.kernels.launch import (
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    launch_parameters,
    let_next_start,
    needs_twin,
    tl,
)
from cb_backend.kernels.lora_expand import (
    added,
    lora_expand_torch,
    rank_block,
    rows_of_b,
    shrunk_block,
    tiles_of_program,
)
from cb_backend.kernels.lora_plan import ITEM, AdapterPlan, item_at
from cb_backend.kernels.silu_mul import gated, gelu_mul_torch, silu_mul_torch


@jit()
def _lora_expand_gated_kernel(
    gate_up_ptr,
    shrunk_ptr,
    b_ptr,
    scales_ptr,
    rows_ptr,
    items_ptr,
    counts_ptr,
    out_ptr,
    intermediate_size,
    shrunk_stride,  # between splits
    gate_up_stride,
    b_stride,  # between adapters
    scales_stride,
    UP_SLICE: tl.constexpr,  # 1; 0 where gate and up are halves of one slice: one scale, one A
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ITEM: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    TILES: tl.constexpr,  # of a program, one after the other; above 1 only where the rank is one block
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """TILES * BLOCK_N intermediate features of one item's rows a program: the gate's and the up projection's.

    What is shrunk is read and summed once for all of them, which is most of the work where rows are many.
    """
    item, program = tl.program_id(0), tl.program_id(1)
    let_next_start(IS_DEPENDENT)
    # The plan and the weights were there before the step's first layer (see `launch.can_overlap`).
    if item >= tl.load(counts_ptr + 1):
        await_previous(IS_DEPENDENT)  # a kernel none of whose programs waits would hide what is before it
        return
    adapter, first, count = item_at(items_ptr + item * ITEM)
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    m, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    n = program * (TILES * BLOCK_N) + tl.arange(0, BLOCK_N)
    is_row = m < count
    row = tl.load(rows_ptr + first + m, mask=is_row, other=0).to(tl.int64)
    is_stored = (n < intermediate_size)[:, None] & is_row[None, :]
    gate_row_ptr = gate_up_ptr + row[None, :] * gate_up_stride
    out_row_ptr = out_ptr + row[None, :] * intermediate_size
    if adapter < 0:
        await_previous(IS_DEPENDENT)
        for _ in range(TILES):
            gate, up = _gate_and_up(gate_row_ptr + n[:, None], intermediate_size, is_stored)  # [BLOCK_N, BLOCK_M]
            tl.store(out_row_ptr + n[:, None], gated(gate, up, dtype, IS_GELU).to(dtype), mask=is_stored)
            n += BLOCK_N
            is_stored = (n < intermediate_size)[:, None] & is_row[None, :]
        return
    b_column_ptr = b_ptr + adapter * b_stride + r[None, :]
    up_shift = tl.cast(intermediate_size, tl.int64) * RANK
    scale_ptr = scales_ptr + adapter * scales_stride
    gate_scale, up_scale = tl.load(scale_ptr), tl.load(scale_ptr + UP_SLICE)
    b_tile_ptr = rows_of_b(b_column_ptr, n, intermediate_size, RANK)
    b, b_up = tl.load(b_tile_ptr), tl.load(b_tile_ptr + up_shift)  # [BLOCK_N, BLOCK_R]
    shrunk_tile_ptr = shrunk_ptr + (first + m)[:, None] * ((1 + UP_SLICE) * RANK) + r[None, :]
    await_previous(IS_DEPENDENT)
    if RANK == BLOCK_R:
        # On their way beside what is shrunk; kept through a loop over the rank they would fill too many registers.
        gate, up = _gate_and_up(gate_row_ptr + n[:, None], intermediate_size, is_stored)
        inner = tl.trans(shrunk_block(shrunk_tile_ptr, is_row, shrunk_stride, SPLITS).to(dtype))
        inner_up = inner
        if UP_SLICE:
            inner_up = tl.trans(shrunk_block(shrunk_tile_ptr + RANK, is_row, shrunk_stride, SPLITS).to(dtype))
        for tile in range(TILES):
            next_n, is_next, next_b, next_b_up, next_gate, next_up = n, is_stored, b, b_up, gate, up
            if TILES > 1:
                next_n = n + BLOCK_N
                is_next = (next_n < intermediate_size)[:, None] & is_row[None, :] & (tile < TILES - 1)
                b_tile_ptr = rows_of_b(b_column_ptr, next_n, intermediate_size, RANK)
                next_b, next_b_up = tl.load(b_tile_ptr), tl.load(b_tile_ptr + up_shift)
                next_gate, next_up = _gate_and_up(gate_row_ptr + next_n[:, None], intermediate_size, is_next)
            acc = tl.dot(b, inner, input_precision="ieee")
            acc_up = tl.dot(b_up, inner_up, input_precision="ieee")
            gate = added(gate.to(tl.float32), gate_scale, acc).to(dtype)
            up = added(up.to(tl.float32), up_scale, acc_up).to(dtype)
            tl.store(out_row_ptr + n[:, None], gated(gate, up, dtype, IS_GELU).to(dtype), mask=is_stored)
            n, is_stored, b, b_up, gate, up = next_n, is_next, next_b, next_b_up, next_gate, next_up
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for offset in range(0, RANK, BLOCK_R):
            inner = shrunk_block(shrunk_tile_ptr + offset, is_row, shrunk_stride, SPLITS)
            inner_up = inner
            if UP_SLICE:
                inner_up = shrunk_block(shrunk_tile_ptr + RANK + offset, is_row, shrunk_stride, SPLITS)
            acc = tl.dot(b, tl.trans(inner.to(dtype)), acc, input_precision="ieee")
            acc_up = tl.dot(b_up, tl.trans(inner_up.to(dtype)), acc_up, input_precision="ieee")
            next_offset = tl.minimum(offset + BLOCK_R, RANK - BLOCK_R)  # after the last the last again, for nothing
            b, b_up = tl.load(b_tile_ptr + next_offset), tl.load(b_tile_ptr + up_shift + next_offset)
        gate, up = _gate_and_up(gate_row_ptr + n[:, None], intermediate_size, is_stored)
        gate = added(gate.to(tl.float32), gate_scale, acc).to(dtype)
        up = added(up.to(tl.float32), up_scale, acc_up).to(dtype)
        tl.store(out_row_ptr + n[:, None], gated(gate, up, dtype, IS_GELU).to(dtype), mask=is_stored)


@jit()
def _gate_and_up(gate_tile_ptr, intermediate_size, is_loaded):
    gate = tl.load(gate_tile_ptr, mask=is_loaded, other=0.0)
    return gate, tl.load(gate_tile_ptr + intermediate_size, mask=is_loaded, other=0.0)


def lora_expand_gated(
    gate_up: Tensor,
    shrunk: Tensor,
    b: Tensor,
    scales: Tensor,
    slices: tuple[int, ...],
    plan: AdapterPlan,
    is_gelu: bool = False,
) -> Tensor:
    """`lora_expand_gated_torch` in one launch; rows of gate_up may be strided."""
    if needs_twin(gate_up):
        return lora_expand_gated_torch(gate_up, shrunk, b, scales, slices, plan, is_gelu)
    num_tokens, intermediate_size = gate_up.shape[0], gate_up.shape[1] // 2
    assert slices in ((intermediate_size, intermediate_size), (2 * intermediate_size,)), "gate and up, of one size"
    assert plan.rows.shape[0] == num_tokens, "every token is an item's, or has no result"
    device, rank, splits = gate_up.device, b.shape[2], shrunk.shape[0]
    parameters = launch_parameters(
        "lora_expand_gated", device, n=intermediate_size, m=plan.tile_rows, bytes=gate_up.element_size()
    )
    block_n, block_r = parameters["block_n"], rank_block(rank, parameters["block_r"])
    num_tiles = -(-intermediate_size // block_n)
    tiles = tiles_of_program(num_tiles, parameters, block_r == rank)
    out = gate_up.new_empty(num_tokens, intermediate_size)
    if num_tokens == 0:
        return out
    _lora_expand_gated_kernel[(plan.bound_of_all, -(-num_tiles // tiles))](
        gate_up, shrunk, b, scales, *plan[:3], out, intermediate_size,
        shrunk.stride(0), gate_up.stride(0), b.stride(0), scales.stride(0),
        UP_SLICE=len(slices) - 1, RANK=rank, SPLITS=splits, ITEM=ITEM, IS_GELU=is_gelu,
        IS_DEPENDENT=can_overlap(device),
        TILES=tiles, BLOCK_M=plan.tile_rows, BLOCK_N=block_n, BLOCK_R=block_r,
        num_warps=parameters["num_warps"], num_stages=1, **dependent_options(device, num_tokens),
    )  # fmt: skip
    return out


def lora_expand_gated_torch(
    gate_up: Tensor,
    shrunk: Tensor,
    b: Tensor,
    scales: Tensor,
    slices: tuple[int, ...],
    plan: AdapterPlan,
    is_gelu: bool = False,
) -> Tensor:
    """silu(gate) * up, or gelu(gate) * up, of gate_up [num_tokens, 2 * intermediate_size] (gate first) and what
    adapters add to it. The plan is one of as many tokens.

    Returns [num_tokens, intermediate_size], all tokens'; gate_up stays as it is. The other arguments are as of
    `lora_expand_torch`; slices are gate and up of one size, or both as one. Sums are rounded before the activation.
    """
    added_to = gate_up.clone()
    lora_expand_torch(added_to, shrunk, b, scales, slices, plan)
    return gelu_mul_torch(added_to) if is_gelu else silu_mul_torch(added_to)
