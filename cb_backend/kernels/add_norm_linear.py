"""Residual addition, RMSNorm and the product of the normed rows.

Of one row they are a single launch where the tuned table's entry of the product says so (`"norm": 1`). Everything else
is `add_rms_norm`, then `linear`. Knows no models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.linear import linear, linear_torch, product_parameters
from cb_backend.kernels.linear_one_row import AddNorm, launch_one_row
from cb_backend.kernels.rms_norm import add_rms_norm, add_rms_norm_torch


def add_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`add_norm_linear_torch`, in one launch or in two.

    In one, the normed row is not rounded before the product: the sums of its unscaled numbers are scaled, in fp32.
    """
    if x.shape[0] == 1 and x.dim() == 2 and residual.dtype == x.dtype and residual.stride(1) == 1:
        parameters = product_parameters("linear", x, weight, weight.shape[0])
        if "norm" in parameters and "vector" in parameters:
            out, total = x.new_empty(1, weight.shape[0]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
            norm = AddNorm(residual, norm_weight, eps, total)
            launch_one_row(x, weight, bias, out, parameters, is_gated=False, norm=norm)
            return out, total
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    return linear(normed, weight, bias), total


def add_norm_linear_torch(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`s = residual + x`, rounded to their type; returns (`rms_norm(s) W^T + b`, `s`), new tensors.

    x, residual [num_rows, in_size], norm_weight [in_size], weight [out_size, in_size], bias [out_size], all of one
    type; x may be in parts, as in `add_rms_norm_torch`. The results are [num_rows, out_size] and [num_rows, in_size].
    """
    normed, total = add_rms_norm_torch(x, residual, norm_weight, eps)
    return linear_torch(normed, weight, bias), total
