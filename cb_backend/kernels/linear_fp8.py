"""Products with fp8 weights: one scale for each output column, and rows that are quantised as they come.

Both operands are e4m3, so a product is the same arithmetic for every number of rows: sums of exact products of
`values`, times both scales. Few rows go through the kernel of `linear`, which reads half the bytes; more of them
through the library's scaled product. Knows matrices, not the projections of a model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.fp8 import Fp8Rows
from cb_backend.kernels.launch import launch_parameters, needs_twin, next_power_of_2
from cb_backend.kernels.linear import MAX_ROWS, launch_tiled
from cb_backend.kernels.silu_mul import silu_mul, silu_mul_torch


def linear_fp8(x: Fp8Rows, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear_fp8_torch`, by whatever the tuned table says is fastest for this shape."""
    num_rows, out_size = x.values.shape[0], weight.shape[0]
    parameters = _parameters("linear_fp8", x, weight, out_size)
    if parameters is None:
        return linear_fp8_torch(x, weight, weight_scales, bias)
    out = torch.empty(num_rows, out_size, dtype=x.dtype, device=weight.device)
    if num_rows == 0:
        return out
    if "library" in parameters:
        return _library(x, weight, weight_scales, bias, out)
    launch_tiled(x.values, weight, bias, out, parameters, is_gated=False, scales=(x.scales, weight_scales))
    return out


def linear_silu_mul_fp8(x: Fp8Rows, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """`linear_silu_mul_fp8_torch` in one launch, or in two where the tuned table says so."""
    num_rows, out_size = x.values.shape[0], weight.shape[0] // 2
    parameters = _parameters("linear_silu_mul_fp8", x, weight, out_size)
    if parameters is None or "library" in parameters or num_rows == 0:
        return silu_mul(linear_fp8(x, weight, weight_scales))
    out = torch.empty(num_rows, out_size, dtype=x.dtype, device=weight.device)
    launch_tiled(x.values, weight, None, out, parameters, is_gated=True, scales=(x.scales, weight_scales))
    return out


def _parameters(op: str, x: Fp8Rows, weight: Tensor, out_size: int) -> dict[str, int] | None:
    """Launch parameters of the table's entry, `library` among them; None where only the twin can."""
    num_rows, in_size = x.values.shape
    if needs_twin(weight):
        return None
    if num_rows <= MAX_ROWS:
        found = launch_parameters(op, weight.device, n=out_size, k=in_size, m=next_power_of_2(num_rows))
        if "library" not in found:
            return found
    # The library wants whole 16 bytes in both directions and writes bfloat16 alone.
    is_library_able = weight.is_cuda and weight.shape[0] % 16 == 0 and in_size % 16 == 0 and x.dtype == torch.bfloat16
    return {"library": 1} if is_library_able else None


def _library(x: Fp8Rows, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    # Fast accumulation: the tensor cores' own, a little narrower than fp32, as in our kernel; its error is far below
    # that of the operands.
    return torch._scaled_mm(
        x.values, weight.t(), x.scales.unsqueeze(1), weight_scales.unsqueeze(0),
        bias=bias, out_dtype=x.dtype, use_fast_accum=True, out=out,
    )  # fmt: skip


def linear_fp8_torch(x: Fp8Rows, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` where x stands for `values * scales` of its rows and W for `weight * weight_scales` of its rows.

    weight [out_size, in_size] e4m3, weight_scales [out_size] fp32, bias [out_size]. The sums are fp32, of exact
    products; scales and bias are applied to them. Returns [num_rows, out_size] of x's dtype.
    """
    product = x.values.float() @ weight.float().t()
    product = product * x.scales.unsqueeze(1) * weight_scales
    if bias is not None:
        product += bias.float()
    return product.to(x.dtype)


def linear_silu_mul_fp8_torch(x: Fp8Rows, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """silu(x G^T) * (x U^T), G above U in weight [2 * out_size, in_size]; rounded as in separate steps."""
    return silu_mul_torch(linear_fp8_torch(x, weight, weight_scales))
