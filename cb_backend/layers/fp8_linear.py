"""A projection whose weight is fp8 with a scale for each output feature; its inputs are quantised row by row.

The weight comes quantised from the checkpoint, or is quantised while it is loaded: a few rows at a time, so the
unquantised model is never in the device's memory. Bias, embedding and head stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cb_backend.kernels.fp8 import FP8, Fp8Rows, quantize_rows_torch
from cb_backend.kernels.lora_plan import AdapterPlan
from cb_backend.layers.linear import Linear
from cb_backend.layers.norm import Junction
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.projection import Part, Projection
from cb_backend.layers.step_metadata import StepMetadata
from cb_backend.parallel.group import Group

_ELEMENTS_AT_ONCE = 1 << 24  # quantised together: bounds the memory that loading needs beside the weights


class Fp8Linear(Linear):
    """`Linear` in fp8: weight [out_size, in_size] e4m3, weight_scales [out_size] float32."""

    def __init__(
        self, projection: Projection, ops: ModelOps, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(projection, ops, group, dtype=dtype, device=device, weight_dtype=FP8)
        self.dtype = dtype
        self.weight_scales = torch.zeros(self.weight.shape[0], dtype=torch.float32, device=device)

    def __call__(self, x: Tensor, step: StepMetadata) -> Tensor:
        return self._product(self.ops.quantize_rows(x))

    def with_shrunk(self, x: Tensor, a: Tensor, step: StepMetadata, plan: AdapterPlan) -> tuple[Tensor, Tensor]:
        return self._shrunk_first(x, a, step, plan)

    def after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        rows, total = self._normed_rows(junction, x, residual)
        return self._product(rows), total

    def gated_after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        rows, total = self._normed_rows(junction, x, residual)
        return self._gated_product(rows), total

    def gated(self, x: Tensor, step: StepMetadata) -> Tensor:
        return self._gated_product(self.ops.quantize_rows(x))

    def _gated_product(self, rows: Fp8Rows) -> Tensor:
        if self.bias is not None:
            return self.ops.silu_mul(self._product(rows))
        return self.ops.linear_silu_mul_fp8(rows, self.weight, self.weight_scales)

    def _normed_rows(self, junction: Junction, x: Tensor, residual: Tensor) -> tuple[Fp8Rows, Tensor]:
        if self.group.size == 1:
            return junction.add_fp8(x, residual)
        normed, total = self.group.reduce_add_norm(x, residual, junction)
        return self.ops.quantize_rows(normed), total

    def _product(self, rows: Fp8Rows) -> Tensor:
        return self.ops.linear_fp8(rows, self.weight, self.weight_scales, self.bias)

    def _weight_of(self, part: Part) -> QuantizedRows:
        return QuantizedRows(self.weight[part.rows, part.columns], self.weight_scales[part.rows], self.dtype)


class QuantizedRows:
    """Where a checkpoint's matrix goes: behaves like a tensor that can be filled, and keeps what it is given in fp8."""

    def __init__(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.values = values  # [rows, in_size] e4m3
        self.scales = scales  # [rows] float32
        self.shape = values.shape
        self.device = values.device
        self.nbytes = values.nbytes + scales.nbytes
        self._dtype = dtype  # what random weights are drawn in

    format_name = "fp8"

    def numel(self) -> int:
        return self.values.numel()

    @property
    def num_weights(self) -> int:
        return self.values.numel()

    def copy_(self, source: Tensor) -> None:
        """Quantise `source` [rows, in_size], a few rows at a time. Raises `ValueError` for what is not finite."""
        for part in self._parts():
            self._quantise(part, source[part].to(self.device))

    def copy_quantised(self, values: Tensor, scales: Tensor) -> None:
        """Take over what is fp8 in the checkpoint; scales: one number, or one a row.

        Raises `ValueError` for scales that are not finite.
        """
        if not scales.float().isfinite().all():
            raise ValueError("has a scale that is not finite")
        self.values.copy_(values)
        self.scales.copy_(scales.float().flatten().expand(len(self.scales)))

    def normal_(self, mean: float, std: float, generator: torch.Generator | None = None) -> None:
        for part in self._parts():
            rows = torch.empty(self.values[part].shape, dtype=self._dtype, device=self.device)
            self._quantise(part, rows.normal_(mean, std, generator=generator))

    def _quantise(self, part: slice, rows: Tensor) -> None:
        quantised = quantize_rows_torch(rows)
        if not quantised.scales.isfinite().all():
            raise ValueError("holds numbers that are not finite")
        self.values[part], self.scales[part] = quantised.values, quantised.scales

    def _parts(self) -> Iterator[slice]:
        num_rows, in_size = self.shape
        if not in_size:  # a device may have none of the input features
            self.scales.zero_()
            return
        step = max(1, _ELEMENTS_AT_ONCE // in_size)
        yield from (slice(start, start + step) for start in range(0, num_rows, step))
