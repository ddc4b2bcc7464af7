"""Packed weights written out in 16 bits, some of their rows at a time: what a library's product wants."""

from __future__ import annotations

from torch import Tensor

from cb_backend.kernels.launch import (
    IS_INTERPRETING,
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    launch_parameters,
    let_next_start,
    needs_twin,
    tl,
)
from cb_backend.kernels.packed import TILE_COLUMNS, TILE_ROWS, PackedWeight, dequantise_packed_torch
from cb_backend.kernels.packed_tile import four_parts, two_parts


@jit()
def _a_row(pointer, stride, row, column, HALF: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """What the groups of WORDS columns from `column` on have for each row, in fp32 [64, 1], or [64, WORDS] of two."""
    first = tl.load(pointer + column // GROUP * stride + row).to(tl.float32)[:, None]
    if GROUP >= WORDS:
        return first
    else:
        second = tl.load(pointer + (column + HALF) // GROUP * stride + row).to(tl.float32)[:, None]
        return tl.where((tl.arange(0, WORDS) < HALF)[None, :], first, second)


@jit("first_row")
def _dequantise_packed_kernel(
    values_ptr,
    scales_ptr,
    zeros_ptr,
    shifts_ptr,
    out_ptr,
    first_row,
    num_rows,
    in_size,
    num_blocks,
    scale_stride,
    global_scale,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_SHIFTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,  # in_size is a multiple of 128
    IS_DEPENDENT: tl.constexpr,
    HAS_ASSEMBLY: tl.constexpr,
    BLOCKS: tl.constexpr,  # of 128 columns
):
    """64 rows of some blocks a program."""
    let_next_start(IS_DEPENDENT)
    await_previous(IS_DEPENDENT)  # the scratch may still be read by the product before
    dtype = out_ptr.dtype.element_ty
    r, c = tl.arange(0, 64), tl.arange(0, WORDS)
    local = tl.program_id(0) * 64 + r
    row = first_row + local
    tile_ptr = values_ptr + (first_row // 64 + tl.program_id(0)).to(tl.int64) * num_blocks * (64 * WORDS)
    size = num_rows // 2 if IS_GATED else num_rows
    target = (local % 2) * size + local // 2 if IS_GATED else local
    row_ptr = out_ptr + target.to(tl.int64)[:, None] * in_size
    # Nothing is taken off here; and what fp4 is multiplied by makes the number itself of its bits.
    if KIND == "fp4":
        factor = tl.full([64, WORDS], 8.507059173023462e37, tl.float32).to(tl.bfloat16)  # 2**126
    else:
        factor = tl.full([64, WORDS], 0.0, dtype)
    for block in range(tl.program_id(1) * BLOCKS, tl.minimum((tl.program_id(1) + 1) * BLOCKS, num_blocks)):
        words = tl.load(tile_ptr + block * (64 * WORDS) + r[:, None] * WORDS + c[None, :])
        if WORDS == 32:
            parts = four_parts(words, factor, factor, factor, factor, KIND, dtype, HAS_ASSEMBLY)
        else:
            parts = two_parts(words, factor, factor, KIND, dtype, HAS_ASSEMBLY)
        for q in tl.static_range(128 // WORDS):
            first = block * 128 + q * WORDS
            number = parts[q].to(tl.float32)
            if HAS_ZEROS:
                number -= _a_row(zeros_ptr, scale_stride, row, first, WORDS // 2, WORDS, GROUP)
            elif KIND == "int4" and not HAS_SHIFTS:
                number -= 8.0
            elif KIND == "int8" and not HAS_SHIFTS:
                number -= 128.0
            scale = _a_row(scales_ptr, scale_stride, row, first, WORDS // 2, WORDS, GROUP)
            if KIND == "fp4":
                scale *= 1.1754943508222875e-38  # 2**-126
            if HAS_SHIFTS:
                shift = _a_row(shifts_ptr, scale_stride, row, first, WORDS // 2, WORDS, GROUP)
                number = (number * scale + shift) * global_scale
            else:
                number = number * (scale * global_scale)
            is_inside = (local < num_rows)[:, None]
            if not IS_EVEN:
                is_inside = is_inside & (first + c < in_size)[None, :]
            tl.store(row_ptr + first + c[None, :], number.to(dtype), mask=is_inside)


def dequantise_packed(weight: PackedWeight, first_row: int, out: Tensor) -> Tensor:
    """Rows `first_row` and on, as many as `out` [rows, in_size] has, in out's dtype, each number rounded once.

    Of a gated weight, whose rows are gate and up in turn, the gate's rows come first. `first_row` is a multiple of 64.
    Returns out.
    """
    assert first_row % TILE_ROWS == 0, f"rows from {first_row} on; pieces begin at multiples of {TILE_ROWS}"
    num_rows = out.shape[0]
    if needs_twin(out):
        return out.copy_(_rows_torch(weight, first_row, num_rows))
    num_blocks, words = weight.values.shape[1], weight.values.shape[3]
    parameters = launch_parameters("dequantise_packed", out.device)
    _dequantise_packed_kernel[(-(-num_rows // TILE_ROWS), -(-num_blocks // parameters["blocks"]))](
        weight.values, weight.scales, weight.zeros, weight.shifts, out,
        first_row, num_rows, weight.size[1], num_blocks, weight.scales.shape[1], weight.global_scale,
        KIND=weight.kind, WORDS=words, GROUP=min(weight.group, num_blocks * TILE_COLUMNS),
        HAS_ZEROS=weight.zeros is not None, HAS_SHIFTS=weight.shifts is not None, IS_GATED=weight.is_gated,
        IS_DEPENDENT=can_overlap(out.device),
        IS_EVEN=weight.size[1] % TILE_COLUMNS == 0, HAS_ASSEMBLY=not IS_INTERPRETING, BLOCKS=parameters["blocks"],
        num_warps=parameters["num_warps"], **dependent_options(out.device),
    )  # fmt: skip
    return out


def _rows_torch(weight: PackedWeight, first_row: int, num_rows: int) -> Tensor:
    numbers = dequantise_packed_torch(weight)
    if not weight.is_gated:
        return numbers[first_row : first_row + num_rows]
    half, start = weight.size[0] // 2, first_row // 2
    return numbers.view(2, half, -1)[:, start : start + num_rows // 2].reshape(num_rows, -1)
