"""Penalties and forbidden tokens: kernel and twin against a plain reading of the formula."""

from __future__ import annotations

import pytest
import torch

from cb_backend.kernels.launch import overriding
from cb_backend.kernels.token_marks import COUNT, FORBIDDEN, PROMPT, apply_marks, apply_marks_torch

PENALTIES = [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (0.7, 1.5, -0.5), (1.0, -0.25, 2.0), (2.0, 0.0, 0.0)]


def plainly(x: float, mark: int, penalties: tuple[float, float, float]) -> float:
    repetition, frequency, presence = penalties
    count = mark & COUNT
    if mark < 0:
        return float("-inf")
    if mark:
        x = x / repetition if x > 0 else x * repetition
    return x - frequency * count - presence * (count > 0)


@pytest.mark.parametrize("vocab_size", [1, 61, 128])
def test_kernel_and_twin(vocab_size: int, device: torch.device) -> None:
    torch.manual_seed(vocab_size)
    logits = 4 * torch.randn(6, vocab_size)
    logits[2, 0] = float("-inf")
    choices = torch.tensor([0, 0, PROMPT, PROMPT + 3, 1, 40, FORBIDDEN, FORBIDDEN + PROMPT + 2], dtype=torch.int64)
    marks = choices[torch.randint(len(choices), (5, vocab_size))].to(torch.int32)
    rows, mark_rows = torch.tensor([4, 0, 2, 5]), torch.tensor([1, 2, 4, 3])
    expected = logits.clone()
    for row, mark_row in zip(rows.tolist(), mark_rows.tolist(), strict=True):
        for token in range(vocab_size):
            value = plainly(float(logits[row, token]), int(marks[mark_row, token]), PENALTIES[mark_row])
            expected[row, token] = value
    by_twin, by_kernel = logits.clone(), logits.to(device)
    arguments = (rows, marks, mark_rows, torch.tensor(PENALTIES))
    apply_marks_torch(by_twin, *arguments)
    with overriding("apply_marks", {"tile": 32, "num_warps": 1}):
        apply_marks(by_kernel, *(tensor.to(device) for tensor in arguments))
    torch.testing.assert_close(by_twin, expected)
    torch.testing.assert_close(by_kernel.cpu(), expected)


def test_a_count_grows_by_one_addition() -> None:
    """Forbidden or not, in the prompt or not: the other bits stay."""
    for mark in (0, PROMPT, FORBIDDEN, FORBIDDEN + PROMPT):
        grown = torch.tensor([mark], dtype=torch.int32) + 1
        assert int(grown) & COUNT == 1
        assert int(grown) - 1 == mark
