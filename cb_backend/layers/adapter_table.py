"""The adapters that are on the device: one slab, a row each, of which every projection's weights are views.

An adapter is one contiguous piece of memory, so that bringing one in is one copy and nothing is ever freed. Where in it
a projection's weights lie follows from the model alone: projections are added in the order in which layers are made.
Where several devices share the model, each has its share of every adapter: of a projection whose output features are
shared A whole and its rows of B, of one whose input features are shared its columns of A and B whole. What it adds is
then a part of the partial sum that the devices add up anyway.
Knows projections and memory, neither files nor who uses an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cb_backend.kernels.lora_shrink import RANK_STEP
from cb_backend.layers.projection import Projection
from cb_backend.parallel.shares import Share

_ALIGNED = 256  # bytes: of every tensor's begin, and of an adapter's


class AdaptedModule(NamedTuple):
    """A module of the checkpoint that an adapter may have weights for: one slice of a projection."""

    name: str
    rows: slice  # output features, of the whole projection's
    in_size: int  # the same
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


class _DeviceShare(NamedTuple):
    """What of a projection's A and B a device has."""

    columns: Share  # of A
    rows: tuple[tuple[slice, slice], ...]  # of B: (in the whole, here), a part each


class AdapterSite:
    """A projection with room for what adapters add to it on this device."""

    def __init__(
        self,
        modules: tuple[AdaptedModule, ...],
        slices: tuple[int, ...],
        places: tuple[_Place, _Place, _Place],
        share: _DeviceShare,
    ) -> None:
        self.modules = modules
        self.slices = slices  # output features of each module on this device, with those that pad them
        self._places = places
        self._share = share
        nothing = torch.empty(0)
        self.a = self.b = self.scales = nothing  # [max_adapters, ...]: see `weights`; there is none before `allocate`

    def weights(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of adapters' memory [..., bytes_per_adapter]: A [..., slices * rank, in_size], B [..., out_size, rank],
        scales [..., slices] float32."""
        a, b, scales = (place.of(memory) for place in self._places)
        return a, b, scales

    def take_views(self, slab: Tensor) -> None:
        self.a, self.b, self.scales = self.weights(slab)

    def take_share(self, whole: tuple[Tensor, Tensor, Tensor], memory: Tensor) -> None:
        """Copy this device's share of (A, B, scales) as one device has them to an adapter's memory here, of zeros."""
        (whole_a, whole_b, whole_scales), (a, b, scales) = whole, self.weights(memory)
        columns = self._share.columns
        a[:, : columns.size].copy_(whole_a[:, columns.start : columns.stop])
        for there, here in self._share.rows:
            b[here].copy_(whole_b[there])
        scales.copy_(whole_scales)


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
    _whole: AdapterTable | None = None

    @property
    def whole(self) -> AdapterTable:
        """The places of whole adapters, as one device has them; where several share the model, on the host and without
        a slab."""
        return self._whole or self

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

    def add(self, projection: Projection, device_rank: int = 0, group_size: int = 1) -> AdapterSite:
        """Room for a projection more: for the share of device `device_rank` of a group of so many."""
        if group_size > 1:
            if self._whole is None:
                self._whole = AdapterTable(
                    max_adapters=self.max_adapters, max_rank=self.max_rank, dtype=self.dtype, device=torch.device("cpu")
                )
            self._whole.add(projection)
        modules = adapted_modules(projection)
        out_size, in_size = projection.sizes(device_rank, group_size)
        shapes = (
            ((len(modules) * self.rank, in_size), self.dtype),
            ((out_size, self.rank), self.dtype),
            ((len(modules),), torch.float32),
        )
        a, b, scales = (self._place(shape, dtype) for shape, dtype in shapes)
        rooms = [projection.rows_of(part, device_rank, group_size).room for part in projection.parts]
        slices = tuple(rooms) if len(modules) == len(rooms) else (out_size,)  # stored as one
        site = AdapterSite(modules, slices, (a, b, scales), _device_share(projection, device_rank, group_size))
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

    def new_host_memory(self) -> Tensor:
        """Zeros for an adapter in host memory: uint8 [bytes_per_adapter], pinned where the slab is on a GPU. Raises
        `MemoryError`."""
        try:
            return torch.zeros(self.bytes_per_adapter, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        except RuntimeError as error:  # as torch says it
            raise MemoryError(str(error)) from None

    def share_of(self, whole: Tensor) -> Tensor:
        """This device's share, in new host memory, of an adapter uint8 [whole.bytes_per_adapter]. Raises
        `MemoryError`."""
        memory = self.new_host_memory()
        for site, its_whole in zip(self.sites, self.whole.sites, strict=True):
            site.take_share(its_whole.weights(whole), memory)
        return memory

    def load(self, slot: int, packed: Tensor) -> None:
        """Start to copy an adapter (uint8 [bytes_per_adapter], pinned where the slab is on a GPU) to a slot.

        Steps launched before have what was there before; those launched afterwards have it.
        """
        self.slab[slot].copy_(packed, non_blocking=True)


def _device_share(projection: Projection, device_rank: int, group_size: int) -> _DeviceShare:
    rows, start, own_start = [], 0, 0
    for part, size in projection.parts.items():
        share = projection.rows_of(part, device_rank, group_size)
        there = slice(start + share.start, start + share.stop)
        rows.append((there, slice(own_start, own_start + share.size)))
        start, own_start = start + size, own_start + share.room
    return _DeviceShare(projection.columns_of(device_rank, group_size), tuple(rows))


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
