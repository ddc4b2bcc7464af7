"""The devices that hold a model together, each a shard of it. Today that is one.

What a row-parallel product leaves is a partial sum; it becomes whole in the addition and norm that follow, which is the
one place where the group is asked.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cb_backend.layers.norm import Junction


class Group(Protocol):
    """`size` devices, of which this is number `rank`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def reduce_add_norm(self, x: Tensor, residual: Tensor, junction: Junction) -> tuple[Tensor, Tensor]:
        """`junction.add` of the sum of every device's x; each [num_tokens, hidden_size]."""
        ...


class NoGroup:
    """One device, which holds all of the model."""

    rank = 0
    size = 1

    def reduce_add_norm(self, x: Tensor, residual: Tensor, junction: Junction) -> tuple[Tensor, Tensor]:
        return junction.add(x, residual)
