"""Experts whose weights have 4 or 8 bits an element: packed one expert at a time while they are loaded.

Each expert's matrices are read as those of a projection are (`packed_linear`); what that packs goes to its place among
all experts' and is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.expert_plan import ExpertPlan
from cb_backend.kernels.exponents import exponents_of
from cb_backend.kernels.grouped_packed import PackedExperts
from cb_backend.kernels.packed import KINDS, PackedWeight, StoredWeight
from cb_backend.layers.experts import ExpertLayer, bias_placements, new_biases
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.packed_linear import PackedLinear, bytes_a_group
from cb_backend.layers.packed_pieces import Piece
from cb_backend.layers.placement import Placement, shard_of
from cb_backend.layers.projection import Projection, Split
from cb_backend.layers.stored_matrix import StoredReader
from cb_backend.parallel.group import Group, NoGroup

MXFP4_GROUP = 32  # elements that share a scale, which is a power of two


def has_exponents(kind: str, group: int) -> bool:
    """Whether experts' scales are kept as exponents, a byte each (`kernels.exponents`)."""
    return (kind, group) == ("fp4", MXFP4_GROUP)


def bytes_a_group_of_experts(reader: StoredReader) -> int:
    """`bytes_a_group` of their weights."""
    return bytes_a_group(reader, 1 if has_exponents(reader.kind, reader.group) else None)


class Stack:
    """A device's experts' weights of one product; memory is asked for when the first expert's come."""

    def __init__(self, name: str, num_experts: int, *, is_gated: bool) -> None:
        self.name = name
        self.num_experts = num_experts
        self.is_gated = is_gated
        self._weight: PackedExperts | None = None

    @property
    def weight(self) -> PackedExperts:
        assert self._weight is not None, f"{self.name}: no expert has come"
        return self._weight

    def put(self, expert: int, packed: PackedWeight) -> None:
        """Raises `ConfigError` where it cannot be multiplied together with the others."""
        whole, own_scales = self._weight, packed.scales
        if has_exponents(packed.kind, packed.group):
            exponents = exponents_of(packed.scales)
            own_scales = packed.scales if exponents is None else exponents
        if whole is None:
            values, scales, zeros = (
                None if each is None else each.new_empty(self.num_experts, *each.shape)
                for each in (packed.values, own_scales, packed.zeros)
            )
            assert values is not None
            assert scales is not None
            whole = PackedExperts(values, scales, zeros, packed.kind, packed.group, packed.size, self.is_gated)
            self._weight = whole
        alike = (packed.kind, packed.group, packed.zeros is None, own_scales.dtype)
        if packed.global_scale != 1.0 or alike != (whole.kind, whole.group, whole.zeros is None, whole.scales.dtype):
            raise ConfigError(f"{self.name}.{expert}: supported are experts of one format, without a global scale")
        whole.values[expert].copy_(packed.values)
        whole.scales[expert].copy_(own_scales)
        if whole.zeros is not None and packed.zeros is not None:
            whole.zeros[expert].copy_(packed.zeros)


class ExpertProjection(PackedLinear):
    """One expert's matrices, as the checkpoint has them: what comes goes to a stack."""

    def __init__(self, stack: Stack, expert: int, *args: Any, **options: Any) -> None:
        self._stack, self._expert = stack, expert
        super().__init__(*args, **options)

    @property
    def bytes_a_group(self) -> int:
        return bytes_a_group_of_experts(self.reader)

    def _packed(self, parts: list[StoredWeight]) -> list[Piece]:
        pieces = super()._packed(parts)
        if len(pieces) > 1 or pieces[0].order is not None:
            raise ConfigError(
                f"{self.projection.name}: {self.reader.name} weights of experts are not supported where gate and up "
                "differ in their groups, or input features have an order of their own"
            )
        self._stack.put(self._expert, pieces[0].weight)
        return []


class PackedMixture:
    """A device's experts of a layer, packed."""

    projection_class: type[ExpertProjection] = ExpertProjection

    def __init__(
        self,
        layer: ExpertLayer,
        reader: StoredReader,
        ops: ModelOps,
        group: Group,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = layer.module
        if (reader.kind, reader.group) == ("int8", 32):
            raise ConfigError(
                f"{self.name}: experts of 8 bits are not supported in groups of 32; use a quantisation in groups of 64"
                " or 128, or with a scale a channel"
            )
        if fault := reader.fault_in_experts:
            raise ConfigError(f"{self.name}: experts in {reader.name} are not supported, because {fault}")
        self.spec, self.held, self.hidden_size = layer.spec, layer.held, layer.hidden_size
        self.ops, self.reader = ops, reader
        self._layer = layer
        self.bits = KINDS[reader.kind].bits
        self.gate_up = Stack(self.name, layer.held.experts.size, is_gated=True)
        self.down = Stack(self.name, layer.held.experts.size, is_gated=False)
        self.biases = new_biases(layer, group, dtype, device)
        self._device, self._dtype = device, dtype
        self._projections = list(self._new_projections(group)) if layer.spec.storage == "apart" else []

    def _new_projections(self, group: Group) -> Iterator[tuple[ExpertProjection, bool]]:
        """Each expert's, where a checkpoint has them apart; and whether this device has the expert."""
        spec, held, hidden_size = self.spec, self.held, self.hidden_size
        names, size, share = spec.names, spec.intermediate_size, held.inner.share
        group = NoGroup() if held.is_spread(spec) else group  # an expert's matrices are whole where it is
        for expert in range(spec.num_experts):
            place = held.place_of(expert)
            for stack, in_size, parts in (
                (self.gate_up, hidden_size, {names.gate: size, names.up: size}),
                (self.down, size, {names.down: hidden_size}),
            ):
                projection = Projection(
                    name=f"{self.name}.{expert}",
                    in_size=in_size,
                    parts=parts,
                    split=Split.ROWS if stack.is_gated else Split.COLUMNS,
                    shares=dict.fromkeys(parts, share),
                    columns=share,
                    is_gated=stack.is_gated,
                )
                its = self.projection_class(
                    stack, place or 0, projection, self.ops, group, self.reader, dtype=self._dtype, device=self._device
                )
                yield its, place is not None

    def __call__(self, x: Tensor, weights: Tensor, plan: ExpertPlan, parts: Tensor) -> None:
        spec, (gate_up_bias, down_bias) = self.spec, self.biases
        inner = self.ops.grouped_gate_up_packed(x, self.gate_up.weight, plan, spec.top_k, spec.activation, gate_up_bias)
        self.ops.grouped_down_packed(inner, self.down.weight, plan, weights, parts, down_bias)

    def placements(self) -> Iterator[Placement]:
        for projection, is_here in self._projections:
            for placement in projection.placements():
                yield placement if is_here else placement.elsewhere()
        own = shard_of(self.held.experts, self.spec.num_experts)
        yield from (placement._replace(shard=own) for placement in self._placements_of_stacks())
        yield from bias_placements(self._layer, self.biases)

    def _placements_of_stacks(self) -> Iterator[Placement]:
        """Of tensors that hold all experts', in a checkpoint that has such: as if it had this device's alone."""
        yield from ()
