"""RMSNorm, alone and fused with the residual addition before it.

Knows rows and weights, not where they stand in a model. Arithmetic is fp32; the normalised row is rounded to the
input's type before the weight multiplies it, as Hugging Face's LlamaRMSNorm does.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
