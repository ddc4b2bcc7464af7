"""What adapters make of a product's input: A x, each row with the adapter it goes through.

Several projections of one input (q, k and v) are slices of one launch. An item of the plan (`lora_plan`) is a few rows
of one adapter: programs gather them, and those beyond the items in use end at once, so the grid is bounded by the shape
alone. Sums over the input are split by its size alone and added in one order (`lora_expand`), and the weights are the
tall operand whatever the number of rows: a row's result does not depend on the rows beside it. Nor on how many an item
may have, for which the compiler takes other instructions of the tensor cores (`tests/kernels/test_lora_bits.py`, on an
H200). Knows rows and weights, not whose they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.launch import (
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    launch_parameters,
    let_next_start,
    needs_twin,
    next_power_of_2,
    tl,
)
from cb_backend.kernels.lora_plan import ITEM, AdapterPlan, item_at

RANK_STEP = 16  # ranks are multiples of it: the least that tensor cores take
_LEAST_SPLIT, _MOST_SPLITS = 512, 16


@jit()
def _lora_shrink_kernel(
    x_ptr,
    a_ptr,
    rows_ptr,
    items_ptr,
    counts_ptr,
    out_ptr,
    in_size,
    out_stride,  # between splits
    x_stride,
    a_stride,  # between adapters
    COLUMNS: tl.constexpr,  # of the output: slices * rank
    ITEM: tl.constexpr,
    IS_EVEN: tl.constexpr,  # in_size is a multiple of BLOCK_K
    IS_DEPENDENT: tl.constexpr,
    IS_BESIDE: tl.constexpr,  # the kernel before has let this one start when x was complete (`linear_shrink`)
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,  # of the input; a multiple of BLOCK_K
):
    """BLOCK_R columns of one item's rows, over one split of the input, a program.

    Where a block is a whole split, its weights are on their way before the kernel before is complete.
    """
    item, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    let_next_start(IS_DEPENDENT)
    # The plan and the weights were there before the step's first layer (see `launch.can_overlap`).
    if item >= tl.load(counts_ptr):
        await_previous(IS_DEPENDENT)  # a kernel none of whose programs waits would hide what is before it
        return
    adapter, first, count = item_at(items_ptr + item * ITEM)
    m, r, k = tl.arange(0, BLOCK_M), tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    is_row = m < count
    row = tl.load(rows_ptr + first + m, mask=is_row, other=0)
    start = split * SPLIT_SIZE
    # Columns past the last are the last again: their sums are not stored, and no load needs a mask for them.
    a_row_ptr = a_ptr + adapter * a_stride + tl.minimum(r, COLUMNS - 1).to(tl.int64) * in_size
    a_tile_ptr = a_row_ptr[:, None] + (start + k)[None, :]
    x_tile_ptr = x_ptr + row.to(tl.int64)[:, None] * x_stride + (start + k)[None, :]
    if BLOCK_K == SPLIT_SIZE:
        is_inside = (start + k < in_size)[None, :]
        a = tl.load(a_tile_ptr) if IS_EVEN else tl.load(a_tile_ptr, mask=is_inside, other=0.0)  # [BLOCK_R, BLOCK_K]
        await_previous(IS_DEPENDENT and not IS_BESIDE)
        # From L2, where the kernel that wrote x has left it: beside the one before, nothing has told this one's L1.
        x = tl.load(x_tile_ptr, mask=is_row[:, None] & is_inside, other=0.0, cache_modifier=".cg")  # [BLOCK_M, BLOCK_K]
        acc = tl.dot(a, tl.trans(x), input_precision="ieee")
    else:
        await_previous(IS_DEPENDENT and not IS_BESIDE)
        acc = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
        for offset in range(0, tl.minimum(SPLIT_SIZE, in_size - start), BLOCK_K):
            if IS_EVEN:
                a = tl.load(a_tile_ptr + offset)
                x = tl.load(x_tile_ptr + offset, mask=is_row[:, None], other=0.0, cache_modifier=".cg")
            else:
                is_inside = (start + offset + k < in_size)[None, :]
                is_x = is_row[:, None] & is_inside
                a = tl.load(a_tile_ptr + offset, mask=is_inside, other=0.0)
                x = tl.load(x_tile_ptr + offset, mask=is_x, other=0.0, cache_modifier=".cg")
            acc = tl.dot(a, tl.trans(x), acc, input_precision="ieee")
    out_tile_ptr = out_ptr + split.to(tl.int64) * out_stride + (first + m)[None, :] * COLUMNS + r[:, None]
    tl.store(out_tile_ptr, acc, mask=(r < COLUMNS)[:, None] & is_row[None, :])
    await_previous(IS_DEPENDENT and IS_BESIDE)  # who waits for this kernel waits for the one before too


def lora_shrink(x: Tensor, a: Tensor, plan: AdapterPlan) -> Tensor:
    """`lora_shrink_torch` in one launch, with a sum in splits; rows of x may be strided."""
    if needs_twin(x):
        return lora_shrink_torch(x, a, plan)
    out = new_shrunk(x, a)
    launch_shrink(x, a, plan, out)
    return out


def new_shrunk(x: Tensor, a: Tensor) -> Tensor:
    """What the kernel writes to: float32 [splits, num_tokens, columns]."""
    splits = -(-x.shape[1] // split_size_of(x.shape[1]))
    return torch.empty(splits, x.shape[0], a.shape[1], dtype=torch.float32, device=x.device)


def launch_shrink(x: Tensor, a: Tensor, plan: AdapterPlan, out: Tensor, *, is_beside: bool = False) -> None:
    """One launch of the kernel. is_beside: beside the launch before it, which let it start once x was complete."""
    num_rows, in_size = x.shape
    columns, device = a.shape[1], x.device
    parameters = launch_parameters(
        "lora_shrink", device, k=in_size, m=plan.tile_rows, bytes=x.element_size(), rows=next_power_of_2(num_rows)
    )
    split_size = split_size_of(in_size)
    block_k = min(parameters["block_k"], split_size)
    block_r = min(next_power_of_2(columns), next_power_of_2(parameters["block_r"]))
    _lora_shrink_kernel[(plan.bound, -(-columns // block_r), out.shape[0])](
        x, a, *plan[:3], out, in_size, out.stride(0), x.stride(0), a.stride(0),
        COLUMNS=columns, ITEM=ITEM, IS_EVEN=in_size % block_k == 0, IS_DEPENDENT=can_overlap(device),
        IS_BESIDE=is_beside, BLOCK_M=plan.tile_rows, BLOCK_R=block_r, BLOCK_K=block_k, SPLIT_SIZE=split_size,
        num_warps=parameters["num_warps"], num_stages=parameters["num_stages"],
        **dependent_options(device, 1 if is_beside else num_rows),
    )  # fmt: skip


def split_size_of(in_size: int) -> int:
    """By the input's size alone, whatever a launch's parameters: sums in another order would be others."""
    return max(_LEAST_SPLIT, next_power_of_2(-(-in_size // _MOST_SPLITS)))


def lora_shrink_torch(x: Tensor, a: Tensor, plan: AdapterPlan) -> Tensor:
    """A x, in the order of the plan's rows. Sums are fp32.

    x [num_tokens, in_size]; a [max_adapters, slices * rank, in_size] of x's dtype, contiguous but for the adapters'
    stride, rank a multiple of `RANK_STEP`. Returns float32 [splits, num_tokens, slices * rank], whose sum over the
    splits it is; of tokens without an adapter nothing is written.
    """
    out = torch.empty(1, x.shape[0], a.shape[1], dtype=torch.float32, device=x.device)
    for adapter, where in plan.by_item():
        out[0, where] = x[plan.rows[where].long()].float() @ a[adapter].float().t()
    return out
