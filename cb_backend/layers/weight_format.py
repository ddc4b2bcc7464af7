"""What projections are stored as. Which format a module has is chosen by its name, when the model is built."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Protocol

import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.packed import KINDS, TILE_ROWS
from cb_backend.layers.experts import ExpertLayer, Experts, PlainExperts
from cb_backend.layers.fp8_experts import Fp8Mixture, Fp8Reader
from cb_backend.layers.fp8_linear import Fp8Linear
from cb_backend.layers.linear import Linear, PartialLinear
from cb_backend.layers.mxfp4_experts import Mxfp4Mixture
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.packed_experts import PackedMixture, bytes_a_group_of_experts
from cb_backend.layers.packed_linear import PackedLinear, bytes_a_group
from cb_backend.layers.projection import Projection, Split
from cb_backend.layers.separate_linear import SeparateLinear, part_of
from cb_backend.layers.stored_matrix import StoredReader
from cb_backend.parallel.group import Group

ALIGNED = 16  # features: what the products' loads are aligned to


class WeightFormat(Protocol):
    """A way to store a projection's weight, and to multiply with it."""

    @property
    def name(self) -> str: ...
    @property
    def granule(self) -> int:
        """Features that stay together where several devices share a matrix."""
        ...

    def new_linear(
        self, projection: Projection, ops: ModelOps, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        """An empty projection. `dtype` is that of its inputs and products."""
        ...

    def new_experts(
        self, layer: ExpertLayer, ops: ModelOps, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> Experts:
        """What the device has of the layer's experts, empty.

        Raises `ConfigError` where the format has no such experts.
        """
        ...


class PlainFormat:
    """Weights in the model's dtype."""

    name = "plain"
    granule = ALIGNED

    def new_linear(
        self, projection: Projection, ops: ModelOps, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        is_partial = group.size > 1 and projection.split is Split.COLUMNS
        kind = PartialLinear if is_partial else Linear
        return kind(projection, ops, group, dtype=dtype, device=device)

    def new_experts(
        self, layer: ExpertLayer, ops: ModelOps, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> PlainExperts:
        return PlainExperts(layer, ops, group, dtype=dtype, device=device)


class PlainUnlessPacked(PlainFormat):
    """Of modules that a configuration leaves out by a part of their names, which may be fewer: the files tell."""


class Fp8Format:
    """Weights in fp8 (e4m3) with a scale for each output feature."""

    name = "fp8"
    granule = ALIGNED

    def new_linear(
        self, projection: Projection, ops: ModelOps, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> Fp8Linear:
        return Fp8Linear(projection, ops, group, dtype=dtype, device=device)

    def new_experts(
        self, layer: ExpertLayer, ops: ModelOps, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> PackedMixture:
        return Fp8Mixture(layer, Fp8Reader(), ops, group, dtype=dtype, device=device)


class PackedFormat:
    """Weights of 4 or 8 bits, as a checkpoint stores them."""

    def __init__(self, reader: StoredReader) -> None:
        self.name = reader.name
        self.granule = max(TILE_ROWS, reader.group)
        self._reader = reader

    @property
    def reader(self) -> StoredReader:
        return self._reader

    @property
    def bytes_per_weight(self) -> float:
        """With its share of what its group has beside it."""
        return self._with_share(bytes_a_group(self._reader))

    @property
    def bytes_per_expert_weight(self) -> float:
        """The same of experts, whose scales may be kept in fewer bits."""
        return self._with_share(bytes_a_group_of_experts(self._reader))

    def _with_share(self, num_bytes: int) -> float:
        group = self._reader.group
        return KINDS[self._reader.kind].bits / 8 + (0.0 if group == -1 else num_bytes / group)

    def new_linear(
        self, projection: Projection, ops: ModelOps, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> PackedLinear:
        return PackedLinear(projection, ops, group, self._reader, dtype=dtype, device=device)

    def new_experts(
        self, layer: ExpertLayer, ops: ModelOps, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> PackedMixture:
        if layer.spec.storage == "stacked":
            raise ConfigError(f"{layer.name}: {self.name} weights of this family are not supported")
        kind = Mxfp4Mixture if layer.spec.storage == "interleaved" else PackedMixture
        return kind(layer, self._reader, ops, group, dtype=dtype, device=device)


class SeparateFormats:
    """Each part of a projection in a format of its own."""

    def __init__(self, formats: Mapping[str, WeightFormat]) -> None:
        self.name = ", ".join(f"{part} {found.name}" for part, found in formats.items())
        self._formats = formats

    def new_linear(
        self, projection: Projection, ops: ModelOps, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> SeparateLinear:
        parts = {
            name: its_format.new_linear(part_of(projection, name), ops, group, dtype=dtype, device=device)
            for name, its_format in self._formats.items()
        }
        return SeparateLinear(projection, parts, ops, group, dtype=dtype, device=device)


def _is_likely_packed(module: str) -> bool:
    """Of `PlainUnlessPacked`, where there are no files: what writers leave out of a mixture by `gate` is its router."""
    return ".experts." in module


class ModuleFormats:
    """The format of each module, by its name in the checkpoint (`model.layers.3.mlp.down_proj`)."""

    def __init__(
        self, default: WeightFormat, exceptions: Sequence[tuple[str, WeightFormat]] = (), ignored: str | None = None
    ) -> None:
        """exceptions: (regular expression, format); the first one that matches a whole name decides. ignored: regular
        expression of the names of tensors that such checkpoints have and nobody needs.
        """
        self.ignored = ignored
        self.is_packed: Callable[[str], bool] = _is_likely_packed
        self._plain: frozenset[str] = frozenset()
        self._default = default
        self._exceptions = [(re.compile(pattern), its_format) for pattern, its_format in exceptions]

    @property
    def default(self) -> WeightFormat:
        """Of modules that are no exception."""
        return self._default

    def __call__(self, module: str) -> WeightFormat:
        if module in self._plain:
            return PlainFormat()
        found = next((found for pattern, found in self._exceptions if pattern.fullmatch(module)), self._default)
        return self._default if isinstance(found, PlainUnlessPacked) and self.is_packed(module) else found

    def reader_of_packed(self, module: str) -> StoredReader | None:
        """Of a module that is plain on the device whatever its format: how the files store it; None: plain."""
        found = self(module)
        return found.reader if isinstance(found, PackedFormat) and self.is_packed(module) else None

    def in_files(self, is_packed: Callable[[str], bool]) -> ModuleFormats:
        """The same of a checkpoint that is there; is_packed: whether its files have a module in few bits."""
        changed = copy(self)
        changed.is_packed = is_packed
        return changed

    def with_plain(self, modules: Iterable[str]) -> ModuleFormats:
        """The same, but for modules that are as they are in an unquantised checkpoint."""
        changed = copy(self)
        changed._plain = self._plain.union(modules)
        return changed

    def changed(self, change: Callable[[WeightFormat], WeightFormat]) -> ModuleFormats:
        """The same modules in other formats, by what `change` makes of each."""
        found = copy(self)
        found._default = change(self._default)
        found._exceptions = [(pattern, change(its_format)) for pattern, its_format in self._exceptions]
        return found

    def of(self, projection: Projection) -> WeightFormat | SeparateFormats:
        """The format that all parts have, or one of each. Raises `ConfigError` where one of several is fp8, whose
        inputs are others than those of all other formats.
        """
        stored = [projection.stored_as] if projection.stored_as else list(projection.parts)
        formats = {name: self(projection.module(name)) for name in stored}
        if len({found.name for found in formats.values()}) == 1:
            return next(iter(formats.values()))
        if any(isinstance(found, Fp8Format) for found in formats.values()):
            given = ", ".join(f"{projection.module(name)} is {found.name}" for name, found in formats.items())
            raise ConfigError(f"{given}: supported is one format for projections of the same input")
        return SeparateFormats(formats)
