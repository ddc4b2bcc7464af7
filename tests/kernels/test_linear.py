"""Products with weights: both kernels and the twins against float64, with odd sizes, splits, bias and gate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cb_backend.kernels import linear as module
from cb_backend.kernels.launch import overriding
from cb_backend.kernels.linear import (
    linear,
    linear_silu_mul,
    linear_silu_mul_torch,
    linear_torch,
)
from cb_backend.kernels.split_sums import counters

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The interpreter multiplies the bits of bf16 as integers in tensor-core products.
TILED = {"block_n": 32, "block_k": 32, "splits": 1, "num_warps": 4, "num_stages": 2}
VECTOR = {"vector": 1, "block_n": 8, "block_k": 64, "num_warps": 4}
FOLDED = {**VECTOR, "fold": 8}
ON_GPU = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry a launch: a launcher that quietly used its twin would be compared with itself."""
    seen: list[int] = []
    launch = module._launch

    def counted(x: Tensor, *args: object, **kwargs: object) -> None:
        seen.append(x.shape[0])
        launch(x, *args, **kwargs)

    monkeypatch.setattr(module, "_launch", counted)
    return seen


def inputs(
    num_rows: int, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x (a part of wider rows, taken there: a part that is moved is one no more), weight, bias."""
    torch.manual_seed(out_size + in_size)
    x = torch.randn(num_rows, in_size + 32).to(dtype).to(device)[:, :in_size]
    others = torch.randn(out_size, in_size) / in_size**0.5, torch.randn(out_size)
    weight, bias = (tensor.to(dtype).to(device) for tensor in others)
    return x, weight, bias


@pytest.mark.parametrize("dtype", [torch.float16, ON_GPU])
@pytest.mark.parametrize(
    ("num_rows", "out_size", "in_size", "splits"),
    [(1, 64, 128, 1), (3, 70, 96, 1), (17, 33, 97, 1), (5, 64, 256, 4), (16, 65, 111, 3), (2, 32, 96, 8)],
)
def test_tiled_kernel(
    num_rows: int, out_size: int, in_size: int, splits: int, dtype: torch.dtype, device: torch.device,
    launches: list[int],
) -> None:  # fmt: skip
    x, weight, bias = inputs(num_rows, out_size, in_size, dtype, device)
    wanted = x.double() @ weight.double().T
    tolerances = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    with overriding("linear", {**TILED, "splits": splits}):
        for _ in range(2):  # the second finds the counters as the first left them
            found = linear(x, weight, bias)
            torch.testing.assert_close(found.double(), wanted + bias.double(), **tolerances)
        out = torch.full((num_rows, out_size), float("nan"), dtype=dtype, device=device)
        assert linear(x, weight, out=out) is out
    torch.testing.assert_close(out.double(), wanted, **tolerances)
    assert launches == [num_rows] * 3
    assert not counters(out.device).any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("out_size", "in_size"), [(16, 128), (21, 200), (8, 64), (9, 40)])
@pytest.mark.parametrize("parameters", [VECTOR, FOLDED], ids=["each", "folded"])
def test_kernel_for_one_row(
    parameters: dict[str, int], out_size: int, in_size: int, dtype: torch.dtype, device: torch.device,
    launches: list[int],
) -> None:  # fmt: skip
    x, weight, bias = inputs(1, out_size, in_size, dtype, device)
    wanted = x.double() @ weight.double().T + bias.double()
    with overriding("linear", parameters):
        found = linear(x, weight, bias)
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert launches == [1]


@pytest.mark.parametrize("dtype", [torch.float16, ON_GPU])
@pytest.mark.parametrize(
    ("num_rows", "out_size", "in_size", "parameters"),
    [
        (3, 64, 128, TILED),
        (18, 37, 97, TILED),
        (4, 40, 128, {**TILED, "splits": 3}),
        (1, 20, 130, VECTOR),
        (1, 20, 130, FOLDED),
        (1, 24, 192, FOLDED),
    ],
)
def test_gated_kernel(
    num_rows: int, out_size: int, in_size: int, parameters: dict[str, int], dtype: torch.dtype, device: torch.device,
    launches: list[int],
) -> None:  # fmt: skip
    x, weight, _ = inputs(num_rows, 2 * out_size, in_size, dtype, device)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    with overriding("linear_silu_mul", parameters):
        found = linear_silu_mul(x, weight)
    wanted = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert launches == [num_rows]


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float32])
def test_twins(dtype: torch.dtype) -> None:
    x, weight, bias = inputs(5, 26, 40, dtype, torch.device("cpu"))
    product = x.double() @ weight.double().T
    gate, up = product.chunk(2, dim=1)
    tolerance = TOLERANCE.get(dtype, 1e-5)
    tolerances = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(linear_torch(x, weight, bias).double(), product + bias.double(), **tolerances)
    gated = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(linear_silu_mul_torch(x, weight).double(), gated, **tolerances)


@pytest.mark.parametrize(("num_rows", "dtype"), [(0, torch.float16), (257, torch.float16), (4, torch.float32)], ids=str)
def test_other_rows_and_types_are_the_librarys(
    num_rows: int, dtype: torch.dtype, device: torch.device, launches: list[int]
) -> None:
    x, weight, bias = inputs(num_rows, 64, 48, dtype, device)
    with overriding("linear", TILED):
        found = linear(x, weight, bias)
    wanted = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(found.double(), wanted, atol=4e-3, rtol=4e-3)
    assert launches == []


def test_shapes_without_an_entry_are_the_librarys(device: torch.device, launches: list[int]) -> None:
    x, weight, _ = inputs(2, 66, 40, torch.float16, device)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    wanted = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(linear_silu_mul(x, weight).double(), wanted, atol=4e-3, rtol=4e-3)
    assert launches == []


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 64, 128])
@pytest.mark.parametrize(
    "parameters", [TILED, {**TILED, "splits": 4}, {**TILED, **FOLDED}], ids=["whole", "split", "folded"]
)
def test_replays_of_a_graph_agree(num_rows: int, parameters: dict[str, int], device: torch.device) -> None:
    """Dependent launches with prefetches, back to back in one graph: the same bits each time, close to float64."""
    x, weight, _ = inputs(num_rows, 1024, 2048, torch.bfloat16, device)
    second = torch.randn(512, 1024, device=device).div_(32).to(torch.bfloat16)
    parameters = {**parameters, "block_n": 64, "block_k": 64, "num_stages": 4}
    if torch.cuda.get_device_capability(device)[0] >= 9:
        parameters |= {"prefetch": 256}
    with overriding("linear", parameters):
        linear(linear(x, weight), second)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = linear(linear(x, weight), second)
    graph.replay()
    first = out.clone()
    for _ in range(5):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)
    wanted = (x.double() @ weight.double().T).to(torch.bfloat16).double() @ second.double().T
    torch.testing.assert_close(out.double(), wanted, atol=3e-2, rtol=3e-2)
