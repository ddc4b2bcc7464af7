"""Attention over the paged KV cache: rotate and store, attend, project back.

All tokens of a step go through the projections together (the first one by the caller, who has the norm before it); the
decode rows and the prefill rows among them are attended by the kernel made for each. The layer does not know requests:
who a token belongs to is in `StepMetadata`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cb_backend.layers.layer_spec import AttentionSpec, LayerSpec
from cb_backend.layers.linear import Linear
from cb_backend.layers.norm import RMSNorm
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.placement import Placement
from cb_backend.layers.step_metadata import LayerCache, StepMetadata
from cb_backend.parallel.group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParts:
    """What an attention layer is made of beside its arithmetic."""

    qkv_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    sinks: Placement | None = None  # of a tensor [num_heads]


class Attention:
    """Grouped-query attention of one layer."""

    def __init__(self, name: str, spec: AttentionSpec, layer: LayerSpec, parts: AttentionParts, ops: ModelOps) -> None:
        self.name = name  # of the module in the checkpoint
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.window, self.scale, self.softcap = layer.window, spec.scale, spec.softcap
        self.rope = -1 if layer.rope is None else layer.rope  # see `Ropes`
        self.ops = ops
        self.key_scale = self.value_scale = 1.0  # an fp8 cache holds keys and values divided by them
        self.qkv_proj, self.o_proj = parts.qkv_proj, parts.o_proj
        self.q_norm, self.k_norm = parts.q_norm, parts.k_norm
        self._options: dict[str, Any] = {} if parts.sinks is None else {"sinks": parts.sinks.target}
        self._sinks = parts.sinks
        self._norm_weights = (
            parts.q_norm.weight if parts.q_norm else None,
            parts.k_norm.weight if parts.k_norm else None,
            spec.qk_norm.eps if spec.qk_norm else 0.0,
        )
        self._rounds_first = spec.qk_norm is None or spec.qk_norm.rounds_first

    def __call__(self, qkv: Tensor, cache: LayerCache, step: StepMetadata) -> Tensor:
        """What `qkv_proj` gave, [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> [num_tokens, hidden_size].

        Writes the tokens' keys and values into this layer's cache.
        """
        cos_sin, cos_sin_rows = step.ropes[self.rope]
        q = self.ops.qkv_post(
            qkv,
            cos_sin,
            cos_sin_rows,
            step.slot_mapping[cache.group],
            cache.cells,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            *self._norm_weights,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
            rounds_first=self._rounds_first,
        )  # [num_tokens, num_heads, head_dim]
        return self.o_proj(self._attend(q, cache, step).flatten(1), step)

    def _attend(self, q: Tensor, cache: LayerCache, step: StepMetadata) -> Tensor:
        num_decode_rows = step.num_decode_rows
        out = torch.empty_like(q)
        if num_decode_rows:
            self._decode(q[:num_decode_rows], cache, step, out[:num_decode_rows])
        if step.max_query_len:
            self._prefill(q[num_decode_rows:], cache, step, out[num_decode_rows:])
        return out

    def _decode(self, q: Tensor, cache: LayerCache, step: StepMetadata, out: Tensor) -> None:
        self.ops.decode_attention(
            q,
            cache.cells,
            step.block_tables[cache.group],
            step.decode_slots,
            step.decode_seq_lens,
            self.scale * self.key_scale,
            self.window,
            out=out,
            plans=step.decode_plans,
            value_scale=self.value_scale,
            softcap=self.softcap,
            **self._options,
        )

    def _prefill(self, q: Tensor, cache: LayerCache, step: StepMetadata, out: Tensor) -> None:
        self.ops.prefill_attention(
            q,
            cache.cells,
            step.block_tables[cache.group],
            step.prefill_slots,
            step.prefill_query_start_loc,
            step.prefill_seq_lens,
            self.scale * self.key_scale,
            self.window,
            max_query_len=step.max_query_len,
            out=out,
            value_scale=self.value_scale,
            softcap=self.softcap,
            **self._options,
        )

    def placements(self) -> Iterator[Placement]:
        for part in (self.qkv_proj, self.o_proj, self.q_norm, self.k_norm):
            if part is not None:
                yield from part.placements()
        if self._sinks is not None:
            yield self._sinks


class WholeNormAttention(Attention):
    """q and k are normed before RoPE, each over all of its heads at once."""

    def __init__(self, name: str, spec: AttentionSpec, layer: LayerSpec, parts: AttentionParts, ops: ModelOps) -> None:
        super().__init__(name, spec, layer, parts, ops)
        q_norm, k_norm = parts.q_norm, parts.k_norm
        assert q_norm is not None  # as the specification says
        assert k_norm is not None
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._whole_norms = (
            (slice(0, q_size), q_norm.weight),
            (slice(q_size, q_size + kv_size), k_norm.weight),
        )
        self._whole_eps = q_norm.spec.eps
        self._norm_weights = (None, None, 0.0)  # no head's own

    def __call__(self, qkv: Tensor, cache: LayerCache, step: StepMetadata) -> Tensor:
        for columns, weight in self._whole_norms:
            part = qkv[:, columns]
            self.ops.rms_norm(part, weight, self._whole_eps, out=part, rounds_first=self._rounds_first)
        return super().__call__(qkv, cache, step)


class SharedNormAttention(WholeNormAttention):
    """The same over the heads of a group's devices: their squares are added up before any is normed."""

    def __init__(
        self,
        name: str,
        spec: AttentionSpec,
        layer: LayerSpec,
        parts: AttentionParts,
        ops: ModelOps,
        group: Group,
    ) -> None:
        """spec: of this device's heads."""
        super().__init__(name, spec, layer, parts, ops)
        self.group = group
        # Of each part: what its squares' sum is divided by. A KV head that several devices have is counted so often.
        self._counted = [group.size * heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads)]

    def __call__(self, qkv: Tensor, cache: LayerCache, step: StepMetadata) -> Tensor:
        parts = [qkv[:, columns].float() for columns, _ in self._whole_norms]
        squares = torch.stack([part.square().sum(1) for part in parts], dim=1)  # [num_tokens, 2]
        totals = self.group.sum_rows(squares).unbind(1)
        for part, total, count, (columns, weight) in zip(parts, totals, self._counted, self._whole_norms, strict=True):
            normed = part * (total / count + self._whole_eps).rsqrt().unsqueeze(1)
            if self._rounds_first:
                normed = normed.to(qkv.dtype)
            qkv[:, columns] = (normed * weight).to(qkv.dtype)
        return Attention.__call__(self, qkv, cache, step)


def halves_apart(spec: AttentionSpec) -> Callable[[Tensor], Tensor]:
    """Reorders rows of q and k head by head: dimensions that are turned together come to lie half of them apart.

    Scores stay what they are, as q and k are reordered alike. Rows may be those of a weight, a bias or scales.
    """
    turned = torch.arange(spec.rotary_dim).view(-1, 2).t().flatten()  # 0, 2, 4, ... 1, 3, 5, ...
    order = torch.cat((turned, torch.arange(spec.rotary_dim, spec.head_dim)))

    def reorder(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, spec.head_dim))[:, order].flatten(0, 1)

    return reorder
