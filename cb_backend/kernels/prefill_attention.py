"""Attention of several query tokens a request over a paged KV cache: whole prompts, chunks of them, cached prefixes.

Bound by arithmetic, so tiles are those of the tensor cores: the query heads that share a KV head are packed into the
rows of a tile, and only the tiles that cross the causal border (or the window's) are masked. Knows rows, block tables
and lengths, not requests or steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.launch import (
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    launch_parameters,
    let_next_start,
    needs_twin,
    next_power_of_2,
    num_multiprocessors,
    tl,
)
from cb_backend.kernels.prefill_attention_torch import prefill_attention_torch
from cb_backend.kernels.sinks import with_sink
from cb_backend.kernels.softcap import LOG2E, capped, score_scale

_REQUESTS_AT_ONCE = 32


@jit()
def _attend_tiles(
    acc, largest, denominator,  # of the running softmax
    q,
    position,  # [BLOCK_M] of the queries
    start, end,
    last,  # last position in the cache: nothing is read past it
    table_ptr, key_ptr, scale_log2e, block_stride, value_stride,
    IS_MASKED: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP_LOG2E: tl.constexpr,
):  # fmt: skip
    """The keys of positions [start, end), BLOCK_N at a time, folded into the running softmax."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    # NOTE: block ids are loaded one iteration ahead, as in decode attention, or K and V would be single-buffered.
    if ALIGN > 1:
        block = tl.load(table_ptr + tl.minimum(start, last) // BLOCK_SIZE)
    else:
        block = tl.load(table_ptr + tl.minimum(start + n, last) // BLOCK_SIZE)
    for tile in range(start, end, BLOCK_N):
        cell = block.to(tl.int64) * block_stride + (tl.minimum(tile + n, last) % BLOCK_SIZE) * HEAD_DIM
        if ALIGN > 1:
            block = tl.load(table_ptr + tl.minimum(tile + BLOCK_N, last) // BLOCK_SIZE)
        else:
            block = tl.load(table_ptr + tl.minimum(tile + BLOCK_N + n, last) // BLOCK_SIZE)
        cell_ptr = key_ptr + cell[:, None] + d[None, :]
        if BLOCK_D == HEAD_DIM:
            k = tl.load(cell_ptr)  # [BLOCK_N, BLOCK_D]
        else:
            k = tl.load(cell_ptr, mask=(d < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # [BLOCK_M, BLOCK_N], not yet scaled
        factor = scale_log2e
        if SOFTCAP_LOG2E > 0:
            scores, factor = capped(scores * scale_log2e, SOFTCAP_LOG2E), 1.0
        if IS_MASKED:
            key_position = (tile + n)[None, :]
            is_seen = key_position <= position[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (key_position > position[:, None] - WINDOW)
            # Finite, so that a row that has seen no key yet does not make NaN of -inf - -inf. And a power of two, whose
            # product with the factor is exact: bits that `new_largest` lost in rounding would be what is left below of
            # such a row's scores, 10**30 and more of a number near 10**38, and 2 to the power of that is infinite.
            scores = tl.where(is_seen, scores, -1.2676506002282294e30)  # -2**100
        # Scaling and subtraction are one multiply-add an element.
        new_largest = tl.maximum(largest, tl.max(scores, axis=1) * factor)
        correction = tl.exp2(largest - new_largest)
        # Times -1 the compiler makes a sign of the operand; `-` would be an instruction, a subtraction from 0.
        weights = tl.exp2(tl.fma(scores, factor, new_largest[:, None] * -1.0))
        denominator = denominator * correction + tl.sum(weights, axis=1)
        if BLOCK_D == HEAD_DIM:
            v = tl.load(cell_ptr + value_stride)
        else:
            v = tl.load(cell_ptr + value_stride, mask=(d < HEAD_DIM)[None, :], other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * correction[:, None], input_precision="ieee")
        largest = new_largest
    return acc, largest, denominator


@jit()
def _tile_of(token, head, m, d, query_end, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
             HEAD_DIM: tl.constexpr):  # fmt: skip
    """Offsets [BLOCK_M, BLOCK_D] of a tile in the output, and which of them exist."""
    offset = (token.to(tl.int64) * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + d[None, :]
    return offset, ((m < QUERIES * GROUP) & (token < query_end))[:, None] & (d < HEAD_DIM)[None, :]


@jit("num_tokens", "num_requests")
def _prefill_attention_kernel(
    q_ptr,
    kv_cache_ptr,
    block_tables_ptr,
    slots_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    sinks_ptr,
    out_ptr,
    num_tokens,
    num_requests,
    scale_log2e,
    value_scale,
    q_stride,
    block_stride,
    value_stride,
    head_stride,
    table_stride,
    WINDOW: tl.constexpr,
    SOFTCAP_LOG2E: tl.constexpr,  # of the scores; 0: none
    HAS_SINKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,  # BLOCK_N where a tile lies in one cache block, else 1
    QUERIES: tl.constexpr,  # tokens a tile: BLOCK_M // GROUP
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REQUESTS: tl.constexpr,  # looked at together when a tile finds its own
    IS_DEPENDENT: tl.constexpr,
):
    """QUERIES tokens of one request and one KV head a program; row r of a tile is token r // GROUP, head r % GROUP."""
    let_next_start(IS_DEPENDENT)
    await_previous(IS_DEPENDENT)
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # a prompt's last tile has the most keys: it goes first
    # Request r owns the tiles from query_start_loc[r] // QUERIES + r on: enough for it, whatever its neighbours need.
    # The tiles after the last request's are those of padding.
    request = -1
    for first in range(0, num_requests + 1, REQUESTS):
        other = first + tl.arange(0, REQUESTS)
        is_other = other <= num_requests
        first_tile = tl.load(query_start_loc_ptr + other, mask=is_other, other=0) // QUERIES + other
        request += tl.sum((is_other & (first_tile <= tile)).to(tl.int32), axis=0)
    query_start = tl.load(query_start_loc_ptr + request)
    is_request = request < num_requests
    query_end = tl.load(query_start_loc_ptr + request + 1, mask=is_request, other=num_tokens)
    query_end = tl.where(is_request, query_end, num_tokens)
    first_query = (tile - (query_start // QUERIES + request)) * QUERIES
    if query_start + first_query >= query_end:
        return
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = query_start + first_query + m // GROUP
    head = kv_head * GROUP + m % GROUP
    if request == num_requests:
        offset, is_row = _tile_of(token, head, m, d, query_end, NUM_KV_HEADS, GROUP, QUERIES, HEAD_DIM)
        tl.store(out_ptr + offset, tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty), mask=is_row)
        return
    is_row = ((m < QUERIES * GROUP) & (token < query_end))[:, None] & (d < HEAD_DIM)[None, :]
    q_tile_ptr = q_ptr + token.to(tl.int64)[:, None] * q_stride + head[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_tile_ptr, mask=is_row, other=0.0)
    if kv_cache_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)  # to which the hardware widens fp8 in one step
    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - (query_end - query_start) + first_query  # of the tile's first token
    last_position = tl.minimum(first_position + QUERIES, seq_len) - 1
    position = tl.minimum(first_position + m // GROUP, last_position)
    table_ptr = block_tables_ptr + tl.load(slots_ptr + request).to(tl.int64) * table_stride
    key_ptr = kv_cache_ptr + kv_head * head_stride
    # Keys before whole_end are seen by every row of the tile, those from whole_start on are in every row's window.
    start = 0
    whole_end = (first_position + 1) // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)
        start = first_key // ALIGN * ALIGN
        whole_start = tl.maximum(last_position - WINDOW + 1, 0)
        masked_end = start + (whole_start - start + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        masked_end = tl.minimum(masked_end, last_position + 1)
        acc, largest, denominator = _attend_tiles(
            acc, largest, denominator, q, position, start, masked_end, last_position, table_ptr, key_ptr,
            scale_log2e, block_stride, value_stride, True, WINDOW, HEAD_DIM, BLOCK_SIZE, ALIGN, BLOCK_N, BLOCK_D,
            SOFTCAP_LOG2E,
        )  # fmt: skip
        start = start + (whole_start - start + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        whole_end = start + tl.maximum(first_position + 1 - start, 0) // BLOCK_N * BLOCK_N
    acc, largest, denominator = _attend_tiles(
        acc, largest, denominator, q, position, start, whole_end, last_position, table_ptr, key_ptr,
        scale_log2e, block_stride, value_stride, False, 0, HEAD_DIM, BLOCK_SIZE, ALIGN, BLOCK_N, BLOCK_D, SOFTCAP_LOG2E,
    )  # fmt: skip
    acc, largest, denominator = _attend_tiles(
        acc, largest, denominator, q, position, whole_end, last_position + 1, last_position, table_ptr, key_ptr,
        scale_log2e, block_stride, value_stride, True, WINDOW, HEAD_DIM, BLOCK_SIZE, ALIGN, BLOCK_N, BLOCK_D,
            SOFTCAP_LOG2E,
    )  # fmt: skip
    if HAS_SINKS:
        sink_ptr = sinks_ptr + kv_head * GROUP + m % GROUP
        acc, denominator = with_sink(acc, largest, denominator, sink_ptr, m < QUERIES * GROUP)
    # Computed again, so that nothing of it is kept in registers meanwhile.
    offset, is_row = _tile_of(token, head, m, d, query_end, NUM_KV_HEADS, GROUP, QUERIES, HEAD_DIM)
    tl.store(out_ptr + offset, (acc * (value_scale / denominator)[:, None]).to(out_ptr.dtype.element_ty), mask=is_row)


def prefill_attention(
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
    """`prefill_attention_torch` in one launch. query_start_loc[0] must be 0."""
    if needs_twin(q):
        return prefill_attention_torch(
            q, kv_cache, block_tables, slots, query_start_loc, seq_lens, scale, window,
            max_query_len=max_query_len, out=out, value_scale=value_scale, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    group, block_d = num_heads // num_kv_heads, max(next_power_of_2(head_dim), 16)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_tokens == 0:
        return out
    # Few programs leave each a multiprocessor to itself: larger tiles of keys, not a second program, keep it busy.
    is_small = (num_tokens * group // 128 + slots.shape[0]) * num_kv_heads < 3 * num_multiprocessors(q.device)
    parameters = launch_parameters(
        "prefill_attention", q.device, block_d=block_d, is_small=int(is_small), q_bytes=q.element_size()
    )
    block_m, block_n = max(parameters["block_m"], next_power_of_2(group)), parameters["block_n"]
    queries = block_m // group
    num_tiles = num_tokens // queries + slots.shape[0] + 1
    options = {"maxnreg": parameters["max_registers"]} if "max_registers" in parameters else {}
    _prefill_attention_kernel[(num_kv_heads, num_tiles)](
        q, kv_cache, block_tables, slots, query_start_loc, seq_lens, sinks, out,
        num_tokens, slots.shape[0], score_scale(scale, softcap), value_scale,
        q.stride(0), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), block_tables.stride(0),
        WINDOW=window, SOFTCAP_LOG2E=softcap * LOG2E, HAS_SINKS=sinks is not None, NUM_KV_HEADS=num_kv_heads,
        GROUP=group, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, ALIGN=block_n if block_size % block_n == 0 else 1,
        QUERIES=queries, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, REQUESTS=_REQUESTS_AT_ONCE,
        IS_DEPENDENT=can_overlap(q.device), **dependent_options(q.device, num_tokens), **options,
        num_warps=parameters["num_warps"], num_stages=parameters["num_stages"],
    )  # fmt: skip
    return out
