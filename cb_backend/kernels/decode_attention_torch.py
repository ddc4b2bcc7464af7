"""The twin of decode attention: what the kernel computes, in torch; the CPU's path as well.

Rows of similar length are gathered from the paged cache together and attended by two products. Knows rows, block
tables and lengths, not requests or steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PADDED_TOKENS = 16384  # most (rows x longest context) the twin gathers at once, so that a long row costs no memory


def decode_attention_torch(
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
    """Row i attends to the first seq_lens[i] tokens of slot slots[i], its own token (already in the cache) included.

    q [num_rows, num_heads, head_dim]; kv_cache [num_blocks, 2, num_kv_heads, block_size, head_dim];
    block_tables [num_slots, max_blocks] int32; slots, seq_lens [num_rows] int32. With window w > 0 a row sees only the
    last w of its tokens. A row of length 0 (padding) reads nothing and gives zeros. The cache may be narrower than q
    (fp8): its elements are widened as they are read, and the values stand for `value_scale` times themselves (what the
    keys stand for belongs into `scale`). A softcap c > 0 makes c * tanh(s / c) of a scaled score s. sinks [num_heads]:
    a score that each head has beside those of the keys, and that brings no value. Returns q's shape and type; scores
    and sums are fp32. `plans` is the kernel's and not looked at.
    """
    out = torch.empty_like(q) if out is None else out
    lengths: list[int] = seq_lens.tolist()
    for rows in _row_groups(lengths):
        if len(rows) == len(lengths):
            attended = _attend(
                q, kv_cache, block_tables[slots.long()], seq_lens, lengths, scale, window, softcap, sinks
            )
            out.copy_(attended.mul_(value_scale))
            continue
        index = torch.tensor(rows, device=q.device)
        group = [lengths[row] for row in rows]
        tables = block_tables[slots[index].long()]
        attended = _attend(q[index], kv_cache, tables, seq_lens[index], group, scale, window, softcap, sinks)
        out[index] = attended.mul_(value_scale).to(q.dtype)
    return out


def _row_groups(lengths: list[int]) -> list[list[int]]:
    """Rows in groups of similar length; a group's padded size stays under `_PADDED_TOKENS` where a row allows it."""
    if len(lengths) * max(lengths, default=0) <= _PADDED_TOKENS:
        return [list(range(len(lengths)))]
    groups: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups[-1] and (len(groups[-1]) + 1) * lengths[row] > _PADDED_TOKENS:
            groups.append([])
        groups[-1].append(row)
    return groups


def _attend(
    q: Tensor,
    kv_cache: Tensor,
    tables: Tensor,
    seq_lens: Tensor,
    lengths: list[int],
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Masked attention of all rows at once, in fp32. tables [num_rows, max_blocks]."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    longest = max(lengths, default=0)
    if longest == 0:
        return torch.zeros_like(q, dtype=torch.float32)
    starts = [max(0, length - window) if window else 0 for length in lengths]
    first_block = min((start for start, length in zip(starts, lengths, strict=True) if length), default=0) // block_size
    num_blocks = -(-longest // block_size) - first_block
    positions = torch.arange(num_blocks * block_size, device=q.device) + first_block * block_size
    lens = seq_lens.long().unsqueeze(1)  # [num_rows, 1]
    visible = positions < lens
    if window:
        visible &= positions >= lens - window
    # A table entry past a row's end may be stale: it is not followed.
    needed = visible.view(num_rows, num_blocks, block_size).any(-1)
    ids = tables[:, first_block : first_block + num_blocks].long() * needed
    k, v = (_gather(kv_cache, which, ids) for which in (0, 1))  # [num_rows, num_kv_heads, tokens, head_dim]
    # Cells nobody wrote may hold anything, NaN included: 0 * NaN must not reach the sum.
    v.transpose(1, 2)[~visible] = 0
    queries = q.float().view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = queries @ k.transpose(2, 3) * scale
    if softcap:
        scores = (scores / softcap).tanh_() * softcap
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is None:
        attended = torch.softmax(scores, dim=-1)
    else:
        sink = sinks.float().view(1, num_kv_heads, -1, 1).expand(*scores.shape[:3], 1)
        attended = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    if 0 in lengths:
        attended = attended.nan_to_num(0.0)  # a padded row sees nothing: 0 / 0
    return (attended @ v).view(num_rows, num_heads, head_dim)


def _gather(kv_cache: Tensor, which: int, ids: Tensor) -> Tensor:
    """K (which 0) or V (1) of blocks ids [num_rows, n], fp32: [num_rows, num_kv_heads, n * block_size, head_dim]."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_rows, num_blocks = ids.shape
    heads = torch.arange(num_kv_heads, device=ids.device).unsqueeze(1)
    index = (ids.unsqueeze(1) * 2 + which) * num_kv_heads + heads  # a (block, head) tile is contiguous: one copy
    tiles = kv_cache.view(-1, block_size * head_dim).index_select(0, index.flatten())
    return tiles.view(num_rows, num_kv_heads, num_blocks * block_size, head_dim).float()
