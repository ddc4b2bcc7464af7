"""Conversion to fp8: every value of the format, the midpoints between them, and what lies beyond."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cb_backend.kernels.fp8 import FP8, FP8_MAX, to_fp8
from cb_backend.kernels.qkv_post import qkv_post, qkv_post_torch

BITS = [bits for bits in range(256) if bits & 0x7F != 0x7F]  # both signs of 0x7f are NaN


def value(bits: int) -> float:
    """What an e4m3 number means, by the format's definition."""
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if bits & 0x80 else size


def store(x: Tensor, function: object, device: torch.device, scale: float = 1.0) -> Tensor:
    """x [n] through the cache, as the values of one head of n / 16 tokens; returns what lies there."""
    num_tokens = x.numel() // 16
    qkv = torch.zeros(num_tokens, 3, 16)
    qkv[:, 2] = x.view(num_tokens, 16)
    kv_cache = torch.zeros(1, 2, 1, num_tokens, 16, device=device).to(FP8)
    rows = torch.arange(num_tokens, dtype=torch.int32, device=device)
    angles = torch.cat((torch.ones(num_tokens, 8), torch.zeros(num_tokens, 8)), dim=1).to(device)
    function(  # type: ignore[operator]
        qkv.view(num_tokens, 48).to(device), angles, rows, rows, kv_cache, 1, 1, 16, value_scale=scale
    )
    return kv_cache[0, 1, 0].flatten().cpu()


@pytest.mark.parametrize("function", [qkv_post, qkv_post_torch])
def test_every_value_is_kept(function: object, device: torch.device) -> None:
    values = torch.tensor([value(bits) for bits in BITS] + [0.0, 0.0])
    stored = store(values * 0.25, function, device, 0.25).view(torch.uint8)
    assert stored.tolist() == [*BITS, 0, 0]


@pytest.mark.parametrize("function", [qkv_post, qkv_post_torch])
def test_the_nearest_is_taken_and_of_two_the_even_one(function: object, device: torch.device) -> None:
    positive = [value(bits) for bits in range(0x7F)]
    below, above = torch.tensor(positive[:-1]), torch.tensor(positive[1:])
    middle = (below + above) / 2
    nudge = (above - below) / 64
    even = torch.tensor([value(bits + (bits & 1)) for bits in range(0x7E)])
    for given, wanted in ((middle, even), (middle - nudge, below), (middle + nudge, above)):
        padded = torch.cat((given, torch.zeros(2)))
        assert store(padded, function, device).float().tolist() == [*wanted.tolist(), 0.0, 0.0]
        assert store(-padded, function, device).float().tolist() == [*(-wanted).tolist(), 0.0, 0.0]


@pytest.mark.parametrize("function", [qkv_post, qkv_post_torch])
def test_too_large_saturates_and_nan_stays(function: object, device: torch.device) -> None:
    given = torch.tensor([449.0, 465.0, 1e30, float("inf"), -500.0, float("-inf"), float("nan"), 448.0] * 2)
    stored = store(given, function, device).float()[:8]
    assert stored[:6].tolist() == [FP8_MAX] * 4 + [-FP8_MAX] * 2
    assert stored[6].isnan()
    assert stored[7] == FP8_MAX


def test_conversion_of_bfloat16_and_float16() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert to_fp8(torch.tensor([1.06, -60000.0], dtype=dtype)).float().tolist() == [1.0, -FP8_MAX]
