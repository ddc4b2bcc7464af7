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

GREEDY_BELOW = 1e-5  # a temperature under this is greedy
_ELEMENTS_AT_ONCE = 1 << 16  # the twin's intermediate results stay in a CPU's cache


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


def gumbel_noise_torch(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [num_rows, vocab_size] fp32: -log(E), E exponential, out of `random_bits_torch`."""
    bits = random_bits_torch(seeds, positions, vocab_size)
    u = (bits.long() & 0xFFFFFFFF).float() * 2.0**-32 + 2.0**-33
    # Small E decides who wins: near 0 the series keeps the bits that 1 - u would round away.
    exponential = torch.where(u < 1e-3, u + u * u * (0.5 + u * (1 / 3)), -(1 - u.clamp(max=1 - 2.0**-24)).log())
    return -exponential.log()


def random_bits_torch(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """32 random bits a (row, token id), as int32 [num_rows, vocab_size]: three rounds of mixing of a row's key."""
    low, high = seeds.to(torch.int32), (seeds >> 32).to(torch.int32)
    position_low, position_high = positions.to(torch.int32), (positions >> 32).to(torch.int32)
    key = _mix(_mix(_mix(low) ^ high) ^ position_low) ^ position_high
    key_2 = _mix(~key)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    bits = _mix(ids * _as_int32(0x9E3779B9) + key.unsqueeze(1))
    return _mix(bits ^ key_2.unsqueeze(1))


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every input bit moves every output bit (int32 arithmetic wraps)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _as_int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _as_int32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value
