"""The devices that hold a model together, each a shard of it; mostly that is one.

What a row-parallel product leaves is a partial sum; it becomes whole in the addition and norm that follow, which is the
one place of a layer where the group is asked. Rank 0 samples; what it chose the others learn from `share_tokens`. All
devices of a group make the same calls in the same order.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from torch import Tensor


class Agreed(Enum):
    """Which of the ranks' values all of them go on with."""

    LEAST = "least"
    OF_RANK_0 = "of rank 0"


class Addition(Protocol):
    """What is added to a residual stream, and normed: a `layers.norm.Junction`."""

    weight: Tensor | None  # of the norm; None: there is none
    eps: float
    options: dict[str, Any]  # of `add_rms_norm`: `post_weight`, `x_scale`, `rounds_first`, where they are not as usual

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the sum as the next block gets it, the sum), each [num_tokens, hidden_size]; x may be in parts,
        [num_tokens, num_parts, hidden_size]."""
        ...


class Group(Protocol):
    """`size` devices, of which this is number `rank`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def reduce_add_norm(self, x: Tensor, residual: Tensor, junction: Addition) -> tuple[Tensor, Tensor]:
        """`junction.add` of the sum of every rank's x, in the order of ranks; each result [num_tokens, hidden_size] and
        the same on every rank, bit for bit."""
        ...

    def partial_out(self, num_rows: int) -> Tensor | None:
        """Where the product of so many rows, whose sum over the ranks is next, is best written: [num_rows,
        hidden_size]. None: anywhere."""
        ...

    def sum_rows(self, rows: Tensor) -> Tensor:
        """The sum of every rank's rows [num_rows, size], in float32; the same bits on every rank."""
        ...

    def share_tokens(self, last_token: Tensor, num_tokens: Tensor, slots: Tensor) -> None:
        """Rank 0's `last_token` and `num_tokens` of these slots, int32 [num_slots], become every rank's. The slots
        [num_rows] are the same on all ranks. Every step begins with this, also without slots."""
        ...

    def gather_logits(self, part: Tensor, out: Tensor | None) -> None:
        """Every rank's part [num_rows, part_size] beside one another, in rank 0's `out` [num_rows, vocab_size].

        The parts may be longer together than the vocabulary: what is behind its end is left out. Other ranks give no
        `out`.
        """
        ...

    def agree(self, value: int, how: Agreed) -> int:
        """One value for all ranks, while they start: it waits for all of them."""
        ...


class NoGroup:
    """One device, which holds all of the model."""

    rank = 0
    size = 1

    def reduce_add_norm(self, x: Tensor, residual: Tensor, junction: Addition) -> tuple[Tensor, Tensor]:
        return junction.add(x, residual)

    def partial_out(self, num_rows: int) -> Tensor | None:
        return None

    def sum_rows(self, rows: Tensor) -> Tensor:
        return rows

    def share_tokens(self, last_token: Tensor, num_tokens: Tensor, slots: Tensor) -> None:
        """There is nobody to tell."""

    def gather_logits(self, part: Tensor, out: Tensor | None) -> None:
        if out is not None:
            out.copy_(part[:, : out.shape[1]])

    def agree(self, value: int, how: Agreed) -> int:
        return value


class OneOf(NoGroup):
    """The first of several devices of which none need be here: for sizes, not for sums."""

    def __init__(self, size: int) -> None:
        self.size = size
