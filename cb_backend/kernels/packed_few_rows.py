"""The kernel of products of few rows with packed weights: every warp reads its own weights straight into registers.

With up to 32 rows a product is bound by reading the weights and by taking them apart. So nothing goes through shared
memory: a warp has 16 or 32 rows of the weight and every so many-th block of 128 columns, no warp waits for another
before the end, and all of them together have the whole sum, so there are no partial sums in memory either. What a warp
multiplies is in `packed_warp`.

NOTE: that code relies on the order in which Triton deals the elements of a tensor [rows, inputs] to lanes: 8 rows of 4
lanes of neighbours, then the next warp's, then the next 8 rows. `tests/kernels/test_compile_few_rows.py` looks at what
the compiler chose.
"""

from __future__ import annotations

from cb_backend.kernels.launch import await_previous, jit, let_next_start, tl
from cb_backend.kernels.silu_mul import gated


@jit()
def _scale_words(pointer, stride, first_number, is_there, GROUP: tl.constexpr, part: tl.constexpr):
    """The 32 bits around each row's number (a scale or zero point) of the group of a block's part of 32 columns."""
    address = (pointer + (first_number + part * 32 // GROUP) * stride).to(tl.int64)
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $4, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$2]; mov.b32 $1, $0; }",
        "=r,=r,l,l,r,r", [address, is_there], dtype=tl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@jit()
def _numbers(pointer, stride, first_number, is_there, GROUP: tl.constexpr):
    """Four of them, one a part; those of parts that share a group are the same."""
    first = _scale_words(pointer, stride, first_number, is_there, GROUP, 0)
    if GROUP >= 128:
        return first, first, first, first
    elif GROUP == 64:
        third = _scale_words(pointer, stride, first_number, is_there, GROUP, 2)
        return first, first, third, third
    else:
        return (
            first, _scale_words(pointer, stride, first_number, is_there, GROUP, 1),
            _scale_words(pointer, stride, first_number, is_there, GROUP, 2),
            _scale_words(pointer, stride, first_number, is_there, GROUP, 3),
        )  # fmt: skip


