"""Hidden states to logits: by the embedding's weight, by one of the head's own, or by one of few bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from cb_backend.layers.linear import Linear
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.placement import Placement


class LMHead(Protocol):
    """[num_rows, hidden_size] -> [num_rows, vocab_size]"""

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """In `out` where given."""
        ...

    def is_as(self, embedding: Tensor) -> bool:
        """Whether it multiplies with the numbers of this embedding."""
        ...

    def placements(self) -> Iterator[Placement]: ...


class TiedHead:
    """Shares the embedding's weight and owns no tensor."""

    def __init__(self, weight: Tensor, ops: ModelOps) -> None:
        self.ops = ops
        self.weight = weight  # [vocab_size, hidden_size]

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self.ops.linear(hidden, self.weight, None, out)

    def is_as(self, embedding: Tensor) -> bool:
        return torch.equal(self.weight, embedding)

    def placements(self) -> Iterator[Placement]:
        yield from ()


class OwnHead:
    """Has a weight of its own, in the format of its name."""

    def __init__(self, product: Linear) -> None:
        self.product = product

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self.product.into(hidden, out)

    def is_as(self, embedding: Tensor) -> bool:
        return torch.equal(self.product.weight, embedding)

    def placements(self) -> Iterator[Placement]:
        return self.product.placements()


class CappedHead:
    """A head whose logits are kept between -cap and cap."""

    def __init__(self, head: LMHead, ops: ModelOps, cap: float) -> None:
        self.head, self.ops, self.cap = head, ops, cap

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self.ops.cap_logits(self.head(hidden, out), self.cap)

    def is_as(self, embedding: Tensor) -> bool:
        return self.head.is_as(embedding)

    def placements(self) -> Iterator[Placement]:
        return self.head.placements()
