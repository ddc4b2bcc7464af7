"""The adapters that are on the device: one slab, a row each, of which every projection's weights are views.

An adapter is one contiguous piece of memory, so that bringing one in is one copy and nothing is ever freed. Where in it
a projection's weights lie follows from the model alone: projections are added in the order in which layers are made.
Knows projections and memory, neither files nor who uses an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.lora import RANK_STEP
from cb_backend.layers.projection import Projection

_ALIGNED = 256  # bytes: of every tensor's begin, and of an adapter's


class AdaptedModule(NamedTuple):
    """A module of the checkpoint that an adapter may have weights for: one slice of a projection."""

    name: str
    rows: slice  # output features, of the projection's
    in_size: int
    reorder: Callable[[Tensor], Tensor] | None  # of the checkpoint's rows; None: they are as they are here

    @property
    def out_size(self) -> int:
        return int(self.rows.stop - self.rows.start)


class _Place(NamedTuple):
    """Of a tensor in an adapter's memory."""

    first: int  # byte
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Tensor:
        """memory [..., bytes_per_adapter] uint8 -> a view [..., *shape]."""
        last = self.first + math.prod(self.shape) * self.dtype.itemsize
        return memory[..., self.first : last].view(self.dtype).unflatten(-1, self.shape)


class AdapterSite:
    """A projection with room for what adapters add to it."""

    def __init__(self, modules: tuple[AdaptedModule, ...], places: tuple[_Place, _Place, _Place]) -> None:
        self.modules = modules
        self.slices = tuple(module.out_size for module in modules)
        self._places = places
        nothing = torch.empty(0)
        self.a = self.b = self.scales = nothing  # [max_adapters, ...]: see `weights`; there is none before `allocate`

    def weights(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of adapters' memory [..., bytes_per_adapter]: A [..., slices * rank, in_size], B [..., out_size, rank],
        scales [..., slices] float32."""
        a, b, scales = (place.of(memory) for place in self._places)
        return a, b, scales

    def take_views(self, slab: Tensor) -> None:
        self.a, self.b, self.scales = self.weights(slab)


@dataclass(slots=True, kw_only=True)
class AdapterTable:
    """Room for `max_adapters` adapters of up to `max_rank`; the slab is there after `allocate`."""

    max_adapters: int
    max_rank: int
    dtype: torch.dtype  # of the weights: the model's
    device: torch.device
    sites: list[AdapterSite] = field(default_factory=list)
    bytes_per_adapter: int = 0
    slab: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.uint8))

    @property
    def rank(self) -> int:
        """What all ranks are filled up to, with zeros."""
        return -(-self.max_rank // RANK_STEP) * RANK_STEP

    @property
    def nbytes(self) -> int:
        return self.max_adapters * self.bytes_per_adapter

    @property
    def modules(self) -> dict[str, tuple[AdapterSite, int]]:
        """(the projection, which of its slices) by the name of the module in the checkpoint."""
        return {module.name: (site, index) for site in self.sites for index, module in enumerate(site.modules)}

    def add(self, projection: Projection, group_size: int = 1) -> AdapterSite:
        """Room for a projection more. Raises `ConfigError` where several devices share it."""
        if group_size > 1:
            raise ConfigError(f"{projection.name}: adapters (enable_lora) are supported on one device only")
        modules = adapted_modules(projection)
        out_size = sum(projection.parts.values())
        shapes = (
            ((len(modules) * self.rank, projection.in_size), self.dtype),
            ((out_size, self.rank), self.dtype),
            ((len(modules),), torch.float32),
        )
        a, b, scales = (self._place(shape, dtype) for shape, dtype in shapes)
        site = AdapterSite(modules, (a, b, scales))
        self.sites.append(site)
        return site

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Place:
        place = _Place(self.bytes_per_adapter, shape, dtype)
        self.bytes_per_adapter += -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
        return place

    def allocate(self) -> None:
        """Make the slab, when every projection has been added."""
        self.slab = torch.zeros(self.max_adapters, self.bytes_per_adapter, dtype=torch.uint8, device=self.device)
        for site in self.sites:
            site.take_views(self.slab)

    def load(self, slot: int, packed: Tensor) -> None:
        """Start to copy an adapter (uint8 [bytes_per_adapter], pinned where the slab is on a GPU) to a slot.

        Steps launched before have what was there before; those launched afterwards have it.
        """
        self.slab[slot].copy_(packed, non_blocking=True)


def adapted_modules(projection: Projection) -> tuple[AdaptedModule, ...]:
    """The modules that are one in the checkpoint, in row order: each has one A and one B."""
    modules, parts, start = [], [], 0
    for part, size in projection.parts.items():
        parts.append((slice(start, start + size), projection.transforms.get(part)))
        modules.append(AdaptedModule(projection.module(part), *parts[-1][:1], projection.in_size, parts[-1][1]))
        start += size
    if projection.stored_as is None:
        return tuple(modules)

    def reorder(rows: Tensor) -> Tensor:
        return torch.cat([rows[own] if turn is None else turn(rows[own]) for own, turn in parts])

    is_plain = not projection.transforms
    whole = projection.module(projection.stored_as)
    return (AdaptedModule(whole, slice(0, start), projection.in_size, None if is_plain else reorder),)
