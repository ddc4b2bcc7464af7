"""Tokens ruled out by bitmasks: kernel and twin against each bit read by itself."""

from __future__ import annotations

import pytest
import torch

from cb_backend.kernels.launch import overriding
from cb_backend.kernels.token_bitmask import apply_token_bitmask, apply_token_bitmask_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "num_words"), [(1, 1), (31, 1), (32, 1), (33, 2), (130, 5), (130, 7), (130, 4)])
def test_kernel_and_twin(vocab_size: int, num_words: int, dtype: torch.dtype, device: torch.device) -> None:
    """Masks wider than the vocabulary, as wide and narrower; rows without a mask keep every bit of their logits."""
    torch.manual_seed(vocab_size)
    wide = torch.randn(5, 2 * vocab_size).to(dtype)
    logits = wide[:, :vocab_size]  # strided rows
    bitmask = torch.randint(-(2**31), 2**31, (3, num_words), dtype=torch.int64).to(torch.int32)
    bitmask[1] = -1
    rows = torch.tensor([4, 0, 2])
    expected = logits.clone()
    for mask, row in zip(bitmask.tolist(), rows.tolist(), strict=True):
        for token_id in range(vocab_size):
            word = mask[token_id // 32] if token_id // 32 < num_words else 0
            if not (word >> (token_id % 32)) & 1:
                expected[row, token_id] = float("-inf")
    by_twin, by_kernel = logits.clone(), wide.to(device, copy=True)[:, :vocab_size]
    apply_token_bitmask_torch(by_twin, bitmask, rows)
    with overriding("apply_token_bitmask", {"tile": 64, "num_warps": 1}):
        apply_token_bitmask(by_kernel, bitmask.to(device), rows.to(device))
    assert torch.equal(by_twin, expected)
    assert torch.equal(by_kernel.cpu(), expected)


def test_no_masks_at_all(device: torch.device) -> None:
    logits = torch.zeros(2, 40, device=device)
    no_masks, no_rows = torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    apply_token_bitmask(logits, no_masks.to(device), no_rows.to(device))
    assert not logits.any()
