"""What a layer of a decoder is, as plain data: sizes and options, no tensors.

`models.spec` puts layers together to a model; `layer_maker` builds what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL_ATTENTION = 0  # a window: the layer sees every earlier token


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """An RMSNorm."""

    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention, the same in every layer of a model but for windows and ropes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # need not be hidden_size / num_heads
    scale: float  # of the scores
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    qk_norm: NormSpec | None = None  # over each head of q and k, before RoPE


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec:
    """The gated feed-forward block."""

    intermediate_size: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one layer has for itself."""

    mlp: MLPSpec
    window: int = FULL_ATTENTION  # newest tokens a query sees, its own included
    rope: int = 0  # which of the model's ropes
