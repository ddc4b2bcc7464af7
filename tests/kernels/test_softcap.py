"""Logits kept between two bounds: kernel and twin against float64. Of scores: in the tests of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cb_backend.kernels.softcap import cap_logits, cap_logits_torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}


@pytest.mark.parametrize("function", [cap_logits, cap_logits_torch])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(3, 1037), (1, 5), (0, 8), (2, 1024)])
def test_kernel_and_twin(
    num_rows: int, vocab_size: int, dtype: torch.dtype, function: Any, device: torch.device
) -> None:
    torch.manual_seed(vocab_size)
    wide = (60 * torch.randn(num_rows, vocab_size + 8)).to(dtype).to(device)  # rows may be strided
    logits, beside = wide[:, :vocab_size], wide[:, vocab_size:].clone()
    wanted = 30 * (logits.cpu().double() / 30).tanh()
    assert function(logits, 30.0) is logits
    torch.testing.assert_close(logits.cpu().double(), wanted, atol=TOLERANCE[dtype], rtol=0)
    assert torch.equal(wide[:, vocab_size:], beside)


@pytest.mark.parametrize("function", [cap_logits, cap_logits_torch])
def test_what_is_beyond_all_bounds_is_at_a_bound_and_nan_stays_nan(function: Any, device: torch.device) -> None:
    logits = torch.tensor([[float("inf"), float("-inf"), float("nan"), 0.0, -1e4]], device=device)
    found = function(logits, 2.0)[0].tolist()
    assert found[:2] == [2.0, -2.0]
    assert found[2] != found[2]
    assert found[3:] == [0.0, -2.0]
