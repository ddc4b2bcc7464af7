"""Products of experts with packed weights: kernels and twins against what the weights stand for, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.kernels.expert_plan import plan_experts, plan_experts_torch
from cb_backend.kernels.exponents import exponents_of, scales_of
from cb_backend.kernels.grouped_packed import (
    PackedExperts,
    grouped_down_packed,
    grouped_down_packed_torch,
    grouped_gate_up_packed,
    grouped_gate_up_packed_torch,
)
from cb_backend.kernels.launch import overriding
from cb_backend.kernels.packed import KINDS, dequantise_packed_torch, pack

from .test_expert_plan import routings
from .test_grouped_linear import wanted_parts

TOLERANCE = 2e-4
TILES = {"block_n": 64, "num_warps": 4, "num_stages": 2}
# kind, group (-1: one for a row), zero points
FORMATS = [("int4", 128, False), ("int4", 32, True), ("int8", -1, False), ("fp8", -1, False), ("fp8", 128, False),
           ("fp4", 32, False)]  # fmt: skip
# (tokens, top_k, experts, hidden, intermediate): sizes of tiles, and sizes that are padded
SHAPES = [(5, 2, 4, 128, 128), (20, 3, 5, 160, 96)]


def packed_experts(
    kind: str, group: int, has_zeros: bool, size: tuple[int, int, int], device: torch.device, *, is_gated: bool
) -> PackedExperts:
    """Random weights of [num_experts, out, in]."""
    count, out_size, in_size = size
    each = []
    for _ in range(count):
        stored = torch.randint(0, 2 ** KINDS[kind].bits, (out_size, in_size), dtype=torch.uint8)
        if kind == "fp8":
            stored.masked_fill_((stored & 0x7F) == 0x7F, 3)  # no NaN
        num_groups = 1 if group == -1 else -(-in_size // group)
        scales = (torch.rand(out_size, num_groups) + 0.5) * {"int4": 0.03, "int8": 0.002, "fp8": 2e-3, "fp4": 0.05}[
            kind
        ]
        scales = 2.0 ** scales.log2().round() if kind == "fp4" else scales
        zeros = torch.randint(4, 12, scales.shape, dtype=torch.uint8) if has_zeros else None
        each.append(pack(stored, scales, kind, group, zeros, is_gated=is_gated))
    words = [exponents_of(one.scales) if (kind, group) == ("fp4", 32) else None for one in each]
    return PackedExperts(
        torch.stack([one.values for one in each]).to(device),
        torch.stack([one.scales if word is None else word for one, word in zip(each, words, strict=True)]).to(device),
        torch.stack([one.zeros for one in each if one.zeros is not None]).to(device) if has_zeros else None,
        kind, each[0].group, (out_size, in_size), is_gated,
    )  # fmt: skip


def test_exponents_and_scales() -> None:
    scales = torch.tensor([[2.0**-126, 0.0], [0.25, 1.0], [2.0**127, 3.0e-39], [2.0, 2.0**-100]]).bfloat16()
    scales[2, 1] = 2.0**120
    words = exponents_of(scales)
    assert words is not None
    assert words.tolist() == [[1 | 125 << 8 | (254 << 16) | (128 << 24) - (1 << 32), (127 << 8 | 247 << 16 | 27 << 24)]]
    assert torch.equal(scales_of(words), scales)


@pytest.mark.parametrize("other", [0.75, 3.0, -1.0])
def test_other_scales_have_no_exponents(other: float) -> None:
    scales = torch.ones(8, 3).bfloat16()
    scales[5, 1] = other
    assert exponents_of(scales) is None


def whole(weight: PackedExperts) -> Tensor:
    return torch.stack([dequantise_packed_torch(weight.of(each)) for each in range(weight.values.shape[0])])


@pytest.mark.parametrize(("kind", "group", "has_zeros"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_and_twins(
    shape: tuple[int, ...], kind: str, group: int, has_zeros: bool, device: torch.device
) -> None:
    check(shape, kind, group, has_zeros, device, TILES)


@pytest.mark.parametrize(
    ("kind", "group", "has_zeros", "splits"),
    [("fp4", 32, False, 2), ("int4", 32, True, 3), ("fp8", -1, False, 2), ("fp4", 32, False, 8)],
)
def test_split_sums(kind: str, group: int, has_zeros: bool, splits: int, device: torch.device) -> None:
    """More splits than there are blocks of 128 columns are as many as there are."""
    check((3, 2, 2, 400, 144), kind, group, has_zeros, device, {**TILES, "splits": splits}, ["padding"])


def check(
    shape: tuple[int, ...],
    kind: str,
    group: int,
    has_zeros: bool,
    device: torch.device,
    tiles: dict[str, int],
    routing: Sequence[str] = ("even", "one expert", "padding"),
) -> None:
    """Both products by kernels and by twins against float64, for routings of several kinds."""
    num_tokens, top_k, num_experts, hidden, size = shape
    torch.manual_seed(sum(shape))
    has_bias = kind == "fp4"
    activation = "clamped_swiglu" if kind == "fp4" else "silu"
    gate_up = packed_experts(kind, group, has_zeros, (num_experts, 2 * size, hidden), device, is_gated=True)
    down = packed_experts(kind, group, has_zeros, (num_experts, hidden, size), device, is_gated=False)
    given: dict[str, Any] = {
        "x": torch.randn(num_tokens, hidden + 8).to(device)[:, :hidden],
        "weights": torch.rand(num_tokens, top_k).to(device),
        "bias": torch.randn(num_experts, 2 * size).to(device) if has_bias else None,
        "down_bias": torch.randn(num_experts, hidden).to(device) if has_bias else None,
    }
    routed = routings(num_tokens, top_k, num_experts)
    for name in routing:
        ids = routed[name].to(device)
        wanted = wanted_parts(routed[name], {**given, "gate_up": whole(gate_up), "down": whole(down)}, activation)
        untouched = wanted.isnan()
        for plan_of, first, second in (
            (plan_experts, grouped_gate_up_packed, grouped_down_packed),
            (plan_experts_torch, grouped_gate_up_packed_torch, grouped_down_packed_torch),
        ):
            out = torch.full((num_tokens, top_k + 1, hidden), 5.0, device=device)
            with overriding("grouped_gate_up", tiles), overriding("grouped_down", tiles):
                plan = plan_of(ids, num_experts, gate_up.bits)
                inner = first(given["x"], gate_up, plan, top_k, activation, given["bias"])
                assert second(inner, down, plan, given["weights"], out, given["down_bias"]) is out
            parts = out.cpu().double()
            assert (parts[:, top_k] == 5.0).all()
            assert (parts[:, :top_k][untouched] == 5.0).all()
            torch.testing.assert_close(parts[:, :top_k][~untouched], wanted[~untouched], atol=TOLERANCE, rtol=TOLERANCE)


def test_no_tokens(device: torch.device) -> None:
    weight = packed_experts("int4", 128, False, (4, 64, 128), device, is_gated=True)
    plan = plan_experts(torch.zeros(0, 2, dtype=torch.int32, device=device), 4)
    assert grouped_gate_up_packed(torch.zeros(0, 128, device=device), weight, plan, 2).shape == (0, 32)
