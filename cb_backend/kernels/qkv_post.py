"""What happens between the QKV projection and attention: split, per-head RMSNorm, RoPE, and the write into the cache.

One pass over the projection's output. Knows rows, tables and cache slots; it knows no requests and no positions: which
row of the cos/sin table and which cache slot belong to a token is given.
"""

from __future__ import annotations

import torch
from torch import Tensor


def qkv_post_torch(
    qkv: Tensor,
    cos_sin: Tensor,
    cos_sin_rows: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """Return q [num_tokens, num_heads, head_dim] ready for attention; write k and v into `kv_cache` in place.

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; cos_sin [rows, rotary_dim] fp32, cosines in the first
    half of a row and sines in the second; cos_sin_rows and slot_mapping [num_tokens] int32, a slot being
    block_id * block_size + offset; kv_cache [num_blocks, 2, num_kv_heads, block_size, head_dim].
    Padding tokens point at the null block (slots 0 to block_size - 1). RoPE rotates halves of the first rotary_dim
    dimensions, in fp32; q_norm and k_norm [head_dim] are RMSNorm weights applied to each head before it.
    """
    num_tokens = qkv.shape[0]
    block_size = kv_cache.shape[3]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = cos_sin[cos_sin_rows.long()].unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, rotary_dim / 2]
    q = _rotate(_head_norm(q, q_norm, eps), cos, sin, qkv.dtype)
    k = _rotate(_head_norm(k, k_norm, eps), cos, sin, qkv.dtype)
    slots = slot_mapping.long()
    blocks, offsets = slots // block_size, slots % block_size
    kv_cache[blocks, 0, :, offsets] = k.to(kv_cache.dtype)
    kv_cache[blocks, 1, :, offsets] = v.to(kv_cache.dtype)
    return q if out is None else out.copy_(q)


def _head_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over head_dim, rounded as rms_norm rounds; x itself where there is no weight."""
    if weight is None:
        return x
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate-half RoPE over the first 2 * cos.shape[-1] dimensions of x [num_tokens, heads, head_dim]."""
    half = cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(dtype)
