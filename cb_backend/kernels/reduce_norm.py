"""The sum of the ranks' partial sums, fused into the addition and norm that follow: one launch, no library.

Each rank's product leaves its partial sum where the others can read it. A launch says to the others that this rank's is
complete, waits until theirs are, and reads them all, in the order of ranks, so that every rank gets the same bits.
Knows addresses, not how memory came to be shared (`parallel.peer_group`).

What is said is a number in a word, one a rank at each rank, that only grows: the step's number and the place in it. So
nothing is ever set back, and a replay of a graph says what a launch would. Every program says it before it waits, so
it does not matter which programs run at the same time. Two buffers take turns: who has come to a place knows that all
have read what was there two places before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cb_backend.kernels.launch import (
    IS_INTERPRETING,
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    launch_parameters,
    let_next_start,
    next_power_of_2,
    tl,
)
from cb_backend.kernels.rms_norm import _normed, add_rms_norm_torch

MAX_RANKS = 8
PLACES = 1 << 12  # in a step, at most
PATIENCE_NS = 20_000_000_000  # then a rank is taken for dead, and the device goes on with NaN


class Peers(NamedTuple):
    """Memory that ranks share; addresses as the device of this rank has them."""

    parts: Tensor  # int64 [2, MAX_RANKS]: of every rank's partial sums, of each of the two buffers
    words: Tensor  # int64 [MAX_RANKS]: of every rank's words
    own_words: Tensor  # int64 [MAX_RANKS]: what the others, and this one, have said to this rank
    step: Tensor  # int64 [1]: number of the step
    failed: Tensor  # int32 [1] on the host: 1 once a rank did not come
    rank: int
    num_ranks: int


@jit("rank", "place")
def _reduce_norm_kernel(
    parts_ptr,
    words_ptr,
    own_words_ptr,
    step_ptr,
    failed_ptr,
    residual_ptr,
    weight_ptr,
    post_weight_ptr,
    out_ptr,
    out_residual_ptr,
    rank,
    place,
    residual_stride,
    hidden_size: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    PATIENCE_NS: tl.constexpr,  # 0: for ever
    eps: tl.constexpr,
    x_scale: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_POST: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    let_next_start(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < hidden_size
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=is_inside, other=0.0)
    if HAS_POST:
        post_weight = tl.load(post_weight_ptr + column, mask=is_inside, other=0.0)
    await_previous(IS_DEPENDENT)  # the product is complete: what is said below is true of all its rows
    number = tl.load(step_ptr) * PLACES + place
    for peer in tl.static_range(NUM_RANKS):
        word_ptr = tl.load(words_ptr + peer).to(tl.pointer_type(tl.int64)) + rank
        tl.atomic_xchg(word_ptr, number, sem="release", scope="sys")
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=is_inside, other=0.0)
    is_late = 0
    for peer in tl.static_range(NUM_RANKS):
        said = tl.atomic_add(own_words_ptr + peer, 0, sem="acquire", scope="sys")
        if PATIENCE_NS > 0:
            end = tl.extra.cuda.globaltimer() + PATIENCE_NS
            while (said < number) & (is_late == 0):
                said = tl.atomic_add(own_words_ptr + peer, 0, sem="acquire", scope="sys")
                is_late = (tl.extra.cuda.globaltimer() > end).to(tl.int32)
        else:
            while said < number:
                said = tl.atomic_add(own_words_ptr + peer, 0, sem="acquire", scope="sys")
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for peer in tl.static_range(NUM_RANKS):
        # An address from a table says nothing of its alignment, and loads would be of one number each.
        part_ptr = tl.multiple_of(tl.load(parts_ptr + peer).to(out_residual_ptr.dtype), 16)
        total += tl.load(part_ptr + row * hidden_size + column, mask=is_inside, other=0.0).to(tl.float32)
    if is_late > 0:
        tl.atomic_xchg(failed_ptr, 1, sem="release", scope="sys")
        total = total + float("nan")
    x = total.to(out_residual_ptr.dtype.element_ty)
    if HAS_POST:
        x = _normed(x, post_weight, hidden_size, eps, ROUNDS_FIRST)
    if x_scale != 1.0:
        x = (x.to(tl.float32) * x_scale).to(x.dtype)
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(out_residual_ptr + row * hidden_size + column, x, mask=is_inside)
    if HAS_WEIGHT:
        x = _normed(x, weight, hidden_size, eps, ROUNDS_FIRST)
        tl.store(out_ptr + row * hidden_size + column, x, mask=is_inside)


def reduce_add_norm(
    peers: Peers,
    place: int,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    post_weight: Tensor | None = None,
    x_scale: float = 1.0,
    rounds_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of the sum of the ranks' partial sums, which lie in buffer `place % 2`, [num_tokens, hidden_size]
    each and of the residual's type. place: of the sum in the step, below PLACES; it grows from sum to sum.
    """
    num_tokens, hidden_size = residual.shape
    total = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    out = total if weight is None else torch.empty_like(total)
    if num_tokens == 0:
        return out, total
    device, block = residual.device, next_power_of_2(hidden_size)
    _reduce_norm_kernel[(num_tokens,)](
        peers.parts[place % 2], peers.words, peers.own_words, peers.step, peers.failed,
        residual, weight, post_weight, out, total, peers.rank, place, residual.stride(0),
        hidden_size=hidden_size, NUM_RANKS=peers.num_ranks, PLACES=PLACES,
        PATIENCE_NS=0 if IS_INTERPRETING else PATIENCE_NS, eps=eps, x_scale=x_scale,
        HAS_WEIGHT=weight is not None, HAS_POST=post_weight is not None, ROUNDS_FIRST=rounds_first,
        IS_DEPENDENT=can_overlap(device), BLOCK=block,
        **launch_parameters("rms_norm", device, block=block), **dependent_options(device, num_tokens),
    )  # fmt: skip
    return out, total


def reduce_add_norm_torch(
    parts: list[Tensor],
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    post_weight: Tensor | None = None,
    x_scale: float = 1.0,
    rounds_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """The same of the ranks' partial sums [num_tokens, hidden_size] themselves: float32 sums in their order."""
    stacked = torch.stack(parts, dim=1)
    return add_rms_norm_torch(stacked, residual, weight, eps, None, post_weight, x_scale, rounds_first)
