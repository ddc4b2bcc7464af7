"""What blocks of 32 elements need beside `packed_tile`: bytes with a scale for 32 of them, and shifts.

A part of a row's 128 bytes has two groups of 32, in the halves of its words; each half is a product of its own, so its
sum can have its scale. A shift adds the same to all of a group's elements: to the product it adds itself times the sum
of the group's inputs, which is exact and costs no element an instruction. These sums are made once, before.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cb_backend.kernels.launch import jit, tl
from cb_backend.kernels.packed_tile import two_parts

GROUP = 32


@jit()
def bytes_product(
    acc,  # fp32 [BLOCK_N, BLOCK_M]: the sums so far
    x_ptr,  # [BLOCK_M, 1]: each input row's element at the block's first column
    is_row,  # [BLOCK_M, 1]
    columns_left,  # of in_size from that column on; not looked at where IS_EVEN
    words_ptr,  # [BLOCK_N]: each row's first word of the block
    scales,  # four of [BLOCK_N]: the groups'
    zeros,  # the same, where HAS_ZEROS
    HAS_ZEROS: tl.constexpr,  # else 128 is taken off every element
    IS_EVEN: tl.constexpr,
    HAS_ASSEMBLY: tl.constexpr,
):
    """acc + W x^T over one block of 128 columns of BLOCK_N rows of W: int8 in groups of 32."""
    dtype = x_ptr.dtype.element_ty
    c = tl.arange(0, 32)[None, :]
    for half in tl.static_range(2):
        words = tl.load(words_ptr[:, None] + half * 32 + c, eviction_policy="evict_first")
        if HAS_ZEROS:
            first = tl.broadcast_to(zeros[half].to(dtype)[:, None], words.shape)
            second = tl.broadcast_to(zeros[2 + half].to(dtype)[:, None], words.shape)
        else:
            first = tl.full(words.shape, 128.0, dtype)
            second = first
        parts = two_parts(words, first, second, "int8", dtype, HAS_ASSEMBLY)
        for q in tl.static_range(2):
            column = q * 64 + half * 32 + c
            if IS_EVEN:
                x = tl.load(x_ptr + column, mask=is_row, other=0.0)
            else:
                x = tl.load(x_ptr + column, mask=is_row & (column < columns_left), other=0.0)
            sums = tl.dot(parts[q], tl.trans(x), input_precision="ieee")
            acc += sums * scales[2 * q + half].to(tl.float32)[:, None]
    return acc


@jit()
def add_shifts(acc, sums_ptr, is_row, groups_left, shifts):
    """acc + S x^T over the same block, S having each group's shift in all of its 32 columns. shifts: as the scales.

    sums_ptr [1, BLOCK_M]: each input row's sum over the block's first group, the others' behind it, groups_left in all.
    """
    for group in tl.static_range(4):
        sums = tl.load(sums_ptr + group, mask=is_row & (group < groups_left), other=0.0)
        acc += shifts[group].to(tl.float32)[:, None] * sums
    return acc


def group_sums(x: Tensor) -> Tensor:
    """Sums [num_rows, groups] in float32 of each 32 columns of x [num_rows, in_size]; the last group may be smaller."""
    if x.shape[1] % GROUP:
        x = functional.pad(x, (0, -x.shape[1] % GROUP))
    return x.unflatten(1, (-1, GROUP)).sum(-1, dtype=torch.float32)
