"""Qwen3 (dense): each head of q and k is normed before RoPE; biases are optional; some layers may slide."""

from __future__ import annotations

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import (
    read_attention,
    read_basics,
    read_layers,
    read_mlp,
    read_norm,
    read_qwen_windows,
)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=32_768, num_key_value_heads=32)
    has_bias = reader.get("attention_bias", bool, False)
    norm = read_norm(reader)
    attention = read_attention(
        reader,
        default_head_dim=128,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        qk_norm=norm,
    )
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=norm,
        ropes=(read_rope(reader, attention.rotary_dim),),
        layers=read_layers(reader, mlp=read_mlp(reader), windows=read_qwen_windows(reader)),
    )
