"""Experts in fp8, whatever the checkpoint has them in: a scale for each output feature, found as they come if need be.

An expert's matrix is kept in fp8 for as long as it takes to pack it to its place among all experts'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from cb_backend.kernels.fp8 import FP8
from cb_backend.kernels.packed import StoredWeight, pack, packed_bytes
from cb_backend.layers.experts import Inner, halves_of_rows
from cb_backend.layers.fp8_linear import QuantizedRows
from cb_backend.layers.packed_experts import ExpertProjection, PackedMixture, Stack
from cb_backend.layers.packed_linear import bytes_a_group
from cb_backend.layers.placement import FLOATS, Placement
from cb_backend.layers.projection import Part
from cb_backend.layers.stored_matrix import StoredAs
from cb_backend.layers.stored_shares import columns_of, rows_of
from cb_backend.parallel.shares import Share


class Fp8Reader:
    """fp8 with a scale for each output feature, or what becomes that while it is loaded."""

    name, kind, group, has_zeros, has_shifts, fault_in_experts = "fp8", "fp8", -1, False, False, ""

    def tensors(self, out_size: int, in_size: int) -> dict[str, StoredAs]:
        return {"weight": StoredAs((out_size, in_size), (FP8, *FLOATS)), "weight_scale": StoredAs((out_size,), FLOATS)}

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        """Of rows that have been quantised: `weight` [out_size, in_size] and `weight_scale` [out_size]."""
        values, scales = tensors["weight"], tensors["weight_scale"]
        return StoredWeight(values.view(torch.uint8), scales.unsqueeze(1), None, self.kind, values.shape[1])


class Fp8ExpertProjection(ExpertProjection):
    """The same of fp8 checkpoints, and of others that are quantised while they are loaded."""

    def _placements_of(self, part: Part) -> Iterator[Placement]:
        module = self._modules[part.name]
        shape = (part.share.size, part.columns.stop)
        target = ExpertRows(
            shape, self.device, self.dtype, lambda stored: self._add(module, self._in_room(part, stored))
        )
        yield Placement(f"{part.name}.weight", target, part.weight_shard)

    def _in_room(self, part: Part, stored: StoredWeight) -> StoredWeight:
        """With what pads this device's share."""
        columns = Share(0, part.columns.stop, self.size[1])
        return columns_of(rows_of(stored, [part.share._replace(start=0)]), columns)


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
        self.nbytes = packed_bytes(*shape, "fp8", -1, bytes_a_group(Fp8Reader()))
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


class Fp8Mixture(PackedMixture):
    """The experts of a layer in fp8, whatever the checkpoint has them in."""

    projection_class = Fp8ExpertProjection

    def _placements_of_stacks(self) -> Iterator[Placement]:
        """Of a checkpoint with one tensor for all experts, in a wider type: quantised to fp8 as it comes."""
        names, size, hidden, count = (
            self.spec.names,
            self.spec.intermediate_size,
            self.hidden_size,
            self.held.experts.size,
        )
        if self.spec.storage == "stacked":
            yield Placement(f"{self.name}.{names.gate}.weight", self._rows(self.gate_up, (count, 2 * size, hidden)))
            yield Placement(f"{self.name}.{names.down}.weight", self._rows(self.down, (count, hidden, size)))
        elif self.spec.storage == "interleaved":
            turned = self._rows(self.gate_up, (count, hidden, 2 * size), is_turned=True)
            yield Placement(f"{self.name}.{names.gate}", turned)
            yield Placement(f"{self.name}.{names.down}", self._rows(self.down, (count, size, hidden), is_turned=True))

    def _rows(self, stack: Stack, shape: tuple[int, int, int], *, is_turned: bool = False) -> StackedRows:
        return StackedRows(stack, shape, self.held.inner, self._device, self._dtype, is_turned=is_turned)


class StackedRows:
    """Where one tensor of all experts goes whose matrices are quantised to fp8, one after the other."""

    def __init__(
        self,
        stack: Stack,
        shape: tuple[int, int, int],
        inner: Inner,
        device: torch.device,
        dtype: torch.dtype,
        *,
        is_turned: bool,
    ) -> None:
        self.shape = torch.Size(shape)  # in the checkpoint, of this device's experts
        self.device = device
        self._inner = inner
        self._stack, self._dtype, self._is_turned = stack, dtype, is_turned
        self.nbytes = self.shape[0] * packed_bytes(*self._size_here, "fp8", -1, bytes_a_group(Fp8Reader()))

    format_name = "fp8"

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, source: Tensor) -> None:
        for expert in range(self.shape[0]):
            self._rows_of(expert).copy_(self._matrix(source[expert]))

    def normal_(self, mean: float, std: float, *, generator: torch.Generator | None = None) -> None:
        for expert in range(self.shape[0]):
            self._rows_of(expert).normal_(mean, std, generator)

    def _matrix(self, matrix: Tensor) -> Tensor:
        """This device's part [out, in], the gate's rows before the others."""
        if self._is_turned:
            matrix = matrix.t()
            matrix = halves_of_rows(matrix.unsqueeze(0)).squeeze(0) if self._stack.is_gated else matrix
        return self._inner.of_halves(matrix, 0) if self._stack.is_gated else self._inner.of(matrix, 1)

    @property
    def _size_here(self) -> tuple[int, int]:
        """(outputs, inputs) of an expert's matrix on this device."""
        first, second = self.shape[1:]
        out_size, in_size = (second, first) if self._is_turned else (first, second)
        room = self._inner.share.room
        return (2 * room, in_size) if self._stack.is_gated else (out_size, room)

    def _rows_of(self, expert: int) -> ExpertRows:
        return ExpertRows(self._size_here, self.device, self._dtype, lambda stored: self._put(expert, stored))

    def _put(self, expert: int, stored: StoredWeight) -> None:
        is_gated = self._stack.is_gated
        self._stack.put(expert, pack(stored.values, stored.scales, stored.kind, stored.group, is_gated=is_gated))
