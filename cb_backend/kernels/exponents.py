"""Scales that are powers of two as the exponents they are: a byte each, four of neighbouring groups in a word.

So 128 columns of mxfp4 have one word of 32 bits a row, which a product of experts reads, and moves between its threads,
at once. The exponents are those of bfloat16; 0 is the scale 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.launch import jit, tl


def exponents_of(scales: Tensor) -> Tensor | None:
    """Of scales [4 * n, rows] bfloat16, not negative: int32 [n, rows]; None where one is no power of two."""
    bits = scales.view(torch.int16).to(torch.int32)
    if bool(((bits & ~0x7F80) != 0).any()):
        return None
    bits = (bits >> 7).view(-1, 4, scales.shape[1])
    word = bits[:, 3] << 24  # wraps: the largest are negative
    for place in range(3):
        word = word | bits[:, place] << (8 * place)
    return word.contiguous()


def scales_of(exponents: Tensor) -> Tensor:
    """The inverse: int32 [n, rows] -> [4 * n, rows] bfloat16."""
    places = torch.arange(0, 32, 8, device=exponents.device).view(1, 4, 1)
    each = (exponents.unsqueeze(1) >> places) & 0xFF
    return (each << 7).to(torch.int16).view(torch.bfloat16).reshape(-1, exponents.shape[1])


@jit()
def four_powers(word):
    """A word's four scales, bfloat16."""
    return _power(word << 7), _power(word >> 1), _power(word >> 9), _power(word >> 17)


@jit()
def _power(moved):
    return (moved & 0x7F80).to(tl.int16).to(tl.bfloat16, bitcast=True)
