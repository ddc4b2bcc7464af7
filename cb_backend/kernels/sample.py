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

from cb_backend.kernels.gumbel import gumbel_noise_log2, gumbel_noise_torch
from cb_backend.kernels.launch import jit, launch_parameters, needs_twin, next_power_of_2, tl

GREEDY_BELOW = 1e-5  # a temperature under this is greedy
_ELEMENTS_AT_ONCE = 1 << 16  # the twin's intermediate results stay in a CPU's cache


@jit()
def _ordered(x):
    """fp32 -> int32 of the same order (no NaN); its own inverse on the bits."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: the two zeros are one value
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def _filter_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    border_ptr,
    row_stride,
    vocab_size,
    GREEDY_BELOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row a program: find the smallest logit it keeps, by bisection; several passes over a row that lies in L2."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    tl.store(border_ptr + 2 * row, float("-inf"))
    tl.store(border_ptr + 2 * row + 1, float("-inf"))
    if temperature < GREEDY_BELOW:
        return
    if (top_k <= 0) & (top_p >= 1.0) & (min_p <= 0.0):
        return
    logits_ptr += row.to(tl.int64) * row_stride
    column = tl.arange(0, TILE)
    largest_of = tl.full([TILE], float("-inf"), tl.float32)
    smallest_of = tl.full([TILE], float("inf"), tl.float32)
    for start in range(0, vocab_size, TILE):
        is_inside = start + column < vocab_size
        x = tl.load(logits_ptr + start + column, mask=is_inside, other=float("-inf")).to(tl.float32)
        largest_of = tl.maximum(largest_of, x)
        smallest_of = tl.minimum(smallest_of, tl.where(x > float("-inf"), x, float("inf")))
    largest, smallest = tl.max(largest_of, axis=0), tl.min(smallest_of, axis=0)
    if min_p > 0.0:
        tl.store(border_ptr + 2 * row + 1, largest * (1.0 / temperature) + tl.log(min_p))
    # A border is kept as an ordered integer; `low` is always kept enough, so no search leaves a row empty.
    high = _ordered(largest)
    low = tl.minimum(_ordered(smallest), high)
    if (top_k > 0) & (top_k < vocab_size):
        above = high
        while low < above:
            middle = (low | above) - ((low ^ above) >> 1)  # the mean, rounded up; the sum would overflow
            count_of = tl.zeros([TILE], tl.int32)
            for start in range(0, vocab_size, TILE):
                is_inside = start + column < vocab_size
                x = tl.load(logits_ptr + start + column, mask=is_inside, other=float("-inf")).to(tl.float32)
                count_of += (_ordered(x) >= middle).to(tl.int32)
            count = tl.sum(count_of, axis=0)
            low = tl.where(count >= top_k, middle, low)
            above = tl.where(count >= top_k, above, middle - 1)
            above = tl.where(count == top_k, low, above)  # found: fewer bits to decide
    if top_p < 1.0:
        kept = low
        mass = -1.0  # of all kept tokens; the first round measures it
        above = high
        wanted = 0.0
        middle = low - 1
        while low < above:
            mass_of = tl.zeros([TILE], tl.float32)
            for start in range(0, vocab_size, TILE):
                is_inside = start + column < vocab_size
                x = tl.load(logits_ptr + start + column, mask=is_inside, other=float("-inf")).to(tl.float32)
                key = _ordered(x)
                weight = tl.where(x == largest, 1.0, tl.exp((x - largest) / temperature))
                mass_of += tl.where((key > middle) & (key >= kept), weight, 0.0)
            larger = tl.sum(mass_of, axis=0)
            is_first = mass < 0.0
            wanted = tl.where(is_first, top_p * larger, wanted)
            mass = tl.where(is_first, larger, mass)
            is_enough = larger < wanted
            above = tl.where(is_enough & (not is_first), middle, above)
            low = tl.where(is_enough | is_first, low, middle + 1)
            middle = (low & above) + ((low ^ above) >> 1)  # the mean, rounded down
    border = (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(border_ptr + 2 * row, border)


@jit()
def _tile_kernel(
    logits_ptr,
    temperature_ptr,
    border_ptr,
    seeds_ptr,
    positions_ptr,
    best_score_ptr,
    best_id_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    HAS_FILTERS: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """The best token of one tile of one row a program; a tile that holds NaN has the score NaN."""
    row, tile = tl.program_id(0), tl.program_id(1)
    token_ids = tile * TILE + tl.arange(0, TILE)
    is_inside = token_ids < vocab_size
    logits_ptr += row.to(tl.int64) * row_stride
    score = tl.load(logits_ptr + token_ids, mask=is_inside, other=float("-inf")).to(tl.float32)
    num_nans = tl.sum((score != score).to(tl.int32), axis=0)
    temperature = tl.load(temperature_ptr + row)
    if temperature >= GREEDY_BELOW:
        logit = score
        score = logit * (1.0 / temperature)
        if HAS_FILTERS:
            border, scaled_border = tl.load(border_ptr + 2 * row), tl.load(border_ptr + 2 * row + 1)
            score = tl.where((logit >= border) & (score >= scaled_border), score, float("-inf"))
        # In units of ln 2: the order of scores is the same.
        noise = gumbel_noise_log2(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), token_ids)
        score = score * 1.4426950408889634 + noise
    score = tl.where(is_inside, score, float("-inf"))
    best, index = tl.max(score, axis=0, return_indices=True)
    best = tl.where(num_nans > 0, float("nan"), best)
    tl.store(best_score_ptr + row * num_tiles + tile, best)
    tl.store(best_id_ptr + row * num_tiles + tile, tile * TILE + index)


@jit()
def _combine_kernel(
    best_score_ptr,
    best_id_ptr,
    token_ids_ptr,
    is_failed_ptr,
    num_tiles,
    TILES: tl.constexpr,
):
    """The best tile of one row a program; of equal ones the first."""
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    score = tl.load(best_score_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    num_nans = tl.sum((score != score).to(tl.int32), axis=0)
    best, index = tl.max(score, axis=0, return_indices=True)
    is_failed = (num_nans > 0) | (best == float("-inf"))
    token_id = tl.load(best_id_ptr + row * num_tiles + index)
    tl.store(token_ids_ptr + row, tl.where(is_failed, 0, token_id))
    tl.store(is_failed_ptr + row, is_failed)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    has_filters: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`sample_torch` in two launches, three with filters. Nothing waits for the device; rows of logits may be strided.

    The random bits are the twin's; scores may differ in the last bit of a logarithm.
    """
    if needs_twin(logits):
        return sample_torch(logits, temperature, top_k, top_p, min_p, seeds, positions, has_filters, out)
    num_rows, vocab_size = logits.shape
    if out is None:
        out = (
            torch.empty(num_rows, dtype=torch.int32, device=logits.device),
            torch.empty(num_rows, dtype=torch.bool, device=logits.device),
        )
    if num_rows == 0:
        return out
    parameters = launch_parameters("sample", logits.device)
    tile = min(parameters["tile"], max(next_power_of_2(vocab_size), 16))
    num_tiles = -(-vocab_size // tile)
    border = torch.empty(num_rows, 2, dtype=torch.float32, device=logits.device)
    best_score = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    if has_filters:
        _filter_kernel[(num_rows,)](
            logits, temperature, top_k, top_p, min_p, border, logits.stride(0), vocab_size,
            GREEDY_BELOW=GREEDY_BELOW, TILE=min(parameters["filter_tile"], max(next_power_of_2(vocab_size), 16)),
            num_warps=parameters["filter_num_warps"],
        )  # fmt: skip
    _tile_kernel[(num_rows, num_tiles)](
        logits, temperature, border, seeds, positions, best_score, best_id, logits.stride(0), vocab_size, num_tiles,
        HAS_FILTERS=has_filters, GREEDY_BELOW=GREEDY_BELOW, TILE=tile, num_warps=parameters["num_warps"],
    )  # fmt: skip
    _combine_kernel[(num_rows,)](best_score, best_id, *out, num_tiles, TILES=next_power_of_2(num_tiles), num_warps=1)
    return out


def sample_torch(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    has_filters: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (token_ids [num_rows] int32, is_failed [num_rows] bool).

    logits [num_rows, vocab_size], any float type; temperature, top_p, min_p [num_rows] fp32 (top_p 1 and min_p 0: off);
    top_k [num_rows] int32 (0: off); seeds [num_rows] int64, the bits of a uint64; positions [num_rows] int64.
    has_filters False promises that no row filters. Greedy ties go to the lowest id. A row whose logits hold NaN or are
    all -inf is failed and its id is 0.
    """
    largest = logits.amax(dim=-1)  # NaN where the row holds one
    is_failed = largest.isnan() | (largest == float("-inf"))
    token_ids = logits.argmax(dim=-1).to(torch.int32)
    drawn = ((temperature >= GREEDY_BELOW) & ~is_failed).nonzero().flatten()
    for rows in drawn.split(max(1, _ELEMENTS_AT_ONCE // logits.shape[1])):
        scaled = logits[rows].float() / temperature[rows].unsqueeze(1)
        if has_filters:
            scaled = _filter(scaled, top_k[rows], top_p[rows], min_p[rows])
        noise = gumbel_noise_torch(seeds[rows], positions[rows], logits.shape[1])
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
