"""Device functions that choose a row's token among those that top-k, top-p and min-p keep. No sort, few passes.

Two ideas. Top-k: the k-th largest of the maxima of small parts of a row is a lower bound of the k-th largest logit, and
few tokens reach it; they are listed, and everything else is decided on the list. Top-p and min-p alone: the token with
the best score among all is the answer if it is kept; if it is not, no token with a logit as small is kept either, so
the best among those with larger logits is looked at next. With top_p = 0.9 nine rows in ten end after one pass.

Logits are compared as integers of the same order (`ordered`). Called by `sample`'s kernels; knows nothing of batches.
"""

from __future__ import annotations

from cb_backend.kernels.launch import jit, tl
from cb_backend.kernels.sample_scores import rounding_of, score_of


@jit()
def ordered(x):
    """fp32 -> int32 of the same order (no NaN)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: the two zeros are one value
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def weight_of(x, largest, temperature):
    """The probability of logit x relative to that of the largest."""
    return tl.where(x == largest, 1.0, tl.exp((x - largest) / temperature))  # the first case: inf - inf is NaN


@jit()
def _kth_largest(keys, k, low, high):
    """A border between `low` and `high` that the k largest of `keys` reach, and as few others as possible."""
    low = low + tl.zeros_like(high)  # a constant cannot change its value in a loop
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up; the sum would overflow
        count = tl.sum((keys >= middle).to(tl.int32), axis=0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle - 1)
        high = tl.where(count == k, low, high)
    return low


@jit()
def _kth_largest_of_row(logits_ptr, k, low, high, vocab_size, TILE: tl.constexpr):
    """`_kth_largest` over a whole row: a pass for each bit."""
    column = tl.arange(0, TILE)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        count_of = tl.zeros([TILE], tl.int32)
        for start in range(0, vocab_size, TILE):
            is_inside = start + column < vocab_size
            x = tl.load(logits_ptr + start + column, mask=is_inside, other=float("-inf")).to(tl.float32)
            count_of += (is_inside & (ordered(x) >= middle)).to(tl.int32)
        count = tl.sum(count_of, axis=0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle - 1)
        high = tl.where(count == k, low, high)
    return low


@jit()
def _list_tokens(logits_ptr, values_ptr, ids_ptr, bound, tile_max, vocab_size, num_tiles, TILE: tl.constexpr,
                 TILES: tl.constexpr, LISTED: tl.constexpr):  # fmt: skip
    """Write the tokens that reach `bound`, in the order of their ids; return their number, or more than LISTED."""
    column, tiles = tl.arange(0, TILE), tl.arange(0, TILES)
    num_listed = 0
    tile = 0
    while (tile < num_tiles) & (num_listed <= LISTED):
        if ordered(tl.max(tl.where(tiles == tile, tile_max, float("-inf")), axis=0)) >= bound:
            token_ids = tile * TILE + column
            is_inside = token_ids < vocab_size
            x = tl.load(logits_ptr + token_ids, mask=is_inside, other=float("-inf")).to(tl.float32)
            is_listed = is_inside & (ordered(x) >= bound)
            place = num_listed + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
            tl.store(values_ptr + place, x, mask=is_listed & (place < LISTED))
            tl.store(ids_ptr + place, token_ids, mask=is_listed & (place < LISTED))
            num_listed += tl.sum(is_listed.to(tl.int32), axis=0)
        tile += 1
    tl.debug_barrier()  # other threads read what this one wrote
    return num_listed


@jit()
def _best_of_list(values_ptr, ids_ptr, num_listed, bound, largest, temperature, top_k, top_p, scaled_border, seed,
                  position, LISTED: tl.constexpr):  # fmt: skip
    """The answer, where every token that may be kept is on the list."""
    place = tl.arange(0, LISTED)
    is_listed = place < num_listed
    x = tl.load(values_ptr + place, mask=is_listed, other=float("-inf"))
    token_ids = tl.load(ids_ptr + place, mask=is_listed, other=0)
    keys = tl.where(is_listed, ordered(x), -0x80000000)
    high = ordered(largest)
    border = _kth_largest(keys, top_k, bound, high)
    if top_p < 1.0:
        weights = tl.where(keys >= border, weight_of(x, largest, temperature), 0.0)
        wanted = top_p * tl.sum(weights, axis=0)
        while border < high:  # down to the smallest border whose strictly larger tokens hold less than wanted
            middle = (border & high) + ((border ^ high) >> 1)  # the mean, rounded down
            is_enough = tl.sum(tl.where(keys > middle, weights, 0.0), axis=0) < wanted
            high = tl.where(is_enough, middle, high)
            border = tl.where(is_enough, border, middle + 1)
    is_kept = (keys >= border) & is_listed & (x * (1.0 / temperature) >= scaled_border)
    score = tl.where(is_kept, score_of(x, temperature, seed, position, token_ids), float("-inf"))
    _, best = tl.max(score, axis=0, return_indices=True)
    return tl.sum(tl.where(place == best, token_ids, 0), axis=0)


@jit()
def _best_above(logits_ptr, bound, tile_max, score_bounds, largest, temperature, seed, position, vocab_size, num_tiles,
                TILE: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The tokens strictly above `bound`: their weight together, and the one with the best score (-1: there is none)."""
    column, tiles = tl.arange(0, TILE), tl.arange(0, TILES)
    mass = 0.0
    best = float("-inf")
    best_id = -1
    for tile in range(0, num_tiles):
        if ordered(tl.max(tl.where(tiles == tile, tile_max, float("-inf")), axis=0)) > bound:
            token_ids = tile * TILE + column
            is_inside = token_ids < vocab_size
            x = tl.load(logits_ptr + token_ids, mask=is_inside, other=float("-inf")).to(tl.float32)
            is_above = is_inside & (ordered(x) > bound)
            mass += tl.sum(tl.where(is_above, weight_of(x, largest, temperature), 0.0), axis=0)
            score_bound = tl.max(tl.where(tiles == tile, score_bounds, float("-inf")), axis=0)
            if score_bound > best - rounding_of(score_bound):
                score = tl.where(is_above, score_of(x, temperature, seed, position, token_ids), float("-inf"))
                score, index = tl.max(score, axis=0, return_indices=True)
                best_id = tl.where(score > best, tile * TILE + index, best_id)
                best = tl.maximum(best, score)
    return mass, best_id


