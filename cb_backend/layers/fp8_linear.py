"""A projection whose weight is fp8 with a scale for each output feature; its inputs are quantised row by row.

The weight comes quantised from the checkpoint, or is quantised while it is loaded: a few rows at a time, so the
unquantised model is never in the device's memory. Bias, embedding and head stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cb_backend.kernels.fp8 import FP8, Fp8Rows, quantize_rows_torch
from cb_backend.layers.linear import Fillable, Linear
from cb_backend.layers.norm import RMSNorm
from cb_backend.layers.ops import Ops

_ELEMENTS_AT_ONCE = 1 << 24  # quantised together: bounds the memory that loading needs beside the weights


class Fp8Linear(Linear):
    """`Linear` in fp8: weight [out_size, in_size] e4m3, weight_scales [out_size] float32."""

    def __init__(
        self, in_size: int, parts: dict[str, int], ops: Ops, *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(in_size, parts, ops, has_bias=has_bias, dtype=dtype, device=device, weight_dtype=FP8)
        self.dtype = dtype
        self.weight_scales = torch.empty(self.weight.shape[0], dtype=torch.float32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(self.ops.quantize_rows(x))

    def after(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        rows, total = self.ops.add_rms_norm_fp8(x, residual, norm.weight, norm.eps)
        return self._product(rows), total

    def gated_after(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        rows, total = self.ops.add_rms_norm_fp8(x, residual, norm.weight, norm.eps)
        if self.bias is not None:
            return self.ops.silu_mul(self._product(rows)), total
        return self.ops.linear_silu_mul_fp8(rows, self.weight, self.weight_scales), total

    def _product(self, rows: Fp8Rows) -> Tensor:
        product: Tensor = self.ops.linear_fp8(rows, self.weight, self.weight_scales, self.bias)
        return product

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Fillable]]:
        start = 0
        for name, size in self.parts.items():
            part = slice(start, start + size)
            yield f"{prefix}.{name}.weight", QuantizedRows(self.weight[part], self.weight_scales[part], self.dtype)
            if self.bias is not None:
                yield f"{prefix}.{name}.bias", self.bias[part]
            start += size


class QuantizedRows:
    """Where a checkpoint's matrix goes: behaves like a tensor that can be filled, and keeps what it is given in fp8."""

    def __init__(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.values = values  # [rows, in_size] e4m3
        self.scales = scales  # [rows] float32
        self.shape = values.shape
        self.device = values.device
        self._dtype = dtype  # what random weights are drawn in

    def numel(self) -> int:
        return self.values.numel()

    def copy_(self, source: Tensor) -> None:
        """Quantise `source` [rows, in_size], a few rows at a time. Raises `ValueError` for what is not finite."""
        for part in self._parts():
            self._quantise(part, source[part].to(self.device))

    def copy_quantised(self, values: Tensor, scales: Tensor) -> None:
        """Take over what is fp8 in the checkpoint; scales: one number, or one a row."""
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
        step = max(1, _ELEMENTS_AT_ONCE // in_size)
        yield from (slice(start, start + step) for start in range(0, num_rows, step))
