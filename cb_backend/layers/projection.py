"""What a projection is, before it is stored in any format: sizes, names in the checkpoint, who has what of it.

Only products know this: what is around them sees tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from cb_backend.layers.placement import Shard
from cb_backend.parallel.shares import Share, equal_share, whole


class Split(Enum):
    """What each device of a group has of a projection's weight [out_size, in_size]."""

    NONE = "none"  # all of it
    ROWS = "rows"  # its part of the output features of each part
    COLUMNS = "columns"  # its part of the input features: its product is a partial sum


class Part(NamedTuple):
    """One of the projections that are fused to one weight: where its numbers are, here and in the checkpoint."""

    name: str  # of the module in the checkpoint
    rows: slice  # of the fused weight, without what pads them
    columns: slice  # the same
    share: Share  # of the rows that the checkpoint's tensor has
    weight_shard: Shard | None
    bias_shard: Shard | None
    transform: Callable[[Tensor], Tensor] | None

    @property
    def room(self) -> slice:
        """Rows of the fused weight, with those that pad them."""
        return slice(self.rows.start, self.rows.start + self.share.room)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Several projections of the same input are one weight, so one product: `parts` in row order."""

    name: str  # of the module in the checkpoint that holds the parts; empty: they are at the top
    in_size: int
    parts: Mapping[str, int]  # name in the checkpoint -> number of output features
    has_bias: bool = False
    split: Split = Split.NONE
    shares: Mapping[str, Share] = field(default_factory=dict)  # of a part's rows, by its name; {}: equal ones
    columns: Share | None = None  # this device's, where columns are split; None: equal ones
    transforms: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # of a part's rows, by its name
    is_gated: bool = False  # its product is used as silu(first half) * second half, and not otherwise
    stored_as: str | None = None  # name of the one module that holds all parts in the checkpoint; None: they are apart

    def module(self, part: str) -> str:
        """The full name of a part, or of what stores all parts."""
        return f"{self.name}.{part}" if self.name else part

    def rows_of(self, part: str, rank: int, group_size: int) -> Share:
        """A part's rows on a device. Raises `ConfigError` where the group does not divide what is shared equally."""
        size = self.parts[part]
        if self.split is not Split.ROWS or group_size == 1:
            return whole(size)
        return self.shares[part] if part in self.shares else equal_share(size, rank, group_size, self.module(part))

    def columns_of(self, rank: int, group_size: int) -> Share:
        """The same of the columns."""
        if self.split is not Split.COLUMNS or group_size == 1:
            return whole(self.in_size)
        return self.columns or equal_share(self.in_size, rank, group_size, self.name)

    def sizes(self, rank: int, group_size: int) -> tuple[int, int]:
        """(out_size, in_size) on each device, padding included. Raises `ConfigError` as `rows_of` does."""
        rows = sum(self.rows_of(part, rank, group_size).room for part in self.parts)
        return rows, self.columns_of(rank, group_size).room

    def places(self, rank: int, group_size: int) -> Iterator[Part]:
        """Each part, as device `rank` of the group has it."""
        columns = self.columns_of(rank, group_size)
        row = stored_row = 0
        for name, size in self.parts.items():
            share = self.rows_of(name, rank, group_size)
            shard: Shard | None = None
            if self.stored_as is not None:
                share = share._replace(start=stored_row + share.start)
                shard = Shard(0, share.start, share.size, sum(self.parts.values()))
            elif share != whole(size):
                shard = Shard(0, share.start, share.size, size)
            weight_shard = shard
            if columns != whole(self.in_size):
                weight_shard = Shard(1, columns.start, columns.size, self.in_size)
            yield Part(
                self.module(self.stored_as or name),
                slice(row, row + share.size),
                slice(0, columns.size),
                share,
                weight_shard,
                shard,
                self.transforms.get(name),
            )
            row, stored_row = row + share.room, stored_row + size
