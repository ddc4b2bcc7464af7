"""Where each of a checkpoint's tensors goes, and what happens to it on the way.

Layers list their placements; whoever loads, fills them. Nothing here knows files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cb_backend.parallel.shares import Share, whole

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # what a plain tensor may be in a checkpoint


class Fillable(Protocol):
    """A tensor, or what takes a checkpoint's tensor as one would. The latter may say of itself its `format_name`, and
    the `num_weights` that the checkpoint's tensor stands for (0 of scales and the like).
    """

    @property
    def shape(self) -> torch.Size: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def nbytes(self) -> int: ...  # of what is kept on the device
    def numel(self) -> int: ...
    def copy_(self, source: Tensor) -> Any: ...
    def normal_(self, mean: float, std: float, *, generator: torch.Generator | None) -> Any: ...


class Shard(NamedTuple):
    """The part of a checkpoint's tensor that is wanted: `size` of the `whole` entries of dimension `dim`."""

    dim: int
    start: int
    size: int
    whole: int

    def of(self, tensor: Tensor) -> Tensor:
        """A view."""
        return tensor.narrow(self.dim, self.start, self.size)


def shard_of(share: Share, whole_size: int, dim: int = 0) -> Shard | None:
    """None: it is all of the dimension."""
    return None if share == whole(whole_size) else Shard(dim, share.start, share.size, whole_size)


class Elsewhere:
    """Where a tensor goes that another device of the group has: it is known, and not read."""

    nbytes = num_weights = 0

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape = torch.Size(shape)  # in the checkpoint
        self.device = device

    def numel(self) -> int:
        return 0

    def copy_(self, source: Tensor) -> None:
        """It is not for this device."""

    def normal_(self, mean: float, std: float, *, generator: torch.Generator | None = None) -> None:
        """Neither are random numbers."""


class Placement(NamedTuple):
    """One tensor of the checkpoint and its place. `transform` keeps the shape, and its results need not be views."""

    name: str  # in the checkpoint
    target: Fillable
    shard: Shard | None = None  # None: all of it
    transform: Callable[[Tensor], Tensor] | None = None  # of the shard; None: as it is

    @property
    def shape(self) -> tuple[int, ...]:
        """What the checkpoint's tensor must have."""
        shape = list(self.target.shape)
        if self.shard is not None:
            shape[self.shard.dim] = self.shard.whole
        return tuple(shape)

    @property
    def is_read(self) -> bool:
        """Whether this device has anything of the tensor."""
        return not isinstance(self.target, Elsewhere) and not self.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether this device's share of the tensor came out as nothing, but for what pads it."""
        return self.shard is not None and not self.shard.size

    def elsewhere(self) -> Placement:
        """The same tensor where another device has all of it."""
        return Placement(self.name, Elsewhere(self.shape, self.target.device))

    def prepare(self, tensor: Tensor) -> Tensor:
        """What of the checkpoint's tensor goes to the target."""
        tensor = tensor if self.shard is None else self.shard.of(tensor)
        return tensor if self.transform is None else self.transform(tensor)
