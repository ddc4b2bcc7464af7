"""Experts whose weights have 4 or 8 bits an element: packed one expert at a time while they are loaded.

Each expert's matrices are read as those of a projection are (`packed_linear`); what that packs goes to its place among
all experts' and is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.expert_plan import ExpertPlan
from cb_backend.kernels.fp8 import FP8
from cb_backend.kernels.grouped_packed import PackedExperts
from cb_backend.kernels.packed import KINDS, PackedWeight, StoredWeight, pack
from cb_backend.layers.experts import bias_placements, halves_of_rows, new_biases
from cb_backend.layers.fp8_linear import QuantizedRows
from cb_backend.layers.group import Group
from cb_backend.layers.layer_spec import MoESpec
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.packed_linear import PackedLinear, Piece, StoredReader
from cb_backend.layers.placement import Placement
from cb_backend.layers.projection import Part, Projection


class Stack:
    """All experts' weights of one product; memory is asked for when the first expert's come."""

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
        whole = self._weight
        if whole is None:
            values, scales, zeros = (
                None if each is None else each.new_empty(self.num_experts, *each.shape)
                for each in (packed.values, packed.scales, packed.zeros)
            )
            assert values is not None
            assert scales is not None
            whole = PackedExperts(values, scales, zeros, packed.kind, packed.group, packed.size, self.is_gated)
            self._weight = whole
        alike = (packed.kind, packed.group, packed.zeros is None, packed.scales.dtype)
        if packed.global_scale != 1.0 or alike != (whole.kind, whole.group, whole.zeros is None, whole.scales.dtype):
            raise ConfigError(f"{self.name}.{expert}: supported are experts of one format, without a global scale")
        whole.values[expert].copy_(packed.values)
        whole.scales[expert].copy_(packed.scales)
        if whole.zeros is not None and packed.zeros is not None:
            whole.zeros[expert].copy_(packed.zeros)


class ExpertProjection(PackedLinear):
    """One expert's matrices, as the checkpoint has them: what comes goes to a stack."""

    def __init__(self, stack: Stack, expert: int, *args: Any, **options: Any) -> None:
        self._stack, self._expert = stack, expert
        super().__init__(*args, **options)

    def _packed(self, parts: list[StoredWeight]) -> list[Piece]:
        pieces = super()._packed(parts)
        if len(pieces) > 1 or pieces[0].order is not None:
            raise ConfigError(
                f"{self.projection.name}: {self.reader.name} weights of experts are not supported where gate and up "
                "differ in their groups, or input features have an order of their own"
            )
        self._stack.put(self._expert, pieces[0].weight)
        return []


class Fp8Reader:
    """fp8 with a scale for each output feature, or what becomes that while it is loaded."""

    name, kind, group, has_zeros, has_shifts = "fp8", "fp8", -1, False, False

    def tensors(self, out_size: int, in_size: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (out_size, in_size), "weight_scale": (out_size,)}

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        """Of rows that have been quantised: `weight` [out_size, in_size] and `weight_scale` [out_size]."""
        values, scales = tensors["weight"], tensors["weight_scale"]
        return StoredWeight(values.view(torch.uint8), scales.unsqueeze(1), None, self.kind, values.shape[1])


class Fp8ExpertProjection(ExpertProjection):
    """The same of fp8 checkpoints, and of others that are quantised while they are loaded."""

    def _placements_of(self, part: Part) -> Iterator[Placement]:
        module = self._modules[part.name]
        shape = (module.rows.stop - module.rows.start, self.size[1])
        target = ExpertRows(shape, self.device, self.dtype, lambda stored: self._add(module, stored))
        yield Placement(f"{part.name}.weight", target)


class ExpertRows(QuantizedRows):
    """Where a matrix goes that is kept in fp8 for as long as it takes to pack it."""

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
        done: Callable[[StoredWeight], None],
    ) -> None:
        self.shape = torch.Size(shape)
        self.device = device
        self.nbytes = shape[0] * (shape[1] + 4)
        self._dtype = dtype  # what random weights are drawn in
        self._done = done

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, source: Tensor) -> None:
        self._room()
        super().copy_(source)
        self._finish()

    def copy_quantised(self, values: Tensor, scales: Tensor) -> None:
        self._room()
        super().copy_quantised(values, scales)
        self._finish()

    def normal_(self, mean: float, std: float, generator: torch.Generator | None = None) -> None:
        self._room()
        super().normal_(mean, std, generator)
        self._finish()

    def _room(self) -> None:
        self.values = torch.empty(self.shape, dtype=FP8, device=self.device)
        self.scales = torch.empty(self.shape[0], dtype=torch.float32, device=self.device)

    def _finish(self) -> None:
        stored = Fp8Reader().read({"weight": self.values, "weight_scale": self.scales})
        del self.values, self.scales
        self._done(stored)


