"""A projection that is plain on the device, and of which a checkpoint may have parts in few bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cb_backend.layers.linear import Linear
from cb_backend.layers.placement import Placement
from cb_backend.layers.projection import Part
from cb_backend.layers.stored_matrix import StoredMatrix, StoredReader
from cb_backend.layers.stored_shares import written_out


class WrittenOutLinear(Linear):
    """`Linear`, whole on every device; parts in few bits are written out as they come, since they are small."""

    def __init__(self, readers: Mapping[str, StoredReader], *args: Any, **options: Any) -> None:
        """readers: of the parts in few bits, by their modules' full names."""
        self._readers = readers
        super().__init__(*args, **options)

    def _placements_of(self, part: Part) -> Iterator[Placement]:
        reader = self._readers.get(part.name)
        if reader is None:
            yield from super()._placements_of(part)
            return
        weight = self.weight[part.rows]
        matrix = StoredMatrix(reader, *weight.shape)
        for suffix in matrix.tensors:
            yield Placement(f"{part.name}.{suffix}", WrittenOutTensor(matrix, weight, suffix))


class WrittenOutTensor:
    """Where one tensor of a matrix goes; what becomes of all of them counts at the first."""

    def __init__(self, matrix: StoredMatrix, weight: Tensor, suffix: str) -> None:
        shape, self.dtypes = matrix.tensors[suffix]
        self.shape = torch.Size(shape)
        self.reader = matrix.reader
        self.device = weight.device
        self.format_name = str(weight.dtype).removeprefix("torch.")
        self._is_first = matrix.is_first(suffix)
        self.nbytes = weight.nbytes if self._is_first else 0
        self.num_weights = weight.numel() if self._is_first else 0
        self._matrix, self._weight, self._suffix = matrix, weight, suffix

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, source: Tensor) -> None:
        stored = self._matrix.take(self._suffix, source.to(self.device))
        if stored is not None:
            self._weight.copy_(written_out(stored))

    def normal_(self, mean: float, std: float, *, generator: torch.Generator | None = None) -> None:
        if self._is_first:
            self._weight.normal_(mean, std, generator=generator)
