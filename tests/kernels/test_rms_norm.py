"""RMSNorm: kernel and twin against Hugging Face's LlamaRMSNorm and float64."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from cb_backend.kernels.rms_norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch

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
