"""What a projection of few bits multiplies with: pieces of its rows, each one product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cb_backend.kernels.packed import PackedWeight, StoredWeight
from cb_backend.layers.op_signatures import ModelOps


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of the projection that are one product."""

    weight: PackedWeight
    rows: slice
    order: Tensor | None  # int64 [in_size]: of the inputs; None: as they come

    def product(self, ops: ModelOps, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        x = ordered(x, self.order)
        if not self.weight.is_gated:
            return ops.linear_packed(x, self.weight, bias, out)
        # Rows of gate and up lie in turn. The product of such a weight is for the few who cannot use it activated.
        rows = ops.linear_packed(x, replace(self.weight, is_gated=False))
        return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)


@dataclass(frozen=True, slots=True)
class PlainPiece:
    """The same of a weight whose groups a device's share does not come out with: its numbers, in the inputs' dtype."""

    weight: Tensor  # [out_size, in_size]
    rows: slice

    def product(self, ops: ModelOps, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        return ops.linear(x, self.weight, bias, out)


def ordered(x: Tensor, order: Tensor | None) -> Tensor:
    """Inputs [num_rows, in_size] in a weight's own order; None: as they come."""
    return x if order is None else x.index_select(1, order)


def go_together(first: StoredWeight, other: StoredWeight) -> bool:
    """Whether two matrices of the same inputs can be one: their scales have the same places and units."""
    same_order = (first.order is None) == (other.order is None) and (
        first.order is None or other.order is None or torch.equal(first.order, other.order)
    )
    return (
        same_order
        and (first.kind, first.group, first.global_scale) == (other.kind, other.group, other.global_scale)
        and (first.zeros is None) == (other.zeros is None)
        and (first.shifts is None) == (other.shifts is None)
        and first.scales.dtype == other.scales.dtype
    )


def joined(parts: list[StoredWeight]) -> StoredWeight:
    """One matrix of the rows of several, which go together."""
    zeros = [part.zeros for part in parts if part.zeros is not None]
    shifts = [part.shifts for part in parts if part.shifts is not None]
    return parts[0]._replace(
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
        shifts=torch.cat(shifts) if shifts else None,
    )
