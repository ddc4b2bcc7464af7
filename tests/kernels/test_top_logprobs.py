"""Log-probabilities and ranks: kernel and twin against log_softmax and a stable sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cb_backend.kernels.launch import overriding
from cb_backend.kernels.top_logprobs import top_logprobs, top_logprobs_torch


def test_f9_equal_logits_have_one_rank_and_stand_by_id(device: torch.device) -> None:
    """Case F9: strictly likelier tokens count, whichever of the equals was sampled."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0, 1.0]] * 4, device=device)
    given = torch.tensor([1, 3, 5, 4], dtype=torch.int32, device=device)
    for function in (top_logprobs, top_logprobs_torch):
        floats, ints = function(logits, torch.arange(4, device=device), given, 4)
        assert ints[:, 0].tolist() == [1, 1, 3, 6]
        assert ints[:, 1:].tolist() == [[1, 3, 2, 5]] * 4
        values = np.exp([2, 2, 1, 1]) / np.exp([0, 2, 1, 2, -1, 1]).sum()
        assert floats[0, 1:].exp().tolist() == pytest.approx(values.tolist(), rel=1e-5)
        of_chosen = logits.log_softmax(-1)[range(4), given.long()]
        assert floats[:, 0].tolist() == pytest.approx(of_chosen.tolist(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "num_top"), [(5, 20), (64, 0), (150, 7)])
def test_kernel_and_twin(vocab_size: int, num_top: int, dtype: torch.dtype, device: torch.device) -> None:
    """Many rows, some twice, in any order; ties (of bfloat16, mostly); -inf and a tail that fills no tile."""
    torch.manual_seed(vocab_size)
    wide = (3 * torch.randn(6, vocab_size + 8)).to(dtype)
    wide[3, : vocab_size // 2] = float("-inf")
    wide[4, :vocab_size] = 0.0
    wide[5, : vocab_size - 2] = float("-inf")
    logits = wide[:, :vocab_size]  # rows may be strided
    rows = torch.tensor([0, 1, 5, 4, 3, 2, 3])
    given = torch.randint(vocab_size, (7,), dtype=torch.int32)
    given[4] = 0  # impossible
    x = logits[rows].float()
    order = x.sort(dim=-1, descending=True, stable=True)
    k = min(num_top, vocab_size)
    chosen = x.gather(1, given.long().unsqueeze(1))
    expected = torch.cat((chosen, order.values[:, :k]), dim=1) - x.logsumexp(dim=-1, keepdim=True)
    ids = torch.cat(((x > chosen).sum(1, keepdim=True) + 1, order.indices[:, :k]), dim=1)
    with overriding("top_logprobs", {"tile": 64, "num_warps": 1, "merge_num_warps": 1}):
        by_kernel = top_logprobs(wide.to(device)[:, :vocab_size], rows.to(device), given.to(device), num_top)
    for floats, ints in (by_kernel, top_logprobs_torch(logits, rows, given, num_top)):
        assert floats.shape == ints.shape == (7, 1 + k)
        torch.testing.assert_close(floats.cpu(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(ints.cpu().long(), ids)


def test_no_rows(device: torch.device) -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    floats, ints = top_logprobs(torch.zeros(3, 9, device=device), nothing, nothing.int(), 4)
    assert floats.shape == ints.shape == (0, 5)
