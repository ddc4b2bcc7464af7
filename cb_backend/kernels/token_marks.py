"""Penalties and forbidden tokens, from one mark for each token of the vocabulary.

A mark is an int32: the low 30 bits count how often the output holds the token, PROMPT says that the prompt does,
FORBIDDEN (the sign) that it must not be sampled. So what a row's text means for its logits is one array of the logits'
size, kept up to date by one addition a token, and nothing has to be counted again. Knows rows and marks, not requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.launch import jit, launch_parameters, needs_twin, tl

COUNT = (1 << 30) - 1
PROMPT = 1 << 30
FORBIDDEN = -(1 << 31)


@jit()
def _apply_marks_kernel(
    logits_ptr,
    rows_ptr,
    marks_ptr,
    mark_rows_ptr,
    penalties_ptr,
    row_stride,
    vocab_size,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of one row a program."""
    place = tl.program_id(0)
    token_ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = token_ids < vocab_size
    mark_row = tl.load(mark_rows_ptr + place).to(tl.int64)
    logits_ptr += tl.load(rows_ptr + place).to(tl.int64) * row_stride
    repetition = tl.load(penalties_ptr + mark_row * 3)
    frequency = tl.load(penalties_ptr + mark_row * 3 + 1)
    presence = tl.load(penalties_ptr + mark_row * 3 + 2)
    mark = tl.load(marks_ptr + mark_row * vocab_size + token_ids, mask=is_inside, other=0)
    x = tl.load(logits_ptr + token_ids, mask=is_inside, other=0.0)
    count = (mark & COUNT).to(tl.float32)
    x = tl.where(mark != 0, tl.where(x > 0, x / repetition, x * repetition), x)
    x = tl.where(count > 0, x - (frequency * count + presence), x)
    tl.store(logits_ptr + token_ids, tl.where(mark < 0, float("-inf"), x), mask=is_inside)


def apply_marks(logits: Tensor, rows: Tensor, marks: Tensor, mark_rows: Tensor, penalties: Tensor) -> None:
    """`apply_marks_torch` in one launch."""
    if needs_twin(logits):
        return apply_marks_torch(logits, rows, marks, mark_rows, penalties)
    num_rows, vocab_size = rows.shape[0], logits.shape[1]
    if num_rows == 0:
        return None
    parameters = launch_parameters("apply_marks", logits.device)
    tile = parameters["tile"]
    _apply_marks_kernel[(num_rows, -(-vocab_size // tile))](
        logits, rows, marks, mark_rows, penalties, logits.stride(0), vocab_size,
        COUNT=COUNT, TILE=tile, num_warps=parameters["num_warps"],
    )  # fmt: skip
    return None


def apply_marks_torch(logits: Tensor, rows: Tensor, marks: Tensor, mark_rows: Tensor, penalties: Tensor) -> None:
    """Change rows of logits by their marks, in place.

    logits [num_rows, vocab_size] fp32; marks int32 [num_mark_rows, vocab_size]; rows, mark_rows int64 [n], a row of
    each; penalties fp32 [num_mark_rows, 3]: repetition r, frequency f, presence p.
    For a token of prompt or output x becomes x / r where x > 0, else x * r; then, for one of the output, x - (f * count
    + p); a forbidden one becomes -inf.
    """
    for row, mark_row in zip(rows.tolist(), mark_rows.tolist(), strict=True):
        x, mark, (repetition, frequency, presence) = logits[row], marks[mark_row], penalties[mark_row]
        marked = mark.nonzero().squeeze(1)  # few, unless tokens are forbidden
        values, mark = x[marked], mark[marked]
        count = (mark & COUNT).float()
        if repetition != 1.0:
            values = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(count > 0, values - (frequency * count + presence), values)
        x[marked] = values.masked_fill(mark < 0, float("-inf"))
