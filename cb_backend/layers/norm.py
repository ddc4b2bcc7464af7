"""RMSNorm, alone or together with the addition to the residual stream before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cb_backend.layers.layer_spec import NormSpec
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.placement import Placement


class RMSNorm:
    """Scales each token to unit mean square, in float32 inside."""

    def __init__(
        self, name: str, spec: NormSpec, size: int, ops: ModelOps, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = name  # of the module in the checkpoint
        self.weight = torch.empty(size, dtype=dtype, device=device)  # [size]
        self.eps = spec.eps
        self.ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, size] -> the same, normed."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), each [num_tokens, size]."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def placements(self) -> Iterator[Placement]:
        yield Placement(f"{self.name}.weight", self.weight)
