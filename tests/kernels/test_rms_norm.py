"""RMSNorm: kernel and twin against Hugging Face's LlamaRMSNorm and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from cb_backend.kernels.add_norm_linear import add_norm_linear
from cb_backend.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_fp8,
    add_rms_norm_fp8_torch,
    add_rms_norm_torch,
    rms_norm,
    rms_norm_torch,
)

# (num_tokens, hidden_size): odd ones first
SHAPES = [(3, 37), (1, 300), (5, 576), (0, 64), (2, 1024)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
EPS = 1e-5


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.cpu().double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.cpu().double()


def make(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """x as a strided view, the residual, the weight."""
    torch.manual_seed(shape[1])
    wide = torch.randn(shape[0], shape[1] + 16)
    tensors = [torch.randn(*shape), torch.randn(shape[1])]
    return [wide.to(dtype).to(device)[:, : shape[1]], *(tensor.to(dtype).to(device) for tensor in tensors)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = make(shape, dtype, device)
    total = (x.double() + residual.double()).cpu()
    out = torch.full(shape, float("nan"), dtype=dtype, device=device)
    assert rms_norm(x, weight, EPS, out=out) is out
    torch.testing.assert_close(out.cpu().double(), reference(x, weight), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    outs = torch.full(shape, float("nan"), dtype=dtype, device=device), residual  # the residual may be updated in place
    normed, new_residual = add_rms_norm(x, residual, weight, EPS, out=outs)
    assert normed is outs[0]
    assert new_residual is residual
    tolerances = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(new_residual.cpu().double(), total, **tolerances)
    torch.testing.assert_close(normed.cpu().double(), reference(new_residual, weight), **tolerances)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twins_equal_hugging_face(dtype: torch.dtype) -> None:
    x, residual, weight = make((7, 96), dtype, torch.device("cpu"))
    norm = LlamaRMSNorm(96, EPS).to(dtype)
    norm.weight.data = weight
    assert torch.equal(rms_norm_torch(x, weight, EPS), norm(x))
    normed, total = add_rms_norm_torch(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))


# What is added may be normed and scaled, the sum may go on as it is, and weights may be float32.
OPTIONS: list[dict[str, Any]] = [
    {"x_scale": 0.22},
    {"has_post": True},
    {"has_post": True, "rounds_first": False},
    {"has_post": True, "has_weight": False, "rounds_first": False},
    {"has_weight": False},
    {"rounds_first": False, "is_weight_wide": True},
    {"has_post": True, "x_scale": 3.0, "is_weight_wide": True},
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES[:4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_added_may_be_normed_and_scaled(
    options: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x, residual, weight = make(shape, dtype, device)
    post = torch.rand(shape[1]).to(dtype).to(device) + 0.5
    if options.get("is_weight_wide"):
        weight, post = weight.float() + 1e-4, post.float() + 1e-4
    added = reference(x, post) if options.get("has_post") else x.cpu().double()
    total = residual.cpu().double() + added * options.get("x_scale", 1.0)
    arguments = {
        "post_weight": post if options.get("has_post") else None,
        **{name: value for name, value in options.items() if name in ("x_scale", "rounds_first")},
    }
    tolerances = {"atol": 4 * TOLERANCE[dtype], "rtol": 4 * TOLERANCE[dtype]}
    given = weight if options.get("has_weight", True) else None
    for function in (add_rms_norm, add_rms_norm_torch):
        normed, new_residual = function(x, residual, given, EPS, **arguments)
        assert normed.dtype == new_residual.dtype == dtype
        torch.testing.assert_close(new_residual.cpu().double(), total, **tolerances)
        wanted = new_residual.cpu().double() if given is None else reference(new_residual, weight)
        torch.testing.assert_close(normed.cpu().double(), wanted, **tolerances)
        assert (normed.data_ptr() == new_residual.data_ptr()) == (given is None or shape[0] == 0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"x_scale": 0.3}, {"has_post": True}], ids=str)
@pytest.mark.parametrize("num_parts", [1, 2, 9])
def test_what_is_added_may_be_in_parts(
    num_parts: int, options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """Their sum is added, in float32 and rounded once; fp8 rows and rows before a product as well."""
    x, residual, weight = make((3, 37), dtype, device)
    parts = torch.stack([x * (index - 1.5) + index for index in range(num_parts)], dim=1)
    post = torch.rand(37).to(dtype).to(device) + 0.5 if options.get("has_post") else None
    arguments = {"post_weight": post, "x_scale": options.get("x_scale", 1.0)}
    whole = parts.float().sum(1).to(dtype)
    for function in (add_rms_norm, add_rms_norm_torch):
        found = function(parts, residual, weight, EPS, **arguments)
        for each, wanted in zip(found, function(whole, residual, weight, EPS, **arguments), strict=True):
            torch.testing.assert_close(each, wanted, atol=4 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype])
    rows, total = add_rms_norm_fp8(parts, residual, weight, EPS, **arguments)
    assert rows.values.shape == total.shape == (3, 37)
    product = torch.randn(5, 37).to(dtype).to(device)
    given = add_norm_linear(parts[:1], residual[:1], weight, EPS, product)[0]
    wanted_product = add_norm_linear(whole[:1], residual[:1], weight, EPS, product)[0]
    torch.testing.assert_close(given, wanted_product, atol=20 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("options", [{}, {"x_scale": 0.5}, {"rounds_first": False}], ids=str)
@pytest.mark.parametrize("has_weight", [True, False])
def test_fp8_rows_are_those_of_what_would_go_on(
    has_weight: bool, options: dict[str, Any], device: torch.device
) -> None:
    x, residual, weight = make((3, 37), torch.bfloat16, device)
    arguments = (x, residual, weight if has_weight else None, EPS, x[0].contiguous().abs())
    rows, total = add_rms_norm_fp8(*arguments, **options)
    wanted, wanted_total = add_rms_norm_fp8_torch(*arguments, **options)
    torch.testing.assert_close(total, wanted_total, atol=2e-2, rtol=2e-2)
    found, expected = (each.values.float() * each.scales[:, None] for each in (rows, wanted))
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_part_of_wider_rows_is_normed_in_place(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    wide = torch.randn(3, 50).to(dtype).to(device)
    before, part = wide.clone(), wide[:, 10:31]
    weight = torch.randn(21).to(dtype).to(device)
    assert rms_norm(part, weight, EPS, out=part) is part
    wanted = before.cpu().double()
    wanted[:, 10:31] = reference(before[:, 10:31], weight)
    torch.testing.assert_close(wide.cpu().double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(wide[:, :10], before[:, :10])
    assert torch.equal(wide[:, 31:], before[:, 31:])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twins_round_last_as_hugging_face_does(dtype: torch.dtype) -> None:
    x, _, weight = make((7, 96), dtype, torch.device("cpu"))
    norm = Olmo2RMSNorm(96, EPS).to(dtype)
    norm.weight.data = weight
    assert torch.equal(rms_norm_torch(x, weight, EPS, rounds_first=False), norm(x))
    if dtype != torch.float32:
        assert not torch.equal(rms_norm_torch(x, weight, EPS), norm(x))
