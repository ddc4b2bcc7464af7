"""What happens between the QKV projection and attention: split, per-head RMSNorm, RoPE, and the write into the cache.

One pass over the projection's output. Knows rows, tables and cache slots; it knows no requests and no positions: which
row of the cos/sin table and which cache slot belong to a token is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.fp8 import FP8_MAX, to_fp8
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
from cb_backend.kernels.rms_norm import rms_norm_torch

# Tokens of a step up to which there are many small programs, so that none is long; more are many programs anyway, and
# larger ones load their token's angles less often.
SMALL_STEP = 128


@jit()
def _norm_weights(q_norm_ptr, k_norm_ptr, is_q, column, is_inside):
    """Those of each head's norm at these columns, fp32 [HEADS, BLOCK_D]."""
    q_weight = tl.load(q_norm_ptr + column, mask=is_inside, other=0.0).to(tl.float32)[None, :]
    k_weight = tl.load(k_norm_ptr + column, mask=is_inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_q[:, None], q_weight, k_weight)


@jit()
def _weighted(normed, weight, dtype: tl.constexpr, ROUNDS_FIRST: tl.constexpr):
    """Normed heads times their weights, fp32 rounded to `dtype`."""
    if ROUNDS_FIRST:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight).to(dtype).to(tl.float32)


@jit()
def _angles(angles_ptr, column, HALF: tl.constexpr):
    """(cosine, sine with its sign) by which each column is turned."""
    angle = tl.where(column < HALF, column, column - HALF)
    cos = tl.load(angles_ptr + angle, mask=column < 2 * HALF, other=1.0)
    sin = tl.load(angles_ptr + HALF + angle, mask=column < 2 * HALF, other=0.0)
    return cos, tl.where(column < HALF, -sin, sin)


