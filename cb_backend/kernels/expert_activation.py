"""The gated activations of experts, of sums in registers: what every grouped product shares. Knows numbers only."""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.launch import jit, tl
from cb_backend.kernels.silu_mul import gated, silu_mul_torch

ACTIVATIONS = ("silu", "clamped_swiglu")
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


@jit()
def activated(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """What `activate_torch` says of fp32 sums, rounded where separate steps would round; fp32."""
    if ACTIVATION == "silu":
        return gated(gate, up, dtype)
    else:
        gate = tl.minimum(gate.to(dtype).to(tl.float32), 7.0)
        up = tl.minimum(tl.maximum(up.to(dtype).to(tl.float32), -7.0), 7.0)
        return (up + 1.0) * (gate * tl.sigmoid(gate * 1.702))


def activate_torch(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [num_rows, 2 * size], gate first; returns [num_rows, size] of its type.

    silu: silu(gate) * up. clamped_swiglu: (up + 1) * gate * sigmoid(1.702 gate), the gate at most 7, up within 7 of 0.
    """
    if activation == "silu":
        return silu_mul_torch(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return ((up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))).to(gate_up.dtype)
