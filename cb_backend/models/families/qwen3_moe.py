"""Qwen3 with experts: each head of q and k is normed before RoPE; some layers may be dense; one window or none."""

from __future__ import annotations

from cb_backend.layers.layer_spec import FULL_ATTENTION
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.expert_fields import read_experts, read_sparse_layers
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import (
    num_layers,
    read_attention,
    read_basics,
    read_layers,
    read_mlp,
    read_norm,
    read_window,
)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(
        max_position_embeddings=32_768, num_key_value_heads=4, intermediate_size=6144, moe_intermediate_size=768
    )
    has_bias = reader.get("attention_bias", bool, False)
    norm = read_norm(reader)
    attention = read_attention(reader, has_qkv_bias=has_bias, has_o_bias=has_bias, qk_norm=norm)
    experts = read_experts(
        reader,
        default_experts=128,
        default_top_k=8,
        size_key="moe_intermediate_size",
        renormalise=reader.get("norm_topk_prob", bool, False),
    )
    is_sliding = reader.get("use_sliding_window", bool, False)
    window = read_window(reader, 4096) if is_sliding else FULL_ATTENTION
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=norm,
        ropes=(read_rope(reader, attention.rotary_dim),),
        layers=read_layers(
            reader,
            mlp=read_sparse_layers(reader, experts, read_mlp(reader)),
            windows=[window] * num_layers(reader),
        ),
    )
