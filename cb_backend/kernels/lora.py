"""The part of a product that adapters add: y += scale * B (A x), each row with the adapter it goes through, or none.

A is shrunk to first and B expanded from; several projections of one input (q, k and v) are slices of one pair of
launches. An item of the plan (`lora_plan`) is a few rows of one adapter: programs gather them, and those beyond the
items in use end at once, so the grid is bounded by the shape alone. Sums over the input are split by its size alone and
added in one order, and the weights are the tall operand whatever the number of rows: a row's result does not depend on
the rows beside it. Knows rows and weights, not whose they are.
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

MAX_SLICES = 3
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
    a_tile_ptr = a_ptr + adapter * a_stride + r.to(tl.int64)[:, None] * in_size + (start + k)[None, :]
    x_tile_ptr = x_ptr + row.to(tl.int64)[:, None] * x_stride + (start + k)[None, :]
    if BLOCK_K == SPLIT_SIZE:
        is_inside = (start + k < in_size)[None, :]
        a = tl.load(a_tile_ptr) if IS_EVEN else tl.load(a_tile_ptr, mask=is_inside, other=0.0)  # [BLOCK_R, BLOCK_K]
        await_previous(IS_DEPENDENT)
        x = tl.load(x_tile_ptr, mask=is_row[:, None] & is_inside, other=0.0)  # [BLOCK_M, BLOCK_K]
        acc = tl.dot(a, tl.trans(x), input_precision="ieee")
    else:
        await_previous(IS_DEPENDENT)
        acc = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
        for offset in range(0, tl.minimum(SPLIT_SIZE, in_size - start), BLOCK_K):
            if IS_EVEN:
                a = tl.load(a_tile_ptr + offset)
                x = tl.load(x_tile_ptr + offset, mask=is_row[:, None], other=0.0)
            else:
                is_inside = (start + offset + k < in_size)[None, :]
                a = tl.load(a_tile_ptr + offset, mask=is_inside, other=0.0)
                x = tl.load(x_tile_ptr + offset, mask=is_row[:, None] & is_inside, other=0.0)
            acc = tl.dot(a, tl.trans(x), acc, input_precision="ieee")
    out_tile_ptr = out_ptr + split.to(tl.int64) * out_stride + (first + m)[None, :] * COLUMNS + r[:, None]
    tl.store(out_tile_ptr, acc, mask=is_row[None, :])


def lora_shrink(x: Tensor, a: Tensor, plan: AdapterPlan) -> Tensor:
    """`lora_shrink_torch` in one launch, with a sum in splits; rows of x may be strided."""
    if needs_twin(x):
        return lora_shrink_torch(x, a, plan)
    num_rows, in_size = x.shape
    columns, device = a.shape[1], x.device
    parameters = launch_parameters("lora_shrink", device, k=in_size, m=plan.tile_rows, bytes=x.element_size())
    split_size = split_size_of(in_size)
    block_k, splits = min(parameters["block_k"], split_size), -(-in_size // split_size)
    block_r = rank_block(columns, parameters["block_r"])
    out = torch.empty(splits, num_rows, columns, dtype=torch.float32, device=device)
    _lora_shrink_kernel[(plan.bound, columns // block_r, splits)](
        x, a, *plan[:3], out, in_size, out.stride(0), x.stride(0), a.stride(0),
        COLUMNS=columns, ITEM=ITEM, IS_EVEN=in_size % block_k == 0, IS_DEPENDENT=can_overlap(device),
        BLOCK_M=plan.tile_rows, BLOCK_R=block_r, BLOCK_K=block_k, SPLIT_SIZE=split_size,
        num_warps=parameters["num_warps"], num_stages=parameters["num_stages"],
        **dependent_options(device, num_rows),
    )  # fmt: skip
    return out


@jit()
def shrunk_block(pointers, is_row, stride, SPLITS: tl.constexpr):
    """A block of what is shrunk [BLOCK_M, BLOCK_R]: the splits' sum, in their order."""
    inner = tl.load(pointers, mask=is_row[:, None], other=0.0)
    for split in tl.static_range(1, SPLITS):
        inner += tl.load(pointers + split * stride, mask=is_row[:, None], other=0.0)
    return inner


@jit()
def added(y, scale, acc):
    """y + scale * acc, rounded once in every kernel: left to the compiler, it is so in some of them."""
    return tl.fma(scale, acc, y)


