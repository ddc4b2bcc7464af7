"""Products with fp8 weights, and the rows that go into them: kernels and twins against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cb_backend.kernels.fp8 import FP8, FP8_MAX, Fp8Rows, quantize_rows, quantize_rows_torch
from cb_backend.kernels.launch import overriding
from cb_backend.kernels.linear_fp8 import linear_fp8, linear_fp8_torch, linear_silu_mul_fp8, linear_silu_mul_fp8_torch
from cb_backend.kernels.rms_norm import add_rms_norm, add_rms_norm_fp8, add_rms_norm_fp8_torch
from cb_backend.kernels.split_sums import counters

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}
TILED = {"block_n": 32, "block_k": 32, "splits": 1, "num_warps": 4, "num_stages": 2}
ON_GPU = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
# (num_rows, out_size, in_size, splits): odd ones, and more than one tile and split
SHAPES = [(1, 64, 128, 1), (3, 70, 96, 1), (17, 33, 97, 1), (5, 64, 256, 4), (2, 32, 96, 8)]


def make(num_rows: int, out_size: int, in_size: int, dtype: torch.dtype) -> tuple[Fp8Rows, Tensor, Tensor, Tensor]:
    """Rows, weight, its scales, bias. Rows and channels differ in size by orders of magnitude."""
    torch.manual_seed(out_size + in_size)
    sizes = 10.0 ** torch.randint(-2, 2, (num_rows, 1))
    rows = quantize_rows_torch((torch.randn(num_rows, in_size) * sizes).to(dtype))
    channels = 10.0 ** torch.randint(-1, 2, (out_size, 1))
    weight = quantize_rows_torch(torch.randn(out_size, in_size) / in_size**0.5 * channels)
    return rows, weight.values, weight.scales, torch.randn(out_size).to(dtype)


def exact(rows: Fp8Rows, weight: Tensor, scales: Tensor) -> Tensor:
    return (rows.values.double() * rows.scales.double()[:, None]) @ (weight.double() * scales.double()[:, None]).T


def to(device: torch.device, rows: Fp8Rows, *tensors: Tensor) -> tuple[Fp8Rows, list[Tensor]]:
    moved = Fp8Rows(rows.values.to(device), rows.scales.to(device), rows.dtype)
    return moved, [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float16, ON_GPU])
@pytest.mark.parametrize(("num_rows", "out_size", "in_size", "splits"), SHAPES)
def test_kernel(
    num_rows: int, out_size: int, in_size: int, splits: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows, weight, scales, bias = make(num_rows, out_size, in_size, dtype)
    wanted = exact(rows, weight, scales)
    given, (there, scales_there, bias_there) = to(device, rows, weight, scales, bias)
    tolerances = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    with overriding("linear_fp8", {**TILED, "splits": splits}):
        for _ in range(2):  # the second finds the counters as the first left them
            found = linear_fp8(given, there, scales_there, bias_there)
            torch.testing.assert_close(found.cpu().double(), wanted + bias.double(), **tolerances)
        found = linear_fp8(given, there, scales_there)
        torch.testing.assert_close(found.cpu().double(), wanted, **tolerances)
    assert found.dtype == dtype
    assert not counters(found.device).any()


@pytest.mark.parametrize("dtype", [torch.float16, ON_GPU])
@pytest.mark.parametrize(("num_rows", "out_size", "in_size", "splits"), [(3, 64, 128, 1), (18, 37, 97, 3)])
def test_gated_kernel(
    num_rows: int, out_size: int, in_size: int, splits: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows, weight, scales, _ = make(num_rows, 2 * out_size, in_size, dtype)
    gate, up = exact(rows, weight, scales).chunk(2, dim=1)
    given, (there, scales_there) = to(device, rows, weight, scales)
    with overriding("linear_silu_mul_fp8", {**TILED, "splits": splits}):
        found = linear_silu_mul_fp8(given, there, scales_there)
    wanted = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(found.cpu().double(), wanted, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twins(dtype: torch.dtype) -> None:
    rows, weight, scales, bias = make(5, 26, 40, dtype)
    wanted = exact(rows, weight, scales)
    gate, up = wanted.chunk(2, dim=1)
    tolerances = {"atol": 2 * TOLERANCE[dtype], "rtol": 2 * TOLERANCE[dtype]}
    torch.testing.assert_close(linear_fp8_torch(rows, weight, scales, bias).double(), wanted + bias, **tolerances)
    gated = linear_silu_mul_fp8_torch(rows, weight, scales).double()
    torch.testing.assert_close(gated, gate / (1 + (-gate).exp()) * up, **tolerances)


@pytest.mark.parametrize("num_rows", [0, 4, 129])
def test_what_no_kernel_serves_is_the_twins(num_rows: int, device: torch.device) -> None:
    """float16 with no entry in the table, and more rows than a kernel takes."""
    rows, weight, scales, bias = make(num_rows, 48, 64, torch.float16)
    given, (there, scales_there, bias_there) = to(device, rows, weight, scales, bias)
    found = linear_fp8(given, there, scales_there, bias_there)
    wanted = exact(rows, weight, scales) + bias.double()
    torch.testing.assert_close(found.cpu().double(), wanted, atol=4e-3, rtol=4e-3)
    gate, up = exact(rows, weight, scales).chunk(2, dim=1)
    gated = linear_silu_mul_fp8(given, there, scales_there)
    torch.testing.assert_close(gated.cpu().double(), gate / (1 + (-gate).exp()) * up, atol=8e-3, rtol=8e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [0, 1, 60, 128, 129, 700])
def test_the_librarys_product_is_the_same(num_rows: int, device: torch.device) -> None:
    rows, weight, scales, bias = make(num_rows, 512, 1024, torch.bfloat16)
    given, (there, scales_there, bias_there) = to(device, rows, weight, scales, bias)
    with overriding("linear_fp8", {"library": 1}):
        found = linear_fp8(given, there, scales_there, bias_there)
    wanted = exact(rows, weight, scales) + bias.double()
    # The tensor cores add with some 13 bits below the largest partial sum; then the result is rounded to bfloat16.
    sizes = exact(Fp8Rows(rows.values.float().abs(), rows.scales, rows.dtype), weight.float().abs(), scales)
    assert ((found.cpu().double() - wanted).abs() <= wanted.abs() * 2**-8 + sizes * 2**-11).all()
    again = linear_fp8_torch(given, there, scales_there, bias_there)
    assert num_rows == 0 or (found.float() - again.float()).norm() < 5e-3 * again.float().norm()


@pytest.mark.parametrize("function", [quantize_rows, quantize_rows_torch])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 37), (1, 300), (0, 64), (2, 1024)])
def test_quantised_rows(shape: tuple[int, int], dtype: torch.dtype, function: object, device: torch.device) -> None:
    torch.manual_seed(shape[1])
    wide = (torch.randn(shape[0], shape[1] + 8) * 10.0 ** torch.randint(-3, 3, (shape[0], 1))).to(dtype)
    x = wide[:, : shape[1]]
    found = function(wide.to(device)[:, : shape[1]])  # type: ignore[operator]
    assert found.dtype == dtype
    assert found.values.dtype == FP8
    values, scales = found.values.cpu().double(), found.scales.cpu().double()
    wanted_scales = x.double().abs().amax(1) / FP8_MAX
    torch.testing.assert_close(scales, wanted_scales, atol=0, rtol=1e-6)
    assert (values.abs().amax(1) == FP8_MAX).all()
    # 3 bits of mantissa: half a step is a sixteenth of the number, and of the smallest normal one below it.
    error = (values * scales[:, None] - x.double()).abs()
    assert (error <= x.double().abs() / 16 * 1.001 + scales[:, None] * 2**-10).all()


@pytest.mark.parametrize("function", [quantize_rows, quantize_rows_torch])
def test_rows_of_zeros_and_of_what_is_not_finite(function: object, device: torch.device) -> None:
    """A row that is broken stays broken, so that its request fails; the others are not touched."""
    x = torch.ones(4, 32)
    x[0] = 0.0
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    rows = function(x.to(device))  # type: ignore[operator]
    weight, scales = torch.ones(16, 32).to(FP8).to(device), torch.ones(16, device=device)
    product = linear_fp8_torch(rows, weight, scales).cpu()
    assert (product[0] == 0).all()
    assert not product[1:3].isfinite().any()
    assert (product[3] == 32).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, ON_GPU])
@pytest.mark.parametrize("shape", [(3, 37), (5, 576), (0, 64)])
def test_norm_of_quantised_rows(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """In one launch what the norm and the quantisation are in two."""
    torch.manual_seed(1)
    x, residual, weight = (torch.randn(*size).to(dtype).to(device) for size in (shape, shape, shape[1:]))
    rows, total = add_rms_norm_fp8(x, residual, weight, 1e-5)
    normed, wanted_total = add_rms_norm(x, residual, weight, 1e-5)
    wanted = quantize_rows(normed)
    assert torch.equal(total, wanted_total)
    assert torch.equal(rows.values.view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(rows.scales, wanted.scales)
    twin, _ = add_rms_norm_fp8_torch(x, residual, weight, 1e-5)
    torch.testing.assert_close(rows.scales, twin.scales, atol=0, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3)
    steps = (rows.values.float() - twin.values.float()).abs() / twin.values.float().abs().clamp(min=1)
    assert not shape[0] or (steps <= 0.15).all()  # a step of e4m3 at most, where the rounding before it went otherwise