class PackedMixture:
    """The experts of a layer, packed."""

    projection_class: type[ExpertProjection] = ExpertProjection

    def __init__(
        self,
        name: str,
        hidden_size: int,
        spec: MoESpec,
        reader: StoredReader,
        ops: ModelOps,
        group: Group,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        names, size = spec.names, spec.intermediate_size
        self.name = f"{name}.{names.experts}" if names.experts else name  # of the module in the checkpoint
        if (reader.kind, reader.group) == ("int8", 32):
            raise ConfigError(
                f"{self.name}: experts of 8 bits are not supported in groups of 32; use a quantisation in groups of 64"
                " or 128, or with a scale a channel"
            )
        self.spec, self.hidden_size, self.ops, self.reader = spec, hidden_size, ops, reader
        self.bits = KINDS[reader.kind].bits
        self.gate_up = Stack(self.name, spec.num_experts, is_gated=True)
        self.down = Stack(self.name, spec.num_experts, is_gated=False)
        self.biases = new_biases(spec, hidden_size, dtype, device)
        self._device, self._dtype = device, dtype
        self._projections: list[ExpertProjection] = []
        if spec.storage != "apart":
            return
        for expert in range(spec.num_experts):
            for stack, in_size, parts in (
                (self.gate_up, hidden_size, {names.gate: size, names.up: size}),
                (self.down, size, {names.down: hidden_size}),
            ):
                projection = Projection(
                    name=f"{self.name}.{expert}", in_size=in_size, parts=parts, is_gated=stack.is_gated
                )
                self._projections.append(
                    self.projection_class(stack, expert, projection, ops, group, reader, dtype=dtype, device=device)
                )

    def __call__(self, x: Tensor, weights: Tensor, plan: ExpertPlan, parts: Tensor) -> None:
        spec, (gate_up_bias, down_bias) = self.spec, self.biases
        inner = self.ops.grouped_gate_up_packed(x, self.gate_up.weight, plan, spec.top_k, spec.activation, gate_up_bias)
        self.ops.grouped_down_packed(inner, self.down.weight, plan, weights, parts, down_bias)

    def placements(self) -> Iterator[Placement]:
        for projection in self._projections:
            yield from projection.placements()
        yield from self._placements_of_stacks()
        yield from bias_placements(self.name, self.spec, self.biases)

    def _placements_of_stacks(self) -> Iterator[Placement]:
        """Of tensors that hold all experts', in a checkpoint that has such."""
        yield from ()


class Fp8Mixture(PackedMixture):
    """The experts of a layer in fp8, whatever the checkpoint has them in."""

    projection_class = Fp8ExpertProjection

    def _placements_of_stacks(self) -> Iterator[Placement]:
        """Of a checkpoint with one tensor for all experts, in a wider type: quantised to fp8 as it comes."""
        names, size, hidden, count = (
            self.spec.names,
            self.spec.intermediate_size,
            self.hidden_size,
            self.spec.num_experts,
        )
        if self.spec.storage == "stacked":
            yield Placement(f"{self.name}.{names.gate}.weight", self._rows(self.gate_up, (count, 2 * size, hidden)))
            yield Placement(f"{self.name}.{names.down}.weight", self._rows(self.down, (count, hidden, size)))
        elif self.spec.storage == "interleaved":
            turned = self._rows(self.gate_up, (count, hidden, 2 * size), is_turned=True)
            yield Placement(f"{self.name}.{names.gate}", turned)
            yield Placement(f"{self.name}.{names.down}", self._rows(self.down, (count, size, hidden), is_turned=True))

    def _rows(self, stack: Stack, shape: tuple[int, int, int], *, is_turned: bool = False) -> StackedRows:
        return StackedRows(stack, shape, self._device, self._dtype, is_turned=is_turned)


class StackedRows:
    """Where one tensor of all experts goes whose matrices are quantised to fp8, one after the other."""

    def __init__(
        self,
        stack: Stack,
        shape: tuple[int, int, int],
        device: torch.device,
        dtype: torch.dtype,
        *,
        is_turned: bool,
    ) -> None:
        self.shape = torch.Size(shape)  # in the checkpoint
        self.device = device
        self.nbytes = self.shape.numel()
        self._stack, self._dtype, self._is_turned = stack, dtype, is_turned

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, source: Tensor) -> None:
        for expert in range(self.shape[0]):
            self._rows_of(expert).copy_(self._matrix(source[expert]))

    def normal_(self, mean: float, std: float, *, generator: torch.Generator | None = None) -> None:
        for expert in range(self.shape[0]):
            self._rows_of(expert).normal_(mean, std, generator)

    def _matrix(self, matrix: Tensor) -> Tensor:
        """[out, in], the gate's rows before the others."""
        if not self._is_turned:
            return matrix
        turned = matrix.t()
        return halves_of_rows(turned.unsqueeze(0)).squeeze(0) if self._stack.is_gated else turned

    def _rows_of(self, expert: int) -> ExpertRows:
        first, second = self.shape[1:]
        shape = (second, first) if self._is_turned else (first, second)
        return ExpertRows(shape, self.device, self._dtype, lambda stored: self._put(expert, stored))

    def _put(self, expert: int, stored: StoredWeight) -> None:
        is_gated = self._stack.is_gated
        self._stack.put(expert, pack(stored.values, stored.scales, stored.kind, stored.group, is_gated=is_gated))
