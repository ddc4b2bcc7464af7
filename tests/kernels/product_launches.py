"""How `compiling` calls the launchers of products with weights, and of what makes their operands."""

from __future__ import annotations

from typing import Any

import torch

from cb_backend.kernels.fp8 import Fp8Rows
from cb_backend.kernels.launch import overriding
from cb_backend.kernels.packed import PackedWeight, pack


def _linear(module: Any, op: str, parameters: dict[str, int], num_rows: int, out_size: int, in_size: int) -> None:
    weight_rows = out_size * (2 if op.endswith("silu_mul") else 1)
    x, weight = (torch.zeros(rows, in_size, dtype=torch.bfloat16) for rows in (num_rows, weight_rows))
    norm = (x, x[0], 1e-6) if op.startswith("add_norm") else ()
    with overriding(op.removeprefix("add_norm_"), parameters):
        getattr(module, op)(x, *norm, weight)


def _linear_fp8(module: Any, op: str, parameters: dict[str, int], num_rows: int, out_size: int, in_size: int) -> None:
    weight_rows = out_size * (2 if op == "linear_silu_mul_fp8" else 1)
    x, weight = (torch.zeros(rows, in_size, dtype=torch.float8_e4m3fn) for rows in (num_rows, weight_rows))
    with overriding(op, parameters):
        getattr(module, op)(Fp8Rows(x, torch.ones(num_rows), torch.bfloat16), weight, torch.ones(weight_rows))


def _packed(
    kind: str, group: int, has_zeros: bool, is_gated: bool, out_size: int, in_size: int, has_shifts: bool = False
) -> PackedWeight:
    stored = torch.zeros(out_size, in_size, dtype=torch.uint8)
    scales = torch.zeros(out_size, in_size // group, dtype=torch.float32 if kind == "fp8" else torch.bfloat16)
    zeros = scales.to(torch.uint8) if has_zeros else None
    return pack(stored, scales, kind, group, zeros, is_gated=is_gated, shifts=scales if has_shifts else None)


def _linear_packed(
    module: Any,
    op: str,
    parameters: dict[str, int],
    num_rows: int,
    kind: str,
    group: int,
    has_zeros: bool = False,
    has_shifts: bool = False,
    in_size: int = 1024,
) -> None:
    weight = _packed(kind, group, has_zeros, op == "linear_silu_mul_packed", 1024, in_size, has_shifts)
    with overriding(op, parameters):
        getattr(module, op)(torch.zeros(num_rows, in_size, dtype=torch.bfloat16), weight)


def _dequantise_packed(module: Any, kind: str, group: int) -> None:
    out = torch.zeros(128, 1024, dtype=torch.bfloat16)
    module.dequantise_packed(_packed(kind, group, False, False, 1024, 1024), 0, out)


def _quantize_rows(module: Any, size: int) -> None:
    module.quantize_rows(torch.zeros(2, size, dtype=torch.bfloat16))


PRODUCT_LAUNCHES = {
    "linear": _linear,
    "add_norm_linear": _linear,
    "linear_fp8": _linear_fp8,
    "linear_packed": _linear_packed,
    "dequantise_packed": _dequantise_packed,
    "quantize_rows": _quantize_rows,
}
