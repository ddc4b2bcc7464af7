"""RMSNorm, and where it stands: between a block's output and the next block's input.

A model's blocks differ in which of the norms there are. All of them are one operation with the addition to the residual
stream, so that they cost one launch together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cb_backend.kernels.fp8 import Fp8Rows
from cb_backend.layers.layer_spec import NormSpec
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.placement import Placement, shard_of
from cb_backend.parallel.shares import Share


class RMSNorm:
    """The weight that scales each token's normed vector, and how it does."""

    def __init__(
        self,
        name: str,
        spec: NormSpec,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        share: Share | None = None,
    ) -> None:
        """share: what this device has of the checkpoint's `size` weights; None: all."""
        self.name = name  # of the module in the checkpoint
        self._shard = None if share is None else shard_of(share, size)
        size = size if share is None else share.size
        self.spec = spec
        # What is folded into a weight needs more digits than a narrow type has.
        self.weight = torch.empty(size, dtype=torch.float32 if spec.is_folded else dtype, device=device)  # [size]

    def placements(self) -> Iterator[Placement]:
        yield Placement(f"{self.name}.weight", self.weight, self._shard, _folding(self.spec))


def _folding(spec: NormSpec) -> Callable[[Tensor], Tensor] | None:
    if not spec.is_folded:
        return None
    return lambda weight: (weight.float() + spec.plus_one) / spec.divisor


class Junction:
    """Where a block's output joins the residual stream, and the next block's input leaves it.

    `joining` norms what is added, `leaving` what the next block gets; None: it is as it is. What is added is multiplied
    by `scale`.
    """

    def __init__(
        self, ops: ModelOps, spec: NormSpec, *, leaving: RMSNorm | None, joining: RMSNorm | None, scale: float = 1.0
    ) -> None:
        self.ops = ops
        self.norms = tuple(norm for norm in (leaving, joining) if norm is not None)
        self.weight = leaving.weight if leaving else None  # [hidden_size]
        self.eps = spec.eps
        self._rounding: dict[str, Any] = {} if spec.rounds_first else {"rounds_first": False}
        self.options = dict(self._rounding)  # of the addition
        if joining is not None:
            self.options["post_weight"] = joining.weight
        if scale != 1.0:
            self.options["x_scale"] = scale

    @property
    def plain_weight(self) -> Tensor | None:
        """The weight, where this is an addition and a norm and no more: what a product may be fused with."""
        return None if self.options else self.weight

    def __call__(self, x: Tensor) -> Tensor:
        """What the first block gets of the embeddings: [num_tokens, hidden_size] -> the same, normed."""
        return x if self.weight is None else self.ops.rms_norm(x, self.weight, self.eps, **self._rounding)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(what the next block gets, the residual stream with x added), each [num_tokens, hidden_size]."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, **self.options)

    def add_fp8(self, x: Tensor, residual: Tensor) -> tuple[Fp8Rows, Tensor]:
        """`add`, with its first result in fp8."""
        return self.ops.add_rms_norm_fp8(x, residual, self.weight, self.eps, **self.options)

    def placements(self) -> Iterator[Placement]:
        for norm in self.norms:
            yield from norm.placements()
