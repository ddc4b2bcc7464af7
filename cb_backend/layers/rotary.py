"""Rotary position embeddings: which angles each token is rotated by, equal to transformers' for every scaling.

Two of the scalings (`dynamic`, `longrope`) make the angles depend on how long the context is, not only on the
position. transformers computes a whole prompt at the prompt's length and each later token at its own; so a token at
position p of a request with L prompt tokens has the *effective length* max(L, p + 1). Taking that per token, and not
per step, is what keeps answers independent of chunking, neighbours and preemption. The key of a prompt token then
depends on L: `cache_key` says what the prefix cache must tell apart. This module does not know requests or caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cb_backend.layers.rope_config import RopeConfig


class RotaryTables:
    """The cos and sin of every position a model may see, and the choice of row for each token.

    `is_static`: `rows` always returns the same table, so its address may be recorded in a CUDA graph. Not so for
    `dynamic`, whose rows are computed for each step.
    """

    def __init__(self, rope: RopeConfig, rotary_dim: int, max_model_len: int, device: torch.device) -> None:
        self.rope = rope
        self.rotary_dim = rotary_dim
        self.max_model_len = max_model_len
        self.is_static = rope.rope_type != "dynamic"
        positions = torch.arange(max_model_len if self.is_static else 0, dtype=torch.float32, device=device)
        scale = _attention_factor(rope)
        tables = [
            _cos_sin(positions, freqs.to(device), scale) for freqs in _FREQUENCIES[rope.rope_type](rope, rotary_dim)
        ]
        self.cos_sin = torch.cat(tables)  # [num_tables * max_model_len, rotary_dim] float32
        if rope.query_scale_beta:
            self.cos_sin = torch.cat((self.cos_sin, _query_scales(rope, positions).repeat(len(tables), 1)), dim=1)

    def rows(self, positions: Tensor, num_prompt_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The table and the row of each token: `(cos_sin [rows, rotary_dim] float32, cos_sin_rows [T] int32)`.

        With a query scale the table has one more column, which holds it.

        `positions` and `num_prompt_tokens` (of the token's request) are integers [T] on the tables' device; both are
        needed only where the scaling depends on the length. The result is valid until the next call.
        """
        if self.rope.rope_type == "longrope":
            is_long = torch.maximum(num_prompt_tokens, positions + 1) > self.rope.original_max_position_embeddings
            return self.cos_sin, (positions + is_long * self.max_model_len).to(torch.int32)
        if self.rope.rope_type == "dynamic":
            lengths = torch.maximum(num_prompt_tokens, positions + 1).clamp(min=self.rope.max_position_embeddings)
            freqs = _dynamic_frequencies(self.rope, self.rotary_dim, lengths)  # [T, rotary_dim / 2]
            table = _cos_sin(positions.float(), freqs, 1.0)
            return table, torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        return self.cos_sin, positions.to(torch.int32)

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        """What the keys of a prompt depend on beside its tokens; requests may share blocks only if this is equal."""
        if self.rope.rope_type == "longrope" and num_prompt_tokens > self.rope.original_max_position_embeddings:
            return b"rope:long"
        if self.rope.rope_type == "dynamic" and num_prompt_tokens > self.rope.max_position_embeddings:
            return b"rope:%d" % num_prompt_tokens
        return b""


def _query_scales(rope: RopeConfig, positions: Tensor) -> Tensor:
    """One more column of the table: what queries are multiplied by. [T, 1] float32"""
    turns = torch.floor(positions / rope.original_max_position_embeddings)
    return (1 + rope.query_scale_beta * torch.log1p(turns)).unsqueeze(1)


def _cos_sin(positions: Tensor, freqs: Tensor, scale: float) -> Tensor:
    """[T], [rotary_dim / 2] or [T, rotary_dim / 2] -> [T, rotary_dim] float32."""
    angles = positions[:, None] * freqs
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


def _exponents(rotary_dim: int) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim  # [rotary_dim / 2]


# One function a rope_type: radians per position, [rotary_dim / 2] float32; for longrope (short, long). Computed on the
# CPU whatever the model's device, so that every device gets the same angles.


def _default(rope: RopeConfig, rotary_dim: int) -> list[Tensor]:
    return [1.0 / rope.theta ** _exponents(rotary_dim)]


def _linear(rope: RopeConfig, rotary_dim: int) -> list[Tensor]:
    return [_default(rope, rotary_dim)[0] / rope.factor]


def _dynamic_frequencies(rope: RopeConfig, rotary_dim: int, lengths: Tensor) -> Tensor:
    """NTK-aware base of each effective length [T] -> [T, rotary_dim / 2]."""
    stretch = rope.factor * lengths / rope.max_position_embeddings - (rope.factor - 1)
    base = rope.theta * stretch ** (rotary_dim / (rotary_dim - 2))  # [T] float32
    return 1.0 / base[:, None] ** _exponents(rotary_dim).to(lengths.device)


def _llama3(rope: RopeConfig, rotary_dim: int) -> list[Tensor]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    freqs = _default(rope, rotary_dim)[0]
    context = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / freqs
    kept = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 1: keep, 0: stretch
    return [(1 - kept) * freqs / rope.factor + kept * freqs]


def _yarn(rope: RopeConfig, rotary_dim: int) -> list[Tensor]:
    """Dimensions that turn often within the pretraining context are kept, those that turn seldom are stretched."""

    def dimension_of(num_rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    freqs = _default(rope, rotary_dim)[0]
    return [freqs / rope.factor * stretched + freqs * (1 - stretched)]


def _longrope(rope: RopeConfig, rotary_dim: int) -> list[Tensor]:
    base = rope.theta ** _exponents(rotary_dim)
    return [1.0 / (torch.tensor(factors) * base) for factors in (rope.short_factor, rope.long_factor)]


_FREQUENCIES: dict[str, Callable[[RopeConfig, int], list[Tensor]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    if rope.rope_type == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
