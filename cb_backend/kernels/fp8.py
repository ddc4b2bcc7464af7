"""Eight-bit floats (e4m3: 4 bits of exponent, 3 of mantissa): conversion, and rows that carry a scale each.

Knows numbers and rows, not what is stored in them.
"""

from __future__ import annotations

from typing import NamedTuple

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

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest finite one; there is no infinity
MIN_CAPABILITY = (8, 9)  # of a GPU whose Triton kernels can convert them
MIN_ROW_MAX = 1e-9  # a row of zeros has a scale too


class Fp8Rows(NamedTuple):
    """Row i stands for `values[i] * scales[i]`."""

    values: Tensor  # [num_rows, size] float8_e4m3fn
    scales: Tensor  # [num_rows] float32
    dtype: torch.dtype  # what it was before, and what a product with it becomes


@jit()
def quantized_row(x, FP8_MAX: tl.constexpr, MIN_ROW_MAX: tl.constexpr):
    """(x / scale as e4m3, scale) of one row in fp32, zeros outside; the largest element becomes FP8_MAX."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=0), MIN_ROW_MAX), FP8_MAX)
    scaled = tl.clamp(tl.div_rn(x, scale), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv), scale


@jit()
def _quantize_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    x_stride,
    size: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MIN_ROW_MAX: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    let_next_start(IS_DEPENDENT)
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < size
    x = tl.load(x_ptr + row * x_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    values, scale = quantized_row(x, FP8_MAX, MIN_ROW_MAX)
    tl.store(values_ptr + row * size + column, values, mask=is_inside)
    tl.store(scales_ptr + row, scale)


@jit()
def halves(pairs, HAS_ASSEMBLY: tl.constexpr):
    """The low and the high byte of `pairs` (int16), which are e4m3 numbers, as float16 numbers of 1/256 their size.

    The tensor cores' operands are read from shared memory by 16 bits, columns as quickly as rows; by 8 bits columns are
    read one by one. And an e4m3's exponent and mantissa are a float16's, but for their place and a bias of 8 (which
    subnormal numbers have too): no conversion is needed. NaN, whose row has failed before, becomes 480.
    """
    if HAS_ASSEMBLY:  # the same on two pairs at a time
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sign, size;
            shl.b32 sign, $2, 8; and.b32 sign, sign, 0x80008000; shl.b32 size, $2, 7;
            lop3.b32 $0, size, 0x3f803f80, sign, 0xea;
            and.b32 sign, $2, 0x80008000; shr.u32 size, $2, 1;
            lop3.b32 $1, size, 0x3f803f80, sign, 0xea;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = ((pairs << 8) & -0x8000) | ((pairs << 7) & 0x3F80)
        high = (pairs & -0x8000) | ((pairs >> 1) & 0x3F80)
        return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


def new_rows(x: Tensor) -> Fp8Rows:
    """Room for the rows of x, which a kernel is about to write."""
    values = torch.empty(x.shape, dtype=FP8, device=x.device)
    return Fp8Rows(values, torch.empty(x.shape[0], dtype=torch.float32, device=x.device), x.dtype)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """`quantize_rows_torch` in one launch; rows of x may be strided."""
    if needs_twin(x):
        return quantize_rows_torch(x)
    num_rows, size = x.shape
    out = new_rows(x)
    if num_rows == 0:
        return out
    block = next_power_of_2(size)
    _quantize_kernel[(num_rows,)](
        x, out.values, out.scales, x.stride(0),
        size=size, FP8_MAX=FP8_MAX, MIN_ROW_MAX=MIN_ROW_MAX, IS_DEPENDENT=can_overlap(x.device), BLOCK=block,
        **launch_parameters("quantize_rows", x.device, block=block), **dependent_options(x.device),
    )  # fmt: skip
    return out


def quantize_rows_torch(x: Tensor) -> Fp8Rows:
    """Each row of x [num_rows, size] divided by a scale of its own, with which its largest element becomes 448.

    What is not finite in a row makes NaN of what is computed from it.
    """
    x32 = x.float()
    scales = x32.abs().amax(dim=1).clamp(min=MIN_ROW_MAX) / FP8_MAX
    return Fp8Rows(to_fp8(x32 / scales.unsqueeze(1)), scales, x.dtype)


def to_fp8(x: Tensor) -> Tensor:
    """The nearest e4m3 number, ties to even; what is beyond the largest becomes the largest. NaN stays NaN."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def is_fp8_capable(device: torch.device) -> bool:
    """Whether kernels with fp8 elements can run: on a CPU (the twins, the interpreter) and from Ada and Hopper on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def fp8_needs(device: torch.device) -> str:
    """What a GPU that is not capable lacks, for messages."""
    return fp8_needs_of(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def fp8_needs_of(name: str, capability: tuple[int, int]) -> str:
    """The same of a GPU that is not here."""
    wanted, found = (".".join(map(str, pair)) for pair in (MIN_CAPABILITY, capability))
    return f"needs a GPU of compute capability {wanted} (Ada, Hopper) or newer; this one is {name} ({found})"
