"""The gated feed-forward block: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cb_backend.layers.linear import Fillable, Linear
from cb_backend.layers.norm import RMSNorm
from cb_backend.layers.ops import Ops


class MLP:
    """Gate and up projections are one fused weight, gate first."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        ops: Ops,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        linear_class: type[Linear] = Linear,
    ) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = linear_class(hidden_size, parts, ops, has_bias=has_bias, dtype=dtype, device=device)
        self.down_proj = linear_class(
            intermediate_size, {"down_proj": hidden_size}, ops, has_bias=has_bias, dtype=dtype, device=device
        )

    def after(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the block's output for norm(x + residual), x + residual), each [num_tokens, hidden_size]."""
        activated, total = self.gate_up_proj.gated_after(norm, x, residual)
        return self.down_proj(activated), total

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Fillable]]:
        yield from self.gate_up_proj.checkpoint_tensors(prefix)
        yield from self.down_proj.checkpoint_tensors(prefix)
