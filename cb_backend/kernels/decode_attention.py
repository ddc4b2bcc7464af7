"""Attention of one query token a request over a paged KV cache.

Bound by reading K and V once, so the work is cut into pieces of equal length: a plan, made on the device from the
lengths (a graph may be replayed with any), gives each row as many splits as balance the card. A program attends one
split of one KV head for all query heads that share it; the last program of a row to finish merges the row's splits.
Knows rows, block tables and lengths, not requests or steps. What it computes is told by its twin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.carveout import make_room_for
from cb_backend.kernels.decode_attention_torch import decode_attention_torch
from cb_backend.kernels.decode_plan import (
    MAX_SPLITS,
    PLAN_HEADER,
    PLAN_ITEM,
    decode_parameters,
    max_items,
    padded_head_dim,
    plan_decode,
    programs_each,
    tile_alignment,
)
from cb_backend.kernels.fp8 import FP8, halves
from cb_backend.kernels.launch import (
    IS_INTERPRETING,
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    let_next_start,
    needs_twin,
    next_power_of_2,
    tl,
)
from cb_backend.kernels.sinks import with_sink
from cb_backend.kernels.softcap import LOG2E, capped, score_scale


@jit()
def _partial(tile_ptr, rows_ptr, index, num_splits, is_row, is_dim, STEP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """(result [BLOCK_G, BLOCK_D], its scores' logarithm [BLOCK_G, 1]) of a split; nothing past the last."""
    is_part = index < num_splits
    is_stored = is_part & is_row[:, None] & is_dim[None, :]
    part = tl.load(tile_ptr + index * STEP * HEAD_DIM, mask=is_stored, other=0.0, cache_modifier=".cg")
    lse = tl.load(rows_ptr + index * STEP, mask=is_part & is_row, other=float("-inf"), cache_modifier=".cg")
    return part, lse[:, None]


@jit("num_items_bound")
def _decode_attention_kernel(
    q_ptr,
    kv_cache_ptr,
    block_tables_ptr,
    slots_ptr,
    seq_lens_ptr,
    plan_ptr,
    partial_ptr,
    partial_lse_ptr,
    sinks_ptr,
    out_ptr,
    num_items_bound,
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
    HEADER: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, rounded up
    MAX_SPLITS: tl.constexpr,
    MERGED: tl.constexpr,  # partial results read together
    IS_PAIRED: tl.constexpr,  # the cache is fp8 and q is not fp32: see `halves`
    HAS_ASSEMBLY: tl.constexpr,  # not in the interpreter
    IS_DEPENDENT: tl.constexpr,
):
    """One split of one row and KV head a program; BLOCK_M >= GROUP query heads are the rows of its tiles."""
    let_next_start(IS_DEPENDENT)
    kv_head, item = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(plan_ptr):
        return
    item_ptr = plan_ptr + HEADER + item * ITEM
    row, split = tl.load(item_ptr), tl.load(item_ptr + 1)
    num_splits, tokens = tl.load(item_ptr + 2), tl.load(item_ptr + 3)
    seq_len = tl.load(seq_lens_ptr + row)
    table_ptr = block_tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
    start = split * tokens
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)  # first position the row sees
        start += first // ALIGN * ALIGN
    end = tl.minimum(start + tokens, seq_len)
    # NOTE: the block ids of a tile are loaded one iteration ahead. A load that depends on a load of the same
    # iteration keeps Triton from pipelining: K and V would be single-buffered whatever num_stages says.
    n = tl.arange(0, BLOCK_N)
    if ALIGN > 1:
        block = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        block = tl.load(table_ptr + tl.minimum(start + n, end - 1) // BLOCK_SIZE, mask=start < end, other=0)
    # NOTE: what was read so far is older than the kernel before, and that one let this one start late (see qkv_post).
    await_previous(IS_DEPENDENT)
    COLUMN: tl.constexpr = 2 if IS_PAIRED else 1  # dimensions an element of the tiles
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D // COLUMN)
    is_head, is_dim = m < GROUP, d < HEAD_DIM // COLUMN
    head = kv_head * GROUP + m
    q_tile_ptr = q_ptr + row.to(tl.int64) * q_stride + head[:, None] * HEAD_DIM + d[None, :] * COLUMN
    q = tl.load(q_tile_ptr, mask=is_head[:, None] & is_dim[None, :], other=0.0)
    key_ptr = kv_cache_ptr + kv_head * head_stride
    if IS_PAIRED:
        q_odd = tl.load(q_tile_ptr + 1, mask=is_head[:, None] & is_dim[None, :], other=0.0).to(tl.float16)
        q = q.to(tl.float16)
        key_ptr = key_ptr.to(tl.pointer_type(tl.int16))
        acc_odd = tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D // COLUMN], tl.float32)
    for tile in range(start, end, BLOCK_N):
        # Positions past the end read the last token again: no mask on the loads, and nothing stale is touched.
        position = tl.minimum(tile + n, end - 1)
        cell = block.to(tl.int64) * (block_stride // COLUMN) + (position % BLOCK_SIZE) * (HEAD_DIM // COLUMN)
        if ALIGN > 1:
            block = tl.load(table_ptr + tl.minimum(tile + BLOCK_N, end - 1) // BLOCK_SIZE)
        else:
            block = tl.load(table_ptr + tl.minimum(tile + BLOCK_N + n, end - 1) // BLOCK_SIZE)
        cell_ptr = key_ptr + cell[:, None] + d[None, :]
        if BLOCK_D == HEAD_DIM:
            k = tl.load(cell_ptr)  # [BLOCK_N, BLOCK_D / COLUMN]
        else:
            k = tl.load(cell_ptr, mask=is_dim[None, :], other=0)
        if IS_PAIRED:
            k, k_odd = halves(k, HAS_ASSEMBLY)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        else:
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        scores *= scale_log2e
        if SOFTCAP_LOG2E > 0:
            scores = capped(scores, SOFTCAP_LOG2E)
        is_seen = tile + n < end
        if WINDOW > 0:
            is_seen = is_seen & (tile + n >= first)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        correction = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        denominator = denominator * correction + tl.sum(weights, axis=1)
        if BLOCK_D == HEAD_DIM:
            v = tl.load(cell_ptr + value_stride // COLUMN)
        else:
            v = tl.load(cell_ptr + value_stride // COLUMN, mask=is_dim[None, :], other=0)
        if IS_PAIRED:
            v, v_odd = halves(v, HAS_ASSEMBLY)
            acc_odd = tl.dot(weights.to(q.dtype), v_odd, acc_odd * correction[:, None], input_precision="ieee")
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * correction[:, None], input_precision="ieee")
        largest = new_largest
    if IS_PAIRED:
        acc, d = tl.interleave(acc, acc_odd), tl.arange(0, BLOCK_D)
        is_dim = d < HEAD_DIM
    if HAS_SINKS and num_splits == 1:
        acc, denominator = with_sink(acc, largest, denominator, sinks_ptr + head, is_head)
    # The 1.0 is for a row of padding: 0 / 1.
    attended = acc * (value_scale / tl.where(denominator > 0, denominator, 1.0))[:, None]
    out_tile_ptr = out_ptr + (row.to(tl.int64) * NUM_KV_HEADS * GROUP + head[:, None]) * HEAD_DIM + d[None, :]
    is_stored = is_head[:, None] & is_dim[None, :]
    if num_splits == 1:
        tl.store(out_tile_ptr, attended.to(out_ptr.dtype.element_ty), mask=is_stored)
        return
    partial_row = (item * NUM_KV_HEADS + kv_head) * GROUP + m
    tl.store(partial_ptr + partial_row.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], attended, mask=is_stored)
    tl.store(partial_lse_ptr + partial_row, largest + tl.log2(denominator), mask=is_head)
    # The barrier and the atomic make this program's partials visible before the count that announces them.
    tl.debug_barrier()
    counter_ptr = plan_ptr + HEADER + num_items_bound * ITEM + row * NUM_KV_HEADS + kv_head
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") < num_splits - 1:
        return
    tl.debug_barrier()
    tl.store(counter_ptr, 0)  # the next layer uses the same plan
    STEP: tl.constexpr = NUM_KV_HEADS * GROUP  # between splits
    s, g = tl.arange(0, MAX_SPLITS), tl.arange(0, BLOCK_G)
    is_group = g < GROUP
    is_stored = is_group[:, None] & is_dim[None, :]
    # Weights of all splits come first, so what follows are loads that wait for nothing but each other.
    rows = (item - split) * STEP + kv_head * GROUP + g  # of the first split
    mask = (s < num_splits)[:, None] & is_group[None, :]
    lse_ptr = partial_lse_ptr + s[:, None] * STEP + rows[None, :]
    # .cg: from L2, where other programs' stores are; this multiprocessor's L1 may hold an older layer's.
    lse = tl.load(lse_ptr, mask=mask, other=float("-inf"), cache_modifier=".cg")  # [MAX_SPLITS, BLOCK_G]
    largest = tl.max(lse, axis=0)
    largest = tl.where(is_group, largest, 0.0)
    denominator = tl.sum(tl.exp2(lse - largest[None, :]), axis=0)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    tile_ptr, rows_ptr = partial_ptr + rows.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], partial_lse_ptr + rows
    for index in range(0, num_splits, MERGED):
        # All that they load is asked for before the first is added. Triton has no starred tuples.
        parts, lses = (), ()
        for ahead in tl.static_range(MERGED):
            part, part_lse = _partial(tile_ptr, rows_ptr, index + ahead, num_splits, is_group, is_dim, STEP, HEAD_DIM)
            parts, lses = parts + (part,), lses + (part_lse,)  # type: ignore[assignment]  # noqa: RUF005
        for ahead in tl.static_range(MERGED):
            acc += parts[ahead] * tl.exp2(lses[ahead] - largest[:, None])
    head = kv_head * GROUP + g
    if HAS_SINKS:
        acc, denominator = with_sink(acc, largest, denominator, sinks_ptr + head, is_group)
    out_tile_ptr = out_ptr + (row.to(tl.int64) * NUM_KV_HEADS * GROUP + head[:, None]) * HEAD_DIM + d[None, :]
    tl.store(out_tile_ptr, (acc / denominator[:, None]).to(out_ptr.dtype.element_ty), mask=is_stored)


def _merged(part_size: int, block_d: int) -> int:
    """Partial results, of so many numbers each, to read together: of small heads many, for which there are registers.
    The bits are the same whatever it is.
    """
    return 16 if block_d <= 64 and part_size <= 256 else 4


def decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    out: Tensor | None = None,
    plans: dict[int, Tensor] | None = None,
    value_scale: float = 1.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`decode_attention_torch` in one launch, and one more where `plans` holds none for this window.

    plans: the step's plans by window, from `plan_decode`; one that is missing is put there. The kernel reads a plan
    that it finds, and slots, lengths and block tables, before the kernel launched last is complete: that one must not
    have written them.
    """
    if needs_twin(q):
        return decode_attention_torch(
            q, kv_cache, block_tables, slots, seq_lens, scale, window, out, None, value_scale, softcap, sinks
        )
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    group, block_d = num_heads // num_kv_heads, padded_head_dim(head_dim)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_rows == 0:
        return out
    plan = None if plans is None else plans.get(window)
    is_dependent = plan is not None and can_overlap(q.device)
    if plan is None:
        plan = plan_decode(seq_lens, kv_cache, window)
        if plans is not None:
            plans[window] = plan
    parameters = decode_parameters(num_rows, kv_cache)
    block_n = parameters["block_n"]
    is_paired = kv_cache.dtype == FP8 and q.element_size() == 2 and block_d >= 32
    unit = 256.0 if is_paired else 1.0  # what `halves` makes of 1/256
    bound = max_items(num_rows, kv_cache, parameters)
    partial = torch.empty(bound * num_heads, head_dim + 1, dtype=torch.float32, device=q.device)
    compiled = _decode_attention_kernel[(num_kv_heads, bound)](
        q, kv_cache, block_tables, slots, seq_lens, plan,
        partial, partial.view(-1)[bound * num_heads * head_dim :], sinks, out,
        bound, score_scale(scale * unit, softcap), value_scale * unit,
        q.stride(0), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), block_tables.stride(0),
        WINDOW=window, SOFTCAP_LOG2E=softcap * LOG2E, HAS_SINKS=sinks is not None, NUM_KV_HEADS=num_kv_heads,
        GROUP=group, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ALIGN=tile_alignment(block_n, block_size), HEADER=PLAN_HEADER, ITEM=PLAN_ITEM,
        BLOCK_M=max(next_power_of_2(group), 16), BLOCK_N=block_n, BLOCK_D=block_d,
        BLOCK_G=next_power_of_2(group), MAX_SPLITS=MAX_SPLITS,
        MERGED=parameters.get("merged") or _merged(next_power_of_2(group) * block_d, block_d),
        IS_PAIRED=is_paired, HAS_ASSEMBLY=not IS_INTERPRETING, IS_DEPENDENT=is_dependent,
        num_warps=parameters["num_warps"], num_stages=parameters["num_stages"],
        **(dependent_options(q.device, num_rows) if is_dependent else {}),
    )  # fmt: skip
    make_room_for(compiled, programs_each(num_rows, kv_cache, parameters), q.device)
    return out
