"""A projection that is plain on the device, and of which a checkpoint may have parts in few bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cb_backend.layers.linear import Linear
from cb_backend.layers.packed_linear import StoredReader
from cb_backend.layers.placement import Placement
from cb_backend.layers.projection import Part
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
        matrix = _Matrix(reader, self.weight[part.rows])
        for suffix in matrix.stored:
            yield Placement(f"{part.name}.{suffix}", WrittenOutTensor(matrix, suffix))


class _Matrix:
    """A part's tensors, until all have come."""

    def __init__(self, reader: StoredReader, weight: Tensor) -> None:
        self.weight = weight
        out_size, in_size = weight.shape
        self.stored = reader.tensors(out_size, in_size)
        self.reader = reader
        self._come: dict[str, Tensor] = {}

    def take(self, suffix: str, tensor: Tensor) -> None:
        """Raises `ValueError` or `ConfigError` for what cannot be used."""
        self._come[suffix] = tensor
        if len(self._come) < len(self.stored):
            return
        come, self._come = self._come, {}
        stored = self.reader.read({suffix: come[suffix] for suffix in self.stored})
        if not bool(stored.scales.float().isfinite().all()):
            raise ValueError("belongs to a matrix with a scale that is not finite")
        self.weight.copy_(written_out(stored))


class WrittenOutTensor:
    """Where one tensor of a matrix goes; what becomes of all of them counts at the first."""

    def __init__(self, matrix: _Matrix, suffix: str) -> None:
        shape, self.dtypes = matrix.stored[suffix]
        self.shape = torch.Size(shape)
        self.reader = matrix.reader
        self.device = matrix.weight.device
        self.format_name = str(matrix.weight.dtype).removeprefix("torch.")
        self._is_first = suffix == next(iter(matrix.stored))
        self.nbytes = matrix.weight.nbytes if self._is_first else 0
        self.num_weights = matrix.weight.numel() if self._is_first else 0
        self._matrix, self._suffix = matrix, suffix

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, source: Tensor) -> None:
        self._matrix.take(self._suffix, source.to(self.device).reshape(self.shape))  # as `ModuleTensor` does

    def normal_(self, mean: float, std: float, *, generator: torch.Generator | None = None) -> None:
        if self._is_first:
            self._matrix.weight.normal_(mean, std, generator=generator)
