"""Choose the next token of every row: greedy, or a draw at a temperature with top-k, top-p and min-p.

A draw adds Gumbel noise to the scaled logits and takes the largest. The noise is a hash of (seed, position, token id):
no generator state, so a sample never depends on the batch. Knows rows and numbers, not requests.

What a row keeps, on the distribution after temperature (ties at a border are all kept, so no order matters):
top_k: tokens with fewer than top_k strictly larger logits; top_p: of those, tokens whose strictly larger ones hold less
than top_p of the mass left; min_p: of those, tokens with at least min_p times the largest probability.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.gumbel import gumbel_noise_torch, least_uniforms_log2
from cb_backend.kernels.launch import (
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    launch_parameters,
    let_next_start,
    needs_twin,
    next_power_of_2,
    tl,
)
from cb_backend.kernels.row_sampling import RowSampling
from cb_backend.kernels.sample_filters import choose_filtered, weight_of
from cb_backend.kernels.sample_scores import best_within, scale_of, score_bound_of

GREEDY_BELOW = 1e-5  # a temperature under this is greedy
_PARTS = 8  # of a tile, each with its largest logit known
_LISTED = 1024  # tokens of a row that top-k may have to look at closely
_ELEMENTS_AT_ONCE = 1 << 16  # the twin's intermediate results stay in a CPU's cache


@jit()
def _bound_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    positions_ptr,
    bound_ptr,
    part_max_ptr,
    tile_mass_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    HAS_FILTERS: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What no score of a tile of one row exceeds, a program; of a tile that holds NaN it is NaN.

    For a row that filters also the largest logit of each of the tile's PARTS parts, and the tile's weight.
    """
    let_next_start(IS_DEPENDENT)
    await_previous(IS_DEPENDENT)
    row, tile = tl.program_id(0), tl.program_id(1)
    place = (row * num_tiles + tile).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    seed, position = tl.load(seed_ptr + row), tl.load(positions_ptr + row)
    token_ids = tile * TILE + tl.arange(0, TILE)
    is_inside = token_ids < vocab_size
    logits_ptr += row.to(tl.int64) * row_stride
    logit = tl.load(logits_ptr + token_ids, mask=is_inside, other=float("-inf"))
    # The noise, which needs no logits, comes before their first use: there it is computed while they are on their way.
    scale = 1.0
    even_log2 = tl.zeros([TILE // 2], tl.float32)
    odd_log2 = even_log2
    if temperature >= GREEDY_BELOW:
        scale = scale_of(temperature)
        pairs = tile * (TILE // 2) + tl.arange(0, TILE // 2)
        even_log2, odd_log2 = least_uniforms_log2(seed, position, pairs)
    logit = logit.to(tl.float32)
    even, odd = tl.split(tl.reshape(logit, [TILE // 2, 2]))
    tl.store(bound_ptr + place, score_bound_of(even, odd, scale, even_log2, odd_log2))
    if HAS_FILTERS:
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        if ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)) & (temperature >= GREEDY_BELOW):
            largest_of = tl.max(tl.reshape(logit, [PARTS, TILE // PARTS]), axis=1)
            tl.store(part_max_ptr + place * PARTS + tl.arange(0, PARTS), largest_of)
            largest = tl.max(largest_of, axis=0)
            mass = tl.sum(tl.where(is_inside, weight_of(logit, largest, temperature), 0.0), axis=0)
            tl.store(tile_mass_ptr + place, mass)


@jit()
def _choose_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    positions_ptr,
    bound_ptr,
    part_max_ptr,
    tile_mass_ptr,
    values_ptr,
    ids_ptr,
    token_ids_ptr,
    is_failed_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    HAS_FILTERS: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    LISTED: tl.constexpr,
):
    """One row a program: the best token, of a greedy row's equal ones the first; then the row's filters."""
    let_next_start(IS_DEPENDENT)
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * row_stride
    tile, part = tl.arange(0, TILES), tl.arange(0, PARTS)
    is_tile = tile < num_tiles
    place = row.to(tl.int64) * num_tiles + tile
    bounds = tl.load(bound_ptr + place, mask=is_tile, other=float("-inf"))
    num_nans = tl.sum((bounds != bounds).to(tl.int32), axis=0)
    largest = tl.max(bounds, axis=0)
    is_failed = (num_nans > 0) | (largest == float("-inf")) | (largest == float("inf"))
    temperature = tl.load(temperature_ptr + row)
    seed, position = tl.load(seed_ptr + row), tl.load(positions_ptr + row)
    token_id = 0
    if not is_failed:
        token_id = best_within(logits_ptr, bounds, temperature, seed, position, vocab_size, GREEDY_BELOW, TILE, TILES)
    if HAS_FILTERS:
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        is_filtered = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
        if is_filtered & (temperature >= GREEDY_BELOW) & (not is_failed):
            part_max = tl.load(
                part_max_ptr + place[:, None] * PARTS + part[None, :], mask=is_tile[:, None], other=float("-inf")
            )
            tile_mass = tl.load(tile_mass_ptr + place, mask=is_tile, other=0.0)
            token_id = choose_filtered(
                token_id, logits_ptr, values_ptr + row * LISTED, ids_ptr + row * LISTED,
                part_max, tile_mass, bounds, temperature, top_k, top_p, min_p, seed,
                position, vocab_size, num_tiles, TILE, TILES, LISTED,
            )  # fmt: skip
    tl.store(token_ids_ptr + row, token_id)
    tl.store(is_failed_ptr + row, is_failed)


def sample(
    logits: Tensor,
    sampling: RowSampling,
    positions: Tensor,
    has_filters: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`sample_torch` in two launches. Nothing waits for the device; rows of logits may be strided.

    The random bits are the twin's; scores may differ in the last bit of a logarithm.
    """
    if needs_twin(logits):
        return sample_torch(logits, sampling, positions, has_filters, out)
    num_rows, vocab_size = logits.shape
    if out is None:
        out = (
            torch.empty(num_rows, dtype=torch.int32, device=logits.device),
            torch.empty(num_rows, dtype=torch.bool, device=logits.device),
        )
    if num_rows == 0:
        return out
    parameters = launch_parameters("sample", logits.device)
    tile = min(parameters["tile"], max(next_power_of_2(vocab_size), 2 * _PARTS))
    num_tiles = -(-vocab_size // tile)
    bounds = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    tile_mass = torch.empty_like(bounds)
    part_max = torch.empty(num_rows, num_tiles, _PARTS, dtype=torch.float32, device=logits.device)
    values = torch.empty(num_rows, _LISTED, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, _LISTED, dtype=torch.int32, device=logits.device)
    constants = {"HAS_FILTERS": has_filters, "GREEDY_BELOW": GREEDY_BELOW, "TILE": tile, "PARTS": _PARTS}
    constants |= {"IS_DEPENDENT": can_overlap(logits.device), **dependent_options(logits.device, num_rows)}
    row_values = (logits, *sampling, positions)
    _bound_kernel[(num_rows, num_tiles)](
        *row_values, bounds, part_max, tile_mass, logits.stride(0), vocab_size, num_tiles,
        **constants, num_warps=parameters["num_warps"],
    )  # fmt: skip
    _choose_kernel[(num_rows,)](
        *row_values, bounds, part_max, tile_mass, values, ids, *out,
        logits.stride(0), vocab_size, num_tiles,
        **constants, TILES=next_power_of_2(num_tiles), LISTED=_LISTED,
        num_warps=parameters["choose_num_warps"],
    )  # fmt: skip
    return out


def sample_torch(
    logits: Tensor,
    sampling: RowSampling,
    positions: Tensor,
    has_filters: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (token_ids [num_rows] int32, is_failed [num_rows] bool).

    logits [num_rows, vocab_size], any float type; sampling, each [num_rows]: temperature, top_p, min_p fp32 (top_p 1
    and min_p 0: off), top_k int32 (0: off), seed int64, the bits of a uint64; positions [num_rows] int64.
    has_filters False promises that no row filters. Greedy ties go to the lowest id. A row whose logits hold NaN or
    +inf, or are all -inf, is failed and its id is 0.
    """
    temperature, top_k, top_p, min_p, seed = sampling
    largest = logits.amax(dim=-1)  # NaN where the row holds one
    is_failed = ~largest.isfinite()
    token_ids = logits.argmax(dim=-1).to(torch.int32)
    drawn = ((temperature >= GREEDY_BELOW) & ~is_failed).nonzero().flatten()
    for rows in drawn.split(max(1, _ELEMENTS_AT_ONCE // logits.shape[1])):
        scaled = logits[rows].float() / temperature[rows].unsqueeze(1)
        if has_filters:
            scaled = _filter(scaled, top_k[rows], top_p[rows], min_p[rows])
        noise = gumbel_noise_torch(seed[rows], positions[rows], logits.shape[1])
        token_ids[rows] = (scaled + noise).argmax(dim=-1).to(torch.int32)
    token_ids.masked_fill_(is_failed, 0)
    if out is None:
        return token_ids, is_failed
    return out[0].copy_(token_ids), out[1].copy_(is_failed)


def _filter(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """scaled [n, vocab_size] fp32 with -inf where a token is not kept; rows that filter nothing cost nothing."""
    asks = ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero().flatten()
    if not len(asks):
        return scaled
    rows = scaled[asks]
    ordered = rows.sort(dim=-1, descending=True).values
    if bool((top_k > 0).any()):
        k = top_k[asks].long()
        border = ordered.gather(1, (torch.where(k > 0, k, rows.shape[1]).clamp(max=rows.shape[1]) - 1).unsqueeze(1))
        rows = rows.masked_fill(rows < border, float("-inf"))
        ordered = ordered.masked_fill(ordered < border, float("-inf"))
    largest = ordered[:, :1]
    weights = torch.where(ordered == largest, 1.0, (ordered - largest).exp())  # the first case: inf - inf is NaN
    p = top_p[asks].unsqueeze(1)
    before = weights.cumsum(-1) - weights
    inside = (before < p * weights.sum(-1, keepdim=True)) | (p >= 1)
    inside[:, 0] = True  # the largest is always kept
    border = ordered.masked_fill(~inside, float("inf")).amin(dim=-1, keepdim=True)
    border = torch.maximum(border, largest + min_p[asks].log().unsqueeze(1))
    scaled = scaled.clone()
    scaled[asks] = rows.masked_fill(rows < border, float("-inf"))
    return scaled
