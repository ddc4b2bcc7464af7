"""Matrix products with weights: plain and fused projections, the embedding, the head.

Weights are plain tensors, allocated empty on the model's device. Every layer lists its tensors under the names that
checkpoints use (`checkpoint_tensors`), a fused weight as views of its parts; loading is then one copy per name, and
nothing here knows files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from cb_backend.layers.norm import RMSNorm
from cb_backend.layers.ops import Ops


class Fillable(Protocol):
    """A tensor, or what takes a checkpoint's tensor as one would."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def device(self) -> torch.device: ...
    def numel(self) -> int: ...
    def copy_(self, source: Tensor) -> Any: ...
    def normal_(self, mean: float, std: float, *, generator: torch.Generator | None) -> Any: ...


class Linear:
    """y = x W^T + b. Several projections of the same input are one weight, so one product: `parts` in row order."""

    def __init__(
        self,
        in_size: int,
        parts: dict[str, int],
        ops: Ops,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: torch.dtype | None = None,  # None: dtype
    ) -> None:
        self.ops = ops
        self.parts = parts  # checkpoint name of the projection -> number of its output features
        out_size = sum(parts.values())
        self.weight = torch.empty(out_size, in_size, dtype=weight_dtype or dtype, device=device)  # [out_size, in_size]
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_size] -> [num_tokens, out_size]."""
        product: Tensor = self.ops.linear(x, self.weight, self.bias)
        return product

    def after(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the product of norm(x + residual), x + residual); x and residual [num_tokens, in_size]."""
        results: tuple[Tensor, Tensor] = self.ops.add_norm_linear(
            x, residual, norm.weight, norm.eps, self.weight, self.bias
        )
        return results

    def gated_after(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(silu(first half) * second half of that product, x + residual); the first [num_tokens, out_size / 2]."""
        normed, total = norm.add(x, residual)
        if self.bias is None:
            return self.ops.linear_silu_mul(normed, self.weight), total
        return self.ops.silu_mul(self(normed)), total

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Fillable]]:
        start = 0
        for name, size in self.parts.items():
            yield f"{prefix}.{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}.{name}.bias", self.bias[start : start + size]
            start += size


class Embedding:
    """Token ids to vectors."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)  # [vocab_size, hidden_size]

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int -> [num_tokens, hidden_size]."""
        # NOTE: a plain launch. Kernels of the layers read before they wait what is older than it: `launch.can_overlap`.
        return functional.embedding(token_ids, self.weight)


class LMHead:
    """Hidden states to logits. A tied head shares the embedding's weight and owns no tensor."""

    def __init__(self, weight: Tensor, ops: Ops) -> None:
        self.ops = ops
        self.weight = weight  # [vocab_size, hidden_size]

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size], in `out` where given."""
        logits: Tensor = self.ops.linear(hidden, self.weight, None, out)
        return logits
