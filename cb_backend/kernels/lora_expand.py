"""What adapters add to a product: y += scale * B s, of what their A has shrunk its input to (`lora_shrink`).

Items, grid and what a row's result depends on are as there. Knows rows and weights, not whose they are.
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
    next_power_of_2,
    tl,
)
from cb_backend.kernels.lora_plan import ITEM, AdapterPlan, item_at

MAX_SLICES = 3


@jit()
def shrunk_block(pointers, is_row, stride, SPLITS: tl.constexpr):
    """A block of what is shrunk [BLOCK_M, BLOCK_R]: the splits' sum, in their order."""
    inner = tl.load(pointers, mask=is_row[:, None], other=0.0)
    for split in tl.static_range(1, SPLITS):
        inner += tl.load(pointers + split * stride, mask=is_row[:, None], other=0.0)
    return inner


@jit()
def rows_of_b(column_pointers, n, end, RANK: tl.constexpr):
    """Pointers to features n of B [BLOCK_N, BLOCK_R].

    Features past the last are the last again: their sums are not stored, and no load needs a mask for them.
    """
    return column_pointers + tl.minimum(n, end - 1).to(tl.int64)[:, None] * RANK


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
    TILES: tl.constexpr,  # of a program, one after the other; above 1 only where the rank is one block
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """TILES * BLOCK_N output features of one slice, of one item's rows, a program.

    What is shrunk is read and summed once for all of them, which is most of the work where rows are many.
    """
    item, program = tl.program_id(0), tl.program_id(1)
    let_next_start(IS_DEPENDENT)
    if item >= tl.load(counts_ptr):
        await_previous(IS_DEPENDENT)
        return
    adapter, first, count = item_at(items_ptr + item * ITEM)
    m, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    is_row = m < count
    row = tl.load(rows_ptr + first + m, mask=is_row, other=0)
    # Programs of a slice follow those of the one before; none has features of two.
    WIDTH: tl.constexpr = TILES * BLOCK_N
    programs_0, programs_1 = tl.cdiv(size_0, WIDTH), tl.cdiv(size_1, WIDTH)
    index = (program >= programs_0).to(tl.int32) + (program >= programs_0 + programs_1).to(tl.int32)
    begin = tl.where(index == 0, 0, tl.where(index == 1, size_0, size_0 + size_1))
    end = begin + tl.where(index == 0, size_0, tl.where(index == 1, size_1, size_2))
    own = program - tl.where(index == 0, 0, tl.where(index == 1, programs_0, programs_0 + programs_1))
    n = begin + own * WIDTH + tl.arange(0, BLOCK_N)
    b_column_ptr = b_ptr + adapter * b_stride + r[None, :]
    scale = tl.load(scales_ptr + adapter * scales_stride + index)
    b_tile_ptr = rows_of_b(b_column_ptr, n, end, RANK)
    b = tl.load(b_tile_ptr)  # [BLOCK_N, BLOCK_R]
    shrunk_tile_ptr = shrunk_ptr + (first + m)[:, None] * COLUMNS + index * RANK + r[None, :]
    y_row_ptr = y_ptr + row.to(tl.int64)[None, :] * y_stride
    await_previous(IS_DEPENDENT)
    is_stored = (n < end)[:, None] & is_row[None, :]
    if RANK == BLOCK_R:
        # On its way beside what is shrunk; kept through a loop over the rank it would fill too many registers.
        y = tl.load(y_row_ptr + n[:, None], mask=is_stored, other=0.0)
        inner = tl.trans(shrunk_block(shrunk_tile_ptr, is_row, shrunk_stride, SPLITS).to(b.dtype))
        for tile in range(TILES):
            next_n, is_next, next_b, next_y = n, is_stored, b, y
            if TILES > 1:
                next_n = n + BLOCK_N
                is_next = (next_n < end)[:, None] & is_row[None, :] & (tile < TILES - 1)
                next_b = tl.load(rows_of_b(b_column_ptr, next_n, end, RANK))
                next_y = tl.load(y_row_ptr + next_n[:, None], mask=is_next, other=0.0)
            acc = tl.dot(b, inner, input_precision="ieee")
            tl.store(y_row_ptr + n[:, None], added(y.to(tl.float32), scale, acc).to(y.dtype), mask=is_stored)
            n, is_stored, b, y = next_n, is_next, next_b, next_y
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for offset in range(0, RANK, BLOCK_R):
            inner = shrunk_block(shrunk_tile_ptr + offset, is_row, shrunk_stride, SPLITS)
            acc = tl.dot(b, tl.trans(inner.to(b.dtype)), acc, input_precision="ieee")
            next_offset = tl.minimum(offset + BLOCK_R, RANK - BLOCK_R)  # after the last one the last again, for nothing
            b = tl.load(b_tile_ptr + next_offset)
        y = tl.load(y_row_ptr + n[:, None], mask=is_stored, other=0.0)
        tl.store(y_row_ptr + n[:, None], added(y.to(tl.float32), scale, acc).to(y.dtype), mask=is_stored)


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
    block_n, block_r = parameters["block_n"], rank_block(rank, parameters["block_r"])
    tiles = tiles_of_program(-(-sum(slices) // block_n), parameters, block_r == rank)
    num_programs = sum(-(-size // (block_n * tiles)) for size in slices)
    sizes = (*slices, *(0,) * (MAX_SLICES - len(slices)))
    _lora_expand_kernel[(plan.bound, num_programs)](
        y, shrunk, b, scales, *plan[:3], *sizes, shrunk.stride(0), y.stride(0), b.stride(0), scales.stride(0),
        COLUMNS=shrunk.shape[2], RANK=rank, SPLITS=splits, ITEM=ITEM, IS_DEPENDENT=can_overlap(device),
        TILES=tiles, BLOCK_M=plan.tile_rows, BLOCK_N=block_n, BLOCK_R=block_r,
        num_warps=parameters["num_warps"], num_stages=1, **dependent_options(device, y.shape[0]),
    )  # fmt: skip


def tiles_of_program(num_tiles: int, parameters: dict[str, int], is_one_block: bool) -> int:
    """Tiles of each program where an item has `num_tiles`; is_one_block: the rank is summed at once.

    By sizes and the rows of an item alone: by the number of tokens, steps would compile more kernels while they serve.
    """
    return -(-num_tiles // parameters["programs"]) if is_one_block and "programs" in parameters else 1


def rank_block(size: int, most: int) -> int:
    """The largest power of 2 that divides `size`, up to `most`."""
    return min(size & -size, next_power_of_2(most))


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
