"""RMSNorm, alone and fused with the residual addition before it, and with the norm of what is added.

Knows rows and weights, not where they stand in a model. Arithmetic is fp32; the normalised row is rounded to the
input's type before the weight multiplies it, as Hugging Face's LlamaRMSNorm does, or only after it (`rounds_first`
False), as others do. Weights may be fp32 whatever the rows are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.fp8 import FP8_MAX, MIN_ROW_MAX, Fp8Rows, new_rows, quantize_rows_torch, quantized_row
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


@jit()
def _normed(x, weight, HIDDEN_SIZE: tl.constexpr, eps: tl.constexpr, ROUNDS_FIRST: tl.constexpr):
    """One row, zeros outside, in its own type."""
    x32 = x.to(tl.float32)
    normed = x32 * tl.rsqrt(tl.sum(x32 * x32, axis=0) / HIDDEN_SIZE + eps)
    if ROUNDS_FIRST:
        normed = normed.to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@jit()
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    post_weight_ptr,
    out_ptr,
    out_residual_ptr,
    scales_ptr,
    x_stride,
    residual_stride,
    out_stride: tl.constexpr,
    hidden_size: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # of x, whose sum is the row; 1: x is
    eps: tl.constexpr,
    x_scale: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_POST: tl.constexpr,
    HAS_OUT: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MIN_ROW_MAX: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    let_next_start(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < hidden_size
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=is_inside, other=0.0)
    if HAS_POST:
        post_weight = tl.load(post_weight_ptr + column, mask=is_inside, other=0.0)
    await_previous(IS_DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + column, mask=is_inside, other=0.0)
    if NUM_PARTS > 1:
        total = x.to(tl.float32)
        for part in tl.static_range(1, NUM_PARTS):
            part_ptr = x_ptr + row * x_stride + part * hidden_size + column
            total += tl.load(part_ptr, mask=is_inside, other=0.0).to(tl.float32)
        x = total.to(x.dtype)
    if HAS_POST:
        x = _normed(x, post_weight, hidden_size, eps, ROUNDS_FIRST)
    if x_scale != 1.0:
        x = (x.to(tl.float32) * x_scale).to(x.dtype)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=is_inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(out_residual_ptr + row * hidden_size + column, x, mask=is_inside)
    if HAS_OUT:
        if HAS_WEIGHT:
            x = _normed(x, weight, hidden_size, eps, ROUNDS_FIRST)
        if out_ptr.dtype.element_ty == tl.float8e4nv:
            x, row_scale = quantized_row(x.to(tl.float32), FP8_MAX, MIN_ROW_MAX)
            tl.store(scales_ptr + row, row_scale)
        tl.store(out_ptr + row * out_stride + column, x, mask=is_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, rounds_first: bool = True) -> Tensor:
    """`rms_norm_torch` in one launch; rows of x and of out may be strided, and be the same."""
    if needs_twin(x):
        return rms_norm_torch(x, weight, eps, out, rounds_first)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, None, weight, eps, out, None, rounds_first=rounds_first)
    return out


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    post_weight: Tensor | None = None,
    x_scale: float = 1.0,
    rounds_first: bool = True,
) -> tuple[Fp8Rows, Tensor]:
    """`add_rms_norm_fp8_torch` in one launch."""
    if needs_twin(x):
        return add_rms_norm_fp8_torch(x, residual, weight, eps, post_weight, x_scale, rounds_first)
    out, total = new_rows(residual), torch.empty_like(residual)
    _launch(x, residual, weight, eps, out.values, total, out.scales, post_weight, x_scale, rounds_first)
    return out, total


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
    post_weight: Tensor | None = None,
    x_scale: float = 1.0,
    rounds_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_torch` in one launch; rows of x and residual may be strided, the parts of a row may not."""
    if needs_twin(x):
        return add_rms_norm_torch(x, residual, weight, eps, out, post_weight, x_scale, rounds_first)
    if weight is None:
        total = torch.empty_like(residual) if out is None else out[1]
        out = (total, total)
    elif out is None:
        out = torch.empty(residual.shape, dtype=x.dtype, device=x.device), torch.empty_like(residual)
    normed = None if weight is None else out[0]
    _launch(x, residual, weight, eps, normed, out[1], None, post_weight, x_scale, rounds_first)
    return out


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    out: Tensor | None,
    out_residual: Tensor | None,
    scales: Tensor | None = None,
    post_weight: Tensor | None = None,
    x_scale: float = 1.0,
    rounds_first: bool = True,
) -> None:
    num_tokens, hidden_size = x.shape[0], x.shape[-1]
    if num_tokens == 0:
        return
    block = next_power_of_2(hidden_size)
    _rms_norm_kernel[(num_tokens,)](
        x, residual, weight, post_weight, out, out_residual, scales,
        x.stride(0), 0 if residual is None else residual.stride(0),
        out_stride=hidden_size if out is None else out.stride(0),
        hidden_size=hidden_size, NUM_PARTS=x.shape[1] if x.dim() == 3 else 1, eps=eps, x_scale=x_scale,
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, HAS_POST=post_weight is not None,
        HAS_OUT=out is not None, ROUNDS_FIRST=rounds_first, FP8_MAX=FP8_MAX, MIN_ROW_MAX=MIN_ROW_MAX,
        IS_DEPENDENT=can_overlap(x.device), BLOCK=block,
        **launch_parameters("rms_norm", x.device, block=block), **dependent_options(x.device, num_tokens),
    )  # fmt: skip


def rms_norm_torch(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, rounds_first: bool = True
) -> Tensor:
    """`weight * x / sqrt(mean(x ** 2) + eps)` over the last dimension.

    x [num_tokens, hidden_size], weight [hidden_size] of x's type or fp32. Returns x's shape and type, in `out` where
    given.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    normed = (normed.to(x.dtype) if rounds_first else normed) * weight
    return normed.to(x.dtype) if out is None else out.copy_(normed)


def add_rms_norm_torch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
    post_weight: Tensor | None = None,
    x_scale: float = 1.0,
    rounds_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """`s = residual + y * x_scale`, rounded to the input's type; returns (`rms_norm(s)`, `s`), (s, s) without a weight.

    y is x, or `rms_norm(x)` by `post_weight` where that is given. x, residual [num_tokens, hidden_size]; or x
    [num_tokens, num_parts, hidden_size], which stands for the sum of its parts in their order. The results are new
    tensors, or `out`, which may alias the inputs; without a weight both are `out[1]`.
    """
    if x.dim() == 3:
        x = x.float().sum(dim=1).to(x.dtype)
    if post_weight is not None:
        x = rms_norm_torch(x, post_weight, eps, rounds_first=rounds_first)
    new_residual = residual + (x if x_scale == 1.0 else x * x_scale)
    if weight is None:
        total = new_residual if out is None else out[1].copy_(new_residual)
        return total, total
    if out is None:
        return rms_norm_torch(new_residual, weight, eps, rounds_first=rounds_first), new_residual
    normed, total = out
    return rms_norm_torch(new_residual, weight, eps, normed, rounds_first), total.copy_(new_residual)


def add_rms_norm_fp8_torch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    post_weight: Tensor | None = None,
    x_scale: float = 1.0,
    rounds_first: bool = True,
) -> tuple[Fp8Rows, Tensor]:
    """`add_rms_norm` with its first result quantised row by row."""
    normed, total = add_rms_norm_torch(x, residual, weight, eps, None, post_weight, x_scale, rounds_first)
    return quantize_rows_torch(normed), total
