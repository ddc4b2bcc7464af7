"""Hidden states to logits: by the embedding's weight, by one of the head's own, or by one of few bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from cb_backend.layers.linear import Linear
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.placement import Placement
from cb_backend.parallel.group import Group
from cb_backend.parallel.shares import Share


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


class SharedHead:
    """A head of several devices, each with its rows of the vocabulary: rank 0 gets all logits, the others none."""

    def __init__(self, head: LMHead, group: Group, vocab_size: int, share: Share) -> None:
        """head: of this device's rows, and of those that pad them."""
        self.head, self.group = head, group
        self.vocab_size, self.share = vocab_size, share

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """On rank 0 [num_rows, vocab_size]; elsewhere [num_rows, 0], and `out` stays as it is."""
        part = self.head(hidden)
        if self.group.rank:
            self.group.gather_logits(part, None)
            return part[:, :0]
        out = part.new_empty(len(part), self.vocab_size) if out is None else out
        self.group.gather_logits(part, out)
        return out

    def is_as(self, embedding: Tensor) -> bool:
        """Of its own rows; `embedding` is padded as the vocabulary is."""
        return self.head.is_as(rows_of_head(embedding, self.group.rank, self.share))

    def placements(self) -> Iterator[Placement]:
        return self.head.placements()


def rows_of_head(embedding: Tensor, rank: int, share: Share) -> Tensor:
    """A device's rows of an embedding that is padded as the vocabulary is: a view."""
    return embedding[rank * share.room : (rank + 1) * share.room]
