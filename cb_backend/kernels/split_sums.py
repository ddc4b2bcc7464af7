"""Sums that several programs share: each stores its part, and the last to come adds all of them in their order.

So there is no second launch, and results do not vary. Knows memory and counters, not what is summed.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cb_backend.kernels.launch import jit, tl

MAX_TILES = 1 << 14  # split tiles of one launch: one counter each


@jit()
def sum_splits(partial_ptr, offset, mask, stride, SPLITS: tl.constexpr):
    """The sum of a tile's splits, always in the same order. From L2 (.cg): other programs stored them there."""
    total = tl.load(partial_ptr + offset, mask=mask, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial_ptr + split * stride + offset, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Zeros that count a tile's finished splits; every launch leaves them zero.

    NOTE: one set a device, so launches on two streams at once would disturb each other. It must exist before a CUDA
    graph is captured: a step is always run once before its capture.
    """
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run a product before its capture"
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
