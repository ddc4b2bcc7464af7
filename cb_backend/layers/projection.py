"""What a projection is, before it is stored in any format: sizes, names in the checkpoint, who has what of it.

Only products know this: what is around them sees tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.placement import Shard


class Split(Enum):
    """What each device of a group has of a projection's weight [out_size, in_size]."""

    NONE = "none"  # all of it
    ROWS = "rows"  # its part of the output features of each part
    COLUMNS = "columns"  # its part of the input features: its product is a partial sum


class Part(NamedTuple):
    """One of the projections that are fused to one weight: where its rows are, here and in the checkpoint."""

    name: str  # of the module in the checkpoint
    rows: slice  # of the fused weight
    weight_shard: Shard | None
    bias_shard: Shard | None
    transform: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Several projections of the same input are one weight, so one product: `parts` in row order."""

    name: str  # of the module in the checkpoint that holds the parts; empty: they are at the top
    in_size: int
    parts: Mapping[str, int]  # name in the checkpoint -> number of output features
    has_bias: bool = False
    split: Split = Split.NONE
    transforms: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # of a part's rows, by its name
    is_gated: bool = False  # its product is used as silu(first half) * second half, and not otherwise
    stored_as: str | None = None  # name of the one module that holds all parts in the checkpoint; None: they are apart

    def module(self, part: str) -> str:
        """The full name of a part, or of what stores all parts."""
        return f"{self.name}.{part}" if self.name else part

    def sizes(self, group_size: int) -> tuple[int, int]:
        """(out_size, in_size) on each device of a group. Raises `ConfigError` where the group does not divide them."""
        shared = {Split.NONE: [], Split.ROWS: list(self.parts.values()), Split.COLUMNS: [self.in_size]}[self.split]
        for size in shared:
            if size % group_size:
                raise ConfigError(
                    f"{self.name}: {size} features cannot be shared out among {group_size} devices; use a number of "
                    "devices that divides it"
                )
        by_rows, by_columns = (group_size if self.split is split else 1 for split in (Split.ROWS, Split.COLUMNS))
        return sum(self.parts.values()) // by_rows, self.in_size // by_columns

    def places(self, rank: int, group_size: int) -> Iterator[Part]:
        """Each part, as device `rank` of the group has it."""
        by_rows = group_size if self.split is Split.ROWS else 1
        whole = sum(self.parts.values())
        row = stored_row = 0
        for name, stored_size in self.parts.items():
            size = stored_size // by_rows
            shard: Shard | None = None
            first = size * rank if by_rows > 1 else 0
            if self.stored_as is not None:
                shard = Shard(0, stored_row + first, size, whole)
            elif by_rows > 1:
                shard = Shard(0, first, size, stored_size)
            weight_shard = shard
            if self.split is Split.COLUMNS and group_size > 1:
                columns = self.in_size // group_size
                weight_shard = Shard(1, columns * rank, columns, self.in_size)
            yield Part(
                self.module(self.stored_as or name),
                slice(row, row + size),
                weight_shard,
                shard,
                self.transforms.get(name),
            )
            row, stored_row = row + size, stored_row + stored_size
