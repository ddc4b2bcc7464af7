"""Log-probabilities of given tokens and of the likeliest ones, for some rows of logits.

One rule of rank: 1 + the number of strictly larger logits of the row. Of equal logits the lower id stands first. Knows
rows and numbers, not requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.launch import jit, launch_parameters, needs_twin, next_power_of_2, tl
from cb_backend.kernels.sample_filters import ordered

MAX_TOP = 20  # most tokens listed for a row
_LISTED = 32  # places for them in a tile's list: the power of two above
_ROWS_AT_ONCE = 16  # the twin's intermediate results take 20 bytes a token id
_LOWEST = -(2**31)  # below the key of every logit


@jit("num_top")
def _tile_logprobs_kernel(
    logits_ptr,
    rows_ptr,
    token_ids_ptr,
    tile_max_ptr,
    tile_mass_ptr,
    num_larger_ptr,
    listed_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    num_top,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
    LOWEST: tl.constexpr,
):
    """One tile of one row a program: its largest logit, its weight, and its `num_top` largest by key and id."""
    place, tile = tl.program_id(0), tl.program_id(1)
    logits_ptr += tl.load(rows_ptr + place).to(tl.int64) * row_stride
    column = tl.arange(0, TILE)
    is_inside = tile * TILE + column < vocab_size
    x = tl.load(logits_ptr + tile * TILE + column, mask=is_inside, other=float("-inf")).to(tl.float32)
    given = tl.load(logits_ptr + tl.load(token_ids_ptr + place)).to(tl.float32)
    largest = tl.max(x, axis=0)
    mass = tl.sum(tl.where(x == largest, 1.0, tl.exp(x - largest)), axis=0)
    out = place.to(tl.int64) * num_tiles + tile
    tl.store(tile_max_ptr + out, largest)
    # A tile of nothing but -inf weighs nothing.
    tl.store(tile_mass_ptr + out, tl.where(largest == float("-inf"), 0.0, mass))
    tl.store(num_larger_ptr + out, tl.sum((x > given).to(tl.int32), axis=0))
    keys = tl.where(is_inside, ordered(x), LOWEST)
    listed_ptr += out * LISTED * 2
    for index in range(num_top):
        key, winner = tl.max(keys, axis=0, return_indices=True)
        tl.store(listed_ptr + index * 2, key)
        tl.store(listed_ptr + index * 2 + 1, tile * TILE + winner)
        keys = tl.where(column == winner, LOWEST, keys)


@jit("num_top")
def _merge_logprobs_kernel(
    logits_ptr,
    rows_ptr,
    token_ids_ptr,
    tile_max_ptr,
    tile_mass_ptr,
    num_larger_ptr,
    listed_ptr,
    floats_ptr,
    ints_ptr,
    row_stride,
    num_tiles,
    num_top,
    TILES: tl.constexpr,
    LISTED: tl.constexpr,
    LOWEST: tl.constexpr,
):
    """One row a program: its tiles' figures put together, and the best of their lists."""
    place = tl.program_id(0).to(tl.int64)
    given = tl.load(logits_ptr + tl.load(rows_ptr + place).to(tl.int64) * row_stride + tl.load(token_ids_ptr + place))
    tile = tl.arange(0, TILES)
    is_tile = tile < num_tiles
    largest_of = tl.load(tile_max_ptr + place * num_tiles + tile, mask=is_tile, other=float("-inf"))
    largest = tl.max(largest_of, axis=0)
    mass_of = tl.load(tile_mass_ptr + place * num_tiles + tile, mask=is_tile, other=0.0)
    mass = tl.sum(tl.where(mass_of > 0, mass_of * tl.exp(largest_of - largest), 0.0), axis=0)
    log_sum = largest + tl.log(mass)
    num_larger = tl.sum(tl.load(num_larger_ptr + place * num_tiles + tile, mask=is_tile, other=0), axis=0)
    floats_ptr += place * (1 + num_top)
    ints_ptr += place * (1 + num_top)
    tl.store(floats_ptr, given.to(tl.float32) - log_sum)
    tl.store(ints_ptr, num_larger + 1)
    entry = tl.arange(0, TILES * LISTED)  # tile by tile, so that of equal keys the lower id comes first
    is_entry = (entry // LISTED < num_tiles) & (entry % LISTED < num_top)
    listed_ptr += place * num_tiles * LISTED * 2
    keys = tl.load(listed_ptr + entry * 2, mask=is_entry, other=LOWEST)
    for index in range(num_top):
        key, winner = tl.max(keys, axis=0, return_indices=True)
        value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(floats_ptr + 1 + index, value - log_sum)
        tl.store(ints_ptr + 1 + index, tl.load(listed_ptr + winner * 2 + 1))
        keys = tl.where(entry == winner, LOWEST, keys)


def top_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """`top_logprobs_torch` in two launches, without a copy of the logits; `num_top` at most MAX_TOP."""
    if needs_twin(logits):
        return top_logprobs_torch(logits, rows, token_ids, num_top)
    num_rows, vocab_size = rows.shape[0], logits.shape[1]
    num_top = min(num_top, vocab_size)
    assert num_top <= MAX_TOP, f"{num_top} tokens a row; at most {MAX_TOP}"
    floats = torch.empty(num_rows, 1 + num_top, dtype=torch.float32, device=logits.device)
    ints = torch.empty(num_rows, 1 + num_top, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return floats, ints
    parameters = launch_parameters("top_logprobs", logits.device)
    tile = min(parameters["tile"], max(next_power_of_2(vocab_size), 32))
    num_tiles = -(-vocab_size // tile)
    tile_max = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    tile_mass, num_larger = torch.empty_like(tile_max), torch.empty_like(tile_max, dtype=torch.int32)
    listed = torch.empty(num_rows, num_tiles, _LISTED, 2, dtype=torch.int32, device=logits.device)
    parts = (tile_max, tile_mass, num_larger, listed)
    _tile_logprobs_kernel[(num_rows, num_tiles)](
        logits, rows, token_ids, *parts, logits.stride(0), vocab_size, num_tiles, num_top,
        TILE=tile, LISTED=_LISTED, LOWEST=_LOWEST, num_warps=parameters["num_warps"],
    )  # fmt: skip
    _merge_logprobs_kernel[(num_rows,)](
        logits, rows, token_ids, *parts, floats, ints, logits.stride(0), num_tiles, num_top,
        TILES=next_power_of_2(num_tiles), LISTED=_LISTED, LOWEST=_LOWEST, num_warps=parameters["merge_num_warps"],
    )  # fmt: skip
    return floats, ints


def top_logprobs_torch(logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Two tensors: log-probabilities of the given token and of the k likeliest; the given one's rank and their ids.

    logits [num_rows, vocab_size] of any float type; rows int64 or int32 [n], rows of them; token_ids int32 [n], a token
    of each. Returns float32 and int32 [n, 1 + k], k = `num_top` or the whole vocabulary if that is smaller.
    """
    shape = (rows.shape[0], 1 + min(num_top, logits.shape[1]))
    floats = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ints = torch.empty(shape, dtype=torch.int32, device=logits.device)
    for start in range(0, shape[0], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        x = logits[rows[part].long()].float()
        given = token_ids[part].long().unsqueeze(1)  # [rows, 1]
        ids = torch.cat((given, _order_key(x).topk(shape[1] - 1, dim=-1).indices), dim=1)  # [rows, 1 + k]
        floats[part] = x.log_softmax(dim=-1).gather(1, ids)
        ints[part] = ids.to(torch.int32)
        ints[part, 0] = ((x > x.gather(1, given)).sum(1) + 1).to(torch.int32)
    return floats, ints


def _order_key(values: Tensor) -> Tensor:
    """int64 of the order of float32 `values`, with ties broken for the lower column: topk itself promises none."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: the two zeros are one value
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (keys << 32) - torch.arange(values.shape[1], device=values.device)
