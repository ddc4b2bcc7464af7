"""The kernel of products with packed weights: a tile of the weight and of the rows a program, or a split of one's sum.

Knows numbers in memory, not the tuned table.
"""

from __future__ import annotations

from cb_backend.kernels.launch import await_previous, jit, let_next_start, tl
from cb_backend.kernels.linear_one_row import prefetch
from cb_backend.kernels.packed_groups import add_shifts, bytes_product
from cb_backend.kernels.packed_tile import each_number, each_of_four, load_group, tile_product
from cb_backend.kernels.silu_mul import gated
from cb_backend.kernels.split_sums import sum_splits


@jit()
def block_scales(pointer, stride, rows, block, GROUPS: tl.constexpr, GROUP_BLOCKS: tl.constexpr):
    """Scales (or zero points) of a block of 128 columns, four a row: those of `tile_product`'s first halves."""
    if GROUPS == 8:
        return load_group(pointer + block * 8 * stride, 2 * stride, rows, 0, 4)
    elif GROUPS > 1:
        return load_group(pointer, stride, rows, block * GROUPS, GROUPS)
    elif GROUPS == 1:
        return load_group(pointer, stride, rows, block // GROUP_BLOCKS, 1)
    else:
        return load_group(pointer, stride, rows, 0, 1)


@jit()
def _interleaved(acc, dtype: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """silu(gate) * up [BLOCK_M, BLOCK_N / 2] of sums [BLOCK_N, BLOCK_M] whose rows are gate and up in turn."""
    gate, up = tl.split(tl.reshape(tl.trans(acc), [BLOCK_M, BLOCK_N // 2, 2]))
    return gated(gate, up, dtype)


@jit("num_rows")
def _linear_packed_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    shifts_ptr,
    sums_ptr,  # of each 32 columns of x, where HAS_SHIFTS
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    out_size,
    in_size,
    num_blocks,
    split_blocks,
    x_stride,
    scale_stride,
    global_scale,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,  # 16-bit words of a row's 128 elements
    GROUPS: tl.constexpr,  # of 128 columns; 0: one for all of in_size
    GROUP_BLOCKS: tl.constexpr,  # blocks of 128 columns in a group, where it has more than one
    IS_SCALED_AFTER: tl.constexpr,  # scales of groups multiply sums, not elements
    JOIN: tl.constexpr,  # parts of a word in one product of the tensor cores, at most
    HAS_ZEROS: tl.constexpr,
    HAS_SHIFTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,  # rows of the weight are gate and up in turn
    IS_EVEN: tl.constexpr,  # in_size is a multiple of 128
    SPLITS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    PREFETCH: tl.constexpr,  # bytes of each 64 rows brought to L2 while waiting
    HAS_ASSEMBLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N rows of the weight with BLOCK_M rows of x, summed over one split of the input size, a program."""
    tile, split, m_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, c = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, WORDS)
    m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    start = split * split_blocks
    end = tl.minimum(start + split_blocks, num_blocks)
    # Rows past the last are the last again: their sums are not stored, and no load needs a mask for them.
    n_there = tl.minimum(n, out_size - 1)
    tile_words = tl.cast(num_blocks, tl.int64) * (64 * WORDS)
    values_row_ptr = values_ptr + (n_there // 64) * tile_words + (n_there % 64) * WORDS
    let_next_start(IS_DEPENDENT)
    if IS_DEPENDENT:
        piece = tl.minimum(tile * BLOCK_N // 64 + tl.arange(0, (BLOCK_N + 63) // 64), (out_size - 1) // 64)
        num_bytes = tl.minimum(PREFETCH, (end - start) * (128 * WORDS))
        prefetch(values_ptr + piece * tile_words + start * (64 * WORDS), num_bytes, (BLOCK_N + 63) // 64, PREFETCH > 0)
    # Of the first block; weights may be read before waiting.
    scales = block_scales(scales_ptr, scale_stride, n_there, start, GROUPS, GROUP_BLOCKS)
    second, zeros = scales, scales
    if GROUPS == 8:
        second = block_scales(scales_ptr + scale_stride, scale_stride, n_there, start, GROUPS, GROUP_BLOCKS)
    if HAS_ZEROS:
        zeros = block_scales(zeros_ptr, scale_stride, n_there, start, GROUPS, GROUP_BLOCKS)
    shifts = scales
    if HAS_SHIFTS:
        shifts = block_scales(shifts_ptr, scale_stride, n_there, start, GROUPS, GROUP_BLOCKS)
    await_previous(IS_DEPENDENT)
    is_row = (m < num_rows)[:, None]
    x_row_ptr = x_ptr + m[:, None] * x_stride
    num_groups = (in_size + 31) // 32
    sums_row_ptr = sums_ptr
    if HAS_SHIFTS:
        sums_row_ptr = sums_ptr + m[None, :] * num_groups
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    SCALE: tl.constexpr = scales_ptr.dtype.element_ty
    RUN: tl.constexpr = 128 // WORDS // max(GROUPS, 1) if IS_SCALED_AFTER else 128 // WORDS
    for block in range(start, end):
        if WORDS == 32 or GROUPS != 4:
            words = tl.load(values_row_ptr[:, None] + block * (64 * WORDS) + c[None, :], eviction_policy="evict_first")
        # The next block's scales are asked for now: loads this narrow are not pipelined by the compiler.
        scale, second_scale = each_of_four(scales, n_there, SCALE), each_of_four(second, n_there, SCALE)
        if HAS_SHIFTS:  # nothing is taken off what is stored
            nothing = tl.zeros([BLOCK_N], tl.float32)
            zero = (nothing, nothing, nothing, nothing)
            shift = each_of_four(shifts, n_there, SCALE)
        else:
            zero = each_of_four(zeros, n_there, tl.uint8)
        following = tl.minimum(block + 1, end - 1)
        next_scales, next_second, next_zeros, next_shifts = scales, second, zeros, shifts
        if GROUPS > 0:
            next_scales = block_scales(scales_ptr, scale_stride, n_there, following, GROUPS, GROUP_BLOCKS)
            if GROUPS == 8:
                next_second = block_scales(
                    scales_ptr + scale_stride, scale_stride, n_there, following, GROUPS, GROUP_BLOCKS
                )
            if HAS_ZEROS:
                next_zeros = block_scales(zeros_ptr, scale_stride, n_there, following, GROUPS, GROUP_BLOCKS)
            if HAS_SHIFTS:
                next_shifts = block_scales(shifts_ptr, scale_stride, n_there, following, GROUPS, GROUP_BLOCKS)
        if WORDS == 64 and GROUPS == 4:
            acc = bytes_product(
                acc, x_row_ptr + block * 128, is_row, in_size - block * 128, values_row_ptr + block * (64 * WORDS),
                scale, zero, HAS_ZEROS or HAS_SHIFTS, IS_EVEN, HAS_ASSEMBLY,
            )  # fmt: skip
        else:
            acc = tile_product(
                acc, x_row_ptr + block * 128, is_row, in_size - block * 128, words, scale, zero, second_scale,
                KIND, WORDS, GROUPS, IS_SCALED_AFTER, RUN, RUN if RUN < JOIN else JOIN, HAS_ZEROS or HAS_SHIFTS,
                IS_EVEN, HAS_ASSEMBLY,
            )  # fmt: skip
        if HAS_SHIFTS:
            left = num_groups - block * 4
            acc = add_shifts(acc, sums_row_ptr + block * 4, (m < num_rows)[None, :], left, shift)
        scales, second, zeros, shifts = next_scales, next_second, next_zeros, next_shifts
    if GROUPS == 0:
        factor = each_number(scales[0], n_there, SCALE).to(tl.float32)
        factor *= 1.1754943508222875e-38 if KIND == "fp4" else 1.0
        acc *= factor[:, None]
    acc *= global_scale
    is_stored = (n < out_size)[:, None] & (m < num_rows)[None, :]
    if SPLITS > 1:
        offset = n[:, None] + m[None, :] * out_size  # partial [SPLITS, num_rows, out_size]
        stride = num_rows * out_size
        tl.store(partial_ptr + split * stride + offset, acc, mask=is_stored)
        # The barrier and the atomic make this program's sums visible before the count that announces them.
        tl.debug_barrier()
        counter_ptr += m_block * tl.num_programs(0) + tile
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(counter_ptr, 0)  # as the next launch wants it
        acc = sum_splits(partial_ptr, offset, is_stored, stride, SPLITS)
    if IS_GATED:
        half = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        is_half_stored = (m < num_rows)[:, None] & (half < out_size // 2)[None, :]
        product = _interleaved(acc, out_ptr.dtype.element_ty, BLOCK_M, BLOCK_N)
        half_ptr = out_ptr + m[:, None] * (out_size // 2) + half[None, :]
        tl.store(half_ptr, product.to(out_ptr.dtype.element_ty), mask=is_half_stored)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=n < out_size, other=0.0).to(tl.float32)[:, None]
        out_tile_ptr = out_ptr + n[:, None] + m[None, :] * out_size
        tl.store(out_tile_ptr, acc.to(out_ptr.dtype.element_ty), mask=is_stored)