@jit()
def choose_filtered(token_id, logits_ptr, values_ptr, ids_ptr, part_max, tile_mass, score_bounds, temperature, top_k,
                    top_p, min_p, seed, position, vocab_size, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr,
                    LISTED: tl.constexpr):  # fmt: skip
    """The token of a row that filters, given its best token without filters.

    part_max [TILES, parts]: the largest logit of each part of each tile; tile_mass [TILES]: the weight of each tile
    relative to its largest logit; score_bounds [TILES]: what no score of a tile exceeds; values_ptr, ids_ptr: room for
    LISTED tokens.
    """
    tile_max = tl.max(part_max, axis=1)
    largest = tl.max(tile_max, axis=0)
    total = tl.sum(tile_mass * weight_of(tile_max, largest, temperature), axis=0)
    scaled_border = float("-inf")
    if min_p > 0.0:
        scaled_border = largest * (1.0 / temperature) + tl.log(min_p)
    is_chosen = 0
    if (top_k > 0) & (top_k < vocab_size):
        parts = tl.ravel(ordered(part_max))
        # -0x7F800001 is ordered(-inf): fewer parts than top_k, and every token reaches the bound.
        bound = _kth_largest(parts, top_k, -0x7F800001, ordered(largest))
        num_listed = _list_tokens(logits_ptr, values_ptr, ids_ptr, bound, tile_max, vocab_size, num_tiles, TILE, TILES,
                                  LISTED)  # fmt: skip
        if num_listed <= LISTED:
            token_id = _best_of_list(values_ptr, ids_ptr, num_listed, bound, largest, temperature, top_k, top_p,
                                     scaled_border, seed, position, LISTED)  # fmt: skip
            is_chosen = 1
        else:
            border = _kth_largest_of_row(logits_ptr, top_k, bound, ordered(largest), vocab_size, TILE)
            total, token_id = _best_above(logits_ptr, border - 1, tile_max, score_bounds, largest, temperature, seed,
                                          position, vocab_size, num_tiles, TILE, TILES)  # fmt: skip
    if is_chosen == 0:
        is_searching = ((top_p < 1.0) | (min_p > 0.0)).to(tl.int32)
        while is_searching > 0:
            x = tl.load(logits_ptr + token_id).to(tl.float32)
            mass, next_id = _best_above(logits_ptr, ordered(x), tile_max, score_bounds, largest, temperature, seed,
                                        position, vocab_size, num_tiles, TILE, TILES)  # fmt: skip
            is_kept = ((top_p >= 1.0) | (mass < top_p * total)) & (x * (1.0 / temperature) >= scaled_border)
            is_searching = ((next_id >= 0) & (not is_kept)).to(tl.int32)  # the largest logit is always kept
            token_id = tl.where(is_searching > 0, next_id, token_id)
    return token_id
