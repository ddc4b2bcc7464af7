"""A matrix of 4 or 8 bits as a checkpoint has it: several tensors, which a reader makes one of when all have come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.packed import StoredWeight


class StoredAs(NamedTuple):
    """What a checkpoint has for one tensor of a module."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]  # any of these


class StoredReader(Protocol):
    """How a checkpoint stores a projection's weight."""

    @property
    def name(self) -> str:
        """Of the format, for messages; the same for what may be fused."""
        ...

    @property
    def kind(self) -> str:
        """Of `kernels.packed.KINDS`."""
        ...

    @property
    def group(self) -> int:
        """Elements that share a scale; -1: all of a row."""
        ...

    @property
    def has_zeros(self) -> bool:
        """Whether groups have zero points of their own."""
        ...

    @property
    def has_shifts(self) -> bool:
        """Whether groups have a number that is added to their elements."""
        ...

    @property
    def fault_in_experts(self) -> str:
        """Why experts cannot be stored so, and what to do; empty: they can."""
        ...

    def tensors(self, out_size: int, in_size: int) -> Mapping[str, StoredAs]:
        """The module's tensors, by the last part of their names."""
        ...

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        """Raises `ConfigError` for tensors that contradict each other."""
        ...


class StoredMatrix:
    """One module's, until all of it has come: in any order, from several threads and files."""

    def __init__(self, reader: StoredReader, out_size: int, in_size: int) -> None:
        self.reader = reader
        self.tensors = reader.tensors(out_size, in_size)  # what there is of it
        self._come: dict[str, Tensor] = {}

    def is_first(self, suffix: str) -> bool:
        """Of the tensor at which all that becomes of the matrix counts."""
        return suffix == next(iter(self.tensors))

    def take(self, suffix: str, tensor: Tensor) -> StoredWeight | None:
        """The matrix, once its last tensor has come. Raises `ValueError` for one that cannot be used: whoever fills
        knows the file and the tensor's name.
        """
        # Writers leave dimensions of one out, or add them.
        self._come[suffix] = tensor.reshape(self.tensors[suffix].shape)
        if len(self._come) < len(self.tensors):
            return None
        come, self._come = self._come, {}
        try:
            stored = self.reader.read({suffix: come[suffix] for suffix in self.tensors})
        except ConfigError as error:
            raise ValueError(f"belongs to a matrix that cannot be read: {error}") from None
        if not bool(stored.scales.float().isfinite().all()):
            raise ValueError("belongs to a matrix with a scale that is not finite")
        return stored
