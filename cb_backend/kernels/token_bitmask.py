"""Rule out tokens by bitmasks: a bit a token, as grammar libraries write them. Knows logits and bits, not grammars."""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.launch import jit, launch_parameters, needs_twin, tl


@jit()
def _apply_token_bitmask_kernel(
    logits_ptr, bitmask_ptr, rows_ptr, logits_stride, bitmask_stride, vocab_size, num_words, TILE: tl.constexpr
):
    mask_row, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + mask_row).to(tl.int64)
    token_ids = tile * TILE + tl.arange(0, TILE)
    # Each word is read by 32 neighbours at once: one memory transaction.
    word = tl.load(
        bitmask_ptr + mask_row.to(tl.int64) * bitmask_stride + token_ids // 32,
        mask=token_ids // 32 < num_words,
        other=0,
    )
    is_out = ((word >> (token_ids % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_stride + token_ids, float("-inf"), mask=is_out & (token_ids < vocab_size))


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """`apply_token_bitmask_torch` in one launch. Logits are written, never read."""
    if needs_twin(logits):
        apply_token_bitmask_torch(logits, bitmask, rows)
        return
    num_masks, vocab_size = bitmask.shape[0], logits.shape[1]
    if num_masks == 0:
        return
    parameters = launch_parameters("apply_token_bitmask", logits.device)
    _apply_token_bitmask_kernel[(num_masks, -(-vocab_size // parameters["tile"]))](
        logits, bitmask, rows,  # pointers
        logits.stride(0), bitmask.stride(0), vocab_size, bitmask.shape[1],  # sizes
        TILE=parameters["tile"], num_warps=parameters["num_warps"],
    )  # fmt: skip


def apply_token_bitmask_torch(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Logits whose bit is 0 become -inf, in place; ids beyond the bits too.

    logits: [B, vocab_size], any float type; bitmask: int32 [n, words], bit i % 32 of word i // 32 is token i's; rows:
    int64 [n] which row of the logits each mask is for, none twice.
    """
    bits = (bitmask[:, :, None] >> torch.arange(32, device=bitmask.device, dtype=torch.int32)) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]] != 0  # [n, vocab_size or fewer]
    missing = logits.shape[1] - is_allowed.shape[1]
    if missing > 0:
        is_allowed = torch.nn.functional.pad(is_allowed, (0, missing))
    logits[rows] = logits[rows].masked_fill(~is_allowed, float("-inf"))
