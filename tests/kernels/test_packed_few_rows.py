"""Products of few rows with packed weights, whose kernel is assembly for the most part: run lane by lane on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.kernels.launch import IS_INTERPRETING, overriding
from cb_backend.kernels.linear_packed import (
    linear_packed,
    linear_silu_mul_packed,
    linear_silu_mul_packed_torch,
)
from cb_backend.kernels.packed import KINDS, PackedWeight, dequantise_packed_torch, pack

pytest.importorskip("triton")
if IS_INTERPRETING:
    from .warp_text import run_assembly

ROWS = (1, 8, 13, 32)


@pytest.fixture(autouse=True)
def _assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETING:
        run_assembly(monkeypatch)


def make(
    kind: str, group: int = 128, *, size: tuple[int, int] = (48, 384), has_zeros: bool = False, is_gated: bool = False
) -> PackedWeight:
    """Random elements; scales are exact in bf16, of fp4 so that products are too."""
    out_size, in_size = size
    stored = torch.randint(0, 2 ** KINDS[kind].bits, size, dtype=torch.uint8)
    if kind == "fp8":
        stored.masked_fill_((stored & 0x7F) == 0x7F, 3)  # no NaN
    groups = 1 if group == -1 else -(-in_size // group)
    scales = ((torch.rand(out_size, groups) + 0.5) * 2.0**-6).to(torch.bfloat16)
    if kind == "fp4":
        scales = 2.0 ** scales.float().log2().round()
    scales = scales.float() if kind == "fp8" else scales
    zeros = torch.randint(0, 16, (out_size, groups), dtype=torch.uint8) if has_zeros else None
    return pack(stored, scales, kind, group, zeros, global_scale=0.5, is_gated=is_gated)


def there(device: torch.device, weight: PackedWeight) -> PackedWeight:
    zeros = None if weight.zeros is None else weight.zeros.to(device)
    return replace(weight, values=weight.values.to(device), scales=weight.scales.to(device), zeros=zeros)


def direct(num_warps: int = 2, pairs: int = 1, **more: int) -> dict[str, int]:
    return {"pairs": pairs, "num_warps": num_warps, **more}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    difference = found.double().cpu() - wanted.double()
    assert bool(difference.isfinite().all())
    return float(difference.norm() / wanted.double().norm())


def unrounded(
    device: torch.device, x: Tensor, weight: PackedWeight, parameters: dict[str, int], **given: Any
) -> Tensor:
    out = torch.empty(x.shape[0], weight.size[0], dtype=torch.float32, device=device)
    with overriding("linear_packed", parameters):
        return linear_packed(x.to(device), there(device, weight), out=out, **given)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("parameters", [direct(), direct(1, 2), direct(4, depth=2), direct(2, 2, depth=2)])
def test_b5_every_number_of_rows_and_way_to_launch(
    device: torch.device, num_rows: int, parameters: dict[str, int]
) -> None:
    """Three blocks of columns for up to four warps: some have fewer than others, some none."""
    torch.manual_seed(num_rows)
    weight, x = make("int4"), torch.randn(num_rows, 384).to(torch.bfloat16)
    found = unrounded(device, x, weight, parameters)
    assert relative_error(found, x.double() @ dequantise_packed_torch(weight).double().T) < 1e-5


@pytest.mark.parametrize("num_rows", [2, 11])
@pytest.mark.parametrize(
    ("kind", "group", "has_zeros"),
    [
        ("int4", 128, True), ("int4", -1, False), ("int4", -1, True), ("int4", 64, True), ("int4", 64, False),
        ("int4", 32, False), ("int4", 32, True), ("int8", 128, False), ("int8", 32, False), ("int8", 64, False),
        ("fp8", 128, False), ("fp8", -1, False), ("fp4", 32, False), ("fp4", 16, False),
    ],
)  # fmt: skip
def test_b5_every_kind_group_and_zero_point(
    device: torch.device, num_rows: int, kind: str, group: int, has_zeros: bool
) -> None:
    torch.manual_seed(group)
    weight, x = make(kind, group, has_zeros=has_zeros), torch.randn(num_rows, 384).to(torch.bfloat16)
    found = unrounded(device, x, weight, direct())
    assert relative_error(found, x.double() @ dequantise_packed_torch(weight).double().T) < 1e-5


def test_every_fp8_and_fp4_number_is_exact(device: torch.device) -> None:
    """Subnormal ones and both zeros among them; a row of the weight has all, and each input takes one out."""
    for kind in ("fp8", "fp4"):
        count = 2 ** KINDS[kind].bits
        stored = torch.arange(count, dtype=torch.uint8).repeat(64, 256 // count)
        stored[(stored & 0x7F) == 0x7F] = 0
        scales = torch.ones(64, 2) if kind == "fp8" else torch.full((64, 256 // 16), 2.0**-3)
        weight = pack(stored, scales, kind, 128 if kind == "fp8" else 16)
        wanted = dequantise_packed_torch(weight)[:1].T
        for start in range(0, min(count, 256), 32):
            x = torch.zeros(32, 256, dtype=torch.bfloat16)
            x[torch.arange(32), torch.arange(start, start + 32)] = 1.0
            found = unrounded(device, x, weight, direct())
            assert torch.equal(found.cpu()[:, 5], wanted[start : start + 32, 0])


@pytest.mark.parametrize("num_rows", [1, 12])
def test_bias_gate_and_strided_rows(device: torch.device, num_rows: int) -> None:
    torch.manual_seed(0)
    weight, wide = make("int4", size=(80, 256)), torch.randn(num_rows, 2, 256).to(torch.bfloat16)
    bias, x, x_there = torch.randn(80).to(torch.bfloat16), wide[:, 1], wide.to(device)[:, 1]
    found = unrounded(device, x_there, weight, direct(), bias=bias.to(device))
    wanted = x.double() @ dequantise_packed_torch(weight).double().T + bias.double()
    assert relative_error(found, wanted) < 1e-5
    gated = make("fp8", size=(80, 256), is_gated=True)
    with overriding("linear_silu_mul_packed", direct(1, 2)):
        made = linear_silu_mul_packed(x_there, there(device, gated))
    assert relative_error(made, linear_silu_mul_packed_torch(x, gated)) < 2e-2  # rounded to bf16 three times


def test_what_it_cannot_take_goes_another_way(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries with is_direct serve it alone: not fp16, more rows, rows of an odd length, int8 with zero points."""
    asked: list[int] = []
    name = "cb_backend.kernels.linear_packed.launch_parameters"

    def parameters(op: str, its_device: torch.device, **conditions: int) -> dict[str, int]:
        asked.append(conditions["is_direct"])
        return {"block_n": 64, "num_warps": 4, "num_stages": 2, "splits": 1}

    monkeypatch.setattr(name, parameters)
    weight = make("int4")
    as_float16 = replace(weight, scales=weight.scales.half())

    def rows(num_rows: int, size: int) -> Tensor:
        """There before a part is taken of them: `to` another device puts the rows of a part side by side."""
        return torch.randn(num_rows, size).bfloat16().to(device)

    cases = [
        (rows(2, 384), weight, 1),
        (rows(33, 384), weight, 0),
        (rows(2, 390)[:, 1:385], weight, 0),
        (rows(2, 384).half(), as_float16, 0),
        (rows(2, 300), make("int4", size=(48, 300)), 0),
    ]
    weights = [there(device, given) for _, given, _ in cases]
    cases.append((rows(2, 384), weight, 0))
    weights.append(replace(weights[0], values=one_byte_on(weights[0].values)))
    for (x, _, is_direct), given in zip(cases, weights, strict=True):
        linear_packed(x, given) if not IS_INTERPRETING else _ask(x, given)
        assert asked.pop() == is_direct


def one_byte_on(values: Tensor) -> Tensor:
    """The same numbers at an address that no load of 16 bytes may have."""
    room = torch.zeros(values.nbytes + 32, dtype=torch.uint8, device=values.device)
    begin = values.element_size() - room.data_ptr() % 16 + 16
    moved = room[begin : begin + values.nbytes].view(values.dtype).view(values.shape)
    moved.copy_(values)
    return moved


def _ask(x: Tensor, weight: PackedWeight) -> None:
    from cb_backend.kernels.linear_packed import _parameters

    _parameters("linear_packed", x, weight)
