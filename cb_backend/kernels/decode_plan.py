"""The work list of one decode step: which programs attend to which part of which row.

Made on the device from the lengths, so that a captured graph balances whatever batch it is replayed with, and once a
step: every layer with the same window uses it. Knows lengths, not what is computed from the list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.carveout import Programs
from cb_backend.kernels.launch import (
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    launch_parameters,
    next_power_of_2,
    num_multiprocessors,
    tl,
)

MAX_SPLITS = 64  # of one row
PLAN_HEADER = 4  # int32 values before a plan's items; the first is the number of items
PLAN_ITEM = 4  # int32 values an item: row, split, number of splits of the row, tokens a split
_CHOICES = 8  # lengths of a split that are compared
_SORTED_ROWS = 512  # above, sorting would cost more than it saves


@jit()
def _num_splits(length, split, MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """(number of splits of a row, tokens of each): as equal as whole tiles allow, none empty."""
    num_splits = tl.maximum(tl.minimum((length + split - 1) // split, MAX_SPLITS), 1)
    tokens = (length + num_splits - 1) // num_splits
    tokens = tl.maximum((tokens + BLOCK_N - 1) // BLOCK_N, 1) * BLOCK_N
    return tl.maximum((length + tokens - 1) // tokens, 1), tokens  # a row of padding has one, which writes its zeros


@jit()
def _lengths(seq_lens_ptr, row, num_rows, WINDOW: tl.constexpr, ALIGN: tl.constexpr):
    """Tokens that each row reads."""
    length = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    if WINDOW > 0:
        length -= tl.maximum(length - WINDOW, 0) // ALIGN * ALIGN
    return length


@jit("num_rows", "num_counters", "num_items_bound", "target_items")
def _plan_kernel(
    seq_lens_ptr,
    plan_ptr,
    num_rows,
    num_counters,
    num_items_bound,
    target_items,
    WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHOICES: tl.constexpr,
    HEADER: tl.constexpr,
    ITEM: tl.constexpr,
    ROWS: tl.constexpr,
    SORTED: tl.constexpr,  # rows compared at once to sort them; 0: they stay in order
    IS_DEPENDENT: tl.constexpr,
):
    """One program: cut every row into splits of equal length and list them, those of long rows first.

    No split is shorter than total / target_items, which bounds their number. Of the lengths up to twice that, the one
    is taken whose splits, target_items at a time, are through first.
    """
    await_previous(IS_DEPENDENT)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    length = _lengths(seq_lens_ptr, row, num_rows, WINDOW, ALIGN)
    total = tl.sum(length.to(tl.int64), axis=0)
    least = tl.maximum((total + target_items - 1) // target_items, MIN_SPLIT).to(tl.int32)
    tiles = (least + BLOCK_N - 1) // BLOCK_N
    choice = (tiles + tl.arange(0, CHOICES) * ((tiles + CHOICES - 1) // CHOICES)) * BLOCK_N  # [CHOICES]
    splits_of = tl.maximum((length[:, None] + choice[None, :] - 1) // choice[None, :], 1)
    num_items = tl.sum(tl.where(is_row[:, None], splits_of, 0), axis=0)
    rounds = (num_items + target_items - 1) // target_items
    # A split costs about a tile beside its tokens: it begins with loads that depend on each other.
    cost = rounds * (tl.minimum(choice, tl.max(length, axis=0)) + BLOCK_N)
    split = tl.min(tl.where(cost == tl.min(cost, axis=0), choice, 0x7FFFFFFF), axis=0)
    num_splits, tokens = _num_splits(length, split, MAX_SPLITS, BLOCK_N)
    num_splits = tl.where(is_row, num_splits, 0)
    if SORTED > 0:
        first_item = tl.zeros([ROWS], tl.int32)
        for start in range(0, num_rows, SORTED):
            other = start + tl.arange(0, SORTED)
            other_length = _lengths(seq_lens_ptr, other, num_rows, WINDOW, ALIGN)
            other_splits, _ = _num_splits(other_length, split, MAX_SPLITS, BLOCK_N)
            is_equal = other_length[None, :] == length[:, None]
            is_before = (other_length[None, :] > length[:, None]) | (is_equal & (other[None, :] < row[:, None]))
            is_before = is_before & (other < num_rows)[None, :]
            first_item += tl.sum(tl.where(is_before, other_splits[None, :], 0), axis=1)
    else:
        first_item = tl.cumsum(num_splits, axis=0) - num_splits
    tl.store(plan_ptr, tl.sum(num_splits, axis=0))
    most = tl.max(num_splits, axis=0)
    for index in range(0, most):
        item_ptr = plan_ptr + HEADER + (first_item + index) * ITEM
        is_item = index < num_splits
        tl.store(item_ptr, row, mask=is_item)
        tl.store(item_ptr + 1, tl.zeros_like(row) + index, mask=is_item)
        tl.store(item_ptr + 2, num_splits, mask=is_item)
        tl.store(item_ptr + 3, tokens, mask=is_item)
    for start in range(0, num_counters, ROWS):
        counter = start + row
        tl.store(plan_ptr + HEADER + num_items_bound * ITEM + counter, 0, mask=counter < num_counters)


def plan_decode(seq_lens: Tensor, kv_cache: Tensor, window: int = 0) -> Tensor:
    """The work list of one decode step, int32 on the device: valid for every layer of that step with this window.

    seq_lens [num_rows] int32; kv_cache [num_blocks, 2, num_kv_heads, block_size, head_dim] of any layer. Holds the
    counters of the merges as well, so two streams must not share it.
    """
    num_rows, device = seq_lens.shape[0], seq_lens.device
    num_kv_heads, block_size = kv_cache.shape[2:4]
    parameters = decode_parameters(num_rows, kv_cache)
    block_n = parameters["block_n"]
    target = _target_items(kv_cache, parameters)
    bound = max_items(num_rows, kv_cache, parameters)
    size = PLAN_HEADER + bound * PLAN_ITEM + num_rows * num_kv_heads
    out = torch.empty(size, dtype=torch.int32, device=device)
    rows = max(next_power_of_2(num_rows), 16)
    _plan_kernel[(1,)](
        seq_lens, out,
        num_rows, num_rows * num_kv_heads, bound, target,
        WINDOW=window, MIN_SPLIT=parameters["min_split"], BLOCK_N=block_n, ALIGN=tile_alignment(block_n, block_size),
        MAX_SPLITS=MAX_SPLITS, CHOICES=_CHOICES, HEADER=PLAN_HEADER, ITEM=PLAN_ITEM,
        ROWS=rows, SORTED=min(rows, 8192 // rows) if rows <= _SORTED_ROWS else 0,
        IS_DEPENDENT=can_overlap(device), num_warps=4 if rows <= 64 else 8, **dependent_options(device, num_rows),
    )  # fmt: skip
    return out


def plan_decode_torch(seq_lens: Tensor, kv_cache: Tensor, window: int = 0) -> Tensor | None:
    """None: the twin of decode attention needs no plan."""
    return None


def decode_parameters(num_rows: int, kv_cache: Tensor) -> dict[str, int]:
    """Launch parameters of a plan and of the kernel that follows it: few rows want other tiles than many."""
    block_d, kv_bytes = padded_head_dim(kv_cache.shape[4]), kv_cache.element_size()
    return launch_parameters(
        "decode_attention", kv_cache.device, block_d=block_d, kv_bytes=kv_bytes, m=next_power_of_2(num_rows)
    )


def padded_head_dim(head_dim: int) -> int:
    return max(next_power_of_2(head_dim), 16)


def max_items(num_rows: int, kv_cache: Tensor, parameters: dict[str, int]) -> int:
    """No plan for `num_rows` rows has more items, whatever their lengths: the grid of a captured launch."""
    return num_rows + _target_items(kv_cache, parameters)


def programs_each(num_rows: int, kv_cache: Tensor, parameters: dict[str, int]) -> Programs:
    """Programs a multiprocessor: of rows of equal length, and the most of a plan for any lengths."""
    target, num_sms = _target_items(kv_cache, parameters), num_multiprocessors(kv_cache.device)
    most = target if 2 * num_rows <= target else num_rows + target
    num_kv_heads = kv_cache.shape[2]
    return Programs(-(-max(num_rows, target) * num_kv_heads // num_sms), -(-most * num_kv_heads // num_sms))


def tile_alignment(block_n: int, block_size: int) -> int:
    """block_n where a tile of keys lies in one cache block, so that one id serves it; 1 where it gathers."""
    return block_n if block_size % block_n == 0 else 1


def _target_items(kv_cache: Tensor, parameters: dict[str, int]) -> int:
    """Splits that fill the card; an item is num_kv_heads programs."""
    return max(1, num_multiprocessors(kv_cache.device) * parameters["ctas_per_sm"] // kv_cache.shape[2])
