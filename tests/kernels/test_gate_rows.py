"""Rows times the sigmoid of a number each: kernel and twin against float64, into one part of several."""

from __future__ import annotations

import pytest
import torch

from cb_backend.kernels.gate_rows import gate_rows, gate_rows_torch
from cb_backend.layers.ops import resolve_ops

TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "size"), [(3, 37), (1, 1025), (0, 8)])
@pytest.mark.parametrize("has_gate", [True, False])
def test_kernel_and_twin(num_tokens: int, size: int, has_gate: bool, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(size)
    x = torch.randn(num_tokens, size).to(dtype)
    logits = torch.randn(num_tokens, 5).to(dtype)
    gate = logits[:, 4] if has_gate else None  # a column of a router's product
    wanted = x.double() * (1.0 if gate is None else gate.double().sigmoid().unsqueeze(1))
    for function, where in ((gate_rows, device), (gate_rows_torch, torch.device("cpu"))):
        parts = torch.full((num_tokens, 3, size), 9.0, dtype=dtype, device=where)
        out = parts[:, 2]
        assert function(x.to(where), None if gate is None else logits.to(where)[:, 4], out) is out
        torch.testing.assert_close(parts[:, 2].cpu().double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert (parts[:, :2] == 9.0).all()


@pytest.mark.parametrize(("backend", "function"), [("torch", gate_rows_torch), ("triton", gate_rows)])
def test_layers_find_it(backend: str, function: object) -> None:
    assert resolve_ops(backend).gate_rows is function
