"""Attention over the paged KV cache: rotate and store, attend, project back.

All tokens of a step go through the projections together (the first one by the caller, who has the norm before it); the
decode rows and the prefill rows among them are attended by the kernel made for each. The layer does not know requests:
who a token belongs to is in `AttentionMetadata`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cb_backend.layers.attention_metadata import AttentionMetadata
from cb_backend.layers.linear import Fillable, Linear
from cb_backend.layers.norm import RMSNorm
from cb_backend.layers.ops import Ops


class Attention:
    """Grouped-query attention of one layer; `window` newest tokens are seen, 0 = all."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        ops: Ops,
        *,
        window: int,
        has_qkv_bias: bool,
        has_o_bias: bool,
        qk_norm_eps: float | None,  # None: no per-head norm
        dtype: torch.dtype,
        device: torch.device,
        linear_class: type[Linear] = Linear,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window = window
        self.scale = head_dim**-0.5
        self.ops = ops
        self.key_scale = self.value_scale = 1.0  # an fp8 cache holds keys and values divided by them
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = linear_class(hidden_size, parts, ops, has_bias=has_qkv_bias, dtype=dtype, device=device)
        self.o_proj = linear_class(
            q_size, {"o_proj": hidden_size}, ops, has_bias=has_o_bias, dtype=dtype, device=device
        )
        self.q_norm = self.k_norm = None
        self.eps = qk_norm_eps or 0.0
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = (
                RMSNorm(head_dim, qk_norm_eps, ops, dtype=dtype, device=device) for _ in range(2)
            )

    def __call__(self, qkv: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        """What `qkv_proj` gave, [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> [num_tokens, hidden_size].

        Writes the tokens' keys and values into this layer's kv_cache: [num_blocks, 2, num_kv_heads, block_size,
        head_dim].
        """
        q = self.ops.qkv_post(
            qkv,
            metadata.cos_sin,
            metadata.cos_sin_rows,
            metadata.slot_mapping,
            kv_cache,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.q_norm.weight if self.q_norm else None,
            self.k_norm.weight if self.k_norm else None,
            self.eps,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )  # [num_tokens, num_heads, head_dim]
        return self.o_proj(self._attend(q, metadata, kv_cache).flatten(1))

    def _attend(self, q: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        num_decode_rows = metadata.num_decode_rows
        out = torch.empty_like(q)
        if num_decode_rows:
            self._decode(q[:num_decode_rows], metadata, kv_cache, out[:num_decode_rows])
        if metadata.max_query_len:
            self._prefill(q[num_decode_rows:], metadata, kv_cache, out[num_decode_rows:])
        return out

    def _decode(self, q: Tensor, metadata: AttentionMetadata, kv_cache: Tensor, out: Tensor) -> None:
        self.ops.decode_attention(
            q,
            kv_cache,
            metadata.block_tables,
            metadata.decode_slots,
            metadata.decode_seq_lens,
            self.scale * self.key_scale,
            self.window,
            out=out,
            plans=metadata.decode_plans,
            value_scale=self.value_scale,
        )

    def _prefill(self, q: Tensor, metadata: AttentionMetadata, kv_cache: Tensor, out: Tensor) -> None:
        self.ops.prefill_attention(
            q,
            kv_cache,
            metadata.block_tables,
            metadata.prefill_slots,
            metadata.prefill_query_start_loc,
            metadata.prefill_seq_lens,
            self.scale * self.key_scale,
            self.window,
            max_query_len=metadata.max_query_len,
            out=out,
            value_scale=self.value_scale,
        )

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Fillable]]:
        yield from self.qkv_proj.checkpoint_tensors(prefix)
        yield from self.o_proj.checkpoint_tensors(prefix)
        if self.q_norm and self.k_norm:
            yield from self.q_norm.checkpoint_tensors(f"{prefix}.q_norm")
            yield from self.k_norm.checkpoint_tensors(f"{prefix}.k_norm")
