"""The twin of prefill attention: what the kernel computes, in torch; the CPU's path as well.

Request by request, a piece of its queries at a time. Knows requests' slots, block tables and lengths, not steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

_QUERIES_AT_ONCE = 128  # bounds the twin's score matrix


def prefill_attention_torch(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    *,
    max_query_len: int,
    out: Tensor | None = None,
    value_scale: float = 1.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Query j of request r stands at position seq_lens[r] - query_len[r] + j and sees the positions up to its own.

    q [num_tokens, num_heads, head_dim]; kv_cache [num_blocks, 2, num_kv_heads, block_size, head_dim];
    block_tables [num_slots, max_blocks] int32; slots, seq_lens [num_requests] int32; query_start_loc
    [num_requests + 1] int32; max_query_len: no request has more queries. With window w > 0 a query at position x sees
    only positions above x - w. Requests of no queries are skipped; rows outside every request (padding) give zeros.
    A narrower cache (fp8), a softcap and sinks are taken as in decode attention.
    Returns q's shape and type; scores and sums are fp32.
    """
    out = torch.empty_like(q) if out is None else out
    block_size = kv_cache.shape[3]
    bounds: list[int] = query_start_loc.tolist()
    out[: bounds[0]] = 0
    out[bounds[-1] :] = 0
    for request, (slot, seq_len) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        start, end = bounds[request], bounds[request + 1]
        if start == end:
            continue
        first_position = seq_len - (end - start)
        first_block = max(0, first_position - window + 1) // block_size if window else 0
        ids = block_tables[slot, first_block : -(-seq_len // block_size)].long()
        # [num_kv_heads, tokens, head_dim], token 0 at position first_block * block_size
        k, v = (kv_cache[ids, which].transpose(0, 1).flatten(1, 2).float() for which in (0, 1))
        for lo in range(start, end, _QUERIES_AT_ONCE):
            hi = min(lo + _QUERIES_AT_ONCE, end)
            position = first_position + lo - start - first_block * block_size
            attended = _attend(q[lo:hi], k, v, position, scale, window, softcap, sinks)
            out[lo:hi] = (attended * value_scale).to(q.dtype)
    return out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Queries at `position`, `position + 1`, ... over keys at 0, 1, ...; q [n, num_heads, head_dim]. In fp32."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[0]
    first_key = max(0, position - window + 1) if window else 0
    keys = torch.arange(first_key, position + num_queries, device=q.device)
    at = torch.arange(position, position + num_queries, device=q.device).unsqueeze(1)
    hidden = keys > at
    if window:
        hidden |= keys <= at - window
    k, v = k[:, first_key : position + num_queries], v[:, first_key : position + num_queries]
    group = num_heads // num_kv_heads
    queries = q.float().view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    scores = queries.reshape(num_kv_heads, group * num_queries, head_dim) @ k.transpose(1, 2) * scale
    if softcap:
        scores = (scores / softcap).tanh_() * softcap
    scores = scores.view(num_kv_heads, group, num_queries, -1).masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, group, 1, 1).expand(-1, -1, num_queries, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[1]]
    attended = weights.reshape(num_kv_heads, group * num_queries, -1) @ v
    return attended.view(num_kv_heads, group, num_queries, head_dim).permute(2, 0, 1, 3).reshape(q.shape)
