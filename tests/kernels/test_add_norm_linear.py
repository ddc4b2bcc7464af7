"""Addition, norm and product: the one launch of one row against float64 and the twin, and when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cb_backend.kernels import add_norm_linear as module
from cb_backend.kernels.add_norm_linear import add_norm_linear, add_norm_linear_torch
from cb_backend.kernels.launch import overriding
from cb_backend.kernels.linear import linear
from cb_backend.kernels.rms_norm import add_rms_norm
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import random_tokens, reference_logits, write_checkpoint

EPS = 1e-5
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
FUSED = {"vector": 1, "norm": 1, "block_n": 8, "block_k": 64, "num_warps": 4}
KINDS: list[dict[str, int]] = [{}, {"fold": 8}]
# (out_size, in_size): several tiles of the row for few programs, one that is not full, one alone, one for many programs
SHAPES = [(16, 320), (21, 200), (9, 40), (70, 64)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The new residual of each fused launch, poisoned before it."""
    seen: list[Tensor] = []
    launch = module.launch_one_row

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *args: object, **kwargs: object) -> None:
        out_residual = kwargs["norm"].out_residual  # type: ignore[attr-defined]
        for result in (out, out_residual):
            result.fill_(float("nan"))
        seen.append(out_residual)
        launch(x, weight, bias, out, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "launch_one_row", counted)
    return seen


def inputs(num_rows: int, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """x and residual (parts of wider rows), norm weight, weight, bias."""
    torch.manual_seed(out_size + in_size)
    rows = [(3 * torch.randn(num_rows, in_size + 24)).to(dtype).to(device)[:, :in_size] for _ in range(2)]
    weight = torch.randn(out_size, in_size) / in_size**0.5
    return [*rows, *(tensor.to(dtype).to(device) for tensor in (torch.randn(in_size), weight, torch.randn(out_size)))]


def normed(total: Tensor, norm_weight: Tensor) -> Tensor:
    total = total.double()
    return total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_weight.double()


def assert_stored(total: Tensor, wanted: Tensor) -> None:
    """Every bit: later layers add to it. The interpreter rounds to bf16 in its own way."""
    is_exact = total.is_cuda or total.dtype != torch.bfloat16
    torch.testing.assert_close(total, wanted, atol=0.0, rtol=0.0 if is_exact else 2**-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_one_launch(
    out_size: int,
    in_size: int,
    has_bias: bool,
    dtype: torch.dtype,
    kind: dict[str, int],
    device: torch.device,
    launches: list[Tensor],
) -> None:
    x, residual, norm_weight, weight, bias = inputs(1, out_size, in_size, dtype, device)
    before = x.clone(), residual.clone()
    with overriding("linear", FUSED | kind):
        found, total = add_norm_linear(x, residual, norm_weight, EPS, weight, bias if has_bias else None)
    assert total is launches[0]
    assert len(launches) == 1
    assert_stored(total, x + residual)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    wanted = normed(total, norm_weight) @ weight.double().T + (bias.double() if has_bias else 0)
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float32])
def test_twins(dtype: torch.dtype) -> None:
    x, residual, norm_weight, weight, bias = inputs(5, 26, 40, dtype, torch.device("cpu"))
    tolerance = TOLERANCE.get(dtype, 1e-5)
    total = (x + residual).double()
    wanted = normed(total, norm_weight) @ weight.double().T + bias.double()
    found, new_residual = add_norm_linear_torch(x, residual, norm_weight, EPS, weight, bias)
    assert torch.equal(new_residual, x + residual)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("num_rows", "dtype", "changes"),
    [
        (0, torch.float16, {}),
        (2, torch.float16, {}),
        (1, torch.float32, {}),
        (1, torch.float16, {"norm": None}),
        (1, torch.float16, {"vector": None}),
    ],
    ids=str,
)
def test_all_else_is_the_norm_and_then_the_product(
    num_rows: int, dtype: torch.dtype, changes: dict[str, int | None], device: torch.device, launches: list[Tensor]
) -> None:
    x, residual, norm_weight, weight, bias = inputs(num_rows, 32, 64, dtype, device)
    parameters = {**FUSED, "block_n": 32, "splits": 1, "num_stages": 2, **changes}
    parameters = {name: value for name, value in parameters.items() if value is not None}
    with overriding("linear", parameters):
        found, total = add_norm_linear(x, residual, norm_weight, EPS, weight, bias)
        steps, steps_total = add_rms_norm(x, residual, norm_weight, EPS)
        assert torch.equal(found, linear(steps, weight, bias))
    assert torch.equal(total, steps_total)
    assert launches == []


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-mixed"])
def test_a_model_is_as_close_to_float32_as_with_the_twins(
    name: str, tmp_path: Path, device: torch.device, launches: list[Tensor]
) -> None:
    """Decode steps of one row; the first layer's first norm has no addition before it."""
    prompt, decode = random_tokens(5, seed=1), random_tokens(2, seed=2)
    folder = write_checkpoint(name, tmp_path)
    exact = reference_logits(folder, prompt, decode)
    parameters = {**FUSED, "block_n": 16, "block_k": 32, "splits": 1, "num_stages": 2}
    distances = []
    with overriding("linear", parameters), overriding("linear_silu_mul", parameters):
        for backend in ("torch", "triton"):
            model = PagedModel(folder, backend=backend, dtype=torch.float16, device=device, block_size=16)
            model.start(1, len(prompt))
            logits = [model.prefill(1, prompt, chunk=16), *(model.step([(1, token)], []) for token in decode)]
            distances.append((torch.cat(logits).float().cpu() - exact).abs().mean())
    assert len(launches) == (model.config.num_layers - 1) * len(decode)
    assert distances[1] < 1.5 * distances[0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_replays_of_a_graph_agree(kind: dict[str, int], device: torch.device) -> None:
    """Blocks as in a step, of dependent launches with prefetches: the same bits each time, close to float64."""
    torch.manual_seed(0)
    x, residual = (torch.randn(1, 1024, device=device).to(torch.bfloat16) for _ in range(2))
    norm_weight = torch.randn(1024, device=device).to(torch.bfloat16)
    up, down = (
        (torch.randn(rows, columns, device=device) / columns**0.5).to(torch.bfloat16)
        for rows, columns in ((2048, 1024), (1024, 2048))
    )

    def blocks() -> tuple[Tensor, Tensor]:
        hidden, total = add_norm_linear(x, residual, norm_weight, EPS, up)
        hidden, total = add_norm_linear(linear(hidden, down), total, norm_weight, EPS, up)
        return linear(hidden, down), total

    parameters = {**FUSED, **kind, "block_k": 512}
    if torch.cuda.get_device_capability(device)[0] >= 9:
        parameters |= {"prefetch": 256}
    with overriding("linear", parameters):
        blocks()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = blocks()
    graph.replay()
    first = [result.clone() for result in results]
    for _ in range(5):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, results, first))
    total = x.double() + residual.double()
    for is_last in (False, True):
        hidden = normed(total, norm_weight) @ up.double().T @ down.double().T
        total = total if is_last else total + hidden
    torch.testing.assert_close(results[1].double(), total, atol=6e-2, rtol=6e-2)
    torch.testing.assert_close(results[0].double(), hidden, atol=6e-2, rtol=6e-2)
