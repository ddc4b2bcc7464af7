"""RMSNorm, alone and fused with the residual addition before it.

Knows rows and weights, not where they stand in a model. Arithmetic is fp32; the normalised row is rounded to the
input's type before the weight multiplies it, as Hugging Face's LlamaRMSNorm does.
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
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    out_residual_ptr,
    scales_ptr,
    x_stride,
    residual_stride,
    hidden_size: tl.constexpr,
    eps: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
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
    weight = tl.load(weight_ptr + column, mask=is_inside, other=0.0)
    await_previous(IS_DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + column, mask=is_inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=is_inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(out_residual_ptr + row * hidden_size + column, x, mask=is_inside)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / hidden_size + eps)
    normed = (x32 * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    normed = normed.to(x.dtype)
    if out_ptr.dtype.element_ty == tl.float8e4nv:
        normed, row_scale = quantized_row(normed.to(tl.float32), FP8_MAX, MIN_ROW_MAX)
        tl.store(scales_ptr + row, row_scale)
    tl.store(out_ptr + row * hidden_size + column, normed, mask=is_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """`rms_norm_torch` in one launch; rows of x may be strided."""
    if needs_twin(x):
        return rms_norm_torch(x, weight, eps, out)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Fp8Rows, Tensor]:
    """`add_rms_norm_fp8_torch` in one launch."""
    if needs_twin(x):
        return add_rms_norm_fp8_torch(x, residual, weight, eps)
    out, total = new_rows(x), torch.empty_like(residual)
    _launch(x, residual, weight, eps, out.values, total, out.scales)
    return out, total


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_torch` in one launch; rows of x and residual may be strided."""
    if needs_twin(x):
        return add_rms_norm_torch(x, residual, weight, eps, out)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(residual)
    _launch(x, residual, weight, eps, *out)
    return out


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    out_residual: Tensor | None,
    scales: Tensor | None = None,
) -> None:
    num_tokens, hidden_size = x.shape
    if num_tokens == 0:
        return
    block = next_power_of_2(hidden_size)
    _rms_norm_kernel[(num_tokens,)](
        x, residual, weight, out, out_residual, scales,
        x.stride(0), 0 if residual is None else residual.stride(0),
        hidden_size=hidden_size, eps=eps, HAS_RESIDUAL=residual is not None,
        FP8_MAX=FP8_MAX, MIN_ROW_MAX=MIN_ROW_MAX,
        IS_DEPENDENT=can_overlap(x.device), BLOCK=block,
        **launch_parameters("rms_norm", x.device, block=block), **dependent_options(x.device, num_tokens),
    )  # fmt: skip


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """`weight * x / sqrt(mean(x ** 2) + eps)` over the last dimension.

    x [num_tokens, hidden_size], weight [hidden_size]. Returns x's shape and type, in `out` where given.
    """
    x32 = x.float()
    normed = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    return normed.to(x.dtype) if out is None else out.copy_(normed)


def add_rms_norm_torch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`s = residual + x`, rounded to the input's type; returns (`rms_norm(s)`, `s`).

    x, residual [num_tokens, hidden_size]. The results are new tensors, or `out`, which may alias the inputs.
    """
    new_residual = residual + x
    if out is None:
        return rms_norm_torch(new_residual, weight, eps), new_residual
    normed, total = out
    return rms_norm_torch(new_residual, weight, eps, out=normed), total.copy_(new_residual)


def add_rms_norm_fp8_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Fp8Rows, Tensor]:
    """`add_rms_norm` with its first result quantised row by row."""
    normed, total = add_rms_norm_torch(x, residual, weight, eps)
    return quantize_rows_torch(normed), total