@jit()
def _lora_expand_kernel(
    y_ptr,
    shrunk_ptr,
    b_ptr,
    scales_ptr,
    rows_ptr,
    items_ptr,
    counts_ptr,
    size_0,  # output features of the slices
    size_1,
    size_2,
    shrunk_stride,  # between splits
    y_stride,
    b_stride,  # between adapters
    scales_stride,
    COLUMNS: tl.constexpr,  # of what is shrunk: slices * RANK
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ITEM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """BLOCK_N output features of one slice, of one item's rows, a program."""
    item, tile = tl.program_id(0), tl.program_id(1)
    let_next_start(IS_DEPENDENT)
    if item >= tl.load(counts_ptr):
        await_previous(IS_DEPENDENT)
        return
    adapter, first, count = item_at(items_ptr + item * ITEM)
    m, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    is_row = m < count
    row = tl.load(rows_ptr + first + m, mask=is_row, other=0)
    # Tiles of a slice follow those of the one before; none has features of two.
    tiles_0, tiles_1 = tl.cdiv(size_0, BLOCK_N), tl.cdiv(size_1, BLOCK_N)
    index = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_0 + tiles_1).to(tl.int32)
    begin = tl.where(index == 0, 0, tl.where(index == 1, size_0, size_0 + size_1))
    end = begin + tl.where(index == 0, size_0, tl.where(index == 1, size_1, size_2))
    own_tile = tile - tl.where(index == 0, 0, tl.where(index == 1, tiles_0, tiles_0 + tiles_1))
    n = begin + own_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Features past the last are the last again: their sums are not stored, and no load needs a mask for them.
    b_tile_ptr = b_ptr + adapter * b_stride + tl.minimum(n, end - 1).to(tl.int64)[:, None] * RANK + r[None, :]
    scale = tl.load(scales_ptr + adapter * scales_stride + index)
    b = tl.load(b_tile_ptr)  # [BLOCK_N, BLOCK_R]
    shrunk_tile_ptr = shrunk_ptr + (first + m)[:, None] * COLUMNS + index * RANK + r[None, :]
    await_previous(IS_DEPENDENT)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for offset in range(0, RANK, BLOCK_R):
        inner = shrunk_block(shrunk_tile_ptr + offset, is_row, shrunk_stride, SPLITS)
        acc = tl.dot(b, tl.trans(inner.to(b.dtype)), acc, input_precision="ieee")
        if RANK > BLOCK_R:
            next_offset = tl.minimum(offset + BLOCK_R, RANK - BLOCK_R)  # after the last one the last again, for nothing
            b = tl.load(b_tile_ptr + next_offset)
    y_tile_ptr = y_ptr + row.to(tl.int64)[None, :] * y_stride + n[:, None]
    is_stored = (n < end)[:, None] & is_row[None, :]
    y = tl.load(y_tile_ptr, mask=is_stored, other=0.0).to(tl.float32)
    tl.store(y_tile_ptr, added(y, scale, acc).to(y_ptr.dtype.element_ty), mask=is_stored)


def lora_expand(
    y: Tensor, shrunk: Tensor, b: Tensor, scales: Tensor, slices: tuple[int, ...], plan: AdapterPlan
) -> None:
    """`lora_expand_torch` in one launch; rows of y may be strided."""
    if needs_twin(y):
        lora_expand_torch(y, shrunk, b, scales, slices, plan)
        return
    assert len(slices) <= MAX_SLICES, "the kernel has room for q, k and v"
    device, rank, splits = y.device, b.shape[2], shrunk.shape[0]
    parameters = launch_parameters("lora_expand", device, n=sum(slices), m=plan.tile_rows, bytes=y.element_size())
    block_n = parameters["block_n"]
    num_tiles = sum(-(-size // block_n) for size in slices)
    sizes = (*slices, *(0,) * (MAX_SLICES - len(slices)))
    _lora_expand_kernel[(plan.bound, num_tiles)](
        y, shrunk, b, scales, *plan[:3], *sizes, shrunk.stride(0), y.stride(0), b.stride(0), scales.stride(0),
        COLUMNS=shrunk.shape[2], RANK=rank, SPLITS=splits, ITEM=ITEM, IS_DEPENDENT=can_overlap(device),
        BLOCK_M=plan.tile_rows, BLOCK_N=block_n, BLOCK_R=rank_block(rank, parameters["block_r"]),
        num_warps=parameters["num_warps"], num_stages=1, **dependent_options(device, y.shape[0]),
    )  # fmt: skip


def split_size_of(in_size: int) -> int:
    """By the input's size alone, whatever a launch's parameters: sums in another order would be others."""
    return max(_LEAST_SPLIT, next_power_of_2(-(-in_size // _MOST_SPLITS)))


def rank_block(size: int, most: int) -> int:
    """The largest power of 2 that divides `size`, up to `most`."""
    return min(size & -size, next_power_of_2(most))


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


def lora_expand_torch(
    y: Tensor, shrunk: Tensor, b: Tensor, scales: Tensor, slices: tuple[int, ...], plan: AdapterPlan
) -> None:
    """y += scale * B shrunk for tokens with an adapter, in place; the others are left as they are.

    y [num_tokens, sum of slices]; shrunk as of `lora_shrink_torch`, rounded to y's dtype before the product; b
    [max_adapters, sum of slices, rank] of y's dtype, contiguous but for the adapters' stride; scales float32
    [max_adapters, slices]. slices: output features of each. Product and sum are fp32, rounded once.
    """
    rank = b.shape[2]
    for adapter, where in plan.by_item():
        rows = plan.rows[where].long()
        inner = shrunk[:, where].sum(dim=0).to(y.dtype).float()
        begin = 0
        for index, size in enumerate(slices):
            features = slice(begin, begin + size)
            added = inner[:, index * rank : (index + 1) * rank] @ b[adapter, features].float().t()
            y[rows, features] = (y[rows, features].float() + scales[adapter, index] * added).to(y.dtype)
            begin += size