@jit()
def _a_block(
    words_ptr, scale_words, zero_words, scale_stride, zero_stride, block, warp, number_shift, num_blocks,
    TILE: tl.constexpr, HALVES: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Words of each warp's block from `block` on, and its groups' scales and zero points; zeros past the end."""
    is_there = block + warp < num_blocks
    words_ptr += tl.cast(block, tl.int64) * TILE
    words = tl.load(words_ptr, mask=is_there, other=0, eviction_policy="evict_first")
    upper = words
    if HALVES == 2:
        upper = tl.load(words_ptr + INPUTS, mask=is_there, other=0, eviction_policy="evict_first")
    number = (block + warp) * 128 // GROUP + number_shift
    there = is_there.to(tl.int32)
    scales = _numbers(scale_words, scale_stride, number, there, GROUP)
    zeros = scales
    if HAS_ZEROS:
        zeros = _numbers(zero_words, zero_stride, number, there, GROUP)
    return words, upper, scales, zeros


@jit()
def _word_pointer(values_ptr, TILES: tl.constexpr):
    """Elements of which a row's 64 bytes have as many as there are inputs."""
    if TILES == 1:
        return values_ptr.to(tl.pointer_type(tl.int64))
    elif TILES == 2:
        return values_ptr.to(tl.pointer_type(tl.int32))
    else:
        return values_ptr


@jit()
def _multiply(
    acc, words, upper, scales, zeros, x_at, step, left, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr,
    HALVES: tl.constexpr, HAS_ZEROS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """The sums with a block's products added; `packed_warp.product_text` names the operands."""
    if HAS_ZEROS:
        return tl.inline_asm_elementwise(
            TEXT, CONSTRAINTS,
            [acc, words, scales[0], scales[1], scales[2], scales[3], zeros[0], zeros[1], zeros[2], zeros[3], x_at,
             step, left], dtype=tl.float32, is_pure=False, pack=PACK,
        )  # fmt: skip
    elif HALVES == 1:
        return tl.inline_asm_elementwise(
            TEXT, CONSTRAINTS, [acc, words, scales[0], scales[1], scales[2], scales[3], x_at, step, left],
            dtype=tl.float32, is_pure=False, pack=PACK,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            TEXT, CONSTRAINTS, [acc, words, upper, scales[0], scales[1], scales[2], scales[3], x_at, step, left],
            dtype=tl.float32, is_pure=False, pack=PACK,
        )  # fmt: skip


@jit("num_rows")
def _packed_few_rows_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    out_size,
    num_blocks,
    x_stride,
    scale_stride,
    global_scale,
    TEXT: tl.constexpr,  # of `packed_warp.product_text`
    CONSTRAINTS: tl.constexpr,
    HALVES: tl.constexpr,  # of a row's 128 elements, 64 bytes each: 1, of 4-bit numbers, or 2
    GROUP: tl.constexpr,  # columns that share a scale
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,  # rows of the weight are gate and up in turn
    IS_DEPENDENT: tl.constexpr,
    TILES: tl.constexpr,  # of 8 inputs: 1, 2 or 4
    PAIRS: tl.constexpr,  # of 8 rows of the weight
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,  # blocks that are on their way while one is multiplied: 1 or 2
):
    """16 * PAIRS rows of the weight a program; each of its warps has every WARPS-th block of 128 columns of them."""
    let_next_start(IS_DEPENDENT)
    ROWS: tl.constexpr = 16 * PAIRS * WARPS
    INPUTS: tl.constexpr = 8 * TILES
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, INPUTS)[None, :]
    lane_row, lane, warp = r % 8, c // (2 * TILES), r // 8 % WARPS
    first = tl.program_id(0) * (16 * PAIRS)
    n = tl.minimum(first + r // (8 * WARPS) * 8 + lane_row, out_size - 1)
    TILE: tl.constexpr = 64 * INPUTS * HALVES
    words_ptr = _word_pointer(values_ptr, TILES) + ((n // 64).to(tl.int64) * num_blocks + warp) * TILE
    words_ptr += n % 64 * (INPUTS * HALVES) + c
    PER_WORD: tl.constexpr = 32 // scales_ptr.dtype.element_ty.primitive_bitwidth
    scale_words = scales_ptr.to(tl.pointer_type(tl.int32)) + n // PER_WORD
    scale_words_stride, zero_stride = scale_stride // PER_WORD, scale_stride // 4
    zero_words = scale_words
    if HAS_ZEROS:
        zero_words = zeros_ptr.to(tl.pointer_type(tl.int32)) + n // 4
    number_shift = warp * 0
    if GROUP == 16:  # a part has two groups, and a lane is in one of them
        number_shift = lane // 2
    words, upper, scales, zeros = _a_block(
        words_ptr, scale_words, zero_words, scale_words_stride, zero_stride, 0, warp, number_shift, num_blocks,
        TILE, HALVES, INPUTS, GROUP, HAS_ZEROS,
    )  # fmt: skip
    words_ahead, upper_ahead, scales_ahead, zeros_ahead = words, upper, scales, zeros
    if DEPTH == 2:
        words_ahead, upper_ahead, scales_ahead, zeros_ahead = _a_block(
            words_ptr, scale_words, zero_words, scale_words_stride, zero_stride, WARPS, warp, number_shift, num_blocks,
            TILE, HALVES, INPUTS, GROUP, HAS_ZEROS,
        )  # fmt: skip
    await_previous(IS_DEPENDENT)
    # A lane's sums are of 2 * TILES inputs beside each other; the inputs' rows that it holds as an operand are others.
    m = lane_row // 2 * (2 * TILES) + lane_row % 2
    x_row = (x_ptr + m.to(tl.int64) * x_stride + lane * 8).to(tl.int64)
    step = x_stride * 2  # bytes
    acc = tl.zeros([ROWS, INPUTS], tl.float32)
    for start in range(0, num_blocks, WARPS):
        next_words, next_upper, next_scales, next_zeros = _a_block(
            words_ptr, scale_words, zero_words, scale_words_stride, zero_stride, start + DEPTH * WARPS, warp,
            number_shift, num_blocks, TILE, HALVES, INPUTS, GROUP, HAS_ZEROS,
        )  # fmt: skip
        x_at = x_row + tl.minimum(start + warp, num_blocks - 1).to(tl.int64) * 256
        acc = _multiply(
            acc, words, upper, scales, zeros, x_at, step, num_rows - 1 - m, TEXT, CONSTRAINTS, HALVES,
            HAS_ZEROS, 4 * PAIRS * TILES,
        )  # fmt: skip
        if DEPTH == 2:
            words, upper, scales, zeros = words_ahead, upper_ahead, scales_ahead, zeros_ahead
            words_ahead, upper_ahead, scales_ahead, zeros_ahead = next_words, next_upper, next_scales, next_zeros
        else:
            words, upper, scales, zeros = next_words, next_upper, next_scales, next_zeros
    rows = tl.sum(tl.reshape(acc, [2 * PAIRS, WARPS, 8, INPUTS]), axis=1)
    rows = tl.reshape(rows, [16 * PAIRS, INPUTS]) * global_scale
    m = tl.arange(0, INPUTS)
    dtype = out_ptr.dtype.element_ty
    if IS_GATED:
        gate, up = tl.split(tl.reshape(tl.trans(rows), [INPUTS, 8 * PAIRS, 2]))
        half = first // 2 + tl.arange(0, 8 * PAIRS)
        mask = (m < num_rows)[:, None] & (half < out_size // 2)[None, :]
        out_tile_ptr = out_ptr + m[:, None] * (out_size // 2) + half[None, :]
        tl.store(out_tile_ptr, gated(gate, up, dtype).to(dtype), mask=mask)
    else:
        n = first + tl.arange(0, 16 * PAIRS)
        if HAS_BIAS:
            rows += tl.load(bias_ptr + n, mask=n < out_size, other=0.0).to(tl.float32)[:, None]
        mask = (n < out_size)[:, None] & (m < num_rows)[None, :]
        tl.store(out_ptr + n[:, None] + m[None, :] * out_size, rows.to(dtype), mask=mask)