@jit()
def _qkv_post_kernel(
    qkv_ptr,
    cos_sin_ptr,
    cos_sin_rows_ptr,
    slot_mapping_ptr,
    kv_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    out_ptr,
    key_factor,
    value_factor,
    qkv_stride,
    cos_sin_stride,
    block_stride,
    value_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2
    HAS_Q_SCALE: tl.constexpr,  # after a row's sines
    HAS_NORM: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    eps: tl.constexpr,
    FP8_MAX: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    IS_AHEAD: tl.constexpr,  # started while the projection still runs, with time to load the angles
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """HEADS heads of one token a program; the heads of a row are q's, then k's, then v's."""
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)  # [HEADS]
    column = tl.arange(0, BLOCK_D)
    is_q, is_rotated = head < NUM_HEADS, head < NUM_HEADS + NUM_KV_HEADS
    is_inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    # Column c of the first half is turned with column c + HALF, and the other way round.
    partner = tl.where(column < HALF, column + HALF, tl.where(column < 2 * HALF, column - HALF, column))
    # All but the projection's output was there before the first layer began: see `launch.can_overlap`.
    slot = tl.load(slot_mapping_ptr + token)
    angles_ptr = cos_sin_ptr + tl.load(cos_sin_rows_ptr + token).to(tl.int64) * cos_sin_stride
    if IS_AHEAD:
        cos, sin = _angles(angles_ptr, column, HALF)
    if HAS_NORM:
        weight = _norm_weights(q_norm_ptr, k_norm_ptr, is_q, column, column < HEAD_DIM)
        partner_weight = _norm_weights(q_norm_ptr, k_norm_ptr, is_q, partner, column < HEAD_DIM)
    # NOTE: in this order. Decode attention, which comes next, reads the step's plan, lengths and block tables before it
    # waits: it may start only when the kernels before this one are complete.
    await_previous(IS_DEPENDENT)
    let_next_start(IS_DEPENDENT)
    row_ptr = qkv_ptr + token.to(tl.int64) * qkv_stride + head[:, None] * HEAD_DIM
    x = tl.load(row_ptr + column[None, :], mask=is_inside, other=0.0)  # [HEADS, BLOCK_D]
    x_partner = tl.load(row_ptr + partner[None, :], mask=is_inside & is_rotated[:, None], other=0.0)
    if not IS_AHEAD:  # their address is late: what comes after them is asked for late
        cos, sin = _angles(angles_ptr, column, HALF)
    rotated, rotated_partner = x.to(tl.float32), x_partner.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(rotated * rotated, axis=1) / HEAD_DIM + eps)[:, None]
        # NOTE: one after the other: side by side the compiler orders what comes before the wait worse.
        rotated = _weighted(rotated * scale, weight, x.dtype, ROUNDS_FIRST)
        rotated_partner = _weighted(rotated_partner * scale, partner_weight, x.dtype, ROUNDS_FIRST)
    rotated = (rotated * cos[None, :] + rotated_partner * sin[None, :]).to(x.dtype)
    if HAS_Q_SCALE:
        q_scale = tl.load(angles_ptr + 2 * HALF).to(x.dtype).to(tl.float32)
        rotated = tl.where(is_q[:, None], (rotated.to(tl.float32) * q_scale).to(x.dtype), rotated)
    q_ptr = out_ptr + (token.to(tl.int64) * NUM_HEADS + head[:, None]) * HEAD_DIM + column[None, :]
    tl.store(q_ptr, rotated, mask=is_inside & is_q[:, None])
    block = (slot // BLOCK_SIZE).to(tl.int64)  # a large cache has more elements than an int32 counts
    kv_head = tl.where(is_rotated, head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS)
    cell = block * block_stride + kv_head * head_stride + (slot % BLOCK_SIZE) * HEAD_DIM
    cell = tl.where(is_rotated, cell, cell + value_stride)
    cached = tl.where(is_rotated[:, None], rotated, x)
    if kv_cache_ptr.dtype.element_ty == tl.float8e4nv:
        cached = cached.to(tl.float32) * tl.where(is_rotated, key_factor, value_factor)[:, None]
        # Of what is too large the nearest: a plain conversion is free to make NaN of it. NaN stays NaN, to be found.
        cached = tl.clamp(cached, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    tl.store(kv_cache_ptr + cell[:, None] + column[None, :], cached, mask=is_inside & (head >= NUM_HEADS)[:, None])


def qkv_post(
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
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    rounds_first: bool = True,
) -> Tensor:
    """`qkv_post_torch` in one launch; rows of qkv and of cos_sin may be strided. Both norms are given, or none.

    All but qkv may be read before the kernels launched since the last plain launch are complete: none of them must have
    written it.
    """
    if needs_twin(qkv):
        return qkv_post_torch(
            qkv, cos_sin, cos_sin_rows, slot_mapping, kv_cache, num_heads, num_kv_heads, head_dim,
            q_norm, k_norm, eps, out, key_scale, value_scale, rounds_first,
        )  # fmt: skip
    num_tokens = qkv.shape[0]
    if out is None:
        out = qkv.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return out
    parameters = launch_parameters(
        "qkv_post", qkv.device, is_large=int(num_tokens > SMALL_STEP), has_norm=int(q_norm is not None)
    )
    heads, options = parameters["heads"], dependent_options(qkv.device, num_tokens)
    _qkv_post_kernel[(num_tokens, -(-(num_heads + 2 * num_kv_heads) // heads))](
        qkv, cos_sin, cos_sin_rows, slot_mapping, kv_cache, q_norm, k_norm, out, 1 / key_scale, 1 / value_scale,
        qkv.stride(0), cos_sin.stride(0), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=kv_cache.shape[3],
        HALF=cos_sin.shape[1] // 2, HAS_Q_SCALE=cos_sin.shape[1] % 2 == 1,
        HAS_NORM=q_norm is not None, ROUNDS_FIRST=rounds_first, eps=eps, FP8_MAX=FP8_MAX,
        IS_DEPENDENT=can_overlap(qkv.device), IS_AHEAD=bool(options), HEADS=heads, BLOCK_D=next_power_of_2(head_dim),
        num_warps=parameters["num_warps"], **options,
    )  # fmt: skip
    return out


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
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    rounds_first: bool = True,
) -> Tensor:
    """Return q [num_tokens, num_heads, head_dim] ready for attention; write k and v into `kv_cache` in place.

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; cos_sin [rows, rotary_dim] fp32, cosines in the first
    half of a row and sines in the second, and maybe one more column, by which q is multiplied at last; cos_sin_rows and
    slot_mapping [num_tokens] int32, a slot being block_id * block_size + offset; kv_cache [num_blocks, 2, num_kv_heads,
    block_size, head_dim].
    Padding tokens point at the null block (slots 0 to block_size - 1). RoPE rotates halves of the first rotary_dim
    dimensions, in fp32; q_norm and k_norm [head_dim] are RMSNorm weights applied to each head before it,
    rounded as `rms_norm` rounds.
    An fp8 cache gets keys / key_scale and values / value_scale, at most 448 in size (saturated, infinity included);
    other caches have no use for the scales.
    """
    num_tokens = qkv.shape[0]
    block_size = kv_cache.shape[3]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    half = cos_sin.shape[1] // 2
    angles = cos_sin[cos_sin_rows.long()].unsqueeze(1)
    cos, sin, q_scale = angles.split([half, half, cos_sin.shape[1] - 2 * half], dim=-1)  # [num_tokens, 1, half]
    q = _rotate(_head_norm(q, q_norm, eps, rounds_first), cos, sin, qkv.dtype)
    k = _rotate(_head_norm(k, k_norm, eps, rounds_first), cos, sin, qkv.dtype)
    if q_scale.shape[-1]:
        q = q * q_scale.to(q.dtype)
    slots = slot_mapping.long()
    blocks, offsets = slots // block_size, slots % block_size
    if kv_cache.dtype == torch.float8_e4m3fn:
        k, v = to_fp8(k.float() * (1 / key_scale)), to_fp8(v.float() * (1 / value_scale))
    kv_cache[blocks, 0, :, offsets] = k.to(kv_cache.dtype)
    kv_cache[blocks, 1, :, offsets] = v.to(kv_cache.dtype)
    return q if out is None else out.copy_(q)


def _head_norm(x: Tensor, weight: Tensor | None, eps: float, rounds_first: bool) -> Tensor:
    """RMSNorm over head_dim; x itself where there is no weight."""
    return x if weight is None else rms_norm_torch(x, weight, eps, rounds_first=rounds_first)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate-half RoPE over the first 2 * cos.shape[-1] dimensions of x [num_tokens, heads, head_dim]."""
    half = cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(dtype)
