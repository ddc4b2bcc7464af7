"""Device functions that find a row's best score, a scaled logit plus noise, without taking the noise of every token.

A bound of the noise costs a quarter of the noise. So each tile is given a bound that none of its scores exceeds, and
only the tiles whose bounds reach the best score found so far are looked at closely: seldom more than two of a row.
Called by `sample`'s kernels; knows nothing of batches.
"""

from __future__ import annotations

from cb_backend.kernels.gumbel import HAS_ASSEMBLER, gumbel_noise_log2
from cb_backend.kernels.launch import jit, tl


@jit()
def scale_of(temperature):
    """Of a logit in its score, in units of ln 2."""
    return (1.0 / temperature) * 1.4426950408889634


@jit()
def score_of(x, temperature, seed, position, token_ids):
    """Scaled logit plus noise, in units of ln 2: the order is the same."""
    return x * scale_of(temperature) + gumbel_noise_log2(seed, position, token_ids)


@jit()
def score_bound_of(even, odd, scale, even_log2, odd_log2):
    """What no score of a tile exceeds, but for rounding; NaN where a logit is.

    even, odd [n] fp32: logits of its tokens; scale: of logits in scores; even_log2, odd_log2 [n]: log2 of the least
    that their random numbers may be. The smallest negated score is sought, which takes one instruction less a token.
    """
    return -min_or_nan(min_or_nan_of(even * -scale + even_log2, odd * -scale + odd_log2))


@jit()
def rounding_of(score):
    """How far two ways to round a score may lie apart, and some more."""
    return 1e-4 + tl.abs(score) * 1e-6


@jit()
def min_or_nan_of(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit()
def min_or_nan(x):
    """The smallest of x [n], NaN where one is: at no more cost, as the hardware's minimum knows it."""
    if HAS_ASSEMBLER:
        return tl.reduce(x, 0, min_or_nan_of)
    else:
        num_nans = tl.sum((x != x).to(tl.int32), axis=0)
        return tl.where(num_nans > 0, float("nan"), tl.min(x, axis=0))


@jit()
def best_within(logits_ptr, bounds, temperature, seed, position, vocab_size, GREEDY_BELOW: tl.constexpr,
                TILE: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The token of the best score. bounds [TILES], none of them NaN: of each tile's scores.

    Of equal ones the first in the tile that is looked at first. Bounds of a greedy row are its scores: there the first.
    """
    column, tiles = tl.arange(0, TILE), tl.arange(0, TILES)
    best = float("-inf")
    best_id = 0
    bound, tile = tl.max(bounds, axis=0, return_indices=True)
    is_searching = 1
    while is_searching > 0:
        token_ids = tile * TILE + column
        x = tl.load(logits_ptr + token_ids, mask=token_ids < vocab_size, other=float("-inf")).to(tl.float32)
        score = x
        if temperature >= GREEDY_BELOW:
            score = score_of(x, temperature, seed, position, token_ids)
        score, index = tl.max(score, axis=0, return_indices=True)
        best_id = tl.where(score > best, tile * TILE + index, best_id)
        best = tl.maximum(best, score)
        bounds = tl.where(tiles == tile, float("-inf"), bounds)
        bound, tile = tl.max(bounds, axis=0, return_indices=True)
        border = best
        if temperature >= GREEDY_BELOW:
            border = best - rounding_of(best)
        is_searching = (bound > border).to(tl.int32)
    return best_id
