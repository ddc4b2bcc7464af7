"""silu(gate) * up and gelu(gate) * up: kernels and twins against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cb_backend.kernels.silu_mul import gelu_mul, gelu_mul_torch, silu_mul, silu_mul_torch

TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())


@pytest.mark.parametrize(
    ("kernel", "twin", "activation"), [(silu_mul, silu_mul_torch, silu), (gelu_mul, gelu_mul_torch, gelu)]
)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "size"), [(3, 37), (1, 1025), (0, 8), (2, 1024)])
def test_kernel_and_twin(
    num_tokens: int, size: int, dtype: torch.dtype, kernel: Any, twin: Any, activation: Any, device: torch.device
) -> None:
    torch.manual_seed(size)
    wide = (3 * torch.randn(num_tokens, 2 * size + 8)).to(dtype)  # rows may be strided
    gate, up = wide[:, :size].double(), wide[:, size : 2 * size].double()
    wanted = activation(gate) * up
    tolerances = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(twin(wide[:, : 2 * size]).double(), wanted, **tolerances)
    out = torch.full((num_tokens, size), float("nan"), dtype=dtype, device=device)
    assert kernel(wide.to(device)[:, : 2 * size], out=out) is out
    torch.testing.assert_close(out.cpu().double(), wanted, **tolerances)
